"""Run one case on a backend and under the reference, and say how they compare.

This is what a run, a replay, the minimiser and the pytest plugin all share.
"""

from __future__ import annotations

import dataclasses
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import msgspec
import torch

from amp_fuzz.backends import Backend, BackendError, backends
from amp_fuzz.backends.reference import ReferenceRuntime
from amp_fuzz.blame import Named, guilty_op, named, tainted
from amp_fuzz.case import Case, bare, single
from amp_fuzz.catalogue import CATALOGUE
from amp_fuzz.harness import Observation
from amp_fuzz.known import Known
from amp_fuzz.oracle import (
    RELATIONS,
    Divergence,
    Judgement,
    Rounding,
    check_relation,
    compare,
    differ,
    within,
)
from amp_fuzz.oracle.compare import same
from amp_fuzz.program import Statement, returning_all, statements
from amp_fuzz.records import CaseRecord, DivergenceRecord, KernelRecord, Note, Outcome
from amp_fuzz.reference import KernelCall, Policy, supposing, torchax
from amp_fuzz.reference.gauge import DECOMPOSITIONS, Pair, observing
from amp_fuzz.reference.suppositions import supposed
from amp_fuzz.reference.written import SIXTEEN
from amp_fuzz.reference.xla import noting
from amp_fuzz.source import statement_source
from amp_fuzz.upstream import active_quirks, asking, quirks
from amp_fuzz.without import WITHOUT

__all__ = ["Judge", "Verdict", "refuses", "unsupported"]


@dataclass(slots=True)
class Verdict:
    """How a case came out on a backend.

    unjudged: values that differ, but nothing is said of. uncompiled: it agreed, but the compiler
    had made no graph of it. platform: see `Observation`. notes: facts beside the verdict; see
    `amp_fuzz.notes` for those that are looked for after it. seen: what the reference did.
    """

    case: Case
    backend: str
    outcome: Outcome
    divergence: Divergence | None = None
    known: str = ""
    kernels: Sequence[KernelCall] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    unjudged: int = 0
    uncompiled: bool = False
    platform: str = ""
    notes: tuple[Note, ...] = ()
    seen: Observation | None = field(default=None, repr=False, compare=False)

    def record(self, family: str) -> CaseRecord:
        """Return the record of the case."""
        counts = Counter(_key(k) for k in self.kernels)
        op = guilty_op(self.case, self.divergence) if self.divergence else ""
        kernel = _kernel_of(op, self.kernels)
        return CaseRecord(
            id=self.case.id,
            backend=self.backend,
            family=family,
            outcome=self.outcome,
            ops=tuple(s.op for s in statements(self.case.program.body)),
            kernels=tuple(KernelRecord(*key, count) for key, count in counts.items()),
            seconds={k: round(v, 6) for k, v in self.seconds.items()},
            kind=self.divergence.kind if self.divergence else "",
            op=op,
            known=self.known,
            at=list(counts).index(_key(kernel)) if kernel else -1,
            unjudged=self.unjudged,
            uncompiled=self.uncompiled,
            platform=self.platform,
            notes=self.notes,
        )

    def finding(
        self, family: str, minimised: Case | None = None, *, op: str = ""
    ) -> DivergenceRecord:
        """Return the record of the divergence. op: the guilty op, where it is known."""
        assert self.divergence is not None
        d = self.divergence
        op = op or guilty_op(minimised or self.case, d)
        kernel = _kernel_of(op.partition("+")[0], self.kernels)
        return DivergenceRecord(
            backend=self.backend,
            kind=d.kind,
            where=d.where,
            op=op,
            policy=kernel.policy.value if kernel else "none",
            dtypes=",".join(str(t).removeprefix("torch.") for t in kernel.dtypes) if kernel else "",
            expected=d.expected,
            observed=d.observed,
            known=self.known,
            case=self.case,
            minimised=minimised,
            family=family,
            platform=self.platform,
        )


def unsupported(case: Case, backend: Backend) -> Statement | None:
    """Return the first call that a backend cannot say, or None."""
    calls = statements(case.program.body)
    return next((s for s in calls if not backend.supports(s.op, s.form)), None)


def _key(kernel: KernelCall) -> tuple[str, str, str]:
    dtypes = ",".join(str(d).removeprefix("torch.") for d in kernel.dtypes)
    return kernel.overload, kernel.policy.value, dtypes


def _kernel_of(op: str, kernels: Sequence[KernelCall]) -> KernelCall | None:
    entry = CATALOGUE.get(op)
    wanted = {o.removeprefix("aten::") for o in entry.overloads} if entry else set()
    return next((k for k in kernels if k.overload in wanted), None)


def _has_part(case: Case, one: Divergence, other: Divergence) -> bool:
    """Return whether another divergence may come of one; all of them where values have no names."""
    if {one.kind, other.kind} & _NAMELESS:
        return True
    return named(other.where) in tainted(case, one.where)


_ROUNDINGS = {
    "xla-excess-precision": "after",
    "torchax-backward-dtypes": "of what is given to the backward pass of",
    "torchax-checkpoint": "in the recomputation of a",
}
_WIDE = "xla-excess-precision"  # of Inductor too: every rounding is left out
_NAMELESS = {"raise", "state", "nondeterminism", "relation", "crash", "timeout"}
_TYPES = ("dtype", "shape", "grad-missing", "grad-dtype", "grad-shape")


def _error(seen: Observation) -> tuple[str, str]:
    """Return which error ended a case, wherever it stands."""
    return ("", "") if seen.raised is None else (seen.raised.kind, seen.raised.message)


@dataclass(slots=True)
class _Frame:
    """What is kept while a case is judged: shadows, and what was observed without autocast."""

    shadows: dict[Any, tuple[Case, Rounding]] = field(default_factory=dict)
    bare: dict[str, Observation] = field(default_factory=dict)
    right: dict[int, tuple[Case, Mapping[str, torch.Tensor | None]]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Judge:
    """Judges cases on one backend.

    relations: how many metamorphic relations each case is put to: ``none``, ``one`` (a different
    one from case to case) or ``all``. known: the entries that may explain a divergence. confirm:
    whether a divergence is run again before it is reported; off only where that comes later.
    """

    backend: Backend
    known: Sequence[Known] = ()
    relations: Literal["none", "one", "all"] = "one"
    confirm: bool = True
    _frames: list[_Frame] = field(default_factory=list, init=False, repr=False, compare=False)

    def judge(self, case: Case) -> Verdict:
        """Run a case and compare; a divergence is confirmed before it is reported.

        Raises `BackendError` for a program that the backend cannot say.
        """
        with self._following():
            return self._judged(case)

    @contextmanager
    def _following(self) -> Iterator[None]:
        """Keep for a block what of a case is the same each time that it is asked for."""
        self._frames.append(_Frame())
        try:
            yield
        finally:
            self._frames.pop()

    def _judged(self, case: Case) -> Verdict:
        clock = _Clock()
        backend = self.backend
        if (unsaid := unsupported(case, backend)) is not None:
            raise BackendError(
                f"case {case.id}: {backend.name} has no words for {unsaid.op} as {unsaid.form}: "
                "choose another backend for it"
            )
        case = backend.fit(case)
        expected = backend.reference().run(case)
        clock.lap("reference")
        observed = backend.run([case])[0]
        clock.lap("backend")
        unjudged: set[str] = set()
        found = self._compare(case, expected, observed, unjudged)
        found = found or self._within(case, observed)
        left_out, wider = (None, ()) if found else self._elided(case, expected, observed)
        unrounded = None if found or left_out else self._unrounded(case, expected, observed)
        if unrounded and self.backend.reference().promise == "all":
            left_out, wider = unrounded[0], (_WIDE,)
        found = found or left_out
        clock.lap("oracle")
        # The relations of an inexact backend would cost a compilation each, and differ by rounding.
        if found is None and backend.values and backend.exact:
            found = self._relate(case, observed)
            clock.lap("relations")
        verdict = Verdict(
            case,
            backend.name,
            "agreed",
            kernels=expected.kernels,
            seconds=clock.laps,
            unjudged=len(unjudged),
            platform=observed.platform,
            seen=expected,
        )
        if found is None:
            verdict.outcome = "raised" if observed.raised else "agreed"
            verdict.uncompiled = observed.graphs == 0 and verdict.outcome == "agreed"
            if unrounded is not None:
                verdict.notes = (self._note(case, *unrounded),)
            return verdict
        if left_out is not None:  # the imitation agreed; without it too, as far as rounding goes
            verdict.divergence, verdict.known = found, self._named(wider)
            verdict.outcome = "known" if verdict.known else "diverged"
            return verdict
        # Explained first: a known bug costs one run of the imitating reference. Where memory was
        # not initialised that may agree by chance: then torch disagrees with itself.
        verdict.divergence, verdict.known = found, self.explain(case, found, expected, observed)
        if verdict.known and self.backend.exact:
            again = compare(observed, self._run(case), values=self.backend.values)
            verdict.known = verdict.known if again is None else ""
        if not verdict.known:
            if left := self._left_behind(case, found, expected, observed):
                found = left
            elif found.kind != "relation":  # an entry may know the first, and not what follows
                found = self._remaining(case, expected, observed)[0] or found
                found = self._behind(case, found, expected, observed)
            if self.confirm:
                found = self._confirm(case, found, expected, observed)
            if found.kind == "nondeterminism":
                found, verdict.known = self._beside(case, found, expected, observed)
            verdict.divergence = found
            verdict.known = verdict.known or self._cleared(case, found)
            verdict.known = verdict.known or self._returned(case, found, expected, observed)
        verdict.outcome = "known" if verdict.known else "diverged"
        clock.lap("confirm")
        return verdict

    def _elided(
        self, case: Case, expected: Observation, observed: Observation
    ) -> tuple[Divergence | None, tuple[str, ...]]:
        """Return where a rounding that the program asks for was left out, and the quirks of that.

        Nearer to the exact value, it is within what rounding explains. It is one if the reference
        that leaves roundings out agrees with the backend on the whole case, and differs there, by
        more than the rounding of what is left, from the reference that makes them.
        """
        if not observed.elided:
            return None, ()
        wider = self.backend.reference().wider
        for chosen in dict.fromkeys([*((quirk,) for quirk in wider), wider]):
            with quirks(chosen):
                with noting() as names:
                    wide = self.backend.reference().run(case)
                if not names or self._compare(case, wide, observed) is not None:
                    continue
                made = self._compare(case, wide, dataclasses.replace(expected, elided=()))
            if made is None or made.where not in observed.elided:
                continue
            rounding = f"the rounding {_ROUNDINGS[chosen[0]]} {', '.join(names)}"
            found = Divergence(
                made.kind,
                made.where,
                f"{made.observed.partition(':')[0]}, with {rounding}",
                f"{made.expected}: {rounding} is left out (excess precision)",
            )
            return found, chosen
        return None, ()

    def _unrounded(
        self, case: Case, expected: Observation, observed: Observation
    ) -> tuple[Divergence, str] | None:
        """Return where a 16-bit result was not rounded, though no cast asks for it, and after what.

        There is one if a value is not what it is after all roundings, and the reference that leaves
        out all agrees. Where some are made and others not, or more, nothing is said.
        """
        reference = self.backend.reference()
        if reference.promise == "none" or not _has_16_bits(expected):
            return None
        promised = partial(reference.shadowed, case, promise="all")
        rounding = replace(self._rounding(case, reference), promised=promised, _strict={})
        off = compare(expected, observed, rounding=rounding)
        if off is None or off.kind != "precision":
            return None
        with quirks((_WIDE,)), noting() as names:
            wide = reference.run(case)
            if not names or self._compare(case, wide, observed) is not None:
                return None
        return off, ", ".join(sorted(names))

    def _note(self, case: Case, off: Divergence, names: str) -> Note:
        """Return a note of roundings that were left out, and that nobody promises."""
        at = named(off.where)
        made = [s for s in statements(case.program.body) if at in s.outputs]
        return Note(
            "precision",
            self.backend.name,
            guilty_op(case, off),
            statement_source(made[0]) if made else off.where,
            f"the rounding to 16 bits after {names} is left out",
            "Set torch._inductor.config.emulate_precision_casts if eager's rounding matters.",
        )

    def _named(self, chosen: Iterable[str]) -> str:
        """Return the ids of the entries that know of quirks of the backend, or "" if one has none.

        They are joined by +.
        """
        entries = {k.quirk: k.id for k in self.known if k.on(self.backend.name)}
        ids = [entries.get(quirk, "") for quirk in chosen]
        return "+".join(ids) if all(ids) else ""

    def _left_behind(
        self, case: Case, found: Divergence, expected: Observation, observed: Observation
    ) -> Divergence | None:
        """Return the divergence in state, if known entries explain all of a case but that."""
        if observed.leaked == expected.leaked or found.kind in ("state", "relation"):
            return None
        restored = dataclasses.replace(observed, leaked=expected.leaked)
        if not self.explain(case, found, expected, restored):
            return None
        alone = Observation(leaked=observed.leaked, raised=observed.raised)
        return self._compare(case, Observation(raised=observed.raised), alone)

    def _behind(
        self, case: Case, found: Divergence, expected: Observation, observed: Observation
    ) -> Divergence:
        """Return the divergence where a case differs from the reference with all known bugs, too.

        The first may be one of those, and not be why the case is unknown.
        """
        ops = [s.op for s in statements(case.program.body)]
        bugs = {k.quirk for k in self.known if k.tries(ops) and k.on(self.backend.name)}
        if not bugs or found.kind in ("raise", "state"):
            return found
        with self._imitating(case, observed, bugs):
            imitated = self.backend.reference().run(case)
            left, _ = self._remaining(case, imitated, observed)
        if left is None or left.kind == "state":
            return found
        if left.kind == "raise":  # it is the same without what is known before it
            again = self._compare(case, expected, observed, skip=lambda other: True)
            return again if again is not None and again == left else found
        at = named(left.where)
        sides = (dataclasses.replace(s, raised=None, leaked=None) for s in (expected, imitated))
        acts = compare(*sides, values=self.backend.values, skip=lambda label: label != found.where)
        if at == named(found.where) or acts is None:  # no known bug acts there
            return found
        again = self._compare(case, expected, observed, skip=lambda other: named(other) != at)
        return again if again is not None and named(again.where) == at else found

    def _run(self, case: Case) -> Observation:
        return self.backend.run([case])[0]

    def _compare(
        self,
        case: Case,
        expected: Observation,
        observed: Observation,
        unjudged: set[str] | None = None,
        skip: Callable[[str], bool] = lambda label: False,
    ) -> Divergence | None:
        rounding: Judgement | None = None
        if not self.backend.exact:
            reference = self.backend.reference()
            rounding = partial(self._either, case)
            if reference.follows():
                rounding = followed = self._rounding(case, reference)
                followed.unjudged = set() if unjudged is None else unjudged
        return compare(expected, observed, values=self.backend.values, rounding=rounding, skip=skip)

    def _either(
        self, case: Case, label: str, want: torch.Tensor, got: torch.Tensor
    ) -> Divergence | None:
        """Return a divergence from an imitation that shadows cannot follow, bit for bit.

        There is none where the bug does not act: where rounding explains both values under the
        reference without it. What is added up in another order beside it is no fault.
        """
        with quirks(()):
            right = self._right(case).get(label)
            if right is None or (right.dtype, right.shape) != (got.dtype, got.shape):
                return differ(label, want, got)
            rounding = self._rounding(case, self.backend.reference())
            rounding.unjudged = set()
            values = [value for value in (want, got) if not same(right, value)]
            far = any(rounding(label, right, value) is not None for value in values)
        return differ(label, want, got) if far or rounding.unjudged else None

    def _right(self, case: Case) -> Mapping[str, torch.Tensor | None]:
        """Return the values of the reference, run once for each case that is judged."""
        if not self._frames:
            return self.backend.reference().run(case).values
        kept = self._frames[-1].right
        if id(case) not in kept:
            kept[id(case)] = case, self.backend.reference().run(case).values
        return kept[id(case)][1]

    def _rounding(self, case: Case, reference: ReferenceRuntime) -> Rounding:
        """Return what judges the values of a case under what the reference imitates now."""
        run = partial(reference.shadowed, case)
        made = Rounding(run)
        if reference.casts(case):
            made.promised = partial(run, promise="written")
        if not self._frames:
            return made
        key = id(case), active_quirks(), frozenset(supposed().items())
        return self._frames[-1].shadows.setdefault(key, (case, made))[1]

    def _within(self, case: Case, observed: Observation) -> Divergence | None:
        """Check what holds inside one observation; of a backend that does not repeat, no bits."""
        values = self.backend.values and self.backend.repeats
        return within(case, observed, values=values)

    def _relate(self, case: Case, observed: Observation) -> Divergence | None:
        def run(variant: Case) -> Observation:
            return observed if variant is case else self._run(variant)

        together = observed.raised is not None
        relations = [r for r in RELATIONS.values() if r.together == together]
        if self.relations == "none":
            return None
        if self.relations == "one":
            relations = [relations[case.seed % len(relations)]]
        for relation in relations:
            found = check_relation(relation, case, run, values=self.backend.values)
            if found is not None:
                return found
        return None

    def _confirm(
        self,
        case: Case,
        found: Divergence,
        expected: Observation,
        observed: Observation,
        skip: Callable[[str], bool] = lambda label: False,
    ) -> Divergence:
        """Run both sides again: what does not stay as it was is nondeterminism, no other kind."""
        sides = [(expected, self.backend.reference().run), (observed, self._run)]
        if self.backend.exact:  # each twice in a row: what changes at every other call is seen, too
            sides = [*sides, *sides[::-1], *sides]
        for first, side in sides:
            changed = compare(first, side(case), values=self.backend.values, skip=skip)
            if changed is not None:
                return replace(changed, kind="nondeterminism")
        if found.kind == "relation" and self._relate_all(case) is None:
            return replace(found, kind="nondeterminism")
        return found

    def _beside(
        self, case: Case, found: Divergence, expected: Observation, observed: Observation
    ) -> tuple[Divergence, str]:
        """Return what is new beside nondeterminism, or that with the ids of what is known of it.

        All that changes has to be known; what that has no part in has to agree, or be known. An
        error may come of it, and a state that is left behind does not.
        """
        ids: dict[str, None] = {}
        skipped: set[str] = set()
        while found.kind == "nondeterminism" and not Named(skipped)(found.where):
            if not (listed := self._listed(case, found)):
                break
            ids[listed] = None
            skipped |= tainted(case, found.where)
            rest, more = self._remaining(case, expected, observed, skipped)
            ids |= dict.fromkeys(more)
            if rest is None or rest.kind == "raise":
                return found, "+".join(ids)
            found = self._confirm(case, rest, expected, observed, Named(skipped))
        return found, ""

    def _relate_all(self, case: Case) -> Divergence | None:
        observed = self._run(case)
        return self._within(case, observed) or replace(self, relations="all")._relate(
            case, observed
        )

    def explain(
        self, case: Case, found: Divergence, expected: Observation, observed: Observation
    ) -> str:
        """Return the ids of the known entries that explain a divergence, joined by +, or ""."""
        rest: Divergence | None = found
        if found.kind == "relation":
            listed = self._listed(case, found)
        else:
            rest, ids = self._remaining(case, expected, observed)
            listed = "" if rest else "+".join(ids)
        if listed:
            return listed
        ops = [s.op for s in statements(case.program.body)]
        quirky = [k for k in self.known if k.on(self.backend.name) and k.tries(ops)]
        reference = self.backend.reference()
        quirky = [k for k in quirky if reference.may(k.quirk, case)]
        # Most of what differs is the backend's own; of that, what is of some ops only comes first.
        quirky.sort(key=lambda entry: (entry.general, not (entry.general or entry.ops)))

        tried: dict[frozenset[str], tuple[Divergence | None, list[str]]] = {}

        def left(chosen: Sequence[Known]) -> tuple[Divergence | None, list[str]]:
            names = frozenset(k.quirk for k in chosen)
            if names not in tried:
                tried[names] = self._left_with(case, found, observed, names)
            return tried[names]

        def explained(chosen: Sequence[Known]) -> list[str] | None:
            without, more = left(chosen)
            return [*(k.id for k in chosen), *more] if without is None else None

        every = quirky
        own = sum(not entry.general for entry in every)
        with asking() as asked:
            for entry in every[:own]:
                if (ids_ := explained([entry])) is not None:
                    return self._sound(case, [entry], ids_)
            quirky = self._asked_for(case, found, every)
            for entry in quirky[own:]:
                if (ids_ := explained([entry])) is not None:
                    return self._sound(case, [entry], ids_)
        acting = [k for k in quirky if left([k])[0] != rest]  # alone, if not enough
        ids_ = explained(acting) if 1 < len(acting) < len(quirky) else None
        if ids_ is not None:
            quirky = acting
        while ids_ is None:  # one of them may make the reference ask for others
            quirky = [k for k in every if k in quirky or k.quirk in asked]
            with asking() as asked:
                ids_ = explained(quirky) if len(quirky) > 1 else None
            if all(k in quirky for k in every if k.quirk in asked):
                break
        if ids_ is None:
            return ""
        size = len(quirky) // 2
        while size:  # only those without which it is not explained; most are of every backend, last
            for start in reversed(range(0, len(quirky), size)):
                fewer = quirky[:start] + quirky[start + size :]
                if fewer and (without := explained(fewer)) is not None:
                    quirky, ids_ = fewer, without
            size //= 2
        return self._sound(case, quirky, ids_)

    def _asked_for(self, case: Case, found: Divergence, entries: list[Known]) -> list[Known]:
        """Return the entries whose quirks may change what the reference does with a case.

        Those of every backend that it does not ask for leave it as it is. A relation is between
        other cases.
        """
        if sum(entry.general for entry in entries) < 3 or found.kind == "relation":
            return entries
        asked = self.backend.reference().asked(case)
        if asked is None:
            return entries
        return [entry for entry in entries if entry.quirk in asked or not entry.general]

    def agrees_with(
        self, case: Case, observed: Observation, policies: Mapping[str, Policy | None]
    ) -> bool:
        """Return whether the reference, its ops under other policies, does what was observed.

        What state is left behind is no matter of policies, and is not compared. An op that is taken
        for one of the promote policy has the known bugs of that policy too; a banned one says so.
        """
        banned = Policy.BANNED in policies.values()
        if banned and not refuses(observed):
            return False
        bugs = {k.quirk for k in self.known if k.quirk.startswith("promote-")}
        for names in ((), bugs) if Policy.PROMOTE in policies.values() else ((),):
            with supposing(policies), quirks(names):
                expected = self.backend.reference().run(case)
                found = dataclasses.replace(observed, leaked=expected.leaked)
                both = expected.raised and found.raised and not banned
                if both and self._elsewise(expected, found):
                    continue
                if self._compare(case, expected, found) is None:
                    return True
        return False

    def _remaining(
        self,
        case: Case,
        expected: Observation,
        observed: Observation,
        skipped: set[str] | None = None,
    ) -> tuple[Divergence | None, list[str]]:
        """Return the first divergence that no entry lists, and the ids of those that are.

        A listed divergence takes along what its value has a part in, and nothing else. One of range
        takes along other types only: of each value the elements that do not depend on what left the
        range are judged, and that the others differ is a divergence of range again.
        skipped: the names that are explained already, to which it adds.
        """
        ids: dict[str, None] = {}
        skipped = set() if skipped is None else skipped
        ranged: set[str] = set()
        while True:
            found = self._compare(case, expected, observed, skip=Named(skipped))
            if found and found.kind in _TYPES and Named(ranged)(found.where):
                skipped |= tainted(case, found.where)
                continue
            listed = self._listed(case, found) if found else ""
            if found is None or not listed:
                return found, list(ids)
            ids[listed] = None
            if found.kind == "state":
                return None, list(ids)
            if found.kind == "raise":  # nothing was observed after it, but the state
                raised = observed.raised or expected.raised
                expected = Observation(raised=raised, leaked=expected.leaked)
                observed = Observation(raised=raised, leaked=observed.leaked)
            if found.kind == "range" and not case.plan.scaler:  # which looks for infinities itself
                skipped.add(named(found.where))
                ranged |= tainted(case, found.where)
            else:
                skipped |= tainted(case, found.where)

    def _sound(self, case: Case, entries: Iterable[Known], ids: Sequence[str]) -> str:
        """Return the ids that explain a case, or "" if it may not differ without autocast.

        What is known there as no fault of autocast may differ: its ids are added.
        """
        if not any(entry.bare == "agrees" for entry in entries):
            return "+".join(ids)
        plain, found = self.bare(case)
        if found is None:
            return "+".join(ids)
        expected, observed = self.backend.reference().run(plain), self._run_bare(plain)
        others = [entry for entry in self.known if entry.bare != "agrees"]
        more = replace(self, known=others).explain(plain, found, expected, observed)
        return "+".join(dict.fromkeys([*ids, *more.split("+")])) if more else ""

    def bare(self, case: Case) -> tuple[Case, Divergence | None]:
        """Return the case without autocast, and its divergence, if there is one.

        What only autocast lets run (it brings operands of two dtypes together) runs in float32.
        """
        run = self.backend.reference().run
        plain = bare(case)
        expected = run(plain)
        if expected.raised and _error(expected) != _error(run(case)):
            plain = single(plain)
            expected = run(plain)
        return plain, self._compare(plain, expected, self._run_bare(plain))

    def _run_bare(self, plain: Case) -> Observation:
        """Run a case without autocast, once for each case that is judged."""
        if not self._frames:
            return self._run(plain)
        seen = self._frames[-1].bare
        if plain.id not in seen:
            seen[plain.id] = self._run(plain)
        return seen[plain.id]

    def _listed(self, case: Case, found: Divergence) -> str:
        """Return the id of the entry without a quirk that explains a divergence, or "".

        An error in a backward pass names no statement: its text has to do. Of a state, each part
        has to be explained, and may be by an entry of its own.
        """
        parts = found.observed.split("; ") if found.kind == "state" else []
        if len(parts) > 1:
            ids = [self._listed(case, replace(found, observed=part)) for part in parts]
            return "+".join(dict.fromkeys(ids)) if all(ids) else ""
        op = guilty_op(case, found)
        entries = [k for k in self._speaking(case, found) if k.bare or not k.without]
        entries = [k for k in entries if op or k.expected or k.observed]
        return next((k.id for k in entries if self._fits(k, case, found)), "")

    def _fits(self, entry: Known, case: Case, found: Divergence) -> bool:
        """Return whether the case does at the entry's stage, and bare, what it asks for.

        What differs bare has to have a part in the value that differs here: another one, of the
        same op, may be autocast's fault.
        """
        if not self._at_stage(entry, case):
            return False
        if not entry.bare:
            return True
        plain, differs = self.bare(case)
        if entry.bare == "agrees" or differs is None:
            return differs is None and entry.bare == "agrees"
        return any(
            entry in self._speaking(plain, one)
            and _has_part(plain, one, found)
            and (not entry.without or self._goes(plain, one, entry.without))
            for one in self._divergences(plain, differs)
        )

    def _goes(self, case: Case, found: Divergence, library: str) -> bool:
        """Return whether a case has no divergence of that kind without a library."""
        with quiet(), WITHOUT[library](), self._following():
            sides = self.backend.reference().run(case), self._run(case)
            if found.kind in ("raise", "state"):
                rest = self._compare(case, *sides)
            else:  # another value may differ before it
                rest = self._compare(case, *sides, skip=lambda at: named(at) != named(found.where))
            return rest is None or rest.kind != found.kind

    def _divergences(self, case: Case, first: Divergence) -> Iterator[Divergence]:
        """Yield a divergence, and after it those that it has no part in."""
        yield first
        expected, observed = self.backend.reference().run(case), self._run_bare(case)
        skipped: set[str] = set()
        found: Divergence | None = first
        while found is not None and found.kind not in ("raise", "state"):
            skipped |= tainted(case, found.where)
            found = self._compare(case, expected, observed, skip=Named(skipped))
            if found is not None:
                yield found

    def _at_stage(self, entry: Known, case: Case) -> bool:
        """Return whether the case diverges at the stage that an entry blames.

        Taking a part away changes what a later stage fuses, and with it what is rounded there.
        """
        if entry.stage in ("", self.backend.name):
            return True
        return Judge(backends()[entry.stage]).judge(case).divergence is not None

    def _cleared(self, case: Case, found: Divergence) -> str:
        """Return the id of the entry whose library makes the difference, and of others, or ""."""
        ops = [s.op for s in statements(case.program.body)]
        for entry in self._speaking(case, found, ops):
            if not entry.without or entry.bare:
                continue
            more = self._agrees_without(entry.without, case, found)
            if more is not None and self._at_stage(entry, case):
                return "+".join([entry.id, *more])
        return ""

    def _speaking(self, case: Case, found: Divergence, ops: Iterable[str] = ()) -> Iterator[Known]:
        op = guilty_op(case, found)
        ops = list(ops) or ([op] if op else [s.op for s in statements(case.program.body)])
        texts = {"expected": found.expected, "observed": found.observed}
        for entry in self.known:
            on = entry.on(self.backend.name)
            if on and entry.explains(found.kind, ops, found.where, **texts):
                yield entry

    def _returned(
        self, case: Case, found: Divergence, expected: Observation, observed: Observation
    ) -> str:
        """Return the ids that explain a case where it returns every value that it makes, or "".

        An entry names the op at which a bug shows. Where that op's value is not returned, what is
        computed from it shows the bug, at other ops. Nothing else may differ, in either program.
        """
        whole = msgspec.structs.replace(case, program=returning_all(case.program))
        if whole == case or found.kind in ("raise", "state", "relation", "nondeterminism"):
            return ""
        skipped: set[str] = set()
        sides = self.backend.reference().run(whole), self._run(whole)
        rest, ids = self._remaining(whole, *sides, skipped)
        if rest is not None or not ids:
            return ""
        rest, more = self._remaining(case, expected, observed, skipped)
        return "" if rest is not None else "+".join(dict.fromkeys([*ids, *more]))

    def _agrees_without(self, library: str, case: Case, found: Divergence) -> Sequence[str] | None:
        """Return the entries that explain what is left without a library; None: not all of it."""
        # Switching warns of what this torch lacks; the shadows with the library are of no use here.
        with quiet(), WITHOUT[library](), self._following():
            expected = self.backend.reference().run(case)
            if found.kind == "nondeterminism":
                sides = (self._run, self.backend.reference().run, self._run)
                steady = all(self._compare(case, expected, side(case)) is None for side in sides)
                return () if steady else None
            observed = self._run(case)
            rest = self._compare(case, expected, observed)
            if rest is None:
                return ()
            explained = self.explain(case, rest, expected, observed)
            return explained.split("+") if explained else None

    def _left_with(
        self, case: Case, found: Divergence, observed: Observation, names: Collection[str]
    ) -> tuple[Divergence | None, list[str]]:
        """Return what is left of a divergence where the reference imitates these bugs.

        None if it agrees with what was observed, but for what the entries list whose ids come with
        it. A relation is between two runs of the backend: it is explained if the imitating
        reference breaks it in the same way.
        """
        if found.kind == "relation" and self._broken_by_reference(case, found):
            return found, []  # with or without these bugs
        with self._imitating(case, observed, names):
            if found.kind == "relation":
                return None if self._broken_by_reference(case, found) else found, []
            expected = self.backend.reference().run(case)
            if expected.raised and observed.raised and self._elsewise(expected, observed):
                return found, []
            return self._remaining(case, expected, observed)

    @contextmanager
    def _imitating(
        self, case: Case, observed: Observation, names: Collection[str]
    ) -> Iterator[None]:
        """Have the reference imitate these bugs for a block, and take over what is not determined.

        That is read from the values of the case; of a jitted program, which does not return all,
        from those of one that does.
        """
        pairs = self._vectors(case, observed) if torchax.GAUGE in names else ()
        with quirks(names), observing(pairs):
            yield

    def _vectors(self, case: Case, observed: Observation) -> Sequence[Pair]:
        """Return what was observed of each call of a singular value decomposition."""
        values = observed.values
        if returning_all(case.program) != case.program:
            whole = msgspec.structs.replace(case, program=returning_all(case.program))
            values = self._run(whole).values
        calls = [s.outputs for s in statements(case.program.body) if s.op in DECOMPOSITIONS]
        ends = dict.fromkeys(label.rpartition(".")[0] for label in values)
        return [
            (values.get(f"{of}{u}"), values.get(f"{of}{v}"))
            for of in (f"{end}." if end else "" for end in ends)
            for u, _, v in calls
        ]

    def _elsewise(self, expected: Observation, observed: Observation) -> bool:
        """Return whether an inexact backend, which may raise otherwise, raises another error."""
        return not self.backend.exact and _complaints(expected).isdisjoint(_complaints(observed))

    def _broken_by_reference(self, case: Case, found: Divergence) -> bool:
        def run(variant: Case) -> Observation:
            return self.backend.reference().run(variant)

        name = found.where.partition(":")[0]
        relation = RELATIONS.get(name)
        if relation is None:
            broken = self._within(case, run(case))
        else:
            broken = check_relation(relation, case, run, values=self.backend.values)
        return broken is not None and broken.where == found.where


def _has_16_bits(seen: Observation) -> bool:
    """Return whether any tensor that a kernel took or a program returned has a 16-bit dtype."""
    dtypes = {value.dtype for value in seen.values.values() if value is not None}
    return not SIXTEEN.isdisjoint(dtypes.union(*(kernel.dtypes for kernel in seen.kernels)))


def refuses(seen: Observation) -> bool:
    """Return whether what was raised is what autocast says of a banned op."""
    return seen.raised is not None and "unsafe to autocast" in seen.raised.message


def _complaints(seen: Observation) -> set[str]:
    """Return what was raised, without what wrapped it: ``SomeError: `` and a line stand inside.

    Fake kernels, which are Python, say the name of their own op first and write dtypes as Python
    does: ``linalg.inv_ex: ... Got torch.float16`` is the kernel's ``linalg.inv: ... Got Half``.
    What an error hints at depends on whether anomalies are detected, as AOTAutograd does.
    """
    return {_alike(text) for text in _texts(seen)}


_DTYPES = {"Half": "float16", "BFloat16": "bfloat16", "Float": "float32", "Double": "float64"}
_NAMES = "|".join([*_DTYPES, *_DTYPES.values()])
_SPELLED = re.compile(rf"\b(?:torch\.|c10::|CPU)?({_NAMES})(?:Tensor|Type)?\b")
# What the CPU's convolutions say more than the fake one.
_ASIDE = " or input should be a MKLDNN tensor and weight is a dense tensor"


# Products of two dtypes are refused in these words, each kernel's and each fake one's.
_REFUSED = re.compile(
    r"(expected m1 and m2 to|mat1 and mat2 must|addmv input tensors must) have the same dtype, but"
    r" got|expected scalar type \S+ but found "
)
_PLAIN = {"float": "float32", "double": "float64"}


def _alike(text: str) -> str:
    text = re.sub(r"^[\w.:]+: ", "", text).partition(" Hint: ")[0].removesuffix(_ASIDE)
    text = _SPELLED.sub(lambda m: _DTYPES.get(m[1], m[1]), text)
    if _REFUSED.match(text):
        named = re.findall(r"\b(?:float|double|b?float\d+)\b", text)
        return " and ".join(sorted({_PLAIN.get(name, name) for name in named}))
    return text


def _texts(seen: Observation) -> set[str]:
    if seen.raised is None:
        return set()
    lines = [line.strip() for line in seen.raised.message.splitlines()]
    inner = {m[1] for line in lines if (m := re.fullmatch(r"(?:\w*Error: )+(.+)", line))}
    # dynamo quotes what a fake kernel raised: got RuntimeError('...')
    quoted = (re.search(r"\bgot \w*Error\((['\"])(.+)\1\)", line) for line in lines)
    inner |= {m[2] for m in quoted if m}
    if seen.raised.kind == "TracingCheckError":  # it says how graphs differ, or quotes an error
        after = lines.index("Exception:") + 1 if "Exception:" in lines else 1
        inner = inner or set(lines[after : after + 1])
    return inner or set(lines[:1])


class _Clock:
    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = self.laps.get(name, 0.0) + now - self._last
        self._last = now


@contextmanager
def quiet() -> Iterator[Mapping[str, int]]:
    """Silence the warnings of cases: deprecations of the ops themselves are not findings."""
    warn = getattr(torch._C._functorch, "_set_vmap_fallback_warning_enabled")  # noqa: B009
    warn(False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield {}
        finally:
            warn(True)
