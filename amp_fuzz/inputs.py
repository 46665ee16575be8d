"""Input values: deterministic in the seed and the input's name, on every machine and version.

They come from NumPy's counter-based Philox generator, keyed by seed and name, never from torch's
generators. Each value is made in float64 and rounded once, to nearest even, to the input's dtype.
"""

from __future__ import annotations

import zlib
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from amp_fuzz.program import TensorSpec

__all__ = ["array", "strides", "tensor"]

# Largest finite value and smallest normal exponent of each floating dtype.
_MAX = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38, "float32": 3.4028234663852886e38}
_TINY = {"float16": -14, "bfloat16": -126, "float32": -126, "float64": -1022}
_MANTISSA = {"float16": 10, "bfloat16": 7, "float32": 23, "float64": 52}


def array(spec: TensorSpec, seed: int) -> NDArray[np.generic]:
    """Return the values of an input as float64, int64, bool or complex128, in the spec's shape."""
    key = (seed & 0xFFFFFFFF) << 32 | zlib.crc32(spec.name.encode())
    rng = np.random.Generator(np.random.Philox(key=key))
    if spec.dtype == "bool":
        return rng.random(spec.shape) < 0.5
    if spec.dtype in ("int64", "int32", "uint8"):
        low, high = (0, 5) if spec.dtype == "uint8" else (-4, 5)
        if spec.domain == "index":
            low, high = 0, spec.bound
        elif spec.domain == "zeros":
            low, high = 0, 1
        elif spec.domain == "positive":
            low, high = 1, 5
        return rng.integers(low, high, size=spec.shape, dtype=np.int64)
    if spec.dtype.startswith("complex"):
        real, imaginary = _floats(spec, rng), _floats(spec, rng)
        return real + 1j * imaginary
    return _floats(spec, rng)


def _floats(spec: TensorSpec, rng: np.random.Generator) -> NDArray[np.float64]:
    shape, dtype = spec.shape, spec.dtype.replace("complex64", "float32").replace("128", "64")
    dtype = dtype.replace("complex64", "float64")
    n = int(np.prod(shape))
    domain = spec.domain
    if domain == "zeros":
        return np.where(rng.random(shape) < 0.25, -0.0, 0.0)
    if domain == "uniform":
        return rng.uniform(-2.0, 2.0, shape)
    if domain == "integers":
        return rng.integers(-4, 5, shape).astype(np.float64)
    if domain == "positive":
        return rng.uniform(0.25, 4.0, shape)
    if domain == "unit":
        return rng.uniform(0.0, 1.0, shape)
    if domain == "overflow":
        top = _MAX.get(dtype, 1e300)
        scale = np.where(rng.random(shape) < 0.5, top, np.sqrt(top))
        return rng.uniform(-1.0, 1.0, shape) * scale
    if domain == "subnormal":
        return rng.uniform(-4.0, 4.0, shape) * 2.0 ** (_TINY[dtype] - 1)
    if domain == "ties":
        # One more bit than the dtype's neighbours keep: casts to bfloat16 or float16 must round.
        mantissa = _MANTISSA["bfloat16" if dtype == "float32" else dtype]
        odd = rng.integers(0, 2**mantissa, shape) * 2 + 1
        return (1.0 + odd * 2.0 ** -(mantissa + 1)) * np.where(rng.random(shape) < 0.5, -1.0, 1.0)
    if domain == "cancelling":
        half = rng.normal(size=(n + 1) // 2) * 8.0
        both = np.concatenate([half, -half * (1.0 + 2.0**-7)])[:n]
        return rng.permutation(both).reshape(shape)
    if domain == "psd" and len(shape) >= 2 and shape[-1] == shape[-2]:
        a = rng.normal(size=shape)
        psd: NDArray[np.float64] = a @ a.swapaxes(-1, -2) + np.eye(shape[-1]) * shape[-1]
        return psd
    return rng.normal(size=shape)


_DTYPES = {
    name: getattr(torch, name)
    for name in (
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
        *("int64", "int32", "uint8", "bool"),
    )
}


@lru_cache(maxsize=512)
def _values(spec: TensorSpec, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.array(array(spec, seed), order="C")).to(_DTYPES[spec.dtype])


def strides(spec: TensorSpec) -> tuple[int, ...]:
    """Return the strides, in elements, of an input's layout.

    ``transposed`` has its dimensions in memory the other way round; ``strided`` steps over every
    second element; ``contiguous`` and ``offset`` are as a fresh tensor.
    """
    order = spec.shape if spec.layout == "transposed" else spec.shape[::-1]
    found, step = [], 2 if spec.layout == "strided" else 1
    for size in order:
        found.append(step)
        step *= max(size, 1)
    return tuple(found if spec.layout == "transposed" else found[::-1])


def tensor(spec: TensorSpec, seed: int) -> torch.Tensor:
    """Return a fresh CPU tensor of the spec's values, dtype and layout; it requires no grad.

    Only ``offset`` is a view, into a larger tensor; the others own their storage.
    """
    values = _values(spec, seed)
    if spec.layout == "contiguous":
        return values.clone()
    if spec.layout == "offset":
        base = torch.zeros(values.numel() + 3, dtype=values.dtype)
        base[3:] = values.reshape(-1)
        return base[3:].view(spec.shape)
    return torch.empty_strided(spec.shape, strides(spec), dtype=values.dtype).copy_(values)
