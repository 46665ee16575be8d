"""Measure what a case costs on JAX: cold and warm, op by op and compiled, compilation apart.

Writes ``benchmarks/jax_cost.json``. Each case runs twice in this process: the first time its shapes
are compiled, the second time they are there. Seconds are CPU seconds of this process, all threads.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from amp_fuzz.backends.jaxed import JaxBackend, Program, record  # noqa: E402
from amp_fuzz.engine import Settings, Task, draw  # noqa: E402
from amp_fuzz.judge import quiet  # noqa: E402

JSON = ROOT / "benchmarks" / "jax_cost.json"


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=30, help="of each way (default 30)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--statements", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(1)
    Program("cuda", jit=False, excess=False)  # sets XLA up
    backend = JaxBackend(process=None)  # type: ignore[arg-type]
    task = Task("jax", "all", (), options.cases, options.seed)
    settings = Settings(backends=("jax",), max_statements=options.statements)
    cases = [backend.fit(case) for case in draw(task, settings)]
    found: dict[str, Any] = {"jax": version("jax"), **vars(options)}
    with quiet():
        for case in cases:  # the reference registers its kernels, torch loads its own
            record(case, backend.reference())
        for jit in (False, True):
            found["jit" if jit else "eager"] = measure(backend, cases, jit=jit)
    print(json.dumps(found, indent=1))
    JSON.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def measure(backend: JaxBackend, cases: Any, *, jit: bool) -> dict[str, float]:
    """Return seconds a case and cases a second, of those that do not raise."""
    from amp_fuzz.xla.replay import prepared

    parts: dict[str, list[float]] = {"reference": [], "cold": [], "warm": []}
    for case in cases:
        start = time.process_time()
        seen, recorder = record(case, backend.reference())
        parts["reference"].append(time.process_time() - start)
        if seen.raised or recorder.failed:
            continue
        runs = prepared(recorder.recording, jit=jit)
        for part in ("cold", "warm"):
            start = time.process_time()
            runs()
            parts[part].append(time.process_time() - start)
    means = {name: sum(values) / len(values) for name, values in parts.items()}
    warm = means["reference"] + means["warm"]
    return {
        "cases": len(parts["cold"]),
        **{f"{name}_s": round(value, 4) for name, value in means.items()},
        "compile_s": round(means["cold"] - means["warm"], 4),
        "warm_median_s": round(median(parts["warm"]), 4),
        "cold_per_s": round(1 / (means["reference"] + means["cold"]), 2),
        "warm_per_s": round(1 / warm, 1),
    }


if __name__ == "__main__":
    sys.exit(main())
