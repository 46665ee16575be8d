"""Make the source of a script plain: the same steps, without the generator's scaffolding.

Helpers that a script calls once stand where they are called, for its one program: a compiler's
call, a backward pass, results by name. Nothing here runs the script or knows its case; `amp-fuzz
repro` tries the result. A pass that meets another shape than the generator writes changes nothing.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence

from amp_fuzz.findings.repro.plain.compiled import compiled, custom_op
from amp_fuzz.findings.repro.plain.helpers import decided, device, inlined, undocumented, unread
from amp_fuzz.findings.repro.plain.results import (
    backward,
    default_dtype,
    forwarded,
    in_place,
    outputs,
    returning,
    together,
)
from amp_fuzz.findings.repro.plain.tree import parsed, printed
from amp_fuzz.findings.repro.plain.values import values

__all__ = ["plain"]


def plain(code: str) -> str:
    """Return the source of a script, made plain."""
    tree = parsed(code)
    for step in _STEPS:
        step(tree)
    return printed(tree)


_STEPS: Sequence[Callable[[ast.Module], None]] = (
    undocumented,
    device,
    compiled,
    custom_op,
    unread,
    backward,
    inlined,
    decided,
    outputs,
    in_place,
    default_dtype,
    forwarded,
    returning,
    together,
    values,
    unread,
)
