"""Have the reference imitate bugs. The rest of `amp_fuzz.upstream` asks for it here."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import msgspec

from amp_fuzz.backends.imitation import asking
from amp_fuzz.backends.imitations.gauge import DECOMPOSITIONS, Pair, observing
from amp_fuzz.backends.imitations.torchax import GAUGE
from amp_fuzz.backends.imitations.xla import noting
from amp_fuzz.cases.program import returning_all, statements
from amp_fuzz.oracle.trial import Scope, Trial
from amp_fuzz.reference import supposing
from amp_fuzz.upstream.registry import quirks

__all__ = ["asking", "imitated", "imitating", "noting", "supposing", "vectors"]


def imitated(trial: Trial, names: Collection[str]) -> Trial:
    """Return the trial in which the reference imitates these bugs."""
    return trial.under(frozenset(names), imitating(trial, names))


def imitating(trial: Trial, names: Collection[str]) -> Scope:
    """Return the context in which the reference imitates these bugs.

    It takes over what is not determined from what was observed.
    """
    pairs = vectors(trial) if GAUGE in names else ()

    @contextmanager
    def scope() -> Iterator[None]:
        with quirks(names), observing(pairs):
            yield

    return scope


def vectors(trial: Trial) -> Sequence[Pair]:
    """Return the singular vectors that were observed of each call of a decomposition.

    A jitted program may not return them: then one that returns all its values has them.
    """
    case, values = trial.case, trial.observed.values
    if (whole := returning_all(case.program)) != case.program:
        values = trial.run_once(msgspec.structs.replace(case, program=whole)).values
    calls = [s.outputs for s in statements(case.program.body) if s.op in DECOMPOSITIONS]
    ends = dict.fromkeys(label.rpartition(".")[0] for label in values)
    return [
        (values.get(f"{of}{u}"), values.get(f"{of}{v}"))
        for of in (f"{end}." if end else "" for end in ends)
        for u, _, v in calls
    ]
