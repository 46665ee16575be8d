"""Compile TorchScript in a unit of its own, so that no case sees what another one compiled.

`torch.jit.script` keeps every function that it compiles for ever, with the graphs that were
optimised under the autocast of whoever called them first: `torch.nn.functional.softmin`, scripted
within one program, is the same function in the next. Here the unit, and what remembers it, is
exchanged for a block.

This is the one place that does so. It checks what it finds, and `tests/backends/test_scripted.py`
would notice a change.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch._jit_internal
from torch.jit import _recursive, _script, _state, _trace, frontend

__all__ = ["fresh_unit", "usable"]

_STATE = (
    "_python_cu",
    "_jit_caching_layer",
    "_jit_function_overload_caching",
    "_script_classes",
    "_name_to_pyclass",
)
_MODULES: tuple[Any, ...] = (frontend, _recursive, _script)
_TRACERS: tuple[Any, ...] = (_trace._trace_impl, _trace.trace, _trace.trace_module)
# What reads source and makes trees of it, by the modules that took it by name.
_READERS: tuple[tuple[Any, str], ...] = (
    (inspect, "getsourcelines"),
    (torch._jit_internal, "get_type_hint_captures"),
    *((module, name) for name in ("get_jit_def", "get_jit_class_def") for module in _MODULES),
)
_WITNESS = "__torch__.torch.nn.functional.interpolate"


def _overloads() -> dict[str, list[Any]]:
    known: dict[str, list[Any]] = getattr(torch._jit_internal, "_overloaded_fns", {})
    return {name: list(functions) for name, functions in known.items()}


# By what was asked of whom: what it was made of then, and the tree.
_kept: dict[Any, tuple[tuple[Any, ...], Any]] = {}
_MOST = 1024


def _reader(read: Any) -> Any:
    """Return a function that reads source and does so once for functions and classes of torch's.

    What it makes of it, trees, is never changed: compiling makes graphs of them. What has got
    other code, another member or another mark for TorchScript since is read again.
    """

    def reads(thing: Any, *how: Any, **named: Any) -> Any:
        code = inspect.isfunction(thing) or inspect.isclass(thing)
        if not code or not str(thing.__module__).startswith("torch."):
            return read(thing, *how, **named)
        key = read, thing, how, tuple(named.items())
        parts = _parts(thing)
        of, made = _kept.get(key, ((), None))
        if len(of) != len(parts) or any(a is not b for a, b in zip(of, parts, strict=True)):
            if len(_kept) >= _MOST:
                _kept.clear()
            made = read(thing, *how, **named)
            _kept[key] = parts, made
        return made

    return reads


def _parts(thing: Any) -> tuple[Any, ...]:
    """Return what the source of a function or class is read from, to be compared by identity."""
    if inspect.isclass(thing):
        members = vars(thing).values()
        return (*members, *(part for m in members if inspect.isfunction(m) for part in _parts(m)))
    return thing.__code__, getattr(thing, "_torchscript_modifier", None)


_READS = tuple((m, name, _reader(getattr(m, name))) for m, name in _READERS if hasattr(m, name))


# Torch forgets the overloads of a function when it has compiled them: they are noted before that.
_OVERLOADS = _overloads()


def usable() -> str:
    """Return why units cannot be exchanged here, or ""."""
    missing = [name for name in _STATE if not hasattr(_state, name)]
    if missing:
        return f"torch.jit._state has no {missing[0]}: this torch is too new for amp-fuzz"
    if not any(name.endswith(_WITNESS.removeprefix("__torch__.")) for name in _OVERLOADS):
        return "TorchScript was used before amp_fuzz was imported: import amp_fuzz first"
    return ""


@contextmanager
def _defaults(function: Any, unit: Any) -> Iterator[None]:
    """Let a function's ``_compilation_unit`` be another one by default."""
    before = function.__defaults__
    kind = torch._C.CompilationUnit
    function.__defaults__ = tuple(unit if isinstance(v, kind) else v for v in before)
    try:
        yield
    finally:
        function.__defaults__ = before


@contextmanager
def fresh_unit() -> Iterator[Any]:
    """Compile what is scripted in this block into a new unit, and yield that."""
    unit = torch._C.CompilationUnit()
    fresh: dict[str, Any] = {
        "_python_cu": unit,
        "_jit_caching_layer": weakref.WeakKeyDictionary(),
        "_jit_function_overload_caching": weakref.WeakKeyDictionary(),
        "_script_classes": {},
        "_name_to_pyclass": {},
    }
    overloads = {name: list(functions) for name, functions in _OVERLOADS.items()}
    with ExitStack() as stack:
        for name, value in fresh.items():
            stack.enter_context(patch.object(_state, name, value))
        for module in (_recursive, _trace):  # which took it by name, and as a default
            stack.enter_context(patch.object(module, "_python_cu", unit))
        store = _recursive.ConcreteTypeStore()
        stack.enter_context(patch.object(_recursive, "concrete_type_store", store))
        for function in _TRACERS:
            stack.enter_context(_defaults(function, unit))
        stack.enter_context(patch.object(torch._jit_internal, "_overloaded_fns", overloads))
        for module, name, reads in _READS:
            stack.enter_context(patch.object(module, name, reads))
        yield unit
