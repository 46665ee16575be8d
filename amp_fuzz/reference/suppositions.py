"""Have the reference follow other rules for a block.

What holds in a thread holds in the threads of autograd that work for it. Whoever starts another
thread enters `inherited` there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

from amp_fuzz.reference import dispatch, kernels
from amp_fuzz.reference.calls import Supposed
from amp_fuzz.reference.semantics import Semantics
from amp_fuzz.reference.state import here

__all__ = ["inherited", "intercepting", "supposing", "under"]


@contextmanager
def under(semantics: Semantics) -> Iterator[None]:
    """Follow these rules in this thread for a block."""
    temporary = kernels.temporary() if semantics.extra() else nullcontext()
    with here().having(semantics=semantics), temporary:
        yield


@contextmanager
def supposing(policies: Mapping[str, Supposed]) -> Iterator[None]:
    """Give ops another policy than their table does, or none, in this thread for a block.

    policies: by overload, as in `Rule.overload`; one that the device's table has not stays without,
    unless it is an op of the user's.
    A divergence that vanishes under it is one of that policy, whatever it shows as.
    """
    kernels.register_bodies(policies)
    with here().having(supposed=dict(policies)):
        yield


def inherited() -> Callable[[], AbstractContextManager[None]]:
    """Return a context in which another thread follows the rules of this one, and logs there."""
    state = here()
    semantics, log = state.semantics, state.log
    supposed = {"supposed": state.supposed, "flips": state.flips}

    @contextmanager
    def entered() -> Iterator[None]:
        with under(semantics), here().having(log=log, **supposed):
            yield

    return entered


@contextmanager
def intercepting() -> Iterator[None]:
    """Let calls of `Semantics.extra` come to the kernels for a block, with autocast or without."""
    state = here()
    kernels.register_temporarily(state.semantics.extra())
    state.intercepts += 1
    dispatch.switch(state.on())
    try:
        yield
    finally:
        state.intercepts -= 1
        dispatch.switch(state.on())
