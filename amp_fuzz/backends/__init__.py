"""Real implementations of autocast: one file each, one small protocol, found by entry points."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from amp_fuzz.backends.base import (
        Alone,
        Availability,
        Backend,
        BackendError,
        Configurable,
        Facts,
        Precise,
        facts_of,
        unsupported,
    )
    from amp_fuzz.backends.registry import (
        backends,
        choose,
        is_pattern,
        matching,
        without_values,
    )

__all__ = [
    "Alone",
    "Availability",
    "Backend",
    "BackendError",
    "Configurable",
    "Facts",
    "Precise",
    "backends",
    "choose",
    "facts_of",
    "is_pattern",
    "matching",
    "unsupported",
    "without_values",
]

_FOUND = ("backends", "choose", "is_pattern", "matching", "without_values")


def __getattr__(name: str) -> object:
    # Lazily: the command line reads `backends.devices` and must not wait for torch.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "registry" if name in _FOUND else "base"
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
