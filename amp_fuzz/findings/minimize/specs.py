"""One input made smaller: a part of its elements, another dtype, plainer elements."""

from __future__ import annotations

import math

import msgspec
import torch

from amp_fuzz.cases.inputs import bits_text, tensor
from amp_fuzz.cases.literals import Number, bits_of, numbers
from amp_fuzz.cases.program import TensorSpec
from amp_fuzz.findings.minimize.capture import LITERAL

__all__ = [
    "cast",
    "elements",
    "frozen",
    "held_numbers",
    "moved",
    "narrowed",
    "selected",
    "with_numbers",
]


def elements(spec: TensorSpec) -> int:
    """Return the number of elements."""
    return math.prod(spec.shape)


def frozen(spec: TensorSpec, seed: int) -> TensorSpec:
    """Return an input that holds its drawn elements, if there are not too many."""
    if spec.values or not 0 < elements(spec) <= LITERAL:
        return spec
    return _holding(spec, tensor(msgspec.structs.replace(spec, layout="contiguous"), seed))


def narrowed(spec: TensorSpec, dim: int, start: int, length: int) -> TensorSpec:
    """Return an input with a part of a dimension; elements that it does not hold are redrawn."""
    if spec.values:
        return _holding(spec, _held(spec).narrow(dim, start, length))
    shape = (*spec.shape[:dim], length, *spec.shape[dim + 1 :])
    return msgspec.structs.replace(spec, shape=shape)


def selected(spec: TensorSpec, dim: int, index: int) -> TensorSpec:
    """Return an input without a dimension, at one index of it."""
    if spec.values:
        return _holding(spec, _held(spec).select(dim, index))
    return msgspec.structs.replace(spec, shape=spec.shape[:dim] + spec.shape[dim + 1 :])


def cast(spec: TensorSpec, dtype: str) -> TensorSpec:
    """Return an input of another dtype, its elements rounded to it."""
    if not spec.values:
        return msgspec.structs.replace(spec, dtype=dtype)
    values = _held(spec)
    if values.is_complex() and not dtype.startswith("complex"):
        values = values.real
    return _holding(msgspec.structs.replace(spec, dtype=dtype), values.to(getattr(torch, dtype)))


_EXPONENTS = {"float16": 16, "bfloat16": 128, "float32": 128, "float64": 1024}


def moved(spec: TensorSpec, dtype: str, *, powers: bool) -> TensorSpec:
    """Return an input of another dtype, its elements at the same relative place of the range.

    Scaled by the logarithms of the types' largest values, or with powers by the logarithm of the
    element: 12 in float16 is as far from the overflow of exp as 96 in float32, and 2.0**9 as far
    from the overflow of its square as 2.0**72.
    """
    if not spec.values or not {spec.dtype, dtype} <= set(_EXPONENTS):
        return cast(spec, dtype)
    ratio = _EXPONENTS[dtype] / _EXPONENTS[spec.dtype]
    values = _held(spec).double()
    if powers:
        values = values.sign() * values.abs().pow(ratio)
    else:
        values = values * ratio
    fits = values.to(getattr(torch, dtype))
    whole = torch.where(fits.isfinite(), fits, _held(spec).to(fits.dtype))
    return _holding(msgspec.structs.replace(spec, dtype=dtype), whole)


def with_numbers(spec: TensorSpec, values: list[Number]) -> TensorSpec | None:
    """Return an input with these elements, or None if its dtype lacks one of them."""
    try:
        text = bits_of(values, spec.dtype)
    except (ValueError, OverflowError):
        return None
    return msgspec.structs.replace(spec, values=text, domain="normal", bound=0)


def _held(spec: TensorSpec) -> torch.Tensor:
    return tensor(msgspec.structs.replace(spec, layout="contiguous"), 0)


def _holding(spec: TensorSpec, values: torch.Tensor) -> TensorSpec:
    """Return an input with these elements; an empty one is drawn, which is the same."""
    return msgspec.structs.replace(
        spec, shape=tuple(values.shape), values=bits_text(values), domain="normal", bound=0
    )


def held_numbers(spec: TensorSpec) -> list[Number]:
    """Return the elements that an input holds."""
    return numbers(spec.values, spec.dtype)
