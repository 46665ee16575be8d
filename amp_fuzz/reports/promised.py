"""How many cases of a run could have falsified each promise of torch's documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from amp_fuzz.records.facts import place, within_reach
from amp_fuzz.records.promises import Promise, promises

if TYPE_CHECKING:
    from amp_fuzz.reports.frames import RunData

__all__ = ["ENOUGH", "Promised", "Total", "promised", "totals"]

ENOUGH = 20
"""How many cases test a promise well: they miss a fault that one case in ten shows in 12 %."""


class Promised(NamedTuple):
    """A promise that a run could test, and by backend how many cases could have falsified it."""

    promise: Promise
    backends: Mapping[str, int]

    @property
    def cases(self) -> int:
        """The cases on all backends."""
        return sum(self.backends.values())


class Total(NamedTuple):
    """The promises of a document that a run could test: how many cases falsify how many of them."""

    document: str
    promises: int
    enough: int
    fewer: int
    none: int


def promised(data: RunData) -> tuple[Promised, ...]:
    """Return the promises about the backends that ran, in the order of the documents.

    Empty if the run is of an earlier amp-fuzz, which counted none.
    """
    if not data.promised:
        return ()
    ran = {str(name) for name in data.cases["backend"].unique()}
    places = [place(b.device, b.implements) for b in data.run.backends if b.name in ran]
    found: dict[str, dict[str, int]] = {}
    for (backend, name), cases in data.promised.items():
        found.setdefault(name, {})[backend] = cases
    return tuple(
        Promised(promise, found.get(promise.id, {}))
        for promise in promises().by_id.values()
        if promise.id in found or within_reach(promise, places)
    )


def totals(found: Sequence[Promised]) -> tuple[Total, ...]:
    """Return one row for each document with promises, and one for all."""
    rows = [
        _total(document.title, [p for p in found if p.promise.document == name])
        for name, document in promises().documents.items()
    ]
    return (*(row for row in rows if row.promises), _total("all", found))


def _total(name: str, found: Sequence[Promised]) -> Total:
    enough = sum(p.cases >= ENOUGH for p in found)
    none = sum(not p.cases for p in found)
    return Total(name, len(found), enough, len(found) - enough - none, none)
