"""``amp-fuzz store``: make runs smaller, bring stores together, remove old runs."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from amp_fuzz.config import as_place, folder_of
from amp_fuzz.interfaces.cli.common import (
    Exit,
    command_line,
    options,
    resolve_options,
    say,
    waiting,
)
from amp_fuzz.records.remote import store_at
from amp_fuzz.records.store import Store, StoreError, find_run
from amp_fuzz.reports.printable import plural

if TYPE_CHECKING:
    from amp_fuzz.records.compaction import Compacted

__all__ = ["store"]


@click.group(short_help="Compact, merge and prune runs.")
def store() -> None:
    """Look after the runs of a store: make them smaller, bring stores together, remove old ones."""


@store.command(short_help="Turn the records of runs into Parquet.")
@click.argument("runs", nargs=-1, metavar="[RUN...]")
@options("store")
def compact(runs: tuple[str, ...], **given: Any) -> int:
    """Turn the records of runs into Parquet, by default of all runs that are not running.

    All commands read a compacted run as they did before, and much faster if it is large. RUN is an
    id, latest, latest~1, latest:main, or the path of a run's folder. Needs pyarrow: pip install
    'amp-fuzz[parquet]'. Nothing is lost if the command is killed: give it again.
    """
    from amp_fuzz.records.compaction import compact as core
    from amp_fuzz.records.tables import require

    own = store_at(_checked(given))
    ids = own.runs()
    chosen = [find_run(own, run) for run in runs] or [(own, run) for run in ids]
    if not chosen:
        _none(own)
        return Exit.OK
    require(own.place)
    changed = 0
    for at, run in chosen:
        try:
            with waiting(f"compacting {run}"):
                done = core(at, run)
        except StoreError as error:
            if runs or not _left_alone(at, run):
                raise
            say(f"left alone: {error}")
            continue
        changed += done.changed
        _said(run, done)
    if not changed:
        say("nothing to compact")
    say(f"a run's report: {command_line('report', chosen[-1][1], store=own.place)}")
    return Exit.OK


def _left_alone(own: Store, run: str) -> bool:
    """Return whether a run cannot be compacted for a reason of its own."""
    from amp_fuzz.records.keeping import untouchable

    return untouchable(own, run) is not None


def _said(run: str, done: Compacted) -> None:
    from amp_fuzz.records.rows import TABLES

    if done.changed:
        counts = [(table, done.counts.get(table, 0)) for table in TABLES]
        words = ", ".join(f"{n:,} {table if n != 1 else table[:-1]}" for table, n in counts)
        say(f"{run}: {words}: {_size(done.before)} -> {_size(done.after)}")
    for path in done.torn:
        say(f"  {path}: dropped a last line that was cut short")
    for line in done.damaged:
        say(f"  damaged: {line}")
    if done.beside is not None:
        say(f"  kept as it was: {plural(len(done.damaged), 'damaged line')} in {done.beside}")


@store.command(short_help="Copy the runs and findings of other stores.")
@click.argument("others", nargs=-1, required=True, metavar="FROM...")
@options("store")
def merge(others: tuple[str, ...], **given: Any) -> int:
    """Copy the runs and findings of other stores into this one. FROM is a folder or a URL.

    What is here already is skipped if it is equal. If a run differs from the one here, nothing is
    copied, and the command exits with 2. A finding that differs is left alone and named.
    """
    from amp_fuzz.records.keeping import merge as core

    own = Store(folder_of(_checked(given), "amp-fuzz store merge"))
    with waiting("reading"):
        sources = [store_at(as_place(other)) for other in others]
    for source in sources:
        if not source.root.is_dir():
            raise StoreError(f"{source.root}: no such folder: give the folder of a store")
    with waiting("merging"):
        done = core(own, [s for s in sources if not _same(s.root, own.root)])
    for line in done.skipped:
        say(f"left alone: {line}")
    say(
        f"{own.root}: {plural(len(done.runs), 'run')} and {plural(len(done.findings), 'finding')} "
        f"copied; {done.same} here already"
    )
    say(f"see them: {command_line('list', store=own.place)}")
    return Exit.OK


def _same(one: Path, other: Path) -> bool:
    return one.resolve() == other.resolve()


def _age(_: click.Context, __: click.Parameter, value: str | None) -> timedelta | None:
    if value is None:
        return None
    match = re.fullmatch(r"(\d{1,5})([hdw])", value)
    if match is None:
        raise click.BadParameter(f"{value!r} is not an age: write it like 12h, 30d or 8w")
    return timedelta(hours=int(match[1]) * {"h": 1, "d": 24, "w": 168}[match[2]])


@store.command(short_help="Remove old runs.")
@click.option("--keep", type=click.IntRange(0), metavar="N", help="Keep the newest N runs.")
@click.option(
    "--older-than", "older", callback=_age, metavar="AGE", help="Remove only runs of before 30d."
)
@click.option("--dry-run", is_flag=True, help="Say what would be removed, and remove nothing.")
@options("store")
def prune(keep: int | None, older: timedelta | None, dry_run: bool, **given: Any) -> int:
    """Remove runs: all but the newest N, or those of before an age, or those that are both.

    A run that is running, damaged, or written by a newer amp-fuzz stays beside these N. So do all
    findings.
    """
    from amp_fuzz.records.keeping import prune as core

    if keep is None and older is None:
        raise click.UsageError("say which runs: --keep=N, --older-than=30d, or both")
    own = Store(folder_of(_checked(given), "amp-fuzz store prune"))
    if not own.runs():
        _none(own)
        return Exit.OK
    removed, left = core(own, now=datetime.now(UTC), keep=keep, older=older, dry=dry_run)
    for run in removed:
        say(f"{'would remove' if dry_run else 'removed'} {run.run}: {_size(run.size)}")
    for line in left:
        say(f"left alone: {line}")
    total = sum(run.size for run in removed)
    stay = len(own.runs()) - (len(removed) if dry_run else 0)
    verb = "would be removed" if dry_run else "removed"
    say(f"{plural(len(removed), 'run')} {verb}, {_size(total)}; {plural(stay, 'run')} left")
    return Exit.OK


def _checked(given: dict[str, Any]) -> Path | str:
    place = resolve_options(given).options.store
    if isinstance(place, Path) and place.exists() and not place.is_dir():
        raise StoreError(f"{place}: not a folder: give another with --store")
    return place


def _none(own: Store) -> None:
    say(f"no runs in {own.place} yet; start one: {command_line('run', store=own.place)}")


def _size(count: int) -> str:
    """Return a number of bytes as people read it: ``512 B``, ``9.4 kB``, ``1.2 MB``."""
    if count < 1000:
        return f"{count} B"
    step = next((n for n in (1, 2) if count < 999.5 * 1000**n), 3)
    value, unit = count / 1000**step, ("kB", "MB", "GB")[step - 1]
    return f"{value:.1f} {unit}" if value < 99.95 else f"{value:.0f} {unit}"
