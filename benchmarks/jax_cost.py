"""What a case costs on JAX and torchax, op by op and jitted: cold, warm, and compiling apart.

    python benchmarks/jax_cost.py            # all four; writes jax_cost.json
    python benchmarks/jax_cost.py --along    # what a process holds in the end; adds that to it

For each backend, in CPU seconds of the process that runs the cases, all threads, without the judge:

cold: the first N programs, in a process and with a folder of compiled programs that are both new.
same: the same programs again in that process. compile: cold less same.
disk: the same programs in another process, with the folder that the first one filled.
new: M programs that were not seen, after the N, in that other process.

Each process has run one other case first, for what torch and JAX import then.

With --along, a process and a folder that are new run as many programs as a process of that backend
may before it is replaced (torchax), or gives back what it compiled (jax), and some more of jax: MiB
that are resident after each 20 of them, and the most there were.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from amp_fuzz.backends import backends
from amp_fuzz.backends.harness import quiet
from amp_fuzz.backends.jax import backend as jaxed
from amp_fuzz.backends.torchax import backend as torchax
from amp_fuzz.runs.engine import Settings, Task, draw
from benchmarks.common import arguments, read, write

JSON = Path(__file__).with_suffix(".json")
NAMES = ("torchax", "torchax[jit]", "jax", "jax[jit]")
STRETCH = {"torchax": (torchax._LIVES, 0), "jax": (jaxed._KEPT, 40)}


def main() -> int:
    """Measure, print and write."""
    parser = arguments(__doc__)
    parser.add_argument("--cases", type=int, default=50, help="N (default 50)")
    parser.add_argument("--new", type=int, default=25, help="M (default 25)")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--statements", type=int, default=8)
    parser.add_argument("--backend", action="append", help="of the four; again for more")
    parser.add_argument("--along", action="store_true", help="memory alone")
    parser.add_argument("--here", choices=("first", "other", "along"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        print(json.dumps(measure(options)))
        return 0
    if options.along:
        found = read(JSON)
        for name in options.backend or NAMES:
            found["backends"][name]["along"] = apart(options, name, "along")
            print(name, json.dumps(found["backends"][name]["along"]), flush=True)
            write(JSON, found)
        return 0
    old = read(JSON) if JSON.exists() and options.backend else {}
    found = {
        "jax": version("jax"),
        "torchax": version("torchax"),
        "torch": torch.__version__,
        **{n: getattr(options, n) for n in ("cases", "new", "seed", "statements")},
        "backends": old.get("backends", {}),
    }
    for name in options.backend or NAMES:
        found["backends"][name] = row(options, name)
        print(name, json.dumps(found["backends"][name], indent=1), flush=True)
        write(JSON, found)
    return 0


def row(options: argparse.Namespace, name: str) -> dict[str, Any]:
    """Measure a backend in two processes that share a folder."""
    with tempfile.TemporaryDirectory() as folder:
        parts: dict[str, Any] = {}
        for here in ("first", "other"):
            parts |= apart(options, name, here, folder)
        sizes = [entry.stat().st_size for entry in Path(folder).rglob("*-cache")]
    compiling = parts["cold"]["s"] - parts["same"]["s"]
    on_disk = {"entries": len(sizes), "MiB": round(sum(sizes) / 2**20, 1)}
    return {**parts, "compile_s": round(compiling, 4), "on the disk": on_disk}


def apart(options: argparse.Namespace, name: str, here: str, folder: str = "") -> dict[str, Any]:
    """Return what a process measures, with a folder of its own if none is given."""
    words = [f"--{n}={getattr(options, n)}" for n in ("cases", "new", "seed", "statements")]
    command = [sys.executable, __file__, *words, f"--backend={name}", f"--here={here}"]
    with tempfile.TemporaryDirectory() as own:
        environment = {**os.environ, "XDG_CACHE_HOME": folder or own, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, check=True, text=True
        )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return what one of the two processes measures."""
    torch.set_num_threads(1)
    name = options.backend[0]
    backend: Any = backends()[name]
    module, _, function = backend.process.entry.partition(":")
    start = time.process_time()
    sides = getattr(importlib.import_module(module), function)(*backend.process.args)
    import jax

    counts: Counter[str] = Counter()
    jax.monitoring.register_event_listener(lambda event, **_: counts.update([event]))
    settings = Settings(backends=(name,), max_statements=options.statements)

    def drawn(cases: int, seed: int) -> list[Any]:
        return [backend.fit(c) for c in draw(Task(name, "all", (), cases, seed), settings)]

    def run(cases: list[Any]) -> dict[str, Any]:
        counts.clear()
        seconds, memory = [], _memory()
        for case in cases:
            start = time.process_time()
            sides.observe(case)
            seconds.append(time.process_time() - start)
        asked = counts["/jax/compilation_cache/compile_requests_use_cache"]
        hits = counts["/jax/compilation_cache/cache_hits"]
        return {
            "s": round(sum(seconds) / len(cases), 4),
            "median_s": round(median(seconds), 4),
            "per_s": round(len(cases) / sum(seconds), 1),
            "compilations asked for": round(asked / len(cases), 2),
            "found on the disk": round(hits / len(cases), 2),
            "MiB a case": round((_memory() - memory) / len(cases), 1),
        }

    with quiet():
        for case in drawn(1, options.seed + 1000):
            sides.observe(case)
        begun = round(time.process_time() - start, 2)
        if options.here == "along":
            last, more = STRETCH[name.partition("[")[0]]
            cases = drawn(last + more, options.seed)
            resident = {"0": round(_memory())}
            for number, case in enumerate(cases, 1):
                sides.observe(case)
                if number % 20 == 0 or number == last - 2:  # one case ran before
                    resident[str(number)] = round(_memory())
            return {"resident MiB": resident, "most MiB": round(_memory("VmHWM"))}
        cases = drawn(options.cases + options.new, options.seed)
        once, new = cases[: options.cases], cases[options.cases :]
        if options.here == "first":
            return {"begin_s": begun, "cold": run(once), "same": run(once)}
        return {"disk": run(once), "new": run(new)}


def _memory(what: str = "VmRSS") -> float:
    text = Path("/proc/self/status").read_text()
    return int(text.partition(f"{what}:")[2].split()[0]) / 1024


if __name__ == "__main__":
    sys.exit(main())
