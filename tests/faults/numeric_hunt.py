"""Set the engine's judge on numeric faults, along the cases of an ordinary run.

`way` draws the cases as the engine does, over the whole catalogue unless a focus is given, and runs
each once on honest eager to note which ops it reaches. `hunt` then judges, under a fault, the cases
that reach the ops of the fault: the others are drawn and counted too, but cannot show it.

A fault is found by a divergence in value that the rounding oracle reports, in a case on which the
same backend without the fault agrees with the reference.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from amp_fuzz.backends import backends
from amp_fuzz.backends.compile import CompileBackend
from amp_fuzz.backends.harness import quiet
from amp_fuzz.cases.case import Case
from amp_fuzz.findings.minimize.target import stage_of
from amp_fuzz.oracle.labels import guilty_op
from amp_fuzz.oracle.verdict import Verdict
from amp_fuzz.runs.engine import Settings, Task, draw, plan_tasks, seed_of
from amp_fuzz.upstream import shipped
from amp_fuzz.upstream.explain import judge_of
from tests.faults.corrupted import Corrupted, Seeded, reached
from tests.faults.fault import NumericFault

__all__ = ["KINDS", "Hunt", "Step", "backend_of", "hunt", "way"]

# What the rounding oracle reports. `range` is not among them: it says that honest code may differ.
KINDS = ("value", "grad-value", "nonfinite", "grad-nonfinite")
# A run small enough to come round to every family again and again.
_ROUND = 400


@dataclass(frozen=True, slots=True)
class Step:
    """A case of the way: its family, and the ops that it reaches."""

    case: Case
    family: str
    reached: frozenset[str]


@dataclass(frozen=True, slots=True)
class Hunt:
    """What came of a hunt: the cases drawn until the find, or in all.

    reached: those of them that reach the fault's ops, and were judged. seconds: CPU seconds of
    judging them. kind, where, op, observed: of the divergence. outcome: of the verdict; ``backend``
    where the fault shows without autocast too. stage: the rung that the engine
    names. alarms: divergences that honest torch shows too; they do not count. failed: cases that
    the shadows could not run.
    """

    name: str
    found: bool
    cases: int
    reached: int
    seconds: float
    kind: str = ""
    where: str = ""
    op: str = ""
    observed: str = ""
    stage: str = ""
    alarms: int = 0
    failed: int = 0
    case: Case | None = None
    outcome: str = ""

    def json(self) -> dict[str, Any]:
        """Return it as a JSON object, without the case."""
        return asdict(replace(self, case=None)) | {"case": self.case.id if self.case else ""}


def _seconds() -> float:
    """Return the CPU seconds of this process and of the C++ compilers that it started."""
    return sum(os.times()[:4])


def tasks(cases: int, seed: int, focus: tuple[str, ...] = ()) -> Iterator[Task]:
    """Yield the tasks of ordinary runs, one round after another, or the one with a focus."""
    if focus:
        yield Task("eager-cpu", "focus", focus, cases, seed_of(seed, *focus))
        return
    for number in range(-(-cases // _ROUND)):
        settings = Settings(
            backends=("eager-cpu",),
            cases=min(_ROUND, cases - number * _ROUND),
            seed=seed_of(seed, number),
        )
        yield from plan_tasks(settings, [backends()["eager-cpu"]])


def way(cases: int, *, seed: int = 0, focus: tuple[str, ...] = ()) -> Iterator[Step]:
    """Draw the cases of a run and note what each reaches."""
    torch.set_num_threads(1)
    for task in tasks(cases, seed, focus):
        for case in draw(task, Settings(backends=("eager-cpu",), cases=cases)):
            with quiet():
                yield Step(case, task.family, reached(case))


def backend_of(fault: NumericFault, *, honest: bool = False) -> Corrupted | CompileBackend:
    """Return the backend in which a fault is looked for, with the fault or without."""
    if fault.stage == "eager-cpu":
        return Corrupted() if honest else Corrupted(patches=fault.corrupt)
    return CompileBackend("inductor") if honest else Seeded("inductor", patches=fault.corrupt)


def hunt(fault: NumericFault, steps: Sequence[Step], *, seconds: float = 0.0) -> Hunt:
    """Judge the cases that reach a fault until it is found, or for so many seconds; 0: all."""
    torch.set_num_threads(1)
    alarms = failed = judged = 0
    wanted = set(fault.reached)
    start = _seconds()
    judge = judge_of(backend_of(fault), shipped(), "none")
    for number, step in enumerate(steps, 1):
        spent = _seconds() - start
        if seconds and spent > seconds:
            return Hunt(
                fault.name, False, number - 1, judged, round(spent, 2), alarms=alarms, failed=failed
            )
        if not wanted & step.reached:
            continue
        judged += 1
        with quiet():
            try:
                verdict = judge.judge(step.case)
            except RuntimeError as error:
                if "the shadows did not come" not in str(error):
                    raise
                failed += 1
                continue
            if not counts(verdict):
                continue
            if not agrees(fault, verdict.case):
                alarms += 1
                continue
            stage = stage_of(judge, verdict) or judge.backend.name
        found = verdict.divergence
        assert found is not None
        spent = _seconds() - start
        return Hunt(
            fault.name,
            True,
            number,
            judged,
            round(spent, 2),
            found.kind,
            found.where,
            guilty_op(verdict.case, found),
            found.observed,
            stage,
            alarms,
            failed,
            verdict.case,
            verdict.outcome,
        )
    spent = _seconds() - start
    return Hunt(
        fault.name, False, len(steps), judged, round(spent, 2), alarms=alarms, failed=failed
    )


def counts(verdict: Verdict) -> bool:
    """Return whether the rounding oracle reported a divergence that no known entry explains."""
    found, told = verdict.divergence, verdict.outcome in ("diverged", "backend")
    return told and found is not None and found.kind in KINDS


def agrees(fault: NumericFault, case: Case) -> bool:
    """Return whether the backend without the fault agrees with the reference on a case."""
    verdict = judge_of(backend_of(fault, honest=True), shipped(), "none").judge(case)
    return verdict.outcome in ("agreed", "raised")
