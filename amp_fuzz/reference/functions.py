"""Functions that know about autocast: checkpoints, and `custom_fwd` with `custom_bwd`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

from amp_fuzz.reference.autocast import autocast, snapshot
from amp_fuzz.reference.casts import cast_eligible
from amp_fuzz.reference.state import ForwardState, here

__all__ = ["checkpoint", "custom_bwd", "custom_fwd"]

F = TypeVar("F", bound=Callable[..., Any])


def checkpoint(device: str) -> Callable[..., Any]:
    """Return `torch.utils.checkpoint.checkpoint` as it behaves under the reference.

    The recomputation runs under the autocast state of the forward pass, whatever surrounds the
    backward pass (documented for ``preserve_rng_state`` and autocast alike).
    """

    def run(function: Callable[..., Any], *args: Any, **how: Any) -> Any:
        forward = snapshot(device)
        first = [True]

        def body(*inputs: Any) -> Any:
            state = here()
            with state.having(answers=True):
                if first.pop() if first else False:
                    return function(*inputs)
                with forward.restored():
                    return function(*inputs)

        # torch's checkpoint asks for the autocast state, to restore torch's own: it must not be
        # told the reference's.
        state = here()
        with state.having(answers=False):
            return state.semantics.checkpoint(body, *args, **how)

    return run


def custom_fwd(*, device_type: str, cast_inputs: torch.dtype | None = None) -> Callable[[F], F]:
    """Like `torch.amp.custom_fwd`: remember the state for the backward.

    cast_inputs: in a region where autocast is on, cast the eligible inputs to this dtype and run
    the forward with autocast disabled; elsewhere it has no effect.

    A forward that is given no ``ctx``, as where the function has a ``setup_context``, keeps the
    state of its latest call itself.
    """

    def decorate(forward: F) -> F:
        @functools.wraps(forward)
        def decorated(*args: Any, **kwargs: Any) -> Any:
            state = here()
            enabled = state.enabled.get(device_type, False)
            state.semantics.keeper(decorated, args)._reference_state = ForwardState(
                state.dtype(device_type),
                enabled and cast_inputs is None,
                state.tables.get(device_type),
            )
            if cast_inputs is None or not enabled:
                return forward(*args, **kwargs)
            with autocast(device_type, enabled=False):
                args = tuple(cast_eligible(a, device_type, cast_inputs) for a in args)
                kwargs = {k: cast_eligible(v, device_type, cast_inputs) for k, v in kwargs.items()}
                return forward(*args, **kwargs)

        return cast(F, decorated)

    return decorate


def custom_bwd(*, device_type: str) -> Callable[[F], F]:
    """Like `torch.amp.custom_bwd`: run the backward under the state of the forward."""

    def decorate(backward: F) -> F:
        @functools.wraps(backward)
        def decorated(ctx: Any, *args: Any, **kwargs: Any) -> Any:
            state = here().semantics.forward_state(ctx)
            with autocast(device_type, state.dtype, state.enabled, table=state.table):
                return backward(ctx, *args, **kwargs)

        return cast(F, decorated)

    return decorate
