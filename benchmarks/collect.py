"""What having amp_fuzz installed costs a pytest run that does not ask for it.

Runs `python -m pytest --collect-only` in a small project, in turn with the plugin and with
`-p no:amp_fuzz`, and compares. The two of a pair run right after one another, in changing order, so
that what the machine does besides falls on both; the medians over pairs are reported, and the
difference is the median of the pairs' differences. Time is wall time; CPU time, which a busy
machine disturbs less, stands beside it.

    python benchmarks/collect.py --pairs 40 --output benchmarks/collect.json
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import arguments, versions, write

TARGET = 20.0  # ms
WITHOUT = ("-p", "no:amp_fuzz")
PACKAGES = ("amp-fuzz", "pytest", "pytest-xdist", "hypothesis", "torch", "pandas")


@dataclass(frozen=True, slots=True)
class Sample:
    """One run, in milliseconds."""

    wall: float
    cpu: float


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--pairs", type=int, default=40, help="runs of each kind")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        project = Path(folder)
        make_project(project)
        check(project)
        result = summary(measure(project, options.pairs))
        result["plugin_alone_ms"] = round(plugin_alone(project, options.pairs), 2)
    write(options.output, result)
    wall, cpu = result["wall_ms"], result["cpu_ms"]
    for name, row in (("wall", wall), ("CPU", cpu)):
        print(
            f"{name}: {row['with']:.1f} ms with the plugin, {row['without']:.1f} ms without: "
            f"{row['difference']:+.1f} ms, ratio {row['ratio']:.3f} "
            f"(fastest {row['fastest'][0]:.1f} and {row['fastest'][1]:.1f} ms)"
        )
    print(f"importing and registering the plugin alone: {result['plugin_alone_ms']:.1f} ms")
    print(f"target: under {TARGET:g} ms more; written to {options.output}")
    return 0 if wall["difference"] < TARGET else 1


def make_project(folder: Path) -> None:
    """Write 10 files of 10 tests."""
    for i in range(10):
        tests = "\n".join(f"def test_{j}():\n    assert {j} == {j}\n" for j in range(10))
        (folder / f"test_file_{i}.py").write_text(tests)


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "pytest", "--collect-only", "-q", *args]


def check(folder: Path) -> None:
    """Fail unless the two kinds of run differ in the plugin, and in nothing else that counts."""
    for args, wanted in (((), True), (WITHOUT, False)):
        code = f"import pytest, sys; pytest.main({command(*args)[3:]!r}); print(*sys.modules)"
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True
        )
        assert "100 tests collected" in done.stdout, done.stdout
        loaded = set(done.stdout.splitlines()[-1].split())
        assert ("amp_fuzz.pytest_plugin" in loaded) == wanted, "the plugin is not as expected"
        assert not loaded & {"torch", "pandas"}, loaded & {"torch", "pandas"}


def measure(folder: Path, pairs: int) -> list[tuple[Sample, Sample]]:
    """Return pairs of runs, with and without the plugin, after one of each that does not count."""
    run(folder), run(folder, *WITHOUT)
    found = []
    for i in range(pairs):
        if i % 2:
            without = run(folder, *WITHOUT)
            found.append((run(folder), without))
        else:
            found.append((run(folder), run(folder, *WITHOUT)))
    return found


def run(folder: Path, *args: str) -> Sample:
    start = time.perf_counter()
    process = subprocess.Popen(command(*args), cwd=folder, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, f"pytest exited with {process.returncode}"
    return Sample(wall * 1e3, (usage.ru_utime + usage.ru_stime) * 1e3)


PLUGIN = """
import time
from _pytest.config import get_config
config = get_config(["-p", "no:amp_fuzz"])
start = time.perf_counter()
from amp_fuzz import pytest_plugin
config.pluginmanager.register(pytest_plugin)
print((time.perf_counter() - start) * 1e3)
"""


def plugin_alone(folder: Path, runs: int) -> float:
    """Return the median time, in fresh interpreters, to import and register the plugin.

    Registering declares its options. It is what the plugin adds to a run, without the noise of the
    rest of the run.
    """
    found = []
    for _ in range(runs):
        done = subprocess.run(
            [sys.executable, "-c", PLUGIN], cwd=folder, capture_output=True, text=True, check=True
        )
        found.append(float(done.stdout))
    return median(found)


def summary(pairs: list[tuple[Sample, Sample]]) -> dict[str, Any]:
    result: dict[str, Any] = {
        "what": "python -m pytest --collect-only -q, 100 tests in 10 files",
        "pairs": len(pairs),
        "target_difference_ms": TARGET,
    }
    for name in ("wall", "cpu"):
        values = [(getattr(a, name), getattr(b, name)) for a, b in pairs]
        differences = sorted(a - b for a, b in values)
        quarter = len(differences) // 4
        result[f"{name}_ms"] = {
            "with": round(median(a for a, _ in values), 2),
            "without": round(median(b for _, b in values), 2),
            "difference": round(median(differences), 2),
            "difference_quartiles": [
                round(differences[quarter], 2),
                round(differences[-1 - quarter], 2),
            ],
            "ratio": round(median(a / b for a, b in values), 4),
            # Noise only ever adds: the fastest run of each kind had the least of it.
            "fastest": [round(min(side), 2) for side in zip(*values, strict=True)],
        }
    result["versions"] = versions(*PACKAGES)
    result["machine"] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "load_average": [round(x, 2) for x in os.getloadavg()],
    }
    result["date"] = datetime.now(UTC).isoformat(timespec="seconds")
    return result


if __name__ == "__main__":
    sys.exit(main())
