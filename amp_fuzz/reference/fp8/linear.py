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
from torch.nn import functional

from amp_fuzz.reference.autocast import snapshot
from amp_fuzz.reference.fp8.formats import E2M1, E4M3
from amp_fuzz.reference.fp8.recipes import Role
from amp_fuzz.reference.fp8.scaling import Quantised
from amp_fuzz.reference.state import here

__all__ = [
    "TORCHAO",
    "TORCHAO_MXFP8",
    "TRANSFORMER_ENGINE",
    "Convention",
    "Pass",
    "Product",
    "Quantiser",
    "autocast_dtype",
    "dequantised",
    "functional_scaled_mm",
    "linear",
    "scaled_mm",
    "te_reference",
]


@dataclass(frozen=True, slots=True)
class Pass:
    """Which of the three products it is, and the dtype of the autocast around it, or None."""

    name: Literal["forward", "dgrad", "wgrad"]
    autocast: torch.dtype | None


Product: TypeAlias = Callable[..., torch.Tensor]
"""Multiplies two matrices: of them, the dtype of the result, the pass, and a bias or None."""
Quantiser: TypeAlias = Callable[[torch.Tensor, int, Role], Quantised]
Check: TypeAlias = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor | None, torch.dtype | None], None
]
"""Refuses an input, a weight and a bias, under autocast of a dtype or none."""


# -- products -------------------------------------------------------------------------------------


def dequantised(
    a: Quantised, b: Quantised, dtype: torch.dtype, which: Pass, bias: None = None
) -> torch.Tensor:
    """Return the product of what two matrices stand for, accumulated in float32."""
    return torch.mm(a.values / a.scale, b.values / b.scale).to(dtype)


def in_dtype(
    a: Quantised, b: Quantised, dtype: torch.dtype, which: Pass, bias: None = None
) -> torch.Tensor:
    """Return the product of what two matrices stand for, by `torch.mm` of a dtype.

    Source: torchao 0.18, ``_addmm_mx_dispatch``, emulated.
    """
    left = a.dequantised().to(dtype).contiguous()
    return torch.mm(left, b.dequantised().to(dtype).t().contiguous().t())


def scaled_mm(
    a: Quantised, b: Quantised, dtype: torch.dtype, which: Pass, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the product by `torch._scaled_mm`, torch's own kernel for it.

    A bias is added before the rounding to `dtype`; to a product of float32, after it. There is no
    kernel for E2M1: see `fp4`.
    """
    if a.format is E2M1:
        y = fp4(a, b, dtype, which)
        return y if bias is None else y + bias.to(y.dtype)
    left, right, first, second = _operands(a, b)
    inside = None if dtype is torch.float32 else bias
    y = torch._scaled_mm(left, right, first, second, bias=inside, out_dtype=dtype)
    return y if bias is None or inside is not None else y + bias


def fp4(
    a: Quantised, b: Quantised, dtype: torch.dtype, which: Pass, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the product of two E2M1 matrices, block by block in float32, then rounded to `dtype`.

    ValueError for a bias, and for a sum over other numbers of elements than multiples of 32.

    Source: ``NVFP4QuantizerRef.qgemm`` of Transformer Engine 2.20, which stands for the tensor
    cores' order of the sum.
    """
    if bias is not None:
        raise ValueError("NVFP4 has no bias: leave it out")
    if a.values.shape[1] % 32:
        raise ValueError(f"{list(a.values.shape)}: NVFP4 sums over multiples of 32")
    assert a.blocks is not None and b.blocks is not None  # noqa: PT018
    assert a.whole is not None and b.whole is not None  # noqa: PT018
    y = torch.zeros(a.values.shape[0], b.values.shape[1], device=a.values.device)
    for start in range(0, a.values.shape[1], 16):
        block = slice(start, start + 16)
        scales = torch.outer(a.blocks[:, start], b.blocks[start])
        y += scales * torch.mm(a.values[:, block], b.values[block])
    return (a.whole * b.whole / (E2M1.max * E4M3.max) ** 2 * y).to(dtype)


def te_reference(
    a: Quantised, b: Quantised, dtype: torch.dtype, which: Pass, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the product as the references in Python of Transformer Engine do."""
    return (fp4 if a.format is E2M1 else scaled_mm)(a, b, dtype, which, bias)


def functional_scaled_mm(
    a: Quantised, b: Quantised, dtype: torch.dtype, which: Pass, bias: None = None
) -> torch.Tensor:
    """Return the product by `torch.nn.functional.scaled_mm`, whose kernel may be another one."""
    kinds = functional.ScalingType
    kind = kinds.RowWise if a.scale.dim() == 2 else kinds.TensorWise
    left, right, first, second = _operands(a, b)
    return functional.scaled_mm(left, right, first, kind, second, kind, output_dtype=dtype)


def _operands(a: Quantised, b: Quantised) -> tuple[torch.Tensor, ...]:
    """Return both matrices in their formats, row-major and column-major, and inverse scales."""
    left = a.values.to(a.format.dtype).contiguous()
    right = b.values.t().to(b.format.dtype).contiguous().t()
    # A fresh tensor: `contiguous` leaves the strides of dimensions of size 1, which are checked.
    first, second = (s.clone(memory_format=torch.contiguous_format) for s in (a.inverse, b.inverse))
    return left, right, first, second


# -- conventions ----------------------------------------------------------------------------------


def _anything(*operands: Any) -> None:
    """Refuse nothing."""


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
    check: raises TypeError or ValueError for what the implementation documents as unsupported.
    follows: whether the result has autocast's dtype.
    """

    product: Product = dequantised
    casts: bool = True
    follows: bool = True
    again: bool = True
    fuses: bool = False
    weight_first: bool = False
    saves: bool = True
    check: Check = _anything


def one_dtype(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, low: torch.dtype | None
) -> None:
    """Raise for what torchao's MXFP8 refuses: float16, and two dtypes outside of autocast.

    AssertionError and RuntimeError, as torchao does. Source: torchao 0.18, ``to_mx``: "float16 is
    not supported yet", and `torch.mm`.
    """
    if torch.float16 in (x.dtype, weight.dtype):
        raise AssertionError("float16 is not supported: use bfloat16")
    if low is None and weight.dtype != x.dtype:
        raise RuntimeError(f"outside of autocast, use one dtype, not {x.dtype} and {weight.dtype}")


def te_shapes(
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


TORCHAO = Convention()
"""torchao: ``Float8Linear.forward`` duplicates "the autocast logic for F.linear"."""

TORCHAO_MXFP8 = Convention(product=in_dtype, again=False, check=one_dtype)
"""torchao's ``MXFP8Linear``, emulated. It documents nothing about autocast: as ``Float8Linear``."""

TRANSFORMER_ENGINE = Convention(
    product=scaled_mm,
    casts=False,
    again=False,
    fuses=True,
    weight_first=True,
    saves=False,
    check=te_shapes,
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
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return a quantised linear layer of `x` [..., K] and `weight` [N, K], in the dtype of `x`.

    Under autocast for the device of `x`, in autocast's dtype. finished: is called at the end of the
    backward pass. dtype: another one for the result.
    """
    convention = here().semantics.fp8(convention)
    low = autocast_dtype(x) if convention.follows else None
    if low is not None and convention.casts:
        x = x.to(low)
    convention.check(x, weight, bias, low or dtype)
    with _without_autocast(x):
        inside = bias if convention.fuses else None
        pair = (weight, x) if convention.weight_first else (x, weight)
        y: torch.Tensor = _Linear.apply(  # type: ignore[no-untyped-call]
            *pair, inside, quantise, low, dtype or low or x.dtype, convention, finished
        )
        return y if bias is None or convention.fuses else y + bias.to(y.dtype)


def autocast_dtype(x: torch.Tensor) -> torch.dtype | None:
    """Return what autocast casts a tensor to, or None."""
    device = x.device.type
    on = device in here().devices() and x.is_floating_point() and x.dtype is not torch.float64
    return here().dtype(device) if on else None


def _without_autocast(x: torch.Tensor) -> AbstractContextManager[None]:
    return snapshot(x.device.type).disabled() if here().devices() else nullcontext()


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, a: Any, b: Any, bias: Any, quantise: Any, low: Any, dtype: Any, *how: Any
    ) -> Any:
        convention, _ = how
        x, weight = (b, a) if convention.weight_first else (a, b)
        flat = x.reshape(-1, x.shape[-1])
        kept = None if convention.saves else quantise(flat, 0, "input")
        ctx.save_for_backward(weight, *([x] if kept is None else kept.tensors()))
        ctx.how = x.shape, bias is not None, quantise, kept and kept.format, *how
        left = quantise(flat, 1, "input")
        right = quantise(weight.t(), 0, "weight")
        if bias is not None:
            bias = bias.to(torch.bfloat16 if dtype is torch.float32 else dtype)
        y = convention.product(left, right, dtype, Pass("forward", low), bias)
        return y.reshape(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        weight, *saved = ctx.saved_tensors
        shape, biased, quantise, form, convention, finished = ctx.how
        low = autocast_dtype(grad)
        dtype = low if low is not None and convention.again else grad.dtype
        g = grad.reshape(-1, grad.shape[-1])
        with _without_autocast(grad):
            left, right = quantise(g, 1, "grad_output"), quantise(weight.t(), 1, "weight").t()
            dx = convention.product(left, right, dtype, Pass("dgrad", low), None)
            if form is None:
                right = quantise(saved[0].reshape(-1, shape[-1]), 0, "input")
            else:
                right = Quantised.of(form, *saved)
            left = quantise(g, 0, "grad_output").t()
            dw = convention.product(left, right, dtype, Pass("wgrad", low), None)
            db = g.contiguous().sum(0) if biased else None
        if finished is not None:
            finished()
        dx = dx.reshape(shape)
        pair = (dw, dx) if convention.weight_first else (dx, dw)
        return *pair, db, None, None, None, None, None
