"""What judging a compiled program costs beside only compiling and running it.

    python benchmarks/compilers.py [--backends=script,trace,...] [--output=FILE]

For each backend the same cases, drawn by the engine with at most 8 statements, are run bare
(compiled and run, nothing compared) and judged (reference, oracle, shadows where a bit differs,
confirmation of what diverges). The ratio of the two is of one process and one core, in CPU seconds
with those of g++, warm; which comes first changes from case to case, and none finds on the disk
what another compiled. Bare, torch.compile is as torch has it: what `untimed` spares is not spared
("spared" is bare with it). Memory is the resident size of the process after a fifth of the cases
and after all.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch._dynamo  # which a first call of a custom op imports, 2 s
from torch._inductor.utils import fresh_cache

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from amp_fuzz.backends import Backend, backends
from amp_fuzz.backends import compile as compiled
from amp_fuzz.backends.compile import CompileBackend
from amp_fuzz.backends.harness import quiet
from amp_fuzz.cases.case import Case
from amp_fuzz.cases.program import statements
from amp_fuzz.oracle.verdict import Verdict
from amp_fuzz.runs.engine import Settings, Task, draw
from amp_fuzz.upstream import shipped
from amp_fuzz.upstream.explain import judge_of
from benchmarks.common import arguments, cpu_seconds, machine, show, versions

CASES = {"compile[inductor]": 18, "compile[aot_eager]": 60, "compile[eager]": 60, "export": 60}
WARM = 3


def main() -> None:
    parser = arguments(__doc__)
    names = "script,script[freeze],trace,trace[check],export,compile[eager],compile[aot_eager],"
    parser.add_argument("--backends", default=f"{names}compile[inductor]")
    parser.add_argument("--cases", type=int, default=600, help="where a compilation is cheap")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {
        "seed": args.seed,
        "backends": {
            name: measure(backends()[name], CASES.get(name, args.cases), args.seed)
            for name in args.backends.split(",")
        },
        "versions": versions("torch", "amp-fuzz"),
        "machine": machine(),
    }
    show(args.output, result)


def measure(backend: Backend, count: int, seed: int) -> dict[str, Any]:
    """Return the cost of a case bare and judged, in CPU seconds, and what came of the cases."""
    settings = Settings((backend.name,), max_statements=8)
    task = Task(backend.name, "benchmark", (), count + WARM, seed)
    cases = [backend.fit(case) for case in draw(task, settings)]
    judge = judge_of(backend, shipped())
    spends: dict[str, float] = {}
    compiles = isinstance(backend, CompileBackend)

    def run(case: Case) -> None:
        backend.run([case])

    def plain(case: Case) -> None:
        with patch.object(compiled, "untimed", nullcontext):
            run(case)

    outcomes: dict[str, int] = {}
    sizes = []
    with quiet():
        for i, case in enumerate(cases):
            verdicts: list[Verdict] = []
            ways: dict[str, Callable[[], Any]] = {
                "bare": partial(plain, case),
                "spared": partial(run, case),
                "judged": lambda: verdicts.append(judge.judge(case)),  # noqa: B023
            }
            orders = list(permutations(ways if compiles else ("bare", "judged")))
            cost = {way: spent(ways[way]) for way in orders[i % len(orders)]}
            if i < WARM:
                continue
            for way, seconds in cost.items():
                spends[way] = spends.get(way, 0.0) + seconds
            outcome = verdicts[0].outcome
            outcomes[outcome] = outcomes.get(outcome, 0) + 1
            if i - WARM in (count // 5, count - 1):
                gc.collect()
                sizes.append(_resident())
    size = sum(len(list(statements(c.program.body))) for c in cases) / len(cases)
    return {
        "cases": count,
        "statements": round(size, 1),
        **{f"{way}, cases/s": round(count / seconds, 2) for way, seconds in spends.items()},
        "ratio": round(spends["judged"] / spends["bare"], 2),
        "outcomes": outcomes,
        "MiB after a fifth, after all": sizes,
    }


def spent(function: Callable[[], Any]) -> float:
    """Return the CPU seconds that a call takes; what Inductor keeps on the disk is another's."""
    with fresh_cache():
        start = cpu_seconds()
        function()
        return cpu_seconds() - start


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 // 2**20


if __name__ == "__main__":
    main()
