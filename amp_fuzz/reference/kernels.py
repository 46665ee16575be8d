"""The kernels of the reference on the dispatcher: where the rules of `Semantics` are asked."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from amp_fuzz.policies import tables
from amp_fuzz.policies.tables import Rule
from amp_fuzz.reference import dispatch
from amp_fuzz.reference.calls import Call
from amp_fuzz.reference.casts import tensors_of
from amp_fuzz.reference.state import here, own_table

__all__ = [
    "declare_op",
    "declared_bodies",
    "register",
    "register_ahead",
    "register_bodies",
    "register_temporarily",
    "temporary",
]

# (overload, key) of the ops that have a kernel for good, and of those that have one for a block.
_registered: set[tuple[str, str]] = set()
_passing: set[tuple[str, str]] = set()
_keys: list[str] = [dispatch.OWN]
_blocks: list[None] = []  # one for each block of `temporary`

# By `id`, a collection of ops that all have their kernels, on how many keys, and those that pass.
_complete: dict[int, tuple[Collection[str], int, frozenset[str]]] = {}

# Ops of the user's that have no policy: what their bodies call is cast.
_bodies: set[str] = set()


def _kernel(name: str, overload: Any, key: str) -> Callable[..., Any]:
    """Return the kernel for an overload: one for all devices, since they share the key."""
    # What the batching rule of an op calls is no call of the program.
    whole = key == dispatch.FIRST and not dispatch.is_composite(overload)
    numbers = name.endswith((".Tensor", ".Tensor_mode")) or "floor_divide" in name

    def onward(call: Call) -> Any:
        if whole or (numbers and _has_number(call.args)):
            with dispatch.exclude():
                return overload(*call.args, **call.kwargs)
        return overload.redispatch(dispatch.after(call.keyset, key), *call.args, **call.kwargs)

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        state = here()
        tensors = tensors_of((*args, *kwargs.values()))
        call = Call(name, overload, overload, args, kwargs, tensors, state, onward, keyset)
        found = state.semantics.rule(call)
        if state.flips is not None:
            found = state.flips.treatment(call, found)
        return state.semantics.call(call, found)

    return kernel


def _has_number(args: Sequence[Any]) -> bool:
    """Return whether a Python number stands where the overload has a tensor.

    The dispatcher has unwrapped it: then an op can be called, but not redispatched.
    """
    return any(isinstance(a, bool | int | float | complex) for a in args[:2])


def register(names: Collection[str]) -> frozenset[str]:
    """Put kernels on ops for good, those that this torch has.

    Return those that get none: ops that are in no table of ours and no ops of the user's. Under
    another table their kernels would still be asked; and inside a function transform torch hands no
    number on to a kernel, so that a call with one would fail. See `register_temporarily`.

    names: the same collection again costs nothing, once all of its ops have their kernels.
    """
    known, keys, passing = _complete.get(id(names), ((), 0, frozenset[str]()))
    if known is not names or keys != len(_keys):
        held = tables.all_overloads() | tables.declared_overloads()
        passing = frozenset(names) - held
        places = [place for place in itertools.product(names, _keys) if place[0] not in passing]
        _register(places)
        if _registered.issuperset(places):
            _complete[id(names)] = names, len(_keys), passing
    return passing


def _register(places: Iterable[tuple[str, str]]) -> None:
    for name, key in places:
        if (name, key) in _registered or (name, key) in _passing:
            continue
        overload = dispatch.overload_of(name)
        if overload is None and "::" in name:
            continue  # an op of the user's, which may still come
        _registered.add((name, key))
        if overload is not None:  # this torch is older or newer than the rule
            dispatch.register(name, _kernel(name, overload, key), key)


def register_ahead() -> None:
    """Put the kernels before the function transforms, too, on every op with a policy anywhere.

    An op without one on this device is whole for the transforms, as it is for autocast.
    """
    if dispatch.FIRST not in _keys:
        _keys.append(dispatch.FIRST)
        names = tables.all_overloads() | tables.declared_overloads()
        _register(itertools.product(names, [dispatch.FIRST]))


def register_temporarily(names: Iterable[str]) -> None:
    """Put kernels on ops without a policy, until the last block of `temporary` ends.

    Some of these ops are called with numbers in the place of tensors, which no kernel can hand on.
    """
    for name, key in itertools.product(names, _keys):
        if (name, key) in _registered or (name, key) in _passing:
            continue
        if (overload := dispatch.overload_of(name)) is not None:
            _passing.add((name, key))
            dispatch.register(name, _kernel(name, overload, key), key, temporary=True)


@contextmanager
def temporary() -> Iterator[None]:
    """Unregister the temporary kernels after a block, unless it is in another one."""
    _blocks.append(None)
    try:
        yield
    finally:
        _blocks.pop()
        if not _blocks and _passing:
            _passing.clear()
            dispatch.unregister()


def declare_op(overload: str, rules: Mapping[str, Rule]) -> None:
    """Tell the reference of an op of the user's: its rule for each device type that has one.

    Without one its body runs under the autocast around it, as any Python does.
    """
    for device, rule in rules.items():
        tables.declare(device, rule)
    _bodies.discard(overload)
    if not rules:
        _bodies.add(overload)
    own_table.cache_clear()


def register_bodies(names: Iterable[str]) -> None:
    """Put kernels on those of these ops that were declared without a policy, for good."""
    _register(itertools.product(_bodies.intersection(names), _keys))


def declared_bodies() -> frozenset[str]:
    """Return the ops of the user's that were declared without a policy."""
    return frozenset(_bodies)
