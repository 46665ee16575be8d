"""What worker processes cost: cases a second of ``run`` and of pytest, isolated and in one process.

    python benchmarks/isolation.py [--cases=600] [--pairs=3] [--seed=1] [--before=CHECKOUT]

Each pair runs the same cases twice, one after the other, in an empty folder; which side comes first
changes from pair to pair. The ratio is of CPU time, of the process and of all that it started, so
that other work on the machine counts little. before: a checkout of an older version, whose ``run``
and pytest are the other side. Writes ``benchmarks/isolation.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
JSON = Path(__file__).with_suffix(".json")
CLI = "import sys; from amp_fuzz.cli import main; sys.exit(main())"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=600)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--before", type=Path)
    args = parser.parse_args()
    told = [f"cases={args.cases}", f"seed={args.seed}", "backends=eager-cpu", "minimize=0"]
    cli = [sys.executable, "-c", CLI, "run", "--workers=1", *(f"--{word}" for word in told)]
    plugin = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--amp-fuzz"]
    plugin += [f"--amp-fuzz-{word}" for word in told]
    found = {}
    for name, command, option in (
        ("run", cli, "--isolate=never"),
        ("pytest", plugin, "--amp-fuzz-isolate=never"),
    ):
        before = [*command] if args.before else [*command, option]
        ratios = []
        for number in range(args.pairs):
            sides = [(HERE, command), (args.before or HERE, before)]
            seconds = [spent(*side) for side in (sides if number % 2 else sides[::-1])]
            now, then = seconds if number % 2 else seconds[::-1]
            ratios.append(now / then)
            print(f"{name}: {now:.1f} s of CPU time isolated, {then:.1f} s before", flush=True)
        found[name] = {"isolated to before, CPU time": [round(r, 3) for r in ratios]}
        found[name]["median"] = [round(statistics.median(ratios), 3)]
    result = {
        "cases": args.cases,
        "seed": args.seed,
        "before": "an older checkout" if args.before else "isolate=never",
        "commands": found,
        "versions": {p: version(p) for p in ("torch", "amp-fuzz")},
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }
    JSON.write_text(json.dumps(result, indent=2) + "\n")


def spent(checkout: Path, command: list[str]) -> float:
    """Return the CPU seconds of a command and of all that it started, in an empty folder."""
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
        if done.returncode != 0:
            raise SystemExit(f"{command} ended with {done.returncode}:\n{done.stdout[-2000:]}")
    end = resource.getrusage(resource.RUSAGE_CHILDREN)
    return end.ru_utime + end.ru_stime - start.ru_utime - start.ru_stime


if __name__ == "__main__":
    main()
