"""The derivative that values have: right within its bound, which a wrong one exceeds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from amp_fuzz.interfaces.check_op.slopes import CLOSE, STEPS, Slopes, slopes, width

POINTS = torch.tensor([0.3, 1.7, -0.9, 5.0], dtype=torch.float64)
FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "sin": (torch.sin, torch.cos),
    "exp": (torch.exp, torch.exp),
    "square": (torch.square, lambda x: 2 * x),
    "quartic": (lambda x: x**4 - x, lambda x: 4 * x**3 - 1),
    "sigmoid": (torch.sigmoid, lambda x: torch.sigmoid(x) * torch.sigmoid(-x)),
}
# Of a derivative, the share by which it is wrong, as an op that computes in the dtype shows it.
WRONG = {torch.float64: 1e-4, torch.float32: 0.1}


def found(function: Callable[[Tensor], Tensor], dtype: torch.dtype, at: Tensor = POINTS) -> Slopes:
    far = width(dtype)
    places = [far * k / STEPS for k in range(-STEPS, STEPS + 1)] + [-far / CLOSE, far / CLOSE]
    rows = [function((at + by).to(dtype)).to(torch.float64) for by in places]
    return slopes(torch.stack(rows), dtype)


@pytest.mark.parametrize("dtype", WRONG, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_right_slope_is_within_its_bound_and_a_wrong_one_is_not(
    name: str, dtype: torch.dtype
) -> None:
    function, derivative = FUNCTIONS[name]
    got, right = found(function, dtype), derivative(POINTS)
    wrong = right + WRONG[dtype] * got.size
    assert bool(got.trusted.all())
    assert bool(((got.slope - right).abs() <= got.bound).all())
    assert bool(((got.slope - wrong).abs() > got.bound).all())


@pytest.mark.parametrize("factor", [0.99, -1.0, 2.0])
def test_a_slope_of_another_function_is_noticed(factor: float) -> None:
    got = found(lambda x: factor * torch.sin(x), torch.float64)
    assert bool(((got.slope - torch.cos(POINTS)).abs() > got.bound).all())


def test_a_kink_between_the_points_is_not_trusted() -> None:
    got = found(torch.relu, torch.float64, torch.tensor([0.0, 1e-5, 1.0], dtype=torch.float64))
    assert got.trusted.tolist() == [False, False, True]


def test_at_a_small_kink_the_bound_holds_the_slopes_of_both_sides() -> None:
    at = torch.tensor([0.0], dtype=torch.float64)
    got = found(lambda x: 3 * x + 0.2 * x.abs(), torch.float64, at)
    assert float(got.slope - got.bound) <= 2.8
    assert float(got.slope + got.bound) >= 3.2


def test_a_staircase_and_a_value_that_is_not_finite_are_not_trusted() -> None:
    step = width(torch.float64) / STEPS

    def stairs(x: Tensor) -> Tensor:  # each point is on a stair of its own, those beside it too
        return torch.round(x / step) * step

    got = found(stairs, torch.float64, torch.tensor([step * 5000], dtype=torch.float64))
    assert not bool(got.trusted.any())
    far = found(lambda x: 1 / (x - x.clamp(max=4.9)), torch.float64)
    assert far.trusted.tolist() == [False, False, False, True]
