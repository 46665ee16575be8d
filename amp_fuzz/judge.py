"""Run one case on a backend and under the reference, and say how they compare.

This is what a run, a replay, the minimiser and the pytest plugin all share.
"""

from __future__ import annotations

import re
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal

from amp_fuzz.backends import Backend, BackendError
from amp_fuzz.case import Case, bare
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
from amp_fuzz.program import Statement, statements, uses
from amp_fuzz.records import CaseRecord, DivergenceRecord, KernelRecord, Outcome
from amp_fuzz.reference import KernelCall, quirks

__all__ = ["Judge", "Verdict", "unsupported"]


@dataclass(slots=True)
class Verdict:
    """How a case came out on a backend. unjudged: values that differ, but nothing is said of."""

    case: Case
    backend: str
    outcome: Outcome
    divergence: Divergence | None = None
    known: str = ""
    kernels: Sequence[KernelCall] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    unjudged: int = 0

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
        )

    def finding(self, family: str, minimised: Case | None = None) -> DivergenceRecord:
        """Return the record of the divergence."""
        assert self.divergence is not None
        d = self.divergence
        op = guilty_op(minimised or self.case, d)
        kernel = _kernel_of(op, self.kernels)
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
        )


def unsupported(case: Case, backend: Backend) -> Statement | None:
    """Return the first call that a backend cannot say, or None."""
    calls = statements(case.program.body)
    return next((s for s in calls if not backend.supports(s.op, s.form)), None)


def guilty_op(case: Case, divergence: Divergence) -> str:
    """Return the op of the statement where a divergence shows, or "" where none is named.

    A value names the statement that made it, an error the line that raised it. A gradient names the
    statement that uses the leaf, if there is only one.
    """
    made = {name: s.op for s in statements(case.program.body) for name in s.outputs}
    for name in {spec.name for spec in case.program.inputs}:
        users = [s.op for s in statements(case.program.body) if name in uses(s)]
        if len(users) == 1:
            made[f"{name}.grad"] = users[0]
    where = divergence.where
    if divergence.kind == "raise" and " = " in where:
        where = where.partition(" = ")[0].partition(",")[0].strip()
    *prefix, label = where.rpartition(": ")[2].split(".")
    if label == "grad" and prefix:
        label = f"{prefix[-1]}.grad"
    if label in made:
        return made[label]
    ops = {s.op for s in statements(case.program.body)}
    return ops.pop() if len(ops) == 1 else ""


def _key(kernel: KernelCall) -> tuple[str, str, str]:
    dtypes = ",".join(str(d).removeprefix("torch.") for d in kernel.dtypes)
    return kernel.overload, kernel.policy.value, dtypes


def _kernel_of(op: str, kernels: Sequence[KernelCall]) -> KernelCall | None:
    entry = CATALOGUE.get(op)
    wanted = {o.removeprefix("aten::") for o in entry.overloads} if entry else set()
    return next((k for k in kernels if k.overload in wanted), None)


@dataclass(frozen=True, slots=True)
class Judge:
    """Judges cases on one backend.

    relations: how many metamorphic relations each case is put to: ``none``, ``one`` (a different
    one from case to case) or ``all``. known: the entries that may explain a divergence.
    """

    backend: Backend
    known: Sequence[Known] = ()
    relations: Literal["none", "one", "all"] = "one"

    def judge(self, case: Case) -> Verdict:
        """Run a case and compare; a divergence is confirmed before it is reported.

        Raises `BackendError` for a program that the backend cannot say.
        """
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
        found = found or within(case, observed, values=backend.values)
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
        )
        if found is None:
            verdict.outcome = "raised" if observed.raised else "agreed"
            return verdict
        # Explained first: a known bug costs one run of the imitating reference, and what agrees bit
        # for bit needs no confirmation.
        verdict.divergence, verdict.known = found, self.explain(case, found, observed)
        if not verdict.known:
            found = self._confirm(case, found, expected, observed)
            verdict.divergence = found
            if found.kind == "nondeterminism":
                verdict.known = self._listed(case, found) or self._cleared(case, found)
        verdict.outcome = "known" if verdict.known else "diverged"
        clock.lap("confirm")
        return verdict

    def _run(self, case: Case) -> Observation:
        return self.backend.run([case])[0]

    def _compare(
        self,
        case: Case,
        expected: Observation,
        observed: Observation,
        unjudged: set[str] | None = None,
    ) -> Divergence | None:
        rounding: Judgement | None = None
        if not self.backend.exact:
            reference = self.backend.reference()
            rounding = differ
            if reference.follows():
                unjudged = set() if unjudged is None else unjudged
                rounding = Rounding(
                    lambda samples, seed: reference.shadowed(case, samples, seed), unjudged
                )
        return compare(expected, observed, values=self.backend.values, rounding=rounding)

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
        self, case: Case, found: Divergence, expected: Observation, observed: Observation
    ) -> Divergence:
        """Run both sides again: what does not stay as it was is nondeterminism, no other kind."""
        for _ in range(3 if self.backend.exact else 1):
            for first, side in ((expected, self.backend.reference().run), (observed, self._run)):
                changed = compare(first, side(case), values=self.backend.values)
                if changed is not None:
                    return replace(changed, kind="nondeterminism")
        if found.kind == "relation" and self._relate_all(case) is None:
            return replace(found, kind="nondeterminism")
        return found

    def _relate_all(self, case: Case) -> Divergence | None:
        observed = self._run(case)
        return within(case, observed) or replace(self, relations="all")._relate(case, observed)

    def explain(self, case: Case, found: Divergence, observed: Observation) -> str:
        """Return the ids of the known entries that explain a divergence, joined by +, or ""."""
        listed = self._listed(case, found)
        if listed:
            return listed
        quirky = [k for k in self.known if k.quirk and k.on(self.backend.name)]

        def explained(chosen: Sequence[Known]) -> bool:
            return self._agrees_with(case, found, observed, [k.quirk for k in chosen])

        for entry in quirky:
            if explained([entry]):
                return entry.id if self._sound(case, [entry]) else ""
        if len(quirky) < 2 or not explained(quirky):
            return ""
        for entry in tuple(quirky):  # several at once: those without which it is not explained
            fewer = [k for k in quirky if k is not entry]
            if explained(fewer):
                quirky = fewer
        return "+".join(k.id for k in quirky) if self._sound(case, quirky) else ""

    def _sound(self, case: Case, entries: Iterable[Known]) -> bool:
        """Return whether the case agrees without autocast, if an entry asks for that."""
        if not any(entry.bare for entry in entries):
            return True
        plain = bare(case)
        return self._compare(plain, self.backend.reference().run(plain), self._run(plain)) is None

    def _listed(self, case: Case, found: Divergence) -> str:
        """Return the id of the entry without a quirk that explains a divergence, or "".

        An error in a backward pass names no statement: its text has to do.
        """
        op = guilty_op(case, found)
        ops = [op] if op else {s.op for s in statements(case.program.body)}
        entries = (k for k in self._speaking(found, ops) if not k.without)
        return next((k.id for k in entries if op or k.says != ("*",)), "")

    def _cleared(self, case: Case, found: Divergence) -> str:
        """Return the id of the entry whose library makes the difference, or ""."""
        ops = {s.op for s in statements(case.program.body)}
        entries = [k for k in self._speaking(found, ops) if k.without]
        return next((k.id for k in entries if self._agrees_without(k.without, case)), "")

    def _speaking(self, found: Divergence, ops: Iterable[str]) -> Iterator[Known]:
        for entry in self.known:
            told = found.kind, ops, found.where, found.observed
            if entry.on(self.backend.name) and entry.explains(*told):
                yield entry

    def _agrees_without(self, library: str, case: Case) -> bool:
        with quiet(), WITHOUT[library]():  # switching warns of what this torch lacks
            expected = self.backend.reference().run(case)
            return all(
                self._compare(case, expected, side(case)) is None
                for side in (self._run, self.backend.reference().run, self._run)
            )

    def _agrees_with(
        self, case: Case, found: Divergence, observed: Observation, names: Sequence[str]
    ) -> bool:
        """Return whether the reference, imitating these bugs, agrees with what was observed.

        A relation is between two runs of the backend: it is explained if the imitating reference
        breaks it in the same way.
        """
        if found.kind == "relation" and self._broken_by_reference(case, found):
            return False  # with or without these bugs
        with quirks(names):
            if found.kind == "relation":
                return self._broken_by_reference(case, found)
            expected = self.backend.reference().run(case)
            if expected.raised and observed.raised and self._elsewise(expected, observed):
                return False
            return self._compare(case, expected, observed) is None

    def _elsewise(self, expected: Observation, observed: Observation) -> bool:
        """Return whether an inexact backend, which may raise otherwise, raises another error."""
        return not self.backend.exact and _complaints(expected).isdisjoint(_complaints(observed))

    def _broken_by_reference(self, case: Case, found: Divergence) -> bool:
        def run(variant: Case) -> Observation:
            return self.backend.reference().run(variant)

        name = found.where.partition(":")[0]
        relation = RELATIONS.get(name)
        if relation is None:
            broken = within(case, run(case), values=self.backend.values)
        else:
            broken = check_relation(relation, case, run, values=self.backend.values)
        return broken is not None and broken.where == found.where


def _complaints(seen: Observation) -> set[str]:
    """Return what was raised, without what wrapped it: ``SomeError: `` and a line stand inside."""
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


def _without_mkldnn() -> AbstractContextManager[None]:
    import torch

    flags: AbstractContextManager[None] = torch.backends.mkldnn.flags(enabled=False)
    return flags


WITHOUT: Mapping[str, Callable[[], AbstractContextManager[None]]] = {"mkldnn": _without_mkldnn}
"""How to run torch without a library that a known entry blames."""


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
    import torch

    warn = getattr(torch._C._functorch, "_set_vmap_fallback_warning_enabled")  # noqa: B009
    warn(False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield {}
        finally:
            warn(True)
