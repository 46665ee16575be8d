"""Interrupts: the first one stops the run, and later ones cannot interrupt its summary.

An exception that a signal raises while torch is imported may end the process in SIGABRT (C++ ends
it: `pybind11::error_already_set`), or be swallowed and make the import fail in another way. So a
signal ends the process there and then, as long as there is nothing to lose.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

__all__ = ["Interrupted", "Interrupts", "ending_imports"]

_SHOW_CURSOR = "\x1b[?25h"  # which a progress display hides


@contextmanager
def ending_imports() -> Iterator[None]:
    """End the process at a Ctrl-C during an import; elsewhere `KeyboardInterrupt`, as ever."""
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # somebody else handles it
        return
    signal.signal(signal.SIGINT, _end_import)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is _end_import:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _end_import(number: int, frame: FrameType | None) -> None:
    if _importing(frame):
        _leave(number)
    signal.default_int_handler(number, frame)


def _importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def _leave(number: int) -> NoReturn:
    """End the process with the signal's exit code."""
    with suppress(Exception):  # such as a reader that went away
        if sys.stdout.isatty():
            sys.stdout.write(f"{_SHOW_CURSOR}\n")
        sys.stdout.flush()
    with suppress(OSError):
        os.write(2, b"amp-fuzz: interrupted\n")
    os._exit(128 + number)


class Interrupted(BaseException):
    """Ctrl-C or SIGTERM. Not an `Exception`, so no general handler catches it."""


class Interrupts:
    """Handle SIGINT and SIGTERM inside the context; use it in the main thread.

    Inside `stoppable`, the first signal raises `Interrupted`; a signal that came earlier raises it
    on entry. Inside `importing` it does the same, and ends the process during an import. Later
    signals are ignored, so the rest of a run (ending its workers, the summary, the report)
    completes.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._pending: int | None = None
        self._raising = False
        self._leaving = False

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

    @contextmanager
    def importing(self) -> Iterator[None]:
        """As `stoppable`, for the start of a command, while there is nothing to lose."""
        self._leaving = True
        try:
            with self.stoppable():
                yield
        finally:
            self._leaving = False

    def check(self) -> None:
        """Raise `Interrupted` if a signal came: Python ignores exceptions in a finaliser."""
        if self.received is not None:
            raise Interrupted

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._leaving and _importing(frame):
            _leave(number)
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
