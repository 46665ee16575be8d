"""Turn the JSON lines of a run into Parquet, so that a kill at any moment loses nothing.

1. Claim the files: ``records-0.jsonl`` becomes ``records-0~N.jsonl``. Every reader still reads it;
   a run that goes on writes a new ``records-0.jsonl``.
2. Write the tables to a temporary folder, flush them to the disk, and read them back.
3. Rename the folder to ``tables-N``. From now on readers read it, and no longer files claimed for N
   or earlier.
4. Remove these files, and earlier tables.

A compaction that was killed before step 3 is done again by the next one; after it, only step 4 is.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from amp_fuzz.records.outputs import StoreError, write_whole
from amp_fuzz.records.rows import Table, rows
from amp_fuzz.records.store import Spoilt, Store
from amp_fuzz.records.tables import Tables, write

__all__ = ["Compacted", "compact"]


@dataclass(slots=True)
class Compacted:
    """What a compaction did. before, after: bytes on disk. counts: rows by table.

    torn: files whose last line was cut short, and dropped. damaged: the lines that could not be
    read; they are kept in `beside`. changed: whether there was something to compact.
    """

    before: int = 0
    after: int = 0
    counts: dict[Table, int] = field(default_factory=dict)
    torn: list[Path] = field(default_factory=list)
    damaged: list[Spoilt] = field(default_factory=list)
    beside: Path | None = None
    changed: bool = False


def compact(store: Store, run: str) -> Compacted:
    """Turn the JSON lines of a run, with the tables that it has, into tables.

    Raises `StoreError`: the run is missing, running, or written by a newer amp-fuzz; pyarrow is
    missing; the disk is full. The records are then intact.
    """
    store.run(run)
    folder = store.folder(run)
    with store.alone(run):
        try:
            done = _compact(store, run, folder)
            if done.changed:
                store.settle(run)
            return done
        except OSError as error:
            raise StoreError(
                f"{folder}: cannot compact ({error.strerror or error}): the records are intact"
            ) from error
        finally:
            shutil.rmtree(folder / _TEMPORARY, ignore_errors=True)


_TEMPORARY = ".tables"


def _compact(store: Store, run: str, folder: Path) -> Compacted:
    tables = store.tables(run)
    if tables is not None:
        tables.check()
    done = Compacted()
    if not store.fresh(run):
        _clean(folder, _number(tables))
        return done
    number = _claim(store, run, folder)
    shutil.rmtree(folder / _TEMPORARY, ignore_errors=True)  # of a compaction that was killed
    spoilt: list[Spoilt] = []
    counts = write(folder / _TEMPORARY, rows(run, store.salvaged(run, spoilt), store.found(run)))
    _verify(folder / _TEMPORARY, counts)
    for old in folder.glob("damaged-*.jsonl"):  # of a compaction that was killed
        if int(old.stem.partition("-")[2]) > _number(tables):
            old.unlink()
    for line in spoilt:
        if not line.number:
            raise StoreError(f"{line}: make the file readable; the records are intact")
    done.damaged = [line for line in spoilt if line.line.endswith(b"\n")]
    done.torn = [line.path for line in spoilt if not line.line.endswith(b"\n")]
    if done.damaged:
        done.beside = folder / f"damaged-{number}.jsonl"
        write_whole(done.beside, b"".join(line.line for line in done.damaged))
    done.before = _size(folder)
    for inside in (*(folder / _TEMPORARY).iterdir(), folder / _TEMPORARY):
        _sync(inside)
    (folder / _TEMPORARY).rename(folder / f"tables-{number}")
    _sync(folder)
    _clean(folder, number)
    for path, count in counts.items():
        table: Table = path.parent.name  # type: ignore[assignment]
        done.counts[table] = done.counts.get(table, 0) + count
    done.after, done.changed = _size(folder), True
    return done


def _number(tables: Tables | None) -> int:
    return int(tables.folder.name.partition("-")[2]) if tables is not None else 0


def _claim(store: Store, run: str, folder: Path) -> int:
    """Rename the files to compact, and return the number of the tables to write."""
    numbers = [_number(store.tables(run)), *_claimed(folder).values()]
    fresh = [path for path in store.lines(run) if "~" not in path.name]
    number = max(numbers) + bool(fresh)
    for path in fresh:
        path.rename(path.with_name(f"{path.stem}~{number}.jsonl"))
    _sync(folder)
    return number


def _claimed(folder: Path) -> dict[Path, int]:
    """Return the claimed files of a run with the numbers of their tables."""
    numbers = {p: p.stem.partition("~")[2] for p in folder.glob("records-*~*.jsonl")}
    return {path: int(number) for path, number in numbers.items() if number.isdecimal()}


def _verify(folder: Path, counts: dict[Path, int]) -> None:
    """Read the tables back. Raises `StoreError` unless they hold as many rows as were written."""
    tables = Tables(folder)
    for path, expected in counts.items():
        if (count := tables.count(path)) != expected:
            raise StoreError(
                f"{path}: has {count} rows of {expected}: the disk is damaged; the JSON lines are "
                "intact"
            )


def _clean(folder: Path, number: int) -> None:
    """Remove what is in the tables of this number: lines, and earlier tables."""
    for path, claimed in _claimed(folder).items():
        if claimed <= number:
            path.unlink()
    for earlier in range(1, number):
        shutil.rmtree(folder / f"tables-{earlier}", ignore_errors=True)


def _size(folder: Path) -> int:
    """Return how many bytes the records of a run have, as lines and as tables."""
    lines = sum(path.stat().st_size for path in folder.glob("records-*.jsonl"))
    return lines + sum(path.stat().st_size for path in folder.glob("tables-*/*/*.parquet"))


def _sync(folder: Path) -> None:
    """Bring renames in a folder to the disk, where the system can."""
    with suppress(OSError):
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)
