"""Starting processes that a Ctrl-C does not reach."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker

__all__ = ["no_interrupts"]


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
