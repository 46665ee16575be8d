"""Discover what a callable holds besides its inputs: modules, tensors, random generators, caches.

A function holds its closure, its defaults, the globals that it uses, and what the functions that it
calls by name hold. A module, or an object of a user's class, holds its attributes.
"""

from __future__ import annotations

import dis
import functools
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch

from amp_fuzz.interfaces.check.storage import attribute, attributes, base_of
from amp_fuzz.interfaces.check.trees import children, leaves_of

__all__ = ["Held", "hold", "made_by_compiler"]

_DEPTH = 8  # nesting of objects: deeper ones do not really belong to the callable

_STATEFUL = (torch.Generator, np.random.Generator, random.Random, torch.optim.Optimizer)
# Objects of torch whose attributes a call may set, as it may those of a user's object.
_TRAINING = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)
# The attributes of torch's objects that are restored by other means.
_ELSEWHERE: dict[type, frozenset[str]] = {
    torch.nn.Module: frozenset({"_parameters", "_buffers", "_modules"}),
    torch.optim.Optimizer: frozenset({"state", "param_groups"}),
}
_PLAIN = (int, float, str, bytes, type(None))


@dataclass(slots=True)
class Held:
    """What a callable holds, by name.

    computed: tensors computed from others that require grad: a backward pass of the callable
    continues into these. stateful: generators of random numbers, and optimisers. objects: of the
    user's classes, optimisers, schedulers and scalers; their attributes may be set by a call.
    containers: in their attributes; their items may be set. caches: functions that remember
    results. compiled: the names of objects made by torch.compile or TorchScript.
    """

    modules: dict[str, torch.nn.Module] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    computed: dict[str, torch.Tensor] = field(default_factory=dict)
    compiled: list[str] = field(default_factory=list)
    stateful: dict[str, Any] = field(default_factory=dict)
    caches: dict[str, Any] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    containers: dict[str, Any] = field(default_factory=dict)
    seen: dict[int, Any] = field(default_factory=dict)


def hold(value: Any, held: Held, name: str = "", depth: int = 0, *, owned: bool = False) -> None:
    """Add a value, and everything that it holds.

    name: for reports. owned: whether it belongs to an attribute of a module or an object.
    """
    kind = type(value)
    if id(value) in held.seen or depth > _DEPTH or issubclass(kind, _PLAIN):
        return
    held.seen[id(value)] = value
    if made_by_compiler(value):
        held.compiled.append(name)
    elif issubclass(kind, torch.nn.Module):
        held.modules[_free(name, held.modules)] = value
        for path, module in value.named_modules():
            held.seen[id(module)] = module
            where = ".".join(filter(None, (name, path)))
            if made_by_compiler(module):
                held.compiled.append(where)
            _attributes(module, held, where, depth)
            _function(getattr(type(module), "forward", None), held, "", depth + 1)
    elif issubclass(kind, torch.Tensor):
        if value.requires_grad and not value.is_leaf:
            held.computed[_free(name, held.computed)] = value
            for leaf in _behind(value):
                hold(leaf, held, f"what {name} was computed from", depth)
        else:
            held.tensors[_free(name, held.tensors)] = value
    elif issubclass(kind, _STATEFUL):
        held.stateful[_free(name, held.stateful)] = value
        _object(value, held, name, depth, owned=owned)
    elif issubclass(kind, (FunctionType, MethodType)) or attribute(value, "__wrapped__"):
        _function(value, held, name, depth)
    elif issubclass(kind, functools.partial):
        for path, item in leaves_of((value.args, value.keywords)):
            hold(item, held, f"{name}.partial{path}" if name else f"partial{path}", depth)
        hold(value.func, held, name, depth)
    else:
        _object(value, held, name, depth, owned=owned)


def _object(value: Any, held: Held, name: str, depth: int, *, owned: bool) -> None:
    """Add the items of a container, and the attributes of an object that a call may change."""
    kind = type(value)
    if owned and base_of(value):
        held.containers[_free(name, held.containers)] = value
    if (_users(kind) and not issubclass(kind, type)) or issubclass(kind, _TRAINING):
        held.objects[_free(name, held.objects)] = value
        _attributes(value, held, name, depth)
        if call := attribute(value, "__call__"):
            _function(call, held, "", depth + 1)
    for path, item in _items(value):
        hold(item, held, f"{name}{path}", depth + 1, owned=owned)


def _items(value: Any) -> list[tuple[str, Any]]:
    if issubclass(type(value), (set, frozenset)):
        return [(f"[{i}]", item) for i, item in enumerate(value)]
    return children(value) or []


def _attributes(owner: Any, held: Held, name: str, depth: int) -> None:
    kinds = [kind for kind in _ELSEWHERE if issubclass(type(owner), kind)]
    for key, value in attributes(owner).items():
        if any(key in _ELSEWHERE[kind] for kind in kinds):
            continue
        if issubclass(type(value), torch.Tensor) and value.requires_grad and not value.is_leaf:
            continue  # left by some hooks: it is recomputed in each call
        where = f"{name}.{key}" if name else key
        hold(value, held, where, depth + 1, owned=True)


def _function(function: Any, held: Held, name: str, depth: int) -> None:
    """Add what a function, and the functions that it wraps, hold."""
    seen: set[int] = set()
    while function is not None and id(function) not in seen:
        seen.add(id(function))
        if attribute(function, "cache_clear"):
            held.caches[_free(getattr(function, "__qualname__", name), held.caches)] = function
        inner = function
        if issubclass(type(function), MethodType):
            hold(function.__self__, held, name or "self", depth)
            inner = function.__func__
        if issubclass(type(inner), FunctionType) and _users(inner):
            for variable, value in _variables(inner):
                hold(value, held, variable, depth + 1)
        function = attribute(inner, "__wrapped__")


def _variables(function: FunctionType) -> Iterator[tuple[str, Any]]:
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    defaults = function.__defaults__ or ()
    yield from zip(names[len(names) - len(defaults) :], defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not bound yet
            continue
    for name in _globals(function.__code__):
        if name in function.__globals__:
            yield name, function.__globals__[name]


def _globals(code: CodeType) -> list[str]:
    """Return the globals that a function looks up, and the functions defined in it."""
    names = [i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"]
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            names += _globals(inner)
    return list(dict.fromkeys(names))


def _behind(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the leaves from which a tensor was computed."""
    nodes, seen = [tensor.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        nodes += [n for n, _ in node.next_functions]


def made_by_compiler(value: Any) -> str:
    """Return what made a callable: torch.compile, TorchScript, or "" for Python."""
    if issubclass(type(value), (torch.jit.ScriptModule, torch.jit.ScriptFunction)):
        return "TorchScript"
    own = attributes(value)
    if issubclass(type(value), torch.nn.Module):
        inside = own.get("_compiled_call_impl")  # nn.Module.compile
        compiled = "_orig_mod" in own.get("_modules", ()) or inside is not None
    else:
        compiled = "_torchdynamo_orig_callable" in own and not own.get("_torchdynamo_disable")
    return "torch.compile" if compiled else ""


def _users(what: Any) -> bool:
    """Return whether a class or function belongs to the user, not to Python or a library."""
    root = str(getattr(what, "__module__", "") or "").partition(".")[0]
    return root == "__main__" or (
        root not in sys.stdlib_module_names
        and root not in ("torch", "numpy", "amp_fuzz", "_pytest", "pytest", "")
    )


def _free(name: str, taken: dict[str, Any]) -> str:
    """Return a free name: two functions may use one name for two things."""
    if name not in taken:
        return name
    return next(n for i in range(2, len(taken) + 3) if (n := f"{name}#{i}") not in taken)
