"""What programs of the catalogue's custom functions and ops come to, and which faults are found.

    python benchmarks/custom_functions.py honest eager-cpu:2000 export:500 ... [--seed=N]
    python benchmarks/custom_functions.py faults [NAME ...]
    python benchmarks/custom_functions.py

The first judges so many programs on each backend, with the known list of the package; all
statements of a program are calls of the family ``custom``. The cases of seed N are numbered from N
on: with N=10000, no case of N=0 comes again. The second seeds one fault at a time in
a custom function or op (tests/faults/custom.py), draws programs until one shows it, and minimises
that. Both keep lines in ``--records=DIR``: a run that is cut short goes on where it stood, and what
diverged is judged again with the list of today. The last writes benchmarks/custom_functions.json
from them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from amp_fuzz.backends import Backend, backends
from amp_fuzz.backends.harness import quiet
from amp_fuzz.cases.case import Case, loads
from amp_fuzz.cases.program import statements
from amp_fuzz.catalogue import select
from amp_fuzz.strategies.drawing import draw_case, usable
from amp_fuzz.upstream import shipped
from amp_fuzz.upstream.explain import judge_of
from benchmarks.common import ROOT, arguments, machine, versions, write

RESULT = ROOT / "benchmarks/custom_functions.json"


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("what", nargs="?", choices=("honest", "faults"))
    parser.add_argument("names", nargs="*")
    parser.add_argument("--records", type=Path, default=Path(".amp-fuzz/custom"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.records.mkdir(parents=True, exist_ok=True)
    if args.what == "honest":
        for what in args.names:
            name, count = what.rsplit(":", 1)
            honest(backends()[name], int(count), args.seed, args.records / f"{name}.jsonl")
    elif args.what == "faults":
        from tests.faults.custom import hunt

        hunt(args.names, args.records / "faults.jsonl")
    else:
        write(RESULT, result(args.records))


def drawn(backend: Backend, number: int) -> Case:
    """Return one case of custom functions and ops alone."""
    ops = tuple(o for o in select(["custom"]) if backend.supports(o.name, "function"))
    random = Random(number)
    case = draw_case(
        random.randbytes,
        backend.device,
        trains=backend.trains,
        ops=usable(ops, backend.device),
        fused=not backend.exact,
    )
    return backend.fit(case)


def honest(backend: Backend, count: int, seed: int, path: Path) -> None:
    """Judge cases, up to a number of them, from that of a seed on."""
    judge = judge_of(backend, shipped())
    kept = lines_of(path)
    for line in kept:
        if line["outcome"] == "diverged":
            line.update(judged(judge, loads(json.dumps(line["case"]))))
    path.write_text("".join(json.dumps(line) + "\n" for line in kept))
    with path.open("a") as file:
        for number in range(seed + len(kept), seed + count):
            line = {"number": number, **judged(judge, drawn(backend, number))}
            file.write(json.dumps(line) + "\n")
            file.flush()


def judged(judge: Any, case: Case) -> dict[str, Any]:
    """Return what came of one case."""
    start = time.perf_counter()
    with quiet():
        verdict = judge.judge(case)
    line: dict[str, Any] = {
        "id": case.id,
        "outcome": verdict.outcome,
        "known": verdict.known,
        "ops": sorted({s.op for s in statements(case.program.body)}),
        "seconds": round(time.perf_counter() - start, 3),
    }
    if verdict.outcome == "diverged":
        found = verdict.divergence
        line |= {"case": json.loads(case.json())}
        line["divergence"] = [found.kind, found.where, found.expected, found.observed]
    return line


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file of records."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def result(folder: Path) -> dict[str, Any]:
    """Return the counts of all records."""
    honest = {p.stem: lines_of(p) for p in sorted(folder.glob("*.jsonl")) if p.stem != "faults"}
    faults = lines_of(folder / "faults.jsonl")
    return {
        "cases": sum(map(len, honest.values())),
        "unexplained": sum(
            line["outcome"] == "diverged" for lines in honest.values() for line in lines
        ),
        "backends": {name: summary(lines) for name, lines in honest.items()},
        "calls": dict(
            Counter(op for lines in honest.values() for line in lines for op in line["ops"])
        ),
        "faults": {line.pop("name"): line for line in faults},
        "versions": versions("torch", "amp-fuzz"),
        "machine": machine(f"one thread of {os.cpu_count()} cores, shared"),
    }


def summary(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the counts of one backend."""
    known: Counter[str] = Counter()
    for line in lines:
        known.update(line["known"].split("+") if line["known"] else ())
    return {
        "cases": len(lines),
        "numbers": [lines[0]["number"], lines[-1]["number"]],
        "outcomes": dict(Counter(line["outcome"] for line in lines)),
        "known": dict(known.most_common()),
        "unexplained": [
            [line["id"], *line["divergence"]] for line in lines if line["outcome"] == "diverged"
        ],
        "seconds": round(sum(line["seconds"] for line in lines)),
    }


if __name__ == "__main__":
    main()
