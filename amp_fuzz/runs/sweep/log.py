"""The log of a sweep in the store: ``sweeps/ID.jsonl``, a line for each shard that has ended.

With it a sweep whose driver was killed goes on. The records of its shards are ordinary runs.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeAlias

import msgspec
from filelock import FileLock, Timeout

from amp_fuzz.config import cache_folder
from amp_fuzz.records.store import Store, StoreError, Writer
from amp_fuzz.runs.sweep.matrix import Shard

__all__ = ["Head", "Log", "Over", "ShardEnd", "running", "unfinished"]


class Head(msgspec.Struct, frozen=True, tag="sweep"):
    """The head. seed: the first of those that the file does not list. file: its text."""

    id: str
    started: str
    path: str
    file: str
    seed: int


class ShardEnd(msgspec.Struct, frozen=True, tag="shard"):
    """The end of a shard. code: the exit code of its run, or -1 if there is none; error: why."""

    number: int
    code: int
    error: str = ""

    @property
    def ran(self) -> bool:
        """Whether it ran to its end: nothing new, something new, or nothing to run."""
        return self.code in (0, 1, 5)


class Over(msgspec.Struct, frozen=True, tag="over"):
    """The end of the sweep: all shards have ended, or its time was up."""

    stopped: bool


_Line: TypeAlias = Head | ShardEnd | Over
_decoder = msgspec.json.Decoder(_Line)


@dataclass(slots=True)
class Log:
    """A sweep's head, and the shards that have ended."""

    store: Store
    head: Head
    ends: dict[int, ShardEnd] = field(default_factory=dict)
    over: bool = False

    def run_id(self, shard: Shard) -> str:
        """Return the id of a shard's run."""
        return f"{self.head.id}-{shard.number:04d}"

    @property
    def folder(self) -> Path:
        """The folder of its shards' outputs, on this machine."""
        return _folder(self.store) / self.head.id

    @property
    def lock(self) -> Path:
        """The file that the command locks while it runs; at a URL, one of this machine."""
        if isinstance(self.store.place, str):
            return cache_folder() / "locks" / f"{self.head.id}.lock"
        return self.folder / "running.lock"

    def output(self, shard: Shard) -> str:
        """Return the path or URL of the file of a shard's output."""
        return f"{self.store.place}/sweeps/{self.head.id}/{shard.number:04d}.log"

    def add(self, line: ShardEnd | Over) -> None:
        """Append a line. Raises `StoreError`."""
        self.over |= isinstance(line, Over)
        if isinstance(line, ShardEnd):
            self.ends[line.number] = line
        _append(self.store, self.head.id, line)


@contextmanager
def running(store: Store, path: Path, file: str, *, seed: int, anew: bool) -> Iterator[Log]:
    """Give the log of the sweep of a file: the last one if that is not over, or else a new one.

    anew: begin a new one in any case. Raises `StoreError` if another process runs it.
    """
    store.create()
    log = None if anew else unfinished(store, path, file)
    now = datetime.now(UTC)
    if log is None:
        identity = f"{now:%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
        started = now.isoformat(timespec="seconds")
        log = Log(store, Head(identity, started, str(path), file, seed))
    try:
        for folder in (log.folder, log.lock.parent):
            folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(log.lock)
        lock.acquire(timeout=0)
    except Timeout:
        raise StoreError(f"sweep {log.head.id} is running: wait, or begin another: --new") from None
    except OSError as error:
        raise StoreError(f"{log.folder}: cannot write ({error.strerror})") from error
    try:
        if not _path(store, log.head.id).exists():
            _append(store, log.head.id, log.head)
        yield log
    finally:
        lock.release()


def unfinished(store: Store, path: Path, file: str) -> Log | None:
    """Return the last sweep of a file if it is not over, and the file is unchanged."""
    for log in sorted(_folder(store).glob("*.jsonl"), reverse=True):
        found = _read(store, log)
        if found is not None and found.head.path == str(path):
            return found if not found.over and found.head.file == file else None
    return None


def _read(store: Store, path: Path) -> Log | None:
    """Return a log, without a last line that was cut short; None if the head is."""
    log: Log | None = None
    try:
        text = path.read_bytes()
    except OSError as error:
        raise StoreError(f"{path}: cannot be read ({error.strerror})") from error
    for line in text.split(b"\n")[:-1]:
        try:
            record = _decoder.decode(line)
        except msgspec.MsgspecError as error:
            raise StoreError(f"{path}: {error}: begin a new sweep: --new") from error
        match record:
            case Head():
                log = Log(store, record)
            case ShardEnd() if log is not None:
                log.ends[record.number] = record
            case Over() if log is not None:
                log.over = True
    return log


def _append(store: Store, identity: str, line: _Line) -> None:
    path = _path(store, identity)
    with closing(Writer(path)) as writer:
        writer.write(line)
    store.deliver(path)


def _folder(store: Store) -> Path:
    return store.root / "sweeps"


def _path(store: Store, identity: str) -> Path:
    return _folder(store) / f"{identity}.jsonl"
