"""Input values as text: the bits of each element in hex, for cases that hold their own data.

Elements are in row-major order, big-endian, one digit for every four bits of the dtype: ``3f80`` is
1 in bfloat16. Complex numbers are the real part, then the imaginary one. Every bit
survives, NaN's too, and reading is only arithmetic. This module imports neither torch nor NumPy.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

__all__ = ["WIDTHS", "Number", "bits_of", "check_bits", "numbers"]

Number = bool | int | float | complex

WIDTHS = {
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
    "int64": 8,
    "int32": 4,
    "uint8": 1,
    "bool": 1,
}
"""Bytes of an element of each dtype."""

_CODES = {
    "float16": "e",
    "float32": "f",
    "float64": "d",
    "complex64": "f",
    "complex128": "d",
    "int64": "q",
    "int32": "i",
    "uint8": "B",
    "bool": "?",
}


def check_bits(text: str, dtype: str, elements: int) -> str:
    """Return what is wrong with the bits of `count` elements of a dtype, or ""."""
    digits = 2 * WIDTHS[dtype] * elements
    if len(text) != digits:
        return f"has {len(text)} hex digits: {elements} elements of {dtype} need {digits}"
    if not set(text) <= set("0123456789abcdef"):
        return "is not hex: use the digits 0 to 9 and a to f"
    if dtype == "bool" and not set(bytes.fromhex(text)) <= {0, 1}:
        return "has a bool that is neither 00 nor 01"
    return ""


def numbers(text: str, dtype: str) -> list[Number]:
    """Return the elements as Python numbers, exactly."""
    data = bytes.fromhex(text)
    if dtype == "bfloat16":  # the upper half of a float32
        pairs = (data[i : i + 2] + b"\0\0" for i in range(0, len(data), 2))
        return [struct.unpack(">f", pair)[0] for pair in pairs]
    code = _CODES[dtype]
    parts = [n for (n,) in struct.iter_unpack(f">{code}", data)]
    if dtype.startswith("complex"):
        return [complex(*parts[i : i + 2]) for i in range(0, len(parts), 2)]
    return parts


def bits_of(values: Sequence[Number], dtype: str) -> str:
    """Return the bits of numbers that the dtype represents exactly.

    Raises `ValueError` for any other number: nothing is rounded here.
    """
    if dtype == "bfloat16":
        text = "".join(struct.pack(">f", v)[:2].hex() for v in values)
    elif dtype.startswith("complex"):
        parts = [p for v in map(complex, values) for p in (v.real, v.imag)]
        text = struct.pack(f">{len(parts)}{_CODES[dtype]}", *parts).hex()
    else:
        try:
            text = struct.pack(f">{len(values)}{_CODES[dtype]}", *values).hex()
        except (struct.error, OverflowError) as error:
            raise ValueError(f"{dtype} lacks one of {list(values)[:8]}: {error}") from error
    for value, back in zip(values, numbers(text, dtype), strict=True):
        if value != back and value == value:
            raise ValueError(f"{dtype} has no {value!r}, only {back!r}")
    return text
