"""Which programs an export is given, and how it traces them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from amp_fuzz.cases.case import Case, Entry

__all__ = ["names_of", "without_grad"]

_FUNCTIONS: tuple[Entry, ...] = ("custom_fwd", "cast_inputs", "setup_context")


def names_of(program: Callable[..., Any]) -> dict[str, Any] | None:
    """Return the names of the source of a case's program, which are its own.

    None: `wrap` was given a function of a user's (`amp_fuzz.check`).
    """
    names: dict[str, Any] = inspect.unwrap(program).__globals__
    return None if "__name__" in names else names  # those of a module


def without_grad(case: Case) -> bool:
    """Return whether gradients are off at the first call of a case's program, which is exported.

    They are in the forward of an autograd.Function. A pass that is interrupted calls the program
    itself.
    """
    inside = case.plan.entry in _FUNCTIONS or case.plan.checkpoint == "reentrant"
    return inside and not case.plan.interrupted
