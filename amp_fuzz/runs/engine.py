"""The engine: draw cases, judge them, and yield typed events.

`explore` is the whole loop in one process: `draw` draws, `Judge` judges.
`amp_fuzz.runs.workers.run` spreads it over processes.
"""

from __future__ import annotations

import math
import random
import time
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Literal, TypeAlias

import msgspec

from amp_fuzz.backends import Backend, Configurable, Precise, accelerator, backends
from amp_fuzz.backends.base import caches, facts_of, kernels_of, mixes, recipes_of, supports
from amp_fuzz.backends.dispatcher import kernels
from amp_fuzz.backends.harness import quiet
from amp_fuzz.cases.case import Case, Plan
from amp_fuzz.cases.program import Program
from amp_fuzz.catalogue import CATALOGUE, Op, select
from amp_fuzz.findings.examination import Met, examine
from amp_fuzz.findings.groups import Groups
from amp_fuzz.findings.judge_again import happens, still
from amp_fuzz.findings.notes import notes_of
from amp_fuzz.oracle.judge import Judge
from amp_fuzz.oracle.verdict import Verdict
from amp_fuzz.records.baseline import Entry, match
from amp_fuzz.records.fingerprint import fingerprinted
from amp_fuzz.records.schema import (
    AIMED,
    CaseRecord,
    DivergenceRecord,
    EndRecord,
    IncidentRecord,
    Note,
    NoteKind,
    NoteRecord,
    Outcome,
    listed,
    outcome_of,
)
from amp_fuzz.runs.memory import trim
from amp_fuzz.strategies.drawing import draw_case, usable
from amp_fuzz.upstream.explain import judge_of
from amp_fuzz.upstream.known import Known

__all__ = [
    "Aims",
    "Crashed",
    "Event",
    "Failed",
    "Finding",
    "Finished",
    "Happened",
    "Paused",
    "Planned",
    "Progress",
    "Repeat",
    "Settings",
    "Suspected",
    "Task",
    "TimeUp",
    "ending",
    "explore",
    "given_tasks",
    "in_rounds",
    "late",
    "limits",
    "plan_tasks",
    "runnable",
    "timed",
]


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a run.

    cases: drawn for each backend; up to `aimed` per cent of them aim at autocast kernels. ops:
    names of the ops that programs are drawn from. seconds: when the run ends; 0 is never. clock:
    the time in seconds. deadline: when the run ends by that clock, which all processes share.
    timeout: CPU seconds that a case may take. memory: GiB that a worker may hold. isolate: run
    cases in worker processes, or else in this one. minimize: seconds for minimising each new
    finding. fail_fast: stop at the first new divergence. notes: the kinds of notes to look for,
    including those of fail_on, which fail the run. baseline: the findings that the project accepts.
    overdue: accepted findings that have expired; they count as new. open: the findings that the
    package lists and nobody has explained. kept: cases to judge first, each with its backend and
    the family to count it under. done: cases that need not run again, by backend and family: their
    ids, and the kernels that they reached.
    """

    backends: tuple[str, ...]
    cases: int = 2000
    aimed: int = 0
    ops: tuple[str, ...] = ()
    seed: int = 0
    profile: str = "dev"
    workers: int = 1
    relations: Literal["none", "one", "all"] = "one"
    known: tuple[Known, ...] = ()
    seconds: float = 0.0
    clock: Callable[[], float] = time.time
    deadline: float = math.inf
    timeout: float = 120.0
    memory: float = 8.0
    isolate: bool = True
    minimize: float = 20.0
    max_statements: int = 12
    fail_fast: bool = False
    notes: tuple[NoteKind, ...] = ("precision", "autocast-raises")
    fail_on: tuple[str, ...] = ()
    baseline: tuple[Entry, ...] = ()
    overdue: tuple[Entry, ...] = ()
    open: tuple[Entry, ...] = ()
    kept: tuple[tuple[str, str, Case], ...] = ()
    done: Mapping[tuple[str, str], Mapping[str, frozenset[str]]] = field(default_factory=dict)

    @property
    def accepted(self) -> tuple[Entry, ...]:
        """The findings that fail no run."""
        return *self.baseline, *self.open


@dataclass(frozen=True, slots=True)
class Repeat:
    """A case runs once more because a worker died of it. op: the op in which it died, if known.

    reports: it killed two. The run is not recorded, but reports each kernel that it enters.
    """

    incident: IncidentRecord
    op: str = ""
    reports: bool = False


@dataclass(frozen=True, slots=True)
class Task:
    """A part of a run: cases on one backend, each with a call of one of these ops.

    cases: the number after that of the last case. given: the cases, if they are not drawn. first:
    the number of the first case; a worker that died ran those before it. repeats: the death that
    its one case shall show again. aims: kernels to aim at, the next one first, each with its number
    of attempts; the other cases are drawn as usual. again: the cases are judged as in a replay: by
    all relations, and unchanged. until: when it begins no further case. part: after so many cases
    it gives way to other tasks; 0: never. shares: its backend gets no more time than others.
    """

    backend: str
    family: str
    focus: tuple[str, ...]
    cases: int
    seed: int
    given: tuple[Case, ...] = ()
    first: int = 0
    repeats: Repeat | None = None
    aims: tuple[tuple[str, int], ...] = ()
    again: bool = False
    until: float = math.inf
    part: int = 0
    shares: bool = False

    @property
    def count(self) -> int:
        """The number of its cases."""
        return self.cases - self.first

    @property
    def due(self) -> int:
        """The number of its cases before it gives way."""
        return min(self.part or self.count, self.count)


@dataclass(frozen=True, slots=True)
class Planned:
    """The number of further cases planned on a backend."""

    backend: str
    cases: int


@dataclass(frozen=True, slots=True)
class Progress:
    """A case was judged and recorded: its outcome, its causes, its kernels.

    groups: the causes that no list explains.

    noted: its notes for which it is the smallest case of their group so far.
    """

    backend: str
    family: str
    outcome: Outcome
    groups: tuple[str, ...]
    kernels: frozenset[str]
    notes: tuple[Note, ...] = ()
    noted: tuple[NoteRecord, ...] = ()


@dataclass(frozen=True, slots=True)
class Finding:
    """A minimised divergence. new: no known entry explains it, and autocast has a part in it."""

    record: DivergenceRecord
    new: bool


@dataclass(frozen=True, slots=True)
class Suspected:
    """The divergence being examined, as small as it is so far; None when that is over."""

    record: DivergenceRecord | None


@dataclass(frozen=True, slots=True)
class Finished:
    """A task ended. groups: the causes that its process has met."""

    task: Task
    record: EndRecord
    groups: Groups | None = None


@dataclass(frozen=True, slots=True)
class Crashed:
    """Two workers died of the same case, or it answered neither; see `record`.

    first: whether this process met the cause for the first time, if the op is known.
    """

    record: DivergenceRecord
    detail: str
    first: bool = True


@dataclass(frozen=True, slots=True)
class Happened:
    """A worker died, but this is no finding; see `record`."""

    record: IncidentRecord


@dataclass(frozen=True, slots=True)
class Failed:
    """A worker failed: an internal error, or a full disk."""

    detail: str
    usage: bool = False


@dataclass(frozen=True, slots=True)
class Paused:
    """A task gave way to others. task: the rest of it."""

    task: Task


@dataclass(frozen=True, slots=True)
class TimeUp:
    """The time was up before all planned cases had run."""


Event: TypeAlias = (
    Planned
    | Progress
    | Suspected
    | Finding
    | Finished
    | Paused
    | Crashed
    | Happened
    | Failed
    | TimeUp
)


def seed_of(*parts: object) -> int:
    """Return a seed that depends on all parts and is the same on every machine."""
    return zlib.crc32("/".join(map(str, parts)).encode())


def timed(settings: Settings) -> Settings:
    """Return settings whose clock starts now."""
    if not settings.seconds:
        return settings
    return replace(settings, deadline=settings.clock() + settings.seconds)


def limits(settings: Settings) -> list[str]:
    """Return the limits of a run besides its cases, in words: the aimed share, its time."""
    aimed = settings.cases * settings.aimed // 100
    words = [f"at most {aimed:,} of them aimed at kernels"] if aimed else []
    if settings.seconds:
        most = f"{2 * settings.seconds:g} s if a backend's first case takes that long"
        last = f" ({most})" if settings.isolate else " and the running case"
        words.append(f"at most {settings.seconds:g} s{last}")
    return words


_ENDING = 5.0


def ending(settings: Settings) -> float:
    """Return the seconds in which running cases may end and no further case begins."""
    return min(_ENDING, settings.seconds / 10) if settings.seconds else _ENDING


def late(task: Task, settings: Settings) -> float:
    """Return the seconds since a task begins no further case; negative before that.

    Its worker is stopped `ending` seconds after that, which is never later than the deadline,
    unless it runs the first case of its backend.
    """
    return settings.clock() - min(task.until, settings.deadline - ending(settings))


def plan_tasks(settings: Settings, chosen: Sequence[Backend]) -> list[Task]:
    """Split a run into tasks: for each backend, one that aims, and one for each family.

    The cases of a backend's tasks add up to `settings.cases`. Families share the cases that do not
    aim in proportion to their ops. The tasks of different backends alternate, so a run that is cut
    short has covered all of them.
    """
    rows: list[list[Task]] = []
    for backend in chosen:
        ops = runnable((CATALOGUE[name] for name in settings.ops or CATALOGUE), backend)
        families: dict[str, list[Op]] = {}
        for op in ops:
            families.setdefault(op.family, []).append(op)
        row = list(_aiming(settings, backend, ops))
        left, total = settings.cases - sum(task.cases for task in row), len(ops)
        for family, members in families.items():
            share = round(left * len(members) / total) if total else 0
            left, total = left - share, total - len(members)
            if share:
                names = tuple(op.name for op in members)
                seed = seed_of(settings.seed, backend.name, family)
                row.append(Task(backend.name, family, names, share, seed))
        rows.append(row)
    return [row[i] for i in range(max(map(len, rows), default=0)) for row in rows if i < len(row)]


_TRIES = 2  # cases for each kernel, on average, in the share that may be aimed


def _aiming(settings: Settings, backend: Backend, ops: Sequence[Op]) -> Iterator[Task]:
    """Yield the task that aims at the kernels of a backend's device, if there is one."""
    aims = tuple(k for k in kernels(backend.device).reachable if _callers(k, ops)[1])
    cases = min(settings.cases * settings.aimed // 100, _TRIES * len(aims))
    if cases:
        seed = seed_of(settings.seed, backend.name, AIMED)
        attempts = tuple((kernel, 0) for kernel in aims)
        yield Task(backend.name, AIMED, (), cases, seed, aims=attempts)


def _callers(kernel: str, ops: Iterable[Op]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return first the ops that dispatch to a kernel, then all that may reach it.

    Composite ops reach it only on some paths.
    """
    name = kernel if "::" in kernel else f"aten::{kernel}"
    able = tuple(op for op in ops if name in op.overloads)
    own = tuple(op.name for op in able if op.overloads[0] == name)
    names = tuple(op.name for op in able)
    return own or names, names


_ROUND = 8


def in_rounds(tasks: Iterable[Task]) -> list[Task]:
    """Order tasks of drawn cases for a run that may be cut short.

    Tasks that aim come first and give way to each other, so each backend reaches its kernels. Then
    come rounds of a few cases of every family, each round twice as large as the one before, in
    which backends share the time. The drawn cases stay the same.
    """
    tasks = list(tasks)
    found = [replace(task, part=_ROUND) for task in tasks if task.aims]
    first, size = 0, _ROUND
    while left := [task for task in tasks if task.cases > first and not task.aims]:
        for task in left:
            last = min(first + size, task.cases)
            found.append(replace(task, first=first, cases=last, shares=True))
        first, size = first + size, 2 * size
    return found


def given_tasks(settings: Settings, chosen: Sequence[Backend]) -> list[Task]:
    """Return the tasks of given cases: the baseline, judged again, then those to judge first.

    Each has one task for each backend and family.
    """
    names = [backend.name for backend in chosen]
    accepted = [e for e in (*settings.baseline, *settings.overdue) if e.backend in names]
    tasks: list[Task] = []
    for given in ([(e.backend, "baseline", e.load()) for e in accepted], settings.kept):
        for backend in names:
            families: dict[str, list[Case]] = {}
            for on, family, case in given:
                if on == backend:
                    families.setdefault(family, []).append(case)
            tasks += [Task(backend, f, (), len(c), 0, tuple(c)) for f, c in families.items()]
    return tasks


def runnable(ops: Iterable[Op], backend: Backend) -> tuple[Op, ...]:
    """Return the ops that a backend can run, each with its callable forms."""
    found = []
    for op in usable(ops, backend.device, fp8=bool(recipes_of(backend))):
        forms = {f: text for f, text in op.forms.items() if supports(backend, op, f)}
        if forms:
            found.append(op if len(forms) == len(op.forms) else replace(op, forms=forms))
    return tuple(found)


_TRIMMED = 100  # cases between two times that freed memory is returned, at some milliseconds each


def explore(
    task: Task,
    settings: Settings,
    *,
    began: Callable[[int], None] = lambda number: None,
    seen: Callable[[Case], None] = lambda case: None,
    groups: Groups | None = None,
    covered: Callable[[Verdict], None] = lambda verdict: None,
) -> Iterator[Event | CaseRecord | NoteRecord]:
    """Run a task in this process, yielding a record for each case and an event for each finding.

    The events of a case come before its record, and so does the record of a note for which it is
    the smallest case of the group so far. began: called with the number of each case. seen: called
    with each case before it runs, including those that examine it. groups: the causes that were met
    already; their cases are counted, not reported again. covered: called with each verdict that
    agreed.
    """
    groups = Groups() if groups is None else groups
    relations = "all" if task.again else settings.relations
    judge = judge_of(backends()[task.backend], settings.known, relations)
    done = settings.done.get((task.backend, task.family), {})
    aims = Aims(task.aims)
    entries = {entry.load().id: entry for entry in settings.baseline} if task.given else {}
    for number, case in enumerate(_cases(task, settings, aims), task.first):
        if case.id in done:
            aims.reached.update(done[case.id])
            continue
        if number % _TRIMMED == _TRIMMED - 1:
            trim()
        began(number)
        seen(case)
        entry = entries.get(case.id)
        with quiet():
            verdict = _judged(judge, case, entry)
            verdict, notes = noted(judge, verdict, settings, groups, task.family)
            yield from notes
        record = verdict.record(task.family)
        aims.reached.update(kernel.overload for kernel in record.kernels)
        if verdict.outcome == "agreed":
            covered(verdict)
        stays = entry is not None and verdict.known == entry.id
        if verdict.divergence is not None and not stays:
            if task.again:
                met = yield from _kept(verdict, task, settings)
            else:
                with quiet():
                    met = yield from _examined(judge, verdict, task, settings, groups, seen)
                yield Suspected(None)
            record = _met(record, met)
        accelerator.emptied(judge.backend.device)
        yield record
        if settings.fail_fast and record.outcome == "diverged":
            break
        if late(task, settings) >= 0:
            break
    else:
        if task.due < task.count:
            left = replace(task, first=task.first + task.due, aims=aims.left)
            yield Paused(left if left.aims else replace(left, part=0, shares=True))


def _cases(task: Task, settings: Settings, aims: Aims) -> Iterable[Case]:
    if task.given:
        return task.given[task.first : task.cases]
    return islice(draw(task, settings, aims=aims), task.due)


def noted(
    judge: Judge, verdict: Verdict, settings: Settings, groups: Groups, family: str
) -> tuple[Verdict, list[NoteRecord]]:
    """Return a verdict with its notes, and records of those with the smallest case so far."""
    kinds = {*settings.notes, *settings.fail_on}
    found = notes_of(judge, verdict, kinds, groups.elsewhere)
    notes = tuple({note.group: note for note in found}.values())
    case = verdict.case
    smallest = [NoteRecord(note, case, family) for note in notes if groups.smallest(note, case)]
    return replace(verdict, notes=notes), smallest


def _judged(judge: Judge, case: Case, entry: Entry | None) -> Verdict:
    """Return the verdict of a case. A case of the baseline is known if the kind matches."""
    if entry is None:
        return judge.judge(case)
    verdict = still(judge, entry, case)
    if happens(judge, entry, verdict):
        verdict = replace(verdict, outcome="known", known=entry.id)
    return verdict


def _kept(verdict: Verdict, task: Task, settings: Settings) -> Generator[Event, None, list[Met]]:
    """Yield the finding of a case that diverged again, unchanged, and return its cause."""
    if listed(verdict.known):
        return []
    found = fingerprinted(verdict.finding(task.family, verdict.case))
    entry = match(settings.accepted, found)
    if entry is None:
        yield Finding(found, new=not found.known)
    return [Met(found.fingerprint, entry.id if entry else found.known)]


def _examined(
    judge: Judge,
    verdict: Verdict,
    task: Task,
    settings: Settings,
    groups: Groups,
    seen: Callable[[Case], None],
) -> Generator[Event, None, list[Met]]:
    """Yield the findings of a case that diverged, and return its causes."""
    met = []
    for step in examine(
        judge,
        verdict,
        groups,
        settings.accepted,
        family=task.family,
        seconds=_patience(settings),
        seen=seen,
    ):
        if isinstance(step, Met):
            met.append(step)
        elif step.last:
            yield Finding(step.record, new=not step.record.known)
        else:
            yield Suspected(step.record)
    return met


def _patience(settings: Settings) -> float:
    """Return the seconds for one finding: at most a quarter of the time left."""
    return min(settings.minimize, max(settings.deadline - settings.clock(), 0.0) / 4)


def _met(record: CaseRecord, met: Sequence[Met]) -> CaseRecord:
    """Return the record of a case with its causes: known if the baseline accepts all of them.

    It counts for the first, which is one that the baseline does not accept if there is one. A cause
    that the backend shows without autocast too counts like an accepted one.
    """
    if not met:
        return record
    groups = tuple(dict.fromkeys(m.fingerprint for m in sorted(met, key=lambda m: bool(m.entry))))
    if not all(m.entry for m in met):
        return msgspec.structs.replace(record, groups=groups)
    known = "+".join(dict.fromkeys(m.entry for m in met))
    outcome = outcome_of(known)
    return msgspec.structs.replace(record, groups=groups, outcome=outcome, known=known)


class Aims:
    """Kernels to aim at, in turns, until a case reaches them. reached: the kernels of all cases."""

    def __init__(self, aims: Iterable[tuple[str, int]]) -> None:
        self._queue = deque(aims)
        self.reached: set[str] = set()

    def __iter__(self) -> Iterator[tuple[str, int]]:
        """Yield the next kernel, and its number of earlier attempts."""
        while self._queue:
            kernel, number = self._queue.popleft()
            if kernel in self.reached:
                continue
            if number + 1 < _MOST:
                self._queue.append((kernel, number + 1))
            yield kernel, number

    @property
    def left(self) -> tuple[tuple[str, int], ...]:
        """The kernels that are left, as in `Task.aims`."""
        return tuple(aim for aim in self._queue if aim[0] not in self.reached)


_AGAIN = Case(Program((), (), ()), Plan(later=((),)))


def draw(task: Task, settings: Settings, *, aims: Aims | None = None) -> Iterator[Case]:
    """Yield the cases of a task, aimed ones first.

    A case depends only on the seed and its number, or on the kernel that it aims at and the number
    of earlier attempts. Kernels that `aims` knows as reached by the time of a draw are left out.

    The strategies draw from the same grammar for Hypothesis. Here the bytes come from Python's
    generator instead. In Hypothesis 6.170, about a third of the programs of its generate phase
    repeat an earlier one (it mutates what it drew), and each takes four times as long
    (benchmarks/generation.py). `minimize` shrinks findings, not Hypothesis.
    """
    backend = backends()[task.backend]
    ops = runnable(select(settings.ops or ("*",)), backend)
    varies = backend.values and backend.exact and bool(kernels_of(backend))
    again = 12  # of so many cases, one calls its program again; a compiler keeps code between calls
    if not backend.fit(_AGAIN).plan.later:
        again = 0
    elif facts_of(backend).compiles:
        again = 3
    breaks = 6 if facts_of(backend).compiles else 0  # one in so many breaks a compiler's graph

    def drawn(focus: Sequence[Op], *which: object) -> Case:
        return draw_case(
            random.Random("/".join(map(str, (task.seed, *which)))).randbytes,
            backend.device,
            trains=backend.trains,
            ops=ops,
            focus=focus,
            statements=settings.max_statements,
            fused=not backend.exact,
            precisions=backend.precisions if isinstance(backend, Precise) else (),
            varies=varies,
            settings=backend.settings if isinstance(backend, Configurable) else (),
            mixed=MIXED if mixes(backend) else 0,
            recipes=recipes_of(backend),
            caches=caches(backend),
            again=again,
            breaks=breaks,
            lowers=facts_of(backend).cached,
            saves=8 if facts_of(backend).saves else 0,
        )

    count = 0
    for kernel, number in islice(Aims(task.aims) if aims is None else aims, task.count):
        own, able = _callers(kernel, ops)
        names = own if number % 4 < 3 else able
        yield drawn([op for op in ops if op.name in names], kernel, number)
        count += 1
    focus = runnable(select(task.focus), backend) if task.focus else ()
    for number in range(task.first + count, task.cases):
        yield drawn(focus, number)


MIXED = 10  # one case in so many has CPU tensors beside those of the device, where it may
_MOST = 48  # cases for one kernel before it counts as unreachable
