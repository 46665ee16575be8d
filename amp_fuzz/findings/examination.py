"""Find the causes of a diverging case, and minimise each cause once.

Each statement of a diverging case runs alone, so a known cause does not hide another one in the
same case. If an op behaves as if it had another policy, the reference can assume that policy.
Everything that this explains belongs to that cause, whatever it looks like.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import Literal

import msgspec

from amp_fuzz.backends.base import Explains
from amp_fuzz.backends.harness import Observation
from amp_fuzz.cases.case import Case, Plan, bare
from amp_fuzz.cases.program import statements
from amp_fuzz.findings.explicit_form import explicit_form
from amp_fuzz.findings.groups import PLAN, Groups
from amp_fuzz.findings.guilty import alone
from amp_fuzz.findings.looks import look_of, signature_of, traits_of
from amp_fuzz.findings.minimize import Smaller, capture
from amp_fuzz.findings.minimize.target import (
    Answer,
    Memory,
    Shrunk,
    Target,
    answer_of,
    asker,
    confirmed,
    paired,
    part_of,
    shrink,
    stage_of,
    working,
)
from amp_fuzz.findings.wrong_context import acts, like, saying, unrestored
from amp_fuzz.findings.wrong_policy import POLICIES, caused, policies_of, supposes
from amp_fuzz.findings.wrong_rule import ABOUT, RULES
from amp_fuzz.oracle import Divergence
from amp_fuzz.oracle.attribution import NONE, Own
from amp_fuzz.oracle.errors import refuses
from amp_fuzz.oracle.judge import Explain, Judge
from amp_fuzz.oracle.labels import Named, tainted
from amp_fuzz.oracle.verdict import Verdict
from amp_fuzz.records.baseline import Entry, match
from amp_fuzz.records.fingerprint import UNSTEADY, fingerprinted, special
from amp_fuzz.records.schema import OWN, DivergenceRecord, listed
from amp_fuzz.reference import Supposed
from amp_fuzz.upstream.explain import judge_of
from amp_fuzz.upstream.own import looks_like
from amp_fuzz.upstream.supposed import agrees_with

__all__ = ["Met", "Step", "examine"]


@dataclass(frozen=True, slots=True)
class Met:
    """A case shows this cause. entry: the entry that accepts it, `OWN`, or ""."""

    fingerprint: str
    entry: str = ""


@dataclass(frozen=True, slots=True)
class Step:
    """The record of a divergence: the smallest so far, or the final one.

    last: whether it is final, and the first of its cause.
    """

    record: DivergenceRecord
    last: bool = False


def examine(
    judge: Judge,
    verdict: Verdict,
    groups: Groups,
    baseline: tuple[Entry, ...] = (),
    *,
    family: str = "",
    seconds: float = 20.0,
    seen: Callable[[Case], None] = lambda case: None,
) -> Iterator[Step | Met]:
    """Yield the causes of a diverging case, and the records of the new ones.

    seconds: for minimising each; 0 does not minimise. seen: called with each case before it runs.
    """
    work = _Examination(judge, verdict, groups, baseline, family, seconds, seen)
    if verdict.known == OWN:
        yield from work.own()
        return
    if verdict.known:
        yield from work.listed()
        return
    yield Step(fingerprinted(verdict.finding(family)))
    for part in work.parts():
        yield from work.part(part)
        yield from work.joined()


_OWN = 5.0  # seconds to minimise what autocast has no part in


# The warning of shadows that cannot follow.
_NO_SHADOW = ("the shadows did not come", "the band of")


@dataclass(frozen=True, slots=True)
class _Examination:
    judge: Judge
    verdict: Verdict
    groups: Groups
    baseline: tuple[Entry, ...]
    family: str
    seconds: float
    seen: Callable[[Case], None]

    @property
    def quick(self) -> bool:
        """Whether running a statement is cheap: not on a compiler, which has a ladder."""
        return self.seconds > 0 and not self.judge.backend.ladder()

    def listed(self) -> Iterator[Step]:
        """Keep one example of a listed divergence; it need not be the smallest."""
        rough = self.verdict.finding(self.family)
        signature = signature_of(rough)
        if signature not in self.groups.signatures:
            self.groups.signatures.add(signature)
            yield from self.minimised(self.verdict, min(self.seconds, 2.0))

    def own(self) -> Iterator[Step | Met]:
        """Yield the cause of what the backend does without autocast too, minimised once."""
        looks, look = self.groups.looks, signature_of(self.verdict.finding(self.family))
        if look not in looks:
            record = fingerprinted(self.verdict.finding(self.family))
            try:
                for step in self.minimised(self.verdict, min(self.seconds, _OWN)):
                    record = self.named(step.record)
                    yield replace(step, record=record)
            except KeyboardInterrupt:
                yield Step(record, last=True)
                raise
            looks[look] = (record.fingerprint,)
        accepted = {entry.fingerprint: entry.id for entry in self.baseline}
        for cause in looks[look]:
            yield Met(cause, accepted.get(cause, OWN))

    def named(self, record: DivergenceRecord) -> DivergenceRecord:
        """Return a record with the bug of a backend that it looks like."""
        like = looks_like(record.backend, record.kind, record.op)
        return msgspec.structs.replace(record, like=like)

    # -- which statements -------------------------------------------------------------------------

    def parts(self) -> Iterator[Verdict]:
        """Yield a verdict for each statement that diverges alone, and for the whole if needed."""
        found = self.verdict.divergence
        assert found is not None
        case = self.verdict.case
        body = list(statements(case.program.body))
        if not self.quick or found.kind in (*UNSTEADY, "state") or len(body) < 2:
            yield self.plainer(self.verdict)
            return
        covered: set[str] = set()
        some = False
        values = capture(case, self.judge.backend.reference())
        for number, statement in enumerate(body):
            small = alone(case, (number,), values)
            if small is None or (part := self.judged(small)) is None:
                continue
            for name in statement.outputs:
                covered |= tainted(case, name)
            if not part.known:
                some = True
                yield self.plainer(part)
        if not (some and Named(covered)(_label(found))):
            yield self.plainer(self.verdict)

    def judged(self, case: Case) -> Verdict | None:
        """Return the verdict of a case that diverges, or None."""
        backend = self.judge.backend
        if backend.fit(case) != case or case.id in self.groups.deadly:
            return None
        self.seen(case)
        related = self.verdict.divergence is not None and self.verdict.divergence.kind == "relation"
        judge = replace(self.judge, relations="all" if related else "none")
        try:
            verdict = judge.judge(case)
        except (RuntimeError, ValueError) as error:  # the case was not drawn
            if not any(words in str(error) for words in _NO_SHADOW):
                raise
            return None
        return verdict if verdict.divergence is not None else None

    def plainer(self, verdict: Verdict) -> Verdict:
        """Return the verdict under a plainer plan, if that shows the same."""
        if not self.quick or verdict.divergence is None or verdict.divergence.kind in UNSTEADY:
            return verdict
        case, target = verdict.case, Target.of(verdict)
        contexts = case.plan.contexts
        for plan in (
            Plan(contexts=(), backward="none"),
            Plan(contexts=contexts, backward="none"),
            Plan(contexts=()),
            Plan(contexts=contexts),
        ):
            if plan == case.plan:
                break
            found = self.judged(msgspec.structs.replace(case, plan=plan))
            if found is not None and target.reply(answer_of(found)) == "same":
                return found
        return verdict

    # -- its cause --------------------------------------------------------------------------------

    def part(self, part: Verdict) -> Iterator[Step | Met]:
        """Yield the cause of a divergence."""
        groups, look, traits = self.groups, look_of(part, quick=self.quick), traits_of(part)
        if known := groups.counted(look, traits):
            yield from map(self.met, known)
            return
        if explained := self.explained(part):
            groups.looks[look] = explained
            yield from map(self.met, explained)
            return
        record = fingerprinted(part.finding(self.family))
        try:
            for step in self.minimised(part, self.limit(part)):
                record = step.record
                if not step.last:
                    yield step
        except KeyboardInterrupt:
            yield Step(record, last=True)
            raise
        groups.looks[look] = (record.fingerprint,)
        groups.traits[traits] = (*groups.traits.get(traits, ()), record.fingerprint)
        entry = match(self.baseline, record)
        known_as = entry.id if entry else ""
        if groups.take(record, known_as):
            yield Step(msgspec.structs.replace(record, known=known_as), last=True)
        yield self.met(record.fingerprint)

    def limit(self, part: Verdict) -> float:
        """Return the seconds for minimising: fewer after many of this kind and op."""
        rough = signature_of(part.finding(self.family))
        self.groups.minimised[rough] += 1
        return self.seconds if self.groups.minimised[rough] <= 4 else min(self.seconds, 5.0)

    def met(self, cause: str) -> Met:
        return Met(cause, self.groups.known.get(cause, ""))

    def explained(self, part: Verdict) -> tuple[str, ...]:
        """Return the fingerprints of wrong policies, one or several, that explain it."""
        groups = self.groups
        if not (self.quick or (self.seconds > 0 and groups.as_if)):
            return ()
        if cause := self.of_contexts(part):
            return (cause,)
        if not supposes(part):
            return ()
        observed = self.judge.backend.run([part.case])[0]
        for overload in policies_of(part):
            key = part.backend, overload
            names, cause = groups.as_if.get(key, ((), ""))
            if fits := self.fitting(part.case, observed, overload, names, part.own):
                groups.as_if[key] = fits, cause
                return (cause,)
        return self.together(part, observed)

    def fitting(
        self,
        case: Case,
        observed: Observation,
        overload: str,
        names: tuple[str, ...],
        own: Own = NONE,
    ) -> tuple[str, ...]:
        """Return those of a kernel's policies under which the reference does what torch did.

        If none does, return those under which known bugs explain the rest.
        """

        def agree(explain: Explain | None) -> tuple[str, ...]:
            backend = self.judge.backend
            return tuple(
                name
                for name in names
                if agrees_with(backend, case, observed, {overload: POLICIES[name]}, explain, own)
            )

        return agree(None) or agree(self.judge.explain)

    def joined(self) -> Iterator[Step]:
        """Yield loose findings that a policy explains, which a case has shown since: one group.

        Only the finding's own case is asked. It may have a plan or a known bug that hides a policy,
        so that it does not name one itself.
        """
        groups, backend = self.groups, self.judge.backend
        for (on, about), (names, cause) in tuple(groups.as_if.items()):
            for loose, record in tuple(groups.loose.items()):
                if (cause, loose) in groups.asked or not self.quick:
                    continue
                groups.asked.add((cause, loose))
                case = record.minimised or record.case
                verdict = None
                if on == record.backend == backend.name and not about.startswith(PLAN):
                    verdict = self.judged(case)
                if verdict is None or not supposes(verdict) or about not in policies_of(verdict):
                    continue
                if fits := self.fitting(case, backend.run([case])[0], about, names):
                    groups.as_if[on, about] = fits, cause
                    groups.join(loose, cause)
                    policy = policies_of(verdict)[about] or "none"
                    said = {"as_if": fits, "overload": about, "policy": policy, "general": False}
                    now = fingerprinted(msgspec.structs.replace(record, **said, joins=loose))
                    yield Step(now, last=True)

    def together(self, part: Verdict, observed: Observation) -> tuple[str, ...]:
        """Return the fingerprints of the policies and contexts that explain it together.

        All that were met are assumed, not only those of kernels that the reference reaches: if an
        op has no policy, the ops that it calls are cast too. Then those that are not needed are
        left out, one after another.
        """
        offered: dict[str, list[tuple[str, str]]] = {}
        for (on, about), (names, cause) in self.groups.as_if.items():
            if on != part.backend or (names[0] == "banned" and not refuses(observed)):
                continue
            if not about.startswith(PLAN):
                offered[about] = [(names[0], cause)]
            elif _acting(about, part.case):
                others = names if names[0] in RULES else like(part.case, names[0])
                offered[about] = [(name, cause) for name in others]
        if len(offered) < 2:
            return ()
        tried = (dict(zip(offered, names, strict=True)) for names in product(*offered.values()))
        chosen = next((c for c in tried if self.agrees(part, observed, c)), {})
        for about in tuple(chosen):
            fewer = {key: value for key, value in chosen.items() if key != about}
            if self.agrees(part, observed, fewer):
                chosen = fewer
        return tuple(cause for _, cause in chosen.values())

    def agrees(
        self, part: Verdict, observed: Observation, chosen: dict[str, tuple[str, str]]
    ) -> bool:
        """Return whether the reference, with these policies and contexts, does what torch did."""
        case, policies = part.case, dict[str, Supposed]()
        for about, (name, _) in chosen.items():
            if about.startswith(PLAN):
                case = saying(case, name)
            else:
                policies[about] = POLICIES[name]
        return agrees_with(self.judge.backend, case, observed, policies, own=part.own)

    def of_contexts(self, part: Verdict) -> str:
        """Return the fingerprint of faulty contexts that were met before, or ""."""
        groups, backend, found = self.groups, part.backend, part.divergence
        if found is None or found.kind in (*UNSTEADY, "relation"):
            return ""
        if any(on == backend for on, _ in groups.left):
            said = "+".join(f"leaves={name}" for name in unrestored(self.judge, part.case))
            if cause := groups.left.get((backend, said)):
                return cause
        for (on, about), (names, cause) in tuple(groups.as_if.items()):
            if found.kind != "state" and on == backend and _acting(about, part.case):
                observed = self.judge.backend.run([part.case])[0]
                rule = names[0] in RULES
                # The value that a context acts as may depend on those around it; the setting does
                # not.
                others = names if rule else like(part.case, names[0])
                fits = (n for n in others if acts(self.judge, part.case, observed, n, part.own))
                if left := tuple(fits) if rule else tuple(islice(fits, 1)):
                    if rule:  # each case leaves fewer rules that explain all
                        groups.as_if[on, about] = left, cause
                    return cause
        return ""

    def minimised(self, part: Verdict, seconds: float) -> Iterator[Step]:
        """Yield ever smaller records of a divergence; the last one names its cause."""
        judge, found = self.judge, part.divergence
        assert found is not None
        rough = fingerprinted(_of(part.finding(self.family), self.verdict.case))
        yield Step(rough)
        stage, record, last = "", rough, part
        if found.kind not in UNSTEADY:
            stage = stage_of(judge, part, self.seen)
            if seconds > 0:
                for smaller, again in self.smaller(part, rough, stage, seconds):
                    record, last = smaller, again
                    yield Step(fingerprinted(record))
        small = record.minimised or part.case
        record = msgspec.structs.replace(
            record,
            minimised=small,
            explicit=_explicit(judge, small),
            stage=stage,
            bare=found.kind not in UNSTEADY and self.without_autocast(last),
        )
        if not part.known and seconds > 0:
            record = caused(judge, record, part, last, self.seen, self.groups.deadly)
        yield Step(fingerprinted(record), last=True)

    def smaller(
        self, part: Verdict, rough: DivergenceRecord, stage: str, seconds: float
    ) -> Iterator[tuple[DivergenceRecord, Verdict]]:
        """Yield the record of a divergence with ever smaller cases; the last one is confirmed.

        Each comes with the last confirmed verdict.
        """
        judge = self.judge
        target = replace(Target.of(part), stage=stage)
        ask, reference = asker(judge, target), judge.backend.reference()
        deadly = {case_id: Answer("crash") for case_id in self.groups.deadly}
        memory = Memory(deadly, trying=self.seen)
        for event in shrink(
            *(part.case, target, ask, reference),
            seconds=seconds,
            pairs=paired(judge.backend, part.case),
            memory=memory,
            clock=working(),
        ):
            if isinstance(event, Smaller):
                yield msgspec.structs.replace(rough, minimised=event.case), part
            elif isinstance(event, Shrunk):
                steps = len(event.chain) - 1
                last = confirmed(judge, target, event.chain) if steps else part
                if last is None:  # it did not recur: keep what was found
                    yield rough, part
                    continue
                op = event.op if last.case == event.case else ""
                record = last.finding(self.family, last.case, op=op)
                blamed = "" if listed(part.known) else part_of(judge, last, stage, self.seen)
                yield (
                    msgspec.structs.replace(
                        _of(record, self.verdict.case), nearest=event.nearest, part=blamed
                    ),
                    last,
                )

    def without_autocast(self, verdict: Verdict) -> bool:
        """Return whether a case diverges in the same way without its autocast contexts."""
        assert verdict.divergence is not None
        plain = bare(verdict.case)
        if plain.id in self.groups.deadly:
            return False
        self.seen(plain)
        relations: Literal["one", "all"] = "all" if verdict.divergence.kind == "relation" else "one"
        found = judge_of(self.judge.backend, (), relations).judge(plain).divergence
        return found is not None and found.kind == verdict.divergence.kind


def _acting(about: str, case: Case) -> bool:
    """Return whether the cause is a rule, or a context entered the same way as in this case."""
    plan = about.removeprefix(PLAN)
    if plan in ABOUT:
        return True
    return plan != about and bool(case.plan.contexts) and special(case) >= set(plan.split("+"))


def _label(found: Divergence) -> str:
    """Return the label at which a divergence shows; for an error, the value being computed."""
    where = found.where
    if found.kind == "raise" and " = " in where:
        where = where.partition(" = ")[0].partition(",")[0].strip()
    return where.rpartition(": ")[2]


def _of(record: DivergenceRecord, case: Case) -> DivergenceRecord:
    """Return the record of a part with the case in which it was met."""
    if record.case == case:
        return record
    return msgspec.structs.replace(record, case=case, minimised=record.minimised or record.case)


def _explicit(judge: Judge, case: Case) -> str:
    try:
        text = explicit_form(case, judge.backend.reference())
        theirs = judge.backend.explicit(case) if isinstance(judge.backend, Explains) else ""
        return f"{text}\n{theirs}" if theirs else text
    except Exception as error:  # the explicit form is optional; it must not cost the finding
        return f"# no explicit form: {type(error).__name__}: {error}"
