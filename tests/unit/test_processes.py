"""A process is ended with all that it started, and does not outlive who started it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from amp_fuzz.backends import privateuse1
from amp_fuzz.findings.supervision import supervisor
from amp_fuzz.findings.supervision.processes import (
    Usage,
    death,
    end,
    few_primitives,
    is_runnable,
    start,
)
from amp_fuzz.findings.supervision.supervisor import Dead, ask
from amp_fuzz.runs import memory
from tests.helpers import wait_until

pytestmark = pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs process groups")


def waiting(pipe: Connection) -> None:
    """Start another process, say which, and wait for it."""
    other = subprocess.Popen(["sleep", "600"])
    pipe.send(other.pid)
    other.wait()


def killed(number: int) -> None:
    os.kill(os.getpid(), number)


def waiting_without_end(pipe: Connection) -> None:
    waiting_for_ever()


def waiting_for_ever() -> None:
    while True:
        signal.pause()


def working_for_ever(pipe: Connection) -> None:
    """Work in a thread of another process, as a compiler does."""
    work = "import itertools as i, threading as t; t.Thread(target=all, args=[i.repeat(1)]).start()"
    subprocess.run([sys.executable, "-c", work])


def leaving() -> None:
    sys.exit(3)


def gone(pid: int) -> bool:
    """Wait for a process that is not ours to end."""
    wait_until(lambda: _ended(pid), "the end of a process")
    return True


def _ended(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"


def started() -> tuple[multiprocessing.process.BaseProcess, int]:
    ours, theirs = multiprocessing.Pipe()
    process = start(waiting, theirs)
    return process, ours.recv()


def test_the_children_of_a_process_end_with_it() -> None:
    process, other = started()
    end(process)
    assert not process.is_alive()
    assert gone(other)


def test_kill_alone_would_leave_it() -> None:
    process, other = started()
    process.kill()
    process.join()
    try:
        assert not gone_at_once(other)
    finally:
        end(process)
    assert gone(other)


def gone_at_once(pid: int) -> bool:
    time.sleep(0.2)
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.thorough
def test_a_process_ends_with_its_parent() -> None:
    program = (
        "import os, signal, tests.unit.test_processes as t\n"
        "if __name__ == '__main__':\n"
        "    print(*(p if isinstance(p, int) else p.pid for p in t.started()), flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    first, second = map(int, done.stdout.split())
    assert gone(first)
    assert gone(second)


def test_how_it_died_is_said() -> None:
    process = start(killed, int(signal.SIGSEGV))
    process.join(60)  # on a busy machine it is long in starting
    assert death(process) == "of SIGSEGV"
    process = start(leaving)
    process.join(60)
    assert death(process) == "with exit code 3"
    end(process)  # which has ended: nothing happens


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_that_works_is_told_from_one_that_waits() -> None:
    waits, _ = started()
    works = start(working_for_ever, multiprocessing.Pipe()[1])
    wait_until(lambda: is_runnable(works.pid or 0), "a thread that works")
    wait_until(lambda: not is_runnable(waits.pid or 0), "processes that wait")  # once they started
    for process in (waits, works):
        end(process)
        assert not is_runnable(process.pid or 0)


@pytest.mark.thorough
def test_a_process_that_gets_no_cpu_time_is_not_one_that_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervisor, "usage", lambda pid: Usage())  # as on a very busy machine
    monkeypatch.setattr(supervisor, "_WATCH", 0.05)
    with pytest.raises(Dead, match=r"it waited for \d+ s and used no CPU time"):
        next(supervisor.talk(1000, waiting_without_end, idle=0.1))
    monkeypatch.setattr(supervisor, "is_runnable", lambda pid: True)
    with pytest.raises(Dead, match=r"no answer after \d+ s, 0 s of CPU time"):
        next(supervisor.talk(0.2, waiting_without_end, idle=0.1))


def test_a_worker_has_torch_keep_few_primitives_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "7")
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "")  # so that it is put back
    del os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"]
    few_primitives()
    assert os.environ["LRU_CACHE_CAPACITY"] == "7"
    assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "16"


@pytest.mark.skipif(memory._trim() is None, reason="the C library keeps what is freed")
def test_freed_memory_between_live_blocks_is_returned() -> None:
    blocks = [bytearray(4096) for _ in range(20_000)]
    stays = blocks[::64]
    before = _resident()
    del blocks
    memory.trim()
    assert before - _resident() > 60
    assert len(stays[-1]) == 4096


def _resident() -> float:
    """Return what this process has allocated and is in memory, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon"))


# Where torch sees an accelerator, a backward pass of CPU tensors starts threads of autograd.
BACKWARD = """
import time
import torch
from amp_fuzz.backends import privateuse1
from amp_fuzz.findings.supervision.processes import start, unforkable

def backward():
    torch.ones(3, requires_grad=True).sum().backward()

def forked():
    try:
        backward()
    except RuntimeError as error:
        print("a fork:", str(error).partition(".")[0], flush=True)

privateuse1.install("cuda")
print("before:", unforkable(), flush=True)
backward()
time.sleep(0.5)  # a thread takes its name soon after its start
print("after:", unforkable(), flush=True)
start(forked, fork=True).join()
"""

REFUSED = "Unable to handle autograd's threading in combination with fork-based multiprocessing"


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="needs forks")
@pytest.mark.skipif(not privateuse1.supported(), reason="needs a device in Python")
def test_no_fork_where_its_backward_passes_would_raise() -> None:
    said = subprocess.run([sys.executable, "-c", BACKWARD], capture_output=True, text=True)
    assert said.stdout.splitlines() == [
        "before: ",
        "after: autograd has started threads, which do not survive a fork",
        f"a fork: {REFUSED}",
    ]


class _Ended(BaseException):
    pass


@contextmanager
def _sent_after_forks(number: signal.Signals, *, here: bool) -> Iterator[None]:
    """In a hook after each fork, send a signal to this thread or to another; its handler raises."""

    def raising(number: int, frame: object) -> None:
        raise _Ended

    def taking() -> None:
        forked.wait()
        signal.pthread_kill(threading.get_ident(), number)

    def hook() -> None:
        if on and here:
            signal.pthread_kill(threading.get_ident(), number)
        elif on:
            forked.set()
            other.join()

    on = [True]
    forked, other = threading.Event(), threading.Thread(target=taking)
    before = signal.signal(number, raising)
    os.register_at_fork(after_in_parent=hook)
    if not here:
        other.start()  # unlike one that starts in the hook, it does not block the signal
    try:
        yield
    finally:
        on.clear()
        signal.signal(number, before)


@pytest.mark.parametrize("here", [True, False], ids=["this thread", "another thread"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_comes_during_a_fork_is_not_lost(number: signal.Signals, here: bool) -> None:
    """Python ignores exceptions in such hooks: a run that was told to end would go on."""
    with _sent_after_forks(number, here=here):
        before = signal.getsignal(number)
        with pytest.raises(_Ended):
            start(leaving, fork=True)
        assert signal.getsignal(number) is before


def test_a_new_process_ends_at_a_signal_that_its_start_blocks() -> None:
    process = start(waiting_for_ever, fork=True)
    process.terminate()
    process.join()
    assert process.exitcode == -signal.SIGTERM


def _takes(gib: float) -> int:
    held = bytearray(os.urandom(1) * int(gib * 2**30))
    time.sleep(2 * (gib > 0.5))
    return len(held)


@pytest.mark.thorough
def test_a_process_that_takes_too_much_memory_is_ended() -> None:
    # torch alone takes 0.6 GiB where it was built with CUDA.
    assert ask(60, _takes, 0.1, memory=1.5) == int(0.1 * 2**30)
    with pytest.raises(Dead, match=r"^it held more than --memory=1.5 GiB$") as told:
        ask(60, _takes, 1.75, memory=1.5)
    assert told.value.kind == "crash"
