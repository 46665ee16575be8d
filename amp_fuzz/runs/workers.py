"""Spread a run over supervised worker processes.

A worker that dies or hangs costs one case. If this case kills a second worker too, it is a finding,
a crash or a timeout; otherwise it is an incident. Another worker continues with the rest.

So does a worker whose device no longer works after an error: it ends. A case for which the device
has too little memory runs once more, alone. If there is too little then too, it is an incident.
"""

from __future__ import annotations

import importlib
import os
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from typing import Any, Literal

import msgspec

from amp_fuzz.backends import backends
from amp_fuzz.backends.accelerator import BLOCKING, DeviceFailure
from amp_fuzz.cases.case import Case, loads
from amp_fuzz.cases.program import statements
from amp_fuzz.catalogue import CATALOGUE
from amp_fuzz.findings.entered import LONGEST, op_of, statement_op
from amp_fuzz.findings.groups import Groups
from amp_fuzz.findings.looks import signature_of
from amp_fuzz.findings.supervision.processes import (
    Usage,
    death,
    end,
    greedy,
    start,
    unforkable,
    usage,
)
from amp_fuzz.records.baseline import match
from amp_fuzz.records.fingerprint import fingerprinted
from amp_fuzz.records.schema import (
    DivergenceRecord,
    IncidentRecord,
    listed,
    unanswered,
)
from amp_fuzz.records.store import Store, StoreError, Writer
from amp_fuzz.runs.corpus import FINDINGS
from amp_fuzz.runs.coverage import Covered
from amp_fuzz.runs.engine import (
    Crashed,
    Event,
    Failed,
    Finding,
    Finished,
    Happened,
    Paused,
    Planned,
    Progress,
    Repeat,
    Settings,
    Suspected,
    Task,
    TimeUp,
    ending,
    given_tasks,
    in_rounds,
    late,
    plan_tasks,
    seed_of,
    timed,
)
from amp_fuzz.runs.worker import (
    BEFORE,
    JUDGED,
    NOTED,
    NUMBER,
    RUNNING,
    Note,
    composed,
    done,
    worker_main,
)

__all__ = ["Supervisor", "run", "unshared"]


def run(settings: Settings, store: Store, run_id: str) -> Generator[Event]:
    """Run all tasks of a run over worker processes and yield events as they come.

    The clock starts once all is imported. At the deadline nothing goes on: no case, no minimising,
    no second run of a case that killed its worker. Only the first case of a backend may end: it has
    as much time again. Earlier findings take at most half of the time. Closing the iterator (an
    interrupt) ends the workers; their records stay.
    """
    chosen = [backends()[name] for name in settings.backends]
    given, drawn = given_tasks(settings, chosen), plan_tasks(settings, chosen)
    supervisor = Supervisor(settings, store, run_id)
    settings = supervisor.settings = timed(settings)
    if settings.seconds:
        half = settings.deadline - settings.seconds / 2
        given = [replace(t, until=half) if t.family == FINDINGS else t for t in given]
        drawn = in_rounds(drawn)
    try:
        yield from supervisor.work([*given, *drawn])
    finally:
        supervisor.close()


def unshared(settings: Settings) -> str:
    """Return why changes to torch in this process do not reach the workers, or "".

    A worker that computes on an accelerator is a new process: no accelerator runtime survives a
    fork.
    """
    for name in settings.backends:
        if _accelerated(name):
            return f"{name} computes on an accelerator, and that does not survive a fork"
    return unforkable()


def _accelerated(name: str) -> bool:
    backend = backends()[name]
    return backend.values and backend.device not in ("cpu", "privateuse1")


# -- the supervisor -------------------------------------------------------------------------------

_START = 300.0  # seconds that a worker has to start: it imports torch on a machine that may be busy
_STARTS = 3  # workers that may end without a running case, with no case judged in between
_BY_CLOCK = 5  # the wall-clock limit as a multiple of the CPU limit: a case may be waiting
_WATCH = 0.25  # seconds between two checks of a worker's usage
_DEATHS = 8  # deaths for one case before it is no longer minimised
_FATAL = "Fatal Python error"  # the beginning of faulthandler's output
_OUTPUT = 12  # last lines of output to keep from a dead process


@dataclass(frozen=True, slots=True)
class _Death:
    """How a worker ended. lost: it ended itself, because its device no longer worked."""

    kind: Literal["crash", "timeout", "memory"]
    detail: str
    lost: bool = False


@dataclass(slots=True)
class _Worker:
    """A worker process as the supervisor sees it.

    reached: the kernels that cases of its task reached. noted: how many cases it had noted when the
    current one was first seen, at `since`, after `used` seconds of CPU time. held: bytes of memory
    when it was ready; a fork also holds its parent's. given: when it got its task. blocking: its
    device's kernels end before their calls return.
    """

    number: int
    process: BaseProcess
    pipe: connection.Connection
    shared: Any
    folder: Path
    entered: Any
    blocking: bool = False
    task: Task | None = None
    ready: bool = False
    fresh: bool = True
    suspected: DivergenceRecord | None = None
    reached: set[str] = field(default_factory=set)
    noted: int = -1
    since: float = field(default_factory=time.monotonic)
    used: float = 0.0
    held: int = 0
    given: float = 0.0
    looked: float = field(default_factory=time.monotonic)

    def recorded(self) -> bool:
        """Return whether its case is on record, although it died before it noted this."""
        if self.shared[JUDGED] != self.shared[NUMBER]:
            return False
        before: int = self.shared[BEFORE]
        return (self.folder / f"records-{self.number}.jsonl").stat().st_size > before

    @property
    def current(self) -> Path:
        """The file of the running case."""
        return self.folder / f"current-{self.number}.json"

    def written(self) -> str:
        """Return the end of its output."""
        try:
            with (self.folder / f"worker-{self.number}.log").open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - 16384))
                return log.read().decode(errors="replace")
        except OSError:
            return ""

    def output(self) -> str:
        """Return the last lines of its output; after a fatal signal, the start of its traceback."""
        lines = self.written().splitlines()
        fatal = max((i for i, line in enumerate(lines) if line.startswith(_FATAL)), default=None)
        return "\n".join(lines[-_OUTPUT:] if fatal is None else lines[fatal:][:_OUTPUT])

    def look(self, now: float) -> Usage:
        """Return the CPU time of its case, and the memory that it holds for cases."""
        used = usage(self.process.pid or 0)
        if self.noted != self.shared[NOTED]:
            self.noted, self.since, self.used = self.shared[NOTED], now, used.cpu
        return Usage(used.cpu - self.used, used.memory - self.held)


class Supervisor:
    """Hands tasks to workers, listens, and replaces those that die or hang.

    cut: whether the time was up before all was done.
    """

    def __init__(
        self, settings: Settings, store: Store, run_id: str, *, label: str = "main"
    ) -> None:
        self.settings, self.store, self.run_id, self.label = settings, store, run_id, label
        self.groups = Groups()
        self.kept: dict[tuple[str, ...], set[str]] = {}  # the policies of each
        self.deaths: Counter[str] = Counter()
        self.died: dict[str, int] = {}  # the size of the smallest case by cause
        self.unstarted = 0
        self.judged: set[str] = set()  # the backends that have judged a case
        self.apart = ""  # why workers are new processes, without changes made to torch here
        if settings.isolate and not unshared(settings):
            # torch imports this at the first checkpoint or custom op. Import it here, once for all
            # workers: 1.3 s of CPU time in each worker (torch 2.13), and in each replacement.
            importlib.import_module("torch._dynamo")
        self.workers: list[_Worker] = []
        self.writer: Writer = store.writer(run_id, label)
        self.stopped = False
        self.cut = False
        self.queue: list[Task] = []
        self.spent: defaultdict[str, float] = defaultdict(float)  # seconds of workers, by backend

    def work(self, tasks: list[Task]) -> Iterator[Event]:
        """Do tasks, and yield events as they come."""
        for name in dict.fromkeys(task.backend for task in tasks):
            yield Planned(name, sum(task.count for task in tasks if task.backend == name))
        self.queue, self.stopped, self.cut = list(reversed(tasks)), False, False
        for event in self._spread() if self.settings.isolate else self._here():
            yield event
            if isinstance(event, Failed):
                self.stopped = True
            if self.settings.fail_fast and _fails(event):
                self.stopped = True
            if self.stopped:
                break
        if self.stopped:
            yield from self._end_workers()
        if self.cut:
            yield TimeUp()

    def _spread(self) -> Iterator[Event]:
        while True:
            yield from self._drop()
            if not self.queue and not any(w.task for w in self.workers):
                return
            while len(self.workers) < min(self.settings.workers, len(self.queue)):
                self.workers.append(self._start())
            for worker in list(self.workers):
                if worker.task is None and self.queue:
                    yield from self._give(worker, self._next())
            yield from self._listen()
            yield from self._stop()
            if self.stopped:
                return

    def _here(self) -> Iterator[Event]:
        """Do the tasks in this process, which a case may kill."""
        path = self.store.run_path(self.run_id) / f"current-{self.label}.json"
        note = Note(path, RawArray("q", 5))
        try:
            with composed():
                while True:
                    yield from self._drop()
                    if not self.queue:
                        return
                    task, began = self._next(), time.monotonic()
                    covered = Covered(self.store, task.backend)
                    about = self.settings, self.writer, note, self.groups, covered
                    for event in done(task, *about):
                        yield from self._taken(event)
                    self.spent[task.backend] += time.monotonic() - began
        finally:
            note.close()
            path.unlink(missing_ok=True)

    def _drop(self) -> Iterator[Event]:
        """Drop the next tasks if their time is up."""
        while self.queue and self._late(self.queue[-1]) >= 0:
            self.cut = True
            yield from self._unconfirmed(self.queue.pop())

    def _unconfirmed(self, task: Task | None) -> Iterator[Event]:
        """Record a death whose case could not run again: an incident."""
        if task is not None and task.repeats is not None:
            yield self._happened(msgspec.structs.replace(task.repeats.incident, unconfirmed=True))

    def _next(self) -> Task:
        """Take the next task: if the next shares the time, one of the backend that had the least.

        So a cheap backend judges many cases beside an expensive one, rather than as many.
        """
        if not self.queue[-1].shares:
            return self.queue.pop()
        spent, now = self.spent.copy(), time.monotonic()
        for worker in self.workers:
            if worker.task is not None:
                spent[worker.task.backend] += now - worker.given
        # Of each backend, the one that comes first.
        first = {task.backend: number for number, task in enumerate(self.queue) if task.shares}
        return self.queue.pop(first[min(reversed(first), key=lambda name: spent[name])])

    def _late(self, task: Task) -> float:
        return late(task, self.settings)

    def _stop(self) -> Iterator[Event]:
        """End workers that are over their time.

        They end by themselves after a case, but a case may take long. So may the first of a
        compiler, which would otherwise judge none on a busy machine.
        """
        for worker in list(self.workers):
            if worker.task is None:
                continue
            first = worker.shared[RUNNING] and worker.suspected is None
            first = first and worker.task.backend not in self.judged
            longer = self.settings.seconds if first else 0.0
            if self._late(worker.task) >= ending(self.settings) + longer:
                self.cut = True
                yield from self._end(worker)

    def _start(self, *, blocking: bool = False) -> _Worker:
        folder = self.store.run_path(self.run_id)
        number = 1 + max(map(_number, folder.glob("worker-*.log")), default=-1)
        while True:  # another supervisor of this run may start one, too
            try:
                (folder / f"worker-{number}.log").touch(exist_ok=False)
                break
            except FileExistsError:
                number += 1
            except OSError as error:
                raise StoreError(f"{folder}: cannot write ({error.strerror})") from error
        (folder / f"current-{number}.json").touch()
        ours, theirs = connection.Pipe()
        shared = RawArray("q", 5)
        entered = RawArray("c", LONGEST)
        about = (self.settings, str(self.store.root), self.run_id, number, shared, entered)
        # Since the last fork, a user's test may have started something that does not survive one.
        self.apart = unshared(self.settings) or self.apart
        fork, more = not unshared(self.settings), BLOCKING if blocking else None
        process = start(worker_main, theirs, *about, fork=fork, environment=more)
        theirs.close()
        return _Worker(number, process, ours, shared, folder, entered, blocking)

    def _give(self, worker: _Worker, task: Task) -> Iterator[Event]:
        repeats = task.repeats is not None
        # Only then is an error raised by the statement whose kernel it is of.
        blocking = repeats and _accelerated(task.backend)
        if (repeats and not worker.fresh) or worker.blocking != blocking:
            yield from self._end(worker)
            worker = self._start(blocking=blocking)
            self.workers.append(worker)
        worker.task, worker.fresh, worker.reached = task, False, set()
        worker.given = time.monotonic()
        worker.shared[JUDGED], worker.shared[NUMBER], worker.noted = -1, task.first, -1
        with suppress(OSError):  # it died; the next `_listen` notices
            worker.pipe.send((task, self.groups))

    def _listen(self) -> Iterator[Event]:
        ready = connection.wait([w.pipe for w in self.workers], timeout=_WATCH)
        now = time.monotonic()
        for worker in list(self.workers):
            if worker.pipe in ready:
                try:
                    event = worker.pipe.recv()
                except (EOFError, OSError):
                    how = f"the worker died {death(worker.process)}"
                    yield from self._lost(worker, _Death("crash", how))
                    continue
                if isinstance(event, DeviceFailure):
                    yield from self._lost(worker, _failed(event))
                    continue
                yield from self._note(worker, event)
            if worker.task is not None and now - worker.looked > _WATCH:
                worker.looked = now
                if (over := self._over(worker, now)) is not None:
                    if worker.ready:
                        _trace(worker)
                    yield from self._lost(worker, over)

    def _over(self, worker: _Worker, now: float) -> _Death | None:
        """Return how a worker exceeded a limit, if it did."""
        used, limit = worker.look(now), self.settings.timeout
        took = now - worker.since
        if not worker.ready:
            said = f"it did not start within {_START:.0f} s"
            return _Death("timeout", said) if took > _START else None
        if greed := greedy(used.memory, self.settings.memory):
            return _Death("crash", greed)
        if used.cpu > limit:
            return _Death("timeout", f"no answer after {used.cpu:.0f} s of CPU time")
        if took > limit * _BY_CLOCK:
            spent = f"{took:.0f} s, of which {used.cpu:.0f} s of CPU time"
            return _Death("timeout", f"no answer after {spent}")
        return None

    def _note(self, worker: _Worker, event: Event | DeviceFailure | None) -> Iterator[Event]:
        if isinstance(event, DeviceFailure):
            return  # it was ended for another reason meanwhile
        if event is None:
            worker.ready, worker.noted = True, -1
            worker.held = usage(worker.process.pid or 0).memory
            return
        if isinstance(event, Suspected):
            worker.suspected = event.record
            return
        repeat = worker.task.repeats if worker.task is not None else None
        if isinstance(event, Finished) and repeat is not None and repeat.reports:
            worker.task = None
            yield self._crashed(repeat.incident, repeat.op)  # it did not die a third time
            return
        if isinstance(event, Progress):
            worker.reached |= event.kernels
            self.unstarted = 0
            self.judged.add(event.backend)
        if isinstance(event, Finished):
            self._spent(worker)
            worker.task = worker.suspected = None
            if repeat is not None:
                yield self._happened(repeat.incident)
        yield from self._taken(event)

    def _taken(self, event: Event) -> Iterator[Event]:
        """Process an event, and yield it unless it is a repetition."""
        if isinstance(event, Finding):
            if not self._keep(event.record):
                return
        elif isinstance(event, Paused):
            # Behind the other tasks that aim, and before those that share the time.
            ahead = (i for i, task in enumerate(self.queue) if not task.shares)
            place = next(ahead, len(self.queue)) if event.task.aims else 0
            self.queue.insert(place, event.task)
            return
        elif isinstance(event, Finished):
            self.cut |= event.record.reason == "stopped"
            if event.groups is not self.groups:
                self.groups.update(event.groups or Groups())
        yield event

    def _keep(self, record: DivergenceRecord) -> bool:
        """Keep a finding, unless a similar one is kept: several workers may meet one cause."""
        if record.joins:  # it is kept, and counts for another that is
            self.store.save(record)
            return False
        own = record.known, record.fingerprint
        like = signature_of(record) if listed(record.known) else own
        # An op that behaves as several policies has an example of each.
        shared = self.kept.get(like, set(record.as_if)).intersection(record.as_if)
        if like in self.kept and (shared or not record.as_if):
            return False
        self.kept[like] = shared or self.kept.get(like, set()).union(record.as_if)
        self.store.save(record)
        return True

    def _spent(self, worker: _Worker) -> None:
        if worker.task is not None:
            self.spent[worker.task.backend] += time.monotonic() - worker.given

    def _unminimised(self, worker: _Worker) -> DivergenceRecord | None:
        """Keep the divergence that a worker was minimising when it ended."""
        record, worker.suspected = worker.suspected, None
        if record is None:
            return None
        self.writer.write(record)
        self.stopped |= self.settings.fail_fast and not record.known
        return record if self._keep(record) else None

    # -- deaths -----------------------------------------------------------------------------------

    def _lost(self, worker: _Worker, how: _Death) -> Iterator[Event]:
        """Record the death of a worker, and requeue its remaining cases."""
        yield from self._ended(worker)
        self._spent(worker)
        task, output, number = worker.task, worker.output(), worker.shared[NUMBER]
        text = worker.current.read_bytes()
        worker.current.unlink()
        recorded = worker.recorded()
        if task is None or not worker.shared[RUNNING] or not text or recorded:
            self.unstarted += 1
            if self.unstarted >= _STARTS:
                where = "between two cases" if worker.ready else "before it ran a case"
                yield Failed("\n".join([f"{how.detail} {where}, {_STARTS} times in a row", output]))
            elif task is not None:
                self.queue.append(replace(task, first=number + recorded))
            return
        case, suspected = loads(text, str(worker.current)), worker.suspected
        incident = IncidentRecord(task.backend, task.family, how.kind, case, how.detail, output)
        op, repeat = statement_op(case, worker.written()), task.repeats
        if repeat is not None and repeat.reports:
            inner = op_of(worker.entered) if how.detail == repeat.incident.detail else ""
            yield self._crashed(repeat.incident, inner or repeat.op)
            return
        alone = replace(task, first=number, cases=number + 1, part=0, shares=False)
        if task.aims:  # its draws depend on earlier cases
            drawn = case if suspected is None else suspected.case
            alone = replace(alone, first=0, cases=1, aims=(), given=(drawn,))
        if task.cases > number + 1:
            self.queue.append(_after(task, number, case, worker.reached))
        if suspected is not None and case.id != suspected.case.id:
            yield self._happened(msgspec.structs.replace(incident, of=suspected.case.id))
            yield from self._candidate(worker, alone, suspected, case)
        elif repeat is None:
            self.queue.append(replace(alone, repeats=Repeat(incident, op)))
        elif how.kind == "memory":
            yield self._happened(msgspec.structs.replace(incident, unjudged=True))
        else:
            op = op if how.lost or op == repeat.op else ""
            if how.kind == "crash" and not how.lost and not backends()[task.backend].ladder():
                self.queue.append(replace(alone, repeats=Repeat(incident, op, reports=True)))
            else:
                yield self._crashed(incident, op)

    def _candidate(
        self, worker: _Worker, task: Task, suspected: DivergenceRecord, case: Case
    ) -> Iterator[Event]:
        """Examine a case again without the candidate that killed a worker.

        The minimiser makes calls that nobody drew, and torch may die of them.
        """
        self.groups.deadly.add(case.id)
        self.deaths[suspected.case.id] += 1
        if self.deaths[suspected.case.id] <= _DEATHS:
            self.queue.append(replace(task, repeats=None))
        elif (kept := self._unminimised(worker)) is not None:
            yield Finding(kept, new=not kept.known)

    def _happened(self, record: IncidentRecord) -> Happened:
        self.writer.write(record)
        return Happened(record)

    def _crashed(self, incident: IncidentRecord, op: str) -> Crashed:
        """Return the finding of a case that killed two workers. op: where, if known.

        For each cause the store keeps the first case, and each that is smaller than all before it.
        """
        about = incident.backend, incident.kind, incident.case, incident.detail, incident.family
        record = fingerprinted(unanswered(*about, op=op))
        entry = match(self.settings.accepted, record)
        known = entry.id if entry else ""
        record = msgspec.structs.replace(record, known=known, output=incident.output)
        self.writer.write(record)
        cause, size = record.fingerprint if op else record.id, len(record.case.json())
        first = cause not in self.died
        if first or size < self.died[cause]:
            self.died[cause] = size
            self.store.save(record)
        return Crashed(record, incident.detail, first)

    # -- the end ----------------------------------------------------------------------------------

    def _ended(self, worker: _Worker) -> Iterator[Event]:
        """End a worker, and yield its pending events."""
        self.workers.remove(worker)
        end(worker.process)
        with suppress(EOFError, OSError):
            while worker.pipe.poll():
                yield from self._note(worker, worker.pipe.recv())
        worker.pipe.close()

    def _end(self, worker: _Worker) -> Iterator[Event]:
        """End a worker, and yield its unfinished finding, as small as it is."""
        yield from self._ended(worker)
        if (kept := self._unminimised(worker)) is not None:
            yield Finding(kept, new=not kept.known)
        yield from self._unconfirmed(worker.task)
        worker.current.unlink(missing_ok=True)

    def _end_workers(self) -> Iterator[Event]:
        for worker in list(self.workers):
            yield from self._end(worker)

    def close(self) -> None:
        """End the workers and close the records."""
        for _ in self._end_workers():
            pass  # nobody listens; findings are kept
        self.writer.close()


def _failed(failure: DeviceFailure) -> _Death:
    lost = failure.kind == "lost"
    return _Death("crash" if lost else "memory", str(failure), lost)


def _trace(worker: _Worker) -> None:
    """Make a worker that gives no answer write its traceback, and wait a moment for it."""
    if not hasattr(signal, "SIGUSR1") or worker.process.pid is None:
        return
    before, until = worker.written(), time.monotonic() + 1.0
    with suppress(ProcessLookupError):
        os.kill(worker.process.pid, signal.SIGUSR1)
    while worker.written() == before and time.monotonic() < until:
        time.sleep(0.02)


def _fails(event: Event) -> bool:
    """Whether a new divergence was reported and counted: its case follows the finding."""
    if isinstance(event, Crashed):
        return not event.record.known
    return isinstance(event, Progress) and event.outcome == "diverged"


def _number(log: Path) -> int:
    return int(log.stem.partition("-")[2])


def _after(task: Task, number: int, case: Case, reached: Collection[str]) -> Task:
    """Return the rest of a task after a case killed its worker.

    It no longer aims at kernels that the case may have reached, so no other worker dies of them.
    """
    left = replace(task, first=number + 1)
    if not task.aims:
        return left
    ops = [CATALOGUE[s.op] for s in statements(case.program.body) if s.op in CATALOGUE]
    met = {name.removeprefix("aten::") for op in ops for name in op.overloads} | set(reached)
    aims = tuple(aim for aim in task.aims if aim[0] not in met)
    return replace(left, aims=aims, seed=seed_of(task.seed, "after", number))
