"""Casts that a program writes, told from those that autocast, kernels and autograd make.

A compiler may keep float32 where eager rounds a 16-bit result, since no program asks for that
rounding. ``x.half()`` asks for it. Both reach a dispatch mode as ``_to_copy``: the line of the
program that is running tells them apart, and in code whose lines nobody knows the method that it
calls.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from amp_fuzz.patching import patched

__all__ = ["CASTING", "SIXTEEN", "calling", "casting", "in_method", "used_once", "written"]

SIXTEEN = frozenset((torch.bfloat16, torch.float16))

_lines: dict[str, Mapping[int, bool]] = {}  # of every thread: a program may run in another one


@contextmanager
def casting(lines: Mapping[str, Mapping[int, bool]]) -> Iterator[None]:
    """Say for a block, in every thread, which lines of which source files are casts.

    lines: by file and number, whether the result is used once only, and not returned.
    """
    before = dict(_lines)
    _lines.update(lines)
    try:
        yield
    finally:
        _lines.clear()
        _lines.update(before)


_METHODS = ("bfloat16", "float", "half", "to", "type", "type_as")
_OTHERS = tuple(str(p) + os.sep for p in (Path(torch.__file__).parent, Path(__file__).parents[2]))
_CALLED = ContextVar("in a cast that code outside of torch calls", default=False)


@contextmanager
def calling() -> Iterator[list[torch.dtype]]:
    """Let the casts that code outside of torch calls be written ones for a block, in every thread.

    Yields a list, to which each that rounds to 16 bits adds its dtype. Methods are exchanged: under
    a `TorchFunctionMode` torch's modules leave their fast paths.
    """
    met: list[torch.dtype] = []
    with ExitStack() as stack:
        for name in _METHODS:
            method = _told(getattr(torch.Tensor, name), met)
            stack.enter_context(patched(torch.Tensor, name, method))
        yield met


def _told(honest: Callable[..., Any], met: list[torch.dtype]) -> Callable[..., Any]:
    @functools.wraps(honest)
    def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if sys._getframe(1).f_code.co_filename.startswith(_OTHERS):
            return honest(self, *args, **kwargs)
        token = _CALLED.set(True)
        try:
            made = honest(self, *args, **kwargs)
        finally:
            _CALLED.reset(token)
        if isinstance(made, torch.Tensor) and made.dtype in SIXTEEN and made.dtype != self.dtype:
            met.append(made.dtype)
        return made

    return method


def written() -> bool:
    """Return whether a cast that the program writes is running: its line, or its method.

    A backward pass runs under no line of the program: what it casts, autograd does.
    """
    return in_method() or used_once() is not None


def in_method() -> bool:
    """Return whether a cast runs that code outside of torch calls by a method: see `calling`."""
    return _CALLED.get()


def used_once() -> bool | None:
    """Return what `casting` says of the program's line that is running; None: it is no cast."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _lines:
        if (lines := _lines.get(frame.f_code.co_filename)) is not None:
            return lines.get(frame.f_lineno)
        frame = frame.f_back
    return None


_aten = torch.ops.aten
CASTING = (*(getattr(_aten.to, name) for name in _aten.to.overloads()), _aten.type_as.default)
"""The composite ops that casts are written as."""
