"""Measure what `amp_fuzz.check` costs in CPU time, beside the same check at an earlier commit.

    .venvs/models/bin/python benchmarks/check_speed.py [--base=main] [--rounds=5]

`make models` installs what it needs. Torch alone, which compiles the same call without amp-fuzz,
and both commits have a process each, with an empty folder for Inductor's code. They take turns
with each check. benchmarks/check_speed.json has CPU seconds with their children's, one thread: of
the first check in a process, which imports what is missing, and the median of the next ones; the
ratio is the median over the turns.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import amp_fuzz
from benchmarks.architectures import ARCHITECTURES
from benchmarks.common import ROOT, Row, arguments, machine, show

FILE = Path(__file__).with_suffix(".json")
SCRIPT = Path(__file__).resolve().relative_to(ROOT)
DEFAULT = ("eager-cpu", "fake-cuda", "compile[aot_eager]")
MEASURED = {"bert": DEFAULT, "vit": DEFAULT, "llama": ("compile[inductor]",)}
SIDES = ("torch alone", "base", "head")
_WHO = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)


def serve(name: str, side: str) -> None:
    """Check a model for each line that comes in, and print what it took."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    given = ARCHITECTURES[name]
    model, (inputs, kwargs) = given.model(), given.inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(*inputs, **kwargs)  # what the package does at the first call

    def check() -> str:
        backends = MEASURED[name]
        return amp_fuzz.check(model, *inputs, kwargs=kwargs, backends=backends, store=None).verdict

    def alone() -> str:
        torch.compiler.reset()
        rung = MEASURED[name][-1].removeprefix("compile[").removesuffix("]")
        compiled: Callable[..., Any] = torch.compile(model, backend=rung)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = compiled(*inputs, **kwargs).loss
        loss.backward()
        return ""

    run = alone if side == "torch alone" else check
    for _ in sys.stdin:
        before = _cpu()
        verdict = run()
        taken = round(_cpu() - before, 2)
        peak = max(resource.getrusage(who).ru_maxrss for who in _WHO) // 1024
        print("row", json.dumps({"cpu": taken, "MiB": peak, "verdict": verdict}), flush=True)


def _cpu() -> float:
    """Return the CPU seconds of this process and of those that it waited for."""
    used = map(resource.getrusage, _WHO)
    return sum(u.ru_utime + u.ru_stime for u in used)


@contextmanager
def asking(name: str, side: str, tree: Path) -> Iterator[Callable[[], Row]]:
    """Give a function that makes one check in a process of a checkout, and returns its row."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": folder}
        command = [sys.executable, str(tree / SCRIPT), f"--serve={name}", f"--side={side}"]
        pipe = subprocess.PIPE
        with subprocess.Popen(
            command, env=environment, stdin=pipe, stdout=pipe, text=True
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            given, said = process.stdin, process.stdout

            def ask() -> Row:
                print(file=given, flush=True)
                line = next(line for line in said if line.startswith("row "))
                row: Row = json.loads(line.removeprefix("row "))
                print(name, side, row, flush=True)
                return row

            yield ask


def measured(name: str, base: Path, rounds: int) -> Row:
    """Return what the checks of a model cost on each side, and the ratios."""
    with ExitStack() as stack:
        trees = {"torch alone": ROOT, "base": base, "head": ROOT}
        asks = {side: stack.enter_context(asking(name, side, trees[side])) for side in SIDES}
        turns = [{side: ask() for side, ask in asks.items()} for _ in range(rounds + 1)]
    found: Row = {}
    for side in SIDES:
        first, *rest = (turn[side] for turn in turns)
        found[side] = {
            "first": first["cpu"],
            "next": round(median(row["cpu"] for row in rest), 2),
            "MiB": max(row["MiB"] for row in (first, *rest)),
            "verdict": first["verdict"],
        }
    ratios = [round(turn["head"]["cpu"] / turn["base"]["cpu"], 2) for turn in turns]
    found["head / base"] = {"first": ratios[0], "next": round(median(ratios[1:]), 2)}
    return found


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--base", default="main")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", default=",".join(MEASURED))
    parser.add_argument("--output", type=Path, default=FILE)
    parser.add_argument("--serve", help="(a process of its own)")
    parser.add_argument("--side", help="(a process of its own)")
    given = parser.parse_args()
    if given.serve:
        serve(given.serve, given.side)
        return 0
    git = ["git", "-C", str(ROOT)]
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base"
        subprocess.run([*git, "worktree", "add", "-q", "--detach", base, given.base], check=True)
        try:
            shutil.copy(__file__, base / SCRIPT)
            names = given.models.split(",")
            models = {name: measured(name, base, given.rounds) for name in names}
        finally:
            subprocess.run([*git, "worktree", "remove", "--force", base], check=True)
    result = {"torch": torch.__version__, "machine": machine(), "base": given.base}
    show(given.output, {**result, "rounds": given.rounds, "models": models})
    return 0


if __name__ == "__main__":
    sys.exit(main())
