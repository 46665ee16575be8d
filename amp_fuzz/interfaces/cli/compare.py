"""``amp-fuzz compare``: two runs side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from amp_fuzz.interfaces.cli.common import (
    Exit,
    find_run,
    options,
    resolve_options,
    say,
    table,
    waiting,
)
from amp_fuzz.records.store import Store

if TYPE_CHECKING:
    from collections.abc import Iterator

    from amp_fuzz.reports.compare import Change, Comparison, Speed

__all__ = ["compare"]


@click.command(short_help="Compare two runs: what is new, gone, slower.")
@click.argument("before", metavar="A")
@click.argument("after", metavar="[B]", default="latest")
@click.option(
    "--fail-on",
    metavar="CONDITION,...",
    default="",
    help="Exit with 1 if one holds: new (a cause that only B met), more (a cause met more often), "
    "slower:PERCENT (cases a second), fewer-kernels (autocast kernels reached). A backend that "
    "ran in A and not in B fails it too.",
)
@options("store")
def compare(before: str, after: str, fail_on: str, **given: Any) -> int:
    """Compare two runs: causes that are new, gone, or met more or less often, and the speed.

    A and B are ids of runs, latest, latest~1 (the one before), or paths: of a run's folder, or of a
    store, whose latest run it is. Without B, the latest run.

    A difference that chance explains is not listed. A cause that B did not meet is fixed if B
    judged its case again and both sides agreed; changed if its case is known now or diverges by
    another cause; gone if B drew enough cases to have met it; else not seen.

    Exit codes: 0, whatever differs; 1 if a condition of --fail-on holds; 5 if no backend ran in
    both.
    """
    from amp_fuzz import reports
    from amp_fuzz.reports import compare as core

    store = Store(resolve_options(given).options.store)
    try:
        wanted = core.conditions(fail_on)
    except ValueError as error:
        raise click.UsageError(f"--fail-on: {error}") from error
    with waiting("reading"):
        sides = [reports.read(*find_run(store, name)) for name in (before, after)]
        found = core.compare(*sides)
    say(f"A {_head(sides[0])}")
    say(f"B {_head(sides[1])}")
    for line in _lines(found):
        say(line)
    failed = list(core.failing(found, wanted))
    for line in failed:
        say(f"FAILED: {line}")
    if not found.backends:
        return Exit.NOTHING
    return Exit.DIVERGED if failed else Exit.OK


def _head(report: Any) -> str:
    run = report.data.run
    torch = run.versions.get("torch", "?")
    cases = f"{report.view.cases:,} case{'s' * (report.view.cases != 1)}"
    ended = "" if report.data.state == "ended" else ", did not end"
    return f"{run.id}: torch {torch}, seed {run.seed}, {cases}{ended}"


def _lines(found: Comparison) -> Iterator[str]:
    if found.differ:
        yield "\nthe runs differ in"
        yield from (f"  {line}" for line in found.differ)
    for side, names in (("A", found.missing), ("B", found.added)):
        if names:
            yield f"\nonly in {side}: {', '.join(names)}"
    if not found.backends:
        yield "\nno backend ran in both"
        return
    say()
    table(
        ("backend", "cases", "cases/s", "kernels reached"),
        [_speed(speed) for speed in found.backends],
    )
    for known, what in ((False, "causes"), (True, "known bugs")):
        changes = [change for change in found.changes if change.known == known]
        yield f"\n{what}:{'' if changes else ' nothing changed'}"
        for change in changes:
            yield from _change(change)


def _speed(speed: Speed) -> tuple[str, ...]:
    before, after = speed.rates
    ratio = f" ({after / before:.2f} x)" if before and after else ""
    return (
        speed.backend,
        f"{speed.cases[0]:,} -> {speed.cases[1]:,}",
        f"{before:.1f} -> {after:.1f}{ratio}",
        f"{speed.reached[0]} -> {speed.reached[1]}",
    )


def _change(change: Change) -> Iterator[str]:
    was, now = change.before, change.after
    counts = f"{was:,} of {change.of_before:,} -> {now:,} of {change.of_after:,} cases"
    name = f"{change.id} on {change.backend}" if change.known else f"{change.title} [{change.id}]"
    yield f"  {change.state}: {name}: {counts}"
    if change.known:
        yield f"    {change.title}"
    elif change.replay:
        yield f"    {change.replay}"
