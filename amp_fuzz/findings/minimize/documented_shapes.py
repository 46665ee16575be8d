"""Check that a candidate has documented shapes where torch does not check them."""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from torch.overrides import TorchFunctionMode

from amp_fuzz.backends.reference import ReferenceRuntime
from amp_fuzz.cases.case import Case, Plan
from amp_fuzz.cases.program import statements
from amp_fuzz.catalogue.unchecked import UNCHECKED

__all__ = ["documented"]


class _Undocumented(ValueError):
    """A call has shapes for which it is not documented."""


class _Checked(TorchFunctionMode):
    """Reject such a call before its kernel reads out of bounds. refused: whether one was."""

    def __init__(self) -> None:
        super().__init__()
        self.refused = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        fits = UNCHECKED.get(getattr(func, "__name__", ""))
        if fits is not None and not kwargs and not fits(*map(_shape, args)):
            self.refused = True
            raise _Undocumented(func.__name__)
        return func(*args, **(kwargs or {}))


def _shape(arg: Any) -> Any:
    """Return an argument with shapes instead of tensors."""
    if isinstance(arg, torch.Tensor):
        return tuple(arg.shape)
    return [_shape(a) for a in arg] if isinstance(arg, (list, tuple)) else arg


def documented(case: Case, reference: ReferenceRuntime) -> bool:
    """Return whether each call that torch does not check has documented shapes.

    Only programs with such an op run: once, under the contexts of the case, and without anything
    that does not affect shapes, such as backward passes.
    """
    if not any(s.op in UNCHECKED for s in statements(case.program.body)):
        return True
    plain = msgspec.structs.replace(case, plan=Plan(contexts=case.plan.contexts, backward="none"))
    with _Checked() as checked:
        reference.run(plain)
    return not checked.refused
