"""Trees of inputs and outputs, and the tensors in them.

Trees are those of `torch.utils._pytree`, dataclasses, and kinds of list, tuple and mapping that it
does not know, such as a subclass of dict.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, MutableMapping
from typing import Any

from torch.utils import _pytree as pytree

__all__ = ["leaves_of", "mapped"]


def leaves_of(tree: Any) -> list[tuple[str, Any]]:
    """Return the leaves of a tree, with the path to each: ``['loss']``, ``[0]``, ``.logits``."""
    found: list[tuple[str, Any]] = []
    for path, leaf in pytree.tree_flatten_with_path(tree)[0]:
        where = pytree.keystr(path)
        items = _items(leaf)
        if items is None:
            found.append((where, leaf))
        else:
            for name, item in items:
                found += [(f"{where}{name}{more}", value) for more, value in leaves_of(item)]
    return found


def mapped(change: Callable[[Any], Any], tree: Any) -> Any:
    """Return a tree with each leaf mapped, in the order of `leaves_of`."""

    def leaf(value: Any) -> Any:
        items = _items(value)
        if items is None:
            return change(value)
        made = [mapped(change, item) for _, item in items]
        if isinstance(value, tuple):
            return type(value)(made)
        again = copy.copy(value)
        if dataclasses.is_dataclass(value):
            for field, item in zip(dataclasses.fields(value), made, strict=True):
                _set(again, field.name, item)
        elif isinstance(value, list):
            again[:] = made
        else:
            for key, item in zip(value, made, strict=True):
                again[key] = item
        return again

    return pytree.tree_map(leaf, tree)


def _items(leaf: Any) -> list[tuple[str, Any]] | None:
    """Return the items of a pytree leaf that is a tree for us, by name, or None."""
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        return [(f".{f.name}", getattr(leaf, f.name)) for f in dataclasses.fields(leaf)]
    if isinstance(leaf, MutableMapping):
        return [(f"[{key!r}]", leaf[key]) for key in leaf]
    if isinstance(leaf, (list, tuple)):
        return [(f"[{i}]", item) for i, item in enumerate(leaf)]
    return None


def _set(owner: Any, name: str, value: Any) -> None:
    try:
        setattr(owner, name, value)
    except dataclasses.FrozenInstanceError:
        object.__setattr__(owner, name, value)
