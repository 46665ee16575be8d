"""The page of minimize.py and torch_minifier.py: docs/minimize.md, from the results of both."""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence

from benchmarks.common import ROOT, Row, read

JSON = ROOT / "benchmarks" / "minimize.json"
THEIRS = ROOT / "benchmarks" / "torch_minifier.json"
PAGE = ROOT / "docs" / "minimize.md"

# Seconds of work for one search.
SECONDS = {"eager": 120.0, "state": 60.0, "script": 120.0, "compiled": 240.0, "findings": 120.0}
AFTER = ("aot", "dynamo")

_INTRODUCTION = """\

## Beside torch's own minifier

The same cases as drawn, as scripts that import only torch, run with `TORCHDYNAMO_REPRO_LEVEL=4` and
`TORCHDYNAMO_REPRO_AFTER` `aot` and `dynamo`
([benchmarks/torch_minifier.py](../benchmarks/torch_minifier.py)). A `sitecustomize` seeds the fault
in every process, those of the minifier too. Calls are those of the graph before and after; the
script that is left is run with the fault and without. Seconds are CPU seconds of all processes.
What was cut took longer than 150 s on the clock, on a machine that other work had most of. Cases
that are not in the table were not run.
"""

_TOGETHER = """\

## Candidates are judged one at a time

One process judges all candidates of a search and is started again only when one kills it, so there
is no start to share. What could be shared is a compilation. Programs of one plan compiled together
cost, a program, this many times less than one by one
([benchmarks/packing.json](../benchmarks/packing.json)): 1.03 to 1.39 on `aot_eager`, and 0.75 to
0.91 on Inductor, which is more.

Of the candidates themselves, few can be put together: the first that shows the divergence is taken,
and those that come next are made of it. In two searches each, the 60 candidates compiled on
`aot_eager` fill 41 packs of up to four, 32 of them of one, and the 20 on Inductor 14, 12 of them of
one. If a pack cost no more than one candidate, the gain would be 1.46 and 1.43. On `aot_eager` it
was 1.29 with packs of two and 1.25 with packs of four, in CPU seconds, without what a pack compiles
in vain after the candidate that is taken, and without the second judgement that a diverging pack
needs to say which of them it is: one in each step. On Inductor it was not measured: its caches
answered for what the search had compiled. Again:
`TORCHINDUCTOR_FORCE_DISABLE_CACHES=1 python -m benchmarks.packing --candidates=exp,softmax`
"""


def page(result: Row) -> str:
    """Return the Markdown page."""
    together = sum("with" in row for row in _found(result, "findings"))
    lines = [
        "# How small findings get",
        "",
        "A fault is seeded, the first case that finds it ([numeric-faults.md](numeric-faults.md))",
        "is minimised, and the result is written as a script. The script is run in a fresh process",
        "with the fault, where it must exit with 1, and without, where it must exit with 0.",
        "Findings are bugs of torch 2.13 that [known.toml](../amp_fuzz/upstream/known.toml) has, each with",
        "the first drawn case that shows it alone on a backend, or, where no draw showed it, the",
        f"example of the tests ({together} show only together with others): their scripts must",
        "exit with 1.",
        "Fingerprint: kind, stage and guilty op, each found anew from the case as it was drawn and",
        "from the minimised one. Where no statement of the drawn case, nor two of them, shows the",
        'same by themselves, it names no op ("none alone"), and minimising is what finds one. Such',
        "rows are counted apart, and so are others that changed it.",
        "",
        "Two rows are not as they should be. `var-of-squares` has four statements: a gradient",
        "shows the fault, and what takes the infinity of `var` to it cannot go. (A run, which",
        "looks at each statement by itself first, reports the `var`.) `neg-backward` named a pair",
        "as drawn, since the gradients of its `addcdiv` alone are 0.",
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
    return "\n".join([*lines, "", "Again: `.venv/bin/python benchmarks/minimize.py`"]) + "\n"


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
    """Yield the lines of what stands in docs/minimize.md of it; none if nothing was measured."""
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
