"""Suppose that ops have other policies, and ask whether that is what torch did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from amp_fuzz.backends import Backend
from amp_fuzz.backends.harness import Observation
from amp_fuzz.cases.case import Case
from amp_fuzz.oracle.attribution import NONE, Own
from amp_fuzz.oracle.errors import refuses
from amp_fuzz.oracle.judge import Explain
from amp_fuzz.oracle.trial import Trial
from amp_fuzz.reference import Policy, Supposed
from amp_fuzz.upstream import shipped
from amp_fuzz.upstream.imitate import imitated, supposing

__all__ = ["agrees_with"]


def agrees_with(
    backend: Backend,
    case: Case,
    observed: Observation,
    policies: Mapping[str, Supposed],
    explain: Explain | None = None,
    own: Own = NONE,
) -> bool:
    """Return whether the reference, its ops under other policies, does what was observed.

    The state left behind does not depend on policies, and is not compared. An op that is taken for
    one of the promote policy has the known bugs of that policy too; a banned one says so. explain:
    knows bugs that may explain what is left. own: how the backend differs without autocast too.
    """
    banned = Policy.BANNED in policies.values()
    if banned and not refuses(observed):
        return False
    with supposing(policies):
        trial = Trial(case, backend, backend.reference().run(case), observed, own=own)
        if _agrees(trial, banned=banned):
            return True
        bugs = {k.quirk for k in shipped() if k.quirk.startswith("promote-")}
        promotes = Policy.PROMOTE in policies.values()
        if promotes and _agrees(imitated(trial, bugs), banned=banned):
            return True
        found = trial.compare() if explain is not None else None
        return bool(explain and found and explain(trial, found, confirmed=False).known)


def _agrees(trial: Trial, *, banned: bool) -> bool:
    stated = replace(trial, observed=replace(trial.observed, leaked=trial.expected.leaked))
    return (banned or not stated.raises_another()) and stated.compare() is None
