"""What a process of a pytest session writes down while it fuzzes, and what it leaves if it dies.

Each process has two files in the run's folder: its records, and the case that runs now. The second
is there before the case starts, so whoever comes after a process that died (xdist's controller, or
the next session) finds the case that killed it. A case that gives no answer is ended with its
process, from another thread.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import msgspec
from filelock import BaseFileLock, FileLock, Timeout

from amp_fuzz.case import Case
from amp_fuzz.covered import Covered
from amp_fuzz.engine import Settings
from amp_fuzz.findings import Groups
from amp_fuzz.fingerprints import fingerprinted
from amp_fuzz.processes import end_children
from amp_fuzz.records import CaseRecord, DivergenceRecord, RunRecord, unanswered
from amp_fuzz.store import Store, StoreError, Writer, load_finding

__all__ = ["Done", "Run", "lock_of", "recover", "take"]


@dataclass(slots=True)
class Run:
    """What the items of one process share: where they write, and what they found so far.

    worker: ``main``, or xdist's name of the worker. groups: the causes that it has met. shown: by
    fingerprint, the finding that was shown. suspected: the divergence that is made smaller now.
    covered: by backend, the smallest case of each feature.
    deadline: in seconds since the epoch, so that all workers have the same. timeout: seconds that a
    case may take, 0 for any; hung: told of one that took more, before its process ends.
    """

    settings: Settings
    store: Store
    record: RunRecord
    worker: str = "main"
    store_option: str = ""
    deadline: float = float("inf")
    timeout: float = 0.0
    cases: int = 0
    findings: list[DivergenceRecord] = field(default_factory=list)
    hung: Callable[[DivergenceRecord], None] = lambda record: None
    groups: Groups = field(default_factory=Groups)
    shown: dict[str, DivergenceRecord] = field(default_factory=dict)
    suspected: DivergenceRecord | None = None
    covered: dict[str, Covered] = field(default_factory=dict)
    _files: _Files | None = None
    _running: tuple[float, DivergenceRecord] | None = None
    _turn: threading.Lock = field(default_factory=threading.Lock)

    @property
    def current(self) -> Path:
        """The file that holds the case which runs now: what is left of a process that died."""
        return self.store.run_path(self.record.id) / f"current-{self.worker}.json"

    def open(self) -> Writer:
        """Make the run's folder and this process's files, the first time. Raises `StoreError`."""
        if self._files is None:
            # Every worker writes the same head: whoever comes first makes the run.
            self.store.begin(self.record)
            writer = self.store.writer(self.record.id, self.worker)
            lock = lock_of(self.current)
            try:
                lock.acquire(timeout=5)
                self._files = _Files(writer, self.current.open("wb", buffering=0), lock)
            except OSError as error:
                writer.close()
                lock.release()
                raise _unwritable(self.current, error) from error
            if self.timeout:
                threading.Thread(target=self._watch, daemon=True).start()
        return self._files.writer

    def covering(self, backend: str) -> Covered:
        """Return the covered features of a backend."""
        if backend not in self.covered:
            self.covered[backend] = Covered(self.store, backend)
        return self.covered[backend]

    def note(self, backend: str, family: str, case: Case) -> None:
        """Write down the case that is about to run, as the finding that it is if we die of it.

        While a divergence is made smaller that is the divergence: torch dies of some calls that are
        no part of the case that was drawn.
        """
        dead = unanswered(backend, "crash", case, "the process died", family)
        record = self.suspected or fingerprinted(dead)
        with self._turn:
            self._write(msgspec.json.encode(record))
            self._running = time.monotonic(), record

    def rest(self) -> None:
        """Note that no case runs."""
        with self._turn:
            self._running = None
            self._write(b"")

    def _watch(self) -> None:
        """End this process once a case gives no answer; none can be ended alone."""
        while self._files is not None:
            time.sleep(min(1.0, self.timeout / 4))
            with self._turn:
                if self._running is not None:
                    start, record = self._running
                    if time.monotonic() - start >= self.timeout:
                        self._expire(record)

    def _expire(self, record: DivergenceRecord) -> None:
        """Leave what hangs as a finding, and end this process with all that it started."""
        try:
            if record.kind == "crash":
                detail = f"no answer for {self.timeout:g} s"
                record = msgspec.structs.replace(record, kind="timeout", observed=detail)
                record = fingerprinted(record)
            self._write(msgspec.json.encode(record))
            self.hung(record)
        finally:
            end_children()
            os._exit(1)

    def done(self, backend: str, family: str) -> Done:
        """Return what processes that died have done of the cases of a family."""
        found = Done()
        folder = self.store.run_path(self.record.id)
        if any(folder.glob("records-*-lost.jsonl")):
            for record in self.store.records(self.record.id):
                if isinstance(record, CaseRecord | DivergenceRecord) and (
                    (record.backend, record.family) == (backend, family)
                ):
                    found.note(record)
        return found

    def _write(self, text: bytes) -> None:
        assert self._files is not None
        try:
            self._files.current.seek(0)
            self._files.current.write(text)
            self._files.current.truncate()
        except OSError as error:
            raise _unwritable(self.current, error) from error

    def close(self) -> None:
        """Close this process's files."""
        if self._files is not None:
            self._files.writer.close()
            self._files.current.close()
            self.current.unlink(missing_ok=True)
            self._files.lock.release()
            Path(self._files.lock.lock_file).unlink(missing_ok=True)
            self._files = None


@dataclass(slots=True)
class Done:
    """Cases that need not run again: their ids, and the kernels that they reached."""

    ids: set[str] = field(default_factory=set)
    kernels: set[str] = field(default_factory=set)

    def note(self, record: CaseRecord | DivergenceRecord) -> None:
        """Add a case that was judged, or that a process died of."""
        if isinstance(record, CaseRecord):
            self.ids.add(record.id)
            self.kernels.update(k.overload for k in record.kernels)
        else:
            self.ids.add(record.case.id)


@dataclass(frozen=True, slots=True)
class _Files:
    writer: Writer
    current: BinaryIO
    lock: BaseFileLock


def _unwritable(path: Path, error: OSError) -> StoreError:
    return StoreError(f"{path}: cannot write ({error.strerror or error})")


def lock_of(current: Path) -> BaseFileLock:
    """Return the lock that a process holds as long as it lives and uses a ``current-`` file."""
    return FileLock(current.with_suffix(".lock"))


def recover(store: Store) -> list[DivergenceRecord]:
    """Return the cases that earlier sessions died of, and keep them as findings.

    A session that still runs holds a lock on its file.
    """
    found = []
    for path in sorted((store.root / "runs").glob("*/current-*.json")):
        lock = lock_of(path)
        # Without a lock file it belongs to a run by command, which watches its own workers.
        if not Path(lock.lock_file).exists():
            continue
        try:
            with lock.acquire(timeout=0):
                record = take(store, path.parent.name, path, "the process died, or was killed")
                Path(lock.lock_file).unlink(missing_ok=True)
        except (Timeout, OSError):
            continue
        if record is not None:
            found.append(record)
    return found


def take(store: Store, run: str, path: Path, observed: str) -> DivergenceRecord | None:
    """Turn what a dead process left into a finding; None if it died between cases."""
    try:
        left = load_finding(path) if path.exists() and path.stat().st_size else None
    except StoreError:
        left = None  # it was killed while it wrote the case down, so before it ran it
    path.unlink(missing_ok=True)
    if left is None:
        return None
    record = left
    if left.kind == "crash":
        record = msgspec.structs.replace(left, observed=observed)
    writer = store.writer(run, f"{path.stem.removeprefix('current-')}-lost")
    writer.write(record)
    writer.close()
    store.save(record)
    return record
