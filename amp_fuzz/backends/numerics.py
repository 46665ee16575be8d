"""How the devices of torch compute by their documentation, under torch's current settings."""

from __future__ import annotations

from typing import Any

import torch

from amp_fuzz.backends.determinism import EXACT, listed
from amp_fuzz.backends.reference import Numerics
from amp_fuzz.reference.shadow.products import Products, convolves, multiplies

__all__ = ["numerics"]


def numerics(device: str, *, reorders: bool = True) -> Numerics:
    """Return the arithmetic of a device type.

    reorders: whether it may add in another order than the CPU's kernels. The CPU's own kernels are
    not seen to vary; nothing is known of a device that torch does not document.
    """
    return Numerics(
        reorders=reorders,
        products=lambda precision, func: _products(device, func),
        adding=_adds_narrowly if device == "cuda" else None,
        kernels=EXACT if device == "cpu" else listed(device),
    )


_BFLOAT16 = Products(digits=8)
# Which kernels round to it (cvt.rna.tf32 of PTX) and which truncate is not documented.
_TF32 = Products(digits=11, truncates=True)


def _products(device: str, func: Any) -> Products | None:
    """Return how a device rounds the float32 inputs of a product, under torch's current settings.

    https://docs.pytorch.org/docs/stable/generated/torch.set_float32_matmul_precision.html and
    https://docs.pytorch.org/docs/stable/notes/cuda.html#tf32-on-ampere.
    """
    convolution = convolves(func)
    if device == "cuda":
        if torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0):
            return None
        flags = torch.backends.cudnn if convolution else torch.backends.cuda.matmul
        return _TF32 if flags.allow_tf32 else None
    if device != "cpu" or convolution or not _narrows():
        return None
    return {"medium": _BFLOAT16, "high": _TF32}.get(torch.get_float32_matmul_precision())


def _narrows() -> bool:
    """Return whether oneDNN may multiply float32 in another type on this processor."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _adds_narrowly(func: Any, dtype: torch.dtype) -> bool:
    """Return whether CUDA may add in the inputs' dtype, under torch's current settings.

    https://docs.pytorch.org/docs/stable/notes/numerical_accuracy.html, on reduced precision
    reductions and on accumulation in float16.
    """
    matmul = torch.backends.cuda.matmul
    if not multiplies(func):
        return False
    if dtype is torch.float16:
        reduces = matmul.allow_fp16_reduced_precision_reduction
        return bool(reduces or getattr(matmul, "allow_fp16_accumulation", False))
    return dtype is torch.bfloat16 and bool(matmul.allow_bf16_reduced_precision_reduction)
