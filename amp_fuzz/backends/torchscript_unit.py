"""Compile TorchScript in a separate unit, so no case sees the compiled code of another.

`torch.jit.script` keeps every compiled function forever, with graphs that were optimised under the
autocast of their first caller: `torch.nn.functional.softmin`, scripted within one program, is the
same function in the next. Here the unit, and everything that refers to it, is replaced for a block.

Only this module does so. It checks torch's internals before it changes them, and
`tests/backends/test_scripted.py` would notice a change.
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
# The functions that parse source into trees, by the modules that imported them by name.
_READERS: tuple[tuple[Any, str], ...] = (
    (inspect, "getsourcelines"),
    (torch._jit_internal, "get_type_hint_captures"),
    *((module, name) for name in ("get_jit_def", "get_jit_class_def") for module in _MODULES),
)
_WITNESS = "__torch__.torch.nn.functional.interpolate"


def _overloads() -> dict[str, list[Any]]:
    known: dict[str, list[Any]] = getattr(torch._jit_internal, "_overloaded_fns", {})
    return {name: list(functions) for name, functions in known.items()}


# By request: the source parts at that time, and the tree.
_kept: dict[Any, tuple[tuple[Any, ...], Any]] = {}
_MOST = 1024


def _reader(read: Any) -> Any:
    """Return a function that parses source, and caches functions and classes of torch.

    Trees are never modified: compiling makes graphs from them. A function or class with new code,
    members or TorchScript marks is parsed again.
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
    """Return the parts that define the source of a function or class, compared by identity."""
    if inspect.isclass(thing):
        members = vars(thing).values()
        return (*members, *(part for m in members if inspect.isfunction(m) for part in _parts(m)))
    return thing.__code__, getattr(thing, "_torchscript_modifier", None)


_READS = tuple((m, name, _reader(getattr(m, name))) for m, name in _READERS if hasattr(m, name))


# torch forgets a function's overloads after compiling them, so they are noted before.
_OVERLOADS = _overloads()


def usable() -> str:
    """Return why units cannot be replaced here, or ""."""
    missing = [name for name in _STATE if not hasattr(_state, name)]
    if missing:
        return f"torch.jit._state has no {missing[0]}: this torch is too new for amp-fuzz"
    if not any(name.endswith(_WITNESS.removeprefix("__torch__.")) for name in _OVERLOADS):
        return "TorchScript was used before amp_fuzz was imported: import amp_fuzz first"
    return ""


@contextmanager
def _defaults(function: Any, unit: Any) -> Iterator[None]:
    """Replace the default of a function's ``_compilation_unit``."""
    before = function.__defaults__
    kind = torch._C.CompilationUnit
    function.__defaults__ = tuple(unit if isinstance(v, kind) else v for v in before)
    try:
        yield
    finally:
        function.__defaults__ = before


@contextmanager
def fresh_unit() -> Iterator[Any]:
    """Compile everything scripted in this block into a new unit, and yield it."""
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
        for module in (_recursive, _trace):  # which hold it by name and as a default
            stack.enter_context(patch.object(module, "_python_cu", unit))
        store = _recursive.ConcreteTypeStore()
        stack.enter_context(patch.object(_recursive, "concrete_type_store", store))
        for function in _TRACERS:
            stack.enter_context(_defaults(function, unit))
        stack.enter_context(patch.object(torch._jit_internal, "_overloaded_fns", overloads))
        for module, name, reads in _READS:
            stack.enter_context(patch.object(module, name, reads))
        yield unit
