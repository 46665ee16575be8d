"""Sessions of pytest in processes of their own, which need not be new ones."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from tests.forks import forked


def session(arguments: list[str]) -> int:
    return int(pytest.main(arguments))


@pytest.fixture
def forking(
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Have `runpytest_subprocess` run its sessions in forks; ``run`` still starts a new process."""
    files = tmp_path_factory.mktemp("outputs")

    def run(*arguments: str) -> pytest.RunResult:
        before = [str(pytester.path), os.environ.get("PYTHONPATH", "")]
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, before)))
        words = (f"--basetemp={tmp_path_factory.mktemp('session')}", *arguments)
        start = time.monotonic()
        done = forked(session, words, folder=Path.cwd(), environment=environment, files=files)
        sys.stdout.write(f"{done.out}\n{done.err}\n")  # shown where the test fails
        took = time.monotonic() - start
        return pytest.RunResult(done.code, done.out.splitlines(), done.err.splitlines(), took)

    monkeypatch.setattr(pytester, "runpytest_subprocess", run)
