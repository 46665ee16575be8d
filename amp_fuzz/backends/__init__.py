"""Real implementations of autocast: one file each, one small protocol, found by entry points."""

from amp_fuzz.backends.base import (
    Availability,
    Backend,
    BackendError,
    backends,
    choose,
    is_pattern,
    matching,
    unsupported,
)

__all__ = [
    "Availability",
    "Backend",
    "BackendError",
    "backends",
    "choose",
    "is_pattern",
    "matching",
    "unsupported",
]
