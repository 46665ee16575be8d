"""How far honest kernels are from their bands, and what the shadows cost.

    python benchmarks/shadow.py [--samples=8] [--ops=GLOB] [--cases=5000] [--output=FILE]

PyTorch's operator database: every operator runs under the reference's autocast (bfloat16) with
inputs of float32, bfloat16 and float16, forward and backward. Then random cases of the engine. The
kernels are torch's own, so each distance is honest rounding: its quantiles say where a threshold
may stand, and what is over it needs an explanation (docs/shadow.md).
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import platform
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map_only

from amp_fuzz import reference
from amp_fuzz.backends import backends
from amp_fuzz.engine import Settings, Task, draw
from amp_fuzz.program import statements
from amp_fuzz.reference.shadows import Shadow, distance

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--ops", default="*")
    parser.add_argument("--each", type=int, default=2, help="samples of each operator and dtype")
    parser.add_argument("--threshold", type=float, default=4.0)
    parser.add_argument("--cases", type=int, default=5000, help="random cases of the engine")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    result: dict[str, Any] = {
        "threshold": args.threshold,
        "samples": args.samples,
        "operator database": database(args),
        "random cases": random_cases(args),
        "versions": {p: version(p) for p in ("torch", "amp-fuzz")},
        "machine": f"{platform.machine()}, {platform.system()}, one thread",
    }
    print(json.dumps(result, indent=2))
    if args.output:
        args.output.write_text(json.dumps(result, indent=2) + "\n")


def random_cases(args: argparse.Namespace) -> dict[str, Any]:
    """Judge the reference's own values in random cases, and time the shadows beside plain runs."""
    backend = backends()["eager-cpu"]
    reference_ = backend.reference()
    settings = Settings(backends=("eager-cpu",), seed=args.seed)
    rows: list[Any] = []
    unknown = ranged = 0
    plain = shadowed = 0.0
    for case in draw(Task("eager-cpu", "*", (), args.cases, args.seed), settings):
        start = time.process_time()
        reference_.run(case)
        middle = time.process_time()
        _, bands = reference_.shadowed(case, args.samples, 0)
        plain += middle - start
        shadowed += time.process_time() - middle
        ops = {n: s.op for s in statements(case.program.body) for n in s.outputs}
        for label, band in bands.items():
            unknown += not band.known
            ranged += bool(band.left)
            if band.known and not band.left and band.nominal.numel():
                found = distance(band, band.nominal)
                kind = "grad" if label.endswith(".grad") else "out"
                op = ops.get(label.rpartition(".")[2], case.id)
                rows.append(
                    (found.excess, found.bias, op, case.id, kind, short(band.nominal.dtype))
                )
    report = table(rows, args.threshold)
    return report | {
        "cases": args.cases,
        "not followed": unknown,
        "after an op that left its range": ranged,
        "cases a CPU second, shadows alone": round(args.cases / shadowed, 1) if shadowed else 0,
        "times a plain run of the reference": round(shadowed / plain, 1) if plain else 0,
    }


def database(args: argparse.Namespace) -> dict[str, Any]:
    start = time.perf_counter()
    rows, refused, unknown = [], {}, 0
    for op, dtype, sample in samples(args.ops, args.each):
        mode = Shadow(args.samples)
        try:
            values = run(op, sample, mode)
        except Exception:
            continue
        refused |= mode.refused
        for kind, value in values:
            band = mode.band(value)
            unknown += not band.known
            if band.known and value.numel():
                found = distance(band, band.nominal)
                row = (found.excess, found.bias, name(op), short(dtype), kind, short(value.dtype))
                rows.append(row)
    return table(rows, args.threshold) | {
        "operators": len({r[2] for r in rows}),
        "not followed": unknown,
        "refused": refused,
        "seconds": round(time.perf_counter() - start, 1),
    }


def table(rows: list[Any], threshold: float) -> dict[str, Any]:
    """Return quantiles of excess and bias, and what is over the threshold."""
    by_excess = sorted(rows, key=lambda r: -r[0])
    by_bias = sorted(rows, key=lambda r: -r[1])
    return {
        "comparisons": len(rows),
        "excess": quantiles(sorted(r[0] for r in rows)),
        "bias": quantiles(sorted(r[1] for r in rows)),
        "by dtype": {
            d: quantiles(sorted(r[0] for r in rows if r[5] == d))
            for d in sorted({r[5] for r in rows})
        },
        "over the threshold": worst(by_excess, threshold, 0) | worst(by_bias, threshold, 1),
    }


def samples(pattern: str, each: int) -> Iterator[tuple[Any, torch.dtype, Any]]:
    from torch.testing._internal.common_methods_invocations import op_db

    for op in op_db:
        if op.name.startswith(("empty", "new_empty")) or not fnmatch.fnmatchcase(op.name, pattern):
            continue
        for dtype in DTYPES:
            if not op.supports_dtype(dtype, "cpu"):
                continue
            trains = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
            torch.manual_seed(0)
            try:
                found = list(op.sample_inputs("cpu", dtype, requires_grad=trains))
            except Exception:
                continue
            # The first ones are the plainest; a stride through the rest meets the others.
            for sample in found[:: max(1, len(found) // each)][:each]:
                yield op, dtype, sample


def run(op: Any, sample: Any, mode: Shadow) -> list[tuple[str, torch.Tensor]]:
    """Run a sample under the shadow and return its results and gradients."""
    given = tree_map_only(
        torch.Tensor,
        lambda t: t.detach().clone().requires_grad_(t.requires_grad),
        (sample.input, sample.args, sample.kwargs),
    )
    leaves = [t for t in tensors(given) if t.requires_grad]
    torch.manual_seed(0)
    with mode:
        with reference.autocast("cpu", dtype=torch.bfloat16):
            out = op(given[0], *given[1], **given[2])
        results = tensors(out)
        starts = [t for t in results if t.requires_grad and t.is_floating_point()]
        grads: list[torch.Tensor] = []
        if starts and leaves:
            ones = [torch.ones_like(t) for t in starts]
            found = torch.autograd.grad(starts, leaves, ones, allow_unused=True)
            grads = [g for g in found if g is not None]
    judged = [("out", t) for t in results] + [("grad", t) for t in grads]
    return [(k, t) for k, t in judged if t.layout is torch.strided]


def tensors(tree: Any) -> list[torch.Tensor]:
    return [t for t in tree_flatten(tree)[0] if isinstance(t, torch.Tensor)]


def name(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def quantiles(ordered: list[float]) -> dict[str, float]:
    if not ordered:
        return {}
    places = {"median": 0.5, "90 %": 0.9, "99 %": 0.99, "99.9 %": 0.999}
    found = {k: round(ordered[int(q * (len(ordered) - 1))], 2) for k, q in places.items()}
    return found | {"largest": round(ordered[-1], 2)}


def worst(rows: list[Any], threshold: float, column: int) -> dict[str, float]:
    """Return the largest of each operator and kind that is over the threshold."""
    label = ("excess", "bias")[column]
    found: defaultdict[str, float] = defaultdict(float)
    for row in rows:
        if row[column] > threshold:
            key = f"{row[2]} {row[4]} {row[5]} {label}"
            found[key] = max(found[key], round(row[column], 1))
    return dict(found)


if __name__ == "__main__":
    main()
