"""Run cases in a separate process, for a backend that changes its process permanently.

A process can rename the dispatch key PrivateUse1 only once. So such a device runs in a separate
process: cases are sent there, and observations come back, with tensors on the CPU.
"""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, Pipe
from typing import ClassVar, NoReturn, Protocol, runtime_checkable

import msgspec
import torch

from amp_fuzz.backends import flips, imitation
from amp_fuzz.backends.accelerator import DeviceFailure
from amp_fuzz.backends.flips import Decision, Flip
from amp_fuzz.backends.harness import Observation
from amp_fuzz.backends.imitation import Composed
from amp_fuzz.cases.case import Case
from amp_fuzz.reference import Supposed, supposing
from amp_fuzz.reference.state import here

__all__ = ["REFUSES", "Apart", "ApartError", "Says", "Sides", "serve"]

REFUSES = "its device is in a separate process, which runs cases, not callables"


class ApartError(RuntimeError):
    """The separate process could not start. The message says why."""


@dataclass(frozen=True, slots=True)
class _Plain:
    """A tensor's dtype, shape and bytes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    data: bytes

    @staticmethod
    def of(tensor: torch.Tensor) -> _Plain:
        whole = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        # A single element may have any stride.
        flat = whole.as_strided((whole.numel(),), (1,))
        data = flat.view(torch.uint8).numpy().tobytes()
        return _Plain(whole.dtype, tuple(whole.shape), data)

    def tensor(self) -> torch.Tensor:
        if not self.data:
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.frombuffer(bytearray(self.data), dtype=self.dtype).reshape(self.shape)


@dataclass(frozen=True, slots=True)
class _Ask:
    """A case to run, under the reference or not, and everything else that it depends on.

    onednn: whether torch may use it. imitated, supposed, flip: what the reference imitates, assumes
    and decides differently.
    """

    case: bytes
    reference: bool
    threads: int
    onednn: bool
    imitated: Composed
    supposed: Mapping[str, Supposed]
    deciding: bool
    flip: Flip | None


@dataclass(frozen=True, slots=True)
class _Answer:
    """The observation, its values separately, and the reference's decisions."""

    seen: Observation
    values: Mapping[str, _Plain | None]
    decisions: tuple[Decision, ...]


class Sides(Protocol):
    """Both sides in the separate process: implementation and reference, on the same tensors."""

    def observe(self, case: Case) -> Observation:
        """Run a case under the implementation."""

    def expect(self, case: Case) -> Observation:
        """Run a case under the reference."""


class _Process(Protocol):
    """What is used of `subprocess.Popen`."""

    pid: int

    def kill(self) -> None: ...

    def wait(self) -> int: ...


@runtime_checkable
class Says(Protocol):
    """Sides that say something of themselves when they start.

    exclusive: whether no other process may have the device.
    """

    said: object
    exclusive: bool


class Apart:
    """A process that runs cases.

    entry: ``module:function``, which is called there with `args` and returns the `Sides`. lives:
    after how many cases a new process replaces it, since compiled code stays in its memory; 0 is
    never. It starts with the first case, and ends with this process. One whose sides are exclusive
    also ends when another starts, in this process.
    """

    _holder: ClassVar[Apart | None] = None  # of an exclusive device

    def __init__(self, entry: str, *args: object, lives: int = 0) -> None:
        self.entry, self.args, self.lives = entry, args, lives
        self._served = 0
        self._said: object = None
        self._pipe: Connection | None = None
        self._process: _Process | None = None
        self._lock = threading.Lock()
        self._owner = 0

    def run(self, case: Case, *, reference: bool = False) -> Observation:
        """Run a case. Raises `ApartError` if the process cannot start, and `DeviceFailure`.

        If the case kills it, this process dies in the same way, and its supervisor records the case
        as a crash.
        """
        current = flips.current() if reference else None
        ask = _Ask(
            case.json(),
            reference,
            torch.get_num_threads(),
            bool(torch.backends.mkldnn.enabled),
            imitation.current(),
            here().supposed,
            current is not None,
            current.flip if current else None,
        )
        with self._lock:
            answer = self._answer(ask)
            self._served += 1
            if self._served == self.lives:
                self.close()
        if current is not None:
            current.decisions.extend(answer.decisions)
        values = {n: v.tensor() if v is not None else None for n, v in answer.values.items()}
        return replace(answer.seen, values=values)

    def said(self) -> object:
        """Return what the sides say of themselves; the first time, this starts the process.

        Raises `ApartError`.
        """
        if self._said is None:
            with self._lock:
                self._begun()
        return self._said

    def _answer(self, ask: _Ask) -> _Answer:
        pipe = self._begun()
        try:
            pipe.send(ask)
            answer: _Answer | Exception = pipe.recv()
        except (EOFError, OSError):
            self._die()
        if isinstance(answer, DeviceFailure) and answer.kind == "lost":
            self.close()  # the next case has a new one
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _begun(self) -> Connection:
        if self._pipe is not None and self._owner == os.getpid():
            return self._pipe
        self._owner, self._served = os.getpid(), 0  # a fork does not share it
        if Apart._holder is not None and Apart._holder is not self:
            Apart._holder.close()
        ours, theirs = Pipe()
        self._process = _started(theirs.fileno())
        theirs.close()
        atexit.register(self.close)
        try:
            ours.send((self.entry, self.args))
            answer = ours.recv()
        except (EOFError, OSError):
            answer = f"it ended with exit code {self._process.wait()}"
        if isinstance(answer, str):
            self.close()
            raise ApartError(answer)
        self._said, exclusive = answer
        Apart._holder = self if exclusive else Apart._holder
        self._pipe = ours
        return ours

    def _die(self) -> NoReturn:
        assert self._process is not None
        code = self._process.wait()
        if code < 0:
            with suppress(OSError):  # SIGKILL has no handler
                signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        os._exit(code or 1)

    def close(self) -> None:
        """End the process."""
        atexit.unregister(self.close)
        if self._pipe is not None:
            self._pipe.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._pipe = self._process = None
        if Apart._holder is self:
            Apart._holder = None


def _started(descriptor: int) -> _Process:
    """Start a process that serves a pipe."""
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; "
        f"from {__name__} import serve; serve({descriptor}, {os.getpid()})"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code], pass_fds=[descriptor], stdin=subprocess.DEVNULL
    )


def serve(descriptor: int, parent: int) -> None:
    """Run cases for a process until it closes the pipe or ends."""
    import importlib

    from amp_fuzz.backends.harness import quiet
    from amp_fuzz.plugins import inherited

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles interrupts
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    pipe = Connection(descriptor)
    entry, args = pipe.recv()
    try:
        inherited()
        module, _, function = entry.partition(":")
        sides: Sides = getattr(importlib.import_module(module), function)(*args)
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")
        return
    pipe.send((sides.said, sides.exclusive) if isinstance(sides, Says) else (None, False))
    with quiet():
        while True:
            try:
                ask: _Ask = pipe.recv()
            except (EOFError, OSError):
                return
            try:
                pipe.send(_answered(sides, ask))
            except DeviceFailure as failure:
                pipe.send(failure)
            except Exception as error:  # our own error: errors of a case are observed
                pipe.send(RuntimeError(f"{type(error).__name__}: {error}"))


def _answered(sides: Sides, ask: _Ask) -> _Answer:
    if torch.get_num_threads() != ask.threads:
        torch.set_num_threads(ask.threads)
    if bool(torch.backends.mkldnn.enabled) != ask.onednn:
        vars(torch.backends)["mkldnn"].enabled = ask.onednn  # torch's types say that it is constant
    # Not `loads`: variants of relations or the minimiser need not be valid case files.
    case = msgspec.json.decode(ask.case, type=Case)
    decisions: list[Decision] = []
    if not ask.reference:
        seen = sides.observe(case)
    else:
        with imitation.imitating(ask.imitated), supposing(ask.supposed), ExitStack() as stack:
            if ask.deciding:
                decisions = stack.enter_context(flips.deciding(ask.flip)).decisions
            seen = sides.expect(case)
    values = {n: _Plain.of(v) if v is not None else None for n, v in seen.values.items()}
    return _Answer(replace(seen, values={}), values, tuple(decisions))


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
