"""Have the reference imitate bugs. The rest of `amp_fuzz.upstream` asks for it here."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

from amp_fuzz.backends.imitation import asking
from amp_fuzz.oracle.trial import Trial
from amp_fuzz.reference import supposing
from amp_fuzz.upstream.registry import quirks
from amp_fuzz.upstream.xla.excess import noting

__all__ = ["asking", "imitated", "noting", "supposing"]


def imitated(trial: Trial, names: Collection[str]) -> Trial:
    """Return the trial in which the reference imitates these bugs."""
    return trial.under(frozenset(names), partial(quirks, names))
