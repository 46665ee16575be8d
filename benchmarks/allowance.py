"""How many comparisons of a compiler are decided by what torch's own value is off by.

    python benchmarks/allowance.py [--backend=compile[inductor]] [--cases=100] [--seed=0]

The oracle allows a backend what eager's value itself is away from the clean one
(`reference.distance`). Each value that differs from the reference in a bit is measured with the
allowance and without. Where only the allowance keeps it under the threshold, it is measured once
more 2 % larger: what the allowance costs.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections import Counter
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from amp_fuzz.backends import backends
from amp_fuzz.engine import Settings, Task, draw
from amp_fuzz.oracle import CONFIRM, SCREEN, THRESHOLD
from amp_fuzz.oracle.compare import same
from amp_fuzz.reference import Band, distance
from amp_fuzz.reference.shadows import UNIT_ROUNDOFF


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="compile[inductor]")
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    counts, decided = measure(args.backend, args.cases, args.seed)
    result = {
        "backend": args.backend,
        "cases": args.cases,
        "seed": args.seed,
        **counts,
        "decided by the allowance, where": decided,
        "versions": {p: version(p) for p in ("torch", "amp-fuzz")},
    }
    print(json.dumps(result, indent=1))
    if args.output:
        args.output.write_text(json.dumps(result, indent=1) + "\n")


def measure(name: str, cases: int, seed: int) -> tuple[dict[str, int], list[dict[str, Any]]]:
    backend = backends()[name]
    reference = backend.reference()
    counts: Counter[str] = Counter()
    decided = []
    settings = Settings(backends=(name,), seed=seed)
    for drawn in draw(Task(name, "*", (), cases, seed), settings):
        case = backend.fit(drawn)
        expected, observed = reference.run(case), backend.run([case])[0]
        bands: dict[int, dict[str, Band]] = {}
        for label, want in expected.values.items():
            got = observed.values.get(label)
            if want is None or got is None or (want.dtype, want.shape) != (got.dtype, got.shape):
                continue
            counts["values compared"] += 1
            if same(want, got):
                counts["equal in every bit"] += 1
                continue
            for samples in (SCREEN, CONFIRM):
                if samples not in bands:
                    bands[samples] = reference.shadowed(case, samples, samples)[1]
                band = bands[samples].get(label)
                if band is None or not band.known:
                    counts["not judged"] += 1
                    break
                bare = over(replace(band, nominal=got), got)
                if bare <= THRESHOLD:
                    counts["within rounding alone"] += 1
                    break
            else:
                allowed = over(band, got)
                if allowed > THRESHOLD:
                    counts["over the threshold"] += 1
                    continue
                counts["decided by the allowance"] += 1
                row = {"case": case.id, "label": label, "dtype": str(got.dtype)[6:]}
                row |= {"bare": float(f"{bare:.3g}"), "allowed": float(f"{allowed:.3g}")}
                if got.dtype in UNIT_ROUNDOFF:
                    larger = over(band, (got.to(band.clean.dtype) * 1.02).to(got.dtype))
                    row["2 % larger"] = float(f"{larger:.3g}")
                    counts["decided by it, found when 2 % larger"] += larger > THRESHOLD
                decided.append(row)
    return dict(counts), decided


def over(band: Band, value: torch.Tensor) -> float:
    found = distance(band, value)
    return max(found.excess, found.bias)


if __name__ == "__main__":
    main()
