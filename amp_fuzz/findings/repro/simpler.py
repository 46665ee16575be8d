"""Make a case simpler to read where the minimiser had no reason to: its values, its outputs.

Each simpler case is judged again: it must diverge in the same way, and the last as the same bug.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import torch

from amp_fuzz.cases.case import Case
from amp_fuzz.cases.inputs import bits_text
from amp_fuzz.cases.program import Node, Region, TensorSpec, statements, uses

__all__ = ["Seen", "counting", "sevenths", "simpler"]


@dataclass(frozen=True, slots=True)
class Seen:
    """How a case diverges."""

    kind: str
    where: str
    expected: str
    observed: str

    def is_alike(self, other: Seen) -> bool:
        """Whether the other is the same divergence, of other values."""
        errors = {s.observed.partition(":")[0] for s in (self, other) if s.kind == "raise"}
        return (self.kind, self.where) == (other.kind, other.where) and len(errors) < 2


Judged = Callable[[Case], "Seen | None"]
Step = Callable[[Case, Seen], Iterator[Case]]


def simpler(
    case: Case, first: Seen, judged: Judged, known: Callable[[Case], str]
) -> tuple[Case, Seen]:
    """Return the simplest case found that diverges as a case does, and how.

    first: how the case diverges. judged: returns how another does, or None. known: returns the ids
    of the bugs that explain it.
    """
    small, seen = case, first
    for step in _STEPS:
        small = next(step(small, first), small)
    found = judged(small) if small != case else first
    if found is not None and first.is_alike(found):
        seen = found
    else:
        small = case
        for step in _STEPS:
            for candidate in step(small, seen):
                found = judged(candidate)
                if found is not None and first.is_alike(found):
                    small, seen = candidate, found
                    break
    if small != case and known(small) != known(case):
        return case, first
    return small, seen


def _one_output(case: Case, seen: Seen) -> Iterator[Case]:
    """Return one output: the one that diverges, or one that gives the gradient."""
    outputs = case.program.outputs
    names = (seen.where,) if seen.where in outputs else outputs
    if len(outputs) > 1:
        yield from (case.with_program(outputs=(name,)) for name in names)


def _no_gradients(case: Case, seen: Seen) -> Iterator[Case]:
    """Let no input require gradients, and run no backward pass."""
    if seen.where.endswith(".grad") or not any(s.requires_grad for s in case.program.inputs):
        return
    inputs = [
        msgspec.structs.replace(s, role="input") if s.requires_grad else s
        for s in case.program.inputs
    ]
    yield case.with_program(inputs=tuple(inputs)).with_plan(backward="none")
    if case.plan.backward != "none":
        yield case.with_plan(backward="none")


def _read_statements(case: Case, seen: Seen) -> Iterator[Case]:
    """Leave out statements whose results nothing reads."""
    if len(case.program.outputs) > 1:
        return  # each may be the one that diverges
    body = _read(case.program.body, set(case.program.outputs))
    if body and body != case.program.body:
        yield case.with_program(body=body)


def _read(body: tuple[Node, ...], read: set[str]) -> tuple[Node, ...]:
    """Return the nodes of a body that are read, or that may write; names read are added."""
    kept: list[Node] = []
    for node in reversed(body):
        if isinstance(node, Region):
            inner = _read(node.body, read)
            kept += [Region(node.context, inner)] if inner else []
        elif node.form != "function" or read & set(node.outputs):
            read |= set(uses(node))
            kept.append(node)
    return tuple(reversed(kept))


def _read_inputs(case: Case, seen: Seen) -> Iterator[Case]:
    """Leave out inputs that no statement reads."""
    read = {name for s in statements(case.program.body) for name in uses(s)}
    read |= set(case.program.outputs)
    kept = tuple(s for s in case.program.inputs if s.name in read)
    if 0 < len(kept) < len(case.program.inputs):
        yield case.with_program(inputs=kept)


def _values(case: Case, seen: Seen) -> Iterator[Case]:
    """Let all floating-point inputs be ones, or count from one, or be sevenths."""
    places = [i for i, spec in enumerate(case.program.inputs) if _may_be_any(spec)]
    for fill in (torch.ones, counting, sevenths):
        yield _filled(case, places, fill)


def _may_be_any(spec: TensorSpec) -> bool:
    return spec.dtype.startswith(("float", "bfloat")) and spec.domain in _FREE and not spec.values


_FREE = ("normal", "zeros", "uniform", "integers", "positive", "unit", "ties")


def counting(shape: Sequence[int]) -> torch.Tensor:
    """Return the numbers from one, in a shape."""
    count = torch.Size(shape).numel()
    return torch.arange(1.0, count + 1).reshape(tuple(shape))


def sevenths(shape: Sequence[int]) -> torch.Tensor:
    """Return sevenths from -3 to 3, again and again: a 16-bit dtype rounds them."""
    return (counting(shape) % 7 - 3) / 7


def _filled(case: Case, places: Sequence[int], fill: Callable[..., torch.Tensor]) -> Case:
    specs = list(case.program.inputs)
    for i in places:
        value = fill(specs[i].shape).to(getattr(torch, specs[i].dtype))
        specs[i] = msgspec.structs.replace(specs[i], values=bits_text(value), domain="normal")
    return case.with_program(inputs=tuple(specs))


_STEPS: Sequence[Step] = (
    _one_output,
    _read_statements,
    _read_inputs,
    _no_gradients,
    _values,
)
