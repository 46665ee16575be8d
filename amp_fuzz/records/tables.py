"""A run as Parquet: three tables, a file for each backend. docs/reference/store.md documents them.

pyarrow is optional (``pip install 'amp-fuzz[parquet]'``) and imported only when a table is opened.
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from operator import itemgetter
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import quote

import msgspec

from amp_fuzz.records.outputs import StoreError
from amp_fuzz.records.rows import ABSENT, COLUMNS, TABLES, Table, restored
from amp_fuzz.records.schema import (
    CaseRecord,
    DamageRecord,
    DivergenceRecord,
    EndRecord,
    IncidentRecord,
    KernelRecord,
    NoteRecord,
    Record,
)

__all__ = ["TABLES_FORMAT", "Tables", "require", "write"]

TABLES_FORMAT = 1
"""The version of the tables, in the metadata of each file."""
_FORMAT = b"amp_fuzz.tables"
_GROUP = 1 << 17  # rows of a row group: a writer holds so many for each file, as Arrow arrays
_BATCH = 1 << 12  # rows that a reader or writer has as Python objects at once

_decoder = msgspec.json.Decoder(
    DivergenceRecord | NoteRecord | IncidentRecord | EndRecord | DamageRecord
)


def require(path: Path | str) -> tuple[ModuleType, ModuleType]:
    """Return pyarrow and its Parquet part. Raises `StoreError`, naming the path, without it."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise StoreError(
            f"{path}: Parquet needs pyarrow ({error}): pip install 'amp-fuzz[parquet]'"
        ) from error
    return pyarrow, pyarrow.parquet


def _schema(pa: ModuleType, table: Table) -> Any:
    types = {
        "word": pa.string(),
        "string": pa.string(),
        "int64": pa.int64(),
        "bool": pa.bool_(),
        "double": pa.float64(),
        "list<string>": pa.list_(pa.string()),
        "map<string, double>": pa.map_(pa.string(), pa.float64()),
    }
    fields = [(name, types[kind]) for name, kind in COLUMNS[table].items()]
    return pa.schema(fields, metadata={_FORMAT: str(TABLES_FORMAT)})


def _lists(table: Table) -> list[str]:
    """Return the paths of the elements of lists, which are few different words too."""
    return [f"{n}.list.element" for n, kind in COLUMNS[table].items() if kind == "list<string>"]


# -- writing --------------------------------------------------------------------------------------


class _File:
    """A Parquet file that is being written, a row group at a time."""

    def __init__(self, path: Path, table: Table) -> None:
        self.pa, parquet = require(path)
        self.schema = _schema(self.pa, table)
        path.parent.mkdir(parents=True, exist_ok=True)
        words = [name for name, kind in COLUMNS[table].items() if kind == "word"]
        self.file = path.open("wb")
        self.writer = parquet.ParquetWriter(
            self.file,
            self.schema,
            compression="zstd",
            use_dictionary=[*words, *_lists(table), "seconds.key_value.key"],
        )
        self.rows: list[tuple[object, ...]] = []
        self.batches: list[Any] = []
        self.count = 0

    def add(self, row: tuple[object, ...]) -> None:
        self.rows.append(row)
        self.count += 1
        if len(self.rows) == _BATCH:
            self.pack()
            if len(self.batches) * _BATCH == _GROUP:
                self.write()

    def pack(self) -> None:
        if self.rows:
            columns = zip(self.schema, zip(*self.rows, strict=True), strict=True)
            arrays = [self.pa.array(values, field.type) for field, values in columns]
            self.batches.append(self.pa.record_batch(arrays, schema=self.schema))
            self.rows.clear()

    def write(self) -> None:
        if self.batches:
            self.writer.write_table(self.pa.Table.from_batches(self.batches), _GROUP)
            self.batches.clear()

    def abandon(self) -> None:
        """Close the file as it is, if it is open."""
        with suppress(Exception):
            self.writer.close()
        self.writer.is_open = False  # else it writes again when it is collected
        with suppress(OSError):
            self.file.close()

    def close(self) -> None:
        """End the file, and bring it to the disk."""
        self.pack()
        self.write()
        self.writer.close()
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()


def write(folder: Path, rows: Iterable[tuple[Table, tuple[object, ...]]]) -> dict[Path, int]:
    """Write tables to a new folder, and return the numbers of rows by file.

    Raises `StoreError`. Some files are then incomplete.
    """
    files: dict[Path, _File] = {}
    require(folder)
    try:
        folder.mkdir()
        with ExitStack() as opened:
            for table, row in rows:
                path = folder / table / f"{_name(str(row[1]))}.parquet"
                if (file := files.get(path)) is None:
                    file = files[path] = _File(path, table)
                    opened.callback(file.abandon)
                file.add(row)
            for file in files.values():
                file.close()
    except OSError as error:
        raise StoreError(
            f"{folder}: cannot write ({error.strerror or error}): free some space; the records "
            "are intact"
        ) from error
    return {path: file.count for path, file in files.items()}


def _name(backend: str) -> str:
    """Return the name of a backend's file. What is of no backend is in ``-``."""
    return quote(backend, safe="[]@+,") or "-"


# -- reading --------------------------------------------------------------------------------------


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    pa, _ = require(path)
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        said = " ".join(str(error).split())
        raise StoreError(
            f"{path}: cannot be read ({said}): restore the file from a copy"
        ) from error


class Tables:
    """The tables of a run. Raises `StoreError` for a file that cannot be read, or is newer."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[Table, list[Path]] = {
            table: sorted((folder / table).glob("*.parquet")) for table in TABLES
        }

    def open(self, path: Path, words: Iterable[str] = ()) -> Any:
        """Return an open file. words: columns to read as dictionaries. Raises `StoreError`."""
        _, parquet = require(path)
        with _reading(path):
            there = parquet.read_schema(path).names
            kept = [word for word in words if word.partition(".")[0] in there]
            file = parquet.ParquetFile(path, read_dictionary=kept)
        said = (file.schema_arrow.metadata or {}).get(_FORMAT, b"").decode()
        if not said.isdecimal():
            file.close()
            raise StoreError(f"{path}: not a table of amp-fuzz: move it elsewhere")
        if int(said) > TABLES_FORMAT:
            file.close()
            raise StoreError(f"{path}: written by a newer amp-fuzz: upgrade amp-fuzz")
        return file

    def check(self) -> None:
        """Raise `StoreError` unless all files are tables of this version or an earlier one."""
        for paths in self.files.values():
            for path in paths:
                self.open(path).close()

    def read(self, path: Path, columns: Iterable[str]) -> Any:
        """Return columns of a file as an Arrow table; words are dictionaries."""
        columns = list(columns)
        with _reading(path), self.open(path, self._words(path, columns)) as file:
            return self._whole(file.read(columns), columns).unify_dictionaries()

    def groups(self, path: Path, columns: Iterable[str]) -> Iterator[Any]:
        """Yield columns of a file as Arrow tables of one row group each; see `read`."""
        columns = list(columns)
        with _reading(path), self.open(path, self._words(path, columns)) as file:
            for number in range(file.num_row_groups):
                group = file.read_row_group(number, columns)
                yield self._whole(group, columns).unify_dictionaries()

    def _whole(self, table: Any, columns: Sequence[str]) -> Any:
        """Return a table in which a column that an earlier amp-fuzz did not write is constant."""
        for name in columns:
            if name in ABSENT and name not in table.column_names:
                pa, _ = require(self.folder)
                kind = _schema(pa, "cases").field(name).type
                values = pa.array([ABSENT[name]] * len(table), kind)
                word = COLUMNS["cases"][name] == "word"
                table = table.append_column(name, values.dictionary_encode() if word else values)
        return table.select(columns)

    def valid(self, column: str) -> Any:
        """Return the condition, for an Arrow table's `filter`, that a column has a value."""
        require(self.folder)
        import pyarrow.compute

        return pyarrow.compute.field(column).is_valid()

    def _words(self, path: Path, columns: Iterable[str]) -> list[str]:
        table: Table = path.parent.name  # type: ignore[assignment]
        words = [name for name in columns if COLUMNS[table].get(name) == "word"]
        return words + [name for name in _lists(table) if name.partition(".")[0] in columns]

    def rows(self, path: Path, columns: Iterable[str] = ()) -> Iterator[dict[str, Any]]:
        """Yield the rows of a file."""
        with _reading(path), self.open(path) as file:
            for batch in file.iter_batches(_BATCH, columns=list(columns) or None):
                yield from batch.to_pylist()

    def count(self, path: Path) -> int:
        """Return how many rows a file has: read them all."""
        with _reading(path), self.open(path) as file:
            return sum(batch.num_rows for batch in file.iter_batches(_BATCH))

    def others(self) -> Iterator[Record | DamageRecord]:
        """Yield the records that are not of cases, in order."""
        yield from map(itemgetter(1), self._others())

    def records(self) -> Iterator[Record]:
        """Yield the records of the run, in order."""
        yield from (r for r in self.all_records() if not isinstance(r, DamageRecord))

    def all_records(self) -> Iterator[Record | DamageRecord]:
        """Yield the records of the run, in order, with those of lines that could not be read."""
        cases = (self._cases(path) for path in self.files["cases"])
        yield from map(itemgetter(1), heapq.merge(self._others(), *cases, key=itemgetter(0)))

    def _others(self) -> Iterator[tuple[int, Record | DamageRecord]]:
        own = (self.rows(path, ("row", "record")) for path in self.files["findings"])
        for row in heapq.merge(*own, key=itemgetter("row")):
            yield row["row"], _decoder.decode(row["record"])

    def _cases(self, path: Path) -> Iterator[tuple[int, CaseRecord]]:
        reached = self.folder / "kernels" / path.name  # if a case reached any
        kernels = self.rows(reached) if reached in self.files["kernels"] else iter(())
        kernel = next(kernels, None)
        for row in self.rows(path):
            own = []
            while kernel is not None and kernel["case"] == row["row"]:
                own.append(_kernel(kernel))  # in order, but where `record` has all
                kernel = next(kernels, None)
            if row["recorded"]:
                yield row["row"], restored(row, tuple(own))

    def note(self, identity: str) -> NoteRecord | None:
        """Return the first note whose case has this id or prefix."""
        hits = [
            (row["row"], row["record"])
            for path in self.files["findings"]
            for row in self.rows(path, ("row", "type", "id", "record"))
            if row["type"] == "note" and row["id"].startswith(identity)
        ]
        record = _decoder.decode(min(hits)[1]) if hits else None
        return record if isinstance(record, NoteRecord) else None


def _kernel(row: dict[str, Any]) -> KernelRecord:
    return KernelRecord(row["op"], row["policy"], row["dtypes"], row["calls"])
