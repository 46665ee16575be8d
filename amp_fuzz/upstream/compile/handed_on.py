"""Python functions of torch, called again from what they hand on to modes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from amp_fuzz.patching import patched

__all__ = ["handed_on"]


class _Again(TorchFunctionMode):
    """Call every function again from what it hands on to a mode, which may be less than it got."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


@contextmanager
def handed_on() -> Iterator[None]:
    """Lose the arguments that a function forgets to hand on to a mode.

    Modules leave their fast path where a mode is on. They do not see this one.
    """

    def has_torch_function(tensors: Iterable[Any]) -> bool:
        plain = (torch.Tensor, torch.nn.Parameter)
        return any(isinstance(t, torch.Tensor) and type(t) not in plain for t in tensors)

    with patched(torch.overrides, "has_torch_function", has_torch_function), _Again():
        yield
