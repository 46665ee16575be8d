"""Run what `amp-fuzz repro` writes as its reader will: from a file, in a new Python."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from amp_fuzz.findings.supervision.supervisor import Dead, ask

__all__ = ["Tried", "tried"]

_PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir=.", "-c", os.devnull)


@dataclass(frozen=True, slots=True)
class Tried:
    """How a script or a test ended.

    code: its exit code, 1 if it reproduces its finding; None if it was ended by force. last: the
    last line that it printed, or why it was ended.
    """

    code: int | None
    last: str

    @property
    def reproduces(self) -> bool:
        """Whether it shows the finding."""
        return self.code == 1

    def __str__(self) -> str:
        if self.code is None:
            return self.last
        return f"exit code {self.code}{': ' * bool(self.last)}{self.last}"


def tried(
    text: str,
    environ: Mapping[str, str],
    python: str = sys.executable,
    *,
    test: bool = False,
    timeout: float,
    memory: float,
) -> Tried:
    """Run a script, or a test, with an interpreter and the variables of the reader's shell.

    timeout: CPU seconds; the wall-clock limit is five times that. memory: GiB.
    """
    try:
        found = ask(timeout, _run, text, dict(environ), python, test, memory=memory)
    except Dead as dead:
        return Tried(None, str(dead))
    assert isinstance(found, Tried)
    return found


def _run(text: str, environ: dict[str, str], python: str, test: bool) -> Tried:
    if test:
        environ = environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    with tempfile.TemporaryDirectory(prefix="amp-fuzz-") as folder:
        path = Path(folder) / "test_repro.py"
        path.write_text(text)
        done = subprocess.run(
            [python, *(_PYTEST if test else ()), str(path)],
            cwd=folder if test else None,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
    code = done.returncode
    if test and code == 1 and "1 failed" not in done.stdout:
        code = 2  # an error beside the test
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    return Tried(code, lines[-1] if lines else "")
