"""All bugs that the reference can imitate, and how some of them are imitated for a block."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from functools import cache

from amp_fuzz.backends import imitation
from amp_fuzz.backends.imitation import Composed, Imitation, compose
from amp_fuzz.upstream import elsewhere
from amp_fuzz.upstream.compile import backward
from amp_fuzz.upstream.export import composites
from amp_fuzz.upstream.torch import cache as weight_cache
from amp_fuzz.upstream.torch import functions, promote, queries, transforms
from amp_fuzz.upstream.torchax import autocast as torchax

__all__ = ["IMITATIONS", "QUIRKS", "composed", "quirks"]

IMITATIONS: Mapping[str, Imitation] = {
    **weight_cache.IMITATIONS,
    **promote.IMITATIONS,
    **queries.IMITATIONS,
    **functions.IMITATIONS,
    **transforms.IMITATIONS,
    **backward.IMITATIONS,
    **composites.IMITATIONS,
}
"""By id, those that are values."""

imitation.KNOWN.update(IMITATIONS)

QUIRKS = tuple(sorted({*IMITATIONS, *elsewhere.NAMES}))
"""The ids of the bugs."""


@cache
def composed(names: frozenset[str]) -> Composed:
    """Return these bugs as one imitation."""
    parts = {name: made for name, made in IMITATIONS.items() if name in names}
    if rules := torchax.RULES & names:
        parts["torchax"] = torchax.imitation(rules)
    return compose(parts, names=names, by=f"{__name__}:composed")


def quirks(names: Iterable[str]) -> AbstractContextManager[None]:
    """Imitate known upstream bugs for a block. Raises `ValueError` for an unknown one."""
    names = frozenset(names)
    if unknown := names - set(QUIRKS):
        raise ValueError(f"quirks={sorted(unknown)!r} are unknown: use {', '.join(QUIRKS)}")
    return imitation.imitating(composed(names))
