"""Minimise a case in a supervised process, which a candidate may kill or hang.

The answer to each candidate is written to a journal before the next one runs. A search is
deterministic, so a new process continues from the journal where the last one ended: after an
interrupt, the next day, or after a crash, which is the answer to the running candidate.
"""

from __future__ import annotations

import math
import pickle
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing import connection
from pathlib import Path
from typing import Any, Literal

import msgspec

from amp_fuzz.findings.minimize.target import Answer, Target
from amp_fuzz.findings.supervision.processes import (
    death,
    end,
    greedy,
    is_runnable,
    start,
    usage,
)
from amp_fuzz.findings.supervision.worker import (
    Best,
    Done,
    Event,
    Job,
    Said,
    Stuck,
    Trying,
    answer,
    prepared,
    run,
)
from amp_fuzz.records.schema import DivergenceRecord
from amp_fuzz.records.store import StoreError

__all__ = ["Dead", "Journal", "ask", "minimise", "talk"]


class _Line(msgspec.Struct):
    id: str
    answer: Answer


class Journal:
    """Answers by the id of a case, in a file; in memory only without a path.

    A journal belongs to one search, which `about` describes; a journal of another is restarted.
    """

    def __init__(self, path: Path | None = None, about: str = "") -> None:
        self.answers: dict[str, Answer] = {}
        self.path = path
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = path.read_bytes().split(b"\n") if path.exists() else []
            if lines[:1] == [about.encode()]:
                self._read(lines[1:])
            else:
                path.write_bytes(about.encode() + b"\n")
        except OSError as error:
            raise StoreError(f"{path}: cannot keep a journal ({error.strerror})") from error

    def _read(self, lines: list[bytes]) -> None:
        for line in lines:
            with suppress(msgspec.MsgspecError):  # the last one may be cut short
                found = msgspec.json.decode(line, type=_Line)
                self.answers[found.id] = found.answer

    def add(self, id_: str, answer: Answer) -> None:
        """Keep an answer. Raises `StoreError` if it cannot be written."""
        self.answers[id_] = answer
        if self.path is None:
            return
        try:
            with self.path.open("ab") as file:
                file.write(msgspec.json.encode(_Line(id_, answer)) + b"\n")
        except OSError as error:
            raise StoreError(f"{self.path}: cannot write ({error.strerror})") from error


class Dead(Exception):
    """A process died, or did not answer. kind: of divergence."""

    def __init__(self, kind: Literal["crash", "timeout"], how: str) -> None:
        super().__init__(how)
        self.kind = kind


_ITSELF = "the case itself"


def minimise(job: Job, *, seconds: float, journal: Journal | None = None) -> Iterator[Event]:
    """Minimise a case in supervised processes; the last event is the result."""
    journal = journal or Journal()
    deadline = time.monotonic() + seconds
    target: Target | None = None
    chain: list[DivergenceRecord] = []
    while True:
        trying = _ITSELF
        left = max(deadline - time.monotonic(), 0.0)
        try:
            about = job, target, journal.answers, left
            for message in talk(job.timeout, run, *about, memory=job.memory):
                if isinstance(message, Trying):
                    trying = message.id
                elif isinstance(message, Said):
                    journal.add(message.id, message.answer)
                    trying = ""
                elif isinstance(message, Target):
                    target, trying = message, ""
                elif isinstance(message, Best):
                    chain.append(message.record)
                    yield message
                elif isinstance(message, Done):
                    yield _confirmed(job, message, chain)
                    return
                else:
                    yield message
                    return
        except Dead as dead:
            if target is None and not job.check:
                target = Target(dead.kind)  # the case itself kills it: that is the divergence
            elif target is not None and trying == _ITSELF and not job.blind:
                job = replace(job, blind=True)  # so does the reference alone
            elif trying in ("", _ITSELF) or target is None:
                yield Stuck(f"{dead}, and not because of a candidate")
                return
            else:
                journal.add(trying, Answer(dead.kind))


def _confirmed(job: Job, done: Done, chain: Sequence[DivergenceRecord]) -> Done:
    """Return the end with the smallest case that a fresh process confirms."""
    for record in (done.record, *reversed(chain[-3:])):
        small = replace(job, case=record.minimised or record.case)
        try:
            (said,) = talk(job.timeout, answer, small, memory=job.memory)
        except Dead as dead:
            said = Answer(dead.kind)
        found = "check" if job.check else record.kind
        if found in (said.kind, said.said):
            return replace(done, record=record, confirmed=True)
    return done


def ask(
    timeout: float, function: Callable[..., Any], *args: object, memory: float = math.inf
) -> Any:
    """Return ``function(*args)``, computed in a separate process.

    Raises what the function raises, and `Dead`. timeout, memory: as for `talk`.
    """
    (data,) = talk(timeout, _answering, function, *args, memory=memory)
    result, error = pickle.loads(data)
    if error is not None:
        raise error
    return result


def _answering(pipe: connection.Connection, function: Callable[..., Any], *args: object) -> None:
    prepared()
    result, error = None, None
    try:
        result = function(*args)
    except Exception as raised:
        error = raised
    try:
        data = pickle.dumps((result, error))
    except Exception as raised:
        data = pickle.dumps((None, RuntimeError(f"{function.__qualname__}: {raised}")))
    pipe.send(data)  # bytes: the pipe itself would send tensors as shared memory
    pipe.send(None)


_BY_CLOCK = 5  # times the CPU time that an answer may take by the clock
_WATCH = 0.25  # seconds between two looks at what a process uses
_IDLE = 0.01  # the share of a core that a waiting process may use


def talk(
    timeout: float,
    entry: Callable[..., None],
    *args: object,
    idle: float = math.inf,
    memory: float = math.inf,
    stands_in: bool = False,
) -> Generator[Any, None, None]:
    """Start a process and yield what it sends, until it sends None. Raises `Dead`.

    timeout: CPU seconds for each message; the wall-clock limit is five times that. idle: seconds by
    the clock in which the process and its descendants may use almost no CPU time. memory: GiB that
    they may hold beyond what the process held at its start. stands_in: as for
    `amp_fuzz.findings.supervision.processes.start`.
    """
    ours, theirs = connection.Pipe()
    process = start(entry, theirs, *args, stands_in=stands_in)
    theirs.close()
    held = usage(process.pid or 0).memory  # a fork starts with this process's memory
    try:
        while (message := _heard(ours, process.pid or 0, timeout, idle, held, memory)) is not None:
            yield message
    except EOFError:
        raise Dead("crash", f"the process died {death(process)}") from None
    finally:
        ours.close()
        end(process)
        with suppress(ValueError):  # not even SIGKILL ends it now
            process.close()  # a kept error would keep its pipes open


def _heard(
    pipe: connection.Connection, pid: int, timeout: float, idle: float, held: int, memory: float
) -> Any:
    began, before = time.monotonic(), usage(pid).cpu
    worked, by_then = 0.0, 0.0  # when it last did, and its CPU time by then
    while not pipe.poll(_WATCH):
        used = usage(pid)
        spent, took = used.cpu - before, time.monotonic() - began
        if over := greedy(used.memory - held, memory):
            raise Dead("crash", over)
        if spent - by_then > _IDLE * (took - worked):
            worked, by_then = took, spent
        if took - worked > idle and is_runnable(pid):  # it waits for a processor
            worked, by_then = took, spent
        if took - worked > idle:
            raise Dead("timeout", f"it waited for {took - worked:.0f} s and used no CPU time")
        if spent > timeout:
            raise Dead("timeout", f"no answer after {spent:.0f} s of CPU time")
        if took > timeout * _BY_CLOCK:
            raise Dead("timeout", f"no answer after {took:.0f} s, {spent:.0f} s of CPU time")
    return pipe.recv()
