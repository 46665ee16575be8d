"""Search for the fewest bugs that explain a divergence. It knows neither: items and a predicate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

__all__ = ["smallest"]

T = TypeVar("T")


def smallest(
    candidates: Iterable[Sequence[T]], explains: Callable[[tuple[T, ...]], bool]
) -> tuple[T, ...] | None:
    """Return the first candidate that explains, less all that it explains without; or None.

    The answer explains, and does not without any one of its items. `explains` is asked about each
    set once, a candidate when those before it do not explain, and never about the empty set. Beside
    the candidates, n items cost at most (n + 2) ** 2 questions; some 3 n, if a set always explains
    when a part of it does. Later items are left out first.
    """
    answers: dict[frozenset[T], bool] = {}

    def asked(chosen: tuple[T, ...]) -> bool:
        key = frozenset(chosen)
        if key not in answers:
            answers[key] = explains(chosen)
        return answers[key]

    found = next((chosen for chosen in map(tuple, candidates) if asked(chosen)), None)
    if found is None:
        return None
    size = len(found) // 2
    while size:
        before = found
        for start in reversed(range(0, len(found), size)):
            fewer = found[:start] + found[start + size :]
            if fewer and asked(fewer):
                found = fewer
        # An item may be needed only while another one is there: try those before it again.
        if size > 1 or found == before:
            size //= 2
    return found
