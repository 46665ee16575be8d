"""Products whose kernels round their inputs first, to fewer digits than their dtype has.

Accelerators multiply matrices of float32 in a narrower type and add in float32: a TPU in bfloat16
(`jax.lax.Precision`), an NVIDIA GPU in TensorFloat-32. In three passes each input is the sum of two
such numbers, ``x = high + low``, and ``low * low`` is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from amp_fuzz.reference.shadow.band import UNIT_ROUNDOFF
from amp_fuzz.reference.shadow.copies import tensors_in

__all__ = ["BFLOAT16", "TF32", "Products", "convolves", "factors", "multiplies"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Products:
    """How a platform rounds the inputs of a product.

    digits: of the significand, the leading one included: 8 is bfloat16, 11 TensorFloat-32. passes:
    1, or 3 with a second number of as many digits. truncates: it may also round toward zero.
    """

    digits: int
    passes: int = 1
    truncates: bool = False

    @property
    def roundoff(self) -> float:
        """The relative error of one input.

        One pass: the unit roundoff, 2^-digits, or twice that if truncated. Three passes: what is
        left of an input after two roundings, 2^-(2 digits), and as much of the product for the
        part that is left out, which is half for each input.
        """
        if self.passes == 3:
            return 1.5 * 2.0 ** (-2 * self.digits)
        return 2.0**-self.digits * (2 if self.truncates else 1)

    def rounds(self, dtype: torch.dtype) -> bool:
        """Return whether inputs of a dtype have more digits. Float64 is a float64 product."""
        u = UNIT_ROUNDOFF.get(dtype, 1.0)
        return UNIT_ROUNDOFF[torch.float64] < u < 2.0**-self.digits

    def of(
        self, copies: torch.Tensor, nominal: torch.Tensor, noise: Callable[[torch.Tensor], Any]
    ) -> torch.Tensor:
        """Return copies ``[K + 1, *shape]`` of a factor as the platform may take them.

        Every second one is rounded, as the platform does it. The others are off by up to the
        roundoff: a kernel need not round, and a number that an honest kernel computed a little
        differently may round the other way. What needs no rounding is off by nothing.
        """
        if copies.is_complex():
            parts = torch.view_as_real(copies), torch.view_as_real(nominal)
            return torch.view_as_complex(self.of(*parts, noise))
        out = copies.clone(memory_format=torch.contiguous_format)
        value = nominal.detach().to(copies.dtype)
        short = _rounded(value, self.digits) == value
        step = noise(out[1:]).mul_(self.roundoff).masked_fill_(short, 0)
        out[2::2] *= 1 + step[1::2]
        out[1::2] = self._taken(out[1::2])
        if self.truncates:
            out[3::4] = _rounded(copies[3::4], self.digits, truncates=True)
        return out

    def _taken(self, x: torch.Tensor) -> torch.Tensor:
        high = _rounded(x, self.digits)
        return high if self.passes == 1 else high + _rounded(x - high, self.digits)


BFLOAT16 = Products(digits=8)
# Which kernels round to it (cvt.rna.tf32 of PTX) and which truncate is not documented.
TF32 = Products(digits=11, truncates=True)


def _rounded(x: torch.Tensor, digits: int, *, truncates: bool = False) -> torch.Tensor:
    """Return float64 numbers rounded to a number of digits, to nearest even or toward zero."""
    fraction, exponent = torch.frexp(x)
    scaled = torch.ldexp(fraction, torch.tensor(digits))
    made = torch.ldexp((scaled.trunc() if truncates else scaled.round()), exponent - digits)
    limit = torch.finfo(torch.float32).max  # as that of bfloat16 and TensorFloat-32, nearly
    made = torch.where(made.abs() > limit, made.sign() * torch.inf, made)
    return torch.where(torch.isfinite(x), made, x)


# Products, with the arguments that are added, and so are not rounded.
_ADDED: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "vdot", "_trilinear", "convolution_backward"), ()),
    **dict.fromkeys(
        ("addmm", "addmv", "addbmm", "baddbmm", "addr", "_addmm_activation"), ("self",)
    ),
    **dict.fromkeys(
        ("linear", "convolution", "_convolution", "convolution_overrideable", "conv_tbc"),
        ("bias",),
    ),
    **dict.fromkeys(
        ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_attention_math"),
        ("attn_mask",),
    ),
    "_scaled_dot_product_flash_attention_for_cpu_backward": ("attn_mask", "logsumexp"),
    "_native_multi_head_attention": ("qkv_bias", "proj_bias", "mask"),
}


@cache
def _positions(func: Any) -> tuple[tuple[int, str], ...] | None:
    name = func.__name__.partition(".")[0]
    added = _ADDED.get(name, _ADDED.get(name.removesuffix("_")))
    if added is None:
        return None
    return tuple((i, a.name) for i, a in enumerate(func._schema.arguments) if a.name in added)


def convolves(func: Any) -> bool:
    """Return whether an op is a convolution, or the gradient of one."""
    return "convolution" in func.__name__


def multiplies(func: Any) -> bool:
    """Return whether an op is a product of matrices or vectors."""
    return _positions(func) is not None and not convolves(func)


# Their gradients are outer products, or a number times a vector, which torch multiplies element by
# element. XLA may make them products without a sum.
_SUMS = frozenset(f"{name}Backward0" for name in ("Addmv", "Dot", "Mv", "Vdot"))


def _outer(func: Any) -> bool:
    """Return whether a call multiplies for the gradient of a product with a vector."""
    if func is not torch.ops.aten.mul.Tensor:
        return False
    # None outside of a backward pass, which its type does not say.
    name = getattr(torch._C._current_autograd_node(), "name", str)
    return name() in _SUMS


def factors(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[bool] | None:
    """Return which of a call's tensors are factors of a product; None: it is no product."""
    added = _positions(func)
    if added is None:
        return [True] * len(tensors_in((args, kwargs))) if _outer(func) else None
    left = {id(args[i]) for i, _ in added if i < len(args)}
    left |= {id(kwargs[name]) for _, name in added if name in kwargs}
    left |= {id(value) for name, value in kwargs.items() if name == "out"}
    return [id(t) not in left for t in tensors_in((args, kwargs))]
