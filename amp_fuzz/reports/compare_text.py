"""The comparison of two runs as lines for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from amp_fuzz.reports import Report
from amp_fuzz.reports.compare import Change, Comparison, Speed
from amp_fuzz.reports.printable import plural
from amp_fuzz.reports.text import layout

__all__ = ["render"]

_WIDTH = 200  # a row is never cut


def render(found: Comparison, before: Report, after: Report) -> Iterator[str]:
    """Yield the lines."""
    yield f"A {_head(before)}"
    yield f"B {_head(after)}"
    if found.differ:
        yield "\nthe runs differ in"
        yield from (f"  {line}" for line in found.differ)
    for side, names in (("A", found.missing), ("B", found.added)):
        if names:
            yield f"\nonly in {side}: {', '.join(names)}"
    if not found.backends:
        yield "\nno backend ran in both"
        return
    yield ""
    header = ("backend", "cases", "cases/s", "kernels reached")
    rows = [_speed(speed) for speed in found.backends]
    yield from layout(header, rows, _WIDTH, left=range(len(header)), drop=())
    own = [change for change in found.changes if change.own]
    sorts = {
        "causes": [change for change in found.changes if not (change.known or change.own)],
        **({"without autocast's doing": own} if own else {}),
        "known bugs": [change for change in found.changes if change.known],
    }
    for what, changes in sorts.items():
        yield f"\n{what}:{'' if changes else ' nothing changed'}"
        for change in changes:
            yield from _change(change)


def _head(report: Report) -> str:
    run = report.data.run
    torch = run.versions.get("torch", "?")
    cases = plural(report.view.cases, "case")
    ended = "" if report.data.state == "ended" else ", did not end"
    return f"{run.id}: torch {torch}, seed {run.seed}, {cases}{ended}"


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
