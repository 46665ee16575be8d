"""Write a finding as the text of a GitHub issue: the title, then what GitHub's form asks for.

Nothing here runs the case; `amp_fuzz.findings.diagnosis` did.
"""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sys
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from amp_fuzz.backends import Backend, facts_of
from amp_fuzz.backends.base import documentation
from amp_fuzz.backends.source import argument, program_source
from amp_fuzz.cases.case import Case, unbroken
from amp_fuzz.cases.program import Autocast, regions, show_context, statements
from amp_fuzz.catalogue import CATALOGUE
from amp_fuzz.findings.diagnosis import Examined
from amp_fuzz.oracle import RELATIONS
from amp_fuzz.oracle.rounding import CONFIRM, THRESHOLD
from amp_fuzz.policies.tables import DEVICES, PolicyTable, Rule, load_table
from amp_fuzz.records.schema import OWN, DivergenceRecord, listed
from amp_fuzz.upstream.known import Known

__all__ = ["issue", "title"]

_AMP = documentation("amp.html")
_FILE = "https://github.com/pytorch/pytorch/blob/v{version}/{path}"

_MEANING: Mapping[str, str] = {
    "lower_precision_fp": "casts every floating-point argument but float64 to the autocast dtype",
    "fp32": "casts every floating-point argument but float64 to float32",
    "fp32_set_opt_dtype": "casts nothing, and computes in float32 unless the call names a dtype",
    "fp32_append_dtype": "casts nothing, and calls the overload that computes in float32",
    "promote": "casts the arguments to the widest floating-point dtype among them",
    "cast_inputs": "casts every floating-point argument but float64 to the registered dtype",
    "banned": "raises RuntimeError, and says what to use instead",
}


_REPRODUCE = (
    "**To reproduce.** The script imports only {modules}. It exits with 1 if the bug is there, "
    "with 0 if it is not, and with 125 if it cannot tell (for `git bisect run`)."
)


def _reproduce(script: str) -> str:
    """Say what a script imports, apart from the standard library, and its exit codes."""
    found = {"torch"}
    for node in ast.walk(ast.parse(script)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").partition(".")[0])
    others = sorted(found - sys.stdlib_module_names - {"torch"})
    return _REPRODUCE.format(modules=" and ".join(["torch", *others]))


def issue(
    case: Case,
    backend: Backend,
    found: Examined,
    script: str,
    *,
    known: Iterable[Known] = (),
    environment: str = "",
) -> str:
    """Return an issue's Markdown: its title as a heading, an empty line, and its body.

    found: for this case on this backend, with a record. script: the repro. known: the entries that
    `found.record.known` names. environment: lines about the machine. Ends in a newline.
    """
    assert found.record is not None
    record = found.record
    parts = [
        f"# {title(case, backend, record)}",
        *_reported(record, known),
        "### 🐛 Describe the bug",
        _what(case, backend, record),
        *_program(case, backend),
        _table(record),
        "**What the documentation says.** " + _documented(case, backend, found),
        *_explicit(case, record),
        "**Where.** " + _where(case, backend, record),
        _reproduce(script),
        _fenced(script.strip(), "python"),
        "### Versions",
        _versions(),
        _fold("Environment (the essentials of torch.utils.collect_env)", environment),
        _found_by(case, record),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


# -- the title ------------------------------------------------------------------------------------


def title(case: Case, backend: Backend, record: DivergenceRecord) -> str:
    """Return the title: where, which call, and what is wrong with it."""
    nested = len(_autocasts(case)) > 1 and not facts_of(backend).compiles
    call = f"{_call(case, record)} under nested autocast" if nested else _call(case, record)
    return f"[{_area(backend, record)}] {call}: {_wrong(backend, record)}"


def _area(backend: Backend, record: DivergenceRecord) -> str:
    stage = next((rung for rung in backend.ladder() if rung.name == record.stage), backend)
    return facts_of(stage).area or f"amp, {backend.device}"


def _call(case: Case, record: DivergenceRecord) -> str:
    """Return the guilty call as source if it is short, else the name of the function."""
    for statement in statements(case.program.body):
        if statement.op == record.op.partition("+")[0]:
            op = CATALOGUE[statement.op]
            args = [argument(a) for a in statement.args]
            kwargs = [(name, argument(a)) for name, a in statement.kwargs]
            text = op.render(statement.form, args, kwargs)
            return text if len(text) <= 60 else text.partition("(")[0]
    ops = list(dict.fromkeys(s.op for s in statements(case.program.body)))
    return " and ".join(ops) if len(ops) <= 2 else "autocast"


def _wrong(backend: Backend, record: DivergenceRecord) -> str:
    kind = record.kind.removeprefix("grad-")
    subject = "gradient" if record.kind.startswith("grad-") else "result"
    other = "eager" if facts_of(backend).promise else "documented behaviour"
    texts = {
        "dtype": f"{subject} is {record.observed}, not {record.expected}",
        "shape": f"shape of the {subject} is {record.observed}, not {record.expected}",
        "device": f"{subject} is on {record.observed}, not on {record.expected}",
        "missing": "no gradient" if record.observed == "None" else "unexpected gradient",
        "bitwise": f"values of the {subject} differ from {other}",
        "value": f"values of the {subject} differ from {other}{_more(record)}",
        "nonfinite": f"NaN or infinities of the {subject} differ from {other}",
        "precision": f"{subject} differs from {other} as if a rounding to 16 bits were left out",
        "range": f"{subject} differs from {other} where a value leaves its dtype's range",
        "raise": _raised(record),
        "state": "leaves autocast's state changed",
        "nondeterminism": "differs from run to run",
        "relation": f"two equivalent ways differ ({record.where.partition(':')[0]})",
        "crash": f"{record.observed}",
        "timeout": f"hangs ({record.observed})",
    }
    return texts[kind]


def _more(record: DivergenceRecord) -> str:
    return ", by more than rounding explains" if _measured(record) else ""


_PROMISED = (
    "A kernel may keep float32 between its steps. But a cast that the program writes asks for a "
    "rounding, a graph that runs op by op rounds each 16-bit result, as eager does, and so does "
    "Inductor with `emulate_precision_casts`."
)
_BAND = re.compile(r"(\S+) \+- (\S+) at (\[.*?\]), (\w+)(.*)")
_OFF = re.compile(r"(.*): excess (\S+), bias (\S+)")


def _measured(record: DivergenceRecord) -> tuple[str, str] | None:
    """Return how many units a value is off, at most and overall, or None for an exact value."""
    band, off = _BAND.fullmatch(record.expected), _OFF.fullmatch(record.observed)
    if band is None or off is None or band[2] == "0" or off[2] == "inf":
        return None
    return off[2], off[3]


def _raised(record: DivergenceRecord) -> str:
    want, got = (_error(text) for text in (record.expected, record.observed))
    if got == "no error":
        return f"raises no error, but must raise {want}"
    return f"raises {got}" + ("" if want == "no error" else f", not {want}")


def _error(text: str) -> str:
    return text.partition(":")[0]


# -- what happens ---------------------------------------------------------------------------------


def _reported(record: DivergenceRecord, known: Iterable[Known]) -> list[str]:
    """Return a note on top if it has been reported: links to the reports."""
    named = [k for k in known if k.id in record.known.split("+")]
    links = [k.link for k in named if k.link]
    if not links:
        return []
    return [f"> Already reported: {' and '.join(links)}. Comment there instead of opening another."]


def _what(case: Case, backend: Backend, record: DivergenceRecord) -> str:
    under = " in ".join(f"`{show_context(c)}`" for c in reversed(case.plan.contexts))
    facts = facts_of(backend)
    parts = [part for part in (facts.made, f"run under {under}" if under else "") if part]
    program = " and ".join(parts)
    text = f"`{_call(case, record)}`: {_wrong(backend, record)}"
    text += f". {facts.seen}" if facts.seen else ""
    return f"{text}. The program{f', {program}' if program else ''}:"


def _autocasts(case: Case) -> list[Autocast]:
    contexts = [*case.plan.contexts, *regions(case.program.body)]
    return [c for c in contexts if isinstance(c, Autocast)]


def _program(case: Case, backend: Backend) -> list[str]:
    """Return the program's source, and what is left to eager in it, if a compiler gets it."""
    if not facts_of(backend).compiles:
        case = unbroken(case)
    text = program_source(case.program).strip()
    said = [why for name, why in _BREAKS.items() if f"{name}(" in text]
    return [_fenced(text, "python"), *said]


_BREAKS = {
    "uncompiled": "`uncompiled` calls a function under `torch.compiler.disable`: the graph breaks "
    "there.",
    "decided": "`decided(x)` is `x.isfinite().all()`: the graph breaks there.",
}


def _table(record: DivergenceRecord) -> str:
    expected, observed = record.expected, record.observed
    band, off = _BAND.fullmatch(expected), _OFF.fullmatch(observed)
    if band and off:
        unit = f" (one unit of rounding: {band[2]})" if _measured(record) else ""
        expected = f"{band[1]} at {band[3]}, {band[4]}{band[5]}{unit}"
        far = f" ({off[2]} units away)" if _measured(record) else ""
        observed = f"{off[1]}{far}"
    rows = [("where", record.where)] if record.where else []
    rows += [("expected", expected), ("observed", observed)]
    cells = [(k, v.replace("|", "\\|").replace("`", "'")) for k, v in rows]
    return "| | |\n|---|---|\n" + "\n".join(f"| {k} | `{v}` |" for k, v in cells)


def _where(case: Case, backend: Backend, record: DivergenceRecord) -> str:
    parts = []
    if record.stage:
        below = _below(backend, record.stage)
        agrees = f"; {below} does not" if below else ""
        parts.append(f"First stage that shows it: `{record.stage}`{agrees}.")
    if record.part:
        parts.append(f"Part that torch's own bisector names: `{record.part}`.")
    if record.op:
        parts.append(f"Guilty op: `{record.op}`.")
    if not _autocasts(case):
        parts.append("No autocast is involved.")
    elif record.bare:
        parts.append("It also occurs without autocast.")
    elif record.kind != "nondeterminism":
        parts.append("It does not occur without autocast.")
    if more := _driven(case):
        parts.append(f"How the program is driven: {more}.")
    return " ".join(parts)


def _driven(case: Case) -> str:
    """Return the plan's fields that differ from the default, except its contexts."""
    fields = msgspec.structs.fields(case.plan)
    settings = [f"`{line}`" for line in case.plan.settings]
    names = [f"`{spec.name}`" for spec in case.program.inputs if spec.device]
    places = [f"{' and '.join(names)} on the CPU"] if names else []
    return ", ".join(
        [
            f"{f.name}={getattr(case.plan, f.name)}"
            for f in fields
            if f.name not in ("contexts", "backward_context", "settings")
            and getattr(case.plan, f.name) != f.default
            and (f.name, getattr(case.plan, f.name)) != ("backward", "none")
        ]
        + settings
        + places
    )


def _below(backend: Backend, stage: str) -> str:
    names = [rung.name for rung in backend.ladder()]
    names += [] if backend.name in names else [backend.name]
    at = names.index(stage) if stage in names else 0
    return f"`{names[at - 1]}`" if at else ""


# -- what the documentation says ------------------------------------------------------------------


def _documented(case: Case, backend: Backend, found: Examined) -> str:
    assert found.record is not None
    record = found.record
    texts = []
    if promise := facts_of(backend).promise:
        texts.append(_agreement(promise, found))
    if _autocasts(case) and backend.device in DEVICES:
        texts += _policies(record, load_table(backend.device), found.reached)
    if record.kind == "relation":
        relation = RELATIONS.get(record.where.partition(":")[0])
        doc = relation.pair.__doc__ if relation else "Two views of one run."
        texts.append(f"Two ways must agree: {' '.join((doc or '').split())}")
    if record.kind == "state":
        texts.append(f"A context manager restores what it found ([amp]({_AMP})).")
    if record.kind in ("crash", "timeout"):
        texts.append("A program that torch accepts ends in a result or an exception.")
    return " ".join(texts) or f"See [amp]({_AMP})."


def _agreement(promise: str, found: Examined) -> str:
    assert found.record is not None
    text = promise
    if found.eager == "agrees":
        text += " Eager gives the expected result here."
    elif found.eager == "diverges":
        text += " Eager itself differs from its documentation here."
    record = found.record
    if record.kind == "precision":
        text += f" {_PROMISED}"
    if (off := _measured(record)) is not None:
        text += (
            f" Kernels may round differently. {CONFIRM} runs of this program in float64, perturbed "
            "as its dtypes round, measure how much that explains. The result is "
            f"{off[0]} of these units off at its worst element and {off[1]} overall; honest "
            f"kernels stay below {THRESHOLD:g}."
        )
    elif record.kind.endswith("value"):
        text += " Rounding does not explain it: these values are exact."
    elif record.kind.endswith(("bitwise", "nonfinite")):
        text += " Rounding does not explain it."
    return text


def _policies(
    record: DivergenceRecord, table: PolicyTable, reached: Sequence[tuple[str, str]]
) -> list[str]:
    """Return the policy rows of the guilty op, or of every op that the case reached."""
    own = CATALOGUE[record.op].overloads if record.op in CATALOGUE else ()
    wanted = {o.removeprefix("aten::") for o in own}
    names = [o for o, _ in reached if o in wanted] or [o for o, _ in reached]
    rules = [table.rules[name] for name in names if name in table.rules]
    texts = [_row(rule, table) for rule in rules[:4]]
    if not texts and record.op in CATALOGUE:
        lists = f"`{record.op}` is in none of autocast's lists for {table.device}"
        texts = [f"{lists} ({_source(table.source)}): it runs in the dtypes of its inputs."]
    return texts


def _row(rule: Rule, table: PolicyTable) -> str:
    return (
        f"`aten::{rule.overload}` has the policy `{rule.policy}` on {table.device} "
        f"({_source(rule.source)}; {_lists(table)}): autocast {_MEANING[rule.policy]}."
    )


def _lists(table: PolicyTable) -> str:
    link = next((p for p in table.source.split("; ") if p.startswith("https:")), "")
    return f"[op reference]({link})" if link else f"[amp]({_AMP})"


def _source(text: str) -> str:
    """Return a policy's source with links: files of PyTorch at the installed version, issues."""
    version = ".".join(_torch().split("+")[0].split(".")[:3])
    parts = []
    for part in text.split("; "):
        if part.startswith("https:"):
            continue
        if match := re.fullmatch(r"pytorch#(\d+)", part):
            url = f"https://github.com/pytorch/pytorch/issues/{match[1]}"
            parts.append(f"[#{match[1]}]({url})")
        else:
            path, comma, more = part.partition(", ")
            url = _FILE.format(version=version, path=path)
            parts.append(f"[{path}]({url}){comma}{f'`{more}`' if more else ''}")
    return "; ".join(parts)


def _explicit(case: Case, record: DivergenceRecord) -> list[str]:
    if not record.explicit or not _autocasts(case):
        return []
    return [
        "**With its casts written out**, as autocast must run it:",
        _fenced(record.explicit, "python"),
    ]


# -- versions -------------------------------------------------------------------------------------


def _torch() -> str:
    return importlib.metadata.version("torch")


def _versions() -> str:
    import platform

    return f"torch {_torch()}, Python {platform.python_version()}, {platform.platform()}"


def _found_by(case: Case, record: DivergenceRecord) -> str:
    version = importlib.metadata.version("amp-fuzz")
    known = f", known to it as `{record.known}`" if listed(record.known) else ""
    known = ", where autocast has no part in it" if record.known == OWN else known
    return f"Found by amp-fuzz {version} (case {case.id} on `{record.backend}`{known})."


def _fold(summary: str, text: str) -> str:
    if not text:
        return ""
    return f"<details>\n<summary>{summary}</summary>\n\n{_fenced(text, 'text')}\n\n</details>"


def _fenced(text: str, language: str) -> str:
    """Return a code block; its fence is longer than any in the text."""
    longest = max((len(m) for m in re.findall(r"`{3,}", text)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"
