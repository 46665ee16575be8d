"""Have the reference follow other rules for a block.

What holds in a thread holds in the threads of autograd that work for it. Whoever starts another
thread enters `inherited` there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

from amp_fuzz.reference import dispatch, kernels
from amp_fuzz.reference.semantics import Semantics
from amp_fuzz.reference.state import here
from amp_fuzz.reference.tables import Policy

__all__ = ["inherited", "intercepting", "supposed", "supposing", "under"]


@contextmanager
def under(semantics: Semantics) -> Iterator[None]:
    """Follow these rules in this thread for a block."""
    state = here()
    before, state.semantics = state.semantics, semantics
    try:
        with kernels.lending() if semantics.extra() else nullcontext():
            yield
    finally:
        state.semantics = before


@contextmanager
def supposing(policies: Mapping[str, Policy | None]) -> Iterator[None]:
    """Give ops another policy than their table does, or none, in this thread for a block.

    policies: by overload, as in `Rule.overload`; one that the device's table has not stays without.
    A divergence that vanishes under it is one of that policy, whatever it shows as.
    """
    state = here()
    before, state.supposed = state.supposed, dict(policies)
    try:
        yield
    finally:
        state.supposed = before


def supposed() -> Mapping[str, Policy | None]:
    """Return the policies that are supposed in this thread."""
    return here().supposed


def inherited() -> Callable[[], AbstractContextManager[None]]:
    """Return a context in which another thread follows the rules that this one follows now."""
    state = here()
    semantics, policies, flips = state.semantics, state.supposed, state.flips

    @contextmanager
    def entered() -> Iterator[None]:
        own = here()
        before, own.flips = own.flips, flips
        try:
            with under(semantics), supposing(policies):
                yield
        finally:
            own.flips = before

    return entered


@contextmanager
def intercepting() -> Iterator[None]:
    """Let calls of `Semantics.extra` come to the kernels for a block, with autocast or without."""
    state = here()
    kernels.lend(state.semantics.extra())
    state.intercepts += 1
    dispatch.switch(state.on())
    try:
        yield
    finally:
        state.intercepts -= 1
        dispatch.switch(state.on())
