"""How many cases a second one core judges on eager-cpu, and where the time goes.

    python benchmarks/speed.py [--cases=3000] [--seed=0] [--output=benchmarks/speed.json]

Programs of about eight ops, forward and backward, every oracle and one metamorphic relation a case,
records written: what `amp-fuzz run` does, in one process. Rates are by CPU time, which other
processes on the machine disturb less than wall time; both are in the result.
"""

from __future__ import annotations

import platform
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from amp_fuzz.backends import backends
from amp_fuzz.backends.harness import quiet
from amp_fuzz.oracle.judge import Judge
from amp_fuzz.records.store import Writer
from amp_fuzz.runs.engine import Settings, Task, draw
from amp_fuzz.upstream import shipped
from amp_fuzz.upstream.explain import judge_of
from benchmarks.common import arguments, machine, show, versions


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--cases", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", default="eager-cpu")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    settings = Settings(backends=(args.backend,), seed=args.seed, known=shipped())
    judge = judge_of(backends()[args.backend], settings.known)
    # A first round pays for imports that ops make at their first call.
    measure(Task(args.backend, "*", (), 500, args.seed + 1), settings, judge)
    result = measure(Task(args.backend, "*", (), args.cases, args.seed), settings, judge)
    result |= {
        "backend": args.backend,
        "seed": args.seed,
        "versions": versions("torch", "hypothesis", "numpy", "amp-fuzz"),
        "python": platform.python_version(),
        "machine": machine(),
    }
    show(args.output, result)


def measure(task: Task, settings: Settings, judge: Judge) -> dict[str, object]:
    """Judge the cases of a task and return rates and the share of each part."""
    parts: defaultdict[str, float] = defaultdict(float)
    statements: list[int] = []
    outcomes: defaultdict[str, int] = defaultdict(int)
    start, cpu = time.perf_counter(), time.process_time()
    with tempfile.TemporaryDirectory() as folder, quiet():
        writer = Writer(Path(folder) / "records.jsonl")
        cases = draw(task, settings)
        while True:
            before = time.perf_counter()
            case = next(cases, None)
            parts["generation"] += time.perf_counter() - before
            if case is None:
                break
            verdict = judge.judge(case)
            for part, seconds in verdict.seconds.items():
                parts[part] += seconds
            before = time.perf_counter()
            writer.write(verdict.record(task.family))
            parts["records"] += time.perf_counter() - before
            outcomes[verdict.outcome] += 1
            statements.append(len(case.program.outputs))
        writer.close()
    wall, cpu = time.perf_counter() - start, time.process_time() - cpu
    total = sum(parts.values())
    return {
        "cases": len(statements),
        "outcomes": dict(outcomes),
        "values a program": round(statistics.mean(statements), 2),
        "cases a CPU second": round(len(statements) / cpu, 1),
        "cases a wall second": round(len(statements) / wall, 1),
        "share of wall time": {k: round(v / total, 3) for k, v in parts.items()},
    }


if __name__ == "__main__":
    main()
