"""What random programs meet on torchax: each divergence explained by a known entry, or listed.

    python benchmarks/torchax_hunt.py 'torchax[jit]:1000:101' ... [--records=DIR] [--again=IDS]

Each argument is a backend, how many cases and a seed. Cases are those that a run draws, judged with
the known list of the package. DIR keeps a line for each case, with the CPU seconds of both
processes until then: a run that is cut short goes on where it stood. What diverged is judged again
with the package of today; so is what one of the entries IDS (joined by commas) explained, or any of
them (``--again=known``). A case of which the process died is recorded when the run goes on.

Writes counts, what each entry explained, what is not explained, with its case, and the first case
that met each of the differences of DIFFERENCES, into torchax_hunt.json beside it (or
``--output=FILE``).
"""

from __future__ import annotations

import fnmatch
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.hunting import Line, hunted, parser, written

LOSSES = ("*_loss*", "*Loss*", "cross_entropy*", "kl_div*", "nll*", "poisson*")
DIFFERENCES: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "torch.autocast('jax') casts nothing": (("torchax-torch-autocast",), ("*",)),
    "linear and einsum are not lowered": (("torchax-composites",), ("linear*", "Linear", "einsum")),
    "convolutions, prelu, vecdot are not lowered": (
        ("torchax-composites", "torchax-16-bit"),
        ("conv*", "Conv*", "prelu", "linalg.vecdot"),
    ),
    "cat, stack, index_copy raise": (("torchax-promote",), ("*",)),
    "fp32 policies of losses, pools, padding are not applied": (
        ("torchax-composites",),
        (*LOSSES, "*pool3d*", "*_pad1d", "*_pad2d", "*_pad3d"),
    ),
    "fft, quantile and linalg raise in 16 bits": (
        ("torchax-16-bit",),
        ("fft*", "*quantile*", "linalg*", "stft*", ""),
    ),
    "float64 is cast": (("torchax-float64",), ("*",)),
    "stale jit": (("torchax-stale-jit",), ("*",)),
    "dtype= of reductions is ignored": (("torchax-dtype-argument", "torchax-mean-dtype"), ("*",)),
    "0-d tensors promote": (("torchax-promotion",), ("*",)),
    "a product is rounded before it is added to": (("torchax-sums",), ("*",)),
    "layer_norm rounds step by step": (("torchax-norms",), ("*layer_norm*", "*LayerNorm*")),
    "renorm of 16 bits raises": (("torchax-raises",), ("renorm",)),
}
"""What was known before, by the entries that explain it and the ops that it shows at."""

PACKAGES = ("torch", "torchax", "jax", "jaxlib", "amp-fuzz")


def main() -> None:
    given = parser(__doc__ or "", Path(".amp-fuzz/torchax-hunt")).parse_args()
    rows = hunted(given)
    before = {name: met(rows, *how) for name, how in DIFFERENCES.items()}
    more: dict[str, Any] = {"differences known before": before}
    written(given.output or Path(__file__).with_suffix(".json"), given.what, PACKAGES, rows, **more)


def met(rows: list[Line], ids: tuple[str, ...], ops: tuple[str, ...]) -> dict[str, Any] | None:
    """Return which case met a difference first, after how many of its backend and seed."""
    for row in rows:
        known = row["known"].split("+") if row["known"] else []
        at = any(fnmatch.fnmatchcase(row.get("op", ""), op) for op in ops)
        if at and any(i in known for i in ids):
            before = [r["id"] for r in rows if r["of"] == row["of"] and r["number"] < row["number"]]
            return {
                "case": row["id"],
                "of": row["of"],
                "after cases": len(before),
                "CPU seconds": row["cpu"],
                "explained by": row["known"],
            }
    return None


if __name__ == "__main__":
    main()
