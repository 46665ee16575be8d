"""What glibc keeps of the memory that a long run has freed."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache

__all__ = ["trim"]


def trim() -> None:
    """Give freed memory back to the system, where the C library can do so; else do nothing.

    The graphs of a thousand scripted programs leave holes in the heap, which then is larger by
    three quarters than what is in use, and grows.
    """
    call = _trim()
    if call is not None:
        call(0)


@cache
def _trim() -> Callable[[int], object] | None:
    if sys.platform != "linux":
        return None
    return getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
