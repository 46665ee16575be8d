"""`torch.library.custom_op` as it behaves under the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from amp_fuzz.reference import dispatch
from amp_fuzz.reference.autocast import autocast
from amp_fuzz.reference.casts import cast_eligible, device_of, tensors_of
from amp_fuzz.reference.state import enabled_devices, here

__all__ = ["CustomOp", "custom_op"]


class CustomOp:
    """A custom op whose body sees the reference's autocast.

    The body runs below autograd, in the region where the op is called: what it calls is cast as
    there, and the casts of weights that it makes are its own, for nothing below autograd has a
    gradient that a later use could share. The backward is ordinary Python of the backward pass.
    With `register_autocast`, "when custom op runs in an autocast-enabled region, casts incoming
    floating-point Tensors to the target dtype (non-floating-point Tensors are not affected), then
    executes custom op with autocast disabled"; float64 is not eligible, as for any op.

    Source: https://docs.pytorch.org/docs/stable/library.html, ``custom_op``, ``register_autograd``
    and ``register_autocast``.
    """

    def __init__(self, body: Callable[..., Any]) -> None:
        self._body = body
        self._backward: Callable[..., Any] | None = None
        self._setup_context: Callable[..., None] | None = None
        self._casts: dict[str, torch.dtype] = {}

    def register_fake(self, fake: Callable[..., Any]) -> None:
        """Ignore the fake kernel: the body itself runs on fake tensors."""

    def register_autograd(
        self, backward: Callable[..., Any], *, setup_context: Callable[..., None]
    ) -> None:
        """Register ``backward(ctx, grads)``, and what saves for it in the forward."""
        self._backward, self._setup_context = backward, setup_context

    def register_autocast(self, device_type: str, cast_inputs: torch.dtype) -> None:
        """Register the dtype to which autocast for a device type casts the inputs."""
        self._casts[device_type] = cast_inputs

    def __call__(self, *args: Any) -> Any:
        """Call the op; its arguments are tensors, lists of tensors, numbers, and None."""
        present = {device_of(t) for t in tensors_of(args)}
        device = next((d for d in enabled_devices() if d in self._casts and d in present), None)
        if device is None:
            return self._differentiable(args)
        with autocast(device, enabled=False):
            cast = (cast_eligible(a, device, self._casts[device]) for a in args)
            return self._differentiable(tuple(cast))

    def _differentiable(self, args: Sequence[Any]) -> Any:
        if not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors_of(args))):
            return self._below_autograd(args)
        leaves, spec = pytree.tree_flatten(tuple(args))
        form: list[Any] = []
        outputs = _Recorded.apply(self, spec, form, *leaves)  # type: ignore[no-untyped-call]
        return pytree.tree_unflatten(list(outputs), form[0])

    def _below_autograd(self, args: Iterable[Any]) -> Any:
        mode = _fake_mode(args) or nullcontext()  # a fake kernel brings its arguments' mode
        with dispatch.below_autograd(), mode:
            return here().semantics.body(self._body, tuple(args))


def _fake_mode(args: Iterable[Any]) -> FakeTensorMode | None:
    """Return the mode of fake arguments, which another thread does not have."""
    return next((x.fake_mode for x in tensors_of(args) if isinstance(x, FakeTensor)), None)


class _Recorded(torch.autograd.Function):
    """One call of a custom op, with its arguments in a row."""

    @staticmethod
    def forward(ctx: Any, op: CustomOp, spec: Any, form: list[Any], *leaves: Any) -> Any:
        args = pytree.tree_unflatten(list(leaves), spec)
        outputs = op._below_autograd(args)
        tensors, made = pytree.tree_flatten(outputs)
        form.append(made)
        ctx.op, ctx.spec, ctx.form = op, spec, made
        if op._setup_context is not None:
            with _needs(ctx):
                op._setup_context(ctx, args, outputs)
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        given = pytree.tree_unflatten(list(cotangents), ctx.form)
        with _needs(ctx):
            grads = ctx.op._backward(ctx, *(given if isinstance(given, tuple) else (given,)))
        grads = grads if isinstance(grads, tuple) else (grads,)
        return (None, None, None, *pytree.tree_leaves(grads))


@contextmanager
def _needs(ctx: Any) -> Iterator[None]:
    """Say which inputs of the op need a gradient, in the form of its arguments."""
    needs = ctx.needs_input_grad
    ctx.needs_input_grad = pytree.tree_unflatten(list(needs[3:]), ctx.spec)
    try:
        yield
    finally:
        ctx.needs_input_grad = needs


def custom_op(name: str, body: Callable[..., Any], *, mutates_args: Iterable[str]) -> CustomOp:
    """Like `torch.library.custom_op` for a body that returns tensors.

    The name names nothing: each op is its own. Raises `ValueError` for an op that mutates.
    """
    if tuple(mutates_args):
        raise ValueError(f"mutates_args={mutates_args!r}: only () is written again here")
    return CustomOp(body)
