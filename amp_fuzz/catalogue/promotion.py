"""The dtype of a result: torch's type promotion over dtypes and ranks, without torch.

The rule is that of ``torch.result_type``
(https://docs.pytorch.org/docs/stable/tensor_attributes.html#type-promotion-doc; upstream:
``promoteTypes`` in c10/core/ScalarType.cpp, ``combine_categories`` in
aten/src/ATen/native/TypeProperties.cpp). The default dtype is taken to be float32.
"""

from __future__ import annotations

from functools import reduce
from typing import TypeAlias

from amp_fuzz.catalogue.core import Value
from amp_fuzz.versions import holds

__all__ = ["Operand", "floating", "is_complex", "is_float", "promote_types", "result_type"]

Operand: TypeAlias = "Value | bool | int | float"

# Each promotes to any that stands after it; the two 16-bit floats only meet in float32.
_ORDER = ("bool", "uint8", "int32", "int64", "float16", "bfloat16", "float32", "float64")
_HALVES = frozenset({"float16", "bfloat16"})
_COMPLEX = {"float64": "complex128", "float16": "complex32"}
_REAL = {
    "complex32": "float16",
    "bcomplex32": "bfloat16",
    "complex64": "float32",
    "complex128": "float64",
}
# A bfloat16 tensor and a complex tensor without dimensions; few kernels know the dtype of 2.15.
_BFLOAT16_COMPLEX = "bcomplex32" if holds(">=2.15") else "complex64"


def is_float(dtype: str) -> bool:
    """Whether it is a real floating dtype."""
    return "float" in dtype


def is_complex(dtype: str) -> bool:
    """Whether it is a complex dtype."""
    return dtype in _REAL


def floating(dtype: str) -> str:
    """Return the dtype in which an op that has no integer kernel computes: float32 for integers."""
    return dtype if is_float(dtype) or is_complex(dtype) else "float32"


def to_complex(dtype: str) -> str:
    """Return the complex dtype over a floating one; ``complex32`` is none of `program.DTYPES`."""
    return _COMPLEX.get(dtype, "complex64")


def promote_types(a: str, b: str) -> str:
    """Return the smallest dtype that both promote to, whatever the ranks."""
    if is_complex(a) or is_complex(b):
        parts = [_REAL.get(d, d) for d in (a, b)]
        return to_complex(promote_types(*parts))
    if {a, b} == _HALVES:
        return "float32"
    return max(a, b, key=_ORDER.index)


def result_type(*operands: Operand) -> str:
    """Return the dtype that values and Python numbers promote to.

    Tensors with dimensions decide. Of the others, first 0-d tensors and then numbers, only a higher
    category counts (bool, integer, float, complex): a bfloat16 matrix and a float32 0-d tensor make
    bfloat16.
    """
    groups: tuple[list[str], list[str], list[str]] = [], [], []
    for operand in operands:
        if isinstance(operand, Value):
            groups[0 if operand.rank else 1].append(operand.dtype)
        else:
            groups[2].append(_literal(operand))
    matrices, zeros, numbers = (reduce(promote_types, g) if g else None for g in groups)
    result = _combine(matrices, _combine(zeros, numbers))
    if result is None:
        raise ValueError("result_type() has no operands: pass at least one value or number")
    return result


def _literal(number: bool | int | float) -> str:
    if isinstance(number, bool):
        return "bool"
    return "int64" if isinstance(number, int) else "float32"


def _combine(high: str | None, low: str | None) -> str | None:
    if high is None or low is None:
        return high or low
    if is_complex(high):
        return high
    if is_float(high):
        if not is_complex(low):
            return high
        return _BFLOAT16_COMPLEX if high == "bfloat16" else to_complex(high)
    if high == "bool" or is_float(low) or is_complex(low):
        return promote_types(high, low)
    return high
