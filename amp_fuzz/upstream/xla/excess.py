"""The excess precision of XLA: later ops use a 16-bit result as it was before rounding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from amp_fuzz.reference import dispatch

__all__ = ["Excess", "flat", "note", "noting", "place"]

# -- excess precision ---------------------------------------------------------------------------

_aten = torch.ops.aten
_16_BIT = (torch.bfloat16, torch.float16)


class Excess(TorchDispatchMode):
    """Compute with 16-bit results as they were before rounding.

    The mode keeps the float32 result of an op beside each 16-bit result, and later ops use it: XLA
    leaves out a rounding if it would widen the result again. Values that are observed are still
    rounded, and so are the inputs of the first op.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._wide: dict[Any, tuple[torch.Tensor, torch.Tensor, str]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an op, and run it in float32 beside it."""
        kwargs = kwargs or {}
        schema = func._schema
        if schema.is_mutable:
            for tensor in flat((args, kwargs)):
                self._forget(tensor)
            return self._plain(func, args, kwargs)
        views = any(r.alias_info is not None for r in schema.returns)
        seen: list[str] = []
        inputs = tree_map(lambda a: self._widened(a, seen, views=views), (args, kwargs))
        if func is _aten._to_copy.default:
            dtype = kwargs.get("dtype")
            if not seen or dtype not in (None, torch.float32):
                return self._plain(func, args, kwargs)
            note(seen)
            with dispatch.exclude():
                return inputs[0][0].clone()
        out = self._plain(func, args, kwargs)
        made = [t for t in flat(out) if t.is_floating_point()]
        narrow = [t for t in made if t.dtype in _16_BIT]
        if not made or (views and not seen) or not (seen or narrow) or kwargs.get("dtype"):
            return out
        try:
            with dispatch.exclude():
                wide = func(*inputs[0], **inputs[1])
        except RuntimeError:  # no kernel for these dtypes
            return out
        note([] if views else seen)
        pairs = list(zip(flat(out), flat(wide), strict=True))
        name = seen[0] if views else func.overloadpacket.__name__
        for own, other in pairs:
            if own.dtype in _16_BIT and other.dtype is torch.float32:
                self._wide[place(own)] = (own, other, name)
        return out if narrow else wide

    def _plain(self, func: Any, args: Any, kwargs: Any) -> Any:
        with dispatch.kept():
            return func(*args, **kwargs)

    def _widened(self, value: Any, seen: list[str], *, views: bool) -> Any:
        if not isinstance(value, torch.Tensor) or value.dtype not in _16_BIT:
            return value
        if (found := self._wide.get(place(value))) is not None:
            seen.append(found[2])
            return found[1]
        with dispatch.exclude():
            return value if views else value.float()

    def _forget(self, tensor: torch.Tensor) -> None:
        memory = tensor.untyped_storage()._cdata
        self._wide = {key: kept for key, kept in self._wide.items() if key[0] != memory}


def place(tensor: torch.Tensor) -> Any:
    """Return the identity of a tensor: its memory, its dtype and its geometry."""
    where = tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
    return (tensor.untyped_storage()._cdata, tensor.dtype, *where)


def flat(tree: Any) -> list[torch.Tensor]:
    """Return the tensors of a tree, in order."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


_noted: list[dict[str, None]] = []


@contextmanager
def noting() -> Iterator[dict[str, None]]:
    """Collect the names of the ops whose rounding `Excess` leaves out in a block."""
    _noted.append({})
    try:
        yield _noted[-1]
    finally:
        _noted.pop()


def note(names: Iterable[str]) -> None:
    """Record ops whose rounding was left out."""
    for names_ in _noted:
        names_.update(dict.fromkeys(names))
