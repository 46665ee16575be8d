"""Seed faults in the lowerings of the JAX backend, and ask whether they are found.

Writes ``benchmarks/jax_faults.json``: for each fault the number of cases until it was found, as
what, and the id of the case that showed it. That case, minimised, goes into
``tests/cases/jax_faults``. Cases are drawn as in a run that is aimed: each has a call of the op
with the fault, and up to five others.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from amp_fuzz.backends.harness import Observation, quiet
from amp_fuzz.backends.jax.backend import JaxBackend
from amp_fuzz.cases.case import Case
from amp_fuzz.runs.engine import Settings, Task, draw
from amp_fuzz.upstream import shipped
from amp_fuzz.upstream.explain import judge_of
from benchmarks.common import ROOT, arguments, write
from benchmarks.hunting import kept
from tests.faults.lowerings import FAULTS, Faulty

JSON = ROOT / "benchmarks" / "jax_faults.json"
OPS = {
    "narrow-softmax": ("softmax", "log_softmax"),
    "narrow-sum": ("sum", "sum.dim"),
    "dropped-bias": ("addmm", "linear"),
    "gain": ("mm", "matmul"),
    "gradient-sign": ("tanh",),
    "lost-gradient": ("mul",),
    "missing-cast": ("mm",),
    "element": ("cat",),
}


class Here:
    """JAX in this process, in place of a process apart."""

    def __init__(self, file: Path) -> None:
        self.sides = Faulty(str(file), "cuda", False, False)

    def run(self, case: Case, *, reference: bool = False) -> Observation:
        return self.sides.expect(case) if reference else self.sides.observe(case)

    def said(self) -> object:
        return self.sides.said


def main() -> int:
    """Run what the command line asks for and return an exit code: 1 if a fault was not found."""
    parser = arguments(__doc__)
    parser.add_argument("--cases", type=int, default=500, help="for each fault (default 500)")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default 0)")
    parser.add_argument("--shrink", type=float, default=30, help="seconds for each (default 30)")
    parser.add_argument("--only", metavar="NAME", help="only this fault; prints, no file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "fault"
        file.write_text("")
        backend = JaxBackend(process=Here(file))  # type: ignore[arg-type]
        for name in [options.only] if options.only else FAULTS:
            rows.append(hunt(name, backend, file, options))
            print(rows[-1], flush=True)
            found = {"jax": version("jax"), "seed": options.seed, "cases": options.cases}
            if not options.only:
                write(JSON, {**found, "faults": rows})
    return int(not all(row["found"] for row in rows))


def hunt(name: str, backend: JaxBackend, file: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return what came of a hunt for one fault."""
    judge = judge_of(backend, shipped())
    start = time.process_time()
    task = Task("jax", "faults", OPS[name], options.cases, options.seed)
    with quiet():
        for number, case in enumerate(draw(task, Settings(backends=("jax",), max_statements=6)), 1):
            file.write_text(name)
            verdict = judge.judge(case)
            if verdict.outcome != "diverged":
                continue
            file.write_text("")
            if judge.judge(case).outcome == "diverged":
                continue
            seconds = time.process_time() - start
            file.write_text(name)
            return {
                "name": name,
                "what": FAULTS[name][0],
                "found": True,
                "cases": number,
                "seconds": round(seconds, 1),
                **kept("jax_faults", name, verdict, judge, options.shrink),
            }
    return {"name": name, "what": FAULTS[name][0], "found": False, "cases": options.cases}


if __name__ == "__main__":
    sys.exit(main())
