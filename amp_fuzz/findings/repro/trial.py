"""Run what `amp-fuzz repro` writes as its reader will: from a file, in a new Python."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from amp_fuzz.findings.repro.script import TIMEOUT
from amp_fuzz.findings.supervision.supervisor import Dead, ask

__all__ = ["Tried", "tried"]

_PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir=.", "-c", os.devnull)
_PLAIN = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "", "PYTEST_PLUGINS": ""}

# How a test fails that a finding fails. Other errors mean that it could not look.
_FAILED = re.compile(r"^E +(assert |AssertionError|subprocess\.TimeoutExpired)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Tried:
    """How a script or a test ended.

    code: its exit code, 1 if it reproduces its finding; None if it was ended by force, or if Python
    could not run it. last: the last line that it printed, or why there is no exit code.
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

    timeout: CPU seconds; the wall-clock limit is five times that. Where the program of the finding
    has a time limit of its own, that comes on top. memory: GiB.
    """
    timeout += TIMEOUT * (f"timeout={TIMEOUT})" in text)
    try:
        # The folder is this process's: the other one may be killed before it can remove it.
        with tempfile.TemporaryDirectory(prefix="amp-fuzz-", ignore_cleanup_errors=True) as folder:
            path = Path(folder) / "test_repro.py"
            path.write_text(text, encoding="utf-8")
            found = ask(timeout, _run, path, dict(environ), python, test, memory=memory)
    except Dead as dead:
        return Tried(None, str(dead))
    except OSError as error:
        return Tried(None, f"cannot run: {error.strerror or error}")
    assert isinstance(found, Tried)
    return found


def _run(path: Path, environ: dict[str, str], python: str, test: bool) -> Tried:
    done = subprocess.run(
        [python, *(_PYTEST if test else ()), str(path)],
        cwd=path.parent if test else None,
        env=environ | _PLAIN if test else environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    code: int | None = done.returncode
    out, err = _lines(done.stdout), _lines(done.stderr)
    if code == 1 and not out:
        # Python itself exits with 1 too: for a syntax that it lacks, or a broken installation. A
        # script prints what it saw before it exits with 1.
        code = None
    if test and code == 1 and not _FAILED.search(done.stdout):
        code = 2  # an error beside the test
    last = out if code in (0, 1) or test else err or out
    return Tried(code, (last or err or [""])[-1])


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]
