"""The least set of parts whose exemption is enough, by trial."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Generic, Literal, TypeAlias, TypeVar

__all__ = ["Found", "Proof", "least"]

T = TypeVar("T")

Proof: TypeAlias = Literal["least", "minimal", "unproven"]
"""least: every smaller set was tried. minimal: without any one of its parts it is not enough.
unproven: the time ended first."""


@dataclass(frozen=True, slots=True)
class Found(Generic[T]):
    """A set that is enough, how far that is proven, and how many sets were tried."""

    parts: frozenset[T]
    proof: Proof
    tried: int


def least(
    parts: Sequence[T],
    enough: Callable[[frozenset[T]], bool],
    cost: Callable[[T], float],
    deadline: float,
) -> Found[T] | None:
    """Return the smallest set of parts that is enough; of several the one that costs least.

    All sets of one size are tried while the time allows, from the empty set up. Otherwise delta
    debugging follows, from the parts that come first. parts: the most suspicious first. deadline:
    of `time.monotonic`; when it is over, nothing is tried but all parts together. None: those are
    not enough.
    """
    known: dict[frozenset[T], bool] = {}

    def good(some: frozenset[T]) -> bool:
        if some not in known:
            known[some] = enough(some)
        return known[some]

    start = time.monotonic()
    if not good(frozenset(parts)):
        return None
    each = time.monotonic() - start
    for size in range(len(parts) + 1):
        needed = math.comb(len(parts), size) * each
        if size > 1 and needed > (deadline - time.monotonic()) / 2:
            break
        found = []
        for some in map(frozenset, combinations(parts, size)):
            if time.monotonic() >= deadline:
                break
            if good(some):
                found.append(some)
        if found:
            best = min(found, key=lambda some: sum(map(cost, some)))
            return Found(best, "least", len(known))
        each = max(each, (time.monotonic() - start) / len(known))
    return _reduced(parts, good, cost, deadline, known)


def _reduced(
    parts: Sequence[T],
    good: Callable[[frozenset[T]], bool],
    cost: Callable[[T], float],
    deadline: float,
    known: dict[frozenset[T], bool],
) -> Found[T]:
    """Return a set from which no part can be left out."""
    low, high = 0, len(parts)  # the first `high` parts are enough
    while high - low > 1 and time.monotonic() < deadline:
        middle = (low + high) // 2
        if good(frozenset(parts[:middle])):
            high = middle
        else:
            low = middle
    some, size = frozenset(parts[:high]), max(high // 2, 1)
    while time.monotonic() < deadline:
        order = sorted(some, key=lambda part: (-cost(part), -parts.index(part)))
        for i in range(0, len(order), size):
            fewer = some - frozenset(order[i : i + size])
            if len(fewer) < len(some) and time.monotonic() < deadline and good(fewer):
                some = fewer
        if size == 1:
            if all(known.get(some - {part}) is False for part in some):
                return Found(some, "minimal", len(known))
        else:
            size //= 2
    return Found(some, "unproven", len(known))
