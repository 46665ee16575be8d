"""Interrupts: the first one stops what runs, those after it cannot lose what is shown of it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["Interrupted", "Interrupts"]


class Interrupted(BaseException):
    """Ctrl-C or SIGTERM; no `Exception`, so that only who waits for it catches it."""


class Interrupts:
    """Takes SIGINT and SIGTERM over while it is entered; use it in the main thread.

    Inside `stoppable`, the first signal raises `Interrupted`. Everywhere else, and from then on,
    signals are only noted: what follows a run (ending its workers, the summary, the report) comes
    to its end.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._raising = False

    def __enter__(self) -> Interrupts:
        self._before = {
            number: signal.signal(number, self._handle)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def stoppable(self) -> Iterator[None]:
        """Let the first signal raise `Interrupted` here."""
        self._raising = True
        try:
            yield
        finally:
            self._raising = False

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self._raising:
            self._raising = False
            self.received = number
            raise Interrupted

    @property
    def code(self) -> int | None:
        """The exit code of the signal that stopped the run, or None."""
        return None if self.received is None else 128 + self.received
