"""Seed faults in the policies and casts of a PrivateUse1 device, and ask whether they are found.

Writes ``benchmarks/device_faults.json``: for each fault the number of cases until it was found, as
what, and the id of the case that showed it. That case, minimised, goes into
``tests/cases/device_faults``. Cases are drawn as in a run, without aim.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from amp_fuzz.backends import backends
from amp_fuzz.backends.harness import quiet
from amp_fuzz.backends.privateuse1.backend import PrivateUse1Backend
from amp_fuzz.backends.process import Apart
from amp_fuzz.runs.engine import Settings, Task, draw
from amp_fuzz.upstream import shipped
from amp_fuzz.upstream.explain import judge_of
from benchmarks.common import ROOT, arguments, write
from benchmarks.hunting import kept
from tests.faults.device import FAULTS, UNREGISTERED

JSON = ROOT / "benchmarks" / "device_faults.json"


def main() -> int:
    """Run what the command line asks for and return an exit code: 1 if a fault was not found."""
    parser = arguments(__doc__)
    parser.add_argument("--cases", type=int, default=5000, help="for each fault (default 5,000)")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default 0)")
    parser.add_argument("--only", metavar="NAME", help="only this fault; prints, no file")
    parser.add_argument("--missing", action="store_true", help="only what the file has not found")
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = [options.only] if options.only else [*FAULTS, UNREGISTERED]
    rows = []
    if options.missing and JSON.exists():
        rows = [r for r in json.loads(JSON.read_text())["faults"] if r["found"]]
        names = [n for n in names if n not in {r["name"] for r in rows}]
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            rows.append(hunt(name, Path(folder) / "fault", options.cases, options.seed))
            print(rows[-1], flush=True)
    found = {"torch": torch.__version__, "seed": options.seed, "cases": options.cases}
    if not options.only:
        write(JSON, {**found, "faults": rows})
    return int(not all(row["found"] for row in rows))


def faulty(name: str, file: Path) -> PrivateUse1Backend:
    """Return the backend with a fault, which stands in the file."""
    file.write_text("" if name == UNREGISTERED else name)
    if name == UNREGISTERED:
        return PrivateUse1Backend("cuda", Apart("tests.faults.device:NoFallthrough", "cuda"))
    if file not in _PROCESSES:
        _PROCESSES[file] = Apart("tests.faults.device:Faulty", "cuda", str(file))
    return PrivateUse1Backend("cuda", _PROCESSES[file])


_PROCESSES: dict[Path, Apart] = {}


def hunt(name: str, file: Path, cases: int, seed: int) -> dict[str, Any]:
    """Return what came of a hunt for one fault."""
    backend = faulty(name, file)
    honest = judge_of(backends()["privateuse1"], shipped())
    judge = judge_of(backend, shipped())
    start = time.perf_counter()
    task = Task("privateuse1", "all", (), cases, seed)
    with quiet():
        for number, case in enumerate(draw(task, Settings(backends=("privateuse1",))), 1):
            verdict = judge.judge(case)
            if verdict.outcome != "diverged" or honest.judge(case).outcome == "diverged":
                continue
            seconds = time.perf_counter() - start
            return {
                "name": name,
                "found": True,
                "cases": number,
                "seconds": round(seconds, 1),
                **kept("device_faults", name, verdict, judge, 30),
            }
    return {"name": name, "found": False, "cases": cases}


if __name__ == "__main__":
    sys.exit(main())
