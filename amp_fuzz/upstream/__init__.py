"""Known bugs of torch and of what is built on it, as the reference imitates them.

A divergence that vanishes when the reference imitates a bug is explained by that bug, exactly; one
that does not vanish is another one. Neither the reference nor a backend imports this package.
"""

from amp_fuzz.backends.imitated import active_quirks
from amp_fuzz.backends.imitation import asking
from amp_fuzz.upstream.registry import QUIRKS, composed, quirks

__all__ = ["QUIRKS", "active_quirks", "asking", "composed", "quirks"]
