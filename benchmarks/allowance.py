"""How many comparisons of a compiler are decided by what torch's own value is off by.

    python benchmarks/allowance.py [--backend=compile[inductor]] [--cases=100] [--ops=GLOBS]

The oracle allows a backend what eager's value itself is away from the clean one
(`reference.distance`). Each value that differs from the reference in a bit is measured with the
allowance and without. Where only the allowance keeps it under the threshold, it is measured once
more 2 % larger: what the allowance costs. "over the threshold" is what the oracle refuses, of known
entries too; "not judged" is what the shadows cannot follow.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from amp_fuzz.backends import backends
from amp_fuzz.backends.harness import quiet
from amp_fuzz.oracle import Rounding
from amp_fuzz.oracle.compare import same
from amp_fuzz.oracle.rounding import CONFIRM, SCREEN, THRESHOLD
from amp_fuzz.reference import Band, Distance, distance
from amp_fuzz.reference.shadow.mode import UNIT_ROUNDOFF
from amp_fuzz.runs.engine import Settings, Task, draw
from benchmarks.common import arguments, show, versions


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--backend", default="compile[inductor]")
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ops", default="*", help="what programs are made of, joined by commas")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    ops = tuple(args.ops.split(","))
    counts, decided = measure(args.backend, args.cases, args.seed, ops)
    result = {
        "backend": args.backend,
        "cases": args.cases,
        "seed": args.seed,
        "ops": args.ops,
        **counts,
        "decided by the allowance, where": decided,
        "versions": versions("torch", "amp-fuzz"),
    }
    show(args.output, result)


def measure(
    name: str, cases: int, seed: int, ops: tuple[str, ...]
) -> tuple[dict[str, int], list[dict[str, Any]]]:
    """Return the counts of values, and the values that the allowance decides."""
    backend = backends()[name]
    reference = backend.reference()
    counts: Counter[str] = Counter()
    decided = []
    settings = Settings(backends=(name,), seed=seed, ops=ops)
    for drawn in draw(Task(name, "*", (), cases, seed), settings):
        case = backend.fit(drawn)
        with quiet():
            expected, observed = reference.run(case), backend.run([case])[0]
        shadowed = cache(partial(reference.shadowed, case))  # the oracle's bands are ours too
        rounding = Rounding(shadowed)
        for label, want in expected.values.items():
            got = observed.values.get(label)
            if want is None or got is None or (want.dtype, want.shape) != (got.dtype, got.shape):
                continue
            counts["values compared"] += 1
            if same(want, got):
                counts["equal in every bit"] += 1
                continue
            with quiet():
                divergence = rounding(label, want, got)
            if label in rounding.unjudged:
                counts["not judged"] += 1
                continue
            if divergence is not None:
                counts["over the threshold"] += 1
                continue
            with quiet():
                left = outside(shadowed, label, got)
            if left is None:
                counts["within rounding alone"] += 1
                continue
            counts["decided by the allowance"] += 1
            band, bare = left
            row: dict[str, Any] = {"case": case.id, "label": label, "dtype": str(got.dtype)[6:]}
            row |= {"bare": figure(bare), "allowed": figure(size(distance(band, got)))}
            if got.dtype in UNIT_ROUNDOFF:
                larger = (got.to(band.clean.dtype) * 1.02).to(got.dtype)
                row["2 % larger"] = figure(size(distance(band, larger)))
                with quiet():
                    found = rounding(label, want, larger) is not None
                counts["decided by it, found when 2 % larger"] += found
            decided.append(row)
    return dict(counts), decided


def outside(
    shadowed: Callable[[int, int], tuple[Any, Mapping[str, Band]]], label: str, got: torch.Tensor
) -> tuple[Band, float] | None:
    """Return the band that a value is outside of without the allowance, and how far, or None."""
    found = None
    for samples in (SCREEN, CONFIRM):
        band = shadowed(samples, samples)[1].get(label)
        if band is None or not band.known:
            return None
        # The nominal value of a band is measured without the allowance.
        far = size(distance(replace(band, nominal=got), got))
        if far <= THRESHOLD:
            return None
        found = band, far
    return found


def size(found: Distance) -> float:
    return max(found.excess, found.bias)


def figure(value: float) -> float:
    return float(f"{value:.3g}")


if __name__ == "__main__":
    main()
