"""An op in one context, and what a contract says of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import msgspec

from amp_fuzz.backends import Backend
from amp_fuzz.backends.harness import Observation
from amp_fuzz.cases.case import Case, Plan
from amp_fuzz.cases.program import Autocast, Program
from amp_fuzz.interfaces.check import messages
from amp_fuzz.interfaces.check.adapters import Checked
from amp_fuzz.interfaces.check.subject import Subject
from amp_fuzz.interfaces.check_op.passes import Passes
from amp_fuzz.interfaces.check_op.target import Target
from amp_fuzz.oracle import Divergence, Rounding, compare
from amp_fuzz.reports.printable import plural

__all__ = ["Broken", "Skipped", "Tried", "Unjudged", "gradients"]


class Broken(Exception):
    """The op breaks the contract. where: the value, tensor or line."""

    def __init__(self, what: str, where: str = "") -> None:
        super().__init__(what)
        self.where = where


class Skipped(Exception):
    """The contract does not apply to the op, or torch refuses clearly."""


class Unjudged(Exception):
    """The op raises, or repeats nothing, before the contract can be judged."""


@dataclass(frozen=True, slots=True)
class Tried:
    """An op in one context on one backend."""

    target: Target
    backend: Backend
    passes: Passes

    @property
    def contexts(self) -> tuple[Autocast, ...]:
        """The contexts around the op."""
        return self.passes.contexts

    def plain(self) -> Observation:
        """Return the outputs and gradients of a plain call.

        Raises `Unjudged` if it raises or does not repeat, `Skipped` if it has no gradient.
        """
        seen = self.passes.plain()
        if seen.raised is not None:
            raise Unjudged(f"it raises: {messages.raised(seen.raised)}")
        if not any(v is not None for label, v in seen.values.items() if label[0] == "w"):
            raise Skipped("it has no gradient: no output depends on an input that requires one")
        if found := compare(seen, self.passes.plain()):
            raise Unjudged(f"it does not repeat its results: {self.said(found)}")
        return seen

    def said(self, found: Divergence) -> str:
        """Return a divergence in short."""
        where = self.passes.names(found.where)
        at = f"{where}: " if where else ""
        return f"{at}{found.observed}, expected {found.expected}"

    def rounding(self, subject: Subject, want: Observation, got: Observation) -> Rounding:
        """Return what judges two observations of a subject that differ in a bit."""
        checked = Checked(subject, self.backend, names=self.passes.names)
        plan = msgspec.structs.replace(Plan(), contexts=self.contexts)
        checked.seen[plan] = {"expected": want, "observed": got}
        case = Case(Program((), (), ()), plan, subject.seed)
        return Rounding(partial(checked.reference().shadowed, case))


def gradients(seen: Observation) -> Observation:
    """Return the gradients of an observation."""
    return Observation({k: v for k, v in seen.values.items() if k[0] == "w"})


def count(seen: Observation) -> str:
    return plural(sum(v is not None for v in gradients(seen).values.values()), "gradient")
