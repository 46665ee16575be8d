"""Observe inner results: those of each function of torch that a callable calls.

Without values only dtypes and shapes can be compared, and most inner differences do not reach the
output: a loss is float32 whatever the dtypes of its layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from amp_fuzz.interfaces.check.trace import in_backward
from amp_fuzz.interfaces.check.trees import leaves_of

__all__ = ["Inside"]


class Inside(TorchFunctionMode):
    """Keeps the tensors that functions of torch return while it is active, by name, in order.

    A name is the path of the calling submodule, the function, and the number of the call:
    ``layers.0.mlp: silu``, ``relu #2``. stack: paths of the submodules being called, outermost
    first.
    """

    def __init__(self, stack: Sequence[str]) -> None:
        super().__init__()
        self.results: dict[str, torch.Tensor] = {}
        self._stack = stack
        self._calls: Counter[str] = Counter()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if in_backward() or getattr(func, "__name__", "") in ("__get__", "__set__"):
            return made
        leaves = [(path, t) for path, t in leaves_of(made) if isinstance(t, torch.Tensor)]
        if leaves:
            where = self._stack[-1] if self._stack else ""
            name = ": ".join(filter(None, (where, getattr(func, "__name__", "?"))))
            self._calls[name] += 1
            number = f" #{self._calls[name]}" if self._calls[name] > 1 else ""
            self.results |= {f"{name}{number}{path}": t.detach() for path, t in leaves}
        return made
