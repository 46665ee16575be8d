"""Set the engine on a fault, as a user would who does not know that it is there."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import count
from typing import Any

import torch

from amp_fuzz.backends import backends
from amp_fuzz.engine import Finding, Settings, explore, plan_tasks, seed_of
from amp_fuzz.judge import Judge, quiet
from amp_fuzz.known import shipped
from amp_fuzz.records import DivergenceRecord
from tests.faults.fault import Fault

__all__ = ["Hunt", "hunt"]

# A run small enough to come round to every family every few seconds.
_ROUND = 400


@dataclass(frozen=True, slots=True)
class Hunt:
    """What came of a hunt: cases and seconds until the fault was found, or until time was up.

    kind, where, op: of the divergence that showed it. alarms: divergences that honest torch shows
    as well; they do not count.
    """

    name: str
    found: bool
    cases: int
    seconds: float
    kind: str = ""
    where: str = ""
    op: str = ""
    alarms: int = 0

    def json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return asdict(self)


def settings(seed: int) -> Settings:
    """Return an ordinary run; only the minimiser is off, since its time is not the search's."""
    return Settings(
        backends=("eager-cpu",),
        cases=_ROUND,
        seed=seed,
        known=shipped(),
        fail_fast=True,
        minimize=0.0,
    )


def hunt(fault: Fault, *, seconds: float = 60.0, seed: int = 0, cases: int = 0) -> Hunt:
    """Corrupt torch and run the engine until it notices, for so long or for so many cases."""
    torch.set_num_threads(1)
    alarms = done = 0
    start = time.perf_counter()
    for round_ in count():
        chosen = settings(seed_of(seed, round_))
        for task in plan_tasks(chosen, [backends()["eager-cpu"]]):
            record = None
            with fault.corrupt():
                for event in explore(task, chosen):
                    if isinstance(event, Finding):
                        record = event.record if event.new else record
                    else:
                        done += 1
                    spent = time.perf_counter() - start
                    if spent > seconds or (cases and done >= cases):
                        break
            if record is not None:
                if _is_of(record, fault):
                    spent = time.perf_counter() - start
                    found = record.kind, record.where, record.op
                    return Hunt(fault.name, True, done, round(spent, 2), *found, alarms)
                alarms += 1
            if spent > seconds or (cases and done >= cases):
                return Hunt(fault.name, False, done, round(spent, 2), alarms=alarms)
    raise AssertionError("unreachable")


def _is_of(record: DivergenceRecord, fault: Fault) -> bool:
    """Return whether a divergence is gone in honest torch: only then did the fault make it.

    Nondeterminism may be gone by chance; it counts only for a fault that makes it.
    """
    if record.kind == "nondeterminism" and record.kind not in fault.kinds:
        return False
    with quiet():
        verdict = Judge(backends()["eager-cpu"], shipped()).judge(record.case)
    return verdict.outcome != "diverged"
