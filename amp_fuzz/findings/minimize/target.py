"""Minimise a finding: search for smaller cases that diverge in the same way.

On a compiler a candidate runs on the stage that has the bug, which costs less than the whole. Only
if it diverges there, the rung below must agree and the whole must show it too.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

import msgspec

from amp_fuzz.backends import Backend, facts_of, unsupported
from amp_fuzz.backends.base import Bisects, kernels_of, misplaced
from amp_fuzz.backends.reference import ReferenceRuntime
from amp_fuzz.cases.case import Case
from amp_fuzz.cases.program import returning_all, statements
from amp_fuzz.findings.guilty import guilty
from amp_fuzz.findings.minimize import Ended, Event, Reply, Smaller, Values, capture, count, search
from amp_fuzz.findings.minimize.documented_shapes import documented
from amp_fuzz.oracle import compare
from amp_fuzz.oracle.judge import Judge
from amp_fuzz.oracle.labels import guilty_op
from amp_fuzz.oracle.trial import Trial
from amp_fuzz.oracle.verdict import Verdict
from amp_fuzz.records.schema import listed

__all__ = [
    "PARTS",
    "Answer",
    "Asker",
    "Memory",
    "Part",
    "Shrunk",
    "Target",
    "answer_of",
    "asker",
    "confirmed",
    "paired",
    "part_of",
    "shrink",
    "working",
]

Part: TypeAlias = Literal["kind", "op", "stage", "where"]
PARTS: tuple[Part, ...] = ("kind", "op", "stage")
"""The parts of a divergence that must not change, by default."""


class Answer(msgspec.Struct, frozen=True):
    """The answer to a candidate.

    said: the outcome. ``raised``: both sides raise, or the reference does although the minimised
    case raises nothing. ``skipped``: it cannot be judged, or only a stage of a compiler shows it,
    not the whole. The other fields describe its divergence.
    wording: the stable words of its errors; see `wording`. below: whether the rung below diverges
    too.
    """

    said: Literal["diverged", "agreed", "raised", "invalid", "skipped", "crash", "timeout"]
    kind: str = ""
    where: str = ""
    op: str = ""
    errors: str = ""
    known: str = ""
    below: bool = False
    wording: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Target:
    """The divergence to keep. op: "" is any. stage: for a compiler, the first rung.

    wording: of its errors; () is any.
    """

    kind: str
    where: str = ""
    op: str = ""
    errors: str = ""
    known: str = ""
    parts: tuple[Part, ...] = PARTS
    stage: str = ""
    wording: tuple[str, ...] = ()

    @classmethod
    def of(cls, verdict: Verdict, parts: tuple[Part, ...] = PARTS) -> Target:
        """Return the divergence of a verdict."""
        said = answer_of(verdict)
        shown = said.kind, said.where, said.op, said.errors, said.known
        return cls(*shown, parts, wording=said.wording)

    def reply(self, answer: Answer) -> Reply:
        """Return whether an answer shows this divergence."""
        if answer.said == "agreed":
            return "agrees"
        if answer.said in ("crash", "timeout"):
            return "same" if self.kind == answer.said else "other"
        if answer.said != "diverged" or answer.known != self.known:
            return "other"
        if "kind" in self.parts and (answer.kind, answer.errors) != (self.kind, self.errors):
            return "other"
        if "kind" in self.parts and self.wording and answer.wording != self.wording:
            return "other"
        if "op" in self.parts and self.op and answer.op != self.op:
            return "other"
        if "stage" in self.parts and answer.below:
            return "other"
        if "where" in self.parts and answer.where != self.where:
            return "other"
        return "same"


@dataclass(slots=True)
class Asker:
    """Asks a judge about candidates.

    below: the rung below, which must not diverge. whole: the backend that found it, if `judge` has
    only a stage of it; it must diverge too, and is asked last. raises: whether the divergence is
    about errors; if not, a candidate that raises under the reference does not run.
    """

    judge: Judge
    below: Judge | None = None
    whole: Judge | None = None
    raises: bool = False

    def __call__(self, case: Case) -> Answer:
        """Judge one candidate."""
        backend = self.judge.backend
        if unsupported(case, backend) or misplaced(case, backend):
            return Answer("skipped")
        if backend.fit(case) != case:
            return Answer("invalid")
        if not documented(case, backend.reference()):  # its kernel would read past its inputs
            return Answer("invalid")
        # Compiling costs a thousand times as much as the reference.
        if not self.raises and not backend.exact and backend.reference().run(case).raised:
            return Answer("raised")
        try:
            verdict = self.judge.judge(case)
            answer = answer_of(verdict)
            if answer.said == "diverged" and not self.judge.confirm and not _steady(backend, case):
                return Answer("skipped")
            if answer.said == "diverged" and self.below is not None:
                under = self.below.judge(case).divergence
                answer = msgspec.structs.replace(
                    answer, below=under is not None and under.kind == answer.kind
                )
            if answer.said == "diverged" and not answer.below and self.whole is not None:
                found = self.whole.judge(case).divergence
                if found is None or found.kind != answer.kind:
                    return Answer("skipped")
        except RuntimeError as error:
            if "the shadows did not come" not in str(error):
                raise
            return Answer("skipped")
        return answer


def _steady(backend: Backend, case: Case) -> bool:
    """Return whether the reference repeats its result: not with uninitialised memory."""
    first, second = (backend.reference().run(case) for _ in range(2))
    if kernels_of(backend):
        return Trial(case, backend, first, second).compare() is None
    return compare(first, second, values=backend.values) is None


def answer_of(verdict: Verdict) -> Answer:
    """Return the answer of a verdict."""
    found = verdict.divergence
    if found is None:
        return Answer("raised" if verdict.outcome == "raised" else "agreed")
    ops = {s.op for s in statements(verdict.case.program.body)}
    op = next(iter(ops)) if len(ops) == 1 else guilty_op(verdict.case, found)
    errors, words = "", tuple[str, ...]()
    if found.kind == "raise":
        words = (*wording(found.expected), "->", *wording(found.observed))
        errors = f"{found.expected.partition(':')[0]} -> {found.observed.partition(':')[0]}"
    elif found.kind == "relation":
        errors = found.where.partition(":")[0]
    return Answer("diverged", found.kind, found.where, op, errors, verdict.known, wording=words)


_ASIDE = re.compile(r"\S*[/\\]\S*|'[^']*'|\"[^\"]*\"|\([^()]*\)|\[[^\[\]]*\]")
_COMPARED = re.compile(r"\b([A-Za-z]+) (\d+) ?(?:==|!=) ?(\d+)\b")
_TYPES = re.compile(
    r"torch|(?:un)?signed|complex|(?:CPU|CUDA)?(?:complex|b)?"
    r"(?:float|half|double|bool|byte|char|short|u?int|long)(?:tensor|type)?",
    re.I,
)
_WORDS, _CUT = 20, 280


def wording(error: str) -> tuple[str, ...]:
    """Return the words of an error that do not change in a smaller case, each once.

    Numbers, dtypes, plurals, paths, and text in quotes or brackets change. Whether two compared
    numbers are equal does not. Of a long text only the beginning counts.
    """
    text = _COMPARED.sub(lambda m: "" if m[2] == m[3] else f"{m[1]}UNEQUAL", _ASIDE.sub(" ", error))
    words = re.findall(r"\b[A-Za-z_]{3,}\b", text)
    if len(error) > _CUT:  # the last may be a part of one
        del words[-1:]
    words = [word.removesuffix("s") for word in words if not _TYPES.fullmatch(word)]
    return tuple(dict.fromkeys(words[:_WORDS]))


@dataclass(slots=True)
class Memory:
    """Answers by case, so nothing runs twice. trying, said: called before and after each run."""

    answers: dict[str, Answer] = field(default_factory=dict)
    trying: Callable[[Case], None] = lambda case: None
    said: Callable[[Case, Answer], None] = lambda case, answer: None

    def of(self, ask: Callable[[Case], Answer], case: Case) -> Answer:
        """Return the answer to a case; ask if it is new."""
        if case.id not in self.answers:
            self.trying(case)
            self.answers[case.id] = ask(case)
            self.said(case, self.answers[case.id])
        return self.answers[case.id]


@dataclass(frozen=True, slots=True)
class Shrunk:
    """The result of minimising.

    op: the guilty op. chain: the cases on the way, each smaller than the one before, the smallest
    last. nearest: a similar case that agrees with the reference. tried: candidates. reason: why it
    ended.
    """

    case: Case
    op: str
    chain: tuple[Case, ...]
    nearest: Case | None
    tried: int
    seconds: float
    reason: Literal["done", "time"]


def shrink(
    case: Case,
    target: Target,
    ask: Callable[[Case], Answer],
    runtime: ReferenceRuntime,
    *,
    seconds: float,
    pairs: bool = False,
    memory: Memory | None = None,
    blind: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Event | Shrunk]:
    """Make a divergence's case smaller; a `Shrunk` comes last.

    ask: answers candidates, as an `Asker` does. runtime: the reference. pairs: whether to begin
    with the guilty pair if no statement is guilty alone (otherwise another pair may remain); see
    `paired`. memory: earlier answers. blind: whether the reference must not run, because it dies of
    the case. clock: the clock of `seconds`; see `working`.
    """
    start = clock()
    memory = memory or Memory()
    asked: list[str] = []

    def values(case: Case) -> Values:
        return {} if blind else capture(case, runtime)

    def reply(case: Case) -> Reply:
        return target.reply(memory.of(ask, case))

    def shows(case: Case) -> bool:
        if clock() - start > seconds:
            return False
        asked.append(case.id)
        return reply(case) == "same"

    guess = target.op
    target = replace(target, op="")
    found = guilty(case, values(case), shows, guess=guess, pairs=pairs)
    two = len(found.numbers) > 1
    whole = msgspec.structs.replace(case, program=returning_all(case.program))
    returned = found.case is None and whole != case and shows(whole)
    if two and found.case is not None:  # a divergence names only one op
        guess = memory.of(ask, found.case).op
    elif returned:  # that of a program of last values is the first that it returned
        guess = memory.of(ask, whole).op or guess
    # A gradient names no op by itself.
    named = "" if target.kind.startswith("grad") else guess
    target = replace(target, op=named if two else found.op or named)
    chain = [case]
    if found.case is not None and found.case != case:
        chain.append(found.case)
        yield Smaller(found.case, "guilty", len(asked), clock() - start)
    if returned:
        chain.append(whole)  # any of its statements can remain
    literal = not runtime.runtime.fake  # otherwise tensors have no values
    left = seconds - (clock() - start)
    ended: Ended | None = None
    for event in search(
        *(chain[-1], reply),
        values=values,
        seconds=left,
        literal=literal,
        before=len(asked),
        clock=clock,
    ):
        if isinstance(event, Smaller):
            chain.append(event.case)
        if isinstance(event, Ended):
            ended = event
        yield event
    assert ended is not None
    op = "" if two else found.op
    if not op:  # of two, one may remain
        again = guilty(ended.case, values(ended.case), shows, guess=target.op)
        op = again.op or target.op
    spent = clock() - start
    yield Shrunk(ended.case, op, tuple(chain), ended.nearest, ended.tried, spent, ended.reason)


def paired(backend: Backend, case: Case) -> bool:
    """Return whether to try pairs of statements if none is guilty alone.

    On a compiler each pair costs a compilation, so only if there are few.
    """
    return not facts_of(backend).compiles or count(case.program) < 4


_STARVED = 4


def working() -> Callable[[], float]:
    """Return a clock of the CPU seconds of this process and its children.

    The result of a search must not depend on other load of the machine. The clock runs at no less
    than a quarter of wall-clock speed.
    """
    wall, work = time.monotonic(), sum(os.times()[:4])
    return lambda: max(sum(os.times()[:4]) - work, (time.monotonic() - wall) / _STARVED)


def stage_of(
    judge: Judge, verdict: Verdict, seen: Callable[[Case], None] = lambda case: None
) -> str:
    """Return the first rung of the backend's ladder that diverges in the same way.

    seen: called with the case before each run. Returns "" if the backend has no ladder.
    """
    rungs = judge.backend.ladder()
    assert verdict.divergence is not None
    for rung in rungs:
        seen(verdict.case)
        found = replace(judge, backend=rung).judge(verdict.case).divergence
        if found is not None and found.kind == verdict.divergence.kind:
            return rung.name
    return judge.backend.name if rungs else ""


def part_of(
    judge: Judge,
    verdict: Verdict,
    stage: str,
    seen: Callable[[Case], None] = lambda case: None,
) -> str:
    """Return the guilty part of a stage, if torch's bisector names one, or ""."""
    rungs = [rung for rung in (*judge.backend.ladder(), judge.backend) if rung.name == stage]
    if not rungs or not isinstance(rung := rungs[0], Bisects):
        return ""
    judge, divergence = replace(judge, backend=rung), verdict.divergence
    assert divergence is not None

    def agrees() -> bool:
        seen(verdict.case)
        found = judge.judge(verdict.case).divergence
        return found is None or found.kind != divergence.kind

    try:
        return rung.blame(agrees)
    except Exception:  # it is private to torch, and must not cost the finding
        return ""


def asker(judge: Judge, target: Target) -> Asker:
    """Return who answers candidates: a judge, or the judge of the stage that has the bug."""
    judge = replace(judge, relations="all" if target.kind == "relation" else "none")
    rungs: Sequence[Backend] = judge.backend.ladder()
    below: Judge | None = None
    whole: Judge | None = None
    stage = target.stage
    if stage and not listed(target.known):
        names = [rung.name for rung in rungs]
        at = names.index(stage) if stage in names else len(names)
        below = replace(judge, backend=rungs[at - 1]) if at else None
        if at < len(rungs):
            judge, whole = replace(judge, backend=rungs[at]), replace(judge, confirm=False)
    if rungs:  # a compilation each: the smallest case is confirmed, and the reference every time
        judge = replace(judge, confirm=False)
        below = None if below is None else replace(below, confirm=False)
    return Asker(judge, below, whole, raises=target.kind in ("raise", "relation", "state"))


def confirmed(judge: Judge, target: Target, chain: Sequence[Case]) -> Verdict | None:
    """Return the verdict of the smallest case of a chain on which a judge confirms the target.

    A search may have run on a stage only, and a case may be nondeterministic. If the last case is
    not confirmed, the chain is halved. None if its first case is not confirmed either.
    """
    if target.kind == "relation":
        judge = replace(judge, relations="all")
    wanted = replace(target, op="", parts=("kind",))

    def verdict(case: Case) -> Verdict | None:
        found = judge.judge(case)
        return found if wanted.reply(answer_of(found)) == "same" else None

    if (last := verdict(chain[-1])) is not None:
        return last
    best, low, high = verdict(chain[0]), 0, len(chain) - 1
    while best is not None and high - low > 1:
        middle = (low + high) // 2
        found = verdict(chain[middle])
        if found is None:
            high = middle
        else:
            best, low = found, middle
    return best
