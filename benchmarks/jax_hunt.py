"""What random programs meet on JAX: each divergence explained by a known entry, or listed.

    python benchmarks/jax_hunt.py 'jax[jit]:3000:32' 'jax:200:32' ... [--records=DIR] [--again=IDS]

Each argument is a backend, how many cases and a seed; the rest is as in `torchax_hunt.py`. Writes
counts, what each entry explained and what is not explained into jax_hunt.json beside it (or
``--output=FILE``); other backends stay as they were.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.hunting import hunted, parser, written

PACKAGES = ("torch", "jax", "jaxlib", "amp-fuzz")


def main() -> None:
    given = parser(__doc__ or "", Path(".amp-fuzz/jax-hunt")).parse_args()
    written(given, Path(__file__).with_suffix(".json"), PACKAGES, hunted(given))


if __name__ == "__main__":
    main()
