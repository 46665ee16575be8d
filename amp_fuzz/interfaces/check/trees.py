"""Trees of inputs and outputs, and the tensors in them.

Trees are those of `torch.utils._pytree`, dataclasses, and kinds of list, tuple and mapping that it
does not know, such as a subclass of dict. A tree that contains itself is a leaf there.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import suppress
from typing import Any

import torch
from torch.utils import _pytree as pytree

from amp_fuzz.interfaces.check.storage import (
    attributes,
    base_of,
    content,
    put_back,
    put_back_attributes,
)

__all__ = ["children", "leaves_of", "mapped"]

_COMMON = (list, tuple, dict)
_PLAIN = (torch.Tensor, int, float, str, bytes, type(None))


def leaves_of(tree: Any) -> list[tuple[str, Any]]:
    """Return the leaves of a tree, with the path to each: ``['loss']``, ``[0]``, ``.logits``."""
    return list(_leaves(tree, "", ()))


def _leaves(tree: Any, path: str, above: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    items = None if any(tree is outer for outer in above) else children(tree)
    if items is None:
        yield path, tree
        return
    for name, item in items:
        yield from _leaves(item, f"{path}{name}", (*above, tree))


def children(tree: Any) -> list[tuple[str, Any]] | None:
    """Return the items of a tree, by name, or None for a leaf, or if reading them raises."""
    kind = type(tree)
    if issubclass(kind, _PLAIN):
        return None
    try:
        if kind not in _COMMON and not pytree.tree_is_leaf(tree):
            return _nodes(tree)
        if dataclasses.is_dataclass(kind):
            return [(f".{name}", stored) for name, stored in _fields(tree)]
        if issubclass(kind, MutableMapping):
            return [(f"[{key!r}]", item) for key, item in _pairs(tree)]
        if issubclass(kind, (list, tuple)):
            base = list if issubclass(kind, list) else tuple
            return [(f"[{i}]", item) for i, item in enumerate(base.__iter__(tree))]
    except Exception:  # of the class's own code
        return None
    return None


def _nodes(tree: Any) -> list[tuple[str, Any]]:
    try:
        found = pytree.tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)[0]
    except ValueError:  # it was registered without names
        items = pytree.tree_leaves(tree, is_leaf=lambda node: node is not tree)
        keys = list(tree) if issubclass(type(tree), Mapping) else range(len(items))
        return [(f"[{key!r}]", item) for key, item in zip(keys, items, strict=True)]
    return [(pytree.keystr(path), item) for path, item in found]


def mapped(change: Callable[[Any], Any], tree: Any, above: tuple[Any, ...] = ()) -> Any:
    """Return a tree with each leaf mapped, in the order of `leaves_of`.

    A container of a class that allows no copy is returned itself.
    """
    items = None if any(tree is outer for outer in above) else children(tree)
    if items is None:
        return change(tree)
    made = [mapped(change, item, (*above, tree)) for _, item in items]
    if type(tree) in _COMMON:
        return dict(zip(tree, made, strict=True)) if type(tree) is dict else type(tree)(made)
    if not pytree.tree_is_leaf(tree):
        rest = iter(made)
        return pytree.tree_map(lambda _: next(rest), tree, is_leaf=lambda node: node is not tree)
    try:
        return _copied(tree, made)
    except Exception:  # of the class's own code
        return tree


def _copied(tree: Any, made: list[Any]) -> Any:
    """Return a copy of a tree that pytrees do not know, with other items."""
    kind = type(tree)
    if issubclass(kind, tuple):
        return kind(made)
    again = _shallow(tree)
    if dataclasses.is_dataclass(kind):
        for (name, _), item in zip(_fields(tree), made, strict=True):
            object.__setattr__(again, name, item)
        return again
    base = base_of(tree)
    if base is None:
        for (key, _), item in zip(_pairs(tree), made, strict=True):
            again[key] = item
    else:
        keys = content(tree)[: len(made)] if issubclass(base, dict) else []
        put_back(again, [*keys, *made])
    return again


def _shallow(tree: Any) -> Any:
    try:
        return copy.copy(tree)
    except Exception:  # a class that cannot be written
        base: Any = base_of(tree) or object
        again = base.__new__(type(tree))
        put_back_attributes(again, attributes(tree))
        return again  # without items


def _pairs(tree: Any) -> list[tuple[Any, Any]]:
    """Return the keys and values of a mapping."""
    if base_of(tree) is None:
        return [(key, tree[key]) for key in tree]
    items = content(tree)
    half = len(items) // 2
    return list(zip(items[:half], items[half:], strict=True))


def _fields(tree: Any) -> list[tuple[str, Any]]:
    """Return the fields of a dataclass that are set, with their values."""
    found = []
    for field in dataclasses.fields(tree):
        with suppress(Exception):  # unset, or computed by the class's own code
            found.append((field.name, getattr(tree, field.name)))
    return found
