"""Ways to change the program that the reference runs in place of TorchScript: for `wrap`.

`amp_fuzz.backends.torchscript` has that program. It runs as Python, or as TorchScript's graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

from amp_fuzz.cases.case import Case
from amp_fuzz.patching import patched

__all__ = ["Replaced", "lowered", "replaced"]

Wrap: TypeAlias = Callable[[Any, Case], Any]

Replaced: TypeAlias = tuple[tuple[Any, str, Callable[..., Any]], ...]
"""Functions: holder, name, and what makes another function of the one that is there."""


def lowered(**parts: bool) -> Wrap:
    """Run TorchScript's graph, and do more to it: see `amp_fuzz.backends.torchscript.Lowering`."""
    return lambda program, case: program.lowered(**parts)


@contextmanager
def replaced(functions: Replaced) -> Iterator[None]:
    """Call other functions of torch for a block."""
    with ExitStack() as stack:
        for holder, name, make in functions:
            stack.enter_context(patched(holder, name, make(getattr(holder, name))))
        yield
