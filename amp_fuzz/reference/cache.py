"""The cache for casts of weights: one for the process, as torch's is."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from amp_fuzz.reference import dispatch

if TYPE_CHECKING:
    from amp_fuzz.reference.state import State

__all__ = ["cast_of", "clear_cache", "own_cache", "size"]

# Key -> (the leaf, weakly; its cast). The weak reference guards against a new tensor that takes the
# id of a dead one.
_cache: dict[Hashable, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}
_lock = threading.Lock()


def cast_of(tensor: torch.Tensor, to: torch.dtype, state: State) -> torch.Tensor:
    """Return the cached cast of a weight, making it first if need be.

    It is not made anew when the weight was updated in place inside the outermost context. A cast
    that is made below autograd is not kept: no gradient can flow through it.
    """
    key = state.semantics.cache_key(tensor, to)
    with _lock:
        entry = _cache.get(key)
        if entry is not None and entry[0]() is tensor and state.semantics.serves(tensor, entry[1]):
            return entry[1]
        made = state.semantics.cached_cast(tensor, to)
        if not dispatch.is_below_autograd() or state.semantics.keeps_below():
            _cache[key] = (weakref.ref(tensor), made)
        return made


def clear_cache() -> None:
    """Forget every cached cast, in every thread."""
    with _lock:
        _cache.clear()


def size() -> int:
    """Return how many casts are kept."""
    return len(_cache)


@contextmanager
def own_cache() -> Iterator[None]:
    """Run a block with a weight cache of its own: it sees no earlier cast and leaves none."""
    with _lock:
        before = dict(_cache)
        _cache.clear()
    try:
        yield
    finally:
        with _lock:
            _cache.clear()
            _cache.update(before)
