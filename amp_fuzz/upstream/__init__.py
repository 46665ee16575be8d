"""Known bugs of torch and of what is built on it, as the reference imitates them.

A divergence that vanishes when the reference imitates a bug is explained by that bug, exactly; one
that does not vanish is another one. Neither the reference nor a backend imports this package.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from amp_fuzz.backends.imitation import asking
    from amp_fuzz.upstream.registry import BUGS, QUIRKS, composed, quirks, shipped

__all__ = ["BUGS", "QUIRKS", "asking", "composed", "quirks", "shipped"]

_HOMES = {
    "BUGS": "amp_fuzz.upstream.registry",
    "QUIRKS": "amp_fuzz.upstream.registry",
    "asking": "amp_fuzz.backends.imitation",
    "composed": "amp_fuzz.upstream.registry",
    "quirks": "amp_fuzz.upstream.registry",
    "shipped": "amp_fuzz.upstream.registry",
}


def __getattr__(name: str) -> object:
    # Lazily: reading the known list (`upstream.known`) should not wait for torch.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
