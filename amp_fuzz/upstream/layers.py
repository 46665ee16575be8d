"""Bugs of FP8 layers: imitations in which they remember something else than is documented."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from amp_fuzz.backends.imitation import Imitation
from amp_fuzz.reference.fp8 import Layers
from amp_fuzz.reference.semantics import Semantics
from amp_fuzz.upstream.bug import Bug

__all__ = ["remembering", "te_bug"]

te_bug = partial(
    Bug, torch=">=2.13", seen="2.13.0", backends=("te", "te-python"), ops=("fp8_linear",)
)
"""A bug of Transformer Engine's layers, seen with its Python code on that torch."""


def remembering(bug: type[Layers]) -> Imitation:
    """Return an imitation whose layers have a bug: a subclass, put before their own class."""

    def semantics(before: Semantics) -> Semantics:
        def layers(documented: type[Layers]) -> type[Layers]:
            return type(bug.__name__, (bug, before.layers(documented)), {})

        return replace(before, layers=layers)

    return Imitation(semantics=semantics)
