"""Judge one call of a subject on one backend, like a case."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial

from amp_fuzz.backends.harness import Observation, quiet
from amp_fuzz.cases.case import Case, Plan
from amp_fuzz.cases.program import Autocast, Program
from amp_fuzz.interfaces.check.adapters import Checked, case_of
from amp_fuzz.interfaces.check.stale import noticing
from amp_fuzz.interfaces.check.trace import names_called
from amp_fuzz.oracle import Divergence, Rounding, compare
from amp_fuzz.oracle.judge import Explanation, Judge, confirmed
from amp_fuzz.oracle.trial import Trial
from amp_fuzz.oracle.verdict import Verdict
from amp_fuzz.records.schema import OWN
from amp_fuzz.upstream.explain import Explainer
from amp_fuzz.upstream.known import Known

__all__ = ["Judged", "judged"]


@dataclass(frozen=True, slots=True)
class Judged:
    """A verdict with both observations.

    before: the reference's observation of an earlier call. stale: whether it used a cast of a
    weight there that had changed since. after: the contexts of the backend's earlier call, if it
    diverges only after that call.
    """

    verdict: Verdict
    case: Case
    before: Observation
    expected: Observation
    observed: Observation
    stale: bool = False
    after: tuple[Autocast, ...] = ()


def judged(
    checked: Checked,
    plan: Plan,
    known: Sequence[Known] = (),
    *,
    confirm: bool = True,
) -> Judged:
    """Judge a call. Known findings explain divergences; the rest is confirmed if asked.

    If an earlier call comes first, and the backend diverges, the call is judged without the earlier
    one: only if it agrees there, the earlier one counts.
    """
    earlier = checked.earlier(plan)
    if earlier is None:
        return _judged(checked, plan, known, Judge, confirm)
    found = _judged(checked, plan, known, _Second, confirm)
    if found.verdict.divergence is None:
        return found
    alone = Checked(checked.subject, checked.inner, checked.names)
    fresh = _judged(alone, plan, known, Judge, confirm)
    if fresh.verdict.divergence is not None:
        return fresh
    divergence = found.verdict.divergence
    if confirm:
        with quiet():
            trial = Trial(found.case, checked, found.expected, found.observed).settled()
            divergence = confirmed(trial, divergence)
    verdict = replace(found.verdict, divergence=divergence)
    return replace(found, verdict=verdict, after=earlier.contexts)


class _Second(Judge):
    """Judges the second of two calls: what it shows alone is asked elsewhere."""

    def _explained(self, trial: Trial, found: Divergence) -> Explanation:
        return Explanation(found)


def _judged(
    checked: Checked, plan: Plan, known: Sequence[Known], kind: type[Judge], confirm: bool
) -> Judged:
    """Judge a call.

    What the callable itself may do is never the backend's own: outputs that change from call to
    call, or that only one side returns.
    """
    with quiet():
        plain = checked.fit(Case(Program((), (), ()), plan, checked.subject.seed))
        # The content of the case is known only after the call.
        watch: AbstractContextManager[list[bool]]
        watch = noticing() if checked.values else nullcontext([])
        with watch as stale:
            before = checked.reference().run(plain)
        made = partial(case_of, plain.plan, before, checked.subject.seed)
        names = partial(names_called, checked.subject, checked.reference(), plain.plan)
        explain = _Explainer(Explainer(tuple(known)), cache(lambda: made(names())))
        case = made()
        verdict = kind(checked, explain, "none", confirm).judge(case)
        expected = verdict.seen
        assert expected is not None
        observed = checked.seen[case.plan]["observed"]
        if OWN in verdict.known.split("+"):
            trial = Trial(case, checked, expected, observed)
            changed = (_changes(trial) if confirm else None) or _another_structure(trial)
            if changed is not None:
                verdict = replace(verdict, outcome="diverged", divergence=changed, known="")
    return Judged(verdict, case, before, expected, observed, bool(stale))


def _another_structure(trial: Trial) -> Divergence | None:
    """Return the first output that only one side has: nothing compares it."""
    expected, observed = trial.expected.values, trial.observed.values
    outputs = [label for label in expected.keys() & observed.keys() if label.startswith("v")]
    lacking = {at for at in outputs if (expected[at] is None) != (observed[at] is None)}
    return trial.compare(skip=lambda at: at not in lacking) if lacking else None


def _changes(trial: Trial) -> Divergence | None:
    """Return what changes from call to call."""
    changed = trial.changed()
    return None if changed is None else replace(changed, kind="nondeterminism")


@dataclass(frozen=True, slots=True)
class _Explainer:
    """Explains by known entries, on the case with the ops that a call names.

    Only entries need these names, which cost another call: most calls agree and need none.
    """

    inner: Explainer
    case: Callable[[], Case]

    def __call__(self, trial: Trial, found: Divergence, *, confirmed: bool) -> Explanation:
        return self.inner(self._on(trial), found, confirmed=confirmed)

    def left_out(self, trial: Trial) -> Explanation:
        exact = trial.backend.reference().promise == "none"  # it leaves out no rounding
        return self.inner.left_out(trial if exact else self._on(trial))

    def _on(self, trial: Trial) -> Trial:
        return replace(trial, case=self.case()) if self.inner.known else trial


def others(checked: Checked, found: Judged) -> list[Divergence]:
    """Return every divergence of a call, including the first, in the order of observation."""
    skipped: set[str] = set()
    rounding = None
    if not checked.exact:
        run = partial(checked.reference().shadowed, found.case)
        promised = partial(run, promise="written") if checked.casts else None
        rounding = Rounding(run, promised=promised)
    checked.seen[found.case.plan] = {"expected": found.expected, "observed": found.observed}
    varied = Trial(found.case, checked, found.expected, found.observed).varied_judge(rounding)
    divergences: list[Divergence] = []
    with quiet():
        while True:
            one = compare(
                found.expected,
                found.observed,
                values=checked.values,
                rounding=rounding,
                varied=varied,
                skip=skipped.__contains__,
            )
            if one is None:
                return divergences
            divergences.append(one)
            if one.kind in ("raise", "state"):
                return divergences
            skipped.add(one.where)
