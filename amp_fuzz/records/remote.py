"""A store at a URL, read and written through a copy of those files that somebody asked for."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path

from amp_fuzz.config import is_url
from amp_fuzz.records.objects import Gone, Objects, Stat
from amp_fuzz.records.outputs import StoreError
from amp_fuzz.records.parts import Files, files_of, pass_on, records_in
from amp_fuzz.records.rows import TABLES, Table
from amp_fuzz.records.schema import DivergenceRecord
from amp_fuzz.records.store import Store, backend_name, load_finding, write_finding

__all__ = ["RemoteStore", "located", "opened", "store_at"]

# What is small, and needed to list runs and findings. The records of a run come when it is read.
_HEADS = re.compile(
    r"findings/[^/]+\.(?:json|range)|runs/[^/]+/(?:run|summary)\.json|sweeps/[^/]+\.jsonl|run\.json"
)
_TRIES = 5  # to copy files that others remove meanwhile


def store_at(place: Path | str) -> Store:
    """Return the store in a folder, or at a URL. Raises `StoreError` if a URL cannot be read."""
    return RemoteStore(place) if isinstance(place, str) and is_url(place) else Store(place)


class RemoteStore(Store):
    """A store at a URL that fsspec reads: of a sweep, or a copy of a folder.

    Findings, heads of runs and logs of sweeps are copied when it is opened, and the records of a
    run when they are read. What commands keep, such as a finding, is written to the URL too.

    Args:
        url: of a store, or of the folder of a run. The copy is removed with the object.
        only: of a compacted run, copy this table only.

    Raises:
        StoreError: a package is missing, or the URL cannot be read.
    """

    def __init__(self, url: str, *, only: Table | None = None) -> None:
        self.objects = Objects(url)
        super().__init__(tempfile.mkdtemp(prefix="amp-fuzz-"))
        weakref.finalize(self, _remove, self.root, os.getpid())
        self._only = only
        self._have: dict[Path, Stat] = {}
        self._brought: dict[str, Files] = {}
        self.refresh()

    @property
    def place(self) -> Path | str:
        return self.objects.url

    def refresh(self) -> None:
        """Look for new runs and findings, and for new records when a run is read again."""
        stats = self.objects.names()
        self._lone = _name(self.objects.name) if "run.json" in stats else ""
        heads = {name: stat for name, stat in stats.items() if _HEADS.fullmatch(name)}
        self._bring(heads, self.run_path(self._lone) if self._lone else self.root)
        self._brought.clear()
        self.empty = not any(name.startswith(("runs/", "findings/", "run.json")) for name in stats)

    def _bring(self, stats: dict[str, Stat], folder: Path) -> None:
        """Copy the files that changed, below a folder. Raises `Gone` if one is no longer there."""
        (self.root / "runs").mkdir(parents=True, exist_ok=True)
        (self.root / "findings").mkdir(exist_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
        new = {name: stat for name, stat in stats.items() if self._have.get(folder / name) != stat}
        self.objects.fetch(new, folder, stats)
        self._have |= {folder / name: stat for name, stat in new.items()}

    def _at(self, run: str) -> str:
        """Return the folder of a run at the URL."""
        return "" if run == self._lone else f"runs/{run}"

    def folder(self, run: str) -> Path:
        here = self.run_path(run)
        for tries in range(_TRIES):
            if run in self._brought:
                break
            found = files_of(self.objects, self._at(run))
            wanted = {name: stat for name, stat in found.stats.items() if self._wants(name)}
            if run != self._lone:
                wanted = {f"runs/{run}/{name}": stat for name, stat in wanted.items()}
            try:
                self._bring(wanted, here if run == self._lone else self.root)
            except Gone:  # compacted meanwhile
                if tries == _TRIES - 1:
                    raise
                continue
            for name in [*records_in(here)]:
                if name not in found.stats:
                    (here / name).unlink()
            self._brought[run] = found
        return here

    def look_again(self, run: str) -> None:
        self._brought.pop(run, None)

    def _wants(self, name: str) -> bool:
        others = [table for table in TABLES if self._only not in (None, table)]
        return not name.startswith("tables-") or name.split("/")[1] not in others

    def is_running(self, run: str, *, but: str = "") -> bool:
        return files_of(self.objects, self._at(run)).running

    def create(self) -> None:
        super().create()
        self.objects.check()

    def save(self, finding: DivergenceRecord) -> Path:
        # Always by its backend: another process may save one of this id meanwhile.
        path = self._finding(backend_name(finding))
        with suppress(StoreError):  # of a folder that was copied there
            plain = self._finding(finding.id)
            path = plain if load_finding(plain).backend == finding.backend else path
        write_finding(path, finding)
        self.deliver(path)
        return path

    def deliver(self, path: Path) -> None:
        name = path.relative_to(self.root).as_posix()
        self.objects.put(name.removeprefix(f"runs/{self._lone}/") if self._lone else name, path)

    def settle(self, run: str) -> None:
        pass_on(self.objects, self._at(run), self._brought[run], self.run_path(run))
        del self._brought[run]


def opened(url: str, *, only: Table | None = None) -> RemoteStore:
    """Return the store at a URL. Raises `StoreError` if there is neither a run nor a store."""
    store = RemoteStore(url, only=only)
    if store.empty:
        raise StoreError(f"{url}: neither a run nor a store: it has no run.json and no runs/")
    return store


def located(url: str) -> tuple[RemoteStore, str | None]:
    """Return the store of a URL, and the run if the URL is that of a run's folder in it."""
    match = re.fullmatch(r"(.+)/runs/([^/]+)/?", url)
    return opened(match[1] if match else url), match[2] if match else None


def _name(folder: str) -> str:
    """Return the id of a run whose folder is alone."""
    return folder if re.fullmatch(r"[A-Za-z0-9][\w.-]*", folder, re.ASCII) else "run"


def _remove(root: Path, process: int) -> None:
    """Remove a copy, but not in a fork of the process that made it."""
    if os.getpid() == process:
        shutil.rmtree(root, ignore_errors=True)
