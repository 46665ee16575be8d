"""What the cases that hunts left open come to today.

    python benchmarks/open_cases.py [--backends=GLOBS]

Judges each case of tests/cases/open with the known list of the package, on the backend that
index.toml names, and prints a table. A case that agrees, or that a known entry explains, can leave
the folder.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from amp_fuzz.backends import backends
from amp_fuzz.backends.harness import quiet
from amp_fuzz.cases.case import load
from amp_fuzz.oracle.labels import guilty_op
from amp_fuzz.upstream import shipped
from amp_fuzz.upstream.explain import judge_of
from benchmarks.common import CASES, arguments, named

OPEN = CASES / "open"


def index() -> Mapping[str, Mapping[str, str]]:
    """Return the backend and the note of each open case, by its id."""
    found: Mapping[str, Mapping[str, str]] = tomllib.loads((OPEN / "index.toml").read_text())
    return found


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--backends", metavar="GLOBS", default="*", help="only these")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| case | backend | today | note |\n|---|---|---|---|")
    for case, entry in index().items():
        if named(entry["backend"], options.backends):
            today = judged(case, entry["backend"])
            print(f"| {case[:8]} | {entry['backend']} | {today} | {entry['note']} |", flush=True)


def judged(case: str, name: str) -> str:
    """Return what a case comes to, in words."""
    backend = backends()[name]
    available = backend.availability()
    if available.status != "ready":
        return f"not run: {available.detail}"
    with quiet():
        verdict = judge_of(backend, shipped()).judge(load(OPEN / f"{case}.json"))
    found = verdict.divergence
    if found is None or verdict.known:
        return f"{verdict.outcome} {verdict.known}".strip()
    at = guilty_op(verdict.case, found) or ("" if found.kind == "raise" else found.where)
    return f"{found.kind} {at}".strip()


if __name__ == "__main__":
    main()
