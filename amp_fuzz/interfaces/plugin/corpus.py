"""Case files as pytest items: a regression suite, and what ``--amp-fuzz-replay`` names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from amp_fuzz.backends import Backend, backends
from amp_fuzz.interfaces.plugin.items import (
    ROOT,
    Outcome,
    WorkerFailed,
    show_finding,
    show_notes,
    show_own,
)
from amp_fuzz.interfaces.plugin.run import Run
from amp_fuzz.records.store import Store, StoreError
from amp_fuzz.runs.corpus import Kept, folder_cases, named
from amp_fuzz.runs.engine import Task

__all__ = ["CaseItem", "CaseJob", "corpus", "replayed"]


@dataclass(frozen=True, slots=True)
class CaseJob:
    """One case on one backend. group: ``corpus`` or ``replay``."""

    group: str
    kept: Kept

    @property
    def name(self) -> str:
        """The item's name: the file or the id, and the backend."""
        return f"{self.kept.name}[{self.kept.backend}]"

    @property
    def nodeid(self) -> str:
        """The id that pytest shows."""
        return f"{ROOT}::{self.group}::{self.name}"

    def item(self, parent: pytest.Collector, run: Run) -> pytest.Item:
        """Return its item."""
        return CaseItem.from_parent(parent, name=self.name, run=run, job=self)


def corpus(folders: Iterable[Path], chosen: Sequence[Backend]) -> Iterator[CaseJob]:
    """Yield a job for each case file on each backend. Raises `CorpusError`."""
    return (CaseJob("corpus", kept) for kept in folder_cases(folders, chosen))


def replayed(store: Store, names: Iterable[str]) -> Iterator[CaseJob]:
    """Yield a job for each id or path to judge again. Raises `CorpusError`."""
    return (CaseJob("replay", kept) for kept in named(store, names))


class CaseItem(pytest.Item):
    """One case on one backend. It passes if it agrees, or if its divergences are not new."""

    def __init__(self, *, run: Run, job: CaseJob, **about: Any) -> None:
        super().__init__(**about)
        self.run, self.job = run, job

    def reportinfo(self) -> tuple[Path, None, str]:
        # Not the id: pytest would replace dots at its end by "::".
        return self.path, None, f"{ROOT} {self.job.group} {self.name}"

    def runtest(self) -> None:
        kept = self.job.kept
        backend = backends()[kept.backend]
        state = backend.availability()
        if state.status != "ready":
            pytest.skip(f"{backend.name} is {state.status}: {state.detail}")
        task = Task(backend.name, self.job.group, (), 1, 0, (kept.case,), again=True)
        outcome = Outcome()
        for event in self.run.work([task]):
            outcome.add(event)
        if outcome.cut and not outcome.cases:
            pytest.skip(self.run.over)
        for finding in outcome.new:
            lines = show_finding(finding, self.run.store, self.run.store_option)
            head = f"{kept.name} diverges on {backend.name}: {finding.kind}"
            pytest.fail("\n".join([head, "", *lines]), pytrace=False)
        kinds = self.run.settings.fail_on
        if noted := [*show_own(outcome, self.run, kinds), *show_notes(outcome, kinds)]:
            pytest.fail("\n".join(noted), pytrace=False)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], *args: Any) -> Any:
        """Return one line for a store that cannot be written; otherwise pytest's own text."""
        if isinstance(excinfo.value, StoreError):
            return f"amp-fuzz: {excinfo.value}"
        if isinstance(excinfo.value, WorkerFailed):
            return f"amp-fuzz: internal error, please report it:\n{excinfo.value}"
        return super().repr_failure(excinfo, *args)
