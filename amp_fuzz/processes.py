"""Processes that a Ctrl-C does not reach, and that end with all that they started.

A compiler starts others: were a worker ended alone that waits for one, that one would run on.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import get_context, parent_process, resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path

__all__ = ["death", "end", "end_children", "no_interrupts", "spawn"]

_GROUPS = hasattr(os, "killpg")


def spawn(entry: Callable[..., object], *args: object) -> BaseProcess:
    """Start ``entry(*args)`` in a new process, the leader of a group of its own.

    It ends with its group when the process that started it ends.
    """
    process = get_context("spawn").Process(target=_lead, args=(entry, *args), daemon=True)
    with no_interrupts():
        process.start()
    return process


def _lead(entry: Callable[..., object], *args: object) -> None:
    parent = parent_process()
    assert parent is not None
    if _GROUPS:
        os.setpgid(0, 0)
        threading.Thread(target=_follow, args=(parent,), daemon=True).start()
    entry(*args)


def _follow(parent: BaseProcess) -> None:
    """Wait for the end of the parent; a terminal that closes does not reach this group."""
    parent.join()
    os.killpg(0, signal.SIGKILL)


def end(process: BaseProcess, patience: float = 0.0) -> None:
    """Kill a process of `spawn`, if it has not ended after so many seconds, and its group."""
    process.join(patience)
    if _GROUPS and process.pid is not None:
        with suppress(ProcessLookupError, PermissionError):  # all ended, or not yet a leader
            os.killpg(process.pid, signal.SIGKILL)
    if process.is_alive():
        process.kill()
    process.join(5)


def end_children() -> None:
    """Kill all that this process started, and what they did, where the system lists them."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    ours = {os.getpid()}
    while found := {pid for pid, parent in parents.items() if parent in ours} - ours:
        ours |= found
    for pid in ours - {os.getpid()}:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def death(process: BaseProcess) -> str:
    """Return how a process died: "of SIGSEGV", "with exit code 3"."""
    process.join(5)
    code = process.exitcode or 0
    return f"of {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"


@contextmanager
def no_interrupts() -> Iterator[None]:
    """Block Ctrl-C: for this thread while it is here, and for good in a process that it starts.

    A terminal sends it to all processes, and a worker that is still importing would answer with a
    traceback. It is for whoever started the worker to end it.
    """
    resource_tracker.ensure_running()  # starting it, as the first process does, would unblock
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
