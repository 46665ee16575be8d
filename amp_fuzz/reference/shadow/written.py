"""Casts that a program writes, told from those that autocast, kernels and autograd make.

A compiler may keep float32 where eager rounds a 16-bit result, since no program asks for that
rounding. ``x.half()`` asks for it. Both reach a dispatch mode as ``_to_copy``: the line of the
program that is running tells them apart.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

import torch

__all__ = ["CASTING", "SIXTEEN", "casting", "used_once", "written"]

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


def written() -> bool:
    """Return whether the program's line that is running is a cast that the program writes.

    A backward pass runs under no line of the program: what it casts, autograd does.
    """
    return used_once() is not None


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
