"""How many cases of a run could have falsified each promise of torch's documents.

    python benchmarks/promises.py STORE

The numbers are summed over the runs of the store, which must be of one torch. Writes
``benchmarks/promises.json``, from which `make pages` writes docs/reference/promises.md.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from amp_fuzz.records.facts import place
from amp_fuzz.records.store import Store
from amp_fuzz.reports import frames
from benchmarks.common import ROOT, Row, arguments, commit, machine, write

JSON = ROOT / "benchmarks" / "promises.json"


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("store", type=Path)
    parser.add_argument("--output", type=Path, default=JSON)
    args = parser.parse_args()
    write(args.output, measured(Store(args.store)))


def measured(store: Store) -> Row:
    """Return the numbers of a store."""
    runs = [frames.load(store, run) for run in store.runs()]
    (torch,) = {data.run.versions["torch"] for data in runs}
    promised, cases = Counter[tuple[str, str]](), Counter[str]()
    for data in runs:
        promised.update(data.promised)
        cases.update(map(str, data.cases["backend"]))
    by_id: dict[str, dict[str, int]] = {}
    for (backend, name), count in sorted(promised.items()):
        by_id.setdefault(name, {})[backend] = count
    backends = {b.name: b for data in runs for b in data.run.backends}
    return {
        "code": commit(),
        "torch": torch,
        "machine": machine("one worker"),
        "seeds": sorted({data.run.seed for data in runs}),
        "backends": {
            name: {"place": place(b.device, b.implements), "cases": cases[name]}
            for name, b in backends.items()
        },
        "promises": by_id,
    }


if __name__ == "__main__":
    main()
