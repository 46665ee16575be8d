"""Functions whose kernel in float64 cancels, by formulas that do not, and those that have none.

The copies of a shadow are float64. Of float64 itself a kernel's own rounding is seen only where
they compute in another way than it does: what `1 + erf` loses, `erfc` keeps. Weights that are made
of small integers are rounded once. The kernels of a gradient scaler take float32 alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch

__all__ = ["EXACT"]

_aten = torch.ops.aten
_GELU, _CUBE = math.sqrt(2 / math.pi), 0.044715


def _gelu(x: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    """Return gelu, ``x P(X < x)``; with ``tanh``, ``0.5 (1 + tanh(u))`` is a sigmoid."""
    return x * (torch.sigmoid(2 * _inner(x)) if approximate == "tanh" else _below(x))


def _gelu_backward(
    grad: torch.Tensor, x: torch.Tensor, *, approximate: str = "none"
) -> torch.Tensor:
    """Return gelu's gradient by the same functions."""
    if approximate == "tanh":
        s = torch.sigmoid(2 * _inner(x))
        rest = torch.sigmoid(-2 * _inner(x))
        return grad * (s + 2 * x * s * rest * _GELU * (1 + 3 * _CUBE * x * x))
    density = torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    return grad * (_below(x) + x * density)


def _below(x: torch.Tensor) -> torch.Tensor:
    half: torch.Tensor = 0.5 * torch.erfc(-x * math.sqrt(0.5))
    return half


def _inner(x: torch.Tensor) -> torch.Tensor:
    return _GELU * (x + _CUBE * x * x * x)


def _addmm_activation(
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
    use_gelu: bool = False,
) -> torch.Tensor:
    made = torch.addmm(x, a, b, beta=beta, alpha=alpha)
    return _gelu(made) if use_gelu else torch.relu(made)


_A = Fraction(-3, 4)  # of the cubic convolution (aten/src/ATen/native/UpSample.h)


def _weights(have: int, out: int, align: bool, scale: float | None) -> torch.Tensor:
    """Return what each of `have` elements counts for each of `out`, ``[out, have]``."""
    if align:
        step = Fraction(have - 1, out - 1) if out > 1 else Fraction(0)
    else:
        step = 1 / Fraction(scale) if scale else Fraction(have, out)
    rows = [[Fraction(0)] * have for _ in range(out)]
    for i, row in enumerate(rows):
        at = i * step if align else (i + Fraction(1, 2)) * step - Fraction(1, 2)
        low = math.floor(at)
        t = at - low
        for k, u in enumerate((1 + t, t, 1 - t, 2 - t)):
            far = _A * (u - 1) * (u - 2) ** 2
            weight = (u - 1) * ((_A + 2) * u * u - u - 1) if k in (1, 2) else far
            row[min(max(low - 1 + k, 0), have - 1)] += weight
    return torch.tensor([[float(w) for w in row] for row in rows], dtype=torch.float64)


def _bicubic(
    x: torch.Tensor, size: Sequence[int], align: bool, *scales: float | None
) -> torch.Tensor:
    given = scales or (None, None)
    high, wide = (_weights(x.shape[2 + d], size[d], align, given[d]) for d in range(2))
    return high @ x @ wide.mT


def _bicubic_backward(
    grad: torch.Tensor,
    size: Sequence[int],
    given: Sequence[int],
    align: bool,
    *scales: float | None,
) -> torch.Tensor:
    steps = scales or (None, None)
    high, wide = (_weights(given[2 + d], size[d], align, steps[d]) for d in range(2))
    return high.mT @ grad @ wide


def _unscaled(
    gradients: Sequence[torch.Tensor], found: torch.Tensor, inverse: torch.Tensor
) -> None:
    """Multiply gradients by a factor in place, and set found to 1 if one is not finite."""
    for gradient in gradients:
        if not bool(gradient.isfinite().all()):
            found.fill_(1)
        gradient.mul_(inverse)


def _rescaled(
    scale: torch.Tensor,
    tracker: torch.Tensor,
    found: torch.Tensor,
    growth: float,
    backoff: float,
    interval: int,
) -> torch.Tensor:
    """Update a scale in place: back off after a step that is not finite, grow after many that are.

    It does not grow beyond float32 (aten/src/ATen/native/cpu/AmpGradScalerKernels.cpp).
    """
    if bool(found):
        scale.mul_(backoff)
        tracker.zero_()
    elif int(tracker) + 1 == interval:
        grown = scale * growth
        scale.copy_(grown if bool(grown.float().isfinite()) else scale)
        tracker.zero_()
    else:
        tracker.add_(1)
    return scale


EXACT: Mapping[Any, Callable[..., Any]] = {
    _aten.gelu.default: _gelu,
    _aten.gelu_backward.default: _gelu_backward,
    _aten._addmm_activation.default: _addmm_activation,
    _aten.upsample_bicubic2d.default: _bicubic,
    _aten.upsample_bicubic2d_backward.default: _bicubic_backward,
    _aten._amp_foreach_non_finite_check_and_unscale_.default: _unscaled,
    _aten._amp_update_scale_.default: _rescaled,
}
"""By overload. They take what the op takes, its floating tensors in float64."""
