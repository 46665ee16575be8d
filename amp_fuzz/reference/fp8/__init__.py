"""FP8 linear layers as their recipes are published: formats, scales, layers, and the state of them.

``Layers(TORCHAO).names()`` are the region and the layer of a program. `scaling` has one function a
recipe, each with its source.
"""

from amp_fuzz.reference.fp8.formats import E2M1, E4M3, E5M2, FORMATS, Format, rounded
from amp_fuzz.reference.fp8.layers import Delayed, Layers, Region
from amp_fuzz.reference.fp8.linear import (
    TORCHAO,
    TORCHAO_MXFP8,
    TRANSFORMER_ENGINE,
    Convention,
    Pass,
    Product,
    dequantised,
    functional_scaled_mm,
    linear,
    scaled_mm,
    te_reference,
)
from amp_fuzz.reference.fp8.recipes import RECIPES, Recipe, format_of
from amp_fuzz.reference.fp8.scaling import Quantised

__all__ = [
    "E2M1",
    "E4M3",
    "E5M2",
    "FORMATS",
    "RECIPES",
    "TORCHAO",
    "TORCHAO_MXFP8",
    "TRANSFORMER_ENGINE",
    "Convention",
    "Delayed",
    "Format",
    "Layers",
    "Pass",
    "Product",
    "Quantised",
    "Recipe",
    "Region",
    "dequantised",
    "format_of",
    "functional_scaled_mm",
    "linear",
    "rounded",
    "scaled_mm",
    "te_reference",
]
