"""Ops for `amp_fuzz.check_op`: honest ones, and ones with a fault that one contract catches."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from amp_fuzz.policies.tables import Policy, Rule
from amp_fuzz.reference.kernels import declare_op

FORWARD = torch.amp.custom_fwd(device_type="cpu")
BACKWARD = torch.amp.custom_bwd(device_type="cpu")


class Mul(Function):
    """Honest: a product, with all that torch offers."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return x * w

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return g * w, g * x


class Matmul(Function):
    """Honest: a matrix product in the dtype that autocast chooses."""

    @staticmethod
    @FORWARD
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    @BACKWARD
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return g @ w.t().to(g.dtype), x.t().to(g.dtype) @ g


class Once(Mul):
    """Honest: it refuses a second derivative."""

    generate_vmap_rule = False

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return g * w, g * x


class Clamp(Function):
    """Honest: its gradient is 0 outside of 0 to 6."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(0, 6)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g * ((x > 0) & (x < 6))


class Open(Clamp):
    """Forgets the upper limit in its backward."""

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g * (x > 0)


class StraightThrough(Function):
    """Its gradient is not that of its forward, on purpose."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


class Halved(Mul):
    """Honest but for its derivative, which is half of the right one."""

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return g * w / 2, g * x


class Freed(Mul):
    """Clears what its backward needs, as Transformer Engine's `_Linear` (pull request 2967)."""

    generate_vmap_rule = False

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.backward_objects = "linear"

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        name = ctx.backward_objects
        ctx.backward_objects = None
        x, w = ctx.saved_tensors
        return (g * w, g * x) if name.isalpha() else None


class Attributes(Mul):
    """Keeps tensors where autograd does not see a later write."""

    generate_vmap_rule = False

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.inputs = inputs

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.inputs
        return g * w, g * x


class FirstOnly(Mul):
    """Asks of one input whether all of them need a gradient."""

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return (g * w, g * x) if ctx.needs_input_grad[0] else (None, None)


class CutOff(Mul):
    """Computes gradients that autograd takes for constants."""

    generate_vmap_rule = False

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        with torch.no_grad():
            return g * w, g * x


class Undecorated(Function):
    """Computes its forward in one dtype and its backward in another."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return g.to(w.dtype) @ w.t(), x.t() @ g.to(x.dtype)


class Leaving(Mul):
    """Turns autocast off, and leaves it so."""

    generate_vmap_rule = False

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        torch.set_autocast_enabled("cpu", False)
        return x * w


class Flipped(Mul):
    """Has a rule for vmap that takes one call's weight for the other's."""

    generate_vmap_rule = False

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor, w: Tensor) -> Any:
        return x * (w if dims[1] is None else w.flip(0)), 0


def _saved(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:2])


def _gradients(ctx: Any, g: Tensor) -> Any:
    x, w = ctx.saved_tensors
    return (g * w).to(x.dtype), (g * x).to(w.dtype)


_LIBRARY = torch.library.Library("contracts", "DEF")
_LIBRARY.define("half(Tensor x, Tensor w) -> Tensor")
_LIBRARY.impl("half", lambda x, w: x if x.dtype is torch.bfloat16 else x * w, "CPU")
_LIBRARY.impl("half", lambda x, w: torch.empty_like(x), "Meta")
torch.library.register_autograd(
    "contracts::half", lambda ctx, g: _gradients(ctx, g), setup_context=_saved, lib=_LIBRARY
)
torch.library.register_autocast("contracts::half", "cpu", torch.bfloat16, lib=_LIBRARY)
_LIBRARY.define("undeclared(Tensor x) -> Tensor")
_LIBRARY.impl("undeclared", lambda x: x.clone(), "CPU")
torch.library.register_autocast("contracts::undeclared", "cpu", torch.bfloat16, lib=_LIBRARY)

with contextlib.suppress(ValueError):  # the module may be imported again
    declare_op(
        "contracts::half",
        {
            "cpu": Rule(
                "contracts::half",
                Policy.CAST_INPUTS,
                ">=2.7",
                "torch.library.register_autocast",
                cast_inputs="bfloat16",
            )
        },
    )


@torch.library.custom_op("contracts::plain", mutates_args=())
def plain(x: Tensor, w: Tensor) -> Tensor:
    """Honest, of any dtype."""
    return x * w


plain.register_fake(lambda x, w: torch.empty_like(x * w))
plain.register_autograd(_gradients, setup_context=_saved)
plain.register_vmap(lambda info, dims, x, w: (plain(*_aligned(info, dims, x, w)), 0))


def _aligned(info: Any, dims: Any, *tensors: Tensor) -> list[Tensor]:
    return [
        t.expand(info.batch_size, *t.shape) if d is None else t.movedim(d, 0)
        for t, d in zip(tensors, dims, strict=True)
    ]


@torch.library.custom_op("contracts::cast", mutates_args=())
def cast(x: Tensor, w: Tensor, scale: float) -> Tensor:
    """Honest: autocast casts its inputs to bfloat16, and its backward runs with autocast off."""
    return (x @ w) * scale


def _setup_cast(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.scale = inputs[2]


def _cast_backward(ctx: Any, g: Tensor) -> Any:
    x, w = ctx.saved_tensors
    with torch.autocast("cpu", enabled=False):
        return (g * ctx.scale) @ w.t(), x.t() @ (g * ctx.scale), None


cast.register_fake(lambda x, w, scale: x.new_empty(x.shape[0], w.shape[1]))
cast.register_autograd(_cast_backward, setup_context=_setup_cast)
cast.register_autocast("cpu", torch.bfloat16)


@torch.library.custom_op("contracts::mm", mutates_args=())
def mm(x: Tensor, w: Tensor) -> Tensor:
    """Has a fake kernel that forgets autocast: the body's product is bfloat16."""
    return x @ w


def _mm_backward(ctx: Any, g: Tensor) -> Any:
    x, w = ctx.saved_tensors
    with torch.autocast("cpu", enabled=False):
        return g.to(w.dtype) @ w.t(), x.t() @ g.to(x.dtype)


mm.register_fake(lambda x, w: x.new_empty(x.shape[0], w.shape[1]))
mm.register_autograd(_mm_backward, setup_context=_saved)


@torch.library.custom_op("contracts::counted", mutates_args=())
def counted(x: Tensor, w: Tensor, seen: Tensor) -> Tensor:
    """Write an argument that its schema calls an input."""
    seen.add_(1)
    return x * w


counted.register_fake(lambda x, w, seen: torch.empty_like(x))
counted.register_autograd(lambda ctx, g: (*_gradients(ctx, g), None), setup_context=_saved)


class Block(nn.Module):
    """Honest: a module that uses an op of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return Matmul.apply(plain(self.linear(x), x), x)  # type: ignore[no-any-return]
