"""A linear layer that quantises: its three products, and how it meets autocast.

``y = q(x) q(w)^T + b``, ``dx = q(g) q(w)``, ``dw = q(g)^T q(x)``, accumulated in float32 and
rounded once to the dtype of the result. The gradient of the bias is that of `g`, not of `q(g)`.
Source: ``pytorch/module/linear.py`` of Transformer Engine, ``torchao/float8/float8_linear.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

from amp_fuzz.reference.autocast import snapshot
from amp_fuzz.reference.fp8.recipes import Role
from amp_fuzz.reference.fp8.scaling import Quantised
from amp_fuzz.reference.state import here

__all__ = [
    "TORCHAO",
    "TRANSFORMER_ENGINE",
    "Convention",
    "Pass",
    "Product",
    "Quantiser",
    "dequantised",
    "linear",
    "scaled_mm",
]

Pass: TypeAlias = Literal["forward", "dgrad", "wgrad"]
Product: TypeAlias = Callable[[Quantised, Quantised, torch.dtype, Pass], torch.Tensor]
Quantiser: TypeAlias = Callable[[torch.Tensor, int, Role], Quantised]


# -- products -------------------------------------------------------------------------------------


def dequantised(a: Quantised, b: Quantised, dtype: torch.dtype, which: Pass) -> torch.Tensor:
    """Return the product of what two matrices stand for, accumulated in float32."""
    return torch.mm(a.values / a.scale, b.values / b.scale).to(dtype)


def scaled_mm(a: Quantised, b: Quantised, dtype: torch.dtype, which: Pass) -> torch.Tensor:
    """Return the product by `torch._scaled_mm`, torch's own kernel for it."""
    left = a.values.to(a.format.dtype).contiguous()
    right = b.values.t().to(b.format.dtype).contiguous().t()
    # A fresh tensor: `contiguous` leaves the strides of dimensions of size 1, which are checked.
    first, second = (s.clone(memory_format=torch.contiguous_format) for s in (a.inverse, b.inverse))
    return torch._scaled_mm(left, right, first, second, out_dtype=dtype)


# -- conventions ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Convention:
    """What two implementations of the same layer document differently.

    product: the kernel of the products. casts: whether autocast casts the input before it is
    quantised. In both the result has the dtype of autocast, where autocast is enabled.
    narrow_bias: whether a bias of float32 is rounded to bfloat16 before it is added to float32.
    """

    product: Product = dequantised
    casts: bool = True
    narrow_bias: bool = False


TORCHAO = Convention()
"""torchao: ``Float8Linear.forward`` duplicates "the autocast logic for F.linear"."""

TRANSFORMER_ENGINE = Convention(product=scaled_mm, casts=False, narrow_bias=True)
"""Transformer Engine: only the dtype of results follows autocast, ``set_activation_dtype``."""


# -- the layer ------------------------------------------------------------------------------------


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    quantise: Quantiser,
    convention: Convention,
    finished: Callable[[], None] | None = None,
) -> torch.Tensor:
    """Return a quantised linear layer of `x` [..., K] and `weight` [N, K], in the dtype of `x`.

    Under autocast for the device of `x`, in autocast's dtype. finished: is called at the end of the
    backward pass.
    """
    convention = here().semantics.fp8(convention)
    low = _autocast_dtype(x)
    if low is not None and convention.casts:
        x = x.to(low)
    with _without_autocast(x):
        dtype = low or x.dtype
        y: torch.Tensor = _Linear.apply(  # type: ignore[no-untyped-call]
            x, weight, quantise, dtype, convention.product, finished
        )
        if bias is None:
            return y
        narrow = convention.narrow_bias and dtype is torch.float32
        return y + bias.to(torch.bfloat16 if narrow else dtype)


def _autocast_dtype(x: torch.Tensor) -> torch.dtype | None:
    """Return what autocast casts a tensor to, or None."""
    device = x.device.type
    on = device in here().devices() and x.is_floating_point() and x.dtype is not torch.float64
    return here().dtype(device) if on else None


def _without_autocast(x: torch.Tensor) -> AbstractContextManager[None]:
    return snapshot(x.device.type).disabled() if here().devices() else nullcontext()


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, quantise: Any, dtype: Any, *how: Any) -> Any:
        ctx.save_for_backward(x, weight)
        ctx.how = quantise, *how
        product, _ = how
        flat = x.reshape(-1, x.shape[-1])
        a, b = quantise(flat, 1, "input"), quantise(weight.t(), 0, "weight")
        return product(a, b, dtype, "forward").reshape(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, weight = ctx.saved_tensors
        quantise, product, finished = ctx.how
        dtype = _autocast_dtype(grad) or grad.dtype
        flat, g = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
        with _without_autocast(grad):
            a, b = quantise(g, 1, "grad_output"), quantise(weight.t(), 1, "weight")
            dx = product(a, b.t(), dtype, "dgrad")
            a, b = quantise(g, 0, "grad_output"), quantise(flat, 0, "input")
            dw = product(a.t(), b, dtype, "wgrad")
        if finished is not None:
            finished()
        return dx.reshape(x.shape), dw, None, None, None, None
