"""Measure how many cases a run needs: the share of seeded faults that so many show.

Each fault is given the cases of one run on eager-cpu, once with a share that aims at autocast
kernels and once without, in the order in which larger runs take them up. Writes
``benchmarks/budget.json``. Seconds are CPU seconds of one core, over kernels in Python.
"""

from __future__ import annotations

import argparse
import platform
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from amp_fuzz.runs.engine import Settings
from amp_fuzz.upstream import shipped
from benchmarks.common import arguments, versions, write
from benchmarks.faults import isolated
from tests.faults.fault import Fault
from tests.faults.faults import CUT, POLICY, SEMANTIC
from tests.faults.hunt import hunt_along, plan_way

JSON = Path(__file__).resolve().parent / "budget.json"
CASES = (100, 200, 300, 400, 600, 800, 1000, 1500, 2000)
KINDS: Mapping[str, Mapping[str, Fault]] = {
    "semantic": SEMANTIC,
    "policy": {name: fault for name, fault in POLICY.items() if not fault.equivalent},
    "cut": CUT,
}


def main() -> int:
    """Run what the command line asks for, and return an exit code."""
    parser = arguments(__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the engine's draws (default 0)")
    parser.add_argument("--workers", type=int, default=1, help="processes (default 1)")
    parser.add_argument("--kinds", default=",".join(KINDS), help="of faults, by default all")
    parser.add_argument("--aimed", type=int, action="append", help="per cent (default 0 and 20)")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    result: dict[str, Any] = {
        "seed": options.seed,
        "versions": versions("torch", "numpy"),
        "machine": platform.platform(),
        "runs": [],
    }
    for aimed in options.aimed or (0, 20):
        result["runs"].append(_run(aimed, options))
        write(JSON, result)
    return 0


def _run(aimed: int, options: argparse.Namespace) -> dict[str, Any]:
    settings = Settings(
        ("eager-cpu",), CASES[-1], aimed, seed=options.seed, known=shipped(), minimize=0
    )
    steps, seconds = plan_way(settings)
    faults = {n: f for kind in options.kinds.split(",") for n, f in KINDS[kind].items()}

    def search(name: str) -> dict[str, Any]:
        return hunt_along(faults[name], steps).json()

    rows = list(isolated(search, list(faults), options.workers))
    found = {row["name"]: row["cases"] for row in rows if row["found"]}
    print(f"aimed {aimed} %: {len(steps)} cases in {seconds:.0f} CPU s")
    shares = {kind: shares_of(KINDS[kind], found) for kind in options.kinds.split(",")}
    for kind, table in shares.items():
        print(f"{kind:9}", *(f"{n}: {share:.1%}" for n, share in table.items()))
    return {
        "aimed": aimed,
        "cases": len(steps),
        "seconds": round(seconds, 1),
        "found": shares,
        "after": found,
    }


def shares_of(faults: Sequence[str] | Mapping[str, Fault], found: Mapping[str, int]) -> Any:
    """Return the share of these faults that runs of so many cases find."""
    return {
        n: round(sum(name in found and found[name] <= n for name in faults) / len(faults), 4)
        for n in CASES
    }


if __name__ == "__main__":
    sys.exit(main())
