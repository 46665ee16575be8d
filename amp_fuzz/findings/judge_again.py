"""Judge the case of a baseline entry again, in this process."""

from __future__ import annotations

from dataclasses import replace

from amp_fuzz.cases.case import Case
from amp_fuzz.findings.minimize.target import part_of
from amp_fuzz.findings.wrong_context import acts_as, unrestored
from amp_fuzz.findings.wrong_policy import POLICIES, WRONG_VALUES, only_kernel
from amp_fuzz.oracle.judge import Judge
from amp_fuzz.oracle.labels import guilty_op
from amp_fuzz.oracle.verdict import Verdict
from amp_fuzz.records.baseline import Entry
from amp_fuzz.records.fingerprint import kind_of
from amp_fuzz.records.schema import listed
from amp_fuzz.upstream.supposed import agrees_with

__all__ = ["happens", "still"]

TRIES = 10
"""How often a nondeterministic case runs."""


def still(judge: Judge, entry: Entry, case: Case) -> Verdict:
    """Judge the case of an entry. A nondeterministic one runs up to ten times."""
    judge = replace(judge, relations="all" if entry.kind == "relation" else "none")
    verdict = judge.judge(case)
    if entry.kind == "nondeterminism":
        for _ in range(TRIES - 1):
            if happens(judge, entry, verdict):
                break
            verdict = judge.judge(case)
    return verdict


def happens(judge: Judge, entry: Entry, verdict: Verdict) -> bool:
    """Return whether a verdict matches an entry: the kind at the op, or the policy."""
    found = verdict.divergence
    if found is None or listed(verdict.known):
        return False
    if entry.kind == "policy":
        observed = judge.backend.run([verdict.case])[0]
        supposed = [{entry.op: POLICIES[name]} for name in entry.as_if]
        return any(agrees_with(judge.backend, verdict.case, observed, s) for s in supposed)
    if entry.kind == "context":
        observed = judge.backend.run([verdict.case])[0]
        return bool(set(entry.as_if) & set(acts_as(judge, verdict.case, observed)))
    if entry.kind == "state" and found.kind != "state":
        named = {f"leaves={name}" for name in unrestored(judge, verdict.case)}
        return bool(named & set(entry.ingredient.split("+")))
    if entry.kind == "part":
        return part_of(judge, verdict, entry.stage) == entry.op
    if kind_of(found.kind) != entry.kind:
        return False
    op = guilty_op(verdict.case, found)
    if entry.op in ("", "*") or not op or op in entry.op.split("+"):
        return True
    return found.kind in WRONG_VALUES and only_kernel(judge, verdict.case) == entry.op
