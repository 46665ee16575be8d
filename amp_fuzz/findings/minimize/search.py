"""The search: pass after pass over ever smaller cases, until no pass helps any more.

A pass offers smaller cases one at a time. The first that still shows the divergence replaces the
case, and the pass restarts from it. The most valuable passes come first, and all repeat until a
whole round changes nothing. The search is deterministic, so one that was cut short can be repeated
from its recorded answers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, TypeAlias

import msgspec

from amp_fuzz.cases.case import Case
from amp_fuzz.cases.program import ProgramError
from amp_fuzz.catalogue import CATALOGUE, check
from amp_fuzz.catalogue.writes import wrongly_written
from amp_fuzz.findings.minimize import arguments, bodies, data, edit, plans, shapes
from amp_fuzz.findings.minimize.capture import Values
from amp_fuzz.findings.minimize.nearest import nearest

__all__ = ["Ended", "Event", "Reply", "Smaller", "Tried", "search"]

Reply: TypeAlias = Literal["same", "agrees", "other"]
"""The answer to a candidate: it shows the same divergence, it agrees with the reference, or
neither: it diverges in another way, raises, or cannot run."""


@dataclass(frozen=True, slots=True)
class Tried:
    """A candidate was tried: its number, and the pass that offered it."""

    case: Case
    by: str
    reply: Reply
    number: int


@dataclass(frozen=True, slots=True)
class Smaller:
    """A candidate that shows the divergence: the best so far, with candidates and seconds spent."""

    case: Case
    by: str
    number: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Ended:
    """The search is over: nothing smaller was found, or the time is up.

    nearest: the candidate that agrees with the reference and differs least from the case. The
    difference is often the explanation.
    """

    case: Case
    nearest: Case | None
    tried: int
    seconds: float
    reason: Literal["done", "time"]


Event: TypeAlias = Tried | Smaller | Ended
Pass: TypeAlias = Callable[[Case], Iterator[Case]]


def search(
    case: Case,
    ask: Callable[[Case], Reply],
    *,
    values: Callable[[Case], Values],
    seconds: float,
    literal: bool = True,
    before: int = 0,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Event]:
    """Yield ever smaller cases for which `ask` answers ``same``; the best comes last.

    values: the values that the reference passes to statements; see `capture`. literal: whether
    inputs have values (fake tensors have none). before: candidates that were tried already.
    """
    state = _Search(case, ask, values, clock(), seconds, clock, before)
    passes = _passes(state, literal)
    changed = True
    while changed and not state.late:
        changed = False
        for name, offer in passes:
            for event in state.run(name, offer):
                changed |= isinstance(event, Smaller)
                yield event
    reason: Literal["done", "time"] = "time" if state.late else "done"
    near = nearest(state.best, state.agreeing.values(), literal=literal)
    yield Ended(state.best, near, state.number, clock() - state.start, reason)


def _passes(state: _Search, literal: bool) -> list[tuple[str, Pass]]:
    def fewer(case: Case) -> Iterator[Case]:
        return bodies.fewer(case, state.given(case)) if edit.count(case.program) > 1 else iter(())

    def joined(case: Case) -> Iterator[Case]:
        return bodies.joined(case, state.given(case)) if edit.count(case.program) > 1 else iter(())

    named: list[tuple[str, Pass]] = [
        ("plan", plans.plans),
        ("regions", bodies.regions),
        ("statements", fewer),
        ("statements", joined),
        ("plan", plans.plans),  # again: its users may be gone, and it decides what runs
        ("outputs", bodies.outputs),
        ("inputs", bodies.inputs),
        ("inputs", data.roles),
        ("devices", data.devices),
        ("values", shapes.frozen_case),
        ("shapes", shapes.sizes),
        ("shapes", shapes.ranks),
        ("dtypes", data.dtypes),
        ("layouts", data.layouts),
        ("values", data.values),
        ("values", data.seeds),
        ("forms", arguments.forms),
        ("arguments", arguments.arguments),
        ("names", _renamed),
    ]
    of_values = (shapes.frozen_case, data.values)
    return named if literal else [(n, p) for n, p in named if p not in of_values]


def _renamed(case: Case) -> Iterator[Case]:
    yield msgspec.structs.replace(case, program=edit.renamed(case.program))


@dataclass(slots=True)
class _Search:
    best: Case
    ask: Callable[[Case], Reply]
    values: Callable[[Case], Values]
    start: float
    seconds: float
    clock: Callable[[], float]
    number: int = 0
    tried: set[str] = field(default_factory=set)
    agreeing: dict[str, Case] = field(default_factory=dict)
    late: bool = False
    lawful: bool = True
    _given: tuple[str, Values] = ("", MappingProxyType({}))

    def __post_init__(self) -> None:
        self.tried.add(self.best.id)
        self.lawful = not wrongly_written(self.best.program, CATALOGUE)

    def valid(self, case: Case) -> bool:
        """Return whether a candidate is well formed and writes nothing that a drawn case may not.

        A case made by hand may write an input; then its candidates may too.
        """
        if not _valid(case):
            return False
        return not (self.lawful and wrongly_written(case.program, CATALOGUE))

    def given(self, case: Case) -> Values:
        if self._given[0] != case.id:
            self._given = case.id, self.values(case)
        return self._given[1]

    def run(self, name: str, offer: Pass) -> Iterator[Event]:
        """Run a pass until it offers nothing, or the time is up."""
        smaller = True
        while smaller and not self.late:
            smaller = False
            for candidate in offer(self.best):
                if self.clock() - self.start > self.seconds:
                    self.late = True
                    return
                if candidate.id in self.tried or not self.valid(candidate):
                    continue
                self.tried.add(candidate.id)
                reply = self.ask(candidate)
                self.number += 1
                yield Tried(candidate, name, reply, self.number)
                if reply == "agrees":
                    self.agreeing[candidate.id] = candidate
                if reply == "same":
                    self.best, smaller = candidate, True
                    yield Smaller(candidate, name, self.number, self.clock() - self.start)
                    break


def _valid(case: Case) -> bool:
    try:
        check(case.program)
        case.plan.check()
    except ProgramError:
        return False
    return True
