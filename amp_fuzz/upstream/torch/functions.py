"""What torch does in functions that know about autocast.

Each bug has a page of its own name in docs/findings/.

custom-fwd-setup-context: ``custom_fwd`` leaves the state on the first argument of the forward,
    which is no ``ctx`` where the function has a ``setup_context``. The backward raises
    (https://github.com/pytorch/pytorch/issues/132388).
custom-op-body-off: the body of a custom op runs with autocast off where it is compiled, exported or
    fake: fake kernels and AOTAutograd's graphs run so. In eager it sees the autocast around it
    (https://github.com/pytorch/pytorch/pull/145588).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from amp_fuzz.backends.imitation import Imitation
from amp_fuzz.reference import dispatch
from amp_fuzz.reference.autocast import autocast
from amp_fuzz.reference.calls import Call, Treatment
from amp_fuzz.reference.kernels import declared_bodies
from amp_fuzz.reference.semantics import Semantics
from amp_fuzz.reference.state import ForwardState, enabled_devices

__all__ = ["IMITATIONS"]

_LOGGER = logging.getLogger("torch._subclasses.fake_tensor")


def _first_argument(forward: Any, args: Sequence[Any]) -> Any:
    return args[0]


def _left_by_forward(ctx: Any) -> ForwardState:
    kept: ForwardState | None = getattr(ctx, "_reference_state", None)
    if kept is None:
        name = type(ctx).__name__
        raise AttributeError(f"'{name}' object has no attribute '_fwd_used_autocast'")
    return kept


def _setup_context(semantics: Semantics) -> Semantics:
    return replace(semantics, keeper=_first_argument, forward_state=_left_by_forward)


def _body_off(semantics: Semantics) -> Semantics:
    def body(function: Callable[..., Any], args: Sequence[Any]) -> Any:
        with ExitStack() as stack:
            for device in enabled_devices():
                stack.enter_context(autocast(device, enabled=False))
            _traced(function, args)
            return semantics.body(function, args)

    def call(one: Call, found: Treatment | None) -> Any:
        if one.name not in declared_bodies():
            return semantics.call(one, found)
        with dispatch.exclude():
            return one.function(*one.args, **one.kwargs)

    def extra() -> tuple[str, ...]:
        return (*semantics.extra(), *declared_bodies())

    return replace(semantics, body=body, call=call, extra=extra)


def _traced(body: Callable[..., Any], args: Sequence[Any]) -> None:
    """Run a body as a fake kernel, before anything runs: it may raise, in its own words."""
    leaves, spec = pytree.tree_flatten(tuple(args))
    if any(isinstance(x, FakeTensor) for x in leaves):
        return
    before, _LOGGER.disabled = _LOGGER.disabled, True  # it logs what a fake kernel raises
    try:
        with _disable_current_modes():  # shadows are not to follow
            mode = FakeTensorMode()
            fakes = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in leaves]
            with mode, enable_python_dispatcher():
                body(*pytree.tree_unflatten(fakes, spec))
    finally:
        _LOGGER.disabled = before


IMITATIONS = {
    "custom-fwd-setup-context": Imitation(semantics=_setup_context),
    "custom-op-body-off": Imitation(semantics=_body_off),
}
