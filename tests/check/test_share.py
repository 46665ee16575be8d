"""A verdict says which share of the values was judged, and needs half of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import amp_fuzz
from amp_fuzz.interfaces.check.messages import Share
from amp_fuzz.reference.shadow.exact import EXACT
from amp_fuzz.reference.shadow.mode import Shadow
from tests.check.faults import BrokenCompiler, kernels
from tests.check.models import training_step

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))

# Another honest compiler: its sums are one unit in the last place off, so that numbers differ.
OTHER = BrokenCompiler(
    rung="aot_eager", patches=kernels({"aten.sum.default": lambda op, x: op(x) * (1 + 2**-23)})
)


def _one_of_three(x: Tensor) -> Any:
    total = x.square().sum()
    return x.relu(), total.item(), total.item() * 2


def _three_of_four(x: Tensor) -> Any:
    return x.relu(), x.neg(), x.abs(), x.square().sum().item()


@pytest.mark.parametrize(
    ("function", "verdict", "head", "line"),
    [
        (
            _one_of_three,
            "unjudged",
            "CANNOT BE JUDGED",
            "not judged: 1 of 3 values judged: 3 values, within their rounding",
        ),
        (
            _three_of_four,
            "agrees",
            "agrees, 3 of 4 values judged",
            "agrees: 3 of 4 values judged: 4 values, within their rounding",
        ),
    ],
)
def test_a_verdict_says_which_share_was_judged_and_needs_half(
    function: Callable[[Tensor], Any], verdict: str, head: str, line: str
) -> None:
    """No shadow follows a Python number."""
    result = amp_fuzz.check(function, X, backends=[OTHER], autocast=None, store=None)
    assert (result.verdict, result.ok) == (verdict, verdict == "agrees"), str(result)
    first, second, *_ = str(result).splitlines()
    assert first.endswith(head)
    assert line in second
    assert "no shadow could follow" in second


@pytest.mark.thorough
def test_a_number_that_is_equal_is_judged() -> None:
    result = amp_fuzz.check(
        lambda x: (x @ x.T, len(x)), X, backends=["compile[aot_eager]"], store=None
    )
    assert result.ok, str(result)
    assert result.runs[0].share == Share(judged=2, of=2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_value_of_a_step_with_a_gradient_scaler_can_be_judged(dtype: torch.dtype) -> None:
    """The kernels of a scaler take no float64: without formulas, nothing after them was known."""
    step, given = training_step(dtype)
    mode = Shadow()
    with mode:
        losses = step(*given)
    assert mode.refused == {}
    assert all(mode.band(loss).known for loss in losses)


@pytest.mark.parametrize("gradient", [1.5, float("inf"), float("nan")])
@pytest.mark.parametrize("tracked", [0, 2])
@pytest.mark.parametrize("scale", [1024.0, 3e38])
def test_the_formulas_of_a_gradient_scaler_are_those_of_torch(
    gradient: float, tracked: int, scale: float
) -> None:
    unscale = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
    update = torch.ops.aten._amp_update_scale_.default

    def step(one: Any, other: Any, dtype: torch.dtype) -> list[Tensor]:
        gradients = [torch.tensor([2.0, gradient], dtype=dtype), torch.ones(1, dtype=dtype)]
        found, inverse = torch.zeros(1, dtype=dtype), torch.full((1,), 0.25, dtype=dtype)
        size = torch.full((1,), scale, dtype=torch.float32).to(dtype)
        tracker = torch.full((1,), tracked, dtype=torch.int32)
        one(gradients, found, inverse)
        other(size, tracker, found, 2.0, 0.5, 3)
        return [t.float() for t in (*gradients, found, size, tracker)]

    torchs = step(unscale, update, torch.float32)
    ours = step(EXACT[unscale], EXACT[update], torch.float64)
    assert all(
        torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(torchs, ours, strict=True)
    )
