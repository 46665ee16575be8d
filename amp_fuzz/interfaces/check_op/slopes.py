"""A derivative from values, with a bound for its error that the same values give.

A function is computed at `STEPS` points on each side of one. A polynomial is fitted, and its slope
at the point is the derivative. What the polynomial cannot follow (rounding, a kink between the
points, higher derivatives) remains as a residual, and bounds the error of the slope. At a kink the
slopes of the two sides differ, by more than either is wrong. No tolerance is chosen: a forward that
computes in fewer digits gives larger residuals, and so a larger bound.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["CLOSE", "STEPS", "Slopes", "slopes", "unit", "width"]

STEPS = 5
"""How many points are on each side of the one where the derivative is taken."""

CLOSE = 64
"""How much closer to it two more points are: on a staircase, those beside it are a line."""

_SIDE = torch.arange(1, STEPS + 1, dtype=torch.float64) / STEPS  # in units of the width
_ODD = torch.stack([_SIDE, _SIDE**3], 1)
_EVEN = torch.stack([_SIDE**2, _SIDE**4], 1)
_ONE = torch.stack([_SIDE, _SIDE**2], 1)
_SOLVED = {
    name: torch.linalg.pinv(m) for name, m in (("odd", _ODD), ("even", _EVEN), ("one", _ONE))
}


def unit(dtype: torch.dtype) -> float:
    """Return the unit roundoff of a dtype."""
    return torch.finfo(dtype).eps / 2


def width(dtype: torch.dtype) -> float:
    """Return how far the outermost points are, as a share of the point.

    The slope is exact for polynomials of degree 4. So its error is smallest where the fourth power
    of the width equals the unit roundoff divided by the width.
    """
    return float(unit(dtype) ** 0.2)


@dataclass(frozen=True, slots=True)
class Slopes:
    """The derivatives of some values in one direction: float64, one for each value.

    bound: for the error of each. size: of each value and its derivative together.
    """

    slope: torch.Tensor
    bound: torch.Tensor
    size: torch.Tensor

    @property
    def trusted(self) -> torch.Tensor:
        """Which of them say anything: the bound is at most a tenth of the size."""
        return self.bound <= 0.1 * self.size


def slopes(values: torch.Tensor, dtype: torch.dtype) -> Slopes:
    """Return the derivatives at the middle one of ``2 * STEPS + 1`` rows of float64 values.

    They are equally far from each other, and the outermost ones at `width`. Two more rows follow,
    `CLOSE` times closer than those. dtype: in which the values were computed. A value that is not
    finite in each row is not trusted, nor is one that should move at the closest points and stays.
    """
    far, info = width(dtype), torch.finfo(dtype)
    finite = torch.isfinite(values).all(0)
    values = torch.where(finite, values, torch.zeros_like(values))
    middle, close, values = values[STEPS], values[-2:], values[:-2]
    after, before = values[STEPS + 1 :], values[:STEPS].flip(0)
    odd, even = (after - before) / 2, (after + before) / 2 - middle
    by_odd = _SOLVED["odd"] @ odd
    residual = torch.maximum(
        (odd - _ODD @ by_odd).abs().amax(0),
        (even - _EVEN @ (_SOLVED["even"] @ even)).abs().amax(0),
    )
    # Rounding the values and the points makes at least this; few residuals may be small by chance.
    least = unit(dtype) * (values.abs().amax(0) + 2 * by_odd[0].abs() / far)
    residual = 2 * torch.maximum(residual, least + info.eps * info.smallest_normal)
    sides = [(_SOLVED["one"] @ side)[0] for side in (after - middle, middle - before)]
    bound = residual * float(_SOLVED["odd"][0].abs().sum()) + (sides[0] - sides[1]).abs()
    slope, size = by_odd[0] / far, (by_odd[0].abs() / far + middle.abs())
    moves = by_odd[0].abs() / CLOSE > 16 * unit(dtype) * size
    finite &= ~(moves & (close == middle).all(0))
    typical = float(size[finite].median()) if bool(finite.any()) else 0.0
    bound = torch.where(finite, bound / far, torch.full_like(bound, torch.inf))
    return Slopes(slope, bound, size + (typical or 1.0))
