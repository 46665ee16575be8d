"""Linear interpolation as a compiler computes it: a difference of neighbours, and a part of it.

The decomposition (``torch._decomp.decompositions._upsample_linear``) is ``a + (b - a) * part``
along each dimension, the last first; eager's kernels add ``a * (1 - part)`` and ``b * part``. The
difference of two numbers that are large, with unlike signs, leaves the range.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

import torch

__all__ = ["LINEAR"]

_aten = torch.ops.aten


def _linear(
    x: torch.Tensor, size: Sequence[int], align_corners: bool, *scales: float | None
) -> torch.Tensor | None:
    """Interpolate in float32, or in float64 what has it; None for integers."""
    if not x.is_floating_point():
        return None
    wide = x.double() if x.dtype is torch.float64 else x.float()
    count = len(size)
    given = [*scales, *[None] * count][:count]
    taken = [
        _positions(length, made, align_corners, scale, wide.dtype)
        for length, made, scale in zip(x.shape[2:], size, given, strict=True)
    ]
    corners = []
    for high in product((0, 1), repeat=count):
        corner = wide
        for d, (which, (low, above, _)) in enumerate(zip(high, taken, strict=True)):
            corner = corner.index_select(d + 2, above if which else low)
        corners.append(corner)
    for d in reversed(range(count)):
        part = taken[d][2].reshape(-1, *[1] * (count - 1 - d))
        corners = [a + (b - a) * part for a, b in zip(corners[::2], corners[1::2], strict=True)]
    return corners[0].to(x.dtype)


def _positions(
    length: int, made: int, align_corners: bool, scale: float | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the neighbours of each element that is made, and its part of the way between them."""
    if align_corners:
        step = (length - 1.0) / (made - 1.0) if made > 1 else 0.0
        at = step * torch.arange(made).to(dtype)
    else:
        step = 1.0 / scale if scale else length / made
        at = step * (torch.arange(made).to(dtype) + 0.5) - 0.5
    at = at.clamp(min=0.0)
    low = at.to(torch.int64)
    return low, (low + 1).clamp(max=length - 1), (at - low).clamp(0.0, 1.0)


def _out(x: torch.Tensor, *given: Any, out: torch.Tensor) -> torch.Tensor | None:
    made = _linear(x, *given)
    return None if made is None else out.resize_(made.shape).copy_(made)


LINEAR: Mapping[Any, Callable[..., Any]] = {
    getattr(getattr(_aten, name), overload): function
    for name in ("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d")
    for overload, function in (("default", _linear), ("out", _out))
}
"""The overloads that are decomposed, and what they come to."""
