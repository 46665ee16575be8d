"""The store: append-only records of runs, and findings, under one folder (``.amp-fuzz/``).

Records are written and flushed line by line, so a killed worker loses at most the case that it was
running. `amp_fuzz.records.compaction` turns the lines of a run into Parquet (``tables-N``), and a
run that goes on writes lines again. Everything here reads both. Nothing here imports torch, and
nothing that is read is executed.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, TypeVar
from urllib.parse import quote

import msgspec
from filelock import FileLock, Timeout

from amp_fuzz.cases.case import Case, CaseError, load, loads
from amp_fuzz.config import is_url
from amp_fuzz.records.outputs import StoreError, write_whole
from amp_fuzz.records.schema import (
    RECORDS_FORMAT,
    DamageRecord,
    DivergenceRecord,
    NoteRecord,
    Record,
    RunRecord,
)

if TYPE_CHECKING:
    from amp_fuzz.records.tables import Tables

__all__ = ["Spoilt", "Store", "StoreError", "Writer"]

_T = TypeVar("_T")

_decoder = msgspec.json.Decoder(Record)
_encoder = msgspec.json.Encoder()
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


_ALONE = "running-store.lock"
_PROBED = 5.0  # seconds: `Store.is_running` of another process takes a lock for a moment


class Writer:
    """Appends records to one file, a line at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            _drop_cut_line(path)
            self._file: BinaryIO = path.open("ab", buffering=0)
        except OSError as error:
            raise StoreError(f"{path}: cannot write ({error.strerror})") from error

    def write(self, record: msgspec.Struct) -> None:
        """Append one record. Raises `StoreError` if it cannot be written."""
        line = _encoder.encode(record) + b"\n"
        try:
            written = self._file.write(line)
            if written != len(line):
                raise OSError(28, os.strerror(28))
        except OSError as error:
            raise StoreError(
                f"{self.path}: cannot write ({error.strerror}): free some space; earlier "
                "records are intact"
            ) from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _drop_cut_line(path: Path) -> None:
    """Drop an unfinished last line (the disk was full): the next record would be appended to it."""
    if not path.is_file():  # a device has no last line
        return
    with path.open("r+b") as file:
        text = file.read()
        if not text.endswith(b"\n"):
            file.truncate(text.rfind(b"\n") + 1)


class Spoilt(NamedTuple):
    """A line that cannot be read; number 0 and no line are a whole file."""

    path: Path
    number: int
    line: bytes
    error: str

    def __str__(self) -> str:
        at = f"{self.path}:{self.number}" if self.number else str(self.path)
        return f"{at}: {self.error}"


class Store:
    """A folder of runs and findings."""

    def __init__(self, root: Path | str = ".amp-fuzz") -> None:
        self.root = Path(root)

    @property
    def place(self) -> Path | str:
        """What a user names it by: its folder."""
        return self.root

    def named(self, run: str) -> str:
        """Return the path or URL of a run."""
        return f"{self.place}/runs/{run}"

    def folder(self, run: str) -> Path:
        """Return the folder of a run with all its files: `RemoteStore` brings them here."""
        return self.run_path(run)

    def look_again(self, run: str) -> None:
        """Read what was added to a run when it is read next: files here are always read anew."""

    def deliver(self, path: Path) -> None:
        """Bring a file that was written below `root` to where the store is: it is there."""

    def settle(self, run: str) -> None:
        """Bring the files of a run that were compacted to where the store is: they are there."""

    def create(self) -> None:
        """Make the folder, with a .gitignore of its own. Raises `StoreError` if that fails."""
        try:
            (self.root / "runs").mkdir(parents=True, exist_ok=True)
            (self.root / "findings").mkdir(exist_ok=True)
            ignore = self.root / ".gitignore"
            if not ignore.exists():
                ignore.write_text("# written by amp-fuzz\n*\n")
        except OSError as error:
            raise StoreError(
                f"{self.root}: cannot make the store ({error.strerror}): give another with --store"
            ) from error

    def run_path(self, run: str) -> Path:
        """Return the folder of a run. Raises `StoreError` for an invalid id, such as a path."""
        if not _RUN_ID.fullmatch(run):
            raise StoreError(f"{self.place}: {run!r} is not the id of a run")
        return self.root / "runs" / run

    def begin(self, run: RunRecord) -> Path:
        """Make a run's folder and write its head."""
        self.create()
        path = self.run_path(run.id)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"{path}: cannot make the folder ({error.strerror})") from error
        write_whole(path / "run.json", msgspec.json.format(_encoder.encode(run), indent=2))
        return path

    @contextmanager
    def running(self, run: RunRecord, label: str = "main") -> Iterator[None]:
        """Make a run's folder with its head, and mark it as running during the block.

        label: names this process, if there are several.
        """
        lock = FileLock(self.begin(run) / f"running-{label}.lock")
        try:
            lock.acquire(timeout=_PROBED)
        except (OSError, Timeout) as error:
            raise StoreError(f"{lock.lock_file}: {error}: is it running already?") from error
        try:
            self._wait(run.id)
            yield
        finally:
            lock.release()

    @contextmanager
    def alone(self, run: str) -> Iterator[None]:
        """Keep a run from starting again during the block. Raises `StoreError` if it is running."""
        lock = FileLock(self.run_path(run) / _ALONE)
        running = StoreError(f"{self.named(run)}: running now: wait until it has ended")
        if self.is_running(run):
            raise running
        try:
            lock.acquire(timeout=_PROBED)
        except Timeout:
            raise running from None
        except OSError as error:
            raise StoreError(f"{lock.lock_file}: cannot write ({error.strerror})") from error
        try:
            # Both sides take their lock and then look for the other's: one of them sees it.
            if self.is_running(run, but=_ALONE):
                raise running
            yield
        finally:
            lock.release()

    def _wait(self, run: str) -> None:
        """Return once no process has a run `alone`. Raises `StoreError` after a few seconds."""
        path = self.run_path(run) / _ALONE
        if not path.exists():
            return
        try:
            with FileLock(path).acquire(timeout=_PROBED):
                pass
        except Timeout:
            raise StoreError(f"{path.parent}: `amp-fuzz store` changes its files: wait") from None

    def is_running(self, run: str, *, but: str = "") -> bool:
        """Return whether some process is running a run now, or changes its files.

        but: the name of a lock to leave out.
        """
        for path in self.run_path(run).glob("running-*.lock"):
            if path.name == but:
                continue
            if held(path):
                return True
        return False

    def writer(self, run: str, worker: str) -> Writer:
        """Return a writer for one worker of a run."""
        return Writer(self.run_path(run) / f"records-{worker}.jsonl")

    def runs(self) -> list[str]:
        """Return the ids of the runs, oldest first."""
        return sorted(p.parent.name for p in (self.root / "runs").glob("*/run.json"))

    def run(self, run: str) -> RunRecord:
        """Read a run's head. Raises `StoreError` for a run that is missing or unreadable."""
        path = self.run_path(run) / "run.json"
        try:
            record = msgspec.json.decode(path.read_bytes(), type=RunRecord)
        except OSError as error:
            raise StoreError(
                f"{path}: {error.strerror}: use one of {', '.join(self.runs())}"
            ) from error
        except msgspec.MsgspecError as error:
            raise StoreError(f"{path}: {error}: the head of the run is damaged") from error
        if record.format > RECORDS_FORMAT:
            raise StoreError(f"{path}: written by a newer amp-fuzz: upgrade amp-fuzz")
        return record

    def tables(self, run: str) -> Tables | None:
        """Return the tables of a run that was compacted, or None."""
        from amp_fuzz.records.tables import Tables  # 10 ms, of every command

        number = _compacted(self.folder(run))
        return Tables(self.run_path(run) / f"tables-{number}") if number else None

    def lines(self, run: str) -> list[Path]:
        """Return the files of a run whose lines are not in its tables, in order."""
        folder = self.folder(run)
        number, found = _compacted(folder), []
        for path in folder.glob("records-*.jsonl"):
            name, _, claimed = path.stem.partition("~")  # see `amp_fuzz.records.compaction`
            if claimed and not claimed.isdecimal():
                continue  # a copy that somebody made
            if not claimed or int(claimed) > number:
                found.append((f"{name}.jsonl", int(claimed or sys.maxsize), path))
        return [path for *_, path in sorted(found)]

    def steady(self, run: str, read: Callable[[], _T]) -> _T:
        """Return what a function reads of a run; call it again if a compaction moved the files.

        A compaction renames files and then removes them. A reader that has seen some before and
        some after would miss records, or name a file that has vanished as damage.
        """
        while True:
            before = self._files(run)
            try:
                result = read()
            except (OSError, StoreError):
                if self._files(run) >= before:
                    raise
            else:
                if self._files(run) >= before:  # a worker may have added a file
                    return result

    def _files(self, run: str) -> set[Path]:
        folder = self.folder(run)
        return {*folder.glob("records-*.jsonl"), *folder.glob("tables-*")}

    def fresh(self, run: str) -> bool:
        """Return whether some records of a run are not in its tables."""
        return any(path.stat().st_size for path in self.lines(run))

    def found(self, run: str) -> dict[tuple[str, str], DivergenceRecord]:
        """Return the readable divergences of a run by backend and id of the case, the last each."""
        found: dict[tuple[str, str], DivergenceRecord] = {}
        tables = self.tables(run)
        for record in tables.others() if tables is not None else ():
            if isinstance(record, DivergenceRecord):
                found[record.backend, record.case.id] = record
        for path in self.lines(run):
            with suppress(OSError), path.open("rb") as lines:
                for line in lines:
                    if line.startswith(b'{"type":"divergence"'):
                        with suppress(msgspec.MsgspecError, ValueError, RecursionError):
                            record = _decoder.decode(line)
                            assert isinstance(record, DivergenceRecord)
                            found[record.backend, record.case.id] = record
        return found

    def records(self, run: str) -> Iterator[Record]:
        """Yield the records of a run, file by file; a last line that was cut short is left out.

        Raises `StoreError`, with file and line, for any other line that cannot be read, and for
        tables if pyarrow is missing.
        """
        if (tables := self.tables(run)) is not None:
            yield from tables.records()
        for path in self.lines(run):
            yield from read_records(path)

    def salvaged(self, run: str, spoilt: list[Spoilt]) -> Iterator[Record | DamageRecord]:
        """Yield the records of a run, and what says of a line that it could not be read.

        spoilt: gets these lines, and last lines that were cut short, which nothing else says.
        Raises `StoreError` for tables that cannot be read.
        """
        if (tables := self.tables(run)) is not None:
            yield from tables.all_records()
        for path in self.lines(run):
            named = path.with_name(f"{path.stem.partition('~')[0]}.jsonl")
            try:
                with path.open("rb") as lines:
                    for number, line in enumerate(lines, start=1):
                        try:
                            if line.strip():
                                yield _decoder.decode(line)
                        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                            spoilt.append(Spoilt(named, number, line, str(error)))
                            if line.endswith(b"\n"):
                                yield DamageRecord(str(spoilt[-1]))
            except OSError as error:
                spoilt.append(Spoilt(named, 0, b"", error.strerror or str(error)))
                yield DamageRecord(str(spoilt[-1]))

    def save(self, finding: DivergenceRecord) -> Path:
        """Keep a finding under its name, for replay and repro. Returns its file.

        A finding of this case and backend that is kept already is replaced.
        """
        self.create()
        path = self._finding(self.name_of(finding))
        with suppress(StoreError):  # none yet, or damaged
            if load_finding(path).backend != finding.backend:
                path = self._finding(backend_name(finding))
        write_finding(path, finding)
        self.deliver(path)
        return path

    def name_of(self, finding: DivergenceRecord) -> str:
        """Return the name under which a finding is kept: its id, or `backend_name`."""
        name = backend_name(finding)
        return name if self._finding(name).exists() else finding.id

    def _finding(self, name: str) -> Path:
        return self.root / "findings" / f"{name}.json"

    def keep_range(self, finding: DivergenceRecord, words: str) -> None:
        """Keep in which versions a finding is there, if the finding is kept here."""
        path = self._finding(self.name_of(finding))
        if path.exists():
            write_whole(path.with_suffix(".range"), words.encode())
            self.deliver(path.with_suffix(".range"))

    def range_of(self, finding: DivergenceRecord) -> str:
        """Return in which versions a finding is there, as `amp-fuzz bisect` found, or ""."""
        path = self._finding(self.name_of(finding)).with_suffix(".range")
        try:
            return path.read_text("utf-8", errors="replace")
        except OSError:
            return ""

    def findings(self) -> list[str]:
        """Return the names of the findings kept: see `name_of`."""
        return sorted(p.stem for p in (self.root / "findings").glob("*.json"))

    def newest(self, before: float = math.inf) -> list[str]:
        """Return the names of the findings kept, the newest first.

        before: only those saved before this time, in seconds since the epoch.
        """
        ages = {}
        for path in (self.root / "findings").glob("*.json"):
            with suppress(OSError):  # another process may have removed it
                if (saved := path.stat()).st_mtime < before:
                    ages[path.stem] = -saved.st_mtime_ns
        return sorted(ages, key=lambda name: (ages[name], name))

    def finding(self, identity: str) -> DivergenceRecord:
        """Read a finding by its name or an unambiguous prefix of it. Raises `StoreError`."""
        names = self.findings()
        hits = [identity] if identity in names else [f for f in names if f.startswith(identity)]
        if len(hits) != 1:
            known = ", ".join(names[:8]) or "none yet"
            what = "several findings start with" if hits else "no finding has the id"
            raise StoreError(f"{self.place}: {what} {identity!r} (kept: {known})")
        return load_finding(self._finding(hits[0]))

    def noted(self, identity: str) -> NoteRecord | None:
        """Return the note, of the newest run, whose case has this id or prefix."""
        for run in reversed(self.runs()):
            if (found := self.steady(run, partial(self._noted, run, identity))) is not None:
                return found
        return None

    def _noted(self, run: str, identity: str) -> NoteRecord | None:
        tables = self.tables(run)
        if tables is not None and (record := tables.note(identity)) is not None:
            return record
        for path in self.lines(run):
            with path.open("rb") as lines:
                for line in lines:
                    if not line.startswith(b'{"type":"note"') or not line.endswith(b"\n"):
                        continue
                    found = _decoder.decode(line)
                    if isinstance(found, NoteRecord) and found.id.startswith(identity):
                        return found
        return None


def held(path: Path) -> bool:
    """Return whether a process holds a lock; False for a file that cannot be read."""
    try:
        with FileLock(path).acquire(timeout=0):
            return False
    except Timeout:
        return True
    except OSError:  # a read-only store, or another user's: a shared lock needs no right to write
        with suppress(ImportError, OSError), path.open("rb") as file:
            import fcntl

            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
    return False


def _compacted(folder: Path) -> int:
    """Return the number of a run's tables, the highest if a compaction was killed, or 0."""
    names = (path.name.partition("-")[2] for path in folder.glob("tables-*"))
    return max((int(name) for name in names if name.isdecimal()), default=0)


def backend_name(finding: DivergenceRecord) -> str:
    """Return the name of a finding if another backend's has its id: ``ID@BACKEND``."""
    return f"{finding.id}@{quote(finding.backend, safe='[]@+,')}"


def load_finding(path: Path) -> DivergenceRecord:
    """Read a finding's file. Raises `StoreError`, naming the place."""
    try:
        record = _decoder.decode(path.read_bytes())
        if not isinstance(record, DivergenceRecord):
            raise StoreError(f"{path}: holds no finding")
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror}") from error
    except (msgspec.MsgspecError, ValueError) as error:
        raise StoreError(f"{path}: {error}") from error
    for name, case in (
        ("case", record.case),
        ("minimised", record.minimised),
        ("nearest", record.nearest),
    ):
        if case is not None:
            try:
                loads(case.json(), f"{path}: {name}")
            except CaseError as error:
                raise StoreError(str(error)) from error
    return record


def find_run(store: Store, what: str) -> tuple[Store, str]:
    """Return the store and the id of the run that a word names. Raises `StoreError`.

    what: the beginning of an id, ``latest``, ``latest~1`` (the one before), ``latest:main`` (of a
    branch), or a path or URL: of a run's folder, or of a store, whose latest run it is.
    """
    path = Path(what)
    if is_url(what):
        from amp_fuzz.records.remote import located  # which imports this module

        store, run = located(what)
        what = run or "latest"
    elif path.is_dir():
        if (path / "run.json").is_file():  # STORE/runs/ID
            return Store(path.resolve().parents[1]), path.resolve().name
        store, what = Store(path), "latest"
    latest = _LATEST.fullmatch(what)
    ids, back = store.runs(), 0
    if latest is None:
        hits = [run for run in ids if run.startswith(what)]
        several = f"several runs start with {what!r}: {', '.join(hits[:8])}"
        said = several if hits else f"no run's id starts with {what!r}"
        hits = hits if len(hits) == 1 else []
    else:
        back = int(latest["back"] or 0)
        branch = latest["branch"]
        mine = (run for run in reversed(ids) if branch is None or _branch(store, run) == branch)
        hits = list(islice(mine, back + 1))
        count = f"{len(ids)} run{'s' * (len(ids) != 1)}"
        said = f"there is no {what} of {count}" if ids else "no runs yet"
    if len(hits) == back + 1:
        return store, hits[back]
    named = [] if store.place == Path(".amp-fuzz") else [f"--store={store.place}"]
    command = shlex.join(["amp-fuzz", "list", "runs", *named])
    raise StoreError(f"{store.place}: {said}: see {command}")


_LATEST = re.compile(r"latest(?::(?P<branch>[^~]+))?(?:~(?P<back>\d+))?")


def _branch(store: Store, run: str) -> str:
    try:
        return store.run(run).branch
    except StoreError:
        return ""


def find_case(store: Store, what: str) -> tuple[Case, DivergenceRecord | None]:
    """Return the case that an id or a path names, and its finding if it has one.

    The id may be that of a note's case, which has no finding. The path may be a case file or a
    finding's file. Raises `StoreError` or `CaseError`.
    """
    path = Path(what)
    if path.suffix == ".json" or path.exists():
        try:
            return load(path), None
        except CaseError:
            if not _holds_finding(path):
                raise
        finding = load_finding(path)
        return finding.minimised or finding.case, finding
    try:
        finding = store.finding(what)
    except StoreError:
        noted = store.noted(what) if what else None
        if noted is None:
            raise
        return noted.case, None
    return finding.minimised or finding.case, finding


def _holds_finding(path: Path) -> bool:
    try:
        head = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    return isinstance(head, dict) and head.get("type") == "divergence"


def read_records(path: Path) -> Iterator[Record]:
    """Yield the records of one file."""
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            yield _decoder.decode(line)
        except msgspec.MsgspecError as error:
            if number == len(lines):  # no newline after it: the writer was killed
                return
            raise StoreError(f"{path}:{number}: {error}") from error


def write_finding(path: Path, finding: DivergenceRecord) -> None:
    """Write a finding's file, which `load_finding` reads. Raises `StoreError`."""
    write_whole(path, msgspec.json.format(_encoder.encode(finding), indent=1))
