"""Interrupts: the first one stops the run, and later ones cannot interrupt its summary."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["Interrupted", "Interrupts"]


class Interrupted(BaseException):
    """Ctrl-C or SIGTERM. Not an `Exception`, so no general handler catches it."""


class Interrupts:
    """Handle SIGINT and SIGTERM inside the context; use it in the main thread.

    Inside `stoppable`, the first signal raises `Interrupted`; a signal that came earlier raises it
    on entry. Later signals are ignored, so the rest of a run (ending its workers, the summary, the
    report) completes.
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
        """Let the first signal raise `Interrupted` here, or at the end if it was swallowed.

        An import may swallow it and then fail: NumPy's "cannot load module more than once per
        process".
        """
        before = self.received
        self._raising = before is None
        try:
            if self._raising and self._pending is not None:
                self._stop(self._pending)
            yield
            if self.received != before:
                raise Interrupted
        except Exception as error:
            if self.received == before:
                raise
            raise Interrupted from error
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
