"""A script or a test reproduces a finding only if it says so itself."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from amp_fuzz.findings.repro.script import TIMEOUT
from amp_fuzz.findings.repro.trial import Tried, tried
from tests.helpers import leading

LIMITS = {"timeout": 60.0, "memory": 8.0}


def test_python_that_exits_with_1_itself_reproduces_nothing(tmp_path: Path) -> None:
    """Such as an older one, for a syntax that it lacks."""
    found = tried("this is no Python\n", os.environ, **LIMITS)
    assert (found.code, found.reproduces) == (None, False)
    assert "SyntaxError" in str(found)
    assert tried("print('torch'); raise SystemExit(1)\n", os.environ, **LIMITS).reproduces


@pytest.mark.parametrize(
    ("body", "code"),
    leading(
        [
            ("raise RuntimeError('assert')", 2),
            ("assert not True", 1),
            ("import no_such_module", 2),
            ("assert True", 0),
        ],
        2,
    ),
)
def test_a_test_that_raises_something_else_reproduces_nothing(
    body: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {**os.environ, "PYTEST_ADDOPTS": "--no-such-option"}  # the reader's, not the test's
    found = tried(f"def test_it():\n    {body}\n", environ, test=True, **LIMITS)
    assert found.code == code, found


def test_a_python_that_cannot_be_run_is_said(tmp_path: Path) -> None:
    found = tried("", os.environ, str(tmp_path / "none"), **LIMITS)
    assert str(found) == "cannot run: No such file or directory"


@pytest.mark.thorough
def test_a_script_that_is_ended_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    found = tried("while True: pass\n", os.environ, timeout=1.0, memory=8.0)
    assert found.code is None
    assert list(tmp_path.iterdir()) == []


def test_a_script_may_wait_for_its_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of a timeout does: it waits for longer than `--timeout`."""
    given: list[float] = []

    def ask(timeout: float, *_: Any, memory: float) -> Tried:
        given.append(timeout)
        return Tried(1, "")

    monkeypatch.setattr("amp_fuzz.findings.repro.trial.ask", ask)
    for text in ("", f"subprocess.run(child, timeout={TIMEOUT})"):
        tried(text, os.environ, **LIMITS)
    assert given == [60.0, 60.0 + TIMEOUT]
