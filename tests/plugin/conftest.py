"""Sessions of pytest in processes of their own, which need not be new ones."""

from __future__ import annotations

import os
import sys
import time
from multiprocessing import reduction
from pathlib import Path
from typing import Any

import pytest
from execnet import gateway_io

from tests.forks import Forked, forked


class _Worker(Forked):
    """A worker of xdist, as execnet starts one: told by its first line of input what to do."""

    def __init__(self, pipes: tuple[int, int]) -> None:
        super().__init__()
        self._pipes: tuple[Any, ...] = pipes

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_pipes": tuple(map(reduction.DupFd, self._pipes))}

    def main(self) -> None:
        for number, pipe in enumerate(self._pipes):
            os.dup2(pipe.detach(), number)
        sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
        exec(eval(sys.stdin.readline()), {})


class _Started:
    """What execnet uses of `subprocess.Popen`."""

    def __init__(self) -> None:
        (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
        self.process = _Worker((theirs_in, theirs_out))
        self.process.start()
        os.close(theirs_in)
        os.close(theirs_out)
        self.stdin, self.stdout = os.fdopen(ours_out, "wb", 0), os.fdopen(ours_in, "rb")

    def wait(self) -> int | None:
        self.process.join()
        return self.process.exitcode

    def kill(self) -> None:
        self.process.kill()


def _start(self: Any, arguments: list[str], execmodel: Any) -> None:
    self.popen = _Started()
    gateway_io.Popen2IO.__init__(self, self.popen.stdin, self.popen.stdout, execmodel=execmodel)


def session(arguments: list[str]) -> int:
    """Run pytest in a fork, and its workers in others."""
    gateway_io.Popen2IOMaster.__init__ = _start  # type: ignore[method-assign]
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
