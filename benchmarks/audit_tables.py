"""Hold honest torch to tables with one wrong policy each, and count those that the audit sees.

For each device that runs here, each op that some table lists, and each policy that its schema
allows. Writes ``benchmarks/audit_tables.json``, which docs/guide/audit.md quotes: `unreached` are
ops that no cell reaches on the device (a table that bans them is not seen either), `equivalent`
those of which no program can tell, with the proof, `values only` those that change no dtype on a
fake device, whose tensors have nothing else, and `unseen` the rest.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from amp_fuzz.backends import backends
from amp_fuzz.backends.harness import quiet
from amp_fuzz.reference import Policy
from benchmarks.common import ROOT, arguments, write
from tests.faults.tables import Audited, equivalent, wrong_policies

JSON = ROOT / "benchmarks" / "audit_tables.json"
BACKENDS = ("eager-cpu", "fake-cuda")


def main() -> int:
    """Measure, and return an exit code: 1 if a wrong policy is not seen and nobody knows why."""
    parser = arguments(__doc__)
    parser.add_argument("--backends", default=",".join(BACKENDS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = json.loads(JSON.read_text())["backends"] if JSON.exists() else {}
    for name in options.backends.split(","):
        found[name] = measured(name)
        print(name, found[name]["counts"], found[name].get("unseen"), flush=True)
        result = {"torch": torch.__version__, "backends": dict(sorted(found.items()))}
        write(JSON, result)
    return int(any(found[name].get("unseen") for name in options.backends.split(",")))


def measured(name: str) -> dict[str, Any]:
    """Return what the audit sees on one backend."""
    audited = Audited(backends()[name])
    rest = "unseen" if audited.backend.values else "values only"
    counts: Counter[str] = Counter()
    why: dict[str, dict[str, str]] = {"equivalent": {}, "unreached": {}, rest: {}}
    with quiet():
        wrongs = wrong_policies(audited.backend.device)
        seen = {wrong: audited.sees(wrong) for wrong in wrongs}
    reached = {w.overload for w in wrongs if seen[w] or w.own is Policy.BANNED}
    for wrong in wrongs:
        sort, proof = "seen", equivalent(wrong)
        if seen[wrong] is None:
            unreached = wrong.overload not in reached
            sort = "unreached" if unreached else "equivalent" if proof else rest
            why[sort][wrong.name] = proof if sort == "equivalent" else f"own: {wrong.own}"
        counts[sort] += 1
    return {"wrong": len(wrongs), "counts": dict(counts), **why}


if __name__ == "__main__":
    raise SystemExit(main())
