"""Set the engine on a fault, as a user would who does not know that it is there.

`hunt` corrupts torch and runs the engine until it notices. `record` and `hunt_along` do the same
for hundreds of faults of single ops at a fraction of the cost. What the engine draws does not
depend on torch, so all these hunts go through the same cases, and a fault of one op touches only
the cases that call the op under autocast: `record` runs the engine once over honest kernels that
note who calls them, and `hunt_along` judges, under the fault, the noted cases only. The cases and
seconds until the find are those of the whole way.

Seconds are CPU seconds of one core: a busy machine does not change what is found within a minute.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any

import torch

from amp_fuzz.backends import Backend, backends
from amp_fuzz.backends.harness import quiet
from amp_fuzz.cases.case import CUSTOM_OPS, Case
from amp_fuzz.records.schema import CaseRecord, DivergenceRecord
from amp_fuzz.runs.engine import Event, Settings, Suspected, Task, explore, plan_tasks, seed_of
from amp_fuzz.upstream import shipped
from amp_fuzz.upstream.explain import judge_of
from tests.faults.fault import Fault
from tests.faults.wrapper import DEVICE, Kernel, Value, Wrapper, installed

__all__ = ["Hunt", "Step", "hunt", "hunt_along", "plan_way", "record"]

# A run small enough to come round to every family every few seconds.
_ROUND = 400


@dataclass(frozen=True, slots=True)
class Hunt:
    """What came of a hunt: cases and seconds until the fault was found, or until time was up.

    kind, where, op: of the divergence that showed it. alarms: divergences in cases where honest
    torch does not agree with the reference either, known bugs included; they do not count.
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


@dataclass(frozen=True, slots=True)
class Step:
    """A case of the engine's way: the overloads called under autocast, and the seconds so far."""

    case: Case
    family: str
    reached: frozenset[str]
    seconds: float


def _rounds(seed: int) -> Iterator[tuple[Task, Settings]]:
    """Yield the tasks of one ordinary run after another; only the minimiser is off."""
    for number in count():
        settings = Settings(
            backends=(_backend().name,),
            cases=_ROUND,
            seed=seed_of(seed, number),
            known=shipped(),
            minimize=0.0,
        )
        for task in plan_tasks(settings, [_backend()]):
            yield task, settings


def _backend() -> Backend:
    return backends()[f"eager-{DEVICE}"]


def hunt(fault: Fault, *, seconds: float = 60.0, seed: int = 0, cases: int = 0) -> Hunt:
    """Corrupt torch and run the engine until it notices, for so long or for so many cases."""
    torch.set_num_threads(1)
    alarms = done = 0
    start = time.process_time()
    for task, settings in _rounds(seed):
        events = explore(task, settings)
        found, over = None, False
        while not over:
            with fault.corrupt():
                for _, found in _cases(events):
                    done += 1
                    over = time.process_time() - start > seconds or (0 < cases <= done)
                    if found is not None or over:
                        break
                else:
                    break  # the task came to its end
            if found is not None and _is_of(found, fault):
                spent = round(time.process_time() - start, 2)
                said = found.kind, found.where, found.op
                return Hunt(fault.name, True, done, spent, *said, alarms)
            alarms += found is not None
        if over:
            break
    spent = round(time.process_time() - start, 2)
    return Hunt(fault.name, False, done, spent, alarms=alarms)


def _cases(
    events: Iterator[Event | CaseRecord],
) -> Iterator[tuple[CaseRecord, DivergenceRecord | None]]:
    """Yield the record of each case of a task, with its divergence if that is new and counts."""
    found: DivergenceRecord | None = None
    for event in events:
        if isinstance(event, Suspected):
            found = found or event.record
        elif isinstance(event, CaseRecord):
            counts = event.outcome == "diverged" and found is not None and _counts(found.case)
            yield event, found if counts else None
            found = None


def _counts(case: Case) -> bool:
    """Return whether a find counts.

    Faults are made of Python kernels, which torch.func and the bodies of custom ops refuse.
    """
    return case.plan.transform == "none" and case.plan.entry not in CUSTOM_OPS


def _is_of(record: DivergenceRecord, fault: Fault) -> bool:
    """Return whether the fault made a divergence: honest torch agrees with the reference there.

    Where honest torch has a known bug, the fault may only have changed how that bug shows: a case
    that is merely explained does not count. Nondeterminism may be gone by chance; it counts only
    for a fault that makes it.
    """
    if record.kind == "nondeterminism" and record.kind not in fault.kinds:
        return False
    with quiet():
        verdict = judge_of(_backend(), shipped()).judge(record.case)
    return verdict.outcome in ("agreed", "raised")


class _Listening(Wrapper):
    """Honest kernels that note who calls them."""

    def __init__(self) -> None:
        self.reached: set[str] = set()

    def call(
        self, kernel: Kernel, keys: Any, args: Sequence[Value], kwargs: Mapping[str, Value]
    ) -> Value:
        self.reached.add(kernel.name)
        return super().call(kernel, keys, args, kwargs)


def plan_way(settings: Settings) -> tuple[list[Step], float]:
    """Return the cases of one run over honest kernels, and the CPU seconds that they took.

    They stand in the order in which a run of more and more cases takes them up: one of n cases has
    the first n, but for rounding. So the number of the step that shows a fault is the number of
    cases that a run needs for it.
    """
    torch.set_num_threads(1)
    wrapper, steps = _Listening(), []
    start = time.process_time()
    last: list[Case] = []
    with installed(wrapper):
        for task in plan_tasks(settings, [_backend()]):
            for done, _ in enumerate(_cases(explore(task, settings, seen=last.append)), 1):
                reached = frozenset(wrapper.reached)
                steps.append(Step(last[0], task.family, reached, done / task.cases))
                last.clear()
                wrapper.reached.clear()
    steps.sort(key=lambda step: step.seconds)
    return steps, time.process_time() - start


def record(*, seconds: float = 60.0, seed: int = 0, cases: int = 0) -> tuple[list[Step], Hunt]:
    """Run the engine over honest kernels, and return its way, and what came of the run.

    For so many cases, whatever they cost on a machine that is busy, or else for so long.
    """
    torch.set_num_threads(1)
    wrapper, steps, alarms = _Listening(), [], 0
    start = time.process_time()
    last: list[Case] = []
    with installed(wrapper):
        for task, settings in _rounds(seed):
            for _, found in _cases(explore(task, settings, seen=last.append)):
                spent = time.process_time() - start
                alarms += found is not None and found.kind != "nondeterminism"
                steps.append(Step(last[0], task.family, frozenset(wrapper.reached), spent))
                last.clear()
                wrapper.reached.clear()
                if len(steps) == cases or (not cases and spent > seconds):
                    return steps, Hunt("honest-noted", bool(alarms), len(steps), round(spent, 2))
    raise AssertionError("the rounds have no end")


def hunt_along(fault: Fault, steps: Sequence[Step]) -> Hunt:
    """Go the engine's way under a fault, past cases that do not reach its op, if it is of one.

    The outcome is that of `hunt`.
    """
    torch.set_num_threads(1)
    alarms = 0
    judge = judge_of(_backend(), shipped())
    for number, step in enumerate(steps, 1):
        if (fault.op and fault.op not in step.reached) or not _counts(step.case):
            continue
        with quiet(), fault.corrupt():
            verdict = judge.judge(step.case)
        if verdict.outcome != "diverged":
            continue
        found = verdict.finding(step.family)
        if _is_of(found, fault):
            where = found.kind, found.where, found.op
            return Hunt(fault.name, True, number, round(step.seconds, 2), *where, alarms)
        alarms += 1
    return Hunt(fault.name, False, len(steps), round(steps[-1].seconds, 2), alarms=alarms)
