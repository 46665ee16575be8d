"""Where an op comes from: the submodule and the line of the user's code, in a backward pass too."""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
from torch.autograd import graph

import amp_fuzz

__all__ = ["Place", "Places", "frame_here", "is_library", "place_here", "raised_at"]

_SKIPPED = (
    str(Path(amp_fuzz.__file__).parent) + os.sep,
    str(Path(torch.__file__).parent) + os.sep,
    contextlib.__file__,
    "<",
)
_LIBRARIES = (
    *{sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib", "stdlib")},
    str(Path(torch.__file__).parents[1]) + os.sep,
)


@dataclass(frozen=True, slots=True)
class Place:
    """A statement: the path of the submodule that runs it ("" for the callable), file and line.

    file is "" where no line of the user's code is running.
    """

    module: str
    file: str = ""
    line: int = 0

    @property
    def short(self) -> str:
        """``model.py:12``, or ""."""
        return f"{Path(self.file).name}:{self.line}" if self.file else ""

    @property
    def is_own(self) -> bool:
        """Whether it is in a file of the user's own, which can be changed."""
        return bool(self.file) and not is_library(self.file)

    @property
    def text(self) -> str:
        """``model.py:12 (encoder.norm)``: what reports call it."""
        if not self.short:
            return self.module or "the callable"
        return f"{self.short} ({self.module})" if self.module else self.short


@cache
def _skipped(file: str) -> bool:
    return file.startswith(_SKIPPED)


@cache
def is_library(file: str) -> bool:
    """Return whether a file is of an installed package or of Python, and not the user's."""
    return file.startswith(_LIBRARIES)


def place_here(stack: Sequence[str]) -> Place | None:
    """Return the statement of the user's code that is running; None in a backward pass of torch's.

    stack: the paths of the submodules that are being called.
    """
    found = frame_here()
    module = stack[-1] if stack else ""
    if isinstance(found, FrameType):
        return Place(module, found.f_code.co_filename, found.f_lineno)
    return Place(module) if found == "none" else None


def frame_here() -> FrameType | Literal["none", "backward"]:
    """Return the innermost frame of the user's code within the call that is followed."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code is graph._engine_run_backward.__code__:
            return "backward"
        if not _skipped(code.co_filename):
            return frame
        if code.co_name == CALLING:  # above it is the code that asks for the diagnosis
            return "none"
        frame = frame.f_back
    return "none"


CALLING = "_drive"
"""The function of this package that calls the user's code."""


def raised_at(error: BaseException, paths: Mapping[torch.nn.Module, str]) -> Place:
    """Return the statement of the user's code that raised an error, by its traceback.

    paths: of the submodules.
    """
    found, at = Place(""), error.__traceback__
    while at is not None:
        code, module = at.tb_frame.f_code, found.module
        owner = at.tb_frame.f_locals.get("self")
        if isinstance(owner, torch.nn.Module):
            module = paths.get(owner, module)
        file, line = found.file, found.line
        if not _skipped(code.co_filename):
            file, line = code.co_filename, at.tb_lineno
        found, at = Place(module, file, line), at.tb_next
    return found


class Places:
    """Finds the place of each op of a run, as it runs.

    An op of a backward pass belongs to the statement whose gradient it computes. Autograd numbers
    the nodes of its graph; the number that is next when an op of the forward has run is kept with
    its place.
    """

    def __init__(self, stack: Sequence[str]) -> None:
        self._stack = stack
        self._numbers: list[int] = []
        self._places: list[Place] = []

    def now(self) -> tuple[Place, bool]:
        """Return the place of the op that runs, and whether a backward pass runs it."""
        node: Any = torch._C._current_autograd_node()
        found = place_here(self._stack)
        if found is not None:
            number = torch._C._autograd._get_sequence_nr()
            if node is None and (not self._numbers or number > self._numbers[-1]):
                self._numbers.append(number)
                self._places.append(found)
            return found, node is not None
        if node is None:
            return Place(""), True
        at = bisect_right(self._numbers, node._sequence_nr())
        if at >= len(self._places):  # the node that adds up the gradient of a leaf
            return Place(""), True
        return self._places[at], True
