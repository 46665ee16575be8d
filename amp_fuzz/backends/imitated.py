"""Which upstream bugs the reference imitates now, by id, for what imitates them in its own module.

`amp_fuzz.backends.imitation` sets it. Imitations that are values of `amp_fuzz.upstream` ask nobody.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["active_quirks", "asking", "naming"]


class _Noting(frozenset[str]):
    """Names that note which names are looked for in them."""

    asked: set[str]

    @classmethod
    def of(cls, names: frozenset[str], asked: set[str]) -> _Noting:
        """Return such names, and note in a set what they are asked."""
        made = cls(names)
        made.asked = asked
        return made

    def __contains__(self, name: object) -> bool:
        self.asked.add(str(name))
        return super().__contains__(name)


_names: frozenset[str] = frozenset()


def active_quirks() -> frozenset[str]:
    """Return the ids of the bugs that are being imitated, in every thread."""
    return _names


@contextmanager
def naming(names: frozenset[str]) -> Iterator[None]:
    """Say for a block which bugs are imitated."""
    global _names
    before, _names = _names, names
    if isinstance(before, _Noting):
        _names = _Noting.of(names, before.asked)
    try:
        yield
    finally:
        _names = before


@contextmanager
def asking(asked: set[str]) -> Iterator[None]:
    """Collect the names that are looked for in `active_quirks` by ``in``."""
    global _names
    before, _names = _names, _Noting.of(_names, asked)
    try:
        yield
    finally:
        _names = before
