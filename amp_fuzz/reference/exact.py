"""Functions whose kernel in float64 cancels, by formulas that do not: for what shadows compute.

The copies of a shadow are float64. Of float64 itself a kernel's own rounding is seen only where
they compute in another way than it does: what `1 + erf` loses, `erfc` keeps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
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


EXACT: Mapping[Any, Callable[..., Any]] = {
    _aten.gelu.default: _gelu,
    _aten.gelu_backward.default: _gelu_backward,
    _aten._addmm_activation.default: _addmm_activation,
}
"""By overload. They take what the op takes, in float64."""
