"""Record the values that the reference passes to each statement of a case."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from amp_fuzz.backends import harness
from amp_fuzz.backends.reference import ReferenceRuntime
from amp_fuzz.cases.case import Case
from amp_fuzz.cases.inputs import bits_text
from amp_fuzz.cases.program import DTYPES, statements, uses

__all__ = ["LITERAL", "Taken", "Values", "capture"]

LITERAL = 1 << 14
"""The most elements of a value that is kept; of a larger one only the type is kept."""


@dataclass(frozen=True, slots=True)
class Taken:
    """A value that is passed to a statement.

    values: as in `TensorSpec`; "" if only the type is known, for a fake tensor or a large one.
    """

    shape: tuple[int, ...]
    dtype: str
    values: str
    requires_grad: bool


Values: TypeAlias = Mapping[tuple[int, str], Taken]
"""By statement number and name of a value that it reads: the value at that time."""


def capture(case: Case, runtime: ReferenceRuntime) -> Values:
    """Run a case under the reference and return the inputs of each statement's first call.

    A value requires grad if it ever does: a first pass may run under no_grad. Left out are values
    of dtypes that no input can have, statements after an error, and function transforms, whose
    tensors cannot be read.
    """
    found: dict[tuple[int, str], Taken] = {}
    body = list(statements(case.program.body))

    def mark(number: int, names: Mapping[str, Any]) -> None:
        for name in uses(body[number]):
            value, old = names.get(name), found.get((number, name))
            if not isinstance(value, torch.Tensor):
                continue
            if old is None and (new := _taken(value, literal=not runtime.runtime.fake)) is not None:
                found[number, name] = new
            elif old is not None and value.requires_grad:
                found[number, name] = replace(old, requires_grad=True)

    if case.plan.transform != "none":
        case = case.with_plan(transform="none")
    harness.run_marked(case, runtime.runtime, mark)
    return found


def _taken(value: torch.Tensor, *, literal: bool) -> Taken | None:
    dtype = str(value.dtype).removeprefix("torch.")
    if dtype not in DTYPES or value.layout is not torch.strided:
        return None
    small = literal and 0 < value.numel() <= LITERAL
    return Taken(tuple(value.shape), dtype, bits_text(value) if small else "", value.requires_grad)
