"""A fork, and what it starts, is as a process that has just been started."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from amp_fuzz.findings.supervision.processes import death, start
from tests.forks import Done, forked

pytestmark = pytest.mark.thorough


def say(word: str) -> None:
    os.write(1, f"{word} {Path.cwd()} {os.environ['WORD']} {'PATH' in os.environ}\n".encode())
    os.write(2, f"{word}\n".encode())
    atexit.register(os.write, 1, f"{word} ends\n".encode())


def starting(arguments: list[str]) -> int:
    """Say where this is, start a worker that does, and one that dies; say how."""
    say("command")
    os.environ["WORD"] = "later"
    worker = start(say, "worker")
    worker.join()
    os.write(1, f"{arguments} {sys.argv[1:]} {worker.exitcode}\n".encode())
    sys.stdout.write(f"{death(start(die, []))}\n")
    return 7


def hang(arguments: list[str]) -> int:
    start(time.sleep, 600).join()
    return 0


def die(arguments: list[str]) -> int:
    os.kill(os.getpid(), signal.SIGSEGV)
    return 0


def run(entry: object, tmp_path: Path, **more: float) -> Done:
    environment = {"WORD": "one"}
    return forked(
        entry, ("a", "b"), folder=tmp_path, environment=environment, files=tmp_path, **more
    )


def test_a_fork_has_its_own_folder_environment_outputs_and_end(tmp_path: Path) -> None:
    done = run(starting, tmp_path)
    assert done.code == 7
    assert done.err.splitlines() == ["command", "worker"]
    assert done.out.splitlines() == [
        f"command {tmp_path} one False",
        f"worker {tmp_path} later False",
        "['a', 'b'] ['a', 'b'] 0",
        "of SIGSEGV",
        "command ends",
    ]


def test_its_death_is_seen(tmp_path: Path) -> None:
    assert run(die, tmp_path).code == -signal.SIGSEGV


def test_a_fork_that_hangs_is_ended_with_its_workers(tmp_path: Path) -> None:
    before = time.monotonic()
    assert run(hang, tmp_path, seconds=1).code == -signal.SIGKILL
    assert time.monotonic() - before < 60
