"""Check honest models, and each with one fault planted, and say what came out.

    python benchmarks/check_models.py [--models=cnn,gpt] [--backends=eager-cpu,fake-cuda]

Writes benchmarks/check_models.json, in which runs of other models and backends stay.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import amp_fuzz
from benchmarks.common import arguments
from tests.check.faults import (
    COMPILED,
    FAKED,
    FAULTS,
    LOWERED,
    Broken,
    BrokenCompiler,
    BrokenFake,
    Fault,
    Named,
    kernels,
    lowering,
)
from tests.check.models import MODELS, training_step

BACKENDS = "eager-cpu,fake-cuda,compile[aot_eager],compile[inductor]"
FILE = Path(__file__).with_suffix(".json")


def checked(name: str, dtype: torch.dtype, backends: list[Any]) -> amp_fuzz.CheckResult:
    """Check one model under one dtype."""
    if name == "scaler":
        step, given = training_step(dtype)
        return amp_fuzz.check(
            step, *given, backends=backends, autocast=None, backward=False, store=None, seconds=300
        )
    model, inputs = MODELS[name]()
    return amp_fuzz.check(
        model, *inputs, backends=backends, autocast=dtype, store=None, seconds=300
    )


def honest(name: str, dtype: torch.dtype, backend: str) -> dict[str, Any]:
    """Return what a model came to on a backend."""
    start = time.perf_counter()
    result = checked(name, dtype, [backend])
    (run,) = result.runs
    said = run.divergence.known if run.divergence else run.detail
    return {
        "status": run.status,
        "said": said,
        "notes": len(result.own_casts),
        "seconds": round(time.perf_counter() - start, 1),
    }


def broken(name: str, dtype: torch.dtype, backend: str) -> dict[str, Any] | None:
    """Return what is named in a model with its fault on a backend; None where there is no fault."""
    tables: dict[str, Mapping[str, Fault | Named]] = {
        "eager-cpu": FAULTS,
        "fake-cuda": FAKED,
        "compile[aot_eager]": COMPILED,
        "compile[inductor]": LOWERED,
    }
    table = tables[backend]
    if name not in table:
        return None
    fault = table[name]
    wrong = [fault.wrong] if isinstance(fault, Named) else sorted(fault.kernels)
    if isinstance(fault, Fault):
        patches = kernels(fault.kernels)
        planted: Any = Broken(patches=patches)
        if backend != "eager-cpu":
            planted = BrokenCompiler("aot_eager", patches=patches)
    elif backend == "fake-cuda":
        planted = BrokenFake(op=fault.wrong)
    else:
        planted = BrokenCompiler("inductor", patches=lowering(fault.wrong))
    start = time.perf_counter()
    result = checked(name, dtype, [planted])
    found = next(iter(result.divergences), None)
    return {
        "wrong": wrong,
        "verdict": result.verdict,
        "module": found.module if found else "",
        "op": found.op if found else "",
        "right": found is not None and (found.module, found.op) == fault[1:],
        "seconds": round(time.perf_counter() - start, 1),
    }


def main() -> None:
    """Check what is asked for and merge it into the file."""
    parser = arguments(__doc__)
    parser.add_argument("--models", default=",".join(FAULTS))
    parser.add_argument("--backends", default=BACKENDS)
    asked = parser.parse_args()
    data = json.loads(FILE.read_text()) if FILE.exists() else {"honest": {}, "faults": {}}
    data["torch"], data["machine"] = torch.__version__, platform.platform()
    for name in asked.models.split(","):
        for dtype in (torch.bfloat16, torch.float16):
            key = f"{name}, {str(dtype).removeprefix('torch.')}"
            rows = data["honest"].setdefault(key, {})
            for backend in filter(None, asked.backends.split(",")):
                rows[backend] = honest(name, dtype, backend)
                print(key, backend, rows[backend], flush=True)
                found = broken(name, dtype, backend)
                data["faults"].setdefault(key, {})[backend] = found
                print(key, backend, "with a fault", found, flush=True)
                FILE.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
