"""Whether programs compiled as one `jax.jit` give the bits of each alone, and what it costs.

    python benchmarks/jax_batches.py --cases=64 --batch=8

Cases of ``jax[jit]``, as a run draws them. Each is compiled and run alone, then in its batch;
nothing is read from a disk. Seconds are CPU seconds of this process. Writes ``jax_batches.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from amp_fuzz import harness
from amp_fuzz.backends import backends
from amp_fuzz.backends.jaxed import JaxBackend, Program, record
from amp_fuzz.engine import Settings, Task, draw
from amp_fuzz.harness import quiet

JSON = Path(__file__).with_suffix(".json")


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--statements", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    Program("cuda", jit=True, excess=False)  # sets XLA up
    import jax

    from amp_fuzz.xla.replay import labelled, pure

    backend = backends()["jax[jit]"]
    assert isinstance(backend, JaxBackend)
    settings = Settings(backends=("jax[jit]",), max_statements=options.statements)
    task = Task("jax[jit]", "all", (), options.cases, options.seed)
    kept: list[tuple[str, Any, Any, Any, Any]] = []
    alone = together = 0.0
    with quiet():
        for one in draw(task, settings):
            case = backend.fit(one)
            seen, recorder = record(case, backend.reference())
            if seen.raised or recorder.failed:
                continue
            run, given = pure(recorder.recording)
            start = time.process_time()
            try:
                made = labelled(recorder.recording, jax.jit(run)(*given))
            except Exception:  # what XLA cannot compile is a finding elsewhere
                continue
            alone += time.process_time() - start
            kept.append((case.id, recorder.recording, run, given, made))
        differ: list[str] = []
        for i in range(0, len(kept), options.batch):
            part = kept[i : i + options.batch]
            runs = [run for _, _, run, _, _ in part]

            def whole(*given: Any, runs: Any = runs) -> Any:
                return [run(*g) for run, g in zip(runs, given, strict=True)]

            start = time.process_time()
            results = jax.jit(whole)(*(given for _, _, _, given, _ in part))
            found = [labelled(p[1], r) for p, r in zip(part, results, strict=True)]
            together += time.process_time() - start
            differ += [
                one[0] for one, made in zip(part, found, strict=True) if not same(one[4], made)
            ]
    result = {
        "jax": version("jax"),
        **vars(options),
        "programs": len(kept),
        "alone, s a program": round(alone / len(kept), 4),
        "together, s a program": round(together / len(kept), 4),
        "other bits": differ,
    }
    print(json.dumps(result, indent=1))
    JSON.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def same(one: Any, other: Any) -> bool:
    """Return whether all values are equal bit for bit."""
    return one.keys() == other.keys() and all(
        torch.equal(harness.bits(value), harness.bits(other[label])) for label, value in one.items()
    )


if __name__ == "__main__":
    sys.exit(main())
