"""Choices from bytes, from which programs and plans are drawn.

Every choice is a number below a bound, and 0 is the simplest. Choices that belong together are
drawn as one string of bytes, one or two bytes each: Hypothesis shrinks each byte separately. A
bounded integer would not do. Hypothesis draws integers of a wide range mostly small, so if several
choices were packed into one, the higher ones would almost always be 0.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Bytes", "digits", "integer"]

Bytes = Callable[[int], bytes]
"""Draws that many bytes."""


def digits(source: Bytes, *sizes: int) -> list[int]:
    """Draw several choices at once, each in [0, size), size 1 to 65536."""
    drawn = source(sum(map(_width, sizes)))
    found, start = [], 0
    for size in sizes:
        end = start + _width(size)
        number = int.from_bytes(drawn[start:end], "big")
        found.append(number * size >> 8 * (end - start))  # scaled: 0 stays 0
        start = end
    return found


def integer(source: Bytes, size: int) -> int:
    """Draw a choice in [0, size)."""
    return digits(source, size)[0]


def _width(size: int) -> int:
    """Return the number of bytes for a choice: none if there is only one option."""
    return 0 if size == 1 else 1 if size <= 256 else 2
