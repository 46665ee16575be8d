"""Input values: deterministic in the seed and the input's name, on every machine and version.

An input may hold its own elements. All other values come from NumPy's counter-based Philox
generator (Salmon et al. 2011), keyed by seed and name, never from torch's generators. Each value is
made in float64 and rounded once, to nearest even, to the input's dtype.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from functools import lru_cache
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from amp_fuzz.cases.program import TensorSpec

__all__ = ["array", "bits_text", "strides", "tensor"]

# Largest finite value and smallest normal exponent of each floating dtype.
_MAX = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38, "float32": 3.4028234663852886e38}
_TINY = {"float16": -14, "bfloat16": -126, "float32": -126, "float64": -1022}


Array: TypeAlias = "NDArray[np.float64]"


class _Draws:
    """Values made from Philox's raw 64-bit words by exact arithmetic alone.

    NumPy guarantees the raw words but not its distributions, and a logarithm or a cosine may differ
    in the last bit between libms.
    """

    def __init__(self, key: int, shape: tuple[int, ...]) -> None:
        self._philox = np.random.Philox(key=key)
        self.shape = shape
        self.n = math.prod(shape)

    def _words(self, count: int) -> NDArray[np.uint64]:
        words: NDArray[np.uint64] = self._philox.random_raw(count)
        return words

    def unit(self) -> Array:
        """Uniform in [0, 1), multiples of 2^-53."""
        return self._unit(self.n).reshape(self.shape)

    def _unit(self, count: int) -> Array:
        return (self._words(count) >> np.uint64(11)).astype(np.float64) * np.float64(2.0**-53)

    def uniform(self, low: float, high: float) -> Array:
        """Uniform in [low, high)."""
        return low + self.unit() * (high - low)

    def integers(self, low: int, high: int) -> NDArray[np.int64]:
        """Integers in [low, high)."""
        words = self._words(self.n) % np.uint64(high - low)
        values: NDArray[np.int64] = words.astype(np.int64) + low
        return values.reshape(self.shape)

    def normal(self) -> Array:
        """Nearly normal: the sum of twelve uniform values minus six (Irwin-Hall), so |x| < 6."""
        parts = self._unit(12 * self.n).reshape(12, self.n)
        total: Array = parts[0]
        for part in parts[1:]:  # in this order: a library's sum may pair terms as it likes
            total = total + part
        return (total - np.float64(6.0)).reshape(self.shape)

    def signs(self) -> Array:
        """Minus one or one."""
        return np.where(self._words(self.n) & np.uint64(1), -1.0, 1.0).reshape(self.shape)

    def shuffled(self, values: Array) -> Array:
        """Return the first n of these values, in random order, in the shape."""
        order = np.argsort(self._words(self.n), kind="stable")
        return values[: self.n][order].reshape(self.shape)


def array(spec: TensorSpec, seed: int) -> NDArray[np.generic]:
    """Return what an input draws as float64, int64, bool or complex128, in the spec's shape.

    Values are drawn even for an input that holds its own elements; see `tensor`.
    """
    key = (seed & 0xFFFFFFFF) << 32 | zlib.crc32(spec.name.encode())
    draws = _Draws(key, spec.shape)
    if spec.dtype == "bool":
        return draws.unit() < 0.5
    if spec.dtype in ("int64", "int32", "uint8"):
        low, high = (0, 5) if spec.dtype == "uint8" else (-4, 5)
        if spec.domain == "index":
            low, high = 0, spec.bound
        elif spec.domain == "zeros":
            low, high = 0, 1
        elif spec.domain == "positive":
            low, high = 1, 5
        return draws.integers(low, high)
    if spec.dtype.startswith("complex"):
        part = "float32" if spec.dtype == "complex64" else "float64"
        return _floats(spec.domain, part, draws) + 1j * _floats(spec.domain, part, draws)
    return _floats(spec.domain, spec.dtype, draws)


def _floats(domain: str, dtype: str, draws: _Draws) -> Array:
    if domain == "zeros":
        return np.where(draws.unit() < 0.25, -0.0, 0.0)
    if domain == "uniform":
        return draws.uniform(-2.0, 2.0)
    if domain == "integers":
        return draws.integers(-4, 5).astype(np.float64)
    if domain == "positive":
        return draws.uniform(0.25, 4.0)
    if domain == "unit":
        return draws.unit()
    if domain == "overflow":
        # Half of them within a factor of the largest value, half around its square root.
        top = _MAX.get(dtype, 1e300)
        return draws.uniform(-1.0, 1.0) * np.where(draws.unit() < 0.5, top, math.sqrt(top))
    if domain == "subnormal":
        return draws.uniform(-4.0, 4.0) * 2.0 ** (_TINY[dtype] - 1)
    if domain == "ties":
        # Exactly between two neighbours of a 16-bit dtype that a cast rounds to: of float16 or
        # bfloat16, but a float16 input holds ties of bfloat16 only, and a bfloat16 input none.
        wide = dtype in ("float32", "float64")
        mantissa = np.where(draws.unit() < 0.5, 7, 10) if wide else np.int64(7)
        odd = draws.integers(0, 2**10) % 2**mantissa * 2 + 1
        return (1.0 + odd * 2.0 ** -(mantissa + 1.0)) * draws.signs()
    if domain == "cancelling":
        half = draws.normal().reshape(-1)[: (draws.n + 1) // 2] * 8.0
        return draws.shuffled(np.concatenate([half, -half * (1.0 + 2.0**-7)]))
    shape = draws.shape
    if domain == "psd" and len(shape) >= 2 and shape[-1] == shape[-2]:
        # Small integers are exact in whatever order a library sums.
        a = draws.integers(-2, 3).astype(np.float64)
        psd: Array = np.matmul(a, a.swapaxes(-1, -2)) + np.eye(shape[-1]) * shape[-1]
        return psd
    return draws.normal()


_DTYPES = {
    name: getattr(torch, name)
    for name in (
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
        *("int64", "int32", "uint8", "bool"),
    )
}


@lru_cache(maxsize=512)
def _values(spec: TensorSpec, seed: int) -> torch.Tensor:
    if spec.values:
        return _given(spec)
    values = array(spec, seed)
    # torch casts float64 to the 16-bit dtypes through float32, which rounds twice.
    if spec.dtype == "float16":
        values = values.astype(np.float16)
    elif spec.dtype == "bfloat16":
        values = _to_odd(values.astype(np.float64))
    return torch.from_numpy(np.array(values, order="C")).to(_DTYPES[spec.dtype])


_PARTS: Mapping[str, torch.dtype] = {"complex64": torch.float32, "complex128": torch.float64}


def _given(spec: TensorSpec) -> torch.Tensor:
    """Return the elements that an input holds."""
    part = _PARTS.get(spec.dtype, _DTYPES[spec.dtype])
    data = np.frombuffer(bytes.fromhex(spec.values), dtype=f">i{part.itemsize}")
    words = torch.from_numpy(data.astype(f"=i{part.itemsize}"))
    values = words.to(torch.bool) if part is torch.bool else words.view(part)
    if spec.dtype in _PARTS:
        values = torch.view_as_complex(values.reshape(-1, 2))
    return values.reshape(spec.shape)


def bits_text(tensor: torch.Tensor) -> str:
    """Return a tensor's elements as `TensorSpec.values` holds them: every bit, in row-major order.

    It may require grad and be on any device; conjugated and negated views are resolved.
    """
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if plain.is_complex():
        plain = torch.view_as_real(plain).reshape(-1)
    size = plain.element_size()
    if plain.dtype is torch.bool:
        plain = plain.to(torch.uint8)
    words = plain.view(_WORDS[size]).numpy()
    return words.astype(f">i{size}").tobytes().hex()


_WORDS: Mapping[int, torch.dtype] = {
    1: torch.int8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
}


def _to_odd(values: Array) -> NDArray[np.float32]:
    """Round to float32, to odd: a following rounding to bfloat16 then rounds only once.

    Boldo and Melquiond 2008, "Emulation of a FMA and correctly rounded sums: proved algorithms
    using rounding to odd": the last bit records what was cut off.
    """
    near = np.asarray(values, dtype=np.float32)
    away = np.abs(near.astype(np.float64)) > np.abs(values)
    cut = np.where(away, np.nextafter(near, np.float32(0)), near)
    odd: NDArray[np.int32] = cut.view(np.int32) | (cut.astype(np.float64) != values)
    return odd.view(np.float32)


def strides(spec: TensorSpec) -> tuple[int, ...]:
    """Return the strides, in elements, of an input's layout.

    ``transposed`` reverses the dimensions in memory; ``strided`` skips every second element;
    ``contiguous`` and ``offset`` have the strides of a fresh tensor.
    """
    order = spec.shape if spec.layout == "transposed" else spec.shape[::-1]
    found, step = [], 2 if spec.layout == "strided" else 1
    for size in order:
        found.append(step)
        step *= max(size, 1)
    return tuple(found if spec.layout == "transposed" else found[::-1])


def tensor(spec: TensorSpec, seed: int) -> torch.Tensor:
    """Return a fresh CPU tensor with the spec's values, dtype and layout. It requires no grad.

    Only ``offset`` is a view, into a larger tensor; the others own their storage.
    """
    values = _values(spec, seed)
    if spec.layout == "contiguous":
        return values.clone()
    if spec.layout == "offset":
        base = torch.zeros(values.numel() + 3, dtype=values.dtype)
        base[3:] = values.reshape(-1)
        return base[3:].view(spec.shape)
    made = torch.empty_strided(spec.shape, strides(spec), dtype=values.dtype)
    if spec.layout == "strided" and made.numel():
        # Zeros between the elements: a kernel that ignores strides reads them, and its result must
        # be the same every time.
        whole = made.untyped_storage().nbytes() // made.element_size()
        made.as_strided((whole,), (1,)).zero_()
    return made.copy_(values)
