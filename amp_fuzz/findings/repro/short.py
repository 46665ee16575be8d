"""Write a finding as the script that a person would have written: the least plain torch.

It compares one thing: one dtype, one element, one error, one part of torch's state. Which element,
and how far it may be off, follows from what the reference and its perturbed runs computed here. So
the script exits with 0 on a torch without the bug. Where one element cannot tell, it compares all
that `amp_fuzz.findings.repro.script` does.
"""

from __future__ import annotations

import builtins
import json
import math
import re
from collections.abc import Callable, Mapping

import torch

from amp_fuzz.backends import Backend
from amp_fuzz.backends.base import Shortens, shadows_of
from amp_fuzz.cases.case import Case
from amp_fuzz.findings.repro import script as full
from amp_fuzz.findings.repro.parts import PAD, Found, ReproError, Script
from amp_fuzz.findings.repro.plain import plain
from amp_fuzz.oracle.rounding import CONFIRM, THRESHOLD
from amp_fuzz.reference.shadow.band import UNIT_ROUNDOFF, unit

__all__ = ["WHOLE", "short"]


def short(
    case: Case, backend: Backend, finding: Found, *, prefix: str = "", named: str = ""
) -> str:
    """Return a short script that shows a divergence of a case on a backend.

    named: the id of the case that was found, if this one is simpler. The other arguments, the
    errors and the exit codes are those of `amp_fuzz.findings.repro.script.repro`.
    """
    if full.ours_alone(backend, finding) or finding.kind in WHOLE:
        return full.repro(case, backend, finding, prefix=prefix)
    parts = full.pieces(case, backend, finding, kinds=_KINDS)
    configuration = parts.configuration
    if _forward(finding):
        configuration = re.sub(_OF_BACKWARD, "", configuration, flags=re.MULTILINE)
    if all(line.startswith("import ") for line in configuration.splitlines()):
        configuration = ""
    setup = [*parts.setup, configuration]
    code = full.joined([*setup, prefix, *parts.helpers, *parts.body])
    if finding.kind in ("value", "grad-value", "precision") and "\nobserved = value" in code:
        code = re.sub(r"torch\.set_num_threads\(\d+\)\n", "", code)  # a sum's last bits are allowed
    if isinstance(backend, Shortens):
        code = backend.short(code)
    code = plain(full.brief(code, finding))
    standard, ours = full.imports(f"sys\n{code}")
    head = parts.head.replace(case.id, named or case.id, 1)
    gap = "\n" * bool(re.match(r"(#.*\n)*(def |class |@)", code))
    return f"{head}\n{standard}\n\n{full.HOOK}\n{ours}{parts.modules}\n\n{gap}{code}\n"


_OF_BACKWARD = r"^torch\._functorch\.config\.(backward_pass_autocast|donated_buffer) = .*\n?"

WHOLE = ("relation", "nondeterminism", "crash", "timeout")
"""Kinds that are told by several runs."""


def _forward(finding: Found) -> bool:
    """Return whether a finding is about a result, which no backward pass can change."""
    kinds = (*("dtype", "shape", "device", "value", "bitwise", "nonfinite"), "precision", "range")
    return finding.kind in kinds and not finding.where.endswith((".grad", ".updated"))


# -- one function a kind --------------------------------------------------------------------------

_SEEN = 'print("torch", torch.__version__, "expected:", {expected}, "observed:", {observed})\n'


def _type(script: Script) -> list[str]:
    """Compare the dtype, the shape, the device, or whether there is a gradient at all."""
    label, kind = script.finding.where, script.finding.kind
    want = script.value(label)
    if kind.endswith("missing"):
        expected, observed = '"None"' if want is None else '"a gradient"', "value"
        wrong = f"value is {'not ' * (want is None)}None"
    elif want is None:
        raise ReproError(f"case {script.case.id}: the reference has no gradient at {label!r}")
    else:
        expected, observed = {
            "dtype": (str(want.dtype), "value.dtype"),
            "device": (f'"{script.expected.devices[label]}"', "value.device.type"),
        }.get(kind.removeprefix("grad-"), (str(list(want.shape)), "list(value.shape)"))
        wrong = f"{observed} != {expected}"
    verdict = _SEEN.format(expected=expected, observed=observed) + f"sys.exit({wrong})"
    return [script.inputs(), *script.plain("value", label), verdict]


def _index(script: Script, want: torch.Tensor) -> tuple[int, ...] | None:
    """Return which element a finding names, or None."""
    told = re.search(r" at \[([\d, ]*)\]", script.finding.expected)
    if told is None:
        return None
    index = tuple(map(int, told[1].split(", "))) if told[1] else ()
    shape = want.shape
    inside = len(index) == len(shape) and all(i < n for i, n in zip(index, shape, strict=True))
    return index if inside else None


def _number(index: tuple[int, ...], *, of_complex: bool) -> str:
    """Return the source of the observed number at an index."""
    value = "torch.view_as_real(value)" if of_complex else "value"
    at = f"[{', '.join(map(str, index))}]" if index else ""
    return f"{value}{at}.item()"


def _bits(script: Script) -> list[str]:
    """Compare the first element that differs in a bit."""
    label = script.finding.where
    want = script.value(label)
    if want is None:
        raise ReproError(f"case {script.case.id}: the reference has no gradient at {label!r}")
    numbers = torch.view_as_real(want.resolve_conj()) if want.is_complex() else want
    index = _index(script, numbers)
    if index is None:
        return full.KINDS[script.finding.kind](script)
    expected = numbers[index].item()
    observed = _number(index, of_complex=want.is_complex())
    text = json.dumps(repr(expected)) if expected in (0, -0.0) or expected != expected else ""
    text = text or (json.dumps(str(expected)) if expected in (math.inf, -math.inf) else "")
    wrong = f"repr(observed) != {text}" if text else f"observed != {expected!r}"
    finite = math.isfinite(expected)
    if not script.backend.exact and script.finding.kind.endswith(("nonfinite", "range")):
        # Its finite values may round differently.
        if finite == math.isfinite(_first(script.finding.observed)):
            return full.KINDS[script.finding.kind](script)
        wrong = "not abs(observed) < inf" if finite else wrong
    rounds = finite and want.dtype in UNIT_ROUNDOFF
    origin = f"# As torch {torch.__version__} computes it here; {full.BITS}.\n" * rounds
    seen = _SEEN.format(expected=text or repr(expected), observed="observed")
    verdict = f"{origin}observed = {observed}\n{seen}sys.exit({wrong})"
    return [script.inputs(), *script.plain("value", label), verdict]


def _first(text: str) -> float:
    """Return the number at the start of a text, or 0."""
    told = re.match(r"[-+]?(?:[\d.]+(?:e[+-]?\d+)?|inf|nan)", text)
    return float(told[0]) if told else 0.0


def _rounding(script: Script) -> list[str]:
    """Compare the element that is off the most, if it is far further off than rounding explains."""
    label, kind = script.finding.where, script.finding.kind
    reference = shadows_of(script.backend)
    promise = reference.promise if kind == "precision" else "none"
    _, bands = reference.shadowed(script.case, CONFIRM, CONFIRM, promise=promise)
    band = bands.get(label)
    if band is None or band.nominal.dtype not in UNIT_ROUNDOFF:
        return _bits(script) if band is not None else full.KINDS[kind](script)
    numbers = torch.view_as_real(band.clean) if band.clean.is_complex() else band.clean
    index = _index(script, numbers)
    if index is None:
        return full.KINDS[kind](script)
    expected, one = float(numbers[index]), float(unit(band)[index])
    allowed, off = THRESHOLD * one, full.excess_of(script.finding.observed) * one
    most = _round(math.sqrt(allowed * min(off, 1e6 * allowed)))
    if not (math.isfinite(expected) and 0 < allowed < most < off):
        return full.KINDS[kind](script)
    digits = max(0, math.ceil(-math.log10(allowed)) + 1)
    shown = repr(round(expected, digits)) if digits < 12 else repr(expected)
    observed = _number(index, of_complex=band.clean.is_complex())
    seen = _SEEN.format(expected=shown, observed="observed")
    # A NaN is further away than any number.
    verdict = f"observed = {observed}\n{seen}sys.exit(not abs(observed - {shown}) < {most})"
    verdict = f"# {full.ROUNDED[promise]}; rounding explains {allowed:.1g}.\n{verdict}"
    return [script.inputs(), *script.plain("value", label), verdict.replace("- -", "+ ")]


def _round(number: float) -> float:
    """Return a number with two digits."""
    return float(f"{number:.1e}") if math.isfinite(number) else number


def _range(script: Script) -> list[str]:
    """Compare an element that leaves the range; if none does, one that is far off."""
    return (_rounding if "excess" in script.finding.observed else _bits)(script)


def _raise(script: Script) -> list[str]:
    """Compare which error is raised."""
    expected, observed = script.finding.expected, script.finding.observed
    (kind, words), (wanted, right) = full.error_of(observed), full.error_of(expected)
    if kind == wanted:
        return full.KINDS["raise"](script)
    *program, body = script.plain("")
    comment, body = full.split(body)
    if not wanted:
        seen = _SEEN.format(expected='"no error"', observed="repr(error)[:300]")
        lines = f"{_caught(body, kind)}{_indented(f'{seen}sys.exit({_code(words, 1)})')}"
    elif not kind:
        seen = _SEEN.format(expected=json.dumps(expected), observed='"no error"')
        lines = f"{_caught(body, wanted)}{PAD}sys.exit({_code(right, 0)})\n{seen}sys.exit(1)"
    else:
        seen = _SEEN.format(expected=json.dumps(expected), observed="observed")
        is_right, is_wrong = _told(wanted, right), _told(kind, words)
        tail = (
            f'observed = f"{{type(error).__name__}}: {{error}}"\n{seen}'
            f"sys.exit(0 if {is_right} else 1 if {is_wrong} else 125)"
        )
        lines = f"{_caught(body, '')}{_indented(tail)}\nsys.exit(125)"
    return [script.inputs(), *program, comment + lines]


def _caught(body: str, kind: str) -> str:
    """Return lines that run a body, and the head of what handles an error of a kind."""
    builtin = isinstance(getattr(builtins, kind, None), type)
    name = kind if builtin else "Exception"
    return f"try:\n{_indented(body)}\nexcept {name} as error:\n"


def _told(kind: str, words: str) -> str:
    """Return a condition: the observed error is of a kind and has words."""
    told = f"{json.dumps(f'{kind}:')} in observed"
    return f"{told} and {json.dumps(words)} in observed" if words else told


def _code(words: str, code: int) -> str:
    return f"{code} if {json.dumps(words)} in str(error) else 125" if words else str(code)


def _indented(text: str) -> str:
    return "\n".join(PAD + line if line else line for line in text.splitlines())


_STATE: Mapping[str, str] = {
    "nesting": "torch.autocast_increment_nesting() + torch.autocast_decrement_nesting()",
    "weight cache": "torch.is_autocast_cache_enabled()",
    "grad mode": "torch.is_grad_enabled()",
    "inference mode": "torch.is_inference_mode_enabled()",
    "dispatch modes": "torch._C._len_torch_dispatch_stack()",
    "dispatch keys": "str(torch._C._dispatch_tls_local_include_set())",
}


def _read(name: str) -> str:
    """Return the source that reads a part of torch's state, or ""."""
    if match := re.fullmatch(r"(autocast|its dtype) on (\w+)", name):
        function = "is_autocast_enabled" if match[1] == "autocast" else "get_autocast_dtype"
        return f'torch.{function}("{match[2]}")'
    return _STATE.get(name, "")


def _state(script: Script) -> list[str]:
    """Compare the part of torch's state that is not as before."""
    names = re.findall(r"(?:^|; )([\w ]+): ", script.finding.observed)
    found = next(filter(None, map(_read, names)), "")
    if not found or script.case.plan.thread == "whole":
        return full.KINDS["state"](script)
    *program, body = script.plain("")
    comment, body = full.split(body)
    error = script.expected.raised
    if script.finding.where == "after an error":
        body = f"with contextlib.suppress(Exception):\n{_indented(body)}"
    elif error is not None:
        return full.KINDS["state"](script)
    verdict = _SEEN.format(expected="before", observed=found) + f"sys.exit({found} != before)"
    return [script.inputs(), *program, f"{comment}before = {found}\n{body}", verdict]


_KINDS: Mapping[str, Callable[[Script], list[str]]] = {
    **dict.fromkeys(("dtype", "shape", "device"), _type),
    **dict.fromkeys(("grad-dtype", "grad-shape", "grad-device", "grad-missing"), _type),
    **dict.fromkeys(("bitwise", "nonfinite", "grad-bitwise", "grad-nonfinite"), _bits),
    **dict.fromkeys(("value", "grad-value", "precision"), _rounding),
    "range": _range,
    "raise": _raise,
    "state": _state,
}
