"""Shared by the items of one pytest process: the run, its worker process, the findings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from amp_fuzz.records.schema import DivergenceRecord, EndRecord, RunRecord
from amp_fuzz.records.store import Store
from amp_fuzz.runs.engine import (
    Crashed,
    Event,
    Finding,
    Planned,
    Progress,
    Settings,
    Task,
    TimeUp,
    timed,
)
from amp_fuzz.runs.workers import Supervisor

__all__ = ["Run"]


@dataclass(slots=True)
class Run:
    """The state that the items of one process share.

    label: ``main``, or xdist's name of the worker. shown: by fingerprint, the finding that was
    shown. processes: how many share the items. cases: how many of the planned cases this process
    judged. cut: whether the time was up before the end. findings: those that it kept.
    """

    settings: Settings
    store: Store
    record: RunRecord
    label: str = "main"
    store_option: str = ""
    processes: int = 1
    cases: int = 0
    planned: int = 0
    cut: bool = False
    findings: list[DivergenceRecord] = field(default_factory=list)
    shown: dict[str, DivergenceRecord] = field(default_factory=dict)
    _supervisor: Supervisor | None = None
    _open: ExitStack = field(default_factory=ExitStack)

    def work(self, tasks: Sequence[Task]) -> Iterator[Event]:
        """Do the tasks of an item and yield events. Raises `StoreError`."""
        supervisor = self._begin()
        for event in supervisor.work(list(tasks)):
            if isinstance(event, (Progress, Crashed)):
                self.cases += 1
            if isinstance(event, Planned):
                self.planned += event.cases
            elif isinstance(event, TimeUp):
                self.cut = True
            elif isinstance(event, Finding) or (isinstance(event, Crashed) and event.first):
                self.findings.append(event.record)
            yield event

    def begin(self) -> None:
        """Start the clock on the first call: the project's own tests take none of our time."""
        self._begin()

    @property
    def over(self) -> str:
        """Why a case did not run."""
        return f"no case ran: the {self.settings.seconds:g} s of amp-fuzz had passed before"

    @property
    def apart(self) -> str:
        """Why the worker is a new process, without changes made to torch here, or ""."""
        return self._supervisor.apart if self._supervisor is not None else ""

    def write(self, record: EndRecord) -> None:
        """Write a record. Raises `StoreError`."""
        self._begin().writer.write(record)

    def _begin(self) -> Supervisor:
        """Return the supervisor; the first call makes the run's folder. Raises `StoreError`."""
        if self._supervisor is None:
            # Every process writes the same head: the first one makes the run.
            with ExitStack() as opened:
                opened.enter_context(self.store.running(self.record, self.label))
                supervisor = Supervisor(self.settings, self.store, self.record.id, label=self.label)
                opened.callback(supervisor.close)
                self.settings = supervisor.settings = timed(self.settings)
                self._supervisor, self._open = supervisor, opened.pop_all()
        return self._supervisor

    def close(self) -> None:
        """End the worker process."""
        self._open.close()
