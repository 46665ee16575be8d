"""Recipes: how a linear layer quantises its input, its weight and the gradient of its output.

A layer has three products: forward, `dgrad` (of the input) and `wgrad` (of the weight). Each
quantises two matrices along the dimension that it sums over. So a recipe with blocks or rows
quantises each matrix twice, from high precision.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from amp_fuzz.reference.fp8 import scaling
from amp_fuzz.reference.fp8.formats import E2M1, E4M3, E5M2, Format
from amp_fuzz.reference.fp8.scaling import Quantised

__all__ = ["RECIPES", "Recipe", "Role", "format_of"]

Role: TypeAlias = Literal["input", "weight", "grad_output"]
Quantise: TypeAlias = Callable[[torch.Tensor, int, Role, Format], Quantised]


@dataclass(frozen=True, slots=True)
class Recipe:
    """A recipe by its published name.

    quantise: quantises a matrix along a dimension. delayed: its scales come from earlier steps;
    `quantise` is then not asked.
    """

    name: str
    quantise: Quantise
    delayed: bool = False


def format_of(name: str, role: Role) -> Format:
    """Return the format of a tensor: HYBRID is E4M3 for the forward pass, E5M2 for gradients.

    Source: Micikevicius et al. 2022, section 3; Transformer Engine, ``recipe.Format``.
    """
    if name == "HYBRID":
        return E5M2 if role == "grad_output" else E4M3
    return {"E4M3": E4M3, "E5M2": E5M2, "E2M1": E2M1}[name]


def _delayed(x: torch.Tensor, dim: int, role: Role, to: Format) -> Quantised:
    raise AssertionError("a delayed recipe takes its scales from the layer")


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("tensorwise", lambda x, dim, role, to: scaling.tensorwise(x, to)),
        Recipe("rowwise", lambda x, dim, role, to: scaling.rowwise(x, dim, to)),
        Recipe("current", lambda x, dim, role, to: scaling.current(x, to)),
        Recipe("delayed", _delayed, delayed=True),
        Recipe(
            "blockwise",
            lambda x, dim, role, to: scaling.blockwise(x, dim, to, square=role == "weight"),
        ),
        Recipe("mxfp8", lambda x, dim, role, to: scaling.mxfp8(x, dim, to)),
        Recipe("nvfp4", lambda x, dim, role, to: scaling.nvfp4(x, dim, square=role == "weight")),
    )
}
