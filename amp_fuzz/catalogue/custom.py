"""Custom functions and custom ops: `torch.autograd.Function` and `torch.library.custom_op`.

`amp_fuzz.backends.custom_functions` has their source. Together they have what such code has:
arguments that are no tensors, saved tensors that are views of inputs, outputs that are views of
inputs or inputs themselves, gradients that are needed or not, outputs without a gradient, state
that is freed after a backward pass, and a second derivative that is refused. ``hooked`` is neither:
a Python function that registers a hook on the value that it returns.
"""

from __future__ import annotations

from collections.abc import Callable

from amp_fuzz.catalogue.core import Build, Builder, Call, Out, op, out


def _made(
    name: str, *given: str, devices: tuple[str, ...] | None = None, view: bool = False
) -> Callable[[Build], Build]:
    """Register what ``make_NAME`` makes of some names of an implementation."""
    setup = f"{name} = make_{name}({', '.join(given)})"
    return op(name, function=name, setup=setup, mixed="raises", devices=devices, view=view)


_CASTS = ("custom_fwd", "custom_bwd", "device")
# `register_autocast` takes no others before torch 2.12, and raises for some of them after it:
# docs/findings/torch/functions.md#register-autocast-key.
_REGISTERED = ("cpu", "cuda")


@_made("mul_function")
@_made("unasked_function")
@_made("mul_op", "custom_op")
def _mul(g: Builder) -> Call:
    x = g.tensor(rank=(0, 2))
    return Call((x, g.tensor(x.shape, weight=True)), out(x.shape))


@_made("affine_function")
@_made("affine_op", "custom_op")
def _affine(g: Builder) -> Call:
    x = g.tensor(rank=(0, 2))
    scale, shift = g.choice((2.0, 0.5, -1.5)), g.choice((0.0, 1.0, -0.25))
    return Call((x, scale, shift, g.flag()), out(x.shape))


@_made("exp_function", *_CASTS)
@_made("exp_op", "custom_op", "device", devices=_REGISTERED)
def _exp(g: Builder) -> Call:
    x = g.tensor(rank=(0, 2), domain="unit")
    return Call((x,), out(x.shape))


@_made("straight_function")
def _straight(g: Builder) -> Call:
    x = g.tensor(rank=(0, 2))
    return Call((x,), out(x.shape, dtype=x.dtype))


@_made("hooked")
def _hooked(g: Builder) -> Call:
    x = g.tensor(rank=(0, 2))
    return Call((x,), out(x.shape, dtype=x.dtype))


@_made("view_function", view=True)
def _view(g: Builder) -> Call:
    x = g.tensor(rank=2)
    return Call((x,), out((x.shape[1], x.shape[0]), dtype=x.dtype))


@_made("same_function", view=True)
def _same(g: Builder) -> Call:
    x = g.tensor(rank=(0, 2))
    return Call((x,), out(x.shape, dtype=x.dtype))


@_made("sort_function")
@_made("sort_op", "custom_op")
def _sort(g: Builder) -> Call:
    x = g.tensor(rank=(1, 2))
    return Call((x,), (Out(x.shape, x.dtype), Out(x.shape, "int64")))


@_made("matmul_function", *_CASTS)
@_made("once_function", *_CASTS)
def _matmul(g: Builder) -> Call:
    x = g.tensor(rank=2)
    w = g.tensor((x.shape[1], g.dim()), weight=True)
    return Call((x, w), out((x.shape[0], w.shape[1])))


@_made("linear_function", *_CASTS)
@_made("freed_function", *_CASTS)
@_made("linear_op", "custom_op", "autocast", "device", devices=_REGISTERED)
def _linear(g: Builder) -> Call:
    x = g.tensor(rank=2)
    w = g.tensor((g.dim(), x.shape[1]), weight=True)
    b = g.tensor((w.shape[0],), weight=True) if g.flag() else None
    return Call((x, w, b, g.choice((1.0, 0.5))), out((x.shape[0], w.shape[0])))
