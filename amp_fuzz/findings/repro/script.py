"""Write a finding as a script that imports only torch, for an upstream issue.

Only amp-fuzz itself can run some backends, and only it checks what fake kernels do not: such a
script imports it.

The script exits with 1 if the divergence is there, with 0 if it is not, and with 125 if it cannot
tell: torch or an op is missing, or a different error is raised (``git bisect run`` skips on 125).
It contains the case's source, the helpers that this uses, the inputs as literals, and the
reference's results as constants.
"""

from __future__ import annotations

import ast
import json
import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from amp_fuzz.backends import Backend, control_flow, custom_functions, facts_of, prelude
from amp_fuzz.backends.base import Repros, shadows_of
from amp_fuzz.backends.harness import TRANSFORMS
from amp_fuzz.backends.refusals import ORIGIN
from amp_fuzz.backends.reproducing import source_of
from amp_fuzz.backends.source import driver_source, imports_of
from amp_fuzz.backends.torch_state import torch_state
from amp_fuzz.cases.case import Case
from amp_fuzz.cases.settings import SETTINGS
from amp_fuzz.catalogue import CATALOGUE
from amp_fuzz.config import did_you_mean
from amp_fuzz.findings.repro.parts import PAD, Found, ReproError, Script, head, literal, wrapped
from amp_fuzz.oracle import RELATIONS
from amp_fuzz.oracle.rounding import CONFIRM, THRESHOLD
from amp_fuzz.plugins import loaded
from amp_fuzz.reference.shadow.band import UNIT_ROUNDOFF, leans, unit
from amp_fuzz.reference.shadow.mode import Promise

__all__ = [
    "BITS",
    "HOOK",
    "KINDS",
    "ROUNDED",
    "TIMEOUT",
    "TORCH_IMPORTS",
    "Pieces",
    "ReproError",
    "brief",
    "error_of",
    "excess_of",
    "imports",
    "joined",
    "ours_alone",
    "pieces",
    "repro",
    "split",
]


def repro(case: Case, backend: Backend, finding: Found, *, prefix: str = "") -> str:
    """Return a script that shows a divergence of a case on a backend.

    `finding` belongs to this case; if it was minimised, to the minimised case. The reference runs
    once. `prefix` is source to put before the program, such as a fault that a test seeds. Raises
    `ReproError` if the reference does not reach the place of the finding.
    """
    if ours_alone(backend, finding):
        _kind(finding)
        return _judging(case, backend, finding)
    parts = pieces(case, backend, finding)
    setup = [*parts.setup, parts.configuration]
    code = joined([*setup, prefix, *parts.helpers, *parts.body])
    standard, ours = imports(code)
    code = brief(code, finding)
    return f"{parts.head}\n{standard}\n\n{HOOK}\n{ours}{parts.modules}\n\n{code}\n"


_VALUELESS = (
    *("dtype", "shape", "device", "grad-dtype", "grad-shape", "grad-device", "grad-missing"),
    *("raise", "state", "crash", "timeout"),
)
"""Kinds that no rounding can change."""


def brief(code: str, finding: Found) -> str:
    """Return a script without what it does not need.

    The number of threads decides the last bits of a sum, which not all kinds compare. The device
    needs no name if it is read twice at most.
    """
    if finding.kind in _VALUELESS:
        code = re.sub(r"^torch\.set_num_threads\(\d+\)\n", "", code, flags=re.MULTILINE)
    told = re.match(r'device = (".*")\n', code)
    nodes = list(ast.walk(ast.parse(code)))
    named = (node for node in nodes if isinstance(node, ast.Name) and node.id == "device")
    read = [node for node in named if isinstance(node.ctx, ast.Load)]
    if told is None or len(read) > 2 or any(getattr(n, "arg", "") == "device" for n in nodes):
        return code
    lines = code.splitlines()
    for node in sorted(read, key=lambda n: n.col_offset, reverse=True):
        line = lines[node.lineno - 1]
        lines[node.lineno - 1] = line[: node.col_offset] + told[1] + line[node.end_col_offset :]
    return "\n".join(lines[1:]).lstrip("\n")


def ours_alone(backend: Backend, finding: Found) -> bool:
    """Return whether only amp-fuzz can show a finding.

    It fills a compiler's caches, and a fake device refuses what torch's fake kernels accept.
    """
    if not isinstance(backend, Repros) or not facts_of(backend).scripts:
        return True
    return ORIGIN in f"{finding.expected} {finding.observed}"


def _judging(case: Case, backend: Backend, finding: Found) -> str:
    """Return a script that judges a case with amp-fuzz, if only amp-fuzz can run the backend."""
    installs = facts_of(backend).installs
    package = "" if isinstance(backend, Repros) else f", and the package of {backend.name}"
    needs = f"pip install '{installs}'" if installs else f"amp-fuzz{package}"
    modules = "".join(f"import {module}\n" for module in _modules(case))
    return (
        f"{head(case, backend, finding)}\n# needs: {needs}\nimport sys\n\n{HOOK}\n{modules}"
        "from amp_fuzz.backends import backends\nfrom amp_fuzz.backends.harness import quiet\n"
        "from amp_fuzz.cases.case import loads\nfrom amp_fuzz.upstream.explain import judge_of\n\n"
        f"case = loads({case.json().decode()!r})\nwith quiet():\n"
        f'{PAD}found = judge_of(backends()["{backend.name}"]).judge(case).divergence\n'
        'print(case, found or "agrees", sep="\\n")\n'
        f'sys.exit(0 if found is None else 1 if found.kind == "{finding.kind}" else 125)\n'
    )


@dataclass(frozen=True, slots=True)
class Pieces:
    """The pieces of a repro: source, except for `head`, a comment.

    setup: of torch and of fake devices. configuration: of a compiler, or "". helpers: functions
    that the body uses. body: inputs, expected results, program, driver, and the comparison; it ends
    in `sys.exit`. modules: imports of the user's own ops, each after a newline. cleanup: lines that
    remove what a run leaves behind.
    """

    head: str
    setup: tuple[str, ...]
    configuration: str
    helpers: tuple[str, ...]
    body: tuple[str, ...]
    modules: str
    cleanup: tuple[str, ...]


def pieces(
    case: Case, backend: Backend, finding: Found, *, kinds: Mapping[str, Kind] | None = None
) -> Pieces:
    """Return the pieces of a repro, whose bodies `kinds` writes. Raises `ReproError`."""
    if ours_alone(backend, finding):
        raise ReproError(f"only amp-fuzz can run {backend.name}: use --format=script")
    assert isinstance(backend, Repros)
    script = Script(case, backend, finding, backend)
    body = (kinds or KINDS)[_kind(finding)](script)
    if not backend.values:
        body = [part.replace(_VALUES, "") for part in body]
    cleanup = tuple(backend.cleanup())
    if case.plan.deterministic:
        body.insert(0, _WORKSPACE + _DETERMINISTIC if backend.device == "cuda" else _DETERMINISTIC)
        cleanup = (*cleanup, "torch.use_deterministic_algorithms(False)")
    chosen = [SETTINGS[line] for line in case.plan.settings]
    body = [*(setting.line for setting in chosen), *body]
    whole = joined(body)
    return Pieces(
        head(case, backend, finding),
        tuple(backend.setup(_names(whole))),
        backend.configuration(case),
        tuple(_helpers(whole)),
        tuple(body),
        "".join(f"\nimport {module}" for module in _modules(case)),
        cleanup,
    )


_DETERMINISTIC = "torch.use_deterministic_algorithms(True)"
_WORKSPACE = 'os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it\n'


def _kind(finding: Found) -> str:
    """Return the kind of a finding. Raises `ReproError` for an unknown kind, from a file."""
    if finding.kind in KINDS:
        return finding.kind
    hint = did_you_mean(finding.kind, KINDS) or f": use {', '.join(KINDS)}"
    raise ReproError(f"$.kind={finding.kind!r} is not a kind of divergence{hint}")


def _modules(case: Case) -> tuple[str, ...]:
    """Return the modules that a case needs: those of its ops, and plugins that register no op.

    Such a plugin is assumed to change torch.
    """
    register = {op.build.__module__ for op in CATALOGUE.values()}
    changing = [
        name
        for name in loaded()
        if not any(module == name or module.startswith(f"{name}.") for module in register)
    ]
    return tuple(dict.fromkeys([*changing, *imports_of(case.program)]))


def joined(parts: list[str]) -> str:
    """Join parts of a script: two empty lines around functions and classes, one elsewhere."""
    text = ""
    for part in filter(None, (p.strip("\n") for p in parts)):
        outermost = [line for line in text.splitlines() if line and not line.startswith(PAD)]
        after_one = bool(outermost) and outermost[-1].startswith(("def ", "class "))
        before_one = re.match(r"([#@].*\n)*(def|class) ", part) is not None
        text += ("\n\n\n" if after_one or before_one else "\n\n") + part
    return text.strip("\n")


# -- before the program ---------------------------------------------------------------------------

_STANDARD = (
    "contextlib",
    "ctypes",
    "functools",
    "logging",
    "multiprocessing",
    "os",
    "subprocess",
    "sys",
    "tempfile",
    "threading",
    "traceback",
    "unittest",
    "warnings",
)
_IMPORTS: Mapping[str, str] = {
    **{name: f"import {name}" for name in _STANDARD},
    "BytesIO": "from io import BytesIO",
    "contextmanager": "from contextlib import contextmanager",
    "zip_longest": "from itertools import zip_longest",
    "inf": "from math import inf",
    "nan": "from math import nan",
    "dataclass": "from dataclasses import dataclass",
    "Path": "from pathlib import Path",
    "Any": "from typing import Any",
}
TORCH_IMPORTS: Mapping[str, str] = {
    "autocast": "from torch import autocast",
    "FakeTensorMode": "from torch._subclasses.fake_tensor import FakeTensorMode",
    "custom_bwd": "from torch.amp import custom_bwd",
    "custom_fwd": "from torch.amp import custom_fwd",
    "custom_op": "from torch.library import custom_op",
    **{name: f"from torch.func import {name}" for name in TRANSFORMS},
    "once_differentiable": "from torch.autograd.function import once_differentiable",
    "checkpoint": "from torch.utils.checkpoint import checkpoint",
    "associative_scan": "from torch._higher_order_ops.associative_scan import associative_scan",
    "cond": "from torch import cond",
    "hop_map": "from torch._higher_order_ops.map import map as hop_map",
    "scan": "from torch._higher_order_ops.scan import scan",
    "while_loop": "from torch._higher_order_ops.while_loop import while_loop",
}


def imports(code: str) -> tuple[str, str]:
    """Return the imports that code needs: the standard library's, and torch's."""
    used = _names(code)
    named = (ast.ClassDef, ast.FunctionDef)
    defined = {node.name for node in ast.parse(code).body if isinstance(node, named)}
    standard = [line for name, line in _IMPORTS.items() if name in used]
    ours = [line for name, line in TORCH_IMPORTS.items() if name in used - defined]
    return "\n".join(standard), "\n".join(["import torch", *ours])


def _names(code: str) -> set[str]:
    """Return the names that code reads; comments and docstrings do not count."""
    return {node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}


_HELPING = (prelude, custom_functions, control_flow)


def _helpers(body: str) -> list[str]:
    """Return the source of the helpers that a body uses, and that these use."""
    ours = {name: getattr(module, name) for module in _HELPING for name in module.__all__}
    ours["torch_state"] = torch_state
    found: dict[str, str] = {}
    wanted = _names(body)
    while missing := (wanted & ours.keys()) - found.keys():
        for name in missing:
            found[name] = source_of(ours[name])
            wanted |= _names(found[name])
    return [found[name] for name in ours if name in found]


# -- one function a kind --------------------------------------------------------------------------


def _type(script: Script) -> list[str]:
    """Compare the dtype, the shape, or whether there is a gradient at all."""
    label, kind = script.finding.where, script.finding.kind
    want = script.value(label)
    if kind.endswith("missing"):
        expected = "None" if want is None else "a gradient"
        sides = f'"{expected}", "None" if value is None else "a gradient"'
    elif want is None:
        raise ReproError(f"case {script.case.id}: the reference has no gradient at {label!r}")
    elif kind.endswith("dtype"):
        sides = f"{want.dtype}, value.dtype"
    elif kind.endswith("device"):
        sides = f'"{script.expected.devices[label]}", value.device.type'
    else:
        sides = f"{list(want.shape)}, list(value.shape)"
    plain = script.plain("value", label)
    return [script.inputs(), *plain, f"expected, observed = {sides}\n{_VERDICT}"]


def _bits(script: Script) -> list[str]:
    """Compare values with what the reference computed, as literals."""
    label = script.finding.where
    want = script.value(label)
    if want is None:
        raise ReproError(f"case {script.case.id}: the reference has no gradient at {label!r}")
    origin = f"# As torch {torch.__version__} computes it here; {BITS}.\n"
    constant = origin + wrapped(f"expected = {literal(want)}")
    main = _COMPARED
    if not script.backend.exact and script.finding.kind.endswith(("nonfinite", "range")):
        # Its finite values may round differently.
        constant = wrapped(f"expected = {literal(torch.where(want.isfinite(), 0, want))}")
        main = f"observed = torch.where(observed.isfinite(), 0, observed)\n{main}"
    return [_DIFFERS, script.inputs(), constant, *script.plain("observed", label), main]


def _rounding(script: Script) -> list[str]:
    """Compare values with the rounding band: its centre and unit, as literals."""
    label = script.finding.where
    reference = shadows_of(script.backend)
    promised = script.finding.kind == "precision"
    promise: Promise = reference.promise if promised else "none"
    _, bands = reference.shadowed(script.case, CONFIRM, CONFIRM, promise=promise)
    if label not in bands:
        raise ReproError(f"case {script.case.id}: the reference observes nothing at {label!r}")
    band = bands[label]
    if band.nominal.dtype not in UNIT_ROUNDOFF:
        return _bits(script)  # integers and bool do not round
    centre = torch.view_as_real(band.clean) if band.clean.is_complex() else band.clean
    constants = (
        f"# The float64 result, and the unit of rounding ({CONFIRM} perturbed runs).\n"
        + wrapped(f"expected = {literal(centre)}")
        + "\n"
        + wrapped(f"unit = {literal(unit(band))}")
    )
    plain, signed = leans(band)
    main = _AWAY.format(threshold=THRESHOLD, plain=plain, signed=signed)
    if excess_of(script.finding.observed) > THRESHOLD:
        judged = centre.isfinite() & unit(band).isfinite() & (unit(band) > 0)
        mask = "" if bool(judged.all()) else _JUDGED
        main = _VIEWED * band.clean.is_complex() + _FAR.format(mask=mask, threshold=THRESHOLD)
    if promised:
        constants = constants.replace("# The float64 result", f"# {ROUNDED[promise]}")
    return [script.inputs(), constants, *script.plain("observed", label), main]


def excess_of(observed: str) -> float:
    """Return the largest excess that a finding tells, or 0."""
    told = re.search(r"excess ([\d.]+(?:e[+-]\d+)?|inf)\b", observed)
    return float(told[1]) if told else 0.0


ROUNDED: Mapping[Promise, str] = {
    "none": "The float64 result",
    "written": "The float64 result where each cast of the program rounds",
    "all": "The float64 result where each 16-bit result is rounded",
}


def _range(script: Script) -> list[str]:
    """Compare which values are finite; if these agree, compare the finite values."""
    return (_rounding if "excess" in script.finding.observed else _bits)(script)


def _raise(script: Script) -> list[str]:
    """Compare which error is raised, and at which line if both sides raise the same one."""
    expected, (kind, _) = script.finding.expected, error_of(script.finding.observed)
    if not kind or error_of(expected)[0] != kind:
        *program, body = script.plain("")
        return [script.inputs(), *program, _raising(script, expected, body)]
    error = script.expected.raised
    if error is None:
        raise ReproError(f"case {script.case.id}: the reference raises nothing: replay it")
    main = _raising(script, expected, script.call(), error.text)
    return [_LINE_OF, script.inputs(), *script.source(), main]


def _raising(script: Script, expected: str, body: str, line: str | None = None) -> str:
    """Return source that tells the finding's error from the expected one, and from all others."""
    shown = expected if line is None else f"{expected} at {line}"
    comment, body = split(body)
    return comment + (_RAISED if line is None else _RAISED_AT).format(
        call=textwrap.indent(body, PAD).lstrip(),
        expected=json.dumps(shown),
        line=json.dumps(line),
        right=_is(expected),
        wrong=_is(script.finding.observed),
    )


def split(body: str) -> tuple[str, str]:
    """Return the comment on top of lines, and the other lines."""
    comment = re.match(r"(#.*\n)*", body)
    assert comment is not None
    return comment[0], body[comment.end() :]


def error_of(text: str) -> tuple[str, str]:
    """Return the class of an error and stable words of its message; "" if it is no error.

    Numbers, shapes and quoted text change between versions and machines.
    """
    kind, colon, message = text.partition(": ")
    if not colon or not kind.isidentifier():
        return "", ""
    parts = re.split(r"[\d.]+|\[.*?\]|'.*?'|\".*?\"", " ".join(message.split()))
    longest = max((part.strip() for part in parts), key=len)
    return kind, longest if len(longest) <= _WORDS else longest[:_WORDS].rpartition(" ")[0]


_WORDS = 40


def _is(text: str) -> str:
    """Return a condition: whether a script observed that error, or no error."""
    kind, words = error_of(text)
    if not kind:
        return 'observed == "no error"'
    starts = f"observed.startswith({json.dumps(kind + ':')})"
    return f"{starts} and {json.dumps(words)} in observed" if words else starts


def _state(script: Script) -> list[str]:
    """Compare autocast's state before and after.

    An error that leaves no other state than before is not the finding's.
    """
    call, error = script.call(), script.expected.raised
    when = [f"type(error).__name__ != {error.kind!r}"] if error is not None else []
    if script.finding.where == "after an error":
        when.append("torch_state(device) == expected")
    if when:
        call = _TRIED.format(call=call, when=" and ".join(when))
    return [script.inputs(), *script.source(), _STATE.format(call=call) + _VERDICT]


def _relation(script: Script) -> list[str]:
    """Compare two values of one run, or two equivalent variants of the case."""
    name, _, where = script.finding.where.partition(": ")
    if name not in RELATIONS:
        first = where.replace("call1.", "call0.").replace("again.", "")
        if not (_labels(script, first) and _labels(script, where)) or first == where:
            raise ReproError(f"$.where={script.finding.where!r} is not a relation of the case")
        main = _CALL.format(target="expected, observed", call=script.call()) + _COMPARED
        return [_DIFFERS, script.inputs(), *script.source(first, where), main]
    pair = RELATIONS[name].pair(script.case)
    if pair is None:
        raise ReproError(f"case {script.case.id}: the relation {name!r} does not apply to its plan")
    if RELATIONS[name].together:
        main = _raising(script, "no error", script.call())
        return [script.inputs(), *script.source(), main]
    meaning = " ".join((RELATIONS[name].pair.__doc__ or "").split())
    parts = [f"# {name}: {meaning}"]
    for side, variant in zip(("expected", "observed"), pair, strict=True):
        program, driver = replace(script, case=variant).source(*_labels(script, where))
        if side == "expected" or pair[0].program != pair[1].program:
            parts.append(program)
        parts += [driver, f"{side} = outcome(drive)"]
    return [_DIFFERS, _outcome(script, where), script.fresh_inputs(), *parts, _COMPARED]


def _nondeterminism(script: Script) -> list[str]:
    """Compare a run with further runs."""
    where = script.finding.where.rpartition(": ")[2]
    main = _REPEATED.format(runs=RUNS)
    source = script.source(*_labels(script, where))
    return [_DIFFERS, _outcome(script, where), script.fresh_inputs(), *source, main]


def _outcome(script: Script, where: str) -> str:
    """Return a function that runs the case; the errors of the finding count as outcomes."""
    call, found = script.call("*inputs()"), script.finding
    kinds = () if _labels(script, where) else map(error_of, (found.expected, found.observed))
    if names := sorted({kind for kind, _ in kinds if kind}):
        return _OUTCOME_OR_ERROR.format(call=call, names=names)
    return _OUTCOME.format(call=call)


def _labels(script: Script, where: str) -> tuple[str, ...]:
    """Return the label if it is one; an error is named by its line instead."""
    return (where,) if f'observe("{where}", ' in driver_source(script.case) else ()


def _death(script: Script) -> list[str]:
    """Run the case in a child process, and check whether it dies or hangs."""
    child = _CHILD.format(call=script.call())
    main = _HUNG
    if script.finding.kind == "crash":
        # SIGKILL (9) may mean that memory ran out: unless the finding has it, it proves nothing.
        codes = {0: 0, 125: 125} | ({} if "SIGKILL" in script.finding.observed else {-9: 125})
        main = _DIED.replace("{codes}", "{" + str(codes) + "}")
    return [script.inputs(), *script.source(), child, main.format(timeout=TIMEOUT)]


Kind: TypeAlias = Callable[[Script], list[str]]
"""Writes the body of a script of one kind of divergence."""

KINDS: Mapping[str, Kind] = {
    **dict.fromkeys(("dtype", "shape", "device"), _type),
    **dict.fromkeys(("grad-dtype", "grad-shape", "grad-device", "grad-missing"), _type),
    **dict.fromkeys(("bitwise", "nonfinite", "grad-bitwise", "grad-nonfinite"), _bits),
    **dict.fromkeys(("value", "grad-value", "precision"), _rounding),
    "range": _range,
    **dict.fromkeys(("crash", "timeout"), _death),
    "raise": _raise,
    "state": _state,
    "relation": _relation,
    "nondeterminism": _nondeterminism,
}

BITS = "another CPU may round differently"
"""Part of the comment in a script that compares bits."""
RUNS = 20
TIMEOUT = 120

# -- the ends of scripts --------------------------------------------------------------------------

# Goes before the first import that may fail. An uncaught error would exit with 1.
HOOK = """\
# `git bisect run` skips what exits with 125: another error than the finding's.
sys.excepthook = lambda t, *e: sys.__excepthook__(t, *e) or sys.exit(\
130 if t is KeyboardInterrupt else 125)
"""

_VERDICT = """\
print("torch", torch.__version__, "expected:", expected, "observed:", observed)
sys.exit(observed != expected)
"""

_COMPARED = """\
print("torch:", torch.__version__)
sys.exit(differs(expected, observed))
"""

_CALL = "{target} = {call}\n"

_AWAY = """\
observed = torch.view_as_real(observed) if observed.is_complex() else observed
away = (observed.detach().double() - expected) / unit
away = torch.where(expected.isfinite() & unit.isfinite() & (unit > 0), away, 0.0)
away = away.nan_to_num(nan=float("inf"))
print("torch:", torch.__version__)
print("expected:", expected.flatten()[:8].tolist())
print("observed:", observed.flatten()[:8].tolist())
# If errors have one sign, the mean shows more than one element. Perturbed runs have means too.
counts = expected.unique(return_counts=True)[1]  # equal elements are rounded alike
few = float((counts / away.numel()).square().sum().sqrt())
bias = away.mean().abs() / ({plain} + few)
bias = max(bias, (away * expected.sign()).mean().abs() / ({signed} + few))
print("off by", float(away.abs().max()), "units at most, by", float(bias), "on the whole")
sys.exit(bool(away.abs().max() > {threshold} or bias > {threshold}))
"""

# Where one element is too far off, no mean is needed.
_FAR = """\
away = ((observed.detach().double() - expected) / unit).abs()
{mask}away = float(away.nan_to_num(nan=float("inf")).max())
print("torch", torch.__version__, "expected:", expected.flatten()[:8].tolist())
print("observed:", observed.flatten()[:8].tolist(), "off by", away, "units of rounding")
sys.exit(away > {threshold})
"""
_VIEWED = "observed = torch.view_as_real(observed)\n"
_JUDGED = "away = torch.where(expected.isfinite() & unit.isfinite() & (unit > 0), away, 0.0)\n"

_RAISED = """\
observed = "no error"
try:
    {call}
except Exception as error:
    observed = " ".join(f"{{type(error).__name__}}: {{error}}".split())
print("torch", torch.__version__, "expected:", {expected}, "observed:", observed[:300])
right = {right}
wrong = {wrong}
sys.exit(0 if right else 1 if wrong else 125)
"""

_RAISED_AT = """\
observed, line = "no error", ""
try:
    {call}
except Exception as error:
    observed = " ".join(f"{{type(error).__name__}}: {{error}}".split())
    line = line_of(error)
print("torch:   ", torch.__version__)
print("expected:", {expected})
print("observed:", observed[:300], "at", line)
right = {right} and line == {line}
wrong = {wrong} and not right
sys.exit(0 if right else 1 if wrong else 125)
"""

_STATE = """\
expected = torch_state(device)
{call}
observed = torch_state(device)
"""

_TRIED = """\
try:
    {call}
except Exception as error:
    if {when}:
        raise
    print("raised:  ", error)"""

_REPEATED = """\
results = [outcome(drive) for _ in range({runs})]
print("torch:", torch.__version__)
sys.exit(any(differs(results[0], result) for result in results[1:]))
"""

_CHILD = """\
if sys.argv[1:] == ["child"]:
    try:
        {call}
    except (RuntimeError, ValueError, IndexError) as error:  # an answer too
        print("raised:  ", error)
    sys.exit(0)
"""

_DIED = """\
child = subprocess.run([sys.executable, __file__, "child"], timeout={timeout})
print("torch:   ", torch.__version__)
print("expected: exit code 0")
print("observed: exit code", child.returncode)  # negative: the signal that killed it
sys.exit({codes}.get(child.returncode, 1))
"""

_HUNG = """\
print("torch:   ", torch.__version__)
print("expected: an answer")
try:
    child = subprocess.run([sys.executable, __file__, "child"], timeout={timeout})
except subprocess.TimeoutExpired:
    print("observed: no answer for {timeout} s")
    sys.exit(1)
sys.exit(0 if child.returncode == 0 else 125)  # 125: it died, or cannot be run
"""

_LINE_OF = """\
def line_of(error):
    \"""Return the line of the program or its driver that raised.\"""
    frames = traceback.extract_tb(error.__traceback__)
    return [f.line for f in frames if f.name.startswith(("program", "drive", "block"))][-1]
"""

_OUTCOME = """\
def outcome(drive):
    return {call}
"""

_OUTCOME_OR_ERROR = """\
def outcome(drive):
    \"""Return the observed values, or the name of an expected error.\"""
    try:
        return {call}
    except Exception as error:
        if type(error).__name__ not in {names}:
            raise
        return type(error).__name__
"""

_VALUES = ", *value.flatten().tolist()"

_DIFFERS = f"""\
def contents(value):
    if not isinstance(value, torch.Tensor):
        return [value]
    return [value.dtype, list(value.shape){_VALUES}]


def differs(expected, observed):
    \"""Print where two results differ in a bit; NaN equals NaN.\"""
    pairs = list(zip_longest(contents(expected), contents(observed)))
    wrong = [(a, b) for a, b in pairs if repr(a) != repr(b)]
    for a, b in wrong[:4]:
        print(f"expected {{a}}, observed {{b}}")
    print(len(wrong), "differences")
    return bool(wrong)
"""
