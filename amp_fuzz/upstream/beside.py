"""Find the divergence to report of a case in which known entries explain some, but not all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec

from amp_fuzz.backends.base import mixes
from amp_fuzz.backends.harness import Observation
from amp_fuzz.cases.program import returning_all, statements
from amp_fuzz.oracle import Divergence, compare
from amp_fuzz.oracle.judge import confirmed
from amp_fuzz.oracle.labels import Named, named, tainted
from amp_fuzz.oracle.trial import Trial
from amp_fuzz.upstream.evidence import Listed
from amp_fuzz.upstream.imitate import imitated

__all__ = ["after_changes", "first_new", "returned"]


def first_new(
    trial: Trial,
    found: Divergence,
    listed: Listed,
    explain: Callable[[Trial, Divergence], str],
) -> Divergence:
    """Return the divergence to report of a case that known entries do not explain.

    explain: returns the ids that explain a divergence, or "".
    """
    if left := _state(trial, found, explain):
        return left
    if found.kind == "relation":
        return found
    found = listed.left(trial).divergence or found  # an entry may know the first alone
    return _behind(trial, found, listed)


def _state(
    trial: Trial, found: Divergence, explain: Callable[[Trial, Divergence], str]
) -> Divergence | None:
    """Return the divergence in state, if known entries explain all of a case but that."""
    expected, observed = trial.expected, trial.observed
    if observed.leaked == expected.leaked or found.kind in ("state", "relation"):
        return None
    restored = replace(observed, leaked=expected.leaked)
    if not explain(replace(trial, observed=restored), found):
        return None
    ends = Observation(raised=observed.raised)
    return replace(trial, expected=ends, observed=replace(ends, leaked=observed.leaked)).compare()


def _behind(trial: Trial, found: Divergence, listed: Listed) -> Divergence:
    """Return the divergence that stays while the reference imitates all known bugs.

    The first may be one of those, and not why the case is unknown.
    """
    case, name = trial.case, trial.backend.name
    ops = [s.op for s in statements(case.program.body)]
    bugs = {k.quirk for k in listed.known if k.tries(ops) and k.on(name)}
    if not bugs or found.kind in ("raise", "state"):
        return found
    wrong = imitated(trial, bugs)
    left = listed.left(wrong).divergence
    if left is None or left.kind == "state":
        return found
    if left.kind == "raise":  # it is the same without what is known before it
        again = trial.compare(skip=lambda label: True)
        return again if again is not None and again == left else found
    at = named(left.where)
    sides = (replace(t.expected, raised=None, leaked=None) for t in (trial, wrong))
    values = trial.backend.values
    both = mixes(trial.backend)
    acts = compare(*sides, values=values, devices=both, skip=lambda label: label != found.where)
    if at == named(found.where) or acts is None:  # no known bug acts there
        return found
    again = trial.compare(skip=lambda label: named(label) != at)
    return again if again is not None and named(again.where) == at else found


def after_changes(trial: Trial, found: Divergence, listed: Listed) -> tuple[Divergence, str]:
    """Return what is new beside nondeterminism, or that with the ids of what is known of it.

    Each value that changes must be known; a value that does not depend on one must agree or be
    known. An error may come of a change, a state that is left behind may not.
    """
    ids: dict[str, None] = {}
    skipped: set[str] = set()
    while found.kind == "nondeterminism" and not Named(skipped)(found.where):
        if not (known := listed.explains(trial, found)):
            break
        ids[known] = None
        left = listed.left(trial, skipped | tainted(trial.case, found.where))
        ids |= dict.fromkeys(left.ids)
        if left.divergence is None or left.divergence.kind == "raise":
            return found, "+".join(ids)
        skipped = set(left.skipped)
        found = confirmed(trial, left.divergence, Named(skipped))
    return found, ""


def returned(trial: Trial, found: Divergence, listed: Listed) -> str:
    """Return the ids that explain a case where it returns every value that it makes, or "".

    An entry names the op at which a bug shows. If the program does not return that op's value, the
    bug shows at other ops, whose values are computed from it. Nothing else may differ, in either
    program.
    """
    case = trial.case
    whole = msgspec.structs.replace(case, program=returning_all(case.program))
    if whole == case or found.kind in ("raise", "state", "relation", "nondeterminism"):
        return ""
    first = listed.left(Trial.of(whole, trial.backend))
    if first.divergence is not None or not first.ids:
        return ""
    rest = listed.left(trial, first.skipped)
    return "" if rest.divergence else "+".join(dict.fromkeys([*first.ids, *rest.ids]))
