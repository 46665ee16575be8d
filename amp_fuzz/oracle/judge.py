"""Run one case on a backend and under the reference, and compare.

A run, a replay, the minimiser and the pytest plugin share this. The judge knows no bug of torch. It
takes an `Explain` that does.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from amp_fuzz.backends import Backend, BackendError, unsupported
from amp_fuzz.backends.base import facts_of, misplaced
from amp_fuzz.backends.harness import Observation
from amp_fuzz.cases.case import Case
from amp_fuzz.oracle.attribution import NONE, Own, own
from amp_fuzz.oracle.compare import Divergence
from amp_fuzz.oracle.relations import RELATIONS, check_relation
from amp_fuzz.oracle.trial import Skip, Trial
from amp_fuzz.oracle.verdict import Verdict
from amp_fuzz.records.schema import OWN, Note, Outcome

__all__ = ["Explain", "Explanation", "Judge", "Unexplained", "apart", "broken", "confirmed"]


@dataclass(frozen=True, slots=True)
class Explanation:
    """The explanation of a case.

    divergence: the one to report, or None. known: the ids of the entries that explain it, joined by
    +, or "" if something is left unexplained; `OWN` is one of them if the backend shows a part
    without autocast. notes: facts that do not affect the verdict. own: that part.
    """

    divergence: Divergence | None = None
    known: str = ""
    notes: tuple[Note, ...] = ()
    own: Own = NONE


class Explain(Protocol):
    """Explains divergences by known bugs."""

    def __call__(self, trial: Trial, found: Divergence, *, confirmed: bool) -> Explanation:
        """Explain a divergence, or return another one to report instead.

        confirmed: whether both sides ran again. Before that, only the observed case may explain it;
        after that, also what torch does when it runs in other ways.
        """

    def left_out(self, trial: Trial) -> Explanation:
        """Explain which roundings the backend left out, if a case agrees except for rounding."""


@dataclass(frozen=True, slots=True)
class Unexplained:
    """Knows no bug."""

    def __call__(self, trial: Trial, found: Divergence, *, confirmed: bool) -> Explanation:
        """Return the divergence."""
        return Explanation(found)

    def left_out(self, trial: Trial) -> Explanation:
        """Return none."""
        return Explanation()


@dataclass(frozen=True, slots=True)
class Judge:
    """Judges cases on one backend.

    explain: knows bugs. relations: how many metamorphic relations to check on each case: ``none``,
    ``one`` (it changes from case to case) or ``all``. confirm: whether both sides run again before
    a divergence is reported; off only if that happens later.
    """

    backend: Backend
    explain: Explain = field(default_factory=Unexplained)
    relations: Literal["none", "one", "all"] = "one"
    confirm: bool = True

    def judge(self, case: Case) -> Verdict:
        """Run a case and compare; a divergence is confirmed before it is reported.

        Raises `BackendError` for a program that the backend cannot express.
        """
        clock = _Clock()
        backend = self.backend
        if unsaid := unsupported(case, backend):
            raise BackendError(
                f"case {case.id}: {backend.name} cannot express {unsaid}: choose another backend "
                "for it"
            )
        if misplaced(case, backend):
            raise BackendError(
                f"case {case.id}: {backend.name} takes no tensors of two devices: choose another "
                "backend, or leave out the device of its inputs"
            )
        case = backend.fit(case)
        expected = backend.reference().run(case)
        clock.lap("reference")
        observed = backend.run([case])[0]
        clock.lap("backend")
        trial, unjudged = Trial(case, backend, expected, observed).settled(), set[str]()
        found = trial.compare(unjudged=unjudged) or trial.within()
        farthest = trial.farthest()  # of the reference as documented: what follows imitates bugs
        said = Explanation() if found else self.explain.left_out(trial)
        clock.lap("oracle")
        # On an inexact backend, each relation would cost a compilation and differ by rounding.
        if found is None and said.divergence is None and backend.values and backend.exact:
            found = _related(trial, observed, self.relations)
            clock.lap("relations")
        if found is not None:
            said = self._explained(trial, found)
            clock.lap("confirm")
        elif trial.ways is not nullcontext and (plain := trial.bare().compare()) is not None:
            # The reference ran the backend's own graph, which is wrong without autocast too.
            said = Explanation(plain, OWN)
        agreed: Literal["raised", "agreed"] = "raised" if observed.raised else "agreed"
        diverged: Outcome = "known" if said.known else "diverged"
        if said.known == OWN:
            diverged = "backend"
        return Verdict(
            case,
            backend.name,
            agreed if said.divergence is None else diverged,
            said.divergence,
            said.known,
            kernels=expected.kernels,
            seconds=clock.laps,
            unjudged=len(unjudged | trial.unjudged),
            varied=len(trial.varied),
            uncompiled=said.divergence is None and observed.graphs == 0 and agreed == "agreed",
            platform=observed.platform,
            notes=said.notes,
            farthest=farthest,
            seen=expected,
            own=said.own,
            hits=observed.hits,
            device=backend.device,
            implements=facts_of(backend).implements,
        )

    def _explained(self, trial: Trial, found: Divergence) -> Explanation:
        """Explain a divergence: by the backend without autocast, then by known bugs.

        The rest is confirmed and explained once more.
        """
        rest, left, mine = apart(trial, found)
        if left is None:
            return Explanation(found, OWN)
        said = self.explain(rest, left, confirmed=False)
        if said.known or said.divergence is None:
            return _joined(said, mine, rest.own)
        left = confirmed(rest, said.divergence) if self.confirm else said.divergence
        if left.kind == "nondeterminism":
            rest, other, changing = apart(rest, left)
            if other is None:
                return Explanation(left, OWN)
            if changing:
                mine, left = True, confirmed(rest, other, rest.own.labels.__contains__)
        return _joined(self.explain(rest, left, confirmed=True), mine, rest.own)


def apart(trial: Trial, found: Divergence) -> tuple[Trial, Divergence | None, bool]:
    """Return the trial without what the backend does without autocast too, and what diverges there.

    And whether there is such a part.
    """
    share = own(trial, found)
    if not share:
        return trial, found, False
    rest = replace(trial, own=trial.own | share)
    return rest, None if share.relation else rest.compare() or rest.within(), True


def _joined(said: Explanation, mine: bool, own: Own) -> Explanation:
    said = replace(said, own=own)
    if not (mine and said.known) or OWN in said.known.split("+"):
        return said
    return replace(said, known=f"{said.known}+{OWN}")


def confirmed(trial: Trial, found: Divergence, skip: Skip = lambda label: False) -> Divergence:
    """Run both sides again. If a result changes, return nondeterminism, else the divergence."""
    if (changed := trial.changed(skip)) is not None:
        return replace(changed, kind="nondeterminism")
    if found.kind == "relation" and broken(trial, trial.run(trial.case)) is None:
        return replace(found, kind="nondeterminism")
    return found


def broken(trial: Trial, observed: Observation) -> Divergence | None:
    """Return the first relation that an observation, or one of its variants, does not keep."""
    return trial.holds_within(observed) or _related(trial, observed, "all")


def _related(
    trial: Trial, observed: Observation, relations: Literal["none", "one", "all"]
) -> Divergence | None:
    """Return the first relation between variants of the case that does not hold."""
    case = trial.case

    def run(variant: Case) -> Observation:
        return observed if variant == case else trial.run(variant)

    together = observed.raised is not None
    chosen = [r for r in RELATIONS.values() if r.together == together]
    if relations == "none":
        return None
    if relations == "one":
        chosen = [chosen[case.seed % len(chosen)]]
    values, judge = trial.backend.values, trial.related
    found = (check_relation(one, case, run, values=values, judge=judge) for one in chosen)
    return next(filter(None, found), None)


class _Clock:
    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = self.laps.get(name, 0.0) + now - self._last
        self._last = now
