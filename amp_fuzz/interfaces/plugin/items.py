"""The items of ``pytest --amp-fuzz``: one for each backend and family of ops.

An item explores its part of the run in a supervised worker process, and fails if it meets a
divergence that no known entry explains. Its cases depend only on the seed and its name: they are
the same under xdist, alone, or after others. So each backend's ``coverage`` item aims at every
kernel that the dispatcher lists, whatever other items reached: they may run elsewhere.
"""

from __future__ import annotations

import shlex
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any, Literal, Protocol

import pytest

from amp_fuzz.backends import Availability, Backend
from amp_fuzz.config import judging_options
from amp_fuzz.interfaces.plugin.run import Run
from amp_fuzz.records.fingerprint import title
from amp_fuzz.records.schema import (
    OWN,
    DivergenceRecord,
    EndRecord,
    IncidentRecord,
    Note,
    NoteRecord,
)
from amp_fuzz.records.store import Store, StoreError
from amp_fuzz.reports.printable import clean_lines, plural
from amp_fuzz.runs.engine import (
    Crashed,
    Event,
    Failed,
    Finding,
    Finished,
    Happened,
    Progress,
    Settings,
    Task,
    TimeUp,
    given_tasks,
    plan_tasks,
)

__all__ = [
    "ROOT",
    "AnyJob",
    "BackendNode",
    "FuzzItem",
    "Job",
    "Outcome",
    "Root",
    "WorkerFailed",
    "jobs",
    "show_finding",
    "show_notes",
    "store_option",
]

ROOT = "amp-fuzz"


# -- what there is to do --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Job:
    """The work of one item.

    tasks: to do in turn. missing: why the backend cannot be used here; then nothing runs.
    """

    backend: str
    name: str
    tasks: tuple[Task, ...] = ()
    missing: Availability | None = None

    @property
    def nodeid(self) -> str:
        """The id that pytest shows."""
        return f"{ROOT}::{self.backend}::{self.name}"

    @property
    def group(self) -> str:
        """The parent node of its item."""
        return self.backend

    @property
    def aims(self) -> bool:
        """Whether it aims at kernels that no case has reached."""
        return any(task.aims for task in self.tasks)

    def item(self, parent: pytest.Collector, run: Run) -> pytest.Item:
        """Return its item."""
        return FuzzItem.from_parent(parent, name=self.name, run=run, job=self)


class AnyJob(Protocol):
    """The work of one item: a `Job`, or a case to judge again (see `plugin.corpus`)."""

    @property
    def nodeid(self) -> str:
        """The id that pytest shows."""

    @property
    def group(self) -> str:
        """The parent node of its item."""

    def item(self, parent: pytest.Collector, run: Run) -> pytest.Item:
        """Return its item."""


def jobs(
    settings: Settings, chosen: Iterable[Backend], missing: dict[str, Availability]
) -> list[Job]:
    """Return the jobs of a run. missing: backends that cannot be used.

    Backend by backend, what is judged first and the kernels that it aims at; then each family.
    """
    chosen = list(chosen)
    drawn = sorted(plan_tasks(settings, chosen), key=lambda task: task.family)
    first = [*given_tasks(settings, chosen), *(task for task in drawn if task.aims)]
    found = [
        Job(backend.name, task.family, (task,))
        for tasks in (first, [task for task in drawn if not task.aims])
        for backend in chosen
        for task in tasks
        if task.backend == backend.name
    ]
    found += [Job(name, "availability", missing=state) for name, state in missing.items()]
    return found


# -- collection -----------------------------------------------------------------------------------


class Root(pytest.Collector):
    """The root of amp-fuzz's items, beside the project's own files."""

    def __init__(self, *, run: Run, jobs: Iterable[AnyJob], **about: Any) -> None:
        super().__init__(**about)
        self.run, self.jobs = run, tuple(jobs)
        self.add_marker("amp_fuzz")

    def collect(self) -> Iterator[BackendNode]:
        for name, own in groupby(self.jobs, key=lambda job: job.group):
            yield BackendNode.from_parent(self, name=name, run=self.run, jobs=tuple(own))


class BackendNode(pytest.Collector):
    """The items of one backend, or of one suite of cases."""

    def __init__(self, *, run: Run, jobs: Iterable[AnyJob], **about: Any) -> None:
        super().__init__(**about)
        self.run, self.jobs = run, tuple(jobs)

    def collect(self) -> Iterator[pytest.Item]:
        for job in self.jobs:
            yield job.item(self, self.run)


# All items that aim get three quarters of the time together: a fifth of the cases, three times as
# much time as the rest. They come first, and leave the others what they do not need.
_FIRST = 12


class FuzzItem(pytest.Item):
    """One job. It passes if it ran cases and no divergence is new."""

    def __init__(self, *, run: Run, job: Job, **about: Any) -> None:
        super().__init__(**about)
        self.run, self.job = run, job

    def reportinfo(self) -> tuple[Path, None, str]:
        return self.path, None, self.nodeid

    def runtest(self) -> None:
        if self.job.missing is not None:
            state = self.job.missing
            pytest.skip(f"{self.job.backend} is {state.status}: {state.detail}")
        outcome, start = Outcome(), time.monotonic()
        self.run.begin()
        try:
            with _interrupts() as interrupted:
                for event in self.run.work(self._tasks()):
                    outcome.add(event)
                    if interrupted():
                        break
                if interrupted():
                    raise KeyboardInterrupt
            outcome.reason = "stopped" if outcome.cut else "done"
        except KeyboardInterrupt:
            outcome.reason = "interrupted"
            raise
        finally:
            if not outcome.done and not outcome.recorded:
                took, job = round(time.monotonic() - start, 3), self.job
                about = outcome.cases, took, outcome.reason, self.cases
                self.run.write(EndRecord(job.backend, job.name, *about))
            self.user_properties += [("cases", outcome.cases), ("seed", self.run.settings.seed)]
        for record in outcome.new:
            self.run.shown[record.fingerprint] = record
        self._judge(outcome)
        if outcome.cut and not outcome.cases:
            pytest.skip(self.run.over)

    @property
    def cases(self) -> int:
        """The number of planned cases."""
        return sum(task.count for task in self.job.tasks)

    @property
    def weight(self) -> int:
        """Its share of the time."""
        return self.cases * (_FIRST if self.job.aims else 1)

    def _tasks(self) -> list[Task]:
        """Return its tasks, each with its time: the remaining items share the remaining time."""
        settings, now = self.run.settings, self.run.settings.clock()
        if not settings.seconds:
            return list(self.job.tasks)
        items = [item for item in self.session.items if isinstance(item, FuzzItem)]
        left = sum(item.weight for item in items[items.index(self) :])
        part = min(self.run.processes * self.weight / max(left, 1), 1.0)
        until = now + part * (settings.deadline - now)
        return [replace(task, until=until) for task in self.job.tasks]

    def _judge(self, outcome: Outcome) -> None:
        late = self._overdue()
        kinds = self.run.settings.fail_on
        noted = [*show_own(outcome, self.run, kinds), *show_notes(outcome, kinds)]
        diverged = outcome.diverged or outcome.new
        if diverged or late or noted:
            shown = show(outcome, self.run) if diverged else ""
            pytest.fail("\n".join(filter(None, [*late, shown, *noted])), pytrace=False)
        if outcome.cases == 0 and outcome.done:
            pytest.fail(f"no case ran: none was drawn for {self.nodeid}", pytrace=False)

    def _overdue(self) -> list[str]:
        """Return a line for each expired entry of the baseline."""
        if self.job.name != "baseline":
            return []
        return [
            f"EXPIRED: {entry.id} was accepted until {entry.expires}: fix it, or give it another "
            f"date, with a reason (amp-fuzz-baseline.toml)"
            for entry in self.run.settings.overdue
            if entry.backend == self.job.backend
        ]

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], *args: Any) -> Any:
        """Return one line for a store that cannot be written; otherwise pytest's own text."""
        if isinstance(excinfo.value, StoreError):
            return f"amp-fuzz: {excinfo.value}"
        if isinstance(excinfo.value, WorkerFailed):
            return f"amp-fuzz: internal error, please report it:\n{excinfo.value}"
        return super().repr_failure(excinfo, *args)


@dataclass(slots=True)
class Outcome:
    """The result of an item.

    diverged: new diverging cases, each by the fingerprint of its first cause. own: cases that
    differ in the same way without autocast; found: the findings of these. cut: the time was up
    before all ran. recorded: the worker recorded the end. notes: of each case. noted: by group, the
    note with the smallest case, if this item met it.
    """

    cases: int = 0
    reason: Literal["done", "stopped", "interrupted", "crashed"] = "crashed"
    diverged: Counter[str] = field(default_factory=Counter)
    new: list[DivergenceRecord] = field(default_factory=list)
    own: int = 0
    found: list[DivergenceRecord] = field(default_factory=list)
    incidents: list[IncidentRecord] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    noted: dict[tuple[str, ...], NoteRecord] = field(default_factory=dict)
    cut: bool = False
    recorded: bool = False

    @property
    def done(self) -> bool:
        """Whether all of its cases ran."""
        return self.reason == "done"

    def add(self, event: Event) -> None:
        """Count an event. Raises `StoreError`, or `WorkerFailed` for an internal error."""
        if isinstance(event, Progress):
            self.cases += 1
            if event.outcome == "backend":
                self.own += 1
            else:
                self.diverged.update(event.groups[:1])
            self.notes += event.notes
            self.noted.update({record.note.group: record for record in event.noted})
        elif isinstance(event, Finding):
            if event.new:
                self.new.append(event.record)
            elif event.record.known == OWN:
                self.found.append(event.record)
        elif isinstance(event, Crashed):
            self.cases += 1
            if not event.record.known:
                self.new += [event.record] if event.first else []
                self.diverged[event.record.fingerprint] += 1
        elif isinstance(event, TimeUp):
            self.cut = True
        elif isinstance(event, Finished):
            self.recorded = True
        elif isinstance(event, Happened):
            self.incidents.append(event.record)
        elif isinstance(event, Failed):
            raise StoreError(event.detail) if event.usage else WorkerFailed(event.detail)


class WorkerFailed(RuntimeError):
    """An internal error in a worker process. The message is its traceback."""


@contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Yield a function that says whether Ctrl-C was pressed, even if no exception arrived.

    Python raises `KeyboardInterrupt` wherever it happens to be. In a callback of the garbage
    collector (Hypothesis has one) or a finaliser, the exception is swallowed, and a run of hours
    would continue.
    """
    handler = signal.getsignal(signal.SIGINT)
    pressed: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        pressed.append(number)
        signal.default_int_handler(number, frame)

    main = threading.current_thread() is threading.main_thread()
    if not main or handler is not signal.default_int_handler:  # somebody else handles it
        yield lambda: False
        return
    signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, handler)


# -- text -----------------------------------------------------------------------------------------


def show(outcome: Outcome, run: Run) -> str:
    """Return the report of a failed item: a line for pytest's summary, then each finding."""
    titles = [title(record) for record in outcome.new]
    lines = [f"{plural(len(titles), 'new finding')}: {', '.join(titles)}"]
    if not titles:
        cases = plural(outcome.diverged.total(), "case")
        lines = [f"{cases} diverged like findings of other items"]
    lines[0] += f" ({plural(outcome.cases, 'case')}, seed {run.settings.seed})"
    for record in outcome.new:
        lines += ["", *show_finding(record, run.store, run.store_option)]
        if (count := outcome.diverged[record.fingerprint]) > 1:
            lines.append(f"{plural(count, 'case')} here with this cause")
    own = {record.fingerprint for record in outcome.new}
    for fingerprint, count in outcome.diverged.items():
        if fingerprint in own:
            continue
        other = run.shown.get(fingerprint)
        what = "a finding of the summary"
        if other is not None:
            what = f"{title(other)}: amp-fuzz replay {_named(other, run.store)}{run.store_option}"
        lines.append(f"{plural(count, 'case')} of {what}")
    return "\n".join(lines)


def show_own(outcome: Outcome, run: Run, kinds: Collection[str]) -> list[str]:
    """Return the lines of an item that fails by what differs without autocast too; else none."""
    if not outcome.own or "backend" not in kinds:
        return []
    differ = "case differs" if outcome.own == 1 else "cases differ"
    lines = [f"{outcome.own:,} {differ} in the same way without autocast: the backend's own"]
    for record in outcome.found:
        lines += ["", *show_finding(record, run.store, run.store_option)]
    return lines


def show_notes(outcome: Outcome, kinds: Collection[str]) -> list[str]:
    """Return the lines of an item that fails by notes of these kinds; none without such notes."""
    counts = Counter(note.group for note in outcome.notes if note.kind in kinds)
    if not counts:
        return []
    first = {note.group: note for note in reversed(outcome.notes)}
    lines = [f"{plural(len(counts), 'note')} of the kinds of --amp-fuzz-fail-on"]
    for group, count in counts.items():
        record = outcome.noted.get(group)
        note = first[group] if record is None else record.note
        lines.append(f"{note.kind}: {note.op}: {_clip(note.message)} ({plural(count, 'case')})")
        lines += [f"  {_clip(note.where)}", f"  {_clip(note.advice)}"]
        if record is not None:
            lines.append(f"  amp-fuzz replay {record.id} --backend={shlex.quote(note.backend)}")
    return lines


_LONGEST = 40


def show_finding(record: DivergenceRecord, store: Store, store_option: str = "") -> list[str]:
    """Return a finding as lines: what diverged, the smallest program, and two commands."""
    kernel = ", ".join(part for part in (record.policy, record.dtypes) if part not in ("", "none"))
    place = f" at {record.where}" if record.where else ""
    case = str(record.minimised or record.case).splitlines()
    if len(case) > _LONGEST:
        more = f"... and {plural(len(case) - _LONGEST, 'more line')}: amp-fuzz replay shows them"
        case = [*case[:_LONGEST], more]
    lines = [
        f"{record.backend}: {title(record)}{f' ({kernel})' if kernel else ''}",
        f"  kind      {record.kind}{place}",
        f"  expected  {_clip(record.expected)}",
        f"  observed  {_clip(record.observed)}",
        *([f"  stage     {record.stage}"] if record.stage else []),
        *(f"  {line}" for line in case),
        f"amp-fuzz replay {_named(record, store)}{store_option}",
        f"amp-fuzz repro {_named(record, store)}{store_option} > repro.py",
    ]
    return list(map(clean_lines, lines))


def _named(record: DivergenceRecord, store: Store) -> str:
    return shlex.quote(store.name_of(record))


def store_option(folder: str) -> str:
    """Return a command's further options: the store, if it is not the default, and a device."""
    words = [*judging_options(), *([f"--store={folder}"] if folder else [])]
    return "".join(f" {shlex.quote(word)}" for word in words)


def _clip(text: str, width: int = 160) -> str:
    line = " ".join(text.split())
    return line if len(line) <= width else f"{line[: width - 3]}..."
