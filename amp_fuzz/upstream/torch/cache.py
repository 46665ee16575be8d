"""What torch does with the cache for casts of weights.

Each bug has a page of its own name in docs/findings/.

cache-ignores-dtype: under nested contexts of two dtypes the inner one uses the outer one's cast of
    a weight. The cache is keyed by the weight alone.
cache-ignores-grad-mode: a cast made under ``no_grad`` or ``inference_mode`` is cached as it is, and
    no gradient flows through it in a later pass that trains
    (https://github.com/pytorch/pytorch/issues/112583).
custom-op-weight-cache: a weight's cast that is made in the body of a custom op, where it has no
    history, stays in the cache. A weight that is used after the op loses its gradient.
backward-thread-cache: the cache flag and the nesting depth belong to a thread, and autograd carries
    neither. In the thread that runs the backward pass of an accelerator's tensors the cache is on,
    whatever ``cache_enabled`` says. A context that is entered there is an outermost one: leaving it
    clears the cache.
"""

from __future__ import annotations

import threading
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from amp_fuzz.backends.imitation import Imitation
from amp_fuzz.reference.casts import cacheable
from amp_fuzz.reference.semantics import Semantics
from amp_fuzz.reference.state import State

__all__ = ["IMITATIONS"]


class _Own(threading.local):
    cache_enabled = True
    nesting = 0


_own = _Own()


class _Behind(State):
    """A state in a thread of autograd's, where torch has another cache flag and nesting depth."""

    def __init__(self, state: State) -> None:
        object.__setattr__(self, "_whole", state)

    def __getattr__(self, name: str) -> Any:
        return getattr(_own if hasattr(_Own, name) else self._whole, name)

    def __setattr__(self, name: str, value: object) -> None:
        target = _own if hasattr(_Own, name) else self._whole
        setattr(target, name, value)


def _cast_as_is(tensor: torch.Tensor, to: torch.dtype) -> torch.Tensor:
    return tensor.to(to)


def _by_weight(semantics: Semantics) -> Semantics:
    return replace(semantics, cache_key=lambda weight, to: id(weight))


def _in_any_mode(semantics: Semantics) -> Semantics:
    return replace(semantics, caches=cacheable, cached_cast=_cast_as_is)


def _of_bodies(semantics: Semantics) -> Semantics:
    return replace(semantics, body_cache=lambda state: nullcontext())


def _of_thread(semantics: Semantics) -> Semantics:
    return replace(semantics, in_autograd_thread=_Behind)


IMITATIONS = {
    "backward-thread-cache": Imitation(semantics=_of_thread),
    "cache-ignores-dtype": Imitation(semantics=_by_weight),
    "cache-ignores-grad-mode": Imitation(semantics=_in_any_mode),
    "custom-op-weight-cache": Imitation(semantics=_of_bodies),
}
