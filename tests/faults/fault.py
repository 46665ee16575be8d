"""What a fault is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

__all__ = ["Fault", "NumericFault", "patched"]


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


@dataclass(frozen=True, slots=True)
class NumericFault(Fault):
    """One way in which a kernel, or what a compiler makes of it, could compute wrong values.

    mechanism: what kind of mistake it is. stage: where it is seeded, the first rung at which it
    acts. reached: the ops, as the dispatcher names them, of which a case must reach one for the
    fault to act; ``backward:`` before a name asks for it in a backward pass.
    """

    mechanism: str = ""
    stage: str = ""
    reached: tuple[str, ...] = ()


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
