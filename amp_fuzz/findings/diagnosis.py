"""Find the facts of an issue: stage, part, guilty op, and whether autocast matters.

This runs in a supervised process, which a case may kill: see `examined`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from multiprocessing import connection

import msgspec

from amp_fuzz.backends import BackendError, backends, facts_of, unsupported
from amp_fuzz.backends.harness import quiet
from amp_fuzz.backends.registry import MissingBackend
from amp_fuzz.cases.case import Case, bare
from amp_fuzz.findings.explicit_form import explicit_form
from amp_fuzz.findings.minimize.target import answer_of, part_of, stage_of
from amp_fuzz.findings.supervision.supervisor import Dead, talk
from amp_fuzz.findings.supervision.worker import prepared
from amp_fuzz.oracle.judge import Judge
from amp_fuzz.records.schema import DivergenceRecord, unanswered
from amp_fuzz.upstream.explain import judge_of
from amp_fuzz.upstream.known import Known

__all__ = ["Examined", "examined"]


@dataclass(frozen=True, slots=True)
class Examined:
    """The facts about a case on a backend.

    record: the divergence, or None. reached: the autocast kernels that the case reached, overload
    and policy. eager: whether torch's eager autocast agrees with the reference (``agrees``,
    ``diverges``), or "" if it was not compared. why: the reason if the case cannot run. missing:
    whether the reason is a missing backend.
    """

    record: DivergenceRecord | None = None
    reached: tuple[tuple[str, str], ...] = ()
    eager: str = ""
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
    if kind != "nondeterminism":
        stage = stage_of(judge, verdict, alive)
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
    return Examined(record, tuple(reached), _eager(judge, case))


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
