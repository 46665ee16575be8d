"""Call the user's callable in a fork of this process, since a kernel or a compiler may crash.

The fork has the callable with everything that it holds, and all changes made to torch.
"""

from __future__ import annotations

import faulthandler
import io
import math
import pickle
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, suppress
from multiprocessing import connection
from pathlib import Path
from types import WrapperDescriptorType
from typing import IO, Any, NamedTuple

import torch

from amp_fuzz.findings.supervision.processes import expendable
from amp_fuzz.findings.supervision.supervisor import Dead, talk

__all__ = ["Apart", "Died", "InFork"]

_IDLE = 60.0  # seconds


class Died(Exception):
    """A fork ended early. line: of Python, ``model.py:12``, or "".

    waits: it was ended because it used no CPU time for long: it may wait for a thread, which a fork
    does not have.
    """

    def __init__(self, how: str, line: str = "", *, waits: bool = False) -> None:
        super().__init__(how)
        self.line, self.waits = line, waits


class InFork(Exception):
    """The traceback of an exception raised in a fork, as its cause."""


class Apart:
    """Runs generators in forks, until one of them waits forever."""

    def __init__(self) -> None:
        self._waited = False

    def __call__(self, function: Callable[..., Iterator[Any]], *args: object) -> Iterator[Any]:
        """Yield what ``function(*args)`` yields, in a fork. Raises what that raises, and `Died`.

        The yielded objects are copies. It may compute for as long as it likes.
        """
        if self._waited:
            raise Died("it was not called, because an earlier call waited forever", waits=True)
        with ExitStack() as stack:
            log = stack.enter_context(tempfile.TemporaryFile("w+", errors="replace"))
            printed = {name: stack.enter_context(_lines()) for name in _in_memory()}
            stack.callback(_print, printed)
            said = talk(math.inf, _call, log, printed, function, *args, idle=_IDLE, stands_in=True)
            try:
                for data in stack.enter_context(closing(said)):
                    answer, raised = pickle.loads(data)
                    if raised is not None:
                        raise _loaded(raised) from InFork(f"\n{raised.text}")
                    yield answer
            except Dead as dead:
                self._waited = dead.kind == "timeout"
                raise Died(str(dead), _innermost(log), waits=self._waited) from None


def _in_memory() -> list[str]:
    """Return those of stdout and stderr that forks do not share, as under pytest's `capsys`."""
    found = []
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        try:
            if stream is not None:
                stream.fileno()
        except (AttributeError, OSError):  # io.UnsupportedOperation is one
            found.append(name)
    return found


def _lines() -> IO[str]:
    """Return a line-buffered text file for a fork's output."""
    return tempfile.TemporaryFile("w+", 1, "utf-8", "", errors="replace")


def _print(printed: Mapping[str, IO[str]]) -> None:
    """Write what a fork printed to this process's own streams."""
    for name, file in printed.items():
        file.seek(0)
        getattr(sys, name).write(file.read())


def _call(
    pipe: connection.Connection,
    log: IO[str],
    printed: Mapping[str, IO[str]],
    function: Callable[..., Iterator[Any]],
    *args: object,
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles interrupts
    expendable()
    faulthandler.enable(log, all_threads=False)
    for name, file in printed.items():
        setattr(sys, name, file)
    raised = None
    try:
        # Bytes: the pipe itself would send tensors as shared memory.
        for said in function(*args):
            pipe.send(pickle.dumps((said, None)))
    except BaseException as error:  # sys.exit() too is for the caller
        raised = pickle.dumps((None, _raised(error)))
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    if raised is not None:
        pipe.send(raised)
    pipe.send(None)


class _Raised(NamedTuple):
    """An error of a fork: its pickle, or b""; its last lines; its traceback."""

    data: bytes
    said: str
    text: str


def _raised(error: BaseException) -> _Raised:
    data = io.BytesIO()
    with suppress(Exception):  # it holds something that has no pickle
        _Dumped(data).dump(error)
    said = "".join(traceback.format_exception_only(error)).strip()
    return _Raised(data.getvalue(), said, traceback.format_exc())


def _loaded(raised: _Raised) -> BaseException:
    try:
        return _Loaded(io.BytesIO(raised.data)).load()  # type: ignore[no-any-return]
    except Exception:  # no pickle, or its class was made in the fork
        return RuntimeError(f"{raised.said} (raised in a fork; the error cannot be pickled)")


class _Dumped(pickle.Pickler):
    """Pickles errors by type and arguments, including classes that no module contains.

    The class that `pytest.skip` raises claims to be in ``builtins``; other classes are local to a
    function. A class from before the fork has the same address in the parent.
    """

    def persistent_id(self, value: Any) -> tuple[str, int] | None:
        if isinstance(value, type) and issubclass(value, BaseException) and not _shown(value):
            return value.__qualname__, id(value)
        return None

    def reducer_override(self, value: Any) -> Any:
        plain = getattr(type(value), "__reduce__", None) is BaseException.__reduce__
        return (_made, (type(value), value.args), value.__dict__) if plain else NotImplemented


class _Loaded(pickle.Unpickler):
    def persistent_load(self, value: tuple[str, int]) -> type[BaseException]:
        return next(kind for kind in _errors() if (kind.__qualname__, id(kind)) == value)


def _shown(kind: type) -> bool:
    """Return whether a class can be imported from where it claims to be."""
    found: Any = sys.modules.get(kind.__module__)
    for name in kind.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is kind


def _errors() -> Iterator[type[BaseException]]:
    kinds: list[type[BaseException]] = [BaseException]
    while kinds:
        yield (kind := kinds.pop())
        kinds += kind.__subclasses__()


def _made(kind: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    """Return an error with these arguments, without calling a Python ``__init__``."""
    error = kind.__new__(kind, *args)
    inits = (base.__dict__.get("__init__") for base in kind.__mro__)
    next(init for init in inits if isinstance(init, WrapperDescriptorType))(error, *args)
    return error


_NOT_THEIRS = tuple(f"{folder}/" for folder in (Path(__file__).parents[2], *torch.__path__))


def _innermost(log: IO[str]) -> str:
    """Return the innermost line of Python that is neither torch's nor ours when a fork died."""
    log.seek(0)
    for line in log:
        path, _, rest = line.strip().removeprefix('File "').partition('", line ')
        if rest and not path.startswith(_NOT_THEIRS):
            return f"{Path(path).name}:{rest.partition(' ')[0]}"
    return ""
