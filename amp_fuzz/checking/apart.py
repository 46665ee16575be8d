"""Call the user's callable in a fork of this process: a kernel may end the process, or a compiler.

The fork has the callable itself, with all that it holds, and what was done to torch before.
"""

from __future__ import annotations

import faulthandler
import math
import pickle
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing import connection
from pathlib import Path
from typing import IO, Any

from amp_fuzz.processes import expendable
from amp_fuzz.supervise import Dead, talk

__all__ = ["Apart", "Died", "InFork"]

_IDLE = 60.0  # seconds


class Died(Exception):
    """A fork ended before all was said. line: of Python, ``model.py:12``, or "".

    waits: it did not end by itself: it used no CPU time for long, as where it waits for a thread,
    of which a fork has none.
    """

    def __init__(self, how: str, line: str = "", *, waits: bool = False) -> None:
        super().__init__(how)
        self.line, self.waits = line, waits


class InFork(Exception):
    """The traceback of an exception that a fork raised, as its cause."""


class Apart:
    """Runs generators in forks; none more once one of them has waited in vain."""

    def __init__(self) -> None:
        self._waited = False

    def __call__(self, function: Callable[..., Iterator[Any]], *args: object) -> Iterator[Any]:
        """Yield what ``function(*args)`` yields, in a fork. Raises what that raises, and `Died`.

        What comes are copies. It may take as long as it likes while it computes.
        """
        if self._waited:
            raise Died("it was not called, since a call before it waited in vain", waits=True)
        with tempfile.TemporaryFile("w+", errors="replace") as log:
            try:
                for data in talk(math.inf, _call, log, function, *args, idle=_IDLE, stands_in=True):
                    said, error, text = pickle.loads(data)
                    if error is not None:
                        raise error from InFork(f"\n{text}")
                    yield said
            except Dead as dead:
                self._waited = dead.kind == "timeout"
                raise Died(str(dead), _innermost(log), waits=self._waited) from None


def _call(
    pipe: connection.Connection,
    log: IO[str],
    function: Callable[..., Iterator[Any]],
    *args: object,
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started us is the one to interrupt
    expendable()
    faulthandler.enable(log, all_threads=False)
    try:
        # Bytes: the pipe itself would send tensors as memory that both processes share.
        for said in function(*args):
            pipe.send(pickle.dumps((said, None, "")))
    except BaseException as error:  # sys.exit() too is for whoever called
        pipe.send(_raised(error))
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    pipe.send(None)


def _raised(error: BaseException) -> bytes:
    text = traceback.format_exc()
    try:
        data = pickle.dumps((None, error, text))
        pickle.loads(data)
    except Exception:  # one that takes other arguments than it keeps
        return pickle.dumps((None, RuntimeError(text), text))
    return data


def _innermost(log: IO[str]) -> str:
    """Return the innermost line of Python that is neither torch's nor ours when a fork died."""
    log.seek(0)
    for line in log:
        path, _, rest = line.strip().removeprefix('File "').partition('", line ')
        if rest and "/torch/" not in path and "/amp_fuzz/" not in path:
            return f"{Path(path).name}:{rest.partition(' ')[0]}"
    return ""
