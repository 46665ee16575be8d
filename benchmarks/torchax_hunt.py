"""What random programs meet on torchax: each divergence explained by a known entry, or listed.

    python benchmarks/torchax_hunt.py 'torchax[jit]:1000:101' ... [--records=DIR] [--again=IDS]

Each argument is a backend, how many cases and a seed. Cases are those that a run draws, judged with
the known list of the package. DIR keeps a line for each case, with the CPU seconds of both
processes until then: a run that is cut short goes on where it stood. What diverged is judged again
with the package of today; so is what one of the entries IDS (joined by commas) explained, or any of
them (``--again=known``). A case of which the process died is recorded when the run goes on.

Writes counts, what each entry explained and what is not explained into torchax_hunt.json beside it
(or ``--output=FILE``); other backends stay as they were. The cases that are not explained become
case files in DIR/open.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.hunting import hunted, parser, written

PACKAGES = ("torch", "torchax", "jax", "jaxlib", "amp-fuzz")


def main() -> None:
    given = parser(__doc__ or "", Path(".amp-fuzz/torchax-hunt")).parse_args()
    written(given, Path(__file__).with_suffix(".json"), PACKAGES, hunted(given))


if __name__ == "__main__":
    main()
