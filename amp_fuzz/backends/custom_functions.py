"""Custom functions and custom ops for programs: plain torch, so a repro can contain them.

Each function makes one, of an implementation's ``autocast``, ``custom_fwd``, ``custom_bwd`` and
``custom_op``. `amp_fuzz.catalogue.custom` says how they are drawn. A function and the op of the
same name compute the same. They use only torch, the standard library, each other and `prelude`.

The linear ones are built as in Transformer Engine (pull request 2967): one dataclass of arguments
for each direction, and implementations that return what to save; only the boundary to autograd
knows ``ctx``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from amp_fuzz.backends.prelude import half_by_product

__all__ = [
    "Affine",
    "LinearArgs",
    "LinearGrads",
    "make_affine_function",
    "make_affine_op",
    "make_exp_function",
    "make_exp_op",
    "make_freed_function",
    "make_hooked",
    "make_linear_function",
    "make_linear_op",
    "make_matmul_function",
    "make_mul_function",
    "make_mul_op",
    "make_once_function",
    "make_same_function",
    "make_sort_function",
    "make_sort_op",
    "make_straight_function",
    "make_unasked_function",
    "make_view_function",
    "saved_of_linear",
]


# -- elementwise ----------------------------------------------------------------------------------


def make_mul_function():  # type: ignore[no-untyped-def]
    """Return a product that computes only the gradients that are needed."""

    class Mul(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):  # type: ignore[no-untyped-def]
            ctx.save_for_backward(x, y)
            return x * y

        @staticmethod
        def backward(ctx, g):  # type: ignore[no-untyped-def]
            x, y = ctx.saved_tensors
            return (
                (g * y).to(x.dtype) if ctx.needs_input_grad[0] else None,
                (g * x).to(y.dtype) if ctx.needs_input_grad[1] else None,
            )

    return Mul.apply


def make_unasked_function():  # type: ignore[no-untyped-def]
    """Return a product that computes every gradient, whether it is needed or not."""

    class Unasked(torch.autograd.Function):
        @staticmethod
        def forward(x, y):  # type: ignore[no-untyped-def]
            return x * y

        @staticmethod
        def setup_context(ctx, inputs, output):  # type: ignore[no-untyped-def]
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx, g):  # type: ignore[no-untyped-def]
            x, y = ctx.saved_tensors
            return (g * y).to(x.dtype), (g * x).to(y.dtype)

    return Unasked.apply


def make_mul_op(custom_op: Any) -> Any:
    """Return a product as a custom op."""

    def body(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * y

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    def backward(ctx: Any, g: Any) -> Any:
        x, y = ctx.saved_tensors
        return (
            (g * y).to(x.dtype) if ctx.needs_input_grad[0] else None,
            (g * x).to(y.dtype) if ctx.needs_input_grad[1] else None,
        )

    op = custom_op("amp_fuzz::mul_op", body, mutates_args=())
    op.register_fake(body)
    op.register_autograd(backward, setup_context=setup_context)
    return op


@dataclass(frozen=True)
class Affine:
    """The arguments of an affine function that are no tensors."""

    scale: float
    shift: float
    negate: bool


def make_affine_function():  # type: ignore[no-untyped-def]
    """Return an affine function whose numbers are one dataclass."""

    class AffineFunction(torch.autograd.Function):
        @staticmethod
        def forward(x, args):  # type: ignore[no-untyped-def]
            y = x * args.scale + args.shift
            return -y if args.negate else y

        @staticmethod
        def setup_context(ctx, inputs, output):  # type: ignore[no-untyped-def]
            ctx.args = inputs[1]

        @staticmethod
        def backward(ctx, g):  # type: ignore[no-untyped-def]
            g = g * ctx.args.scale
            return (-g if ctx.args.negate else g), None

    def affine_function(x, scale, shift, negate):  # type: ignore[no-untyped-def]
        return AffineFunction.apply(x, Affine(scale, shift, negate))  # type: ignore[no-untyped-call]

    return affine_function


def make_affine_op(custom_op: Any) -> Any:
    """Return an affine function as a custom op with numbers in its schema."""

    def body(x: torch.Tensor, scale: float, shift: float, negate: bool) -> torch.Tensor:
        y = x * scale + shift
        return -y if negate else y

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.args = inputs[1:]

    def backward(ctx: Any, g: Any) -> Any:
        scale, _, negate = ctx.args
        return (-(g * scale) if negate else g * scale), None, None, None

    op = custom_op("amp_fuzz::affine_op", body, mutates_args=())
    op.register_fake(body)
    op.register_autograd(backward, setup_context=setup_context)
    return op


def make_exp_function(custom_fwd, custom_bwd, device):  # type: ignore[no-untyped-def]
    """Return an exponential in float32, whose backward uses its output."""

    class Exp(torch.autograd.Function):
        @staticmethod
        @custom_fwd(device_type=device, cast_inputs=torch.float32)
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            y = torch.exp(x)
            ctx.save_for_backward(y)
            return y

        @staticmethod
        @custom_bwd(device_type=device)
        def backward(ctx, g):  # type: ignore[no-untyped-def]
            (y,) = ctx.saved_tensors
            return g * y

    return Exp.apply


def make_exp_op(custom_op: Any, device: Any) -> Any:
    """Return an exponential as a custom op, in float32 under autocast."""

    def body(x: torch.Tensor) -> torch.Tensor:
        return torch.exp(x)

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(output)

    def backward(ctx: Any, g: Any) -> Any:
        return g * ctx.saved_tensors[0]

    op = custom_op("amp_fuzz::exp_op", body, mutates_args=())
    op.register_fake(body)
    op.register_autograd(backward, setup_context=setup_context)
    op.register_autocast(device, torch.float32)
    return op


def make_hooked():  # type: ignore[no-untyped-def]
    """Return a copy whose gradient a hook halves under the autocast of the backward pass."""

    def hooked(x):  # type: ignore[no-untyped-def]
        y = x.clone()
        if y.requires_grad:
            y.register_hook(half_by_product)
        return y

    return hooked


def make_straight_function():  # type: ignore[no-untyped-def]
    """Return a rounding whose gradient is that of the identity."""

    class Straight(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            return torch.round(x)

        @staticmethod
        def backward(ctx, g):  # type: ignore[no-untyped-def]
            return g

    return Straight.apply


# -- outputs that are views, inputs, or not differentiable ----------------------------------------


def make_view_function():  # type: ignore[no-untyped-def]
    """Return a transposition: its output is a view of its input."""

    class View(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            return x.transpose(0, 1)

        @staticmethod
        def backward(ctx, g):  # type: ignore[no-untyped-def]
            return g.transpose(0, 1)

    return View.apply


def make_same_function():  # type: ignore[no-untyped-def]
    """Return a function that gives its input itself, and scales its gradient."""

    class Same(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            return x

        @staticmethod
        def backward(ctx, g):  # type: ignore[no-untyped-def]
            return g * 0.5

    return Same.apply


def make_sort_function():  # type: ignore[no-untyped-def]
    """Return a sort of the last dimension: its indices are not differentiable."""

    class Sort(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            values, indices = torch.sort(x, stable=True)
            ctx.mark_non_differentiable(indices)
            ctx.save_for_backward(indices)
            return values, indices

        @staticmethod
        def backward(ctx, g, unused):  # type: ignore[no-untyped-def]
            (indices,) = ctx.saved_tensors
            return torch.zeros_like(g).scatter(-1, indices, g)

    return Sort.apply


def make_sort_op(custom_op: Any) -> Any:
    """Return a sort as a custom op with two outputs."""

    def body(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, indices = torch.sort(x, stable=True)
        return values.contiguous(), indices.contiguous()

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(output[1])
        ctx.mark_non_differentiable(output[1])

    def backward(ctx: Any, g: Any, unused: Any) -> Any:
        (indices,) = ctx.saved_tensors
        return torch.zeros_like(g).scatter(-1, indices, g)

    op = custom_op("amp_fuzz::sort_op", body, mutates_args=())
    op.register_fake(body)
    op.register_autograd(backward, setup_context=setup_context)
    return op


# -- products -------------------------------------------------------------------------------------


def make_matmul_function(custom_fwd, custom_bwd, device):  # type: ignore[no-untyped-def]
    """Return a matrix product that saves views of its inputs."""

    class Matmul(torch.autograd.Function):
        @staticmethod
        @custom_fwd(device_type=device)
        def forward(ctx, x, w):  # type: ignore[no-untyped-def]
            ctx.save_for_backward(x.t(), w.t())
            return x @ w

        @staticmethod
        @custom_bwd(device_type=device)
        def backward(ctx, g):  # type: ignore[no-untyped-def]
            xt, wt = ctx.saved_tensors
            return g @ wt.to(g.dtype), xt.to(g.dtype) @ g

    return Matmul.apply


def make_once_function(custom_fwd, custom_bwd, device):  # type: ignore[no-untyped-def]
    """Return a matrix product in float32 that refuses a second derivative."""

    class Once(torch.autograd.Function):
        @staticmethod
        @custom_fwd(device_type=device, cast_inputs=torch.float32)
        def forward(ctx, x, w):  # type: ignore[no-untyped-def]
            ctx.save_for_backward(x, w)
            return x @ w

        @staticmethod
        @once_differentiable
        @custom_bwd(device_type=device)
        def backward(ctx, g):  # type: ignore[no-untyped-def,override]
            x, w = ctx.saved_tensors
            return g @ w.t(), x.t() @ g

    return Once.apply


@dataclass
class LinearArgs:
    """The arguments of a linear layer's forward."""

    x: Any
    w: Any
    b: Any
    gain: float

    def forward(self) -> Any:
        """Return the output."""
        y = torch.nn.functional.linear(self.x, self.w, self.b)
        return y * self.gain


@dataclass
class LinearGrads:
    """The arguments of a linear layer's backward. needs: which gradients are needed."""

    g: Any
    x: Any
    w: Any
    needs: Any
    gain: float

    def backward(self) -> Any:
        """Return the gradients of input, weight and bias."""
        g = self.g * self.gain
        dx = None if self.w is None else g @ self.w.to(g.dtype)
        dw = None if self.x is None else g.t() @ self.x.to(g.dtype)
        return dx, dw, g.sum(0) if self.needs[2] else None


def saved_of_linear(args: Any, needs: Any) -> Any:
    """Return the tensors that a linear layer saves: each for the other's gradient."""
    return args.x if needs[1] else None, args.w if needs[0] else None


def make_linear_function(custom_fwd, custom_bwd, device):  # type: ignore[no-untyped-def]
    """Return a linear layer: the boundary to autograd decides what is saved."""

    class Linear(torch.autograd.Function):
        @staticmethod
        @custom_fwd(device_type=device)
        def forward(ctx, x, w, b, gain):  # type: ignore[no-untyped-def]
            args = LinearArgs(x, w, b, gain)
            y = args.forward()
            ctx.save_for_backward(*saved_of_linear(args, ctx.needs_input_grad))
            ctx.gain = gain
            return y

        @staticmethod
        @custom_bwd(device_type=device)
        def backward(ctx, g):  # type: ignore[no-untyped-def]
            x, w = ctx.saved_tensors
            args = LinearGrads(g, x, w, ctx.needs_input_grad, ctx.gain)
            return (*args.backward(), None)

    return Linear.apply


def make_freed_function(custom_fwd, custom_bwd, device):  # type: ignore[no-untyped-def]
    """Return a linear layer that frees its backward's arguments after it: a second pass raises."""

    class Freed(torch.autograd.Function):
        @staticmethod
        @custom_fwd(device_type=device)
        def forward(ctx, x, w, b, gain):  # type: ignore[no-untyped-def]
            args = LinearArgs(x, w, b, gain)
            y = args.forward()
            ctx.save_for_backward(*saved_of_linear(args, ctx.needs_input_grad))
            ctx.objects = LinearArgs(None, None, None, gain)
            return y

        @staticmethod
        @custom_bwd(device_type=device)
        def backward(ctx, g):  # type: ignore[no-untyped-def]
            x, w = ctx.saved_tensors
            args = LinearGrads(g, x, w, ctx.needs_input_grad, ctx.objects.gain)
            ctx.objects = None
            return (*args.backward(), None)

    return Freed.apply


def make_linear_op(custom_op: Any, autocast: Any, device: Any) -> Any:
    """Return a linear layer as a custom op, whose inputs autocast casts to bfloat16."""

    def body(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, gain: float) -> torch.Tensor:
        y: torch.Tensor = LinearArgs(x, w, b, gain).forward()
        return y

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        args = LinearArgs(*inputs)
        ctx.save_for_backward(*saved_of_linear(args, ctx.needs_input_grad))
        ctx.gain = args.gain

    def backward(ctx: Any, g: Any) -> Any:
        x, w = ctx.saved_tensors
        with autocast(device, enabled=False):
            args = LinearGrads(g, x, w, ctx.needs_input_grad, ctx.gain)
            return (*args.backward(), None)

    op = custom_op("amp_fuzz::linear_op", body, mutates_args=())
    op.register_fake(body)
    op.register_autograd(backward, setup_context=setup_context)
    op.register_autocast(device, torch.bfloat16)
    return op
