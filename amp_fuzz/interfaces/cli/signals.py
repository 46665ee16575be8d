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

    Inside `stoppable`, the first signal raises `Interrupted`; one that came before raises it there
    at once. From then on they are ignored: what follows a run (ending its workers, the summary, the
    report) comes to its end.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._pending: int | None = None
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
        """Let the first signal raise `Interrupted` here: at the end, if it was swallowed."""
        before = self.received
        self._raising = before is None
        try:
            if self._raising and self._pending is not None:
                self._stop(self._pending)
            yield
            if self.received != before:
                raise Interrupted
        finally:
            self._raising = False

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self._raising:
            self._stop(number)
        self._pending = number

    def _stop(self, number: int) -> None:
        self._raising = False
        self.received = number
        raise Interrupted

    @property
    def code(self) -> int | None:
        """The exit code of the signal that stopped the run, or None."""
        return None if self.received is None else 128 + self.received
