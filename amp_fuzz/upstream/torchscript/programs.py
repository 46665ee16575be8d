"""Ways to change the program that the reference runs in place of TorchScript: for `wrap`.

`amp_fuzz.backends.torchscript` has that program. It runs as Python, or as TorchScript's graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from amp_fuzz.cases.case import Case

__all__ = ["lowered"]

Wrap: TypeAlias = Callable[[Any, Case], Any]


def lowered(**parts: bool) -> Wrap:
    """Run TorchScript's graph, and do more to it: see `amp_fuzz.backends.torchscript.Lowering`."""
    return lambda program, case: program.lowered(**parts)
