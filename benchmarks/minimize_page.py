"""The page of minimize.py and torch_minifier.py: docs/evidence/minimize.md, from both results."""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence

from benchmarks.common import ROOT, Row, read

JSON = ROOT / "benchmarks" / "minimize.json"
THEIRS = ROOT / "benchmarks" / "torch_minifier.json"
PAGE = ROOT / "docs" / "evidence" / "minimize.md"

# Seconds of work for one search.
SECONDS = {"eager": 120.0, "state": 60.0, "script": 120.0, "compiled": 240.0, "findings": 120.0}
AFTER = ("aot", "dynamo")

_INTRODUCTION = """\

## Compared with torch's own minifier

The same cases, as drawn, are written as scripts that import only torch. The scripts run with
`TORCHDYNAMO_REPRO_LEVEL=4` and `TORCHDYNAMO_REPRO_AFTER` set to `aot` and to `dynamo`
([benchmarks/torch_minifier.py](../../benchmarks/torch_minifier.py)). A `sitecustomize` seeds the
fault in every process, including the minifier's. The table shows the number of calls in the graph
before and after minifying. The resulting script then runs with the fault and without it. Seconds
are CPU seconds of all processes. A search marked "cut" took longer than 150 s of wall time, on a
machine that was busy with other work. Cases that are not in the table were not run.
"""

_TOGETHER = """\

## Candidates are judged one at a time

One process judges all candidates of a search and restarts only if a candidate kills it. So batches
would save no starts, but they could save compilations. Compiling programs of one plan together
instead of one by one divides the cost per program by 1.03 to 1.39 on `aot_eager`
([benchmarks/packing.json](../../benchmarks/packing.json)). On Inductor, the factor is 0.75 to 0.91:
a pack costs more.

Few candidates can be compiled together, because the search takes the first one that diverges and
derives the next ones from it. We looked at two searches on each backend. The 60 candidates compiled
on `aot_eager` fill 41 packs of up to four, 32 of them with one candidate. The 20 on Inductor fill
14 packs, 12 of them with one. If a pack cost no more than one candidate, the gain would be 1.46 and
1.43. On `aot_eager`, the gain in CPU seconds is 1.29 with packs of two and 1.25 with packs of four.
This ignores two costs: candidates compiled in vain after the one that is taken, and a second
judgement in each step, to find the diverging candidate of a pack. On Inductor, the gain was not
measured, because its caches held the programs that the search had compiled. To repeat:
`TORCHINDUCTOR_FORCE_DISABLE_CACHES=1 python -m benchmarks.packing --candidates=exp,softmax`
"""


def page(result: Row) -> str:
    """Return the Markdown page."""
    together = sum("with" in row for row in _found(result, "findings"))
    lines = [
        "# How small findings get",
        "",
        "For each seeded fault, the benchmark minimises the first case that finds it",
        "([seeded faults](numeric-faults.md)) and writes the result as a script. In a fresh",
        "process, the script must exit with 1 with the fault and with 0 without it.",
        "",
        "Findings are bugs of torch 2.13 from the [known list](../findings/README.md). Each",
        "has the first drawn case that shows the bug alone on a backend. If no draw showed it,",
        f"the benchmark takes the tests' example ({together} of these bugs show only together with",
        "others). The scripts must exit with 1.",
        "",
        "The fingerprint is kind, stage and guilty op, computed once from the case as drawn and",
        "once from the minimised case. If no statement of the drawn case diverges alone, and no",
        'two of them do, the fingerprint names no op ("none alone"), and minimising finds one.',
        "The table counts such rows separately, and also rows whose fingerprint changed otherwise.",
        "",
        "Two rows fall short. `var-of-squares` keeps four statements: a gradient shows the fault,",
        "and the statements between `var` and that gradient carry the infinity of `var` to it. (A",
        "run judges each statement alone first, and reports the `var`.) The fingerprint of the",
        "drawn case of `neg-backward` names a pair, because the gradients of its `addcdiv` alone",
        "are 0.",
        "",
    ]
    if "run" in result:
        run_ = result["run"]
        versions = ", ".join(f"{name} {v}" for name, v in run_["versions"].items())
        lines += [f"Seed {run_['seed']}, CPU seconds of one core ({run_['machine']['cpu']}); "]
        lines[-1] += f"{versions}."
    commits = Counter(r.get("commit", "an older one") for s in SECONDS for r in _found(result, s))
    if commits:
        lines[-1] += f" Rows by commit: {', '.join(f'{n} of {c}' for c, n in commits.items())}."
    columns = (
        *("faults in", "minimised", "statements before: median", "after: median, 90 %, most"),
        *("elements: median, 90 %", "seconds: median, 90 %", "same fingerprint"),
        "repro 1, then 0",
    )
    lines += ["", f"| {' | '.join(columns)} |", "|---|" + "---:|" * (len(columns) - 1)]
    for title, rows in _groups(result):
        if rows:
            lines.append(_summary(title, rows))
    for section in SECONDS:
        rows = result.get(section, {})
        lines += ["", f"## {section.capitalize()}", "", *_table(rows)] if rows else []
    lines += [*_beside(result), *_TOGETHER.splitlines()]
    return "\n".join([*lines, "", "To repeat: `.venv/bin/python benchmarks/minimize.py`"]) + "\n"


def _groups(result: Row) -> list[tuple[str, list[Row]]]:
    rows = {section: _found(result, section) for section in SECONDS}
    stages: dict[str, list[Row]] = {}
    for row in rows["compiled"]:
        stages.setdefault(row["before"]["stage"], []).append(row)
    return [
        ("eager kernels", rows["eager"]),
        ("contexts (state)", rows["state"]),
        ("kernels under TorchScript", rows["script"]),
        *sorted(stages.items()),
        ("torch itself (findings)", rows["findings"]),
        ("all", [row for own in rows.values() for row in own]),
    ]


def _found(result: Row, section: str) -> list[Row]:
    return [r for r in result.get(section, {}).values() if r["found"]]


def _summary(title: str, rows: Sequence[Row]) -> str:
    def both(values: Sequence[float], digits: int = 0) -> str:
        return f"{statistics.median(values):.{digits}f}, {_ninety(values):.{digits}f}"

    after = [r["statements"][1] for r in rows]
    cells = [
        title,
        str(len(rows)),
        f"{statistics.median(r['statements'][0] for r in rows):.0f}",
        f"{both(after)}, {max(after)}",
        both([r["elements"][1] for r in rows]),
        both([r["seconds"] for r in rows], 1),
        _kept(rows),
        f"{sum(r['repro'] in ([1, 0], [1]) for r in rows)}",
    ]
    return f"| {' | '.join(cells)} |"


def _kept(rows: Sequence[Row]) -> str:
    """Return how many rows kept their fingerprint; of others, how many had named no op before."""
    moved = [r for r in rows if r["before"] != r["after"]]
    named = [r for r in moved if {**r["before"], "op": r["after"]["op"]} == r["after"]]
    new = sum(not r["before"]["op"] for r in named)
    others = {"named none before": new, "changed it": len(moved) - new}
    told = [f"{number} {what}" for what, number in others.items() if number]
    return ", ".join([str(len(rows) - len(moved)), *told])


def _ninety(values: Sequence[float]) -> float:
    """Return the smallest value that nine tenths do not exceed."""
    return sorted(values)[math.ceil(0.9 * len(values)) - 1]


def _table(rows: Row) -> list[str]:
    lines = [
        "| fault | kind | stage | guilty op | statements | elements | tried | seconds | repro |",
        "|---|---|---|---|---|---|---:|---:|---|",
    ]
    for name, row in rows.items():
        if not row["found"]:
            lines.append(f"| {name} | not found | | | | | | | |")
            continue
        after = row["after"]
        moved = [k for k in after if after[k] != row["before"][k]]
        op = after["op"] or "none alone"
        note = "".join(f"; **{k} was {row['before'][k] or 'none alone'}**" for k in moved)
        cut = " (cut)" if row["reason"] == "time" else ""
        name += f", with {', '.join(row['with'])}" if row.get("with") else ""
        lines.append(
            f"| {name} | {after['kind']} | {after['stage']} | {op}{note} "
            f"| {row['statements'][0]} -> {row['statements'][1]} "
            f"| {row['elements'][0]} -> {row['elements'][1]} | {row['tried']} "
            f"| {row['seconds']:.1f}{cut} | {', '.join(map(str, row['repro']))} |"
        )
    return lines


def _beside(ours: Row) -> Iterator[str]:
    """Yield the section about torch's minifier; no line if nothing was measured."""
    if not THEIRS.exists():
        return
    rows = read(THEIRS)
    yield from (*_INTRODUCTION.splitlines(), "")
    yield "| fault | ours: statements, seconds | after=aot | seconds | after=dynamo | seconds |"
    yield "|---|---|---|---:|---|---:|"
    for name, row in rows.items():
        own = ours["compiled"].get(name, {})
        if own.get("case") != row["case"]:  # measured of another version
            continue
        cells = [name, f"{own['statements'][0]} -> {own['statements'][1]}, {own['seconds']:.1f}"]
        for after in AFTER:
            cells += [_said(row[after]), f"{row[after]['seconds']:.1f}"]
        yield f"| {' | '.join(cells)} |"


def _said(row: Row) -> str:
    if not row["launched"]:
        return "nothing to minify" + (f" (`{_error(row['said'])}`)" if row["said"] else "")
    if "left" not in row:
        return f"{row['graph']} calls -> none: `{_error(row['minifier_said'])}`"
    cut = " (cut)" if row["minifier"] == "timeout" else ""
    return f"{row['graph']} -> {row['left']} calls{cut}, ends {row['again'][0]}, {row['again'][1]}"


def _error(line: str) -> str:
    found = re.search(r"\w*(?:Error|Exception)\b.*", line)
    return (found[0] if found else line)[:70].replace("|", "/")
