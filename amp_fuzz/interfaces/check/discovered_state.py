"""Discover what a callable holds besides its inputs: modules, tensors, random generators, caches.

A function holds its closure, its defaults, the globals that it uses, and what the functions that it
calls by name hold. A module, or an object of a user's class, holds its attributes.
"""

from __future__ import annotations

import dis
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch

from amp_fuzz.interfaces.check.trees import leaves_of

__all__ = ["Held", "hold", "made_by_compiler"]

_DEPTH = 6  # nesting of objects: deeper ones do not really belong to the callable


@dataclass(slots=True)
class Held:
    """What a callable holds, by name.

    computed: tensors computed from others that require grad: a backward pass of the callable
    continues into these. objects: their attributes may be set by a call. caches: functions that
    remember results. compiled: the names of objects made by torch.compile or TorchScript.
    """

    modules: dict[str, torch.nn.Module] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    computed: dict[str, torch.Tensor] = field(default_factory=dict)
    compiled: list[str] = field(default_factory=list)
    generators: list[Any] = field(default_factory=list)
    caches: list[Any] = field(default_factory=list)
    objects: list[Any] = field(default_factory=list)
    seen: dict[int, Any] = field(default_factory=dict)


def hold(value: Any, held: Held, name: str = "", depth: int = 0) -> None:
    """Add a value, and everything that it holds. name: for reports."""
    if id(value) in held.seen or depth > _DEPTH:
        return
    held.seen[id(value)] = value
    if made_by_compiler(value):
        held.compiled.append(name)
    elif isinstance(value, torch.nn.Module):
        held.modules[_free(name, held.modules)] = value
        for path, module in value.named_modules():
            held.seen[id(module)] = module
            where = ".".join(filter(None, (name, path)))
            if made_by_compiler(module):
                held.compiled.append(where)
            _attributes(module, held, where, depth)
            _function(getattr(type(module), "forward", None), held, "", depth + 1)
    elif isinstance(value, torch.Tensor):
        if value.requires_grad and not value.is_leaf:
            held.computed[_free(name, held.computed)] = value
            for leaf in _behind(value):
                hold(leaf, held, f"what {name} was computed from", depth)
        else:
            held.tensors[_free(name, held.tensors)] = value
    elif isinstance(value, (torch.Generator, np.random.Generator, random.Random)):
        held.generators.append(value)
    elif isinstance(value, (FunctionType, MethodType)) or hasattr(value, "__wrapped__"):
        _function(value, held, name, depth)
    elif hasattr(value, "func") and hasattr(value, "keywords"):  # a partial
        for path, item in leaves_of((value.args, value.keywords)):
            hold(item, held, f"{name}.partial{path}" if name else f"partial{path}", depth)
        hold(value.func, held, name, depth)
    elif (items := _items(value)) is not None:
        for path, item in items:
            hold(item, held, f"{name}{path}", depth + 1)
    elif _users(type(value)) and not isinstance(value, type) and hasattr(value, "__dict__"):
        held.objects.append(value)
        _attributes(value, held, name, depth)
        if callable(value):
            _function(type(value).__call__, held, "", depth + 1)


def _items(value: Any) -> list[tuple[str, Any]] | None:
    if isinstance(value, (set, frozenset)):
        return [(f"[{i}]", item) for i, item in enumerate(value)]
    leaves = leaves_of(value)
    return None if len(leaves) == 1 and leaves[0][1] is value else leaves


def _attributes(owner: Any, held: Held, name: str, depth: int) -> None:
    own = {"_parameters", "_buffers", "_modules"} if isinstance(owner, torch.nn.Module) else set()
    for attribute, value in list(vars(owner).items()):
        if attribute in own:
            continue
        if isinstance(value, torch.Tensor) and value.requires_grad and not value.is_leaf:
            continue  # left by some hooks: it is recomputed in each call
        hold(value, held, f"{name}.{attribute}" if name else attribute, depth + 1)


def _function(function: Any, held: Held, name: str, depth: int) -> None:
    """Add what a function, and the functions that it wraps, hold."""
    while function is not None:
        if hasattr(function, "cache_clear"):
            held.caches.append(function)
        owner = getattr(function, "__self__", None)
        if owner is not None:
            hold(owner, held, name or "self", depth)
        inner = getattr(function, "__func__", function)
        if isinstance(inner, FunctionType) and _users(inner):
            for variable, value in _variables(inner):
                hold(value, held, variable, depth + 1)
        function = getattr(inner, "__wrapped__", None)


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
    if isinstance(value, (torch.jit.ScriptModule, torch.jit.ScriptFunction)):
        return "TorchScript"
    if isinstance(value, torch.nn.Module):
        inside = getattr(value, "_compiled_call_impl", None)  # nn.Module.compile
        return "torch.compile" if "_orig_mod" in value._modules or inside is not None else ""
    try:
        own = vars(value)
    except TypeError:
        return ""
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
