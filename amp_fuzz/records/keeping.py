"""Runs from other stores, and runs that are no longer needed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from amp_fuzz.records.outputs import StoreError
from amp_fuzz.records.schema import DivergenceRecord
from amp_fuzz.records.store import Store, backend_name, held, load_finding

__all__ = ["Merged", "Pruned", "merge", "prune", "untouchable"]


@dataclass(frozen=True, slots=True)
class Merged:
    """What was merged. findings: their names here, which `Store.name_of` gives.

    same: how many runs and findings were here already, and equal. skipped: a line for each of the
    others that was left alone, with the reason.
    """

    runs: tuple[str, ...]
    findings: tuple[str, ...]
    same: int
    skipped: tuple[str, ...]


def merge(store: Store, others: Sequence[Store]) -> Merged:
    """Copy the runs and findings of other stores into one.

    A finding that differs from the one of its case and backend here, as on another machine, is left
    alone. The answer of `amp-fuzz bisect` is copied with its finding, if there is none here. Raises
    `StoreError`, before anything is copied: a folder is no store, or a run has other content here
    than there. If the disk is full, no run or finding is copied in part.
    """
    runs: dict[str, Store] = {}
    skipped: list[str] = []
    differ, same = [], 0
    for other in others:
        if not (other.root / "runs").is_dir() and not (other.root / "findings").is_dir():
            raise StoreError(f"{other.place}: not a store: it has neither runs/ nor findings/")
        for run in other.runs():
            if (reason := untouchable(other, run)) is not None:
                skipped.append(reason)
                continue
            here = runs.get(run) or (store if (store.run_path(run) / "run.json").exists() else None)
            if here is None:
                runs[run] = other
            elif _same_run(here, other, run):
                same += 1
            else:
                differ.append(f"run {run} of {other.place} is not the one of {here.place}")
    if differ:
        more = f" (and {len(differ) - 1} more)" if len(differ) > 1 else ""
        raise StoreError(
            f"{differ[0]}{more}: nothing was merged: remove one of the two, or keep both stores"
        )
    findings, ranges, equal = _new_findings(store, others, skipped)
    store.create()
    with _spare(store, "merging") as spare:
        for run, other in runs.items():
            shutil.copytree(
                other.folder(run), spare / run, ignore=shutil.ignore_patterns("running-*.lock")
            )
            (spare / run).rename(store.run_path(run))
        for name, path in findings.items():
            shutil.copy2(path, spare / name)
            (spare / name).rename(store.root / "findings" / f"{name}.json")
        for found, words in ranges:
            if words and not store.range_of(found):
                store.keep_range(found, words)
    return Merged(tuple(runs), tuple(findings), same + equal, tuple(skipped))


def _new_findings(
    store: Store, others: Sequence[Store], skipped: list[str]
) -> tuple[dict[str, Path], list[tuple[DivergenceRecord, str]], int]:
    """Return the findings to copy, by their names here, and how many are here already and equal.

    Between the two: the ranges of all these. skipped: gets a line for each that is left alone.
    """
    here: dict[tuple[str, str], Path] = {}
    for path in _finding_files(store):
        with suppress(StoreError):  # damaged; its name is taken
            found = load_finding(path)
            here[found.backend, found.id] = path
    names, new, ranges, same = set(store.findings()), {}, [], 0
    for source, path in ((o, path) for o in others for path in _finding_files(o)):
        try:
            found = load_finding(path)
        except StoreError as error:
            skipped.append(str(error))
            continue
        own = here.setdefault((found.backend, found.id), path)
        if own == path:
            name = backend_name(found) if found.id in names else found.id
            names.add(name)
            new[name] = path
        elif load_finding(own) == found:
            same += 1
        else:
            skipped.append(f"{path}: differs from {own}, which stays")
            continue
        ranges.append((found, source.range_of(found)))
    return new, ranges, same


def _finding_files(store: Store) -> list[Path]:
    return sorted((store.root / "findings").glob("*.json"))


def _same_run(one: Store, other: Store, run: str) -> bool:
    """Return whether two runs have the same records, whether compacted or not."""
    if one.run(run) != other.run(run):
        return False
    files = [_files(s.folder(run)) for s in (one, other)]
    if files[0] == files[1] and all(
        (one.run_path(run) / f).read_bytes() == (other.run_path(run) / f).read_bytes()
        for f in files[0]
    ):
        return True
    pairs = zip_longest(one.records(run), other.records(run))
    return all(mine == its for mine, its in pairs)


def _files(folder: Path) -> dict[Path, int]:
    """Return the files that hold records, with their sizes."""
    found = [*folder.glob("records-*.jsonl"), *folder.glob("tables-*/*/*.parquet")]
    return {p.relative_to(folder): p.stat().st_size for p in sorted(found)}


def untouchable(store: Store, run: str) -> str | None:
    """Return why a run must be left alone, or None: it is running, newer, or damaged."""
    try:
        store.run(run)
        if (tables := store.tables(run)) is not None:
            tables.check()
    except StoreError as error:
        return str(error)
    return f"{store.named(run)}: running now" if store.is_running(run) else None


class Pruned(NamedTuple):
    """A run that was removed, when it started, and how many bytes it had."""

    run: str
    started: str
    size: int


def prune(
    store: Store,
    *,
    now: datetime,
    keep: int | None = None,
    older: timedelta | None = None,
    dry: bool = False,
) -> tuple[list[Pruned], list[str]]:
    """Remove runs; return them, and a line for each that was left alone, with the reason.

    keep: how many runs stay, the newest; those left alone do not count. older: how long ago a run
    must have started. With both, a run is removed only if both say so. dry: remove nothing.
    Findings stay, and so does a run that is running, damaged, or written by a newer amp-fuzz. The
    log of a sweep is removed with the last of its runs. Raises `StoreError`.
    """
    removed: list[Pruned] = []
    left: list[str] = []
    stay = keep or 0
    for run in reversed(store.runs()):
        if (reason := untouchable(store, run)) is not None:
            left += [reason] * (stay == 0)
            continue
        if stay:
            stay -= 1
            continue
        started = store.run(run).started
        if older is not None:
            try:
                if now - datetime.fromisoformat(started) < older:
                    continue
            except (ValueError, TypeError):  # no date, or one without a zone
                left.append(f"{store.run_path(run)}: started {started!r}, which is no time")
                continue
        removed.append(Pruned(run, started, _bytes(store.run_path(run))))
    removed.reverse()
    left.reverse()
    if dry:
        return removed, left
    with _spare(store, "removing") as spare, ExitStack() as locks:
        for run, *_ in removed:
            locks.enter_context(store.alone(run))
            store.run_path(run).rename(spare / run)
        _remove_sweeps(store, spare)
    return removed, left


def _remove_sweeps(store: Store, spare: Path) -> None:
    """Remove the log and the outputs of each sweep that has no runs and is not running."""
    runs = store.runs()
    for log in (store.root / "sweeps").glob("*.jsonl"):
        folder = log.with_suffix("")
        if any(run.startswith(f"{log.stem}-") for run in runs) or held(folder / "running.lock"):
            continue
        if folder.is_dir():
            folder.rename(spare / log.name)
        log.unlink()


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@contextmanager
def _spare(store: Store, name: str) -> Iterator[Path]:
    """Give a folder of the store that is removed afterwards, with what a kill has left of others.

    What is renamed into it, or out of it, is whole at any moment. Raises `StoreError`.
    """
    folder = store.root / f".{name}-{os.getpid()}"
    try:
        for old in store.root.glob(f".{name}-*"):
            if not _alive(old):
                shutil.rmtree(old)
        folder.mkdir(exist_ok=True)
        yield folder
    except OSError as error:
        said = error.strerror or _first(error)
        raise StoreError(
            f"{folder.parent}: cannot write ({said}): free some space, or make it writable"
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _alive(folder: Path) -> bool:
    """Return whether the process that made a folder still runs."""
    number = folder.name.rpartition("-")[2]
    with suppress(ProcessLookupError, OverflowError, ValueError):
        with suppress(PermissionError):
            os.kill(int(number), 0)
        return int(number) != os.getpid()
    return False


def _first(error: OSError) -> str:
    """Return the reason of the first file that `shutil.copytree` could not copy."""
    failed: Iterable[object] = error.args[0] if error.args else ()
    first = next(iter(failed), None) if isinstance(failed, list) else None
    return str(first[2]) if isinstance(first, tuple) and len(first) > 2 else str(error)
