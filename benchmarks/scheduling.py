"""How a run with a limit of time spends it: shared among its backends, or as many cases of each.

    python benchmarks/scheduling.py [--seeds=5] [--seconds=60]

A run on four backends with two workers, for each seed once as it is and once with as many cases of
each backend. Counts cases at each quarter of the time; and at the end the ops and the kernels (with
the dtypes of their inputs) that the backends met.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from amp_fuzz.backends.harness import quiet
from amp_fuzz.config import Options
from amp_fuzz.records.schema import CaseRecord
from amp_fuzz.records.store import Store
from amp_fuzz.runs import engine, workers
from amp_fuzz.runs.engine import Progress
from amp_fuzz.runs.setup import prepare
from benchmarks.common import Row, arguments, conditions, show

RESULT = Path(__file__).with_suffix(".json")
BACKENDS = ("eager-cpu", "fake-cuda", "script", "compile[aot_eager]")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--output", type=Path, default=RESULT)
    args = parser.parse_args()
    show(args.output, {"run": conditions(0, args.seconds), "rows": rows(args)})


def rows(args: argparse.Namespace) -> list[Row]:
    """Return a row for each seed and way."""
    equal: Callable[[workers.Supervisor], engine.Task] = lambda self: self.queue.pop()  # noqa: E731
    found = []
    for seed in range(args.seeds):
        for way, following in (("equal", equal), ("shared", workers.Supervisor._next)):
            with mock.patch.object(workers.Supervisor, "_next", following):
                found.append({"seed": seed, "way": way, **_run(seed, args.seconds)})
                print(found[-1], file=sys.stderr, flush=True)
    return found


def _run(seed: int, seconds: int) -> Row:
    options = Options(
        backends=BACKENDS,
        seed=seed,
        seconds=seconds,
        cases=100_000,
        workers=2,
        minimize=0,
        aimed=0,
    )
    cases: Counter[str] = Counter()
    curve: list[Row] = []
    with tempfile.TemporaryDirectory() as folder, quiet():
        store, prepared = Store(folder), prepare(options, command="scheduling")
        run, began = prepared.record.id, time.monotonic()
        with store.running(prepared.record):
            for event in workers.run(prepared.settings, store, run):
                if isinstance(event, Progress):
                    cases[event.backend] += 1
                while len(curve) < 4 * (time.monotonic() - began) // seconds and len(curve) < 4:
                    curve.append(dict(cases))
        records = [r for r in store.records(run) if isinstance(r, CaseRecord)]
    met = {(r.backend, op) for r in records for op in r.ops}
    kernels = {(r.backend, k.overload, k.dtypes) for r in records for k in r.kernels}
    return {"quarters": curve, "cases": dict(cases), "ops": len(met), "kernels": len(kernels)}


if __name__ == "__main__":
    main()
