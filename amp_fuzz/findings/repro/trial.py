"""Run what `amp-fuzz repro` writes as its reader will: from a file, in a new Python."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from amp_fuzz.findings.supervision.supervisor import Dead, ask

__all__ = ["tried"]

_PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir=.", "-c", os.devnull)


def tried(
    text: str, environ: Mapping[str, str], *, test: bool, timeout: float, memory: float
) -> str:
    """Return how a script or a test ended if it does not reproduce its finding here, or "".

    environ: the variables of the reader's shell. timeout: CPU seconds; the wall-clock limit is five
    times that. memory: GiB.
    """
    try:
        code, last = ask(timeout, _run, text, dict(environ), test, memory=memory)
    except Dead as dead:
        return str(dead)
    return "" if code == 1 else f"exit code {code}{': ' * bool(last)}{last}"


def _run(text: str, environ: dict[str, str], test: bool) -> tuple[int, str]:
    """Return the exit code, and the last line that was printed."""
    with tempfile.TemporaryDirectory(prefix="amp-fuzz-") as folder:
        path = Path(folder) / "test_repro.py"
        path.write_text(text)
        command = [sys.executable, *(_PYTEST if test else ()), str(path)]
        done = subprocess.run(
            command,
            cwd=folder if test else None,
            env=environ | ({"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"} if test else {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
    lines = done.stdout.split("\n")
    code = done.returncode
    if test and code == 1 and "1 failed" not in done.stdout:
        code = 2  # an error beside the test
    return code, next((line.strip() for line in reversed(lines) if line.strip()), "")
