"""Bugs of FP8 layers: imitations in which they remember something else than is documented."""

from __future__ import annotations

from collections.abc import Callable
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


def remembering(how: Callable[[type[Layers]], type[Layers]]) -> Imitation:
    """Return an imitation. how: makes its class of layers from the one that it is based on."""

    def semantics(before: Semantics) -> Semantics:
        return replace(before, layers=lambda layers: how(before.layers(layers)))

    return Imitation(semantics=semantics)
