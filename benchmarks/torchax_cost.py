"""What a case that is judged costs on torchax, eager and jitted, and how many agree.

    python benchmarks/torchax_cost.py --backend='torchax[jit]' --cases=200 --seed=1

Cases are those that a run draws. Each is judged (CPU seconds of both processes), then run once more
where torchax is. What was compiled may be found on the disk; ``jax_cost.py`` begins without, and
has compiling apart. Writes a row for
each backend and seed into torchax_cost.json beside it.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
from collections import Counter
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from amp_fuzz.backends import backends
from amp_fuzz.backends.harness import quiet
from amp_fuzz.backends.torchax.backend import TorchaxBackend
from amp_fuzz.runs.engine import Settings, Task, draw
from amp_fuzz.upstream import shipped
from amp_fuzz.upstream.explain import judge_of
from benchmarks.common import arguments, write

OUT = Path(__file__).with_suffix(".json")


def measure(name: str, cases: int, seed: int, statements: int, seconds: float) -> dict[str, object]:
    backend = backends()[name]
    assert isinstance(backend, TorchaxBackend)
    judge = judge_of(backend, shipped(), confirm=False)
    settings = Settings(backends=(name,), max_statements=statements)
    outcomes: Counter[str] = Counter()
    known: Counter[str] = Counter()
    new: list[str] = []
    first: list[float] = []
    again: list[float] = []
    with quiet():
        start, own, theirs = time.perf_counter(), time.process_time(), 0.0
        for case in draw(Task(name, "all", (), cases, seed), settings):
            verdict = judge.judge(case)
            outcomes[verdict.outcome] += 1
            known.update(filter(None, verdict.known.split("+")))
            if verdict.outcome == "diverged":
                found = verdict.divergence
                new.append(f"{verdict.case.id} {found}")
            if not again:
                theirs = _cpu(backend)  # what importing took, and the first case
            first.append(verdict.seconds["backend"])
            again.append(backend.run([verdict.case])[0].seconds)
            if time.process_time() - own + _cpu(backend) - theirs > seconds:
                break
        cpu = time.process_time() - own + _cpu(backend) - theirs
        wall = time.perf_counter() - start
    count = sum(outcomes.values())
    return {
        "backend": name,
        "seed": seed,
        "statements": statements,
        "detail": backend.availability().detail,
        "cases": count,
        "outcomes": dict(outcomes),
        "known": dict(known.most_common()),
        "new": new,
        "cpu seconds": round(cpu, 1),
        "wall seconds": round(wall, 1),
        "cpu seconds a case, two runs": round(cpu / count, 3),
        "first run, median s": round(statistics.median(first), 4),
        "second run, median s": round(statistics.median(again), 4),
        "memory of its process, MiB": _memory(backend),
    }


def _pid(backend: TorchaxBackend) -> int:
    process = backend.process._process
    assert process is not None
    return process.pid


def _cpu(backend: TorchaxBackend) -> float:
    fields = Path(f"/proc/{_pid(backend)}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def _memory(backend: TorchaxBackend) -> int:
    text = Path(f"/proc/{_pid(backend)}/status").read_text()
    return int(text.partition("VmRSS:")[2].split()[0]) // 1024


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--backend", default="torchax")
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--statements", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=600, help="of CPU, of both processes")
    given = parser.parse_args()
    torch.set_num_threads(1)
    row = measure(given.backend, given.cases, given.seed, given.statements, given.seconds)
    print(json.dumps(row, indent=1))
    old = json.loads(OUT.read_text())["rows"] if OUT.exists() else []
    key = ("backend", "seed", "statements")
    rows = [r for r in old if any(r[k] != row[k] for k in key)] + [row]
    rows.sort(key=lambda r: [str(r[k]) for k in key])
    head = {"torch": torch.__version__, "machine": platform.machine(), "rows": rows}
    write(OUT, head)


if __name__ == "__main__":
    main()
