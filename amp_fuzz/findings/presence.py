"""Ask which known bugs the installed torch has: judge the cases of each, in a process of its own.

A bug is *there* if its record explains how a case of it diverges. It is *gone* only if both sides
agree on every case, again and again. They may raise only the error that the record expects, and the
reference that imitates the bug must not agree. Anything else is *cannot tell*, with the reason.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from multiprocessing import connection
from typing import Literal, TypeAlias

from amp_fuzz.backends.base import Backend, BackendError, facts_of
from amp_fuzz.backends.harness import Observation, quiet
from amp_fuzz.backends.registry import MissingBackend, backends, choose_backends
from amp_fuzz.cases.case import Case
from amp_fuzz.cases.program import ProgramError
from amp_fuzz.catalogue import check
from amp_fuzz.findings.judge_again import TRIES
from amp_fuzz.findings.supervision.supervisor import Dead, talk
from amp_fuzz.findings.supervision.worker import prepared
from amp_fuzz.oracle import RELATIONS, check_relation
from amp_fuzz.oracle.trial import Trial
from amp_fuzz.oracle.verdict import Verdict
from amp_fuzz.upstream.bug import Bug, Example
from amp_fuzz.upstream.explain import judge_of
from amp_fuzz.upstream.known import Known
from amp_fuzz.upstream.registry import BUGS, quirks

__all__ = ["Presence", "State", "preload", "presence", "tell"]

State: TypeAlias = Literal["there", "gone", "cannot tell"]


@dataclass(frozen=True, slots=True)
class Presence:
    """Whether the installed torch has a bug.

    backend, case: which example said so, if any. detail: why it cannot be told.
    """

    state: State
    backend: str = ""
    case: str = ""
    detail: str = ""


def presence(
    bugs: Iterable[Bug], *, timeout: float, memory: float
) -> Iterator[tuple[Bug, Presence]]:
    """Yield each bug and whether this torch has it. Each case runs in a process that may die."""
    bugs = tuple(bugs)
    preload(bugs)
    for bug in bugs:
        yield bug, _of(bug, timeout, memory)


def preload(bugs: Iterable[Bug]) -> None:
    """Import compilers once, for all forks: a compiled case takes 1 s instead of 5 s (2 cores)."""
    names = {example.backend for bug in bugs for example in bug.examples}
    if any(facts_of(backend).compiles for name, backend in backends().items() if name in names):
        with quiet():
            for module in ("torch._inductor.compile_fx", "torch._inductor.lowering"):
                importlib.import_module(module)


def _of(bug: Bug, timeout: float, memory: float) -> Presence:
    seen: list[Presence] = []
    for example in bug.examples:
        at = example.backend, example.case.id
        try:
            one: Presence
            (one,) = talk(timeout, _answer, bug.id, example, memory=memory)
        except Dead as dead:
            state: State = "there" if dead.kind in bug.kinds else "cannot tell"
            one = Presence(state, *at, f"{dead.kind}: {dead}")
        if one.state == "there":
            return one
        seen.append(one)
    if not seen:
        return Presence("cannot tell", detail=f"it has no case: {bug.unshown}")
    return next((one for one in seen if one.state != "gone"), seen[0])


def _answer(pipe: connection.Connection, name: str, example: Example) -> None:
    prepared()
    pipe.send(tell(BUGS[name], example))
    pipe.send(None)


def tell(bug: Bug, example: Example) -> Presence:
    """Tell, in this process, whether an example of a bug shows it."""
    name, case = example.backend, example.case
    if lacks := example.lacks():
        return Presence("cannot tell", name, case.id, lacks)
    try:
        check(case.program)
        (backend,) = choose_backends([name])
        with quiet():
            state, detail = _told(bug, backend, case)
    except (BackendError, MissingBackend, ProgramError) as error:
        state, detail = "cannot tell", str(error)
    return Presence(state, name, case.id, detail)


_Told: TypeAlias = tuple[State, str]


def _told(bug: Bug, backend: Backend, case: Case) -> _Told:
    """Judge a case until it shows the bug: a nondeterministic one ten times, any other twice."""
    known = () if bug.own else (bug.entry,)
    verdict = _judged(backend, case, known)
    for _ in range(TRIES - 1 if "nondeterminism" in bug.kinds else 1):
        if verdict.divergence is not None:
            break
        verdict = _judged(backend, case, known)
    if verdict.divergence is None:
        return _agreeing(bug, backend, verdict)
    if bug.own:
        if verdict.outcome != "backend":
            return _otherwise(verdict)
        other = _instead(bug, case)
        return ("cannot tell", f"its case shows {other} here") if other else ("there", "")
    return ("there", "") if verdict.known else _diverging(bug, backend, case)


def _instead(bug: Bug, case: Case) -> str:
    """Return the bug of this torch that has the same case, if this torch should not have `bug`."""
    installed = version("torch")
    if bug.entry.holds(installed):
        return ""
    others = (other for other in BUGS.values() if other.own and other.entry.holds(installed))
    return next((b.id for b in others if any(e.case == case for e in b.examples)), "")


def _judged(backend: Backend, case: Case, known: Sequence[Known]) -> Verdict:
    return judge_of(backend, known, relations="all").judge(case)


def _diverging(bug: Bug, backend: Backend, case: Case) -> _Told:
    """Return what a case shows that diverges, and not by this bug alone."""
    records = [record.entry for record in BUGS.values() if not record.own]  # of any torch
    verdict = _judged(backend, case, [entry for entry in records if entry.id != bug.id])
    if verdict.known:
        return "cannot tell", f"its case shows {verdict.known} here"
    verdict = _judged(backend, case, records)
    if bug.id in verdict.known.split("+"):
        return "there", ""
    if verdict.divergence is None:
        return "cannot tell", "its case diverges at one run and agrees at another"
    return _otherwise(verdict)


def _otherwise(verdict: Verdict) -> _Told:
    """Return that a case diverges in another way than the bug says."""
    found = verdict.divergence
    assert found is not None
    at = f" at {found.where}" if found.where else ""
    sides = f"expected {found.expected}, observed {found.observed}"
    return "cannot tell", f"its case diverges in another way here: {found.kind}{at}, {sides}"


def _agreeing(bug: Bug, backend: Backend, verdict: Verdict) -> _Told:
    """Return whether an agreement proves that the bug is gone."""
    if verdict.unjudged:
        return "cannot tell", f"both sides agree, but {verdict.unjudged} values cannot be judged"
    if verdict.uncompiled:
        return "cannot tell", "both sides agree, but the compiler made no graph of it"
    assert verdict.seen is not None
    raised = verdict.seen.raised
    text = "" if raised is None else f"{raised.kind}: {raised.message}"
    promised = "raise" in bug.kinds and bug.expected and re.search(bug.expected, text)
    if raised is not None and not promised:
        return "cannot tell", f"both sides raise {text.splitlines()[0][:200]}"
    if bug.imitation is not None and not _acts(bug, backend, verdict.case):
        return "cannot tell", "both sides agree, and imitating the bug changes nothing here"
    return "gone", ""


def _acts(bug: Bug, backend: Backend, case: Case) -> bool:
    """Return whether the reference that imitates a bug disagrees with the backend on a case."""
    scope = partial(quirks, {bug.id})
    trial = Trial.of(case, backend, scope)
    if trial.compare() is not None or trial.raises_another():
        return True
    if not (backend.values and backend.exact):
        return False
    seen: Observation = trial.refer(case)
    relations = (
        check_relation(relation, case, trial.refer, values=True) for relation in RELATIONS.values()
    )
    return trial.holds_within(seen) is not None or any(found is not None for found in relations)
