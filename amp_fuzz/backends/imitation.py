"""What the reference does otherwise while it imitates a bug: a value, and how several become one.

This module knows no bug. `amp_fuzz.upstream` has the bugs, and says which are imitated.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

from amp_fuzz import imitated
from amp_fuzz.reference import DOCUMENTED, Semantics, under

__all__ = ["KNOWN", "NOTHING", "Composed", "Imitation", "asking", "compose", "current", "imitating"]


def _same(semantics: Semantics) -> Semantics:
    return semantics


@dataclass(frozen=True, slots=True, kw_only=True)
class Imitation:
    """What the reference does otherwise while it imitates a bug.

    semantics: the rules of autocast as they are under the bug, from those without it.
    """

    semantics: Callable[[Semantics], Semantics] = _same

    def replaces(self) -> frozenset[str]:
        """Return the names of the rules that are others."""
        made = self.semantics(DOCUMENTED)
        names = (field.name for field in fields(Semantics))
        return frozenset(n for n in names if getattr(made, n) is not getattr(DOCUMENTED, n))


@dataclass(frozen=True, slots=True)
class Composed:
    """Several imitations as one. Another process makes it again, from the names.

    names: the ids of the bugs. by: ``module:function``, which composes imitations of such names.
    """

    names: frozenset[str]
    parts: Mapping[str, Imitation]
    semantics: Semantics
    by: str = ""

    def __reduce__(self) -> Any:
        return _again, (self.by, self.names)

    def without(self, name: str) -> Composed:
        """Return the same without one of the bugs."""
        return _again(self.by, self.names - {name})


def _again(by: str, names: frozenset[str]) -> Composed:
    module, _, function = by.partition(":")
    made: Composed = getattr(importlib.import_module(module), function)(names) if by else NOTHING
    return made


def compose(imitations: Mapping[str, Imitation], *, names: frozenset[str], by: str) -> Composed:
    """Return imitations as one: the later has the rules of the earlier where it changes none."""
    semantics = DOCUMENTED
    for imitation in imitations.values():
        semantics = imitation.semantics(semantics)
    return Composed(names, imitations, semantics, by)


KNOWN: dict[str, Imitation] = {}
"""The imitations that may be asked for, by the id of the bug: filled by who has them."""

NOTHING = compose({}, names=frozenset(), by="")
"""Autocast as documented, on a backend without bugs."""

_current = NOTHING
_listener: Callable[[Semantics], Semantics] = _same


def current() -> Composed:
    """Return what is being imitated, in every thread."""
    return _current


@contextmanager
def imitating(composed: Composed) -> Iterator[None]:
    """Imitate for a block; the rules of autocast are of this thread, see `reference.inherited`."""
    global _current
    before, _current = _current, composed
    try:
        with imitated.naming(composed.names), under(_listener(composed.semantics)):
            yield
    finally:
        _current = before


@contextmanager
def asking() -> Iterator[set[str]]:
    """Collect the bugs, of those in `KNOWN`, whose rules the reference asks for in a block.

    It does the same with one that it does not ask for as without it. With them come the names that
    are looked for in `imitated.active_quirks`.
    """
    global _listener
    asked: set[str] = set()
    names: dict[str, set[str]] = {}
    for name, imitation in KNOWN.items():
        for rule in imitation.replaces():
            names.setdefault(rule, set()).add(name)

    def noted(rule: Callable[..., Any], ids: set[str]) -> Callable[..., Any]:
        def asks(*args: Any, **kwargs: Any) -> Any:
            asked.update(ids)
            return rule(*args, **kwargs)

        return asks

    def listening(semantics: Semantics) -> Semantics:
        changes = {rule: noted(getattr(semantics, rule), ids) for rule, ids in names.items()}
        return replace(semantics, **changes)

    before, _listener = _listener, listening
    try:
        with imitated.asking(asked), under(listening(_current.semantics)):
            yield asked
    finally:
        _listener = before
