"""CPU tensors that stay CPU tensors where all others are taken for those of another device.

Some requests about a device that is elsewhere are answered here, on CPU tensors that the reference
takes for the device's (`reference.as_device`). In a case with tensors of two devices, those of the
CPU must be told from them: they are known by their memory, and so is all that is computed from them
alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from amp_fuzz.reference import dispatch
from amp_fuzz.reference.casts import unaliased

__all__ = ["Residents"]


class Residents(TorchDispatchMode):
    """Follows some tensors, and whatever is computed from them alone.

    A tensor without dimensions that comes from nowhere, such as the scale of a ``GradScaler``, is
    made on the device of the tensor that it meets.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory: dict[int, torch.UntypedStorage] = {}  # held, or others would get its place
        for tensor in tensors:
            self.add(tensor)

    def add(self, tensor: torch.Tensor) -> None:
        """Follow one more tensor."""
        memory = tensor.untyped_storage()
        self._memory[memory._cdata] = memory

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is one of them."""
        return tensor.untyped_storage()._cdata in self._memory

    def like(self, made: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Return a fresh tensor, which is one of them if another is."""
        if self.holds(other):
            self.add(made)
        return made

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Tell them from the tensors that are taken for another device's, for a block."""
        with unaliased(self.holds), self:
            yield

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with dispatch.kept():
            out = func(*args, **(kwargs or {}))
        given = [a for a in tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)]
        if self._alone(given):
            for value in tree_leaves(out):
                if isinstance(value, torch.Tensor):
                    self.add(value)
        return out

    def _alone(self, given: Iterable[torch.Tensor]) -> bool:
        """Return whether a result of some tensors is one of them."""
        own: list[int] = []
        others: list[int] = []
        for tensor in given:
            (own if self.holds(tensor) else others).append(tensor.dim())
        return bool(own) and (not others or (any(own) and not any(others)))
