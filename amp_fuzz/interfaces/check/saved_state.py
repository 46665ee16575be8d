"""Save all state that a call may change, and restore it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

__all__ = ["Kept"]


class Kept:
    """The saved state that a call may change.

    tensors, modules, generators: their values, gradients, attributes and states are restored.
    objects: the user's, whose attributes are restored. caches: of functions; they are emptied,
    since a call on fake tensors would leave fake results.
    """

    def __init__(
        self,
        tensors: Iterable[torch.Tensor],
        modules: Iterable[torch.nn.Module],
        objects: Iterable[Any] = (),
        generators: Iterable[Any] = (),
        caches: Sequence[Any] = (),
    ) -> None:
        self._tensors = [_Tensor(t) for t in tensors]
        self._attributes = [(m, dict(m.__dict__)) for m in (*modules, *objects)]
        self._containers = [
            (value, value.copy())
            for _, attributes in self._attributes
            for value in attributes.values()
            if isinstance(value, (dict, list, set))
        ]
        self._caches = caches
        self._random = [_keep(g) for g in generators]
        self._random += [_keep_torch(), _keep_python(), _keep_numpy()]

    def begin(self, seed: int) -> None:
        """Start a call: no gradients yet, no caches, and every generator from the seed."""
        for tensor in self._tensors:
            tensor.of.grad = None
        self._forget()
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002

    def restore(self) -> None:
        """Restore everything."""
        for owner, attributes in self._attributes:
            owner.__dict__.clear()
            owner.__dict__.update(attributes)
        for container, content in self._containers:
            container.clear()
            if isinstance(container, list):
                container.extend(content)
            else:
                container.update(content)
        for tensor in self._tensors:
            tensor.restore()
        for back in self._random:
            back()
        self._forget()

    def _forget(self) -> None:
        for cache in self._caches:
            cache.cache_clear()


class _Tensor:
    """The saved state of a tensor: its memory and its values."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.of = tensor
        self.grad = tensor.grad if tensor.is_leaf else None
        self.requires_grad = tensor.requires_grad
        with torch.no_grad():
            self.data = tensor.data
            self.values = _once(self.data).clone()

    def restore(self) -> None:
        tensor = self.of
        if tensor.requires_grad != self.requires_grad:
            tensor.requires_grad_(self.requires_grad)
        with torch.inference_mode() if tensor.is_inference() else torch.no_grad():
            if _moved(tensor, self.data):
                tensor.data = self.data
            _once(self.data).copy_(self.values)
        if tensor.is_leaf:
            tensor.grad = self.grad


def _once(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view with one of each group of elements that share memory (`expand`)."""
    if tensor.layout is not torch.strided:
        return tensor
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _moved(tensor: torch.Tensor, data: torch.Tensor) -> bool:
    """Return whether a tensor has other memory now (``p.data = p.data.half()``)."""
    if (tensor.dtype, tensor.shape, tensor.layout) != (data.dtype, data.shape, data.layout):
        return True
    return tensor.layout is torch.strided and tensor.data_ptr() != data.data_ptr()


def _keep(generator: Any) -> Callable[[], Any]:
    """Return a function that restores a generator of torch, NumPy or Python."""
    if isinstance(generator, torch.Generator):
        kept = generator.get_state()
        return lambda: generator.set_state(kept)
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        state = bits.state
        return lambda: setattr(bits, "state", state)
    drawn = generator.getstate()
    return lambda: generator.setstate(drawn)


def _keep_torch() -> Callable[[], Any]:
    state = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None

    def back() -> None:
        torch.set_rng_state(state)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)

    return back


def _keep_python() -> Callable[[], Any]:
    state = random.getstate()
    return lambda: random.setstate(state)


def _keep_numpy() -> Callable[[], Any]:
    state = np.random.get_state()  # noqa: NPY002
    return lambda: np.random.set_state(state)  # noqa: NPY002
