"""Compare the CUDA policies on a PrivateUse1 device, with CPU kernels, with those of fake CUDA.

Every cell of the audit's matrix: what dtypes come out, or what is raised. Writes
``benchmarks/device_audit.json``: how many cells are equal, and each op with cells that are not.
Such a cell is one of kernels if the reference, with the same table and the CPU's kernels, comes to
what the device does. Each side runs in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from amp_fuzz.audit import _cases, _outcome  # noqa: E402
from amp_fuzz.backends import backends  # noqa: E402
from amp_fuzz.backends.privateuse1 import Device  # noqa: E402
from amp_fuzz.catalogue import select  # noqa: E402
from amp_fuzz.conformance import _FAKE_ERRORS  # noqa: E402
from amp_fuzz.judge import quiet  # noqa: E402
from amp_fuzz.strategies.drawing import usable  # noqa: E402

JSON = ROOT / "benchmarks" / "device_audit.json"
Cells = dict[str, dict[str, Any]]


def main() -> int:
    """Compare, and return an exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ops", default="*", help="only these (default all)")
    options = parser.parse_args()
    sides = {}
    for side in (device, fake):
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            sides[side.__name__] = pool.submit(side, options.ops.split(",")).result()
    ours = {
        op: {cell: both[0] for cell, both in cells.items()} for op, cells in sides["device"].items()
    }
    rows, counts = compared(ours, sides["fake"])
    # Cells in which the device is not what the reference makes of the table with the same kernels.
    wrong = [
        (op, cell, *both)
        for op, cells in sides["device"].items()
        for cell, both in cells.items()
        if both[0] != both[1]
    ]
    result = {
        "torch": torch.__version__,
        "cells": dict(counts),
        "not-reference": wrong,
        "ops": rows,
    }
    print("not what the reference says:", len(wrong), wrong[:5])
    print(json.dumps(result["cells"]))
    for name, row in rows.items():
        print(name, row)
    if options.ops == "*":
        JSON.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def device(ops: list[str]) -> Cells:
    """Return the outcome of each cell on the device, with CUDA's policies, and of the reference."""
    here = Device("cuda")
    return _outcomes(ops, lambda case: (_outcome(here.observe(case)), _outcome(here.expect(case))))


def fake(ops: list[str]) -> Cells:
    """Return the outcome of each cell on fake CUDA tensors."""
    there = backends()["fake-cuda"]
    return _outcomes(ops, lambda case: _outcome(there.run([there.fit(case)])[0]))


def _outcomes(ops: list[str], run: Any) -> Cells:
    torch.set_num_threads(1)
    found: Cells = {}
    backend = backends()["fake-cuda"]
    with quiet():
        for op in usable(select(ops), "cuda"):
            cells = found[op.name] = {}
            for case in _cases(backend, op):
                inputs = ",".join(spec.dtype for spec in case.program.inputs)
                context = case.plan.contexts[0].dtype
                cells[f"{context}: {inputs}"] = run(case)
    return found


def compared(device: Cells, fake: Cells) -> tuple[dict[str, Any], Counter[str]]:
    """Return the ops with cells that differ, one such cell for each way, and how many are what."""
    counts: Counter[str] = Counter()
    rows: dict[str, Any] = {}
    for op, cells in device.items():
        for cell, ours in cells.items():
            theirs = fake[op][cell]
            kind = _kind(ours, theirs)
            counts[kind] += 1
            if kind not in ("equal", "both raise", "the fake kernel says nothing"):
                row = rows.setdefault(op, {}).setdefault(f"{kind}: {ours} | {theirs}", [0, cell])
                row[0] += 1
    return rows, counts


def _kind(ours: str, theirs: str) -> str:
    if ours == theirs:
        return "equal"
    if ours.startswith("raises") and theirs.startswith("raises"):
        return "both raise"
    if theirs in _FAKE_ERRORS:
        return "the fake kernel says nothing"
    if ours.startswith("raises"):
        return "only the CPU kernel raises"
    return "only the fake kernel raises" if theirs.startswith("raises") else "dtypes differ"


if __name__ == "__main__":
    sys.exit(main())
