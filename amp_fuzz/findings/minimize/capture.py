"""What the reference hands to each statement of a case: the values that may take its place."""

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
"""Elements up to which a value is kept as it is; of a larger one only the type is."""


@dataclass(frozen=True, slots=True)
class Taken:
    """A value as a statement is given it.

    values: as in `TensorSpec`; "" where only the type is known: of a fake tensor, or a large one.
    """

    shape: tuple[int, ...]
    dtype: str
    values: str
    requires_grad: bool


Values: TypeAlias = Mapping[tuple[int, str], Taken]
"""By the number of a statement and the name of a value that it reads: the value at that time."""


def capture(case: Case, runtime: ReferenceRuntime) -> Values:
    """Run a case under the reference and return what its statements are given the first time.

    A value requires grad if it ever does: a first pass may stand under no_grad. Values of dtypes
    that no input can have are left out, and so is what comes after an error. A function transform
    is left out too: what it passes are not tensors that can be read.
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
