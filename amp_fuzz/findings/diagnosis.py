"""Find the facts of an issue: stage, part, guilty op, and whether autocast matters.

This runs in a supervised process, which a case may kill: see `examined`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing import connection
from typing import TypeAlias

import msgspec

from amp_fuzz.backends import BackendError, backends, facts_of, unsupported
from amp_fuzz.backends.base import shadows_of
from amp_fuzz.backends.harness import quiet
from amp_fuzz.backends.registry import MissingBackend
from amp_fuzz.cases.case import Case, bare
from amp_fuzz.findings.explicit_form import explicit_form
from amp_fuzz.findings.minimize.target import answer_of, part_of
from amp_fuzz.findings.repro.torch_same import accepts
from amp_fuzz.findings.supervision.supervisor import Dead, talk
from amp_fuzz.findings.supervision.worker import prepared
from amp_fuzz.oracle import Divergence
from amp_fuzz.oracle.judge import Judge
from amp_fuzz.oracle.verdict import Verdict
from amp_fuzz.records.schema import DivergenceRecord, unanswered
from amp_fuzz.upstream.explain import judge_of
from amp_fuzz.upstream.known import Known

__all__ = ["Examined", "examined"]


@dataclass(frozen=True, slots=True)
class Examined:
    """The facts about a case on a backend.

    record: the divergence, or None. reached: the autocast kernels that the case reached, overload
    and policy. eager: whether torch's eager autocast agrees with the reference (``agrees``,
    ``diverges``), or "" if it was not compared. rungs: of a compiler's ladder, each with what it
    does. same: what torch's own comparison says of a wrong value beside eager's, None if it was not
    asked. dtype: of that value, as it must be. why: the reason if the case cannot run. missing:
    whether the reason is a missing backend.
    """

    record: DivergenceRecord | None = None
    reached: tuple[tuple[str, str], ...] = ()
    eager: str = ""
    rungs: tuple[tuple[str, str], ...] = ()
    same: bool | None = None
    dtype: str = ""
    why: str = ""
    missing: bool = False


def examined(
    case: Case, backend: str, known: tuple[Known, ...], *, timeout: float, memory: float
) -> Examined:
    """Judge a case in a separate process, and find out what is to blame.

    timeout: seconds without a sign of life (a compilation gives one). memory: GiB that the process
    may hold.
    """
    try:
        for message in talk(timeout, _examine, case, backend, known, memory=memory):
            if isinstance(message, Examined):
                return message
    except Dead as dead:
        return Examined(unanswered(backend, dead.kind, case, str(dead)))
    raise RuntimeError("the process ended without an answer")


def _examine(pipe: connection.Connection, case: Case, name: str, known: tuple[Known, ...]) -> None:
    from amp_fuzz.backends.registry import choose_backends

    prepared()
    try:
        (backend,) = choose_backends([name])
        with quiet():
            pipe.send(_found(pipe, case, judge_of(backend, known, relations="all")))
    except MissingBackend as error:
        pipe.send(Examined(why=str(error), missing=True))
    except BackendError as error:
        pipe.send(Examined(why=str(error)))
    pipe.send(None)


def _found(pipe: connection.Connection, case: Case, judge: Judge) -> Examined:
    def alive(_: Case) -> None:
        pipe.send("alive")

    verdict = judge.judge(case)
    if verdict.divergence is None:
        return Examined()
    kind = verdict.divergence.kind
    op = answer_of(verdict).op
    record = verdict.finding("", op=op)
    stage = part = ""
    without = False
    rungs: tuple[tuple[str, str], ...] = ()
    if kind != "nondeterminism":
        rungs = _rungs(judge, verdict, alive)
        stage = next((name for name, does in rungs if does.partition(" ")[0] == kind), "")
        part = part_of(judge, verdict, stage, alive)
        without = _without(judge, case, kind)
    record = msgspec.structs.replace(
        record,
        stage=stage,
        part=part,
        bare=without,
        explicit=explicit_form(case, judge.backend.reference()),
    )
    reached = dict.fromkeys((k.overload, k.policy.value) for k in verdict.kernels)
    same, dtype = _same(judge, case, verdict.divergence.where) if kind in _VALUES else (None, "")
    eager = _eager(judge, case)
    return Examined(record, tuple(reached), eager, rungs=rungs, same=same, dtype=dtype)


_VALUES = (
    *("value", "bitwise", "nonfinite", "precision", "range"),
    *("grad-value", "grad-bitwise", "grad-nonfinite"),
)
"""Kinds of wrong values."""


def _rungs(judge: Judge, verdict: Verdict, seen: Callable[[Case], None]) -> _Rungs:
    """Return what each rung of a backend's ladder does with a case, and the backend itself last.

    seen: called with the case before each run. Nothing is returned of a backend without a ladder.
    """
    found: list[tuple[str, str]] = []
    ladder = judge.backend.ladder()
    for rung in ladder:
        seen(verdict.case)
        one = replace(judge, backend=rung).judge(verdict.case)
        found.append((rung.name, _does(one.divergence)))
    return (*found, (judge.backend.name, _does(verdict.divergence))) if ladder else ()


_Rungs: TypeAlias = tuple[tuple[str, str], ...]


def _does(found: Divergence | None) -> str:
    if found is None:
        return "agrees"
    return f"{found.kind} at {found.where}" if found.where else found.kind


def _same(judge: Judge, case: Case, label: str) -> tuple[bool | None, str]:
    """Return what torch's comparison says of a value beside eager's, and the dtype it must have.

    Its fp64_ref is the float64 result that the reference's shadow follows.
    """
    (observed,) = judge.backend.run([case])
    eager = backends().get(f"eager-{judge.backend.device}")
    alike = eager is not None and eager.name != judge.backend.name and eager.values
    (expected,) = (
        eager.run([case]) if eager is not None and alike else (judge.backend.reference().run(case),)
    )
    want, got = expected.values.get(label), observed.values.get(label)
    _, bands = shadows_of(judge.backend).shadowed(case, 1, 1)
    exact = bands[label].clean if label in bands else None
    return accepts(want, got, exact), "" if want is None else str(want.dtype).partition(".")[2]


def _without(judge: Judge, case: Case, kind: str) -> bool:
    """Return whether the divergence also occurs without autocast."""
    found = judge_of(judge.backend, (), judge.relations).judge(bare(case)).divergence
    return found is not None and found.kind == kind


def _eager(judge: Judge, case: Case) -> str:
    """Return how eager torch compares with the reference, for a backend of the same device."""
    backend = judge.backend
    if not facts_of(backend).promise or not backend.values:
        return ""
    eager = backends().get(f"eager-{backend.device}")
    if eager is None or eager.availability().status != "ready":
        return ""
    if unsupported(case, eager):
        return ""
    found = replace(judge, backend=eager).judge(case).divergence
    return "agrees" if found is None else "diverges"
