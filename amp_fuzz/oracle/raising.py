"""The call that raises in a case, as a case of its own: alone, and without autocast."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from amp_fuzz.backends import harness
from amp_fuzz.backends.reference import ReferenceRuntime, within
from amp_fuzz.cases.build import argument, call, case
from amp_fuzz.cases.case import Case
from amp_fuzz.cases.inputs import bits_text
from amp_fuzz.cases.program import DTYPES, ProgramError, TensorSpec
from amp_fuzz.catalogue import CATALOGUE, check
from amp_fuzz.reference.shadow.copies import is_plain

__all__ = ["raising_call"]

_ELEMENTS = 4096  # of a tensor that a case holds as bits


def raising_call(of: Case, runtime: ReferenceRuntime) -> Case | None:
    """Return the innermost call of an op that raises under the reference, or None.

    None too if the catalogue lacks the op, or if a case cannot hold its arguments: fake tensors
    have no values.
    """
    last = _Last()  # type: ignore[no-untyped-call]
    harness.run(of, within(runtime.runtime, lambda: last))
    if last.call is None:
        return None
    overload, args, kwargs = last.call
    name = overload.name().removesuffix(".default")
    specs: dict[int, TensorSpec] = {}
    if name not in _ops():
        return None
    try:
        given = [_written(value, specs) for value in args]
        named = {key: _written(value, specs) for key, value in kwargs.items()}
        outputs = " ".join(f"v{i}" for i in range(len(overload._schema.returns)))
        made = call(_ops()[name], *given, to=outputs, form="overload", **named)
        alone = case([*specs.values()], made, contexts=(), backward="none")
        check(alone.program)
    except (ProgramError, ValueError):
        return None
    return alone


class _Last(TorchDispatchMode):
    """Keeps the last call that raised."""

    call: tuple[Any, tuple[Any, ...], dict[str, Any]] | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except Exception:
            self.call = func, args, kwargs or {}
            raise


@cache
def _ops() -> dict[str, str]:
    """Return the op of the catalogue that is an overload, by the overload's name."""
    ops = (op for op in CATALOGUE.values() if "overload" in op.forms and len(op.overloads) == 1)
    return {op.overloads[0]: op.name for op in ops}


def _written(value: Any, specs: dict[int, TensorSpec]) -> Any:
    """Return an argument as a case has it. specs: gets the tensors."""
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        plain = type(value) in (torch.Tensor, torch.nn.Parameter) and is_plain(value)
        if not plain or dtype not in DTYPES or value.numel() > _ELEMENTS:
            raise ValueError("no case holds it")
        spec = TensorSpec(f"x{len(specs)}", tuple(value.shape), dtype, values=bits_text(value))
        return specs.setdefault(id(value), spec).name
    if isinstance(value, (list, tuple)):
        return [_written(one, specs) for one in value]
    if value is None or isinstance(value, (bool, int, float)):
        return argument(value)
    raise ValueError("no case holds it")
