"""Seed faults of autocast in compilers, one at a time, and measure what is told of each.

    python benchmarks/compiled_faults.py [--only='disabled-*'] [--json=FILE]
    python benchmarks/compiled_faults.py --pages=docs

A hand-made case shows a fault if it diverges with the fault and agrees without it. It is told as
autocast's if its outcome is then "diverged". Beside it stands the same case with a statement that
the compiler gets wrong without autocast. The first case that shows is minimised. All cases that
show, and drawn ones that enter contexts in the program, are then grouped as in a run.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from msgspec.structs import replace

from amp_fuzz.backends import unsupported
from amp_fuzz.backends.harness import quiet
from amp_fuzz.cases.case import Case, has_context
from amp_fuzz.cases.program import Autocast, statements
from amp_fuzz.findings.examination import Met, examine
from amp_fuzz.findings.groups import Groups
from amp_fuzz.oracle.judge import Judge
from amp_fuzz.records.fingerprint import title
from amp_fuzz.records.schema import DivergenceRecord
from amp_fuzz.upstream import shipped
from amp_fuzz.upstream.explain import judge_of
from benchmarks.common import Row, arguments, conditions, cpu_seconds, named, read, write
from tests.faults.compiled import AOT, CASES, COMPILED, EAGER, CompiledFault, backend_of, beside
from tests.helpers import drawn

RESULTS = Path(__file__).with_suffix(".json")
MOST = 8
"""The hand-made cases of a fault that are grouped."""

SLOW = 4
"""The hand-made cases that show a fault, where each takes seconds to compile; none is drawn."""

PAGE = Path("evidence") / "compiled-faults.md"


def judge(fault: CompiledFault | None, place: str, *, differs: bool = False) -> Judge:
    """Return the judge of a place with a fault or without, and with its own difference or not."""
    return judge_of(backend_of(fault, place, differs=differs), shipped(), "none")


def outcome(how: Judge, case: Case) -> str:
    """Return the outcome of a case, or the kind of the error that judging it ends in."""
    with quiet():
        return how.judge(how.backend.fit(case)).outcome


@cache
def honestly(place: str, name: str) -> str:
    """Return the outcome of a hand-made case without a fault."""
    return outcome(judge(None, place), CASES[name])


def measured(fault: CompiledFault, cases: int, seconds: float) -> Row:
    """Return what is told of a fault."""
    start = cpu_seconds()
    faulty, honest = judge(fault, fault.place), judge(None, fault.place)
    tries = Counter[str]()
    showing: list[tuple[str, Case]] = []
    masked: list[str] = []
    slow = fault.place not in (EAGER, AOT)
    cases = 0 if slow else cases
    for name, case in CASES.items():
        if slow and len(showing) == SLOW:
            break
        if unsupported(case, faulty.backend):
            continue
        told = outcome(faulty, case)
        if told in ("agreed", "raised") or honestly(fault.place, name) not in ("agreed", "raised"):
            continue
        tries[told] += 1
        if told == "diverged":
            showing.append((name, case))
        else:
            masked.append(f"{name}: {told}")
    row: Row = {"fault": fault.name, "what": fault.what, "place": fault.place, "told": dict(tries)}
    row |= {"masked": masked, "case": showing[0][0] if showing else ""}
    if showing:
        name, case = showing[0]
        both = beside(case)
        row["beside"] = outcome(judge(fault, fault.place, differs=True), both)
        row["own alone"] = outcome(judge(None, fault.place, differs=True), both)
        few = [c for _, c in showing]
        row |= grouped(faulty, honest, few, cases, seconds)
    row["seconds"] = round(cpu_seconds() - start, 1)
    return row


def grouped(faulty: Judge, honest: Judge, few: list[Case], cases: int, seconds: float) -> Row:
    """Return the groups of cases that diverge, and how small the first was made."""
    groups, found = Groups(), Counter[str]()
    records: dict[str, DivergenceRecord] = {}
    small = 0
    for case in ordered(few, cases):
        case = faulty.backend.fit(case)
        with quiet():
            verdict = faulty.judge(case)
            if verdict.outcome != "diverged" or honest.judge(case).outcome == "diverged":
                continue
            for event in examine(faulty, verdict, groups, seconds=seconds):
                if isinstance(event, Met):
                    found[event.fingerprint] += 1
                elif event.last:
                    records[event.record.fingerprint] = event.record
                    made = event.record.minimised or event.record.case
                    small = small or len(list(statements(made.program.body)))
                    if event.record.joins:
                        count = found.pop(event.record.joins, 0)
                        found[event.record.fingerprint] += count
    for names, cause in groups.as_if.values():  # those that explain every case
        records[cause] = replace(records[cause], as_if=names)
    named = [[title(records[cause]), count] for cause, count in found.most_common()]
    return {"statements": small, "diverged": sum(found.values()), "groups": named}


def ordered(few: list[Case], cases: int) -> Iterator[Case]:
    """Yield a hand-made case, drawn ones that enter contexts, and the other hand-made ones."""
    yield from few[:1]
    nested = (case for case in drawn(40 * cases) if has_context(case.program.body, Autocast))
    yield from islice(nested, cases)
    yield from few[1:MOST]


def page(result: Row) -> str:
    """Return the page."""
    rows = result["faults"]
    told = [r for r in rows if r["case"] and not r["masked"] and r["beside"] == "diverged"]
    one = [r for r in told if len(r["groups"]) <= 2]
    lines = [
        "# Faults of autocast in compilers",
        "",
        __doc__.split("\n\n")[2].strip(),
        "",
        f"{len(told)} of {len(rows)} faults are told as autocast's, with the compiler's own",
        f"difference beside them too. {len(one)} of these make at most two groups, of",
        f"{result['run']['cases']} drawn cases and the hand-made ones that show the fault.",
        "",
        "| fault | its largest group is named | on | told | statements | groups |",
        "|---|---|---|---:|---:|---:|",
    ]
    for row in rows:
        count = sum(row["told"].values())
        told_as = f"{row['told'].get('diverged', 0)} of {count}"
        names = row.get("groups", [])
        best = names[0][0].replace("|", "\\|") if names else ""
        best = best.replace("the backend acts as if: ", "as if ")
        small = row.get("statements", "")
        lines.append(
            f"| {row['fault']}: {row['what']} | {best} | {row['place']} | {told_as} | {small} | "
            f"{len(names)} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, and write the result and the page."""
    parser = arguments(__doc__)
    parser.add_argument("--only", default="*", help="globs of names, by comma")
    parser.add_argument("--cases", type=int, default=20, help="drawn for each fault")
    parser.add_argument("--seconds", type=float, default=6.0, help="of minimising each")
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--pages", type=Path, help="only write the page, under this folder")
    given = parser.parse_args()
    if given.pages:
        (given.pages / PAGE).write_text(page(read(given.json)))
        return
    torch.set_num_threads(1)
    rows = {row["fault"]: row for row in read(given.json).get("faults", [])}
    for fault in COMPILED.values():
        if not named(fault.name, given.only):
            continue
        row = measured(fault, given.cases, given.seconds)
        rows[fault.name] = row
        print(row, flush=True)
        kept = [rows[name] for name in COMPILED if name in rows]
        run = conditions(0, given.seconds) | {"cases": given.cases}
        write(given.json, {"run": run, "faults": kept})


if __name__ == "__main__":
    main()
