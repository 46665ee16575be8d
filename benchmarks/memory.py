"""Whether a worker's memory stays flat: what it holds from case 500 to case 5,000.

    python benchmarks/memory.py [--backends=eager-cpu,script,...] [--cases=5000] [--seed=1]

Cases are drawn and judged as a worker of a run does it, all ops, forward and backward, one process
for each backend. Allocated memory is the anonymous part of the resident size; the rest is pages of
torch's libraries, which the first call of each kernel brings in. As in a worker, oneDNN keeps 16
primitives; with the 1,024 of its default (``--primitives=1024``) its cache grows. Writes
``benchmarks/memory.json``; backends that are not run stay as they were.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import arguments, machine, read, versions, write

JSON = Path(__file__).with_suffix(".json")
EVERY = 500
CAPACITIES = (
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY",
    "LRU_CACHE_CAPACITY",
)  # as in amp_fuzz.runs.workers


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--backends", default="eager-cpu,fake-cuda,script,compile[aot_eager]")
    parser.add_argument("--cases", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--primitives", type=int, default=16)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(args.child, args.cases, args.seed)))
        return
    for name in args.backends.split(","):
        command = [sys.executable, __file__, f"--child={name}", f"--cases={args.cases}"]
        done = subprocess.run(
            [*command, f"--seed={args.seed}"],
            env={**os.environ, **dict.fromkeys(CAPACITIES, str(args.primitives))},
            check=True,
            capture_output=True,
            text=True,
        )
        found = json.loads(done.stdout.splitlines()[-1])
        print(name, found, flush=True)
        result = read(JSON) if JSON.exists() else {"backends": {}}
        result["backends"][f"{name}, {args.primitives} primitives"] = found
        result["versions"] = versions("torch", "amp-fuzz")
        result["machine"] = machine()
        write(JSON, result)


def measure(name: str, cases: int, seed: int) -> dict[str, Any]:
    """Judge so many cases; return the size of the process, in MiB, after every 500."""
    import torch

    from amp_fuzz.records.schema import CaseRecord
    from amp_fuzz.runs.engine import Settings, Task, explore
    from amp_fuzz.upstream import shipped

    torch.set_num_threads(1)
    settings = Settings((name,), seed=seed, known=shipped(), minimize=0.0)
    outcomes: Counter[str] = Counter()
    sizes: dict[str, tuple[int, int]] = {}
    for event in explore(Task(name, "all", (), cases, seed), settings):
        if isinstance(event, CaseRecord):
            outcomes[event.outcome] += 1
            if outcomes.total() % EVERY == 0:
                gc.collect()
                sizes[str(outcomes.total())] = resident()
    first, last = sizes[str(EVERY)], list(sizes.values())[-1]
    return {
        "seed": seed,
        "MiB after cases, allocated and of files": sizes,
        "allocated, last to first": round(last[0] / first[0], 3),
        "in all, last to first": round(sum(last) / sum(first), 3),
        "outcomes": dict(outcomes),
    }


def resident() -> tuple[int, int]:
    """Return what of this process is in memory, in MiB: what it allocated, and of files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    kib = {
        name: text.split()[0] for name, text in (line.split(":") for line in lines if "kB" in line)
    }
    return int(kib["RssAnon"]) // 1024, int(kib["RssFile"]) // 1024


if __name__ == "__main__":
    main()
