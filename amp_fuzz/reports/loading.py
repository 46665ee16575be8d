"""Runs, stores and URLs as one DataFrame: `amp_fuzz.reports.load`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from amp_fuzz.config import is_url
from amp_fuzz.records.remote import opened
from amp_fuzz.records.rows import COLUMNS, TABLES, Table, rows
from amp_fuzz.records.store import Store, StoreError
from amp_fuzz.records.tables import Tables, require
from amp_fuzz.reports.frames import LAPS
from amp_fuzz.reports.sums import joined

__all__ = ["load"]

_ORDER: dict[Table, str] = {"cases": "row", "kernels": "case", "findings": "row"}
_LEFT_OUT = ("record", "promises")  # of cases: texts that would take most of the memory


def load(path: str | Path, table: Table = "cases") -> pd.DataFrame:
    """See `amp_fuzz.reports.load`."""
    if table not in TABLES:
        raise StoreError(f"table={table!r}: use {', '.join(TABLES)}")
    store, ids = _opened(path, table)
    frames = [store.steady(run, partial(_frames, store, run, table)) for run in ids]
    return joined([frame for own in frames for frame in own] or [_empty(table)])


def _opened(path: str | Path, table: Table) -> tuple[Store, list[str]]:
    """Return the store, and the runs to read."""
    folder, named = Path(path), str(path)
    if is_url(named):
        remote = opened(named, only=table)
        return remote, remote.runs()
    if (folder / "run.json").is_file():  # STORE/runs/ID
        folder = folder.resolve()
        if folder.parent.name != "runs":  # a copy elsewhere
            return _opened(f"file://{folder}", table)
        return Store(folder.parents[1]), [folder.name]
    if (folder / "runs").is_dir():
        return Store(folder), Store(folder).runs()
    raise StoreError(f"{named}: neither a run nor a store: it has no run.json and no runs/")


# -- a run ----------------------------------------------------------------------------------------


def _frames(store: Store, run: str, table: Table) -> list[pd.DataFrame]:
    """Return the rows of a run, in order, as one frame, if there are any."""
    store.run(run)
    tables = store.tables(run)
    if tables is not None and not store.fresh(run):
        parts = [part for path in tables.files[table] for part in _read(tables, path, table)]
    else:
        own = [row for t, row in rows(run, store.salvaged(run, []), store.found(run)) if t == table]
        parts = [_built(own, table)] if own else []
    if not parts:
        return []
    return [joined(parts).sort_values(_ORDER[table], kind="stable", ignore_index=True)]


def _read(tables: Tables, path: Path, table: Table) -> Iterator[pd.DataFrame]:
    columns = [name for name in COLUMNS[table] if table != "cases" or name not in _LEFT_OUT]
    for group in tables.groups(path, columns):
        if table != "cases":
            yield group.to_pandas()
            continue
        frame = group.drop_columns(["ops", "seconds"]).to_pandas()
        pa, _ = require(path)
        seconds, ops = group["seconds"].combine_chunks(), group["ops"].combine_chunks()
        texts = pa.ListArray.from_arrays(ops.offsets, ops.values.cast(pa.string()))
        frame["ops"] = pa.compute.binary_join(texts, ",").to_pandas()
        rows = np.repeat(np.arange(len(frame)), np.diff(seconds.offsets.to_numpy()))
        parts = seconds.keys.dictionary_encode()
        names = parts.dictionary.to_pylist()
        codes, spent = parts.indices.to_numpy(), seconds.items.to_numpy()
        yield _finished(frame, rows, names, codes, spent)


def _built(own: Sequence[tuple[Any, ...]], table: Table) -> pd.DataFrame:
    """Return the rows of JSON lines as `_read` returns those of Parquet."""
    columns = dict(zip(COLUMNS[table], zip(*own, strict=True), strict=True))
    seconds: Sequence[Any] = ()
    if table == "cases":
        for name in _LEFT_OUT:
            del columns[name]
        seconds = columns.pop("seconds")
        columns["ops"] = tuple(",".join(ops) for ops in columns["ops"])
    frame = pd.DataFrame({name: list(values) for name, values in columns.items()})
    words = [name for name, kind in COLUMNS[table].items() if kind == "word"]
    frame = frame.astype(dict.fromkeys(words, "category"))
    if table != "cases":
        return frame
    rows = np.repeat(np.arange(len(frame)), [len(spent) for spent in seconds])
    flat = list(chain.from_iterable(seconds))
    names = list(dict.fromkeys(part for part, _ in flat))
    codes = np.array([names.index(part) for part, _ in flat], dtype=np.int64)
    return _finished(frame, rows, names, codes, np.array([spent for _, spent in flat], dtype=float))


def _finished(
    frame: pd.DataFrame, rows: Any, names: Sequence[str], codes: Any, spent: Any
) -> pd.DataFrame:
    """Return cases with their seconds: in all, and by part where it ran."""
    frame["notes"] = frame["notes"].astype(object).where(frame["notes"].notna(), "")
    frame["notes"] = frame["notes"].astype(frame["id"].dtype)
    frame["seconds"] = np.bincount(rows, weights=spent, minlength=len(frame)).astype(float)
    for part in dict.fromkeys([*LAPS, *names]):
        values = np.full(len(frame), np.nan)
        if part in names:
            of = codes == names.index(part)
            values[rows[of]] = spent[of]
        frame[f"seconds_{part}"] = values
    public = [name for name in COLUMNS["cases"] if name not in _LEFT_OUT]
    return frame[[*public, *(n for n in frame.columns if n.startswith("seconds_"))]]


def _empty(table: Table) -> pd.DataFrame:
    """Return the frame of a store without runs: all columns, no rows."""
    values = {
        "word": "", "string": "", "int64": 0, "bool": False, "double": 0.0,
        "list<string>": (), "map<string, double>": (),
    }  # fmt: skip
    return _built([tuple(values[kind] for kind in COLUMNS[table].values())], table).iloc[:0]
