"""How the devices of torch compute by their documentation, under torch's current settings."""

from __future__ import annotations

from typing import Any

import torch

from amp_fuzz.backends.determinism import EXACT, listed
from amp_fuzz.backends.reference import Numerics
from amp_fuzz.reference.shadow.products import BFLOAT16, TF32, Products, convolves, multiplies

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


_ROUNDED = {"bf16": BFLOAT16, "tf32": TF32}


def _products(device: str, func: Any) -> Products | None:
    """Return how a device rounds the float32 inputs of a product, under torch's current settings.

    https://docs.pytorch.org/docs/stable/generated/torch.set_float32_matmul_precision.html and
    https://docs.pytorch.org/docs/stable/notes/cuda.html#tf32-on-ampere.
    """
    if device == "cuda":
        if torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0):
            return None
        said = _said("cudnn", "conv") if _in_cudnn(func) else _said("cuda", "matmul")
    elif device == "cpu" and not convolves(func):
        said = _said("mkldnn", "matmul")
        if said in _ROUNDED and not _narrows():
            return None
    else:
        return None
    return _ROUNDED.get(said)


def _said(backend: str, op: str) -> str:
    """Return the precision of float32 in an op: ``ieee``, ``tf32``, ``bf16`` or ``none``."""
    backends: Any = torch.backends
    owner = getattr(getattr(backends, backend), op, None)
    found: str | None = getattr(owner, "fp32_precision", None)
    if found is not None:  # since torch 2.9
        return backends.fp32_precision if found == "none" else found
    if backend == "mkldnn":
        return {"high": "tf32", "medium": "bf16"}.get(torch.get_float32_matmul_precision(), "ieee")
    flags = backends.cudnn if backend == "cudnn" else backends.cuda.matmul
    return "tf32" if flags.allow_tf32 else "ieee"


def _in_cudnn(func: Any) -> bool:
    """Return whether an op is a convolution of cuDNN; without cuDNN it is a product of cuBLAS."""
    return convolves(func) and bool(torch.backends.cudnn.enabled)


def _narrows() -> bool:
    """Return whether oneDNN is on, and may multiply float32 in another type on this processor."""
    mkldnn: Any = torch.backends.mkldnn
    return bool(
        mkldnn.is_available() and mkldnn.enabled and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def _adds_narrowly(func: Any, dtype: torch.dtype) -> bool:
    """Return whether CUDA may add in the inputs' dtype, under torch's current settings.

    https://docs.pytorch.org/docs/stable/notes/numerical_accuracy.html, on reduced precision
    reductions and on accumulation in float16.
    """
    matmul = torch.backends.cuda.matmul
    if not (multiplies(func) or convolves(func)) or _in_cudnn(func):
        return False
    if dtype is torch.float16:
        reduces = matmul.allow_fp16_reduced_precision_reduction
        return bool(reduces or getattr(matmul, "allow_fp16_accumulation", False))
    return dtype is torch.bfloat16 and bool(matmul.allow_bf16_reduced_precision_reduction)
