"""Real implementations of autocast: one file each, one small protocol, found by entry points."""

from amp_fuzz.backends.base import (
    Availability,
    Backend,
    BackendError,
    Facts,
    facts_of,
    unsupported,
)
from amp_fuzz.backends.registry import backends, choose, is_pattern, matching, without_values

__all__ = [
    "Availability",
    "Backend",
    "BackendError",
    "Facts",
    "backends",
    "choose",
    "facts_of",
    "is_pattern",
    "matching",
    "unsupported",
    "without_values",
]
