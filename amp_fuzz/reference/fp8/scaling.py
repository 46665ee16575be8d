"""How recipes scale a matrix before it is rounded to an FP8 or FP4 format.

A matrix is quantised for one product, along the dimension that the product sums over: `dim`. All
arithmetic is that of the published rule, mostly float32. A scale multiplies before the rounding,
its inverse after the product.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from amp_fuzz.reference.fp8.formats import E2M1, E4M3, Format, power_below, power_up, rounded

__all__ = [
    "Quantised",
    "blockwise",
    "current",
    "given",
    "mxfp8",
    "nvfp4",
    "rowwise",
    "tensorwise",
]

_FLOAT32_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True)
class Quantised:
    """A quantised matrix: values of a format, as float32, and the scale they were rounded with.

    scale, inverse: float32, of a shape that broadcasts to that of the values. blocks, whole: for
    two levels of scales, the scale of each element's block in units of the tensor's, and the
    largest magnitude of the tensor.
    """

    values: torch.Tensor
    scale: torch.Tensor
    inverse: torch.Tensor
    format: Format
    blocks: torch.Tensor | None = None
    whole: torch.Tensor | None = None

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """Return all tensors of it, for `of`."""
        return self.values, self.scale, self.inverse, self.blocks, self.whole

    @classmethod
    def of(cls, form: Format, *tensors: torch.Tensor | None) -> Quantised:
        """Return the quantised matrix that has these tensors."""
        values, scale, inverse, blocks, whole = tensors
        assert values is not None and scale is not None and inverse is not None  # noqa: PT018
        return cls(values, scale, inverse, form, blocks, whole)

    def t(self) -> Quantised:
        """Return the transposed matrix."""
        scale, inverse = (s.t() if s.dim() == 2 else s for s in (self.scale, self.inverse))
        blocks = None if self.blocks is None else self.blocks.t()
        return replace(self, values=self.values.t(), scale=scale, inverse=inverse, blocks=blocks)

    def dequantised(self) -> torch.Tensor:
        """Return the values that stand for the matrix, in float32."""
        return self.values * self.inverse


def _scaled(x: torch.Tensor, scale: torch.Tensor, to: Format) -> Quantised:
    return Quantised(rounded(x.float() * scale, to), scale, scale.reciprocal(), to)


def _amax(x: torch.Tensor, *dims: int) -> torch.Tensor:
    return x.abs().amax(dims, keepdim=True).float() if dims else x.abs().max().float()


# -- one scale a tensor ---------------------------------------------------------------------------


def given(x: torch.Tensor, scale: torch.Tensor, to: Format) -> Quantised:
    """Quantise with a scale that is already there, as delayed scaling does."""
    return _scaled(x, scale, to)


def tensorwise(x: torch.Tensor, to: Format) -> Quantised:
    """Quantise with one scale: the largest value of the format over the largest magnitude.

    The magnitude counts as 1e-12 at least. The division is in float64, and then rounded to
    float32. An infinity or NaN in `x` makes every value NaN: the scale is 0 or NaN.

    Source: torchao 0.18, ``torchao/float8/float8_utils.py``, ``amax_to_scale`` (the recipe
    "tensorwise" of ``Float8LinearConfig``).
    """
    return _scaled(x, _over(_amax(x), to), to)


def rowwise(x: torch.Tensor, dim: int, to: Format) -> Quantised:
    """Quantise with one scale for each row (`dim` 1) or column (0), rounded down to a power of two.

    Source: torchao 0.18, ``torchao/float8/config.py``, ``Float8LinearRecipeName.ROWWISE``, and
    ``float8_utils.py``, ``_round_scale_down_to_power_of_2``.
    """
    return _scaled(x, power_below(_over(_amax(x, dim), to)), to)


def _over(amax: torch.Tensor, to: Format) -> torch.Tensor:
    return (to.max / amax.double().clamp(min=1e-12)).float()


def current(x: torch.Tensor, to: Format) -> Quantised:
    """Quantise with one scale, as Transformer Engine's current scaling does.

    The division is in float32. A magnitude of 0 has the scale 1; a scale that overflows is the
    largest number of the dtype of `x`. An infinity in `x` makes the scale 0, and what was infinite
    NaN.

    Source: Transformer Engine 2.20, ``Float8CurrentScaling``, and its reference
    ``pytorch/custom_recipes/reference_current_scaling.py``.
    """
    return _scaled(x, _te_scale(_amax(x).reshape(1), to, torch.finfo(x.dtype).max), to)


def _divided(number: float, x: torch.Tensor) -> torch.Tensor:
    """Return a quotient, rounded once: ``number / x`` multiplies by a rounded reciprocal."""
    return torch.full_like(x, number) / x


def _te_scale(amax: torch.Tensor, to: Format, largest: float) -> torch.Tensor:
    scale = _divided(to.max, amax)
    scale = torch.where(scale == torch.inf, largest, scale)
    return torch.where(amax == 0, 1.0, scale)


# -- blocks ---------------------------------------------------------------------------------------


def _blocks(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Return the largest magnitude of each block of a matrix, one for each element of it."""
    m, n = x.shape
    padded = torch.nn.functional.pad(x.abs().float(), (0, -n % columns, 0, -m % rows))
    high, wide = padded.shape
    grid = padded.reshape(high // rows, rows, wide // columns, columns)
    found = grid.amax((1, 3), keepdim=True).expand(grid.shape)
    return found.reshape(high, wide)[:m, :n]


def _tiles(dim: int, length: int, square: bool) -> tuple[int, int]:
    if square:
        return length, length
    return (1, length) if dim == 1 else (length, 1)


def blockwise(x: torch.Tensor, dim: int, to: Format, *, square: bool) -> Quantised:
    """Quantise in blocks of 128 along `dim`, or of 128 x 128, with scales of powers of two.

    The scale is that of `current` with its mantissa dropped. Weights have `square` blocks, all else
    1 x 128.

    Source: Transformer Engine 2.20, ``Float8BlockScaling`` (``common/recipe/__init__.py``), whose
    scales are powers of two unless NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1.
    """
    amax = _blocks(x, *_tiles(dim, 128, square))
    return _scaled(x, power_below(_te_scale(amax, to, torch.finfo(x.dtype).max)), to)


def mxfp8(x: torch.Tensor, dim: int, to: Format) -> Quantised:
    """Quantise in blocks of 32 along `dim`, with E8M0 scales.

    The inverse scale is the largest magnitude over the largest value of the format, rounded up to
    a power of two; that of a block of zeros is 2**-127, and its values stay zeros. AssertionError
    for a partial block, as in torchao: nobody pads.

    Source: the MX specification v1.0, section 6.3, and the rounding of
    https://docs.nvidia.com/cuda/cublas/#d-block-quantization, as in torchao 0.18,
    ``to_mx(..., ScaleCalculationMode.RCEIL)``.
    """
    if x.shape[dim] % 32:
        raise AssertionError(f"{list(x.shape)}: MXFP8 needs multiples of 32 in dimension {dim}")
    inverse = power_up(_blocks(x, *_tiles(dim, 32, square=False)) / to.max)
    # Only a block of zeros, or of subnormal numbers, has it: it is rounded as it is.
    scale = torch.where(inverse == 2.0**-127, 1.0, inverse.double().reciprocal().float())
    return Quantised(rounded(x.float() * scale, to), scale, inverse, to)


def nvfp4(x: torch.Tensor, dim: int, *, square: bool) -> Quantised:
    """Quantise to E2M1 in blocks of 16 along `dim`, or of 16 x 16 (`square`), in two levels.

    A block's inverse scale is E4M3, in units of a float32 scale of the whole tensor that maps its
    largest magnitude to 448 x 6. Rounding is to nearest: no stochastic rounding, and no Hadamard
    transform.

    Source: Transformer Engine 2.20, ``NVFP4BlockScaling`` with ``disable_rht`` and
    ``disable_stochastic_rounding``; ``pytorch/custom_recipes/reference_nvfp4.py``.
    """
    amax = _amax(x)
    whole = _divided(E4M3.max * E2M1.max, amax).clamp(max=_FLOAT32_MAX)
    whole = torch.where(whole == 0, 1.0, whole)
    sixth = torch.tensor(E2M1.max).reciprocal()
    block = _blocks(x, *_tiles(dim, 16, square)) * (whole * sixth)
    stored = rounded(block.clamp(max=_FLOAT32_MAX), E4M3)
    inverse = stored * _divided(1.0, whole)
    scale = _divided(1.0, inverse).clamp(max=_FLOAT32_MAX)
    values = rounded(x.float() * scale, E2M1)
    return Quantised(values, scale, inverse, E2M1, stored, amax)
