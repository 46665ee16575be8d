"""The three ways in which known entries explain a divergence.

Listed: the entry says which divergences it explains. Imitated: the reference with the bug agrees
with what was observed. Remedied: both sides agree when torch runs without the part that has the
bug.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial

from amp_fuzz.backends.harness import Observation, quiet
from amp_fuzz.cases.program import statements
from amp_fuzz.oracle import RELATIONS, Divergence, check_relation, compare
from amp_fuzz.oracle.judge import apart, broken
from amp_fuzz.oracle.labels import Named, guilty_op, named, tainted
from amp_fuzz.oracle.trial import Trial
from amp_fuzz.records.schema import OWN
from amp_fuzz.upstream.imitate import imitated
from amp_fuzz.upstream.known import Known
from amp_fuzz.upstream.registry import quirks
from amp_fuzz.upstream.remedies import WITHOUT

__all__ = ["Imitated", "Left", "Listed", "Remedied"]

_TYPES = ("dtype", "shape", "device", "grad-missing", "grad-dtype", "grad-shape", "grad-device")


@dataclass(frozen=True, slots=True)
class Left:
    """What entries leave of a case.

    divergence: the first that they do not explain; None: they explain all. ids: of the entries.
    skipped: the names of the values that they explain.
    """

    divergence: Divergence | None
    ids: tuple[str, ...] = ()
    skipped: Set[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Listed:
    """Entries that say which divergences they explain."""

    known: Sequence[Known]

    def left(
        self, trial: Trial, skipped: Set[str] = frozenset(), plain: Trial | None = None
    ) -> Left:
        """Return the first divergence that no entry lists, and the ids of those that are.

        A listed divergence also explains every value computed from it, and no others. One of range
        explains only that their types differ: of each value the elements that do not depend on what
        left the range are judged, and if the others differ, that is a divergence of range again.
        skipped: names of values that are explained already. plain: the trial without what the
        reference imitates. It judges the values that this one cannot.
        """
        rest, ids = _Rest(trial, plain, set(skipped)), dict[str, None]()
        while (found := rest.first()) and (listed := self.explains(trial, found)):
            ids[listed] = None
            rest.explained(found)
        return Left(found, tuple(ids), rest.skipped)

    def explains(self, trial: Trial, found: Divergence) -> str:
        """Return the id of the entry that lists a divergence, or "".

        An error in a backward pass names no statement: its text has to do. Each part of a state
        must be explained, and may be by an entry of its own.
        """
        parts = found.observed.split("; ") if found.kind == "state" else []
        if len(parts) > 1:
            ids = [self.explains(trial, replace(found, observed=part)) for part in parts]
            return "+".join(dict.fromkeys(ids)) if all(ids) else ""
        op = guilty_op(trial.case, found)
        entries = [k for k in self.speaking(trial, found) if not k.without]
        entries = [k for k in entries if op or k.expected or k.observed]
        return next((k.id for k in entries), "")

    def speaking(self, trial: Trial, found: Divergence, ops: Iterable[str] = ()) -> Iterator[Known]:
        """Yield the entries that speak of a divergence, at its op or at one of these."""
        op = guilty_op(trial.case, found)
        ops = list(ops) or ([op] if op else [s.op for s in statements(trial.case.program.body)])
        texts = {"expected": found.expected, "observed": found.observed}
        for entry in self.known:
            on = entry.on(trial.backend.name)
            if on and entry.explains(found.kind, ops, found.where, **texts):
                yield entry


@dataclass(slots=True)
class _Rest:
    """The part of a trial that is not explained yet; the first fields are those of `Listed.left`.

    ranged: names of values whose types may differ. unjudged: labels that the trial cannot judge.
    """

    trial: Trial
    plain: Trial | None
    skipped: set[str]
    ranged: set[str] = field(default_factory=set)
    unjudged: set[str] = field(default_factory=set)

    def first(self) -> Divergence | None:
        """Return the first divergence."""
        found = self.trial.compare(skip=Named(self.skipped), unjudged=self.unjudged)
        labels = {at for at in self.unjudged if named(at) not in self.skipped}
        if self.plain is not None and labels:
            judged = self.plain.compare(skip=lambda at: at not in labels, unjudged=set())
            found = judged if judged is not None and judged.where in labels else found
        if found and found.kind in _TYPES and named(found.where) in self.ranged:
            self.skipped |= tainted(self.trial.case, found.where)
            return self.first()
        return found

    def explained(self, found: Divergence) -> None:
        """Leave out a divergence, and what it explains."""
        trial, names = self.trial, tainted(self.trial.case, found.where)
        if found.kind == "state":
            self.trial = replace(trial, observed=replace(trial.observed, leaked=None))
        if found.kind == "raise":  # nothing was observed after it, but the state
            ended = partial(Observation, raised=trial.observed.raised or trial.expected.raised)
            expected, observed = (ended(leaked=s.leaked) for s in (trial.expected, trial.observed))
            self.trial = replace(trial, expected=expected, observed=observed)
        if found.kind == "range" and not trial.case.plan.scaler:  # a scaler looks for infinities
            self.skipped.add(named(found.where))
            self.ranged |= names
        else:
            self.skipped |= names


@dataclass(frozen=True, slots=True)
class Imitated:
    """Bugs that the reference imitates together, beside entries that list."""

    names: Collection[str]
    listed: Listed

    def left(self, trial: Trial, found: Divergence) -> Left:
        """Return what is left of a divergence while the reference imitates these bugs.

        None: it agrees with what was observed, but for what the entries list whose ids come with
        it. A value that nothing can judge then is judged without the bugs: to make it so explains
        nothing. A relation is between two runs of the backend: it is explained if the imitating
        reference breaks it in the same way, and the honest one does not.
        """
        if found.kind == "relation":
            scope = partial(quirks, self.names)
            wrong = replace(trial, imitated=frozenset(self.names), scope=scope)
            return Left(None if not _breaks(trial, found) and _breaks(wrong, found) else found)
        now = imitated(trial, self.names)
        return Left(found) if now.raises_another() else self.listed.left(now, plain=trial)


def _breaks(trial: Trial, found: Divergence) -> bool:
    """Return whether the reference breaks a relation in the same way."""
    relation = RELATIONS.get(found.where.partition(":")[0])
    if relation is None:
        broken = trial.holds_within(trial.refer(trial.case))
    else:
        values, judge = trial.backend.values, trial.related
        broken = check_relation(relation, trial.case, trial.refer, values=values, judge=judge)
    return broken is not None and broken.where == found.where


@dataclass(frozen=True, slots=True)
class Remedied:
    """An entry that names the part of torch whose fault it is."""

    entry: Known
    explain: Callable[[Trial, Divergence], str]

    def explains(self, trial: Trial, found: Divergence) -> str:
        """Return the id of the entry, and of those that explain what is left without that part.

        What the backend does without autocast too may be left, but not the divergence itself. "":
        not all is explained.
        """
        with quiet(), WITHOUT[self.entry.without]():  # switching warns of what this torch lacks
            again = trial.again()
            if found.kind == "relation" and (broken(again, again.observed) or again.compare()):
                return ""
            if found.kind == "nondeterminism" and not _repeats(again):
                return ""
            rest, mine = again.compare(), False
            if rest and (rest.kind, rest.where) != (found.kind, found.where):
                again, rest, mine = apart(again, rest)
            more = self.explain(again, rest) if rest else ""
        if rest and not more:
            return ""
        ids = [self.entry.id, *filter(None, more.split("+")), *[OWN] * mine]
        return "+".join(dict.fromkeys(ids))


def _repeats(trial: Trial) -> bool:
    """Return whether each side gives again what it gave, or both agree, again and again."""
    if replace(trial, observed=trial.refer(trial.case)).compare() is not None:
        return False
    seen = trial.run(trial.case)
    if compare(trial.observed, seen, values=trial.backend.values) is None:
        return True
    return trial.compare() is None and replace(trial, observed=seen).compare() is None
