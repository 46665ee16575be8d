"""The kernels that Transformer Engine's Python code calls for FP8 layers, in plain torch.

Each stands in the stub for one function of ``transformer_engine_torch``. Scales of current scaling
are those of Transformer Engine's own reference, `reference_current_scaling`; products are those of
`torch._scaled_mm`. As on a GPU of compute capability 9.0, a tensor that is multiplied along its
rows needs a transposed copy.
"""

from __future__ import annotations

import math
from typing import Any

import torch

__all__ = ["KERNELS"]


def quantize(x: torch.Tensor, quantizer: Any, output: Any = None, noop: Any = None) -> Any:
    """Return a tensor in FP8, in `output` if there is one.

    A quantiser of delayed scaling has a scale, and notes the largest magnitude of what it rounds.
    noop: a tensor; 1 leaves `output` unchanged.
    """
    if output is not None and noop is not None and noop.item():
        return output
    scale, dtype = _scale(x, quantizer)
    largest = torch.finfo(dtype).max
    data = (x.float() * scale).clamp(-largest, largest).to(dtype).view(torch.uint8)
    made = {
        "_data": data if quantizer.rowwise_usage else None,
        "_transpose": fp8_transpose(data, None) if quantizer.columnwise_usage else None,
        "_scale_inv": scale.reciprocal(),
    }
    if output is None:
        output = _empty(x, quantizer)
    for name, value in made.items():
        held = getattr(output, name)
        if held is None or value is None:
            setattr(output, name, value)
        else:
            held.copy_(value)
    output._transpose_invalid = output._transpose is None
    return output


def _scale(x: torch.Tensor, quantizer: Any) -> tuple[torch.Tensor, torch.dtype]:
    from transformer_engine.pytorch.constants import TE_DType_To_Torch
    from transformer_engine.pytorch.custom_recipes import reference_current_scaling as reference

    dtype = TE_DType_To_Torch[quantizer.dtype]
    if hasattr(quantizer, "amax"):  # delayed scaling
        scale = quantizer.scale.clone().reshape(1)
        quantizer.amax.copy_(torch.maximum(quantizer.amax, x.abs().max().float()))
        return scale, dtype
    found = reference.CurrentScalingQuantizerRef.compute_scale(
        x, dtype, eps=quantizer.amax_epsilon, pow_2_scales=quantizer.force_pow_2_scales
    )
    return found[0], dtype


def _empty(x: torch.Tensor, quantizer: Any) -> Any:
    """Return a tensor without data: one of torch's, or, for use within a layer, a storage."""
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor
    from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage

    options = {
        "data": None,
        "data_transpose": None,
        "fp8_scale_inv": None,
        "fp8_dtype": quantizer.dtype,
        "quantizer": quantizer,
    }
    if quantizer.internal:
        return Float8TensorStorage(fake_dtype=x.dtype, **options)
    return Float8Tensor(shape=x.shape, dtype=x.dtype, device=x.device, **options)


def fp8_transpose(data: torch.Tensor, dtype: Any, out: Any = None) -> torch.Tensor:
    """Return the data of a tensor with its last dimension first."""
    made = data.movedim(-1, 0).contiguous()
    return made if out is None else out.copy_(made)


def bgrad_quantize(grad: torch.Tensor, quantizer: Any) -> tuple[torch.Tensor, Any]:
    """Return the gradient of the bias, and the quantised gradient."""
    return grad.reshape(-1, grad.shape[-1]).sum(0), quantizer(grad)


def generic_gemm(
    a: Any, transa: bool, b: Any, transb: bool, out: Any, quantizer: Any, out_dtype: Any,
    bias: Any, bias_dtype: Any, gelu: bool, gelu_in: Any, grad: bool, *more: Any, **options: Any,
) -> tuple[Any, None, None, None]:  # fmt: skip
    """Return the product of two FP8 matrices: of the rows of `b` with those of `a`."""
    from transformer_engine.pytorch.constants import TE_DType_To_Torch

    left, right = _rows(b, transposed=transb), _rows(a, transposed=not transa)
    dtype = TE_DType_To_Torch[out_dtype]
    inside = None if grad or dtype is torch.float32 else bias
    flat = left.reshape(-1, left.shape[-1])
    y = torch._scaled_mm(flat, right.t(), b._scale_inv, a._scale_inv, bias=inside, out_dtype=dtype)
    if bias is not None and inside is None and not grad:
        y = y + bias
    return y.reshape(*left.shape[:-1], y.shape[-1]), None, None, None


def _rows(x: Any, *, transposed: bool) -> torch.Tensor:
    """Return a matrix of a quantised tensor whose rows are summed over."""
    from transformer_engine.pytorch.constants import TE_DType_To_Torch

    held: torch.Tensor = x._transpose if transposed else x._data
    data = held.view(TE_DType_To_Torch[x._fp8_dtype])
    if not transposed:
        return data
    return data.reshape(data.shape[0], math.prod(data.shape[1:]))


KERNELS = (quantize, fp8_transpose, bgrad_quantize, generic_gemm)
