"""What drawing costs, and how much of what is drawn is new: the engine's draws and Hypothesis's.

    python benchmarks/generation.py [--cases=2000] [--output=benchmarks/generation.json]

Both draw from the same grammar. `engine` takes its bytes from Python's generator, a seed a case;
`hypothesis` is the generate phase of `@given(cases())` in batches of 100. Times are CPU time.
"""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from amp_fuzz.cases.case import Case
from amp_fuzz.cases.program import regions, statements
from amp_fuzz.runs.engine import Settings, Task, draw
from amp_fuzz.strategies import cases
from benchmarks.common import arguments, show, versions


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    engine(100)  # fills caches
    result = {
        "cases": args.cases,
        "engine": measure(engine, args.cases),
        "hypothesis": measure(hypothesis, args.cases),
        "versions": versions("hypothesis", "amp-fuzz"),
        "python": platform.python_version(),
    }
    show(args.output, result)


def engine(count: int) -> list[Case]:
    return list(draw(Task("eager-cpu", "*", (), count, 0), Settings(backends=("eager-cpu",))))


def hypothesis(count: int) -> list[Case]:
    drawn: list[Case] = []

    def collect(case: Case) -> None:
        drawn.append(case)

    for batch, start in enumerate(range(0, count, 100)):
        test = settings(
            max_examples=min(100, count - start),
            phases=[Phase.generate],
            database=None,
            derandomize=False,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )(given(cases())(collect))
        seed(batch)(test)()
    return drawn


def measure(draws: Callable[[int], list[Case]], count: int) -> dict[str, float]:
    start = time.process_time()
    drawn = draws(count)
    seconds = time.process_time() - start
    n = len(drawn)
    bodies = [case.program.body for case in drawn]
    return {
        "cases": n,
        "cases a CPU second": round(n / seconds, 1),
        "distinct cases": round(len({case.id for case in drawn}) / n, 3),
        "distinct programs": round(len({case.program for case in drawn}) / n, 3),
        "statements a case": round(sum(len(list(statements(b))) for b in bodies) / n, 2),
        "regions a case": round(sum(len(list(regions(b))) for b in bodies) / n, 2),
    }


if __name__ == "__main__":
    main()
