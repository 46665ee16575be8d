"""Kernels that a compiler has in place of eager's, written as functions of an op's arguments.

Such a function is what a decomposition or a lowering makes of one op. Shadows follow it: its own
roundings and its own mistakes. Another wrong value of the same op stays a finding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch

from amp_fuzz.backends.imitation import Kernel
from amp_fuzz.reference.custom_ops import in_body

__all__ = ["HALVES", "Lowerings", "in_place", "kernels", "out_of", "promoted", "wide"]

HALVES = (torch.bfloat16, torch.float16)

Lowering: TypeAlias = Callable[..., Any]
"""Computes an op from its arguments. None: it leaves the op as it is."""

Lowerings: TypeAlias = Mapping[Any, Lowering]
"""By overload."""


def kernels(lowerings: Lowerings, *, bodies: bool = False) -> dict[Any, Kernel]:
    """Return kernels for `Imitation`, by overload.

    bodies: compute so in the body of a custom op, too. A graph calls a custom op by its name, and
    a compiler does not see its body.
    """
    return {op: _kernel(lowering, bodies) for op, lowering in lowerings.items()}


def _kernel(lowering: Lowering, bodies: bool) -> Kernel:
    def kernel(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if in_body() and not bodies:
            return NotImplemented
        made = lowering(*args, **kwargs)
        return NotImplemented if made is None else made

    return kernel


def out_of(lowering: Lowering) -> Callable[..., torch.Tensor | None]:
    """Return the variant that writes the result into ``out=``."""

    def out_variant(*args: Any, out: torch.Tensor, **kwargs: Any) -> torch.Tensor | None:
        made = lowering(*args, **kwargs)
        return None if made is None else out.resize_(made.shape).copy_(made)

    return out_variant


def in_place(lowering: Lowering) -> Callable[..., torch.Tensor | None]:
    """Return the variant that writes the result into its first argument."""

    def in_place_variant(x: torch.Tensor, *args: Any) -> torch.Tensor | None:
        made = lowering(x, *args)
        return None if made is None else x.copy_(made)

    return in_place_variant


def promoted(op: Any) -> Callable[..., torch.Tensor | None]:
    """Return an op of two tensors that converts them to one dtype first, as decompositions do."""

    def function(x: torch.Tensor, y: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if x.dtype == y.dtype:
            return None
        dtype = torch.promote_types(x.dtype, y.dtype)
        return op(x.to(dtype), y.to(dtype), *args, **kwargs)

    return function


def wide(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor in the dtype that generated code computes in."""
    return x.float() if x.dtype in HALVES else x
