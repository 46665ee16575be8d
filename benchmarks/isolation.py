"""What worker processes cost: cases a second of ``run`` and of pytest, isolated and in one process.

    python benchmarks/isolation.py [--cases=1500] [--pairs=4] [--seed=1] [--before=CHECKOUT]

Each pair runs the same command twice, one after the other, in an empty folder; which side comes
first changes from pair to pair. What is compared are the cases on record for each second of CPU
time, of the process and of all that it started, so that other work on the machine counts little.
before: a checkout of an older version, whose ``run`` and pytest are the other side; the ops are
few, since an older version drew more cases for kernels that were not reached. The plugin that is
not asked for is timed, too. Writes ``benchmarks/isolation.json``.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import ROOT, arguments, commit, machine, versions, write

HERE = Path(__file__).resolve().parents[1]
JSON = Path(__file__).with_suffix(".json")
OPS = "mm,relu,linear,softmax,cat,sum,exp,layer_norm,mse_loss,sub"
CLI = "import sys; from amp_fuzz.interfaces.cli import main; sys.exit(main())"
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--cases", type=int, default=1500)
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--before", type=Path)
    args = parser.parse_args()
    if args.pairs % 2:
        parser.error("--pairs: use an even number, so that each side comes first as often")
    told = [f"cases={args.cases}", f"seed={args.seed}", "backends=eager-cpu", "minimize=0"]
    told += [f"ops={OPS}", "seconds=600"]
    commands = {
        "run": [sys.executable, "-c", CLI, "run", "--workers=1", *(f"--{w}" for w in told)],
        "pytest": [*PYTEST, "--amp-fuzz", *(f"--amp-fuzz-{w}" for w in told)],
        "idle pytest": PYTEST,
    }
    never = {"run": "--isolate=never", "pytest": "--amp-fuzz-isolate=never"}
    found = {}
    for name, command in commands.items():
        if args.before is None and name not in never:
            continue
        before = command if args.before else [*command, never[name]]
        pairs = []
        for number in range(args.pairs):
            sides = [(ROOT, command), (args.before or HERE, before)]
            met = [speed(*side) for side in (sides if number % 2 else sides[::-1])]
            now, then = met if number % 2 else met[::-1]
            pairs.append((now, then))
            print(f"{name}: {now:.2f} a second of CPU time isolated, {then:.2f} before", flush=True)
        ratios = [now / then for now, then in pairs]
        found[name] = {
            "cases (idle: commands) a second of CPU time, isolated and before": [
                [round(now, 3), round(then, 3)] for now, then in pairs
            ],
            "median of the ratios": round(statistics.median(ratios), 3),
        }
    result = {
        "cases": args.cases,
        "seed": args.seed,
        "before": f"commit {commit(args.before)}" if args.before else "isolate=never",
        "commands": found,
        "versions": versions("torch", "amp-fuzz"),
        "machine": machine(f"{os.cpu_count()} cores"),
    }
    write(JSON, result)


def speed(checkout: Path, command: list[str]) -> float:
    """Return the cases, or if there are none the commands, for each second of CPU time."""
    start = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "test_mine.py").write_text("def test_mine(): pass\n")
        path = os.pathsep.join(filter(None, [str(checkout), os.environ.get("PYTHONPATH", "")]))
        done = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode not in (0, 1):  # 1: a new finding
            raise SystemExit(f"{command} ended with {done.returncode}:\n{done.stdout[-2000:]}")
        lines = [
            line
            for file in Path(folder).glob(".amp-fuzz/runs/*/*.jsonl")
            for line in file.read_text().splitlines()
        ]
    cases = sum(json.loads(line)["type"] == "case" for line in lines)
    end = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (cases or 1) / (end.ru_utime + end.ru_stime - start.ru_utime - start.ru_stime)


if __name__ == "__main__":
    main()
