"""Find the guilty statement of a case: the first that diverges alone.

The fingerprint names the cause of a divergence; see `amp_fuzz.records.fingerprint`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from amp_fuzz.cases.case import Case
from amp_fuzz.cases.program import statements, uses
from amp_fuzz.findings.minimize import Values, without
from amp_fuzz.records.fingerprint import Fingerprint, fingerprint, ingredient

__all__ = ["Fingerprint", "Guilty", "alone", "fingerprint", "guilty", "ingredient"]


@dataclass(frozen=True, slots=True)
class Guilty:
    """The statements that diverge alone, if any, and the case of only these."""

    numbers: tuple[int, ...] = ()
    case: Case | None = None

    @property
    def op(self) -> str:
        """Their ops, joined by ``+``; "" if no statement is guilty alone."""
        if self.case is None:
            return ""
        return "+".join(s.op for s in statements(self.case.program.body))


def guilty(
    case: Case,
    values: Values,
    diverges: Callable[[Case], bool],
    *,
    guess: str = "",
    pairs: bool = True,
) -> Guilty:
    """Return the first statement whose own output diverges, given the reference's inputs.

    If none does, return the first two of which one reads the other's output, or that read the same
    value. diverges: whether a case shows the divergence. guess: an op to try first; if a forward
    value diverges first, it is that value's.
    """
    body = list(statements(case.program.body))
    if len(body) == 1:
        return Guilty((0,), case)
    order = sorted(range(len(body)), key=lambda i: body[i].op != guess)
    for chosen in (*((i,) for i in order), *(_pairs(case) if pairs else ())):
        whole = len(chosen) == len(
            body
        )  # it may depend on the returned values: nothing else changes
        small = case if whole else alone(case, chosen, values)
        if small is not None and diverges(small):
            return Guilty(chosen, small)
    return Guilty()


def alone(case: Case, chosen: tuple[int, ...], values: Values) -> Case | None:
    """Return the case with only these statements, on the values that the reference gives them.

    The program returns only their values. None if a value that they need cannot be an input.
    """
    body = list(statements(case.program.body))
    made = tuple(n for i in chosen for n in body[i].outputs if n != "_")
    if not made:
        return None
    program = msgspec.structs.replace(case.program, outputs=made)
    gone = set(range(len(body))) - set(chosen)
    small = without(program, gone, values, trains=case.plan.backward != "none")
    return None if small is None else msgspec.structs.replace(case, program=small)


def _pairs(case: Case) -> Iterator[tuple[int, ...]]:
    body = list(statements(case.program.body))
    for j, second in enumerate(body):
        read = set(uses(second))
        for i, first in enumerate(body[:j]):
            if read & {*first.outputs, *uses(first)}:
                yield i, j
