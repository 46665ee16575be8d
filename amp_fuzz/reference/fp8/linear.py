"""A linear layer that quantises: its three products, and how it meets autocast.

``y = q(x) q(w)^T + b``, ``dx = q(g) q(w)``, ``dw = q(g)^T q(x)``, accumulated in float32 and
rounded once to the dtype of the result. The gradient of the bias is that of `g`, not of `q(g)`.
Source: ``pytorch/module/linear.py`` of Transformer Engine, ``torchao/float8/float8_linear.py``.
"""

from __future__ import annotations

import math
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
    "functional_scaled_mm",
    "linear",
    "scaled_mm",
]


@dataclass(frozen=True, slots=True)
class Pass:
    """Which of the three products it is, and the dtype of the autocast around it, or None."""

    name: Literal["forward", "dgrad", "wgrad"]
    autocast: torch.dtype | None


Product: TypeAlias = Callable[..., torch.Tensor]
"""Multiplies two matrices: of them, the dtype of the result, the pass, and a bias or None."""
Quantiser: TypeAlias = Callable[[torch.Tensor, int, Role], Quantised]


# -- products -------------------------------------------------------------------------------------


def dequantised(
    a: Quantised, b: Quantised, dtype: torch.dtype, which: Pass, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the product of what two matrices stand for, accumulated in float32."""
    y = torch.mm(a.values / a.scale, b.values / b.scale)
    return (y if bias is None else y + bias).to(dtype)


def scaled_mm(
    a: Quantised, b: Quantised, dtype: torch.dtype, which: Pass, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the product by `torch._scaled_mm`, torch's own kernel for it.

    A bias is added before the rounding to `dtype`; to a product of float32, after it.
    """
    left, right, first, second = _operands(a, b)
    inside = None if dtype is torch.float32 else bias
    y = torch._scaled_mm(left, right, first, second, bias=inside, out_dtype=dtype)
    return y if bias is None or inside is not None else y + bias


def functional_scaled_mm(
    a: Quantised, b: Quantised, dtype: torch.dtype, which: Pass, bias: None = None
) -> torch.Tensor:
    """Return the product by `torch.nn.functional.scaled_mm`, whose kernel may be another one."""
    kinds = torch.nn.functional.ScalingType
    kind = kinds.RowWise if a.scale.dim() == 2 else kinds.TensorWise
    left, right, first, second = _operands(a, b)
    return torch.nn.functional.scaled_mm(left, right, first, kind, second, kind, output_dtype=dtype)


def _operands(a: Quantised, b: Quantised) -> tuple[torch.Tensor, ...]:
    """Return both matrices in their formats, row-major and column-major, and inverse scales."""
    left = a.values.to(a.format.dtype).contiguous()
    right = b.values.t().to(b.format.dtype).contiguous().t()
    # A fresh tensor: `contiguous` leaves the strides of dimensions of size 1, which are checked.
    first, second = (s.clone(memory_format=torch.contiguous_format) for s in (a.inverse, b.inverse))
    return left, right, first, second


# -- conventions ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Convention:
    """What two implementations of the same layer document differently.

    product: the kernel of the products.
    casts: whether autocast casts the input before it is quantised. In both the result has the dtype
    of autocast, where autocast is enabled.
    again: whether autocast around the backward pass decides the dtype of the gradients, as it does
    for products; else that of the forward pass does.
    fuses: whether the product adds the bias, before it rounds; it is then rounded to the dtype of
    the result, or from float32 to bfloat16. Else it is added to the rounded product.
    weight_first: the order of its arguments, in which autograd adds gradients of a tensor that is
    both.
    saves: whether the input itself is saved for the backward pass, which refuses inference tensors;
    else what it is quantised to.
    strict: whether other dtypes of weight and bias than that of the input are refused outside of
    autocast, and rows and features that are no multiples of 8 and 16.
    """

    product: Product = dequantised
    casts: bool = True
    again: bool = True
    fuses: bool = False
    weight_first: bool = False
    saves: bool = True
    strict: bool = False


TORCHAO = Convention()
"""torchao: ``Float8Linear.forward`` duplicates "the autocast logic for F.linear"."""

TRANSFORMER_ENGINE = Convention(
    product=scaled_mm,
    casts=False,
    again=False,
    fuses=True,
    weight_first=True,
    saves=False,
    strict=True,
)
"""Transformer Engine: only the dtype of results follows autocast, ``set_activation_dtype``. The
backward pass has that of the forward pass, ``LinearBwdArgs.activation_dtype``."""


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
    if convention.strict:
        _check(x, weight, bias, low)
    if low is not None and convention.casts:
        x = x.to(low)
    with _without_autocast(x):
        inside = bias if convention.fuses else None
        pair = (weight, x) if convention.weight_first else (x, weight)
        y: torch.Tensor = _Linear.apply(  # type: ignore[no-untyped-call]
            *pair, inside, quantise, low, convention, finished
        )
        return y if bias is None or convention.fuses else y + bias.to(y.dtype)


def _check(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, low: torch.dtype | None
) -> None:
    """Raise TypeError or ValueError for what Transformer Engine documents as unsupported.

    Source: ``set_activation_dtype`` and ``assert_dim_for_fp8_exec``.
    """
    if low is None and any(p is not None and p.dtype != x.dtype for p in (weight, bias)):
        raise TypeError("outside of autocast, input and parameters must have one dtype")
    for name, tensor in (("input", x), ("weight", weight)):
        *rows, features = tensor.shape
        if math.prod(rows) % 8 or features % 16:
            raise ValueError(f"{name} {[*rows, features]}: use multiples of 8 rows, 16 features")


def _autocast_dtype(x: torch.Tensor) -> torch.dtype | None:
    """Return what autocast casts a tensor to, or None."""
    device = x.device.type
    on = device in here().devices() and x.is_floating_point() and x.dtype is not torch.float64
    return here().dtype(device) if on else None


def _without_autocast(x: torch.Tensor) -> AbstractContextManager[None]:
    return snapshot(x.device.type).disabled() if here().devices() else nullcontext()


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Any, b: Any, bias: Any, quantise: Any, low: Any, *how: Any) -> Any:
        convention, _ = how
        x, weight = (b, a) if convention.weight_first else (a, b)
        flat = x.reshape(-1, x.shape[-1])
        ctx.save_for_backward(weight, *([x] if convention.saves else []))
        ctx.kept = None if convention.saves else quantise(flat, 0, "input")
        ctx.how = x.shape, bias is not None, quantise, *how
        dtype = low or x.dtype
        left = quantise(flat, 1, "input")
        right = quantise(weight.t(), 0, "weight")
        if bias is not None:
            bias = bias.to(torch.bfloat16 if dtype is torch.float32 else dtype)
        y = convention.product(left, right, dtype, Pass("forward", low), bias)
        return y.reshape(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        weight, *saved = ctx.saved_tensors
        shape, biased, quantise, convention, finished = ctx.how
        low = _autocast_dtype(grad)
        dtype = low if low is not None and convention.again else grad.dtype
        g = grad.reshape(-1, grad.shape[-1])
        with _without_autocast(grad):
            left, right = quantise(g, 1, "grad_output"), quantise(weight.t(), 1, "weight").t()
            dx = convention.product(left, right, dtype, Pass("dgrad", low), None)
            right = quantise(saved[0].reshape(-1, shape[-1]), 0, "input") if saved else ctx.kept
            left = quantise(g, 0, "grad_output").t()
            dw = convention.product(left, right, dtype, Pass("wgrad", low), None)
            db = g.contiguous().sum(0) if biased else None
        if finished is not None:
            finished()
        dx = dx.reshape(shape)
        pair = (dw, dx) if convention.weight_first else (dx, dw)
        return *pair, db, None, None, None, None
