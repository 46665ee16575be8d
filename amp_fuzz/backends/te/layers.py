"""Regions and layers of Transformer Engine, as a case's source and a script use them."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["python_recipe", "te_layers", "te_recipe"]


def te_layers(te: Any, recipe_of: Any, device: str) -> Any:
    """Return FP8 regions, a layer that quantises in them, and Transformer Engine's checkpoint."""
    from transformer_engine.pytorch import distributed
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    layers: dict[Any, Any] = {}
    FP8GlobalStateManager.reset()
    # An error inside a checkpoint leaves these as they were.
    distributed.activation_recompute_forward._is_first_fp8_module.clear()
    distributed._IN_ACTIVATION_RECOMPUTE_REGION = distributed._ACTIVATION_RECOMPUTE_PHASE = False

    def fp8(recipe: str, enabled: bool = True, **options: Any) -> Any:
        return te.autocast(enabled=enabled, recipe=recipe_of(recipe, **options))

    def fp8_linear(
        x: Any, weight: Any, bias: Any = None, layer: int = 0, is_first_microbatch: Any = None
    ) -> Any:
        if not FP8GlobalStateManager.is_fp8_enabled():
            return torch.nn.functional.linear(x, weight, bias)
        n, k = weight.shape
        key = layer, n, k, weight.dtype, bias is None
        if key not in layers:
            away = [device] if torch.device(device).type == "cuda" else []
            with torch.random.fork_rng(devices=away):  # it draws weights, which are not used
                layers[key] = te.Linear(
                    k, n, bias=bias is not None, device=device, params_dtype=weight.dtype
                )
        given = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
        options = {"is_first_microbatch": is_first_microbatch}
        return torch.func.functional_call(layers[key], given, (x,), options)

    return fp8, fp8_linear, te.checkpoint


def python_recipe(recipe: str, **options: Any) -> Any:
    """Return a recipe of Transformer Engine; of NVFP4, that of its reference in Python."""
    from transformer_engine.common.recipe import CustomRecipe
    from transformer_engine.pytorch.custom_recipes.reference_nvfp4 import NVFP4QuantizerRef
    from transformer_engine.pytorch.custom_recipes.reference_utils import Fp4Formats

    def quantiser(role: Any) -> Any:
        square = role is not None and role.tensor_type == "weight"
        tile = (16, 16) if square else (1, 16)
        return NVFP4QuantizerRef(Fp4Formats.E2M1, quant_tile_shape=tile)

    if recipe == "nvfp4":
        return CustomRecipe(qfactory=quantiser)
    return te_recipe(recipe, **options)


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
