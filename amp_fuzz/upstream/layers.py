"""Imitations in which FP8 layers remember something else than is documented."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from amp_fuzz.backends.imitation import Imitation
from amp_fuzz.reference.fp8 import Layers
from amp_fuzz.reference.semantics import Semantics

__all__ = ["remembering"]


def remembering(how: Callable[[type[Layers]], type[Layers]]) -> Imitation:
    """Return an imitation. how: makes its class of layers from the one that it is based on."""

    def semantics(before: Semantics) -> Semantics:
        return replace(before, layers=lambda layers: how(before.layers(layers)))

    return Imitation(semantics=semantics)
