"""Regions and layers of Transformer Engine, as a case's source and a script use them."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["python_recipe", "te_layers", "te_recipe"]


def te_layers(te: Any, recipe_of: Any, device: str) -> Any:
    """Return FP8 regions, and a layer that quantises in them."""
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    layers: dict[Any, Any] = {}
    FP8GlobalStateManager.reset()

    def fp8(recipe: str, enabled: bool = True, **options: Any) -> Any:
        return te.autocast(enabled=enabled, recipe=recipe_of(recipe, **options))

    def fp8_linear(x: Any, weight: Any, bias: Any = None, layer: int = 0) -> Any:
        if not FP8GlobalStateManager.is_fp8_enabled():
            return torch.nn.functional.linear(x, weight, bias)
        n, k = weight.shape
        key = layer, n, k, weight.dtype, bias is None
        if key not in layers:
            layers[key] = te.Linear(
                k, n, bias=bias is not None, device=device, params_dtype=weight.dtype
            )
        given = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
        return torch.func.functional_call(layers[key], given, (x,))

    return fp8, fp8_linear


def python_recipe(recipe: str, **options: Any) -> Any:
    """Return a recipe whose quantisers are Transformer Engine's references, in Python."""
    from transformer_engine.common.recipe import CustomRecipe
    from transformer_engine.pytorch.custom_recipes import reference_current_scaling as reference

    if options.get("format", "HYBRID") == "HYBRID":
        return CustomRecipe(qfactory=reference.current_scaling_ref_factory)

    def e4m3(role: Any) -> Any:
        return reference.CurrentScalingQuantizerRef(torch.float8_e4m3fn)

    return CustomRecipe(qfactory=e4m3)


def te_recipe(recipe: str, **options: Any) -> Any:
    """Return a recipe of Transformer Engine, without random numbers."""
    from transformer_engine.common import recipe as recipes

    if recipe == "nvfp4":
        return recipes.NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True)
    form = {"fp8_format": getattr(recipes.Format, options.get("format", "HYBRID"))}
    if recipe == "delayed":
        return recipes.DelayedScaling(
            **form,
            amax_history_len=options.get("history", 16),
            amax_compute_algo=options.get("algorithm", "max"),
            margin=options.get("margin", 0),
        )
    kind = {"current": "Float8CurrentScaling", "blockwise": "Float8BlockScaling"}
    return getattr(recipes, kind.get(recipe, "MXFP8BlockScaling"))(**form)
