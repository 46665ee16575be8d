"""Hold one case on one backend: expected and observed results, and their comparison."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar

import msgspec
import torch

from amp_fuzz.backends import Backend
from amp_fuzz.backends.base import kernels_of, mixes, shadows_of, unsupported
from amp_fuzz.backends.determinism import Spread
from amp_fuzz.backends.harness import Observation
from amp_fuzz.cases.case import Case, bare, single, unentered
from amp_fuzz.cases.program import returning_all
from amp_fuzz.oracle import gauge
from amp_fuzz.oracle.attribution import NONE, Own
from amp_fuzz.oracle.compare import Divergence, Judgement, compare, differ, nonfinite_differs, same
from amp_fuzz.oracle.errors import alike, raised
from amp_fuzz.oracle.explicit import Explicit, explicit
from amp_fuzz.oracle.raising import raising_call
from amp_fuzz.oracle.relations import within
from amp_fuzz.oracle.rounding import Rounding, Shadowed
from amp_fuzz.reference.shadow.band import Band

__all__ = ["Scope", "Skip", "Trial"]

Scope: TypeAlias = Callable[[], AbstractContextManager[object]]
Skip: TypeAlias = Callable[[str], bool]

_T = TypeVar("_T")
_P = ParamSpec("_P")


def _once(method: Callable[Concatenate[Trial, _P], _T]) -> Callable[Concatenate[Trial, _P], _T]:
    """Call a method of a trial once for all that the reference imitates, and its arguments."""

    @wraps(method)
    def kept(trial: Trial, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        key = method, trial.imitated, *args
        if key not in trial._results:
            trial._results[key] = method(trial, *args, **kwargs)
        found: _T = trial._results[key]
        return found

    return kept


@dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """One case on one backend.

    expected: what the reference did. observed: what the backend did. imitated: a key for the bugs
    that the reference imitates, or None. scope: the context in which it imitates them. choice: what
    the reference takes from the backend because it is free; see `gauge`. loose: whether bands are
    as wide as the backend's `Numerics` allow. own: how the backend differs without autocast too,
    which is no divergence here. ways: the context in which the reference casts as the backend
    documents, where that is not what torch documents. varied: the labels of values that differed as
    documented, so far; unjudged: those of them of which nothing can be said.

    `replace` keeps these, the backend's runs of each case, and what methods return `_once`.
    """

    case: Case
    backend: Backend
    expected: Observation
    observed: Observation
    imitated: Hashable = None
    scope: Scope = nullcontext
    choice: tuple[gauge.Pair, ...] = ()
    loose: bool = False
    own: Own = NONE
    ways: Scope = nullcontext
    varied: set[str] = field(default_factory=set)
    unjudged: set[str] = field(default_factory=set)
    _runs: dict[str, Observation] = field(default_factory=dict, repr=False)
    _results: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, case: Case, backend: Backend, scope: Scope = nullcontext) -> Trial:
        """Run a case on both sides."""
        with scope():
            expected = backend.reference().run(case)
        return cls(case, backend, expected, backend.run([case])[0], scope=scope)

    # -- running ----------------------------------------------------------------------------------

    def refer(self, case: Case) -> Observation:
        """Run a case under the reference with this trial's imitation."""
        with self.within_scope():
            return self.backend.reference().run(case)

    def documented(self) -> Mapping[str, torch.Tensor | None]:
        """Return the values of the case under the reference that imitates nothing."""
        return self._plain()._values()

    @_once
    def _values(self) -> Mapping[str, torch.Tensor | None]:
        return self.refer(self.case).values

    def _plain(self) -> Trial:
        return replace(self, imitated=None, scope=nullcontext, ways=nullcontext)

    def within_scope(self) -> AbstractContextManager[object]:
        """Return the context that the reference runs in."""
        return _scope(self.scope, self.choice, self.ways)

    def settled(self) -> Trial:
        """Return the trial that allows the backend what its documentation, or torch's, allows.

        Only where the two sides differ: its own policies, its own choice of what a decomposition
        leaves free, and the wider bands of its `Numerics`.
        """
        backend, case = self.backend, self.case
        ways = backend.reference().ways(case)
        if ways is not None and self.ways is nullcontext and self.compare() is not None:
            made = self._fresh(ways=ways)
            return replace(made, expected=made.refer(case)).settled()
        if not backend.values or (backend.exact and self.varied_judge() is None):
            return self
        if self.compare() is None:
            return self
        loose = backend.reference().arithmetic().loose
        if not gauge.decomposes(case.program):
            return self._fresh(loose=loose) if loose else self
        values = self.observed.values
        if (whole := returning_all(case.program)) != case.program:  # it may not return them
            values = self.run_once(msgspec.structs.replace(case, program=whole)).values
        made = self._fresh(choice=gauge.pairs(case.program, values), loose=loose)
        return replace(made, expected=made.refer(case))

    def _fresh(self, **changes: Any) -> Trial:
        """Return another trial, which keeps of this one only the backend's runs."""
        return replace(self, varied=set(), unjudged=set(), _results={}, **changes)

    def run(self, case: Case) -> Observation:
        """Run a case on the backend."""
        return self.backend.run([case])[0]

    def run_once(self, case: Case) -> Observation:
        """Run a case on the backend, or return its earlier result in this trial."""
        if case.id not in self._runs:
            self._runs[case.id] = self.run(case)
        return self._runs[case.id]

    def again(self) -> Trial:
        """Run both sides again, and everything else with them."""
        again = self._fresh(observed=self.run(self.case), _runs={})
        return replace(again, expected=again.refer(self.case))

    def under(self, imitated: Hashable, scope: Scope) -> Trial:
        """Return the trial in which the reference imitates bugs."""
        made = replace(self, imitated=imitated, scope=scope)
        return replace(made, expected=made.refer(self.case))

    @_once
    def bare(self) -> Trial:
        """Return the trial of the case without autocast.

        A case that only runs under autocast, because its operands have two dtypes, runs in float32.
        Of several calls the first alone is of a custom op or function, so that there is no explicit
        program: then it stays one.
        """
        without = unentered if self.case.plan.calls > 1 else bare
        plain, alone = without(self.case), replace(self, ways=nullcontext)  # no casts, no pass
        expected = alone.refer(plain)
        if expected.raised and raised(expected) != raised(self.refer(self.case)):
            plain = single(plain)
            expected = alone.refer(plain)
        return self.beside(plain, expected)

    @_once
    def explicit(self, changing: frozenset[str] = frozenset()) -> Explicit | None:
        """Return the explicit program of the case, if it has one that the backend can express.

        It returns what the case does: gradients depend on what is returned. changing: names of
        values that change from run to run.
        """
        found = explicit(self, changing)
        if found is None or unsupported(found.case, self.backend):
            return None
        case = self.backend.fit(found.case).with_program(outputs=self.case.program.outputs)
        return found if case == found.case else replace(found, case=case, expected=self.refer(case))

    def raising(self) -> Case | None:
        """Return the call that raises under the reference, as a case of its own."""
        with self.within_scope():
            return raising_call(self.case, self.backend.reference())

    def beside(self, case: Case, expected: Observation) -> Trial:
        """Return the trial of another case that computes the same; the backend runs it once."""
        sides = expected, self.run_once(case)
        made = Trial(case, self.backend, *sides, self.imitated, self.scope, _runs=self._runs)
        return made.settled()

    # -- comparing --------------------------------------------------------------------------------

    def compare(
        self, *, skip: Skip = lambda label: False, unjudged: set[str] | None = None
    ) -> Divergence | None:
        """Return the first divergence of the two sides.

        skip: labels to leave out. unjudged: collects the labels of values that nothing could judge.
        """
        rounding = None if self.backend.exact else self._judgement(unjudged)
        own = self.own
        sides = own.expected(self.expected, self.observed), own.observed(self.observed)
        left_out = (lambda at: at in own.labels or skip(at)) if own.labels else skip
        return self._compared(*sides, rounding, left_out, unjudged)

    def _compared(
        self,
        first: Observation,
        second: Observation,
        rounding: Judgement | None = None,
        skip: Skip = lambda label: False,
        unjudged: set[str] | None = None,
    ) -> Divergence | None:
        varied, values = self.varied_judge(rounding, unjudged), self.backend.values
        how: dict[str, Any] = {"rounding": rounding, "varied": varied, "skip": skip}
        return compare(first, second, values=values, devices=mixes(self.backend), **how)

    def within(self) -> Divergence | None:
        """Check the relations inside the observation; bits only if the backend repeats them."""
        return self.holds_within(self.observed)

    def holds_within(self, seen: Observation) -> Divergence | None:
        """Check the relations that must hold inside any observation of the case.

        A value that the backend computes otherwise without autocast too keeps none.
        """
        values = self.backend.values and self.backend.repeats
        judge = partial(self.related, self.case, self.case)
        return within(self.case, seen, values=values, judge=judge, skip=self.own.labels)

    def related(self, first: Case, second: Case, at: str = "") -> Judgement:
        """Return what judges values of two variants that a relation says are equal.

        They may differ where those of the reference do, as documented: by the order of a sum, or by
        how long a cast lives. Then each must be the reference's own, bit for bit, on an exact
        backend, and rounding must explain the difference. So an error that the reference shares,
        since it runs the same kernels, is still found.

        at: the first value's label, by default that of the second.
        """
        sides = [self._plain()._fresh(case=one, _runs={}) for one in (first, second)]

        def judge(label: str, want: torch.Tensor, got: torch.Tensor) -> Divergence | None:
            labels = at or label, label
            a, b = (s.documented().get(n) for s, n in zip(sides, labels, strict=True))
            if a is None or b is None or not _alike(a, b) or same(a, b):
                return differ(label, want, got)
            if self.backend.exact and not (_same(a, want) and _same(b, got)):
                return differ(label, want, got)
            bands = [s.rounding() for s in sides]
            ways = list(zip(bands, labels, (a, b), (b, a), strict=True))
            far = [band(name, mine, other) for band, name, mine, other in ways]
            judged = [f for f, way in zip(far, ways, strict=True) if way[1] not in way[0].unjudged]
            if not judged:
                self.unjudged.add(label)
            return differ(label, want, got) if judged and all(judged) else None

        mine = self if first == self.case else replace(self, case=first, _runs={}, _results={})
        return mine.varied_judge(judge) or judge

    def changed(self, skip: Skip = lambda label: False) -> Divergence | None:
        """Run both sides again and return what changed. If results are exact, run each three times.

        The order of the calls matters: a result may change at every other call.
        """
        reference: tuple[Observation, Callable[[Case], Observation]] = self.expected, self.refer
        backend = self.observed, self.run
        turns = [reference, backend]
        if self.backend.exact:
            turns = [reference, backend, backend, reference, reference, backend]
        for first, side in turns:
            found = self._compared(first, side(self.case), skip=skip)
            if found is not None:
                return found
        return None

    def steady(self) -> bool:
        """Return whether a backend repeats its result, if it is exact; others need not."""
        if not self.backend.exact:
            return True
        again = self.run(self.case)
        return self._compared(self.observed, again) is None

    def raises_another(self) -> bool:
        """Return whether both sides raise different errors; exact ones may differ in wording."""
        both = self.expected.raised is not None and self.observed.raised is not None
        return both and not self.backend.exact and not alike(self.expected, self.observed)

    # -- kernels that vary ------------------------------------------------------------------------

    @_once
    def varying(self) -> Mapping[str, Spread]:
        """Return the labels of values that depend on kernels documented as nondeterministic."""
        with self.within_scope():
            found = self.backend.reference().traced(self.case, kernels_of(self.backend))
        # If a run raises under a mode alone, nothing is known of the labels after that.
        lost = self.expected.values.keys() - found.noted
        lost = {label for label in lost if self.expected.values[label] is not None}
        return {**dict.fromkeys(lost, "any"), **found.spread}

    def varied_judge(
        self, otherwise: Judgement | None = None, unjudged: set[str] | None = None
    ) -> Judgement | None:
        """Return what judges values that such kernels may have changed; None if none can.

        otherwise: judges the other values, by default bit for bit. unjudged: collects their labels
        where nothing can be said, by default `unjudged` of this trial.
        """
        lost = self.unjudged if unjudged is None else unjudged
        if self.case.plan.deterministic or not self.backend.values or not kernels_of(self.backend):
            return None

        def judge(label: str, want: torch.Tensor, got: torch.Tensor) -> Divergence | None:
            spread = self.varying().get(label)
            if spread is None:
                return (otherwise or differ)(label, want, got)
            self.varied.add(label)
            # Shadows are CPU tensors taken for the device's: of two devices they know nothing.
            if spread == "any" or self.case.program.mixed:
                lost.add(label)
                return None
            found = self._judgement(lost)(label, want, got)
            if found is not None and found.kind == "range":
                lost.add(label)  # where one order of a sum leaves it, another need not
                return None
            return found

        return judge

    # -- rounding ---------------------------------------------------------------------------------

    def shadowed(self, **how: Any) -> Shadowed:
        """Return what runs the case with shadows; see `ReferenceRuntime.shadowed`.

        It is not bound to the trial, which keeps it: it would keep itself alive.
        """
        scope = partial(_scope, self.scope, self.choice, self.ways)
        how |= {"loose": True} if self.loose else {}
        return partial(_shadowed, self.case, self.backend, scope, **how)

    @_once
    def rounding(self) -> Rounding:
        """Return the oracle of rounding under this trial's imitation."""
        reference = self.backend.reference()
        kernels_of_torch = not reference.arithmetic().reorders
        if reference.promise == "all" and kernels_of_torch:
            each = self.shadowed(promise="all")
            if self.imitated is not None:
                each = partial(_some, each, self._unchanged())
            return Rounding(self.shadowed(), promised=each)
        with self.within_scope():
            written = shadows_of(self.backend).casts(self.case)
        promised = self.shadowed(promise="written") if written else None
        return Rounding(self.shadowed(), promised=promised)

    def _unchanged(self) -> frozenset[str]:
        """Return the labels of values that are not others by what the reference imitates.

        An imitation has the casts of a bug. It need not add gradients in the backend's order.
        """
        right = self.documented()
        pairs = ((label, value, right.get(label)) for label, value in self.expected.values.items())
        return frozenset(
            label for label, a, b in pairs if a is not None and b is not None and _same(a, b)
        )

    def near(self, label: str, one: torch.Tensor, other: torch.Tensor) -> bool:
        """Return whether rounding explains how two values of a label differ from each other."""
        return not nonfinite_differs(one, other) and self.rounding().near(label, one, other)

    def farthest(self) -> tuple[float, str]:
        """Return the largest excess that was measured so far, and its label; -1 and "" if none."""
        far = self.rounding().far
        label = max(far, key=far.__getitem__, default="")
        return far.get(label, -1.0), label

    def _judgement(self, unjudged: set[str] | None) -> Judgement:
        with self.within_scope():
            follows = self.backend.reference().follows()
        if not follows:
            return self._either
        return replace(self.rounding(), unjudged=set() if unjudged is None else unjudged)

    def _either(self, label: str, want: torch.Tensor, got: torch.Tensor) -> Divergence | None:
        """Return a divergence from an imitation that shadows cannot follow, bit for bit.

        There is none if the bug has no effect: if rounding explains both values under the reference
        without it. A sum in another order is no fault.
        """
        right = self.documented().get(label)
        if right is None or not _alike(right, got):
            return differ(label, want, got)
        rounding = replace(self._plain().rounding(), unjudged=set())
        values = [value for value in (want, got) if not same(right, value)]
        far = any(rounding(label, right, value) is not None for value in values)
        return differ(label, want, got) if far or rounding.unjudged else None


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.dtype, a.shape) == (b.dtype, b.shape)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return _alike(a, b) and same(a, b)


@contextmanager
def _scope(scope: Scope, choice: tuple[gauge.Pair, ...], ways: Scope) -> Iterator[None]:
    with ways(), scope(), gauge.taking(choice) if choice else nullcontext():
        yield


def _some(
    shadowed: Shadowed, labels: frozenset[str], *args: Any
) -> tuple[Observation, dict[str, Band]]:
    seen, bands = shadowed(*args)
    return seen, {label: band for label, band in bands.items() if label in labels}


def _shadowed(
    case: Case, backend: Backend, scope: Scope, *args: Any, **how: Any
) -> tuple[Observation, dict[str, Band]]:
    with scope():
        return shadows_of(backend).shadowed(case, *args, **how)
