"""Choices from bytes, from which programs and plans are drawn.

Every choice is a number below a bound, and 0 is the simplest. Choices that belong together are
drawn as one string of bytes, one or two bytes each: Hypothesis shrinks each byte separately. A
bounded integer would not do. Hypothesis draws integers of a wide range mostly small, so if several
choices were packed into one, the higher ones would almost always be 0.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from struct import Struct

__all__ = ["Bytes", "digits", "integer"]

Bytes = Callable[[int], bytes]
"""Draws that many bytes."""


def digits(source: Bytes, *sizes: int) -> list[int]:
    """Draw several choices at once, each in [0, size), size 1 to 65536."""
    layout, bits = _layout(sizes)
    drawn = iter(layout.unpack(source(layout.size)))
    # Scaled: 0 stays 0.
    return [next(drawn) * n >> b if b else 0 for n, b in zip(sizes, bits, strict=True)]


@cache
def _layout(sizes: tuple[int, ...]) -> tuple[Struct, list[int]]:
    """Return how the bytes of choices are read, and how many bits each has."""
    widths = [_width(size) for size in sizes]
    return Struct(">" + "".join("xBH"[width] for width in widths if width)), [8 * w for w in widths]


def integer(source: Bytes, size: int) -> int:
    """Draw a choice in [0, size)."""
    width = _width(size)
    return int.from_bytes(source(width), "big") * size >> 8 * width


def _width(size: int) -> int:
    """Return the number of bytes for a choice: none if there is only one option."""
    return 0 if size == 1 else 1 if size <= 256 else 2
