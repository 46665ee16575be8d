"""Which programs `wrap` is given: that of a case, or a function of a user's (`amp_fuzz.check`)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

__all__ = ["names_of"]


def names_of(program: Callable[..., Any]) -> dict[str, Any] | None:
    """Return the names of the source of a case's program, which are its own; None for others."""
    names: dict[str, Any] = inspect.unwrap(program).__globals__
    return None if "__name__" in names else names  # those of a module
