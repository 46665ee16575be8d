"""Call the user's callable in a fork of this process: a kernel may end the process, or a compiler.

The fork has the callable itself, with all that it holds, and what was done to torch before.
"""

from __future__ import annotations

import faulthandler
import math
import pickle
import signal
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path
from typing import Any

from amp_fuzz.supervise import Dead, talk

__all__ = ["Died", "InFork", "apart"]


class Died(Exception):
    """The process of a call ended before it answered. line: ``model.py:12``, of Python, or ""."""

    def __init__(self, how: str, line: str) -> None:
        super().__init__(how)
        self.line = line


class InFork(Exception):
    """The traceback of an exception that a fork raised, as its cause."""


def apart(function: Callable[..., Any], *args: object) -> Any:
    """Return ``function(*args)``, computed in a fork. Raises what the function raises, and `Died`.

    What it returns is a copy. It may take as long as it likes.
    """
    with tempfile.TemporaryDirectory(prefix="amp-fuzz-") as folder:
        log = Path(folder) / "fatal"
        try:
            (data,) = talk(math.inf, _call, log, function, *args, has_children=True)
        except Dead as dead:
            raise Died(str(dead), _innermost(log)) from None
    result, error, text = pickle.loads(data)
    if error is not None:
        raise error from InFork(f"\n{text}")
    return result


def _call(
    pipe: connection.Connection, log: Path, function: Callable[..., Any], *args: object
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started us is the one to interrupt
    with log.open("w") as file:
        faulthandler.enable(file, all_threads=False)
        pipe.send(_answer(function, *args))
        pipe.send(None)


def _answer(function: Callable[..., Any], *args: object) -> bytes:
    """Return what the function returned or raised. The pipe itself would share tensors' memory."""
    result, error, text = None, None, ""
    try:
        result = function(*args)
    except Exception as raised:
        error, text = raised, traceback.format_exc()
    try:
        data = pickle.dumps((result, error, text))
        pickle.loads(data)
    except Exception:  # an exception that takes other arguments than it keeps
        data = pickle.dumps((None, RuntimeError(text or traceback.format_exc()), text))
    return data


def _innermost(log: Path) -> str:
    """Return the innermost line of Python that is neither torch's nor ours when a fork died."""
    for line in log.read_text(errors="replace").splitlines() if log.exists() else ():
        path, _, rest = line.strip().removeprefix('File "').partition('", line ')
        if rest and "/torch/" not in path and "/amp_fuzz/" not in path:
            return f"{Path(path).name}:{rest.partition(' ')[0]}"
    return ""
