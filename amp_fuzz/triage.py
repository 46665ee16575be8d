"""What makes two divergences the same: the guilty op, and the fingerprint that names a cause.

A fingerprint is computed after minimising, when what has nothing to do with the cause is gone. It
holds names only, no number that a machine or a version could round otherwise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

import msgspec

from amp_fuzz.case import Case, Plan
from amp_fuzz.minimize import Values, without
from amp_fuzz.program import Autocast, Checkpoint, regions, statements, uses
from amp_fuzz.records import DivergenceRecord

__all__ = ["Fingerprint", "Guilty", "alone", "fingerprint", "guilty", "ingredient"]


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What names the cause of a divergence.

    kind: of the divergence. stage: of a compiler, its first rung that diverges, else "". op: the
    guilty op, or two joined by ``+``. policy: what autocast does with it. dtypes: of its inputs.
    ingredient: what of plan and regions is left; see `ingredient`.
    """

    kind: str
    backend: str
    stage: str
    op: str
    policy: str
    dtypes: tuple[str, ...]
    ingredient: str

    def __str__(self) -> str:
        """Return the fields, one after another, as the hash takes them."""
        parts = (getattr(self, field.name) for field in fields(self))
        return " | ".join(",".join(p) if isinstance(p, tuple) else p for p in parts)

    @property
    def hash(self) -> str:
        """Ten hex digits, the same on every machine and version."""
        return hashlib.blake2b(str(self).encode(), digest_size=5).hexdigest()


def fingerprint(record: DivergenceRecord) -> Fingerprint:
    """Return the fingerprint of a finding; it says most of one that was minimised."""
    case = record.minimised or record.case
    dtypes = tuple(filter(None, record.dtypes.split(",")))
    return Fingerprint(
        record.kind,
        record.backend,
        record.stage,
        record.op,
        record.policy,
        dtypes or tuple(sorted({s.dtype for s in case.program.inputs})),
        ingredient(case),
    )


_PLAIN = Plan(contexts=(), backward="none")


def ingredient(case: Case) -> str:
    """Return what of a plan and its regions is not plain, joined by ``+``: ``autocast+steps``.

    The number of contexts counts, ``autocast`` or ``nested``, and not what they say: a divergence
    is the same under float16. Of regions each kind counts once.
    """
    plan, found = case.plan, list[str]()
    inner = list(regions(case.program.body))
    contexts = len(plan.contexts) + sum(isinstance(c, Autocast) for c in inner)
    if contexts:
        found.append("autocast" if contexts == 1 else "nested")
    if any(isinstance(c, Autocast) and not c.enabled for c in (*plan.contexts, *inner)):
        found.append("disabled")
    for field in msgspec.structs.fields(plan):
        value = getattr(plan, field.name)
        if field.name in ("contexts", "backward_context") or value == getattr(_PLAIN, field.name):
            continue
        if field.name == "loop" and plan.steps == 1:
            continue
        found.append(f"{field.name}={value}" if isinstance(value, str) else field.name)
    kinds = {"checkpoint" if isinstance(c, Checkpoint) else _tag(c) for c in inner}
    return "+".join([*found, *sorted(kinds - {"autocast"})])


def _tag(context: msgspec.Struct) -> str:
    return str(context.__struct_config__.tag)


# -- the guilty op --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Guilty:
    """The statements that diverge by themselves, none if none do, and the case of them alone."""

    numbers: tuple[int, ...] = ()
    case: Case | None = None

    @property
    def op(self) -> str:
        """Their ops, joined by ``+``; "" where none are guilty by themselves."""
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

    If none does alone, the first two of which one reads what the other makes, or that read the same
    value. diverges: whether a case shows the divergence. guess: an op that is tried before others;
    where a forward value diverges first, it is that value's.
    """
    body = list(statements(case.program.body))
    if len(body) == 1:
        return Guilty((0,), case)
    order = sorted(range(len(body)), key=lambda i: body[i].op != guess)
    for chosen in (*((i,) for i in order), *(_pairs(case) if pairs else ())):
        small = alone(case, chosen, values)
        if small is not None and diverges(small):
            return Guilty(chosen, small)
    return Guilty()


def alone(case: Case, chosen: tuple[int, ...], values: Values) -> Case | None:
    """Return the case with these statements only, on the values that the reference gives them.

    They are all that the program returns. None where a value that they need cannot be an input.
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
