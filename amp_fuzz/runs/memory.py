"""Return freed memory to the system."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache

__all__ = ["trim"]


def trim() -> None:
    """Return freed memory to the system, if the C library can.

    The graphs of a thousand scripted programs fragment the heap. It is then larger than the memory
    in use by three quarters, and grows.
    """
    call = _trim()
    if call is not None:
        call(0)


@cache
def _trim() -> Callable[[int], object] | None:
    if sys.platform != "linux":
        return None
    return getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
