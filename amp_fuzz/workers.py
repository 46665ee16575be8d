"""Spread a run over supervised worker processes.

A worker that dies or hangs costs the one case that it was running, which is recorded as a crash or
a timeout by whoever watched it; another worker goes on with the rest.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing import connection
from pathlib import Path
from typing import Any, Literal

import msgspec

from amp_fuzz.backends import Backend, backends
from amp_fuzz.backends.kernels import kernels
from amp_fuzz.baseline import match
from amp_fuzz.case import Case, loads
from amp_fuzz.catalogue import CATALOGUE
from amp_fuzz.covered import Covered
from amp_fuzz.engine import (
    Crashed,
    Event,
    Failed,
    Finding,
    Finished,
    Planned,
    Progress,
    Settings,
    Suspected,
    Task,
    baseline_tasks,
    explore,
    kept_tasks,
    plan_tasks,
    runnable,
    seed_of,
)
from amp_fuzz.findings import Groups, signature_of
from amp_fuzz.fingerprints import fingerprinted
from amp_fuzz.plugins import inherited
from amp_fuzz.processes import death, end, spawn
from amp_fuzz.records import CaseRecord, DivergenceRecord, EndRecord, unanswered
from amp_fuzz.store import Store, StoreError, Writer

__all__ = ["Supervisor", "run"]


@dataclass(slots=True)
class _Worker:
    """A worker process as the supervisor sees it."""

    number: int
    process: Any
    pipe: connection.Connection
    current: Path
    task: Task | None = None
    suspected: DivergenceRecord | None = None
    done: int = 0
    heard: float = field(default_factory=time.monotonic)


def run(settings: Settings, store: Store, run_id: str) -> Generator[Event]:
    """Run all tasks of a run over worker processes and yield events as they come.

    After the tasks, kernels that no case reached are aimed at directly, so that the coverage of a
    run does not hang on luck. Closing the iterator (an interrupt) ends the workers; what they had
    recorded stays.
    """
    chosen = [backends()[name] for name in settings.backends]
    supervisor = Supervisor(settings, store, run_id)
    try:
        yield from supervisor.work(
            [
                *baseline_tasks(settings, chosen),
                *kept_tasks(settings, chosen),
                *plan_tasks(settings, chosen),
            ]
        )
        if not supervisor.stopped:
            yield from supervisor.work(_aimed(settings, chosen, supervisor.reached))
    finally:
        supervisor.close()


def _aimed(
    settings: Settings, chosen: Iterable[Backend], reached: dict[str, set[str]]
) -> list[Task]:
    """Return tasks for the kernels of each backend's device that no case has reached."""
    tasks = []
    pool = [CATALOGUE[name] for name in settings.ops or CATALOGUE]
    for backend in chosen:
        missing = set(kernels(backend.device).reachable) - reached.get(backend.name, set())
        for kernel in sorted(missing):
            name = kernel if "::" in kernel else f"aten::{kernel}"
            reaching = [op for op in runnable(pool, backend) if name in op.overloads]
            named = [op for op in reaching if op.overloads[0] == name]
            focus = tuple(op.name for op in named or reaching)
            if focus:
                seed = seed_of(settings.seed, backend.name, kernel)
                tasks.append(Task(backend.name, "coverage", focus, 24, seed))
    return tasks


class Supervisor:
    """Hands tasks to workers, listens, and replaces those that die or hang."""

    def __init__(self, settings: Settings, store: Store, run_id: str) -> None:
        self.settings, self.store, self.run_id = settings, store, run_id
        self.reached: dict[str, set[str]] = {}
        self.groups = Groups()
        self.kept: set[tuple[str, ...]] = set()
        self.deaths: Counter[str] = Counter()
        self.workers: list[_Worker] = []
        self.writer: Writer = store.writer(run_id, "main")
        self.stopped = False
        self.started = time.monotonic()

    def work(self, tasks: list[Task]) -> Iterator[Event]:
        for name in dict.fromkeys(task.backend for task in tasks):
            yield Planned(name, sum(task.cases for task in tasks if task.backend == name))
        queue = list(reversed(tasks))
        while (queue or any(w.task for w in self.workers)) and not self.stopped:
            while queue and len(self.workers) < self.settings.workers:
                self.workers.append(self._spawn())
            for worker in self.workers:
                if worker.task is None and queue:
                    self._give(worker, queue.pop())
            for event in self._listen(queue):
                yield event
                if isinstance(event, Failed):
                    self.stopped = True
                if isinstance(event, (Finding, Crashed)) and self.settings.fail_fast:
                    self.stopped |= not event.record.known
            limit = self.settings.seconds
            if limit and time.monotonic() - self.started > limit:
                self.stopped = True

    def _spawn(self) -> _Worker:
        number = len(list(self.store.run_path(self.run_id).glob("current-*")))
        current = self.store.run_path(self.run_id) / f"current-{number}.json"
        current.touch()
        ours, theirs = connection.Pipe()
        root = str(self.store.root)
        process = spawn(_worker_main, theirs, self.settings, root, self.run_id, number)
        theirs.close()
        return _Worker(number, process, ours, current)

    def _give(self, worker: _Worker, task: Task) -> None:
        worker.task, worker.done, worker.heard = task, 0, time.monotonic()
        with suppress(OSError):  # it died; the next `_listen` notices
            worker.pipe.send((task, self.groups))

    def _listen(self, queue: list[Task]) -> Iterator[Event]:
        ready = connection.wait([w.pipe for w in self.workers], timeout=0.2)
        for worker in list(self.workers):
            if worker.pipe in ready:
                try:
                    event = worker.pipe.recv()
                except (EOFError, OSError):
                    yield from self._lost(worker, queue, "crash")
                    continue
                worker.heard = time.monotonic()
                yield from self._note(worker, event)
            elif worker.task and time.monotonic() - worker.heard > self.settings.timeout:
                yield from self._lost(worker, queue, "timeout")

    def _note(self, worker: _Worker, event: Event) -> Iterator[Event]:
        if isinstance(event, Progress):
            self.reached.setdefault(event.backend, set()).update(event.kernels)
            worker.done += sum(event.outcomes.values())
        elif isinstance(event, Suspected):
            worker.suspected = event.record
            return
        elif isinstance(event, Finding):
            if not self._keep(event.record):
                return
        elif isinstance(event, Finished):
            worker.task = worker.suspected = None
            if event.groups is not None:
                self.groups.update(event.groups)
        yield event

    def _keep(self, record: DivergenceRecord) -> bool:
        """Keep a finding, unless its like is kept already: several workers may meet one cause."""
        like = signature_of(record) if record.known else (record.fingerprint, *record.as_if)
        if like in self.kept:
            return False
        self.kept.add(like)
        self.store.save(record)
        return True

    def _unminimised(self, worker: _Worker) -> DivergenceRecord | None:
        """Keep the divergence that a worker was minimising when it was ended."""
        record, worker.suspected = worker.suspected, None
        if record is None:
            return None
        self.writer.write(record)
        return record if self._keep(record) else None

    def _lost(
        self, worker: _Worker, queue: list[Task], kind: Literal["crash", "timeout"]
    ) -> Iterator[Event]:
        """Record the case that a worker died of, and put back what it had not done."""
        self.workers.remove(worker)
        _end(worker, 5.0 if kind == "crash" else 0.0)
        suspected = worker.suspected
        task, text = worker.task, worker.current.read_bytes()
        detail = f"no answer for {self.settings.timeout:.0f} s"
        if kind == "crash":
            detail = f"the worker died {death(worker.process)}"
        if task is None or not text:
            yield Failed(f"{detail} before it ran a case")
            return
        case = loads(text, str(worker.current))
        rest = task.cases - worker.done - 1
        if rest > 0:
            seed, given = seed_of(task.seed, "after", case.id), task.given[-rest:]
            queue.append(replace(task, cases=rest, seed=seed, given=given))
        if suspected is not None and case.id != suspected.case.id:
            # Torch dies of some calls that are no part of the case that was drawn.
            self.groups.deadly.add(case.id)
            self.deaths[suspected.case.id] += 1
            if self.deaths[suspected.case.id] <= _DEATHS:
                queue.append(replace(task, cases=1, given=(suspected.case,)))
                return
            kept = self._unminimised(worker)
            if kept is not None:
                yield Finding(kept, new=not kept.known)
            return
        record = fingerprinted(unanswered(task.backend, kind, case, detail, task.family))
        entry = match(self.settings.baseline, record)
        record = msgspec.structs.replace(record, known=entry.id if entry else "")
        self.writer.write(record)
        self.store.save(record)
        yield Crashed(record, detail)

    def close(self) -> None:
        """End the workers, and take the events that they had sent."""
        for worker in self.workers:
            _end(worker)
            self._unminimised(worker)
            worker.current.unlink(missing_ok=True)
        for path in self.store.run_path(self.run_id).glob("current-*"):
            path.unlink(missing_ok=True)
        self.writer.close()


def _end(worker: _Worker, patience: float = 0.5) -> None:
    worker.pipe.close()
    end(worker.process, patience)


_REPORT_EVERY = 0.25
_DEATHS = 8  # of processes, for one case, before it stays as it was found


def few_primitives() -> None:
    """Have oneDNN and ideep keep 16 primitives, not 1,024; call it before torch is used.

    Hardly a shape comes twice, so that their caches are what grows in a long run.
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, "16")


def _worker_main(
    pipe: connection.Connection, settings: Settings, root: str, run_id: str, number: int
) -> None:
    """Take tasks from the supervisor until it closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor is the one to interrupt
    few_primitives()
    import torch

    torch.set_num_threads(1)
    inherited()
    store = Store(root)
    path = store.run_path(run_id) / f"current-{number}.json"

    def note(case: Case) -> None:
        text = case.json()
        try:
            os.pwrite(current, text, 0)
            os.ftruncate(current, len(text))
        except OSError as error:
            raise StoreError(f"{path}: cannot write ({error.strerror})") from error

    try:
        _redirect(path.with_name(f"worker-{number}.log"))
        current = os.open(path, os.O_WRONLY)
        writer = store.writer(run_id, str(number))
        while True:
            task, groups = pipe.recv()
            covered = Covered(store, task.backend)
            for event in _task(task, settings, writer, note, groups, covered):
                pipe.send(event)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the supervisor is done with us
    except StoreError as error:
        pipe.send(Failed(str(error), usage=True))
    except Exception:
        import traceback

        pipe.send(Failed(traceback.format_exc()))


def _redirect(path: Path) -> None:
    """Send what libraries print (MKL about a NaN, C++ warnings) to a file, not to the terminal."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def _task(
    task: Task,
    settings: Settings,
    writer: Writer,
    note: Callable[[Case], None],
    groups: Groups,
    covered: Covered,
) -> Iterator[Event]:
    start = last = time.monotonic()
    outcomes: Counter[str] = Counter()
    known: Counter[str] = Counter()
    reached: set[str] = set()
    cases = 0

    def progress() -> Progress:
        return Progress(
            task.backend, task.family, Counter(outcomes), Counter(known), frozenset(reached)
        )

    for event in explore(task, settings, seen=note, groups=groups, covered=covered.note):
        if isinstance(event, CaseRecord):
            writer.write(event)
            cases += 1
            outcomes[event.outcome] += 1
            reached.update(k.overload for k in event.kernels)
        elif isinstance(event, Finding):
            writer.write(event.record)
            yield event
        elif isinstance(event, Suspected):
            yield event
        now = time.monotonic()
        if now - last > _REPORT_EVERY:
            yield progress()
            outcomes.clear()
            known.clear()
            reached.clear()
            last = now
    if outcomes:
        yield progress()
    end = EndRecord(task.backend, task.family, cases, round(time.monotonic() - start, 3))
    writer.write(end)
    covered.write()
    yield Finished(task, end, groups)
