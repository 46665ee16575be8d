"""Make a case smaller while it shows the same divergence.

`search` tries ever smaller cases, the most valuable changes first: the plan, regions, statements,
outputs, shapes, dtypes, layouts, values, arguments. The caller decides what "the same" means.
"""

from amp_fuzz.findings.minimize.capture import Taken, Values, capture
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
    "without",
]
