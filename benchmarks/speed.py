"""How many cases a second one core judges on eager-cpu, and where the time goes.

    python benchmarks/speed.py [--cases=3000] [--seed=0] [--output=benchmarks/speed.json]

Programs of about eight ops, forward and backward, every oracle and one metamorphic relation a case,
records written: what `amp-fuzz run` does, in one process. All times are CPU time, which other
processes on the machine disturb less than wall time.

The unit is the bare run: the backend runs the case once more, after it was judged. Then its source
and inputs are there, and torch knows its shapes. The reference runs first and pays for the latter;
it runs once more, too. Neither run counts in a sum.
"""

from __future__ import annotations

import math
import platform
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from amp_fuzz.backends import backends
from amp_fuzz.backends.harness import compiled, quiet
from amp_fuzz.cases import inputs
from amp_fuzz.cases.case import Case
from amp_fuzz.oracle.judge import Judge
from amp_fuzz.patching import patched
from amp_fuzz.plugins import inherited
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
    parser.add_argument("--seconds", type=float, default=math.inf, help="by the clock, at most")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    inherited()
    torch.set_num_threads(1)
    settings = Settings(backends=(args.backend,), seed=args.seed, known=shipped())
    judge = judge_of(backends()[args.backend], settings.known)
    # A first round pays for imports that ops make at their first call.
    start = time.monotonic()
    measure(Task(args.backend, "*", (), 500, args.seed + 1), settings, judge, args.seconds / 3)
    left = args.seconds - (time.monotonic() - start)
    result = measure(Task(args.backend, "*", (), args.cases, args.seed), settings, judge, left)
    result |= {
        "backend": args.backend,
        "seed": args.seed,
        "versions": versions("torch", "hypothesis", "numpy", "amp-fuzz"),
        "python": platform.python_version(),
        "machine": machine(),
    }
    show(args.output, result)


def measure(
    task: Task, settings: Settings, judge: Judge, seconds: float = math.inf
) -> dict[str, object]:
    """Judge the cases of a task and return the rate and what each part costs, in CPU time.

    seconds: by the clock, after which no other case begins.
    """
    until, by_clock = time.monotonic() + seconds, 0.0
    parts: defaultdict[str, float] = defaultdict(float)
    statements: list[int] = []
    outcomes: defaultdict[str, int] = defaultdict(int)

    def timed(part: str, function: Callable[..., Any], *args: Any) -> Any:
        before = time.process_time()
        made = function(*args)
        parts[part] += time.process_time() - before
        return made

    def drawn(case: Case) -> None:
        for spec in case.program.inputs:
            inputs.tensor(spec, case.seed)

    backend = judge.backend
    # The judge's clock is the wall's: here it tells CPU time.
    with (
        tempfile.TemporaryDirectory() as folder,
        quiet(),
        patched(time, "perf_counter", time.process_time),
    ):
        writer = Writer(Path(folder) / "records.jsonl")
        cases = draw(task, settings)
        while (case := timed("generation", next, cases, None)) is not None:
            began = time.monotonic()
            if began > until:
                break
            timed("source", compiled, case)
            timed("inputs", drawn, case)
            verdict = judge.judge(case)
            for part, seconds in verdict.seconds.items():
                parts[part] += seconds
            timed("records", lambda v: writer.write(v.record(task.family)), verdict)
            by_clock += time.monotonic() - began
            timed("bare", backend.run, [case])
            timed("reference, again", backend.reference().run, case)
            outcomes[verdict.outcome] += 1
            statements.append(len(case.program.outputs))
        writer.close()
    if not statements:
        return {"cases": 0}
    bare, again = parts.pop("bare"), parts.pop("reference, again")
    total, count = sum(parts.values()), len(statements)
    return {
        "cases": count,
        "outcomes": dict(outcomes),
        "values a program": round(statistics.mean(statements), 2),
        "cases a CPU second": round(count / total, 1),
        "cases a second by the clock": round(count / by_clock, 1),
        "bare runs a CPU second": round(count / bare, 1),
        "share of CPU time": {k: round(v / total, 3) for k, v in parts.items()},
        "judged / bare": round(total / bare, 2),
        "in bare runs": {k: round(v / bare, 2) for k, v in parts.items()},
        "reference, again / bare": round(again / bare, 2),
    }


if __name__ == "__main__":
    main()
