"""Make a case smaller while it shows the same divergence.

`search` goes from a case to ever smaller ones, in the order of worth: the plan, regions,
statements, outputs, shapes, dtypes, layouts, values, arguments. What "the same" means is said by
who asks; `amp_fuzz.findings.guilty` has the fingerprint.
"""

from amp_fuzz.findings.minimize.capture import Taken, Values, capture
from amp_fuzz.findings.minimize.data import small_values
from amp_fuzz.findings.minimize.edit import count, without
from amp_fuzz.findings.minimize.search import Ended, Event, Reply, Smaller, Tried, search

__all__ = [
    "Ended",
    "Event",
    "Reply",
    "Smaller",
    "Taken",
    "Tried",
    "Values",
    "capture",
    "count",
    "search",
    "small_values",
    "without",
]
