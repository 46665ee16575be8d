"""Compare the CUDA policies on a PrivateUse1 device, with CPU kernels, with those of fake CUDA.

Every cell of the audit's matrix: what dtypes come out, or what is raised. Writes
``benchmarks/device_audit.json``: how many cells are equal, and each op with cells that are not.
Such a cell is one of kernels if the reference, with the same table and the CPU's kernels, comes to
what the device does. Each side runs in a process of its own.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from amp_fuzz.backends import backends
from amp_fuzz.backends.harness import quiet
from amp_fuzz.backends.privateuse1.backend import Device
from amp_fuzz.cases.case import Case
from amp_fuzz.catalogue import Op, select
from amp_fuzz.reports.conformance import _FAKE_ERRORS
from amp_fuzz.runs.audit import _outcome, cases_of
from amp_fuzz.strategies.drawing import usable
from benchmarks.common import ROOT, arguments, write

JSON = ROOT / "benchmarks" / "device_audit.json"
Cells = dict[str, dict[str, str]]


def main() -> int:
    """Compare, and return an exit code."""
    parser = arguments(__doc__)
    parser.add_argument("--ops", default="*", help="only these (default all)")
    options = parser.parse_args()
    names = options.ops.split(",")
    ours, theirs = alone(device, names), alone(fake, names)
    rows, counts = compared(ours, theirs)
    differ = [
        (op, cell)
        for op, cells in ours.items()
        for cell, outcome in cells.items()
        if outcome != theirs[op][cell]
    ]
    wrong = alone(unexpected, differ, ours)
    result = {"torch": torch.__version__, "cells": dict(counts), "unexpected": wrong, "ops": rows}
    print(json.dumps(result["cells"]))
    print(len(differ), "differ; of these not what the reference expects of CPU kernels:", wrong)
    for name, row in rows.items():
        print(name, row)
    if options.ops == "*":
        write(JSON, result)
    return int(bool(wrong))


def alone(function: Any, *args: Any) -> Any:
    """Call a function in a process of its own."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def device(ops: list[str]) -> Cells:
    """Return the outcome of each cell on the device, with the policies of CUDA."""
    here = Device("cuda")
    return _outcomes(ops, lambda case: _outcome(here.observe(case)))


def unexpected(cells: list[tuple[str, str]], ours: Cells) -> list[tuple[str, str, str, str]]:
    """Return those of some cells in which the device is not what the reference expects there."""
    torch.set_num_threads(1)
    here = Device("cuda")
    wanted, found = set(cells), []
    with quiet():
        for op in usable(select(sorted({op for op, _ in cells})), "cuda"):
            for cell, case in _named(op):
                if (op.name, cell) in wanted:
                    expected = _outcome(here.expect(case))
                    if expected != ours[op.name][cell]:
                        found.append((op.name, cell, expected, ours[op.name][cell]))
    return found


def fake(ops: list[str]) -> Cells:
    """Return the outcome of each cell on fake CUDA tensors."""
    there = backends()["fake-cuda"]
    return _outcomes(ops, lambda case: _outcome(there.run([there.fit(case)])[0]))


def _outcomes(ops: list[str], run: Any) -> Cells:
    torch.set_num_threads(1)
    found: Cells = {}
    with quiet():
        for op in usable(select(ops), "cuda"):
            found[op.name] = {cell: run(case) for cell, case in _named(op)}
    return found


def _named(op: Op) -> Iterator[tuple[str, Case]]:
    for case in cases_of(backends()["fake-cuda"], op):
        inputs = ",".join(spec.dtype for spec in case.program.inputs)
        yield f"{case.plan.contexts[0].dtype}: {inputs}", case


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
