"""What a fault is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

__all__ = ["Fault", "patched"]


@dataclass(frozen=True, slots=True)
class Fault:
    """One way in which autocast could be wrong.

    what: one line, what torch does under it. kinds: the kinds of divergence that it may be found
    as; empty is any. corrupt: returns the context in which torch is wrong. op: the overload that is
    corrupted, if it is one. equivalent: why no program can notice it, for those few.
    """

    name: str
    what: str
    kinds: tuple[str, ...]
    corrupt: Callable[[], AbstractContextManager[Any]]
    op: str = ""
    equivalent: str = ""


@contextmanager
def patched(owner: Any, **names: Any) -> Iterator[None]:
    """Set attributes of a class or module for a block."""
    before = {name: getattr(owner, name) for name in names}
    try:
        for name, value in names.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)
