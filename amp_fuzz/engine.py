"""The engine: draw cases, judge them, and say what happened as a stream of typed events.

`explore` is the whole loop in one process: Hypothesis draws, `Judge` judges. `run` spreads it over
supervised worker processes: a worker that dies or hangs costs the one case that it was running,
which is recorded as a crash or a timeout by whoever watched it.
"""

from __future__ import annotations

import os
import signal
import time
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec

from amp_fuzz.backends import Backend, backends
from amp_fuzz.backends.kernels import kernels
from amp_fuzz.case import Case, loads
from amp_fuzz.catalogue import CATALOGUE, Op
from amp_fuzz.explicit import explicit_form
from amp_fuzz.interrupts import no_interrupts
from amp_fuzz.judge import Judge, Verdict, quiet
from amp_fuzz.known import Known
from amp_fuzz.minimize import minimize, types_of
from amp_fuzz.records import CaseRecord, DivergenceRecord, EndRecord
from amp_fuzz.store import Store, StoreError, Writer
from amp_fuzz.strategies.drawing import usable

__all__ = [
    "Crashed",
    "Event",
    "Failed",
    "Finding",
    "Finished",
    "Planned",
    "Progress",
    "Settings",
    "Suspected",
    "Task",
    "explore",
    "plan_tasks",
    "run",
]


@dataclass(frozen=True, slots=True)
class Settings:
    """How a run is done.

    cases: for each backend. ops: names of the ops that programs are drawn from. seconds: stop the
    run after so long; 0 is never. timeout: seconds after which a worker that answers nothing is
    ended. minimize: seconds for making each new finding smaller. fail_fast: stop at the first new
    divergence.
    """

    backends: tuple[str, ...]
    cases: int = 2000
    ops: tuple[str, ...] = ()
    seed: int = 0
    profile: str = "dev"
    workers: int = 1
    relations: Literal["none", "one", "all"] = "one"
    known: tuple[Known, ...] = ()
    seconds: float = 0.0
    timeout: float = 120.0
    minimize: float = 20.0
    max_statements: int = 12
    fail_fast: bool = False


@dataclass(frozen=True, slots=True)
class Task:
    """A part of a run: so many cases on one backend, each with a call of one of these ops."""

    backend: str
    family: str
    focus: tuple[str, ...]
    cases: int
    seed: int


@dataclass(frozen=True, slots=True)
class Planned:
    """So many cases more will be run on a backend."""

    backend: str
    cases: int


@dataclass(frozen=True, slots=True)
class Progress:
    """Cases that were judged since the last one, by outcome and by known entry; kernels reached."""

    backend: str
    family: str
    outcomes: Counter[str]
    known: Counter[str]
    kernels: frozenset[str]


@dataclass(frozen=True, slots=True)
class Finding:
    """A divergence, minimised. `new`: no known entry explains it."""

    record: DivergenceRecord
    new: bool


@dataclass(frozen=True, slots=True)
class Suspected:
    """A divergence that is being minimised; a `Finding` follows, unless the run is cut short."""

    record: DivergenceRecord


@dataclass(frozen=True, slots=True)
class Finished:
    """A task came to its end."""

    task: Task
    record: EndRecord


@dataclass(frozen=True, slots=True)
class Crashed:
    """A worker died or hung while it ran a case; `record` says which."""

    record: DivergenceRecord
    detail: str


@dataclass(frozen=True, slots=True)
class Failed:
    """Something of ours went wrong in a worker: an internal error, or a full disk."""

    detail: str
    usage: bool = False


Event: TypeAlias = Planned | Progress | Suspected | Finding | Finished | Crashed | Failed


class Stop(BaseException):
    """Leave a Hypothesis run at once; it is no `Exception`, so that Hypothesis lets it pass."""


def seed_of(*parts: object) -> int:
    """Return a seed that depends on all parts and is the same on every machine."""
    return zlib.crc32("/".join(map(str, parts)).encode())


def plan_tasks(settings: Settings, chosen: Sequence[Backend]) -> list[Task]:
    """Split a run into tasks: for each backend, one a family, in proportion to its ops.

    The tasks of different backends alternate, so that a run that is cut short has seen them all.
    """
    rows: list[list[Task]] = []
    for backend in chosen:
        ops = usable((CATALOGUE[name] for name in settings.ops or CATALOGUE), backend.device)
        families: dict[str, list[Op]] = {}
        for op in ops:
            families.setdefault(op.family, []).append(op)
        row = []
        left, total = settings.cases, len(ops)
        for family, members in families.items():
            share = round(left * len(members) / total) if total else 0
            left, total = left - share, total - len(members)
            if share:
                names = tuple(op.name for op in members)
                seed = seed_of(settings.seed, backend.name, family)
                row.append(Task(backend.name, family, names, share, seed))
        rows.append(row)
    return [row[i] for i in range(max(map(len, rows), default=0)) for row in rows if i < len(row)]


def explore(
    task: Task,
    settings: Settings,
    *,
    seen: Callable[[Case], None] = lambda case: None,
    signatures: set[tuple[str, ...]] | None = None,
) -> Iterator[Event | CaseRecord]:
    """Run a task in this process, yielding a record for each case and an event for each finding.

    `seen` is told each case before it runs. `signatures` are the divergences that were already
    minimised; others like them are counted, not minimised again.
    """
    signatures = set() if signatures is None else signatures
    judge = Judge(backends()[task.backend], settings.known, settings.relations)
    for case in draw(task, settings):
        seen(case)
        with quiet():
            verdict = judge.judge(case)
        yield verdict.record(task.family)
        if verdict.divergence is not None:
            yield from _finding(judge, verdict, task, settings, signatures, seen)
        if settings.fail_fast and verdict.outcome == "diverged":
            break


def draw(task: Task, settings: Settings) -> Iterator[Case]:
    """Yield the cases of a task, drawn by Hypothesis in batches.

    A batch is one Hypothesis run of the generate phase: what it draws depends on the seed alone.
    """
    from hypothesis import HealthCheck, Phase, Verbosity, given
    from hypothesis import seed as hypothesis_seed
    from hypothesis import settings as hypothesis_settings

    from amp_fuzz.strategies import cases

    device = backends()[task.backend].device
    strategy = cases(
        device=device,
        trains=backends()[task.backend].trains,
        ops=settings.ops or None,
        focus=task.focus,
        max_statements=settings.max_statements,
    )
    batch: list[Case] = []

    def collect(case: Case) -> None:
        batch.append(case)

    left, part = task.cases, 0
    while left > 0:
        size = min(left, _BATCH)
        test = given(strategy)(collect)
        test = hypothesis_settings(
            max_examples=size,
            phases=[Phase.generate],
            database=None,
            deadline=None,
            derandomize=False,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
            verbosity=Verbosity.quiet,
            print_blob=False,
        )(test)
        hypothesis_seed(seed_of(task.seed, part))(test)()
        if not batch:
            return
        yield from batch[:left]
        left, part = left - len(batch), part + 1
        batch.clear()


_BATCH = 100


def _finding(
    judge: Judge,
    verdict: Verdict,
    task: Task,
    settings: Settings,
    signatures: set[tuple[str, ...]],
    seen: Callable[[Case], None],
) -> Iterator[Event]:
    """Minimise a divergence whose like was not seen yet, and make its events."""
    assert verdict.divergence is not None
    rough = verdict.finding(task.family)
    signature = signature_of(rough)
    if signature in signatures:
        return
    signatures.add(signature)
    yield Suspected(rough)
    with quiet():
        small, last = verdict.case, verdict
        if settings.minimize > 0 and verdict.divergence.kind != "nondeterminism":
            try:
                small, last = shrink(judge, verdict, settings.minimize, seen)
            except KeyboardInterrupt:
                yield Finding(rough, new=not verdict.known)
                raise
        record = last.finding(task.family, small)
        record = msgspec.structs.replace(
            record, case=verdict.case, explicit=_explicit(judge, small)
        )
    final = signature_of(record)
    if final != signature and final in signatures:
        return
    signatures.add(final)
    yield Finding(record, new=not verdict.known)


def signature_of(record: DivergenceRecord) -> tuple[str, ...]:
    """Return what makes findings alike.

    A known one is kept once for each backend and kind, a new one once for each op that it shows at.
    """
    return (record.backend, record.kind, record.known, "" if record.known else record.op)


def shrink(
    judge: Judge,
    verdict: Verdict,
    seconds: float,
    seen: Callable[[Case], None] = lambda case: None,
) -> tuple[Case, Verdict]:
    """Return a smaller case with the same kind of divergence and the same explanation."""
    best = [verdict]
    divergence = verdict.divergence
    assert divergence is not None

    def keeps(candidate: Case) -> bool:
        seen(candidate)
        again = judge.judge(candidate)
        same = (
            again.divergence is not None
            and again.divergence.kind == divergence.kind
            and again.known == verdict.known
        )
        if same:
            best[0] = again
        return same

    if divergence.kind == "relation":
        judge = replace(judge, relations="all")
    types = types_of(judge.backend.reference().run(verdict.case))
    small = minimize(verdict.case, keeps, types=types, seconds=seconds)
    return small, best[0]


def _explicit(judge: Judge, case: Case) -> str:
    try:
        return explicit_form(case, judge.backend.reference())
    except Exception as error:  # the explicit form explains; it must not cost the finding
        return f"# no explicit form: {type(error).__name__}: {error}"


# -- many processes -------------------------------------------------------------------------------


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
    supervisor = _Supervisor(settings, store, run_id)
    try:
        yield from supervisor.work(plan_tasks(settings, chosen))
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
            name = f"aten::{kernel}"
            reaching = [op for op in usable(pool, backend.device) if name in op.overloads]
            named = [op for op in reaching if op.overloads[0] == name]
            focus = tuple(op.name for op in named or reaching)
            if focus:
                seed = seed_of(settings.seed, backend.name, kernel)
                tasks.append(Task(backend.name, "coverage", focus, 24, seed))
    return tasks


class _Supervisor:
    """Hands tasks to workers, listens, and replaces those that die or hang."""

    def __init__(self, settings: Settings, store: Store, run_id: str) -> None:
        self.settings, self.store, self.run_id = settings, store, run_id
        self.reached: dict[str, set[str]] = {}
        self.signatures: set[tuple[str, ...]] = set()
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
                    self.stopped |= not isinstance(event, Finding) or event.new
            limit = self.settings.seconds
            if limit and time.monotonic() - self.started > limit:
                self.stopped = True

    def _spawn(self) -> _Worker:
        number = len(list(self.store.run_path(self.run_id).glob("current-*")))
        current = self.store.run_path(self.run_id) / f"current-{number}.json"
        current.touch()
        ours, theirs = get_context("spawn").Pipe()
        process = get_context("spawn").Process(
            target=_worker_main,
            args=(theirs, self.settings, str(self.store.root), self.run_id, number),
            daemon=True,
        )
        with no_interrupts():
            process.start()
        theirs.close()
        return _Worker(number, process, ours, current)

    def _give(self, worker: _Worker, task: Task) -> None:
        worker.task, worker.done, worker.heard = task, 0, time.monotonic()
        with suppress(OSError):  # it died; the next `_listen` notices
            worker.pipe.send((task, self.signatures))

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
            worker.suspected = None
            signature = signature_of(event.record)
            if signature in self.signatures:
                return
            self.signatures.add(signature)
            self.store.save(event.record)
        elif isinstance(event, Finished):
            worker.task = worker.suspected = None
        yield event

    def _unminimised(self, worker: _Worker) -> DivergenceRecord | None:
        """Keep the divergence that a worker was minimising when it was ended."""
        record, worker.suspected = worker.suspected, None
        if record is None or signature_of(record) in self.signatures:
            return None
        self.signatures.add(signature_of(record))
        self.writer.write(record)
        self.store.save(record)
        return record

    def _lost(
        self, worker: _Worker, queue: list[Task], kind: Literal["crash", "timeout"]
    ) -> Iterator[Event]:
        """Record the case that a worker died of, and put back what it had not done."""
        self.workers.remove(worker)
        _end(worker)
        kept = self._unminimised(worker)
        if kept is not None:
            yield Finding(kept, new=not kept.known)
        task, text = worker.task, worker.current.read_bytes()
        code = worker.process.exitcode
        detail = f"no answer for {self.settings.timeout:.0f} s"
        if kind == "crash":
            detail = f"the worker died with exit code {code}"
            if code is not None and code < 0:
                detail = f"the worker died of {signal.Signals(-code).name}"
        if task is None or not text:
            yield Failed(f"{detail} before it ran a case")
            return
        case = loads(text, str(worker.current))
        record = DivergenceRecord(
            backend=task.backend,
            kind=kind,
            where="",
            op="",
            policy="",
            dtypes="",
            expected="an answer",
            observed=detail,
            known="",
            case=case,
            family=task.family,
        )
        self.writer.write(record)
        self.store.save(record)
        yield Crashed(record, detail)
        rest = task.cases - worker.done - 1
        if rest > 0:
            queue.append(replace(task, cases=rest, seed=seed_of(task.seed, "after", case.id)))

    def close(self) -> None:
        """End the workers, and take the events that they had sent."""
        for worker in self.workers:
            _end(worker)
            self._unminimised(worker)
            worker.current.unlink(missing_ok=True)
        for path in self.store.run_path(self.run_id).glob("current-*"):
            path.unlink(missing_ok=True)
        self.writer.close()


def _end(worker: _Worker) -> None:
    worker.pipe.close()
    worker.process.join(timeout=0.5)
    if worker.process.is_alive():
        worker.process.kill()
        worker.process.join(timeout=5)


_REPORT_EVERY = 0.25


def _worker_main(
    pipe: connection.Connection, settings: Settings, root: str, run_id: str, number: int
) -> None:
    """Take tasks from the supervisor until it closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor is the one to interrupt
    import torch

    torch.set_num_threads(1)
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
            task, signatures = pipe.recv()
            for event in _task(task, settings, writer, note, signatures):
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
    signatures: set[tuple[str, ...]],
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

    for event in explore(task, settings, seen=note, signatures=signatures):
        if isinstance(event, CaseRecord):
            writer.write(event)
            cases += 1
            outcomes[event.outcome] += 1
            reached.update(k.overload for k in event.kernels)
        elif isinstance(event, Finding):
            writer.write(event.record)
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
    yield Finished(task, end)
