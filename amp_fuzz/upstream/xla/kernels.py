"""Ops that XLA computes otherwise; the page is docs/findings/jax.md.

xla-depthwise: a convolution of float64 in which each group has one channel also multiplies the
    channels of the others, with 0.
xla-excess-precision: what is computed from a 16-bit result takes it as it was before it was
    rounded.
xla-fast-tanh: tanh of float32, also in gelu and mish, is a quotient of polynomials, off by up to
    4.3 units of 2^-24 where it is near 1.
xla-gamma: lgamma and digamma are computed by Lanczos' approximation, which cancels near 1 and 2.
xla-masked-products: a product with a mask is 0 where the mask is off, whatever the other factor
    is: a program that XLA compiles selects.
"""

from __future__ import annotations

from typing import Any

import torch

from amp_fuzz.backends.imitation import Imitation
from amp_fuzz.backends.imitations import xla
from amp_fuzz.upstream.lowering import in_place, kernels

__all__ = ["IMITATIONS"]

_aten = torch.ops.aten


def _masked(a: Any, b: Any) -> torch.Tensor | None:
    """Choose 0 where a mask is off, though the other factor be infinite or NaN."""
    for mask, value in ((a, b), (b, a)):
        masks = isinstance(mask, torch.Tensor) and mask.dtype is torch.bool
        if masks and isinstance(value, torch.Tensor) and value.is_floating_point():
            dtype = torch.result_type(a, b)
            return torch.where(mask, value.to(dtype), torch.zeros((), dtype=dtype))
    return None


_PRODUCTS = {_aten.mul.Tensor: _masked, _aten.mul_.Tensor: in_place(_masked)}
IMITATIONS = {
    "xla-depthwise": Imitation(kernels=kernels(xla.DEPTHWISE, bodies=True)),
    "xla-excess-precision": Imitation(around=xla.Excess),
    "xla-fast-tanh": Imitation(kernels=kernels(xla.TANH, bodies=True)),
    "xla-gamma": Imitation(kernels=kernels(xla.FUNCTIONS, bodies=True)),
    "xla-masked-products": Imitation(kernels=kernels(_PRODUCTS, bodies=True)),
}
"""The imitations, by name. The records are in known.toml."""
