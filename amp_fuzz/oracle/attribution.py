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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from amp_fuzz.backends.base import unsupported
from amp_fuzz.backends.harness import Observation
from amp_fuzz.cases.case import Case, each_call, in_a_row
from amp_fuzz.cases.program import (
    FP8,
    Autocast,
    Node,
    ProgramError,
    Region,
    Statement,
    regions,
    transform,
    uses,
)
from amp_fuzz.oracle.compare import Divergence, same
from amp_fuzz.oracle.errors import alike
from amp_fuzz.oracle.labels import named, tainted
from amp_fuzz.oracle.relations import RELATIONS, check_relation

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

    def __or__(self, other: Own) -> Own:
        """Return how it differs in either way."""
        return Own(
            self.labels | other.labels,
            self.raises or other.raises,
            self.state | other.state,
            self.relation or other.relation,
        )

    def expected(self, expected: Observation, observed: Observation) -> Observation:
        """Return what is expected of a backend that differs so."""
        return replace(expected, raised=observed.raised) if self.raises else expected

    def observed(self, observed: Observation) -> Observation:
        """Return what is left of what was observed: the other parts of the state."""
        if not self.state:
            return observed
        left = [part for part in (observed.leaked or "").split("; ") if part not in self.state]
        return replace(observed, leaked="; ".join(left) or None)


NONE = Own()


def own(trial: Trial, found: Divergence) -> Own:
    """Return which part of a divergence the backend shows without autocast.

    Runs the backend once more, on the explicit program, and the reference a few times. Where the
    explicit program cannot say, the backend runs the case without autocast. FP8 layers are tested
    as autocast is: of a program with a recipe nothing is the backend's own.
    """
    if any(isinstance(context, FP8) for context in regions(trial.case.program.body)):
        return NONE
    if trial.case.plan.later and found.kind not in ("relation", "nondeterminism"):
        return _by_call(trial)
    changes = found.kind == "nondeterminism"
    program = trial.explicit(frozenset(tainted(trial.case, found.where) if changes else ()))
    other = None if program is None else trial.beside(program.case, program.expected)
    kept = frozenset() if program is None else program.kept
    plain = trial.bare() if other is None or kept else other  # no part of it is under autocast
    if found.kind in ("relation", "nondeterminism"):
        if plain.expected.kernels:
            return NONE
        if changes:
            return _changing(trial, plain, found)
        return Own(relation=found.where) if _breaks(trial, plain, found) else NONE
    values = _values(trial)
    asked = _Asked(trial, other, kept, _wrong(trial, kept, values))
    labels = frozenset(one.where for one in values if asked.shows(one))
    labels |= _beside_kept(asked, [one for one in values if one.where not in labels])
    state = _parts(trial.observed) - _parts(trial.expected)
    if state:  # without any autocast, what is left of it is autocast's all the same
        known = other is not None and not plain.expected.kernels
        state &= _parts(plain.observed) if known else frozenset()
    return Own(labels, _ends(trial) and asked.raises(), state)


def _beside_kept(asked: _Asked, values: Sequence[Divergence]) -> frozenset[str]:
    """Return the labels that do not depend on what stays under autocast, and are the backend's own.

    The explicit program is asked without that.
    """
    trial, other = asked.trial, asked.other
    if other is None or not asked.kept:
        return frozenset()
    gone = set[str]().union(*(tainted(other.case, name) for name in asked.kept))
    values = [one for one in values if named(one.where) not in gone]
    outputs = tuple(name for name in other.case.program.outputs if name not in gone)
    if not values or not outputs:
        return frozenset()
    body = transform(
        other.case.program.body,
        statement=lambda node: () if gone & {*node.outputs, *uses(node)} else (node,),
        region=lambda node, body: (Region(node.context, body),) if body else (),
    )
    rest = other.case.with_program(body=body, outputs=outputs)
    alone = _Asked(trial, trial.beside(rest, trial.refer(rest)), frozenset(), frozenset())
    return frozenset(one.where for one in values if alone.shows(one))


def _by_call(trial: Trial) -> Own:
    """Return which part of a divergence the backend shows without autocast, of several calls.

    There is no explicit program of calls that are cast in different ways. So what a call shows
    alone is asked of that call, and what it does not is asked of the case without autocast, and of
    a program that makes the calls in a row: a compiler may get only both wrong.
    """
    values = _values(trial)
    asked = _Asked(trial, None, frozenset(), frozenset())
    labels = {one.where for one in values if asked.shows(one)}
    raises = _ends(trial) and asked.raises()
    state = _parts(trial.observed) - _parts(trial.expected)
    left = state - _parts(trial.bare().observed)
    gradients, alike = set[str](), True
    for prefix, case in each_call(trial.case).items():
        alone = trial.beside(case, trial.refer(case))
        found = alone.compare()
        part = NONE if found is None else own(alone, found)
        raises |= part.raises and _ends(trial) and _alike(trial.observed, alone.observed)
        left -= part.state
        gradients |= {label for label in part.labels if label.endswith(".grad")}
        for one in values:
            label = one.where.removeprefix(prefix)
            if "." in label or not one.where.startswith(prefix):
                continue  # of another call, or of all
            same = _same(trial, alone, one, label)
            alike &= same
            labels |= {one.where} if same and label in part.labels else set()
    # Of all calls together, a gradient is what it should be if their values are.
    labels |= {one.where for one in values if alike and one.where in gradients}
    asked_all = raises == _ends(trial) and labels.issuperset(one.where for one in values)
    if trial.case.plan.reuse == "calls" or asked_all:
        return Own(frozenset(labels), raises, state - left)
    return Own(frozenset(labels), raises, state - left) | _in_a_row(trial, values)


def _in_a_row(trial: Trial, values: Sequence[Divergence]) -> Own:
    """Return which part the backend shows without autocast in a program of all calls in a row."""
    try:
        case, names = in_a_row(trial.case)
    except ProgramError:  # too many contexts in one another
        return NONE
    row = trial.beside(case, trial.refer(case))
    found = row.compare()
    part = NONE if found is None else own(row, found)
    labels = {one.where: names.get(one.where, one.where) for one in values}
    same = {
        one.where
        for one in values
        if labels[one.where] in part.labels and _same(trial, row, one, labels[one.where])
    }
    raises = part.raises and _ends(trial) and _alike(trial.observed, row.observed)
    return Own(frozenset(same), raises or (_ends(trial) and _raises_again(trial)))


def _raises_again(trial: Trial) -> bool:
    """Return whether the explicit program of the first call, called as often, ends as the case."""
    plan = trial.case.plan
    first = each_call(trial.case)[""]
    program = trial.beside(first, trial.refer(first)).explicit()
    if program is None or program.kept:
        return False
    again = program.case.with_plan(later=((),) * len(plan.later), reuse=plan.reuse)
    other = trial.beside(again, trial.refer(again))
    return _alike(trial.expected, other.expected) and _alike(trial.observed, other.observed)


def _wrong(trial: Trial, kept: frozenset[str], values: Sequence[Divergence]) -> frozenset[str]:
    """Return those of these names whose values may be wrong."""
    differ = {named(one.where) for one in values}
    seen = {named(label) for label in trial.observed.values}
    return frozenset(name for name in kept if name in differ or name not in seen)


def _outside(case: Case) -> set[str]:
    """Return the names of values that are computed without a context of autocast around them."""

    def names(body: tuple[Node, ...]) -> Iterator[str]:
        for node in body:
            if isinstance(node, Statement):
                yield from node.outputs
            elif not isinstance(node.context, Autocast):
                yield from names(node.body)

    around = case.plan.contexts and case.plan.thread != "inside"
    return set() if around else set(names(case.program.body))


@dataclass(frozen=True, slots=True)
class _Asked:
    """Asks whether the backend shows the same without autocast.

    other: the trial of the explicit program, if there is one. kept: names of values that it still
    computes under autocast. wrong: those of them that may be wrong.
    """

    trial: Trial
    other: Trial | None
    kept: frozenset[str]
    wrong: frozenset[str]

    def shows(self, found: Divergence) -> bool:
        """Return whether a value diverges in the same way."""
        if self.other is not None and self._says(self.other, found.where):
            return _same(self.trial, self.other, found)
        bare = self.trial.bare()
        if bare.expected.kernels:  # a callable enters autocast itself
            return False
        also = bare.compare(skip=lambda label: label != found.where)
        return also is not None and also.kind == found.kind

    def raises(self) -> bool:
        """Return whether the backend ends in the same way, if it is exact at the same statement.

        The bare program is asked too: where casts are inside an op, the explicit program makes them
        before the op checks its inputs.
        """
        if self.other is not None and not self.wrong and self._ends_as(self.other):
            return True
        bare = self.trial.bare()
        return not bare.expected.kernels and (self._ends_as(bare) or self._at_one_call())

    def _at_one_call(self) -> bool:
        """Return whether the backend takes what the reference refuses, in the refused call alone.

        Inside a module, the dtypes that autocast gives a call have no name in the program.
        """
        trial = self.trial
        if trial.expected.raised is None or trial.observed.raised is not None:
            return False
        alone = trial.raising()
        if alone is None or unsupported(alone, trial.backend):
            return False
        other = trial.beside(alone, trial.refer(alone))
        return _alike(trial.expected, other.expected) and other.observed.raised is None

    def _ends_as(self, other: Trial) -> bool:
        """Return whether both sides end as in another program."""
        trial = self.trial
        alike = _alike_there if trial.backend.exact else _alike
        return alike(trial.expected, other.expected) and alike(trial.observed, other.observed)

    def _says(self, other: Trial, label: str) -> bool:
        """Return whether the explicit program says something of a label.

        The reference has to compute the same in both programs.
        """
        name = named(label)
        case = self.trial.case
        if self.kept and (name.endswith(".grad") or name in _outside(case)):
            return False  # a region that ends late, or a gradient through what is kept
        if any(name in tainted(case, value) for value in self.wrong):
            return False
        mine, theirs = (side.observed.values.get(label) for side in (self.trial, other))
        if name.endswith(".grad") and mine is not None and theirs is None:
            return False  # a cast that is written out cuts this backend's graph
        a, b = (side.expected.values.get(label, _MISSING) for side in (self.trial, other))
        if a is None or b is None:
            return a is b
        if a is _MISSING or b is _MISSING or (a.dtype, a.shape) != (b.dtype, b.shape):
            return False
        return not self.trial.backend.values or same(a, b)


def _changing(trial: Trial, other: Trial, found: Divergence) -> Own:
    """Return the labels that may change with one that changes from run to run without autocast."""
    if other.changed(lambda label: label != found.where) is None:
        return NONE
    names = tainted(trial.case, found.where)
    return Own(frozenset(at for at in trial.expected.values if named(at) in names))


def _breaks(trial: Trial, other: Trial, found: Divergence) -> bool:
    """Return whether a relation does not hold without autocast either."""
    broken = other.within()
    if broken is not None:
        return broken.where == found.where
    relation = RELATIONS.get(found.where.partition(":")[0])
    if relation is None:
        return False
    if relation.together:  # a function transform raises, and neither it nor autocast alone does
        ends = _alike(trial.observed, other.observed) and other.observed.raised is not None
        return ends and other.case.plan.transform != "none"
    values, judge = trial.backend.values, other.related
    again = check_relation(relation, other.case, other.run_once, values=values, judge=judge)
    return again is not None and again.where == found.where


def _ends(trial: Trial) -> bool:
    """Return whether the two sides end differently: in an error, or not.

    A backend may raise an error of its own, but for what the reference makes of a bug.
    """
    if trial.imitated is not None and trial.raises_another():
        return True
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


def _same(trial: Trial, other: Trial, found: Divergence, label: str = "") -> bool:
    """Return whether the backend computes the same value in another case, by default the label's.

    The other case is the explicit program, or one of several calls.
    """
    label = label or found.where
    mine = trial.observed.values.get(found.where)
    theirs = other.observed.values.get(label, _MISSING)
    if mine is None or theirs is None:
        return mine is theirs
    if found.kind == "grad-missing":  # there should be none, whatever its bits
        return True
    if (mine.dtype, mine.shape) != (theirs.dtype, theirs.shape):
        return False
    if not trial.backend.values or same(mine, theirs):
        return True
    if trial.backend.exact:
        return False
    also = other.compare(skip=lambda at: at != label)
    return also is not None and also.kind == found.kind and other.near(label, theirs, mine)


_MISSING = torch.empty(0)


def _alike(one: Observation, other: Observation) -> bool:
    """Return whether two runs end in the same way: in no error, or in the same one."""
    if one.raised is None or other.raised is None:
        return one.raised is other.raised
    return one.raised.kind == other.raised.kind and alike(one, other)


def _alike_there(one: Observation, other: Observation) -> bool:
    """Return whether two runs end in the same way at the same statement, whatever it casts."""
    names = {seen.raised.text.partition(" = ")[0] for seen in (one, other) if seen.raised}
    return _alike(one, other) and len(names) <= 1


def _parts(seen: Observation) -> frozenset[str]:
    return frozenset(seen.leaked.split("; ")) if seen.leaked else frozenset()
