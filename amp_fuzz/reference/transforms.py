"""Function transforms: `torch.func.grad` and `torch.func.vmap`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from amp_fuzz.reference import kernels
from amp_fuzz.reference.autocast import snapshot
from amp_fuzz.reference.state import here

__all__ = ["grad", "vmap"]


def grad(device: str) -> Callable[..., Any]:
    """Return `torch.func.grad` as it behaves under the reference.

    "Backward ops run in the same type that autocast used for corresponding forward ops": autocast
    is for the function alone, not for the backward ops of the transform.

    Outside of every context there is nothing to turn off. A context here would be the outermost
    one, so regions of the function would share their casts.
    """

    def transform(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        def transformed(*args: Any) -> Any:
            if not here().nesting:
                return _first(torch.func.grad(function, **options))(*args)
            ambient = snapshot(device)

            def inside(*inputs: Any) -> Any:
                with ambient.restored():
                    return function(*inputs)

            with here().semantics.around_grad(ambient):
                return _first(torch.func.grad(inside, **options))(*args)

        return transformed

    return transform


def vmap(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Return `torch.func.vmap` as it behaves under the reference.

    It means what a loop over the calls means, so autocast decides about the ops that are called
    before a batching rule makes others of them.
    """
    return _first(torch.func.vmap(function, **options))


def _first(transformed: Callable[..., Any]) -> Callable[..., Any]:
    """Return a transformed function in which autocast decides before the transform does."""
    kernels.register_ahead()

    def call(*args: Any) -> Any:
        with here().semantics.ahead():
            return transformed(*args)

    return call
