"""``amp-fuzz compare``: two runs side by side."""

from __future__ import annotations

from typing import Any

import click

from amp_fuzz.interfaces.cli.common import (
    Exit,
    options,
    resolve_options,
    say,
    waiting,
)
from amp_fuzz.records.remote import store_at
from amp_fuzz.records.store import find_run

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

    A and B are ids of runs, latest, latest~1 (the one before), latest:main (of a branch), or paths
    or URLs: of a run's folder, or of a store, whose latest run it is. Without B, the latest run.

    A difference that chance explains is not listed. A cause that B did not meet is fixed if B
    judged its case again and both sides agreed; changed if its case is known now or diverges by
    another cause; gone if B drew enough cases to have met it; else not seen.

    Exit codes: 0, whatever differs; 1 if a condition of --fail-on holds; 5 if no backend ran in
    both.
    """
    from amp_fuzz import reports
    from amp_fuzz.reports import compare as core
    from amp_fuzz.reports.compare_text import render

    store = store_at(resolve_options(given).options.store)
    try:
        wanted = core.conditions(fail_on)
    except ValueError as error:
        raise click.UsageError(f"--fail-on: {error}") from error
    with waiting("reading"):
        sides = [reports.read(*find_run(store, name)) for name in (before, after)]
        found = core.compare(*sides)
    say("\n".join(render(found, *sides)))
    failed = list(core.failing(found, wanted))
    for line in failed:
        say(f"FAILED: {line}")
    if not found.backends:
        return Exit.NOTHING
    return Exit.DIVERGED if failed else Exit.OK
