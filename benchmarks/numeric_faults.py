"""Get kernels, graphs and generated code slightly wrong, and ask whether the oracle notices.

    python benchmarks/numeric_faults.py [--eager] [--compiled] [--only=GLOB] [--report]

Writes ``benchmarks/numeric_faults.json``, and from it and ``benchmarks/tolerances.json`` the page
``docs/evidence/numeric-faults.md``. What is not run is kept as it was. Seconds are CPU seconds of
one core, those of the C++ compiler included.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from amp_fuzz.backends.harness import quiet
from amp_fuzz.catalogue import CATALOGUE
from amp_fuzz.upstream import shipped
from amp_fuzz.upstream.explain import judge_of
from benchmarks.common import ROOT, Row, arguments, conditions, named, read, write
from tests.faults.corrupted import Corrupted, Kernel, wrong_kernels
from tests.faults.numeric import COMPILED, EAGER, NUMERIC, NumericFault
from tests.faults.numeric_hunt import Step, hunt, way

JSON, TOLERANCES = (ROOT / "benchmarks" / f"{n}.json" for n in ("numeric_faults", "tolerances"))
PAGE = ROOT / "docs" / "evidence" / "numeric-faults.md"

# Cases for each fault. On Inductor a case takes seconds: the cases that cannot show the fault,
# because they do not reach its op, are drawn and counted, but not compiled.
LIMITS = {"eager": 5000, "compiled": 500}


# Why the oracle misses a fault, for those that it does miss.
WHY: dict[str, str] = {
    "decomposed-gelu-tanh": (
        "one case of 500, the 498th, shows it and is reported. It does not count, because "
        "Inductor's own gelu is also wrong on this case on this machine (compile-erf, known)."
    ),
    "var-of-squares": (
        "the cancellation needs a mean that is many deviations from 0, or squares that overflow. "
        "Few cases reach `var`. Of the first ten, only two changed a bit: one by 0.1 of what "
        "rounding explains, one after the variance had left the range of its dtype."
    ),
}


def main() -> int:
    """Run what the command line asks for and return an exit code: 1 if a fault was not found."""
    parser = arguments(__doc__)
    parser.add_argument("--eager", action="store_true", help="only the faults in eager kernels")
    parser.add_argument("--compiled", action="store_true", help="only the compiler's")
    parser.add_argument("--only", metavar="GLOBS", default="*", help="only these faults")
    parser.add_argument("--controls", type=int, default=1000, help="honest cases (default 1000)")
    parser.add_argument("--seconds", type=float, default=600.0, help="for each fault (600)")
    parser.add_argument("--seed", type=int, default=0, help="of the engine's draws (default 0)")
    parser.add_argument("--report", action="store_true", help="only write the page again")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    result = read(JSON)
    both = options.eager == options.compiled
    for section, faults in (("eager", EAGER), ("compiled", COMPILED)):
        if options.report or not (both or getattr(options, section)):
            continue
        chosen = [f for f in faults if named(f.name, options.only)]
        result["run"] = conditions(options.seed, options.seconds)
        old = {r["name"]: r for r in result.get(section, {}).get("faults", ())}
        for part in search(section, chosen, options):
            old |= {r["name"]: r for r in part.pop("faults", ())}
            rows = [old[f.name] for f in faults if f.name in old]
            result[section] = result.get(section, {}) | part | {"faults": rows}
            write(JSON, result)
    write_page()
    return int(any(not r["found"] for s in LIMITS for r in result.get(s, {}).get("faults", ())))


def search(
    section: str, faults: Sequence[NumericFault], options: argparse.Namespace
) -> Iterator[Row]:
    """Hunt for each fault along one way, and once more, with a focus, for those not found."""
    limit = LIMITS[section]
    steps = list(way(limit, seed=options.seed))
    backend = "eager-cpu with other kernels" if section == "eager" else "compile[inductor]"
    yield {"backend": backend, "cases_limit": limit, "focus": "none: the whole catalogue"}
    for number, fault in enumerate(faults, 1):
        row = one(fault, steps, options.seconds)
        family = usual(fault, steps)
        if not row["found"] and family:
            names = tuple(op.name for op in CATALOGUE.values() if op.family == family)
            focused = list(way(limit, seed=options.seed, focus=names))
            row["with focus"] = {"family": family} | one(fault, focused, options.seconds)
        mark = "found" if row["found"] else "-----"
        told = row.get("error") or f"{row['kind']} {row['op']} {row['stage']}"
        print(
            f"{number:3}/{len(faults)} {mark} {fault.name:32} {row['cases']:5} cases "
            f"{row['seconds']:6.1f} s  {told}",
            flush=True,
        )
        yield {"faults": [row]}
    if section == "eager" and options.only == "*":
        yield {"control": control(steps[: options.controls])}


def one(fault: NumericFault, steps: Sequence[Step], seconds: float) -> Row:
    try:
        row = hunt(fault, steps, seconds=seconds).json()
    except Exception:
        row = Row(name=fault.name, found=False, cases=0, reached=0, seconds=0.0, kind="", op="")
        row |= {"where": "", "stage": "", "observed": "", "alarms": 0, "case": ""}
        row["error"] = traceback.format_exc()
    return row | {"mechanism": fault.mechanism, "seeded": fault.stage}


def usual(fault: NumericFault, steps: Sequence[Step]) -> str:
    """Return the family whose cases reach a fault's ops most often."""
    wanted = set(fault.reached)
    counts = Counter(s.family for s in steps if wanted & s.reached)
    return counts.most_common(1)[0][0] if counts else ""


def control(steps: Sequence[Step]) -> Row:
    """Judge cases on the same backend, with kernels in Python that only call torch's own."""

    def same(op: Kernel, *args: Any, **kwargs: Any) -> Any:
        return op(*args, **kwargs)

    names = {n.removeprefix("backward:") for fault in EAGER for n in fault.reached}
    honest = dict.fromkeys(names, same)
    judge = judge_of(Corrupted(patches=lambda: wrong_kernels(honest)), shipped(), "none")
    with quiet():
        outcomes = Counter(judge.judge(step.case).outcome for step in steps)
    return {"cases": len(steps), "outcomes": dict(outcomes)}


def write_page() -> None:
    result = read(JSON)
    tolerances = read(TOLERANCES)
    PAGE.write_text(page(result, tolerances))
    print(f"written: {PAGE.relative_to(ROOT)}")


# -- the page -------------------------------------------------------------------------------------


def page(result: Row, tolerances: Row) -> str:
    """Return the Markdown page."""
    lines = [
        "# Seeded numeric faults",
        "",
        "The benchmark makes kernels, graphs and generated code wrong on purpose, one fault at a",
        "time. The fault is active only while the backend under test runs, not while the reference",
        "runs. The rounding oracle ([shadows](../internals/shadow.md)) must find it, on cases that",
        "the engine draws over the whole catalogue, without hints. Divergences in dtype, errors",
        "and the kind `range` do not count. Neither do cases on which unmodified torch diverges",
        "too.",
    ]
    if result:
        lines += _about(result) + _summaries(result) + _LIMITS_OF_THIS
    if tolerances:
        lines += ["", "## Compared with fixed tolerances", "", *_tolerances(tolerances)]
    for section, title in (("eager", "Eager kernels"), ("compiled", "Compilers")):
        if section in result:
            lines += ["", f"## {title}", "", *_rows(result[section]["faults"])]
    lines += [
        "",
        "To repeat: `.venv/bin/python benchmarks/numeric_faults.py`, `benchmarks/tolerances.py`",
    ]
    return "\n".join(lines) + "\n"


def _about(result: Row) -> list[str]:
    run = result["run"]
    versions = ", ".join(f"{name} {v}" for name, v in run["versions"].items())
    return [
        "",
        "For eager, a wrong kernel replaces torch's; the limit is 5,000 cases. For compilers, the",
        "fault is seeded in the stage of the column `stage`, and the search runs on",
        "`compile[inductor]`; the limit is 500 cases. A case that does not reach the op of a",
        "fault cannot show it. Such cases are drawn and counted, but not judged. Seed",
        f"{run['seed']}, seconds of one core ({run['machine']['cpu']}); {versions}.",
    ]


def _summaries(result: Row) -> list[str]:
    lines = ["", "| faults in | found | stage right | to find one |", "|---|---|---|---|"]
    for section in LIMITS:
        if section not in result:
            continue
        rows = result[section]["faults"]
        found = [r for r in rows if r["found"]]
        right = sum(r["stage"] == r["seeded"] for r in found)
        share = f"{len(found)} of {len(rows)} ({len(found) / len(rows):.1%})" if rows else ""
        lines.append(f"| {section} | {share} | {right} of {len(found)} | {_times(found)} |")
    control_ = result.get("eager", {}).get("control")
    if control_:
        outcomes = ", ".join(f"{n} {k}" for k, n in control_["outcomes"].items())
        lines.append(f"| control: honest eager | {control_['cases']} cases: {outcomes} | | |")
    missed = [r for s in LIMITS for r in result.get(s, {}).get("faults", ()) if not r["found"]]
    if missed:
        lines += ["", "Not found:", ""]
    for row in missed:
        focused = row.get("with focus", {})
        family = focused.get("family", "")
        again = "found" if focused.get("found") else "not found either"
        more = f" With programs of only the {family} family it is {again}." if family else ""
        few = f"of {row['cases']:,} cases {row['reached']} reach its op."
        lines.append(f"- `{row['name']}`: {WHY.get(row['name'], few)}{more}")
    return lines


def _times(found: Sequence[Row]) -> str:
    if not found:
        return ""
    cases, seconds = [r["cases"] for r in found], [r["seconds"] for r in found]
    return (
        f"median {statistics.median(cases):.0f} cases and {statistics.median(seconds):.1f} s, "
        f"the slowest {max(cases)} cases and {max(seconds):.1f} s"
    )


_LIMITS_OF_THIS = [
    "",
    "What these numbers do not say:",
    "",
    "- The stage is that of the first value that diverges on Inductor. A fault in a graph acts",
    "  wherever its op occurs, also in decomposed ops: `addmv` becomes a product and a sum.",
    "- No fault skips a cast to 16 bits and keeps float32 where eager rounds. Fusing compilers do",
    "  this, and the rounding oracle does not treat it as a fault. No fault uses a narrower type",
    "  inside a pointwise decomposition either, because Inductor keeps float32 there.",
    "- Each fault acts on every call of its op. A fault that also needs a certain shape is rarer.",
    "- If the shadow run itself fails, as in some composite ops, the case counts as failed, not as",
    "  agreed.",
]


def _rows(rows: Sequence[Row]) -> list[str]:
    lines = [
        "| fault | what is wrong | mechanism | found as | at | cases | judged | seconds | stage |",
        "|---|---|---|---|---|---:|---:|---:|---|",
    ]
    for row in rows:
        kind = row["kind"] if row["found"] else "**not found**"
        kind += " (backend)" if row.get("outcome") == "backend" else ""
        stage = row["stage"]
        if row["found"] and stage != row["seeded"]:
            stage = f"**{stage}**, seeded in {row['seeded']}"
        lines.append(
            f"| {row['name']} | {NUMERIC[row['name']].what} | {row['mechanism']} | {kind} "
            f"| {row['op'] or row['where']} | {row['cases']} | {row['reached']} "
            f"| {row['seconds']:.1f} | {stage or row['seeded']} |"
        )
    return lines


def _tolerances(found: Row) -> list[str]:
    groups = found["pairs"]
    heads = [f"{g['name']} ({g['differ']} of {g['pairs']} differ)" for g in groups]
    lines = [
        *found["about"],
        "",
        "| judge | "
        + " | ".join(f"{g['verb']}: {h}" for g, h in zip(groups, heads, strict=True))
        + " | faults never noticed |",
        "|---|" + "---:|" * (len(groups) + 1),
    ]
    for judge, label in found["judges"].items():
        cells = " | ".join(str(g["counts"][judge]) for g in groups)
        missed = f"{len(found['never'][judge])} of {found['faults']}"
        lines.append(f"| {label} | {cells} | {missed} |")
    for judge, label in found["judges"].items():
        if found["never"][judge]:
            names = ", ".join(f"`{n}`" for n in found["never"][judge])
            lines += ["", f"Never noticed by {label}: {names}."]
    alarms = [(g["name"], n) for g in groups if g["verb"] == "false alarms" for n in _notes(g)]
    lines += ["", "What amp-fuzz flags on honest pairs:", ""] if alarms else []
    lines += [f"- {name}: {note}" for name, note in alarms]
    known = [f"{sum(g['known'].values())} of {g['name']}" for g in groups if g.get("known")]
    if known:
        ids = sorted(
            {f"`{i}`" for g in groups for ids in g.get("known", ()) for i in ids.split("+")}
        )
        lines += ["", f"Left out for a known bug: {', '.join(known)} ({', '.join(ids)})."]
    return lines


def _notes(group: Row) -> list[str]:
    notes: list[str] = group["flagged by ours"]
    return [note.partition(" ")[2] for note in notes]


if __name__ == "__main__":
    sys.exit(main())
