"""Function transforms: those of `torch.func`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from amp_fuzz.reference import kernels
from amp_fuzz.reference.autocast import snapshot
from amp_fuzz.reference.state import here

__all__ = ["transforms"]


def transforms(device: str) -> Mapping[str, Callable[..., Any]]:
    """Return the transforms of `torch.func`, by name, as they behave under the reference."""
    return {
        **{name: _backward(getattr(torch.func, name), device) for name in _BACKWARD},
        **{name: _called(getattr(torch.func, name)) for name in _FORWARD},
        "jvp": _first(torch.func.jvp),
    }


_BACKWARD = ("grad", "jacrev")
_FORWARD = ("functionalize", "jacfwd", "vmap")


def _backward(transform: Callable[..., Any], device: str) -> Callable[..., Any]:
    """Return a transform that runs backward ops.

    "Backward ops run in the same type that autocast used for corresponding forward ops": autocast
    is for the function alone, not for the backward ops of the transform.

    Outside of every context there is nothing to turn off. A context here would be the outermost
    one, so regions of the function would share their casts.
    """

    def transforming(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        def transformed(*args: Any) -> Any:
            if not here().nesting:
                return _first(transform(function, **options))(*args)
            ambient = snapshot(device)

            def inside(*inputs: Any) -> Any:
                with ambient.restored():
                    return function(*inputs)

            with here().semantics.around_grad(ambient):
                return _first(transform(inside, **options))(*args)

        return transformed

    return transforming


def _called(transform: Callable[..., Any]) -> Callable[..., Any]:
    """Return a transform that runs the ops of its function, and of its derivatives forward.

    `vmap` means what a loop over the calls means, and `functionalize` what the calls mean. So
    autocast decides about the ops that are called before a rule makes others of them.
    """
    return lambda function, **options: _first(transform(function, **options))


def _first(transformed: Callable[..., Any]) -> Callable[..., Any]:
    """Return a transformed function in which autocast decides before the transform does."""

    def call(*args: Any) -> Any:
        kernels.register_ahead()
        with here().semantics.ahead():
            return transformed(*args)

    return call
