"""Run random FP8 cases on a backend, and count: what agrees, what is known, what is not explained.

    python benchmarks/fp8.py --cases=2000 --output=benchmarks/fp8.json

It judges what `amp-fuzz run` draws, without minimising. `--faults` also runs the seeded faults of
`tests/faults/fp8.py`: after how many cases each is found, and how many statements are left.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from amp_fuzz.backends import backends
from amp_fuzz.backends.harness import quiet
from amp_fuzz.backends.te.stub import VERSION
from amp_fuzz.cases.case import Case
from amp_fuzz.cases.program import FP8, regions, statements
from amp_fuzz.runs.engine import Settings, Task, draw
from amp_fuzz.upstream import shipped
from amp_fuzz.upstream.explain import judge_of


def recipe_of(case: Case) -> str:
    """Return the recipe of the first enabled region around a case's layers, or ""."""
    if not any(s.op == "fp8_linear" for s in statements(case.program.body)):
        return ""
    found = (c for c in regions(case.program.body) if isinstance(c, FP8) and c.enabled)
    return next((c.recipe for c in found), "")


def honest(name: str, cases: int, seed: int) -> dict[str, object]:
    """Judge cases of a backend until so many have a layer of each of its recipes."""
    backend = backends()[name]
    judge = judge_of(backend, shipped(), "one")
    wanted = {c.recipe for c in backend.recipes}  # type: ignore[attr-defined]
    counts: dict[str, Counter[str]] = {recipe: Counter() for recipe in sorted(wanted)}
    known: Counter[str] = Counter()
    unexplained: list[str] = []
    start, drawn = time.perf_counter(), 0
    settings = Settings((name,), max_statements=6)
    for case in draw(Task(name, "all", (), 10**6, seed), settings):
        recipe = recipe_of(case)
        drawn += 1
        if not recipe or counts[recipe].total() >= cases:
            continue
        verdict = judge.judge(case)
        counts[recipe][verdict.outcome] += 1
        known.update(verdict.known.split("+") if verdict.known else ())
        if verdict.outcome == "diverged":
            unexplained.append(f"{case.id}: {verdict.divergence}")
        if all(count.total() >= cases for count in counts.values()):
            break
    return {
        "cases": {recipe: dict(count) for recipe, count in counts.items()},
        "known": dict(sorted(known.items())),
        "unexplained": unexplained,
        "drawn": drawn,
        "seconds": round(time.perf_counter() - start),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    names = "torchao[emulate],torchao,torchao[mxfp8],scaled_mm,te-python"
    parser.add_argument("--backends", default=names)
    parser.add_argument("--cases", type=int, default=2000, help="for each recipe of a backend")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", action="store_true")
    parser.add_argument("--output", default="benchmarks/fp8.json")
    given = parser.parse_args()
    torch.set_num_threads(1)
    path = Path(given.output)
    made = json.loads(path.read_text()) if path.exists() else {}
    made |= {
        "torch": torch.__version__,
        "torchao": version("torchao"),
        "transformer-engine": VERSION,
        "seed": given.seed,
    }
    with quiet():
        for name in filter(None, given.backends.split(",")):
            made.setdefault("honest", {})[name] = honest(name, given.cases, given.seed)
            print(name, json.dumps(made["honest"][name]), flush=True)
            path.write_text(json.dumps(made, indent=1) + "\n")
        if given.faults:
            from tests.faults.fp8 import measured

            made["faults"] = measured(given.seed)
            print(json.dumps(made["faults"], indent=1), flush=True)
            path.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
