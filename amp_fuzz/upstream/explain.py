"""Explain divergences by the list of known entries."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from amp_fuzz.backends import Backend
from amp_fuzz.cases.program import statements
from amp_fuzz.oracle import Divergence, compare
from amp_fuzz.oracle.attribution import NONE, own
from amp_fuzz.oracle.explicit import calls_of
from amp_fuzz.oracle.judge import Explanation, Judge
from amp_fuzz.oracle.labels import named
from amp_fuzz.oracle.trial import Trial
from amp_fuzz.records.schema import OWN
from amp_fuzz.upstream import beside
from amp_fuzz.upstream.evidence import Imitated, Left, Listed, Remedied
from amp_fuzz.upstream.imitate import asking, imitated
from amp_fuzz.upstream.known import Known
from amp_fuzz.upstream.registry import may
from amp_fuzz.upstream.remedies import has
from amp_fuzz.upstream.roundings import EXCESS, left_out
from amp_fuzz.upstream.search import smallest

__all__ = ["Explainer", "judge_of"]


def judge_of(
    backend: Backend,
    known: Sequence[Known] = (),
    relations: Literal["none", "one", "all"] = "one",
    confirm: bool = True,
) -> Judge:
    """Return a judge of cases on one backend, whose divergences these entries may explain."""
    return Judge(backend, Explainer(tuple(known)), relations, confirm)


@dataclass(frozen=True, slots=True)
class Explainer:
    """Explains by known entries."""

    known: tuple[Known, ...] = ()

    @property
    def listed(self) -> Listed:
        """The entries that say which divergences they explain."""
        return Listed(self.known)

    def __call__(self, trial: Trial, found: Divergence, *, confirmed: bool) -> Explanation:
        """Explain a divergence, or say which one to report in its place; see `Explain`.

        First by listed entries and by what the reference imitates: that costs runs of the
        reference. If memory was not initialised, torch may agree by chance: then it disagrees with
        itself. After it was confirmed, also by what torch does without a part of it.
        """
        if not confirmed:
            known = self.ids(trial, found)
            if known and trial.steady():
                return Explanation(found, known)
            return Explanation(beside.first_new(trial, found, self.listed, self.ids))
        known = ""
        if found.kind == "nondeterminism":
            found, known = beside.after_changes(trial, found, self.listed)
        known = known or self._remedied(trial, found)
        return Explanation(found, known or beside.returned(trial, found, self.listed))

    def left_out(self, trial: Trial) -> Explanation:
        """Explain the roundings that the backend left out."""
        entries = (k.id for k in self.known if k.quirk == EXCESS and k.on(trial.backend.name))
        return left_out(trial, next(entries, ""))

    def ids(self, trial: Trial, found: Divergence) -> str:
        """Return the ids of the entries that explain a case with a divergence, or ""."""
        if found.kind == "relation":
            left, listed = Left(found), self.listed.explains(trial, found)
        else:
            left = self.listed.left(trial)
            listed = "" if left.divergence else "+".join(left.ids)
        if listed:
            return listed
        search = _Search(trial, found, self.listed, left.divergence)
        chosen = smallest(search.candidates(self._tried(trial)), search.explains)
        if chosen is None:
            return self._with_own(trial, found, search)
        return "+".join([*(k.id for k in chosen), *search.left(chosen).ids])

    def _with_own(self, trial: Trial, found: Divergence, search: _Search) -> str:
        """Return the ids of entries that explain a case beside the backend's own, or "".

        The explicit program has the casts that the bugs make. It costs a run of the backend.
        """
        if found.kind in ("relation", "nondeterminism"):
            return ""
        tried = self._tried(trial)
        acting, changing = search.acting(tried), search.changing(tried)
        more = [k for k in tried if k in changing or not k.general] if changing else []
        sets = filter(None, [acting, *([entry] for entry in acting), changing, more])
        listed: dict[frozenset[str], Sequence[str]] = {}

        def explains(chosen: Sequence[Known]) -> bool:
            ids = self._left_own(trial, found, chosen)
            if ids is not None:
                listed[_names(chosen)] = ids
            return ids is not None

        chosen = smallest(sets, explains)
        if chosen is None:
            return ""
        return "+".join([*(k.id for k in chosen), *listed[_names(chosen)], OWN])

    def _left_own(
        self, trial: Trial, found: Divergence, chosen: Iterable[Known]
    ) -> Sequence[str] | None:
        """Return the ids of entries that list what bugs leave beside the backend's own, or None."""
        now = replace(imitated(trial, _names(chosen)), own=NONE)  # asked anew, of all values
        another = now.raises_another()
        if ((left := now.compare()) is None and not another) or not _reached(trial, now):
            return None
        now = replace(now, own=own(now, left or found))
        rest = self.listed.left(now, plain=trial)
        told = not another or (now.own.raises and _went_on(now))
        return rest.ids if rest.divergence is None and told else None

    def _tried(self, trial: Trial) -> list[Known]:
        """Return the entries whose bugs the reference may imitate in this case.

        Most of what differs is the backend's own; of that, entries of some ops only come first.
        """
        ops = [s.op for s in statements(trial.case.program.body)]
        entries = [k for k in self.known if k.on(trial.backend.name) and k.tries(ops)]
        entries = [k for k in entries if may(k.quirk, trial.case)]
        return sorted(entries, key=lambda k: (k.general, not (k.general or k.ops)))

    def _remedied(self, trial: Trial, found: Divergence, without: tuple[str, ...] = ()) -> str:
        """Return the id of the entry whose library makes the difference, and of others, or "".

        without: the parts without which torch runs already.
        """
        ops = [s.op for s in statements(trial.case.program.body)]

        def explained(entry: Known) -> str:
            def rest(again: Trial, left: Divergence) -> str:
                more = (*without, entry.without)
                return self.ids(again, left) or self._remedied(again, left, more)

            return Remedied(entry, rest).explains(trial, found)

        entries = self.listed.speaking(trial, found, ops)
        entries = (k for k in entries if k.without and has(trial.case, k.without))
        tried = (explained(k) for k in entries if k.without not in without)
        return next(filter(None, tried), "")


@dataclass(slots=True)
class _Search:
    """Asks which bugs explain a divergence, and remembers what each set of them leaves.

    rest: what is left without any. asks: of which bugs the reference asked while it imitated some.
    """

    trial: Trial
    found: Divergence
    listed: Listed
    rest: Divergence | None
    lefts: dict[frozenset[str], Left] = field(default_factory=dict)
    asks: dict[frozenset[str], set[str]] = field(default_factory=dict)

    def left(self, chosen: Iterable[Known]) -> Left:
        """Return what is left while the reference imitates the bugs of these entries."""
        names = _names(chosen)
        if names not in self.lefts:
            with asking() as self.asks[names]:
                self.lefts[names] = Imitated(names, self.listed).left(self.trial, self.found)
        return self.lefts[names]

    def explains(self, chosen: Iterable[Known]) -> bool:
        """Return whether the bugs of these entries explain all."""
        return self.left(chosen).divergence is None

    def candidates(self, entries: list[Known]) -> Iterator[Sequence[Known]]:
        """Yield the sets of entries that may explain, each when those before it do not.

        First each alone, then those that change something alone, then all that the reference asks
        for. While it imitates one bug it may ask for others.
        """
        own = [k for k in entries if not k.general]
        yield from ([entry] for entry in own)
        general = self._asked_for([k for k in entries if k.general])
        chosen = [*own, *general]
        yield from ([entry] for entry in general)
        acting = self.acting(chosen)
        if 1 < len(acting) < len(chosen):
            yield acting
        asked = set[str]().union(*self.asks.values())
        while True:
            chosen = [k for k in entries if k in chosen or k.quirk in asked]
            if len(chosen) > 1:
                yield chosen
            asked = self.asks.get(_names(chosen), set())
            if all(k in chosen for k in entries if k.quirk in asked):
                return

    def acting(self, entries: Sequence[Known]) -> list[Known]:
        """Return the entries that leave something else alone, of those that were tried."""
        tried = [k for k in entries if frozenset({k.quirk}) in self.lefts]
        return [k for k in tried if self.left([k]).divergence != self.rest]

    def changing(self, entries: Iterable[Known]) -> list[Known]:
        """Return the entries with whose bugs the reference gives something else, of all values."""
        honest, values = self.trial.expected, self.trial.backend.values
        given = ((k, imitated(self.trial, {k.quirk}).expected) for k in entries)
        return [k for k, seen in given if compare(honest, seen, values=values) is not None]

    def _asked_for(self, general: list[Known]) -> list[Known]:
        """Return the entries, of those of every backend, whose bugs may change the case.

        The reference does not ask for the others, and imitating them leaves it as it is. A relation
        is between other cases.
        """
        if len(general) < 3 or self.found.kind == "relation":
            return general
        asked = self.trial.backend.reference().asked(self.trial.case)
        return general if asked is None else [k for k in general if k.quirk in asked]


def _reached(trial: Trial, now: Trial) -> bool:
    """Return whether the reference has the dtypes that were observed, up to an error.

    It returns nothing then. now: the trial in which it imitates bugs.
    """
    dtypes: dict[str, str] = {}
    if now.expected.raised is not None:
        with now.within_scope():
            calls_of(now.case, now.backend.reference(), dtypes)
    seen = {at: value for at, value in now.observed.values.items() if at not in trial.own.labels}
    made = ((dtypes.get(named(at)), value) for at, value in seen.items() if value is not None)
    return all(dtype is None or str(value.dtype) == f"torch.{dtype}" for dtype, value in made)


def _went_on(now: Trial) -> bool:
    """Return whether the backend raised elsewhere than the reference.

    At the same statement the error may be of the bug itself, in the backend's words.
    """
    mine, theirs = now.expected.raised, now.observed.raised
    return mine is None or theirs is None or (mine.line, mine.text) != (theirs.line, theirs.text)


def _names(entries: Iterable[Known]) -> frozenset[str]:
    return frozenset(entry.quirk for entry in entries)
