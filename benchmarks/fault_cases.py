"""Write the small case that shows each seeded fault, to tests/cases/faults.

    python benchmarks/fault_cases.py [--only='mm:*']

A hunt draws cases until one diverges with the fault and agrees without it, and the minimiser makes
it small. Files that are there stay, if they still show their fault. Faults whose hunt finds nothing
in so many cases are printed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from amp_fuzz.backends.harness import quiet
from amp_fuzz.cases.case import Case
from amp_fuzz.findings.minimize.target import Target, asker, shrink
from amp_fuzz.runs.engine import Settings, draw, plan_tasks
from benchmarks.common import arguments, named
from tests.faults import custom, fp8
from tests.faults.fault import Fault, NumericFault
from tests.faults.hunt import _counts
from tests.faults.numeric_hunt import tasks
from tests.faults.shown import (
    EVERY,
    AnyFault,
    holding,
    judge_for,
    kinds_of,
    path_of,
    showing,
    verdict,
)
from tests.helpers import drawn, eager


def drawn_for(fault: AnyFault) -> Iterator[Case]:
    """Yield cases that may show a fault, without end."""
    seed = 0
    while True:
        match fault:
            case fp8.Seeded():
                yield from islice(fp8.drawn(fault.regions, seed, caches=fault.caches), 400)
            case custom.CustomFault():
                device = judge_for(fault).backend.device
                yield from drawn(400, device, ops=["custom"], focus=[fault.op], seed=seed)
            case NumericFault():
                for task in tasks(400, seed):
                    yield from draw(task, Settings(("eager-cpu",)))
            case Fault(op=op) if op:
                name = op.partition(".")[0]
                yield from filter(_counts, drawn(400, focus=[name], seed=seed))
            case _:
                for task in plan_tasks(Settings(("eager-cpu",), 400, seed=seed), [eager()]):
                    yield from filter(_counts, draw(task, Settings(("eager-cpu",))))
        seed += 1


def found(name: str, cases: int, seconds: float) -> Case | None:
    """Return the smallest case that shows a fault, of those that a hunt finds."""
    fault = EVERY[name]
    judge = judge_for(fault)
    for case in islice(drawn_for(fault), cases):
        case = judge.backend.fit(case)
        seen = verdict(name, case)
        if seen.outcome != "diverged" or seen.divergence is None:
            continue
        if kinds_of(fault) and seen.divergence.kind not in kinds_of(fault):
            continue
        if seen.divergence.kind == "nondeterminism" and not kinds_of(fault):
            continue
        if verdict(name, case, honest=True).outcome not in ("agreed", "raised"):
            continue
        with quiet(), holding(fault):
            target = Target.of(seen)
            ask = asker(judge, target)
            *_, last = shrink(seen.case, target, ask, judge.backend.reference(), seconds=seconds)
        small: Case = last.case
        return small if shows(name, small) else seen.case
    return None


def shows(name: str, case: Case) -> bool:
    """Return whether a case diverges with a fault and agrees without it."""
    honest = verdict(name, case, honest=True).outcome in ("agreed", "raised")
    return honest and verdict(name, case).outcome == "diverged"


def main() -> None:
    """Write the files that are missing, or show their fault no longer."""
    parser = arguments(__doc__)
    parser.add_argument("--only", default="*", help="globs of names, by comma")
    parser.add_argument("--cases", type=int, default=1200, help="drawn for each fault")
    parser.add_argument("--seconds", type=float, default=10, help="of minimising each")
    given = parser.parse_args()
    for name in EVERY:
        path = path_of(name)
        if not named(name, given.only) or (path.exists() and shows(name, showing(name))):
            continue
        case = found(name, given.cases, given.seconds)
        if case is None:
            print(f"{name}: not found in {given.cases} cases", flush=True)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(case.json())
        print(f"{name}: {len(str(case.program).splitlines())} lines", flush=True)


if __name__ == "__main__":
    main()
