"""Save all state that a call may change, and restore it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map

from amp_fuzz.backends.harness import bits
from amp_fuzz.interfaces.check.storage import (
    attributes,
    base_of,
    content,
    put_back,
    put_back_attributes,
)

__all__ = ["Kept"]

Named: TypeAlias = Iterable[tuple[str, Any]]
"""Values with their names for reports."""


class Kept:
    """The saved state that a call may change.

    tensors, stateful: by name; their values, gradients and states are restored. owners: modules
    and the user's objects, by name; their attributes are restored. containers: by name; their items
    are restored. caches: of functions; they are emptied, since a call on fake tensors would leave
    fake results.
    """

    def __init__(
        self,
        tensors: Named,
        owners: Named,
        containers: Named = (),
        stateful: Named = (),
        caches: Named = (),
    ) -> None:
        self._lost: dict[str, str] = {}
        self._tensors = self._all(tensors, _Tensor)
        self._attributes = self._all(owners, lambda owner: (owner, attributes(owner)))
        held = [
            (f"{name}.{attribute}" if name else attribute, value)
            for name, (_, stored) in self._attributes
            for attribute, value in stored.items()
            if base_of(value)
        ]
        self._containers = self._all((*containers, *held), lambda c: (c, content(c)))
        self._caches = list(caches)
        self._stateful = self._all(stateful, _keep)
        self._stateful += [("torch", _keep_torch()), ("random", _keep_python())]
        self._stateful += [("numpy.random", _keep_numpy())]

    def begin(self, seed: int) -> None:
        """Start a call: no gradients yet, no caches, and every generator from the seed."""
        for _, tensor in self._tensors:
            tensor.of.grad = None
        self._all(self._caches, lambda cache: cache.cache_clear())
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002

    def restore(self) -> tuple[str, ...]:
        """Restore everything that changed. Return what cannot be restored, each with the reason."""
        self._all(self._attributes, lambda one: put_back_attributes(*one))
        self._all(self._containers, lambda one: put_back(*one))
        self._all(self._tensors, lambda tensor: tensor.restore())
        self._all(self._stateful, lambda back: back())
        self._all(self._caches, lambda cache: cache.cache_clear())
        return tuple(f"{name or 'self'} ({why})" for name, why in self._lost.items())

    def _all(self, of: Named, do: Callable[[Any], Any]) -> list[tuple[str, Any]]:
        """Return what a function makes of each value; keep the names of those where it raises."""
        made = []
        for name, value in of:
            try:
                made.append((name, do(value)))
            except Exception as error:  # of a user's class, or of a kind of tensor
                self._lost.setdefault(name, _shown(error))
        return made


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
            if not _unchanged(_once(self.data), self.values):
                _once(self.data).copy_(self.values)
        if tensor.is_leaf:
            tensor.grad = self.grad


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0][:160]


def _unchanged(now: torch.Tensor, before: torch.Tensor) -> bool:
    """Return whether a tensor has the same bits: memory may be read-only (`numpy.memmap`)."""
    if now.is_meta:
        return True
    if now.layout is not torch.strided or now.is_quantized:
        return False
    return torch.equal(bits(now), bits(before))


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


def _keep(stateful: Any) -> Callable[[], Any]:
    """Return a function that restores an optimiser, or a generator of torch, NumPy or Python."""
    if isinstance(stateful, torch.optim.Optimizer):
        return _keep_optimizer(stateful)
    if isinstance(stateful, torch.Generator):
        kept = stateful.get_state()
        return lambda: stateful.set_state(kept)
    if isinstance(stateful, np.random.Generator):
        bits = stateful.bit_generator
        state = bits.state
        return lambda: setattr(bits, "state", state)
    drawn = stateful.getstate()
    return lambda: stateful.setstate(drawn)


def _keep_optimizer(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    state = [(key, own, _again(own)) for key, own in optimizer.state.items()]
    groups = [(group, _again(group)) for group in optimizer.param_groups]
    options = [
        {k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups
    ]
    held = [
        leaf
        for leaf in tree_leaves([options, *(own for _, own, _ in state)])
        if isinstance(leaf, torch.Tensor)
    ]
    values = [t.detach().clone() for t in held]

    def back() -> None:
        optimizer.state.clear()
        for key, own, before in state:
            optimizer.state[key] = own
            put_back(own, content(before))
        optimizer.param_groups[:] = [group for group, _ in groups]
        for group, before in groups:
            put_back(group, content(before))
        with torch.no_grad():
            for tensor, value in zip(held, values, strict=True):
                tensor.copy_(value)

    return back


def _again(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the same tensors and numbers in new containers."""
    return tree_map(lambda leaf: leaf, tree)  # type: ignore[no-any-return]


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
