"""How much harm a known bug does, and which bugs are the gravest."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from amp_fuzz.oracle import Divergence
from amp_fuzz.oracle.labels import named

if TYPE_CHECKING:
    from amp_fuzz.upstream.bug import Bug

__all__ = ["HARMS", "Harm", "gravest", "harm_of"]

Harm: TypeAlias = Literal[
    "silent value", "silent gradient", "silent dtype", "state", "raises", "refuses"
]
"""What a bug does to a program, the gravest first.

silent value: a result is wrong: its numbers or its shape. silent gradient: so is one of a backward
pass, or it is missing. silent dtype: a result has another dtype, or is on another device. Nothing
is said of these three. state: autocast, the grad mode or the dispatcher is left changed. raises:
the program should run, and ends in an error. refuses: it should end in an error, and runs or ends
in another one.
"""

HARMS: tuple[Harm, ...] = get_args(Harm)


def harm_of(found: Divergence) -> Harm:
    """Return the harm of a divergence.

    A relation does the harm of what breaks it: an error, or a value. It does not say if only the
    dtype of that value is another.
    """
    if found.expected == "no error" or found.kind in ("crash", "timeout"):
        return "raises"
    if found.observed == "no error" or found.kind == "raise":
        return "refuses"
    if found.kind == "state":
        return "state"
    if found.kind in ("dtype", "device"):
        return "silent dtype"
    label = named(found.where.rpartition(": ")[2])
    gradient = found.kind.startswith("grad-") or label.endswith(".grad")
    return "silent gradient" if gradient else "silent value"


def gravest(bugs: Iterable[Bug]) -> list[Bug]:
    """Return bugs, the gravest first.

    Of the same harm, first those of autocast, then those that nobody has reported, then those with
    the smaller example.
    """
    return sorted(
        bugs, key=lambda bug: (HARMS.index(bug.harm), bug.own, bool(bug.link), _size(bug))
    )


def _size(bug: Bug) -> float:
    """Return the lines of the smallest example; a bug without one comes last."""
    return min((len(str(one.case).splitlines()) for one in bug.examples), default=math.inf)
