"""How far honest kernels are from their bands, why, and what the shadows cost.

    python benchmarks/shadow.py [--samples=8] [--ops=GLOB] [--cases=5000] [--output=STEM]

PyTorch's operator database: every operator runs under the reference's autocast (bfloat16) with
inputs of float32, bfloat16 and float16, forward and backward. Then random cases of the engine. The
kernels are torch's own, so each distance is honest rounding. Where one is over the threshold, the
kernel in which it arises is found and its call is taken apart (shadow_causes.py); the explanations
stand in shadow_kernels.toml, and both come together in
docs/evidence/shadow-operators.md (shadow_table.py).

Writes STEM.json and STEM.csv, the quantiles of every operator and dtype. A part that is left out
(--each=0, --cases=0) stays as it was in STEM.json.
"""

from __future__ import annotations

import argparse
import csv
import fnmatch
import json
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from torch.utils._pytree import tree_flatten, tree_map_only

from amp_fuzz import reference
from amp_fuzz.backends import backends, harness
from amp_fuzz.backends.reference import within
from amp_fuzz.cases.case import Case
from amp_fuzz.reference.shadow.band import UNIT_ROUNDOFF, Band, distance
from amp_fuzz.reference.shadow.mode import Shadow
from amp_fuzz.runs.engine import Settings, Task, draw
from benchmarks.common import arguments, machine, versions, write
from benchmarks.shadow_causes import MANY, Cause, Traced, enough, probe

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--ops", default="*")
    parser.add_argument(
        "--each", type=int, default=10, help="samples of each operator and dtype, 0: none"
    )
    parser.add_argument("--threshold", type=float, default=4.0)
    parser.add_argument(
        "--cases", type=int, default=5000, help="random cases of the engine, 0: none"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="without its suffix")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows: list[Row] = []
    path = args.output and args.output.with_suffix(".json")
    result: dict[str, Any] = json.loads(path.read_text()) if path and path.exists() else {}
    result |= {
        "threshold": args.threshold,
        "samples": args.samples,
        "versions": versions("torch", "amp-fuzz"),
        "machine": machine(),
    }
    if args.each:
        result["operator database"] = database(args, rows)
    if args.cases:
        result["random cases"] = random_cases(args)
    print(json.dumps(result, indent=1))
    if path:
        write(path, result)
        if rows:
            by_operator(rows, path.with_suffix(".csv"))


Row = tuple[str, str, str, str, float, float]  # operator, its dtype, kind, dtype, excess, bias


def random_cases(args: argparse.Namespace) -> dict[str, Any]:
    """Judge the reference's own values in random cases, and time the shadows beside plain runs."""
    reference_ = backends()["eager-cpu"].reference()
    settings = Settings(backends=("eager-cpu",), seed=args.seed)
    rows: list[Row] = []
    causes = Causes()
    gains = Gains(args.threshold)
    unknown = ranged = cases_over = 0
    unplaced: dict[str, float] = {}
    plain = shadowed = 0.0
    for case in draw(Task("eager-cpu", "*", (), args.cases, args.seed), settings):
        start = time.process_time()
        reference_.run(case)
        middle = time.process_time()
        _, bands = reference_.shadowed(case, args.samples, 0)
        plain += middle - start
        shadowed += time.process_time() - middle
        over: dict[str, float] = {}
        for label, band in bands.items():
            unknown += not band.known
            ranged += bool(band.left)
            if not band.known or band.left or not band.nominal.numel():
                continue
            found = distance(band, band.nominal)
            kind = "gradient" if label.endswith(".grad") else "forward"
            rows.append(("", "", kind, short(band.nominal.dtype), found.excess, found.bias))
            gains.count(band)
            if (size := max(found.excess, found.bias)) > args.threshold:
                over[label] = size
        if over:
            cases_over += 1
            mode = Traced(args.samples, 0, args.threshold)
            follow(case, mode)
            _, again = reference_.shadowed(case, MANY, MANY)
            still = sum(is_over(again[label], args.threshold) for label in over)
            if not mode.causes:  # the calls one by one are all within their bands
                unplaced[case.id] = round(max(over.values()), 2)
                continue
            causes.add((), case.id, mode.causes[0], len(over), still, max(over.values()))
    return {
        "cases": args.cases,
        "cases with a value over the threshold": cases_over,
        "not followed": unknown,
        "after an op that left its range": ranged,
        "cases a CPU second, shadows alone": round(args.cases / shadowed, 1) if shadowed else 0,
        "times a plain run of the reference": round(shadowed / plain, 1) if plain else 0,
        **table(rows, args.threshold),
        "gain of 2 %": gains.found(),
        "over the threshold": causes.explained(),
        "over it, and no call alone": unplaced,
    }


def follow(case: Case, mode: Traced) -> None:
    """Run a case under the reference and a mode, in every thread of it."""
    reference_ = backends()["eager-cpu"].reference()
    runtime = replace(within(reference_.of(case), lambda: mode), noted=lambda label, t: None)
    harness.run(case, runtime)


def database(args: argparse.Namespace, rows: list[Row]) -> dict[str, Any]:
    """Judge every operator of PyTorch's database; fill in the rows."""
    start = time.process_time()
    refused: dict[str, str] = {}
    raised: defaultdict[str, int] = defaultdict(int)
    causes = Causes()
    unknown = 0
    for number, (op, dtype, sample) in enumerate(samples(args.ops, args.each)):
        mode = Shadow(args.samples)
        try:
            values = run(op, sample, mode)
        except Exception:
            raised[name(op)] += 1
            continue
        refused |= mode.refused
        over: defaultdict[str, list[float]] = defaultdict(list)
        for kind, value in values:
            band = mode.band(value)
            unknown += not band.known
            if band.known and value.numel():
                found = distance(band, band.nominal)
                rows.append(
                    (name(op), short(dtype), kind, short(value.dtype), found.excess, found.bias)
                )
                if (size := max(found.excess, found.bias)) > args.threshold:
                    over[kind].append(size)
        if over:
            traced = Traced(args.samples, 0, args.threshold)
            run(op, sample, traced)
            many = Shadow(enough(tensors((sample.input, sample.args, sample.kwargs))), MANY)
            still: defaultdict[str, int] = defaultdict(int)
            for kind, value in run(op, sample, many):
                still[kind] += bool(value.numel()) and is_over(many.band(value), args.threshold)
            for kind, sizes in over.items():
                # The first in time, but a gradient's own kernel before the forward pass's.
                cause = traced.causes[0 if kind == "forward" else -1]
                of = (name(op), short(dtype), kind)
                causes.add(of, str(number), cause, len(sizes), still[kind], max(sizes))
    return {
        "operators": len({r[0] for r in rows}),
        "not followed": unknown,
        "refused": refused,
        "raised": dict(raised),
        "CPU seconds": round(time.process_time() - start, 1),
        **table(rows, args.threshold),
        "over the threshold": causes.explained("operator", "dtype", "direction"),
    }


class Causes:
    """The kernels in which an excess arises, each with its largest and the experiments on that."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, ...], dict[str, Any]] = {}

    def add(
        self, of: tuple[str, ...], where: str, cause: Cause, values: int, still: int, size: float
    ) -> None:
        """Count a run of an operator (or of none: a random case) under the kernel it arises in."""
        row = self.found.setdefault(
            (*of, cause.kernel, cause.dtype),
            {"runs": 0, "values": 0, "still": 0, "largest": 0.0, "size": 0.0},
        )
        row["runs"] += 1
        row["values"] += values
        row["still"] += still
        row["largest"] = max(row["largest"], size)
        if cause.size > row["size"]:
            row |= {"size": cause.size, "cause": cause, "where": where}

    def explained(self, *names: str) -> list[dict[str, Any]]:
        """Return a row for each, with the experiments on the largest."""
        rows = []
        for key, row in sorted(self.found.items()):
            expected, observed, scale = row["cause"].worst
            rows.append(
                dict(zip((*names, "kernel", "result"), key, strict=True))
                | {"runs": row["runs"], "values": row["values"]}
                | {"values with 64 samples": row["still"], "example": row["where"]}
                | {"excess": figure(row["largest"]), "excess of the kernel": figure(row["size"])}
                | {"expected": figure(expected), "observed": figure(observed)}
                | {"unit": figure(scale), "experiments": tried(row["cause"])}
            )
        return rows


def is_over(band: Band, threshold: float) -> bool:
    found = distance(band, band.nominal)
    return max(found.excess, found.bias) > threshold


def tried(cause: Cause) -> dict[str, float]:
    """Return the experiments, or none where the kernel cannot be called again alone."""
    try:
        return probe(cause)
    except Exception as error:
        print(f"{cause.kernel}: {error}")
        return {}


class Gains:
    """How often a result that is 2 % too large is found: the cost of what is allowed to others."""

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold
        self.counts: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])

    def count(self, band: Band) -> None:
        value = band.nominal
        if value.dtype not in UNIT_ROUNDOFF or not (value != 0).any():
            return
        own = distance(band, value)
        over = max(own.excess, own.bias) > self.threshold
        found = distance(band, (value.to(band.clean.dtype) * 1.02).to(value.dtype))
        kind = "torch's own value over the threshold" if over else "torch's own value under it"
        for key in (kind, f"{kind}, {short(value.dtype)}"):
            self.counts[key][0] += 1
            self.counts[key][1] += max(found.excess, found.bias) > self.threshold

    def found(self) -> dict[str, dict[str, Any]]:
        return {
            k: {"values": n, "found": hit, "share": round(hit / n, 3)}
            for k, (n, hit) in sorted(self.counts.items())
        }


def by_operator(rows: list[Row], path: Path) -> None:
    """Write the quantiles of each operator, dtype of its inputs, and direction."""
    groups: defaultdict[tuple[str, str, str], list[tuple[float, float]]] = defaultdict(list)
    for operator, dtype, kind, _, excess, bias in rows:
        groups[operator, dtype, kind].append((excess, bias))
    with path.open("w", newline="") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(["operator", "dtype", "direction", "comparisons", *QUANTILES, "largest bias"])
        for key, found in sorted(groups.items()):
            quantile = quantiles(sorted(e for e, _ in found))
            out.writerow([*key, len(found), *quantile.values(), figure(max(b for _, b in found))])


def table(rows: list[Row], threshold: float) -> dict[str, Any]:
    """Return quantiles of excess and bias, by dtype of the value too."""
    over = sum(max(r[4], r[5]) > threshold for r in rows)
    return {
        "comparisons": len(rows),
        "over the threshold, of them": over,
        "excess": quantiles(sorted(r[4] for r in rows)),
        "bias": quantiles(sorted(r[5] for r in rows)),
        "by dtype": {
            f"{d}, {k}": {"comparisons": len(found)} | quantiles(sorted(found))
            for d, k in sorted({(r[3], r[2]) for r in rows})
            if (found := [r[4] for r in rows if (r[3], r[2]) == (d, k)])
        },
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
            # None of what is not used, though the annotation does not say so: no tensor.
            grads = tensors(torch.autograd.grad(starts, leaves, ones, allow_unused=True))
    judged = [("forward", t) for t in results] + [("gradient", t) for t in grads]
    return [(k, t) for k, t in judged if t.layout is torch.strided]


def tensors(tree: Any) -> list[torch.Tensor]:
    return [t for t in tree_flatten(tree)[0] if isinstance(t, torch.Tensor)]


def name(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


QUANTILES = {"median": 0.5, "90 %": 0.9, "99 %": 0.99, "99.9 %": 0.999, "largest": 1.0}


def quantiles(ordered: list[float]) -> dict[str, float]:
    if not ordered:
        return {}
    return {k: figure(ordered[int(q * (len(ordered) - 1))]) for k, q in QUANTILES.items()}


def figure(value: float) -> float:
    return float(f"{value:.3g}")


if __name__ == "__main__":
    main()
