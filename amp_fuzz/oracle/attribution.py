"""Ask whether autocast causes a divergence, by running the backend without autocast.

The backend runs the explicit program of the case, in which the casts that autocast makes are
statements (`amp_fuzz.oracle.explicit`). A label on which both programs agree bit for bit does not
depend on autocast: if it differs from the reference, that is the backend's own. Every other label
that differs is autocast's. So a case may be both.

A backend with kernels of its own need not repeat its bits in another program, because it fuses
other ops. There a label is its own if the explicit program diverges at the same label in the same
kind, and rounding explains the difference between the two.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from amp_fuzz.backends.harness import Observation
from amp_fuzz.oracle.compare import Divergence, same
from amp_fuzz.oracle.errors import alike
from amp_fuzz.oracle.explicit import Explicit
from amp_fuzz.oracle.labels import named, tainted

if TYPE_CHECKING:
    from amp_fuzz.oracle.trial import Trial

__all__ = ["NONE", "Own", "own"]


@dataclass(frozen=True, slots=True)
class Own:
    """How a backend differs from the reference without autocast too.

    labels: of values. raises: it ends in the same error. state: the parts of the state that it
    leaves changed. relation: the relation that it breaks.
    """

    labels: frozenset[str] = frozenset()
    raises: bool = False
    state: frozenset[str] = frozenset()
    relation: str = ""

    def __bool__(self) -> bool:
        return bool(self.labels or self.raises or self.state or self.relation)

    def expected(self, expected: Observation, observed: Observation) -> Observation:
        """Return what is expected of a backend that differs so."""
        if not (self.raises or self.state):
            return expected
        raised = observed.raised if self.raises else expected.raised
        parts = _parts(observed)
        leaked = expected.leaked
        if self.state and parts <= self.state | _parts(expected):
            leaked = observed.leaked
        return replace(expected, raised=raised, leaked=leaked)


NONE = Own()


def own(trial: Trial, found: Divergence) -> Own:
    """Return which part of a divergence the backend shows without autocast.

    Runs the backend once more, on the explicit program, and the reference a few times.
    """
    program = trial.explicit()
    if program is None:
        return NONE
    twin = trial.twin(program.case, program.expected)
    if found.kind == "nondeterminism":
        return _changing(trial, twin, found)
    if found.kind == "relation":
        return Own(relation=found.where) if _breaks(trial, twin, found) else NONE
    values = _values(trial)
    differ = {named(one.where) for one in values}
    seen = {named(label) for label in trial.observed.values}
    kept = {name for name in program.kept if name in differ or name not in seen}
    labels = frozenset(
        one.where
        for one in values
        if not _under(trial, kept, one.where) and _same(trial, twin, program, one)
    )
    proved = _alike(trial.expected, program.expected)
    raises = proved and not kept and _ends(trial) and _alike(trial.observed, twin.observed)
    state = (_parts(trial.observed) - _parts(trial.expected)) & _parts(twin.observed)
    return Own(labels, raises, frozenset(state))


def _changing(trial: Trial, twin: Trial, found: Divergence) -> Own:
    """Return the labels that may change with one that changes from run to run without autocast."""
    if twin.changed(lambda label: label != found.where) is None:
        return NONE
    names = tainted(trial.case, found.where)
    return Own(frozenset(at for at in trial.expected.values if named(at) in names))


def _breaks(trial: Trial, twin: Trial, found: Divergence) -> bool:
    """Return whether a relation does not hold without autocast either."""
    broken = twin.within()
    if broken is not None:
        return broken.where == found.where
    # A function transform raises, and neither it nor autocast alone does.
    transform = found.where.startswith("transform: ") and twin.case.plan.transform != "none"
    return transform and _alike(trial.observed, twin.observed) and bool(twin.observed.raised)


def _ends(trial: Trial) -> bool:
    """Return whether the two sides end differently: in an error, or not."""
    last = trial.compare(skip=lambda label: True)
    return last is not None and last.kind == "raise"


def _values(trial: Trial) -> list[Divergence]:
    """Return the divergence of each value that has one."""
    seen: set[str] = set()
    found: list[Divergence] = []
    while (one := trial.compare(skip=seen.__contains__)) is not None:
        if one.kind in ("raise", "state"):
            break
        seen.add(one.where)
        found.append(one)
    return found


def _same(trial: Trial, twin: Trial, program: Explicit, found: Divergence) -> bool:
    """Return whether the backend computes the same value of a label without autocast."""
    label = found.where
    mine, theirs = trial.observed.values.get(label), twin.observed.values.get(label, _MISSING)
    if theirs is _MISSING or not _proved(trial, program, label):
        return False
    if mine is None or theirs is None:
        return mine is theirs
    if (mine.dtype, mine.shape) != (theirs.dtype, theirs.shape):
        return False
    if not trial.backend.values or same(mine, theirs):
        return True
    if trial.backend.exact:
        return False
    also = twin.compare(skip=lambda other: other != label)
    if also is None or also.kind != found.kind:
        return False
    return twin.near(label, theirs, mine)


_MISSING = torch.empty(0)


def _proved(trial: Trial, program: Explicit, label: str) -> bool:
    """Return whether the reference computes the same in both programs."""
    a, b = trial.expected.values.get(label, _MISSING), program.expected.values.get(label, _MISSING)
    if a is None or b is None:
        return a is b
    if a is _MISSING or b is _MISSING or (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return not trial.backend.values or same(a, b)


def _under(trial: Trial, kept: Set[str], label: str) -> bool:
    """Return whether a label may be computed from a value that is still made under autocast."""
    name = named(label)
    return any(name in tainted(trial.case, value) for value in kept)


def _alike(one: Observation, other: Observation) -> bool:
    """Return whether two runs end in the same way: in no error, or in the same one."""
    if one.raised is None or other.raised is None:
        return one.raised is other.raised
    return one.raised.kind == other.raised.kind and alike(one, other)


def _parts(seen: Observation) -> frozenset[str]:
    return frozenset(seen.leaked.split("; ")) if seen.leaked else frozenset()
