"""Find the statement at which a divergence shows, and the values that differ because of it."""

from __future__ import annotations

from dataclasses import dataclass

from amp_fuzz.cases.case import Case
from amp_fuzz.cases.program import downstream, statements, uses
from amp_fuzz.catalogue.casting import CASTS
from amp_fuzz.oracle import Divergence

__all__ = ["Named", "guilty_op", "named", "tainted"]


def guilty_op(case: Case, divergence: Divergence) -> str:
    """Return the op of the statement at which a divergence shows, or "".

    For a value it is the statement that computed it, for an error the line that raised it, for a
    gradient the statement that uses the leaf, if there is only one.
    """
    made = {name: s.op for s in statements(case.program.body) for name in s.outputs}
    for name in {spec.name for spec in case.program.inputs}:
        users = [s.op for s in statements(case.program.body) if name in uses(s)]
        if len(users) == 1:
            made[f"{name}.grad"] = users[0]
    where = divergence.where
    if divergence.kind == "raise" and " = " in where:
        where = where.partition(" = ")[0].partition(",")[0].strip()
    *prefix, label = where.rpartition(": ")[2].split(".")
    if label == "grad" and prefix:
        label = f"{prefix[-1]}.grad"
    if divergence.kind == "precision" and (cast := _cast(case, label)):
        return cast
    if label in made:
        return made[label]
    ops = {s.op for s in statements(case.program.body)}
    return ops.pop() if len(ops) == 1 else ""


def _cast(case: Case, label: str) -> str:
    """Return the op of the last cast that a value is computed from, or ""."""
    body = list(statements(case.program.body))
    after = downstream(case.program, label.removesuffix(".grad")) if "." in label else set()
    wanted = {label} | {name for s in body if after & {*s.outputs} for name in s.outputs}
    for statement in reversed(body):
        if wanted & {*statement.outputs}:
            if statement.op in _ROUNDING:
                return statement.op
            wanted |= {*uses(statement)}
    return ""


_ROUNDING = CASTS - {"float"}


def named(label: str) -> str:
    """Return the name in a label: ``v3`` for ``step0.v3``, ``w1.grad`` for ``again.w1.grad``."""
    *prefix, last = label.split(".")
    return f"{prefix[-1]}.grad" if last == "grad" and prefix else last


@dataclass(frozen=True, slots=True)
class Named:
    """Whether a label belongs to one of these names."""

    names: set[str]

    def __call__(self, label: str) -> bool:
        return named(label) in self.names


def tainted(case: Case, label: str) -> set[str]:
    """Return the names of values that may differ because the value of a label does."""
    program, name = case.program, named(label)
    grads = {f"{spec.name}.grad" for spec in program.inputs}
    if name in grads:
        after = downstream(program, name.removesuffix(".grad"))
        names = {
            f"{spec.name}.grad"
            for spec in program.inputs
            if case.plan.scaler or after & downstream(program, spec.name)
        } | {name}
    else:
        names = set(downstream(program, name))
        for spec in program.inputs:
            if names & downstream(program, spec.name):
                names.add(f"{spec.name}.grad")
    if case.plan.scaler and names & grads:  # weights are computed from gradients
        names |= {spec.name for spec in program.inputs}.union(program.outputs, {"updated"})
    return names
