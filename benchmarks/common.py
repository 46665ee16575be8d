"""What the scripts share: arguments, result files, and where they were measured."""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from amp_fuzz.runs.surroundings import commit_of, cpu

ROOT = Path(__file__).resolve().parents[1]
CASES = ROOT / "tests" / "cases"

Row = dict[str, Any]


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser that says what a script's docstring does."""
    form = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=doc, formatter_class=form)


def read(path: Path) -> Row:
    """Return what a result file holds: nothing, if there is none."""
    found: Row = json.loads(path.read_text()) if path.exists() else {}
    return found


def write(path: Path | None, result: Row) -> None:
    """Write a result file, if a path is given."""
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")


def show(path: Path | None, result: Row) -> None:
    """Print a result, and write it if a path is given."""
    print(json.dumps(result, indent=1))
    write(path, result)


def versions(*packages: str) -> dict[str, str]:
    return {package: version(package) for package in packages}


def machine(cores: str = "one thread") -> str:
    """Return where this runs, in words."""
    return f"{platform.machine()}, {platform.system()}, {cores}"


def conditions(seed: int, seconds: float) -> Row:
    """Return what a hunt for faults depends on."""
    packages = versions("torch", "hypothesis", "numpy", "amp-fuzz")
    return {
        "seconds_limit": seconds,
        "seed": seed,
        "versions": {"python": platform.python_version(), **packages},
        "machine": {"cpu": cpu(), "cores": os.cpu_count(), "system": platform.system()},
    }


@lru_cache(maxsize=1)
def commit(checkout: Path = ROOT) -> str:
    """Return the version of the code that is measured, short."""
    return commit_of(checkout)[:7] or "unknown"


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of those that it started and awaited."""
    return sum(os.times()[:4])


def rows_apart(
    script: str, name: str, kind: str, checks: Sequence[str]
) -> Iterator[tuple[str, Row]]:
    """Yield each check of one model and its row, from a process that a script starts of itself.

    The script prints ``row``, then both as JSON. A death of the process loses the check under way.
    """
    command = [sys.executable, script, f"--serve={name}", f"--kind={kind}", *checks]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    left = list(checks)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("row "):
                check, row = json.loads(line.removeprefix("row "))
                left.remove(check)
                yield check, row
    if left:
        said = f"the process ended with {process.returncode}"
        yield left[0], {"verdict": said, "right": False}


def named(name: str, globs: str) -> bool:
    """Return whether one of some globs, joined by commas, is a name's. Brackets are literal."""
    return any(fnmatch.fnmatchcase(name, g.replace("[", "[[]")) for g in globs.split(","))
