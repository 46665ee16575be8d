"""Read and write what an object stores, whatever its class allows.

A class may forbid writing (a frozen dataclass, diffusers' ``FrozenDict``), compute attributes
(properties, ``__getattr__``), or compare in its own way (``__eq__``). Here no code of the class
runs: attributes are read in the object's ``__dict__`` and slots, items by the methods of the
built-in base class, and two values are the same if they are one object.
"""

from __future__ import annotations

import operator
from collections import OrderedDict, deque
from collections.abc import Sequence
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any

__all__ = ["attribute", "attributes", "base_of", "content", "put_back", "put_back_attributes"]

_BASES: tuple[type[Any], ...] = (OrderedDict, dict, list, set, deque)


def base_of(value: object) -> type[Any] | None:
    """Return the built-in class of a mutable container, or None."""
    kind = type(value)
    if not issubclass(kind, _BASES):
        return None
    return next(base for base in _BASES if issubclass(kind, base))


def content(container: Any) -> list[Any]:
    """Return the items of a container with a base; of a mapping the keys, then the values."""
    base = base_of(container)
    assert base is not None
    if issubclass(base, dict):
        return [*base.keys(container), *base.values(container)]
    return list(base.__iter__(container))


def put_back(container: Any, items: Sequence[Any]) -> None:
    """Write the items that `content` returned, unless they are there."""
    if _alike(content(container), items):
        return
    base = base_of(container)
    assert base is not None
    base.clear(container)
    if issubclass(base, dict):
        half = len(items) // 2
        for key, value in zip(items[:half], items[half:], strict=True):
            base.__setitem__(container, key, value)
    elif base is set:
        set.update(container, items)
    else:
        base.extend(container, items)


def attributes(owner: object) -> dict[str, Any]:
    """Return the attributes that an object stores, in its ``__dict__`` and in slots."""
    return {**(_dict_of(owner) or {}), **_in_slots(owner)}


def attribute(owner: object, name: str) -> Any:
    """Return an attribute that an object stores or inherits, without computing it, or None."""
    stored = _dict_of(owner) or {}
    if name in stored:
        return stored[name]
    return next((vars(kind)[name] for kind in type(owner).__mro__ if name in vars(kind)), None)


def put_back_attributes(owner: object, before: dict[str, Any]) -> None:
    """Write the attributes that `attributes` returned, where they changed."""
    slots, stored = _slots_of(type(owner)), _dict_of(owner)
    for name, now in _in_slots(owner).items():
        if name not in before:
            slots[name].__delete__(owner)
        elif before[name] is not now:
            slots[name].__set__(owner, before[name])
    for name in slots.keys() & before.keys() - _in_slots(owner).keys():
        slots[name].__set__(owner, before[name])
    if stored is not None:
        kept = {name: value for name, value in before.items() if name not in slots}
        put_back(stored, [*kept.keys(), *kept.values()])


def _alike(now: Sequence[Any], before: Sequence[Any]) -> bool:
    return len(now) == len(before) and all(map(operator.is_, now, before))


def _dict_of(owner: object) -> dict[str, Any] | None:
    """Return the dict that holds an object's attributes; a class may have its own ``__dict__``."""
    for kind in type(owner).__mro__:
        stored = vars(kind).get("__dict__")
        if type(stored) is GetSetDescriptorType:
            found = stored.__get__(owner)
            return found if type(found) is dict else None  # that of a class is read-only
    return None


def _slots_of(kind: type) -> dict[str, Any]:
    return {
        name: member
        for base in reversed(kind.__mro__)
        for name, member in vars(base).items()
        if type(member) is MemberDescriptorType
    }


def _in_slots(owner: object) -> dict[str, Any]:
    found = {}
    for name, member in _slots_of(type(owner)).items():
        try:
            found[name] = member.__get__(owner)
        except AttributeError:  # empty
            continue
    return found
