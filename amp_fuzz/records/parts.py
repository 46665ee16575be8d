"""A run in an object store: how its records get there, and which of its files count.

The JSON lines of a run are sent in parts, ``records-LABEL.MARK.OFFSET.jsonl``: the whole lines of
``records-LABEL.jsonl`` from a byte offset on. Each process that writes a run has a mark, and an
index, ``index-MARK.json``, which lists the files that it continues.

**A run consists of the files that its last index lists, and of the parts with the mark of that
index.** Writing an index is therefore the one moment at which a run passes from one process to
another, or from lines to tables. A process that was given up for dead and still sends parts sends
them under an earlier mark: nobody reads them, and it finds the later index and stops. No lock is
needed, and no clock is compared. A run without an index, as `aws s3 cp` makes it of a folder,
consists of all its files.
"""

from __future__ import annotations

import re
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from amp_fuzz.records.objects import Gone, Objects, Stat
from amp_fuzz.records.outputs import StoreError

__all__ = ["Files", "Index", "Shipper", "Superseded", "files_of", "pass_on", "records_in"]

_FORMAT = 1
_INDEX = re.compile(r"index-(?P<mark>(?P<number>\d{4,})-[0-9a-f]{8})\.json")
_PART = re.compile(
    r"(?P<label>records-.+)\.(?P<mark>\d{4,}-[0-9a-f]{8})\.(?P<offset>\d{12})\.jsonl"
)
_RECORDS = re.compile(r"records-[^/]+\.jsonl|tables-\d+/[^/]+/[^/]+\.parquet|damaged-\d+\.jsonl")
_ABOUT = ("run.json", "summary.json")

_LARGEST = 64 * 2**20  # bytes of a part: it is sent from memory
_TRIES = 5  # to list a run that passes to another process meanwhile
_ALIVE = 300.0  # seconds after which a run is not running whose process said nothing


class Index(msgspec.Struct, frozen=True):
    """The files that a process continues.

    at: when the process last said that it runs, in seconds since the epoch. ended: that it ended.
    """

    files: tuple[str, ...]
    at: float
    ended: bool = False
    format: int = _FORMAT


class Superseded(StoreError):
    """Another process continues the run."""


@dataclass(frozen=True, slots=True)
class Files:
    """The files of a run that count, by their names in its folder, with its last index.

    parts: those of them that were sent under the mark of the index. mark: "" without an index.
    """

    stats: Mapping[str, Stat]
    parts: Mapping[str, Stat]
    mark: str = ""
    index: Index | None = None

    @property
    def running(self) -> bool:
        """Whether some process said lately that it runs the run."""
        return (
            self.index is not None and not self.index.ended and time.time() - self.index.at < _ALIVE
        )


def files_of(objects: Objects, folder: str) -> Files:
    """Return the files of a run that count now. Raises `StoreError`."""
    for _ in range(_TRIES):
        listed = {
            name.removeprefix(f"{folder}/") if folder else name: stat
            for name, stat in objects.names(folder).items()
        }
        about = {name: listed[name] for name in _ABOUT if name in listed}
        mark = _last(listed)
        if not mark:
            own = {name: stat for name, stat in listed.items() if _RECORDS.fullmatch(name)}
            return Files(about | own, {})
        path = _in(folder, f"index-{mark}.json")
        with suppress(Gone):  # there is a later one by now
            index = _decoded(objects, path)
            parts = {name: stat for name, stat in listed.items() if _mark(name) == mark}
            lost = [name for name in index.files if name not in listed]
            if not lost:
                own = {name: listed[name] for name in index.files}
                return Files(about | own | parts, parts, mark, index)
            if _last(objects.names(folder)) == mark:
                raise StoreError(f"{objects.url}/{path}: {lost[0]}, which it lists, is missing")
    raise StoreError(f"{objects.url}/{folder}: its files change all the time: try again")


def _decoded(objects: Objects, path: str) -> Index:
    try:
        index = msgspec.json.decode(objects.read(path), type=Index)
    except msgspec.MsgspecError as error:
        raise StoreError(
            f"{objects.url}/{path}: {error}: the index of the run is damaged"
        ) from error
    if index.format > _FORMAT:
        raise StoreError(f"{objects.url}/{path}: written by a newer amp-fuzz: upgrade amp-fuzz")
    return index


def _last(names: Iterable[str]) -> str:
    """Return the mark of the last index, or ""."""
    found = (_INDEX.fullmatch(name.rpartition("/")[2]) for name in names)
    marks = [(int(match["number"]), match["mark"]) for match in found if match]
    return max(marks, default=(0, ""))[1]


def _mark(name: str) -> str:
    match = _PART.fullmatch(name)
    return match["mark"] if match else ""


def _next(mark: str) -> str:
    return f"{int(mark.partition('-')[0] or 0) + 1:04d}-{secrets.token_hex(4)}"


def records_in(folder: Path) -> Iterator[str]:
    """Yield the names of the files of a run's folder that hold its records."""
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if _RECORDS.fullmatch(name):
            yield name


def pass_on(objects: Objects, folder: str, before: Files, here: Path) -> None:
    """Let a run consist of the files of a folder of this machine, in place of those of before.

    Raises `Superseded` if another process continues the run; it is then unchanged.
    """
    names = list(records_in(here))
    for name in names:
        if name not in before.stats:
            objects.put(_in(folder, name), here / name)
    if _last(objects.names(folder)) != before.mark:
        raise Superseded(f"{objects.url}/{folder}: another process continues it: it is unchanged")
    _say(objects, folder, _next(before.mark), Index(tuple(names), time.time(), ended=True))
    old = [name for name in before.stats if name not in names and name not in _ABOUT]
    objects.remove(_in(folder, name) for name in old)


def _in(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _say(objects: Objects, folder: str, mark: str, index: Index) -> None:
    objects.write(_in(folder, f"index-{mark}.json"), msgspec.json.encode(index))


class Shipper:
    """Sends what a run adds to its folder on this machine to an object store.

    folder: of the run in the store. here: its folder on this machine. kept: a file beside it that
    says under which mark the last process on this machine sent.
    """

    def __init__(self, objects: Objects, folder: str, here: Path, kept: Path) -> None:
        self.objects, self.folder, self.here, self.kept = objects, folder, here, kept
        self._sent: dict[str, int] = {}
        self._index = Index((), 0.0)
        self._mark = ""
        self._head = b""

    def begin(self) -> None:
        """Take the run over: bring its files here, and write an index.

        If an earlier process on this machine was the last that wrote the run, continue it: what it
        recorded and did not send is here, and will be sent.
        """
        found = files_of(self.objects, self.folder)
        if found.index is not None and self._kept() == found.mark:
            self._mark, self._index = found.mark, found.index
            for name in found.parts:
                part = _PART.fullmatch(name)
                assert part is not None
                # The last part may have been cut short: it is sent again, with what follows.
                file, offset = f"{part['label']}.jsonl", int(part["offset"])
                self._sent[file] = max(offset, self._sent.get(file, 0))
        else:
            self._fetch(found)
        self._beat(ended=False)
        self._alone()

    def _fetch(self, found: Files) -> None:
        files = tuple(name for name in found.stats if name not in _ABOUT)
        if found.index is None and files:
            raise StoreError(
                f"{self.objects.url}/{self.folder}: a copy of a run: no sweep can continue it there"
            )
        shutil.rmtree(self.here, ignore_errors=True)  # another machine ran these cases since
        self.here.mkdir(parents=True)
        names = {f"{self.folder}/{name}": stat for name, stat in found.stats.items()}
        self.objects.fetch(names, self.here.parents[self.folder.count("/")], names)
        self._mark, self._index = _next(found.mark), Index(files, 0.0)
        self.kept.write_text(self._mark)

    def _kept(self) -> str:
        with suppress(OSError):
            return self.kept.read_text()
        return ""

    def _beat(self, *, ended: bool) -> None:
        self._index = msgspec.structs.replace(self._index, at=time.time(), ended=ended)
        _say(self.objects, self.folder, self._mark, self._index)

    def _alone(self) -> None:
        """Raise `Superseded` if another process continues the run."""
        if _last(self.objects.names(self.folder)) != self._mark:
            raise Superseded(f"{self.objects.url}/{self.folder}: another process continues it")

    def ship(self, *, ended: bool = False) -> None:
        """Send the head of the run, and the whole lines that were added since.

        ended: the process of the run has ended. Raises `StoreError`; what was not sent then is sent
        by the next call. Raises `Superseded` if another process continues the run.
        """
        self._alone()
        head = self.here / "run.json"
        if head.is_file() and (text := head.read_bytes()) != self._head:
            self.objects.write(f"{self.folder}/run.json", text)
            self._head = text
        for path in sorted(self.here.glob("records-*.jsonl")):
            if not _PART.fullmatch(path.name):
                self._lines(path)
        if ended or time.time() - self._index.at > _ALIVE / 5:
            self._beat(ended=ended)

    def _lines(self, path: Path) -> None:
        with path.open("rb") as file:
            while True:
                at = self._sent.get(path.name, 0)
                file.seek(at)
                text = file.read(_LARGEST) + file.readline()
                whole = text[: text.rfind(b"\n") + 1]
                if not whole:
                    return
                name = f"{path.stem}.{self._mark}.{at:012d}.jsonl"
                self.objects.write(f"{self.folder}/{name}", whole)
                self._sent[path.name] = at + len(whole)
