"""Products whose inputs are rounded first: what that explains, and what it does not."""

from __future__ import annotations

import pytest
import torch

from amp_fuzz.oracle.rounding import THRESHOLD
from amp_fuzz.reference.shadow.band import Distance, distance
from amp_fuzz.reference.shadow.mode import Shadow
from amp_fuzz.reference.shadow.products import Products

BFLOAT16, THREE = Products(digits=8), Products(digits=8, passes=3)
TF32 = Products(digits=11, truncates=True)


def parts(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    high = x.bfloat16().float()
    return high, (x - high).bfloat16().float()


def once(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return parts(a)[0] @ parts(b)[0]


def thrice(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    (a, a_low), (b, b_low) = parts(a), parts(b)
    return a @ b + (a @ b_low + a_low @ b)


def truncated(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a, b = ((x.view(torch.int32) & ~0x1FFF).view(torch.float32) for x in (a, b))
    return a @ b


def off(made: torch.Tensor, a: torch.Tensor, b: torch.Tensor, how: Products | None) -> Distance:
    mode = Shadow(64, 0, products=lambda func: how)
    with mode:
        band = mode.band(a @ b)
    return distance(band, made)


def worst(found: Distance) -> float:
    return max(found.excess, found.bias)


_generator = torch.Generator().manual_seed(0)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=_generator)


INPUTS = {
    "normal": (drawn(6, 9), drawn(9, 5)),
    "equal": (torch.full((8, 64), 1.2345), torch.full((64, 8), 0.7773)),
    "positive": (drawn(16, 64).abs(), drawn(64, 16).abs()),
    "large": (drawn(4, 4) * 1e30, drawn(4, 4)),
}
HONEST = {"one": (once, BFLOAT16), "three": (thrice, THREE), "tf32": (truncated, TF32)}


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("way", HONEST)
def test_the_platforms_rounding_is_explained_by_its_arithmetic_only(way: str, inputs: str) -> None:
    compute, how = HONEST[way]
    a, b = INPUTS[inputs]
    made = compute(a, b)
    assert worst(off(made, a, b, how)) < THRESHOLD
    if inputs == "normal":  # the others may round to much the same
        assert worst(off(made, a, b, None)) > THRESHOLD


def test_a_missing_pass_is_not_explained() -> None:
    a, b = INPUTS["normal"]
    assert worst(off(once(a, b), a, b, THREE)) > THRESHOLD


def test_a_wrong_value_beside_the_rounding_is_not_explained() -> None:
    a, b = INPUTS["normal"]
    made = once(a, b)
    made[2, 3] *= 1.2
    assert worst(off(made, a, b, BFLOAT16)) > THRESHOLD
    assert worst(off(once(a, b) * 1.02, a, b, BFLOAT16)) > THRESHOLD


def test_inputs_that_need_no_rounding_have_the_band_of_float32() -> None:
    a, b = ((drawn(6, 6) * 4).round() for _ in range(2))
    assert worst(off(a @ b + 0.01, a, b, BFLOAT16)) > THRESHOLD


def test_only_products_have_the_wide_band() -> None:
    mode = Shadow(64, 0, products=lambda func: BFLOAT16)
    x = drawn(64)
    with mode:
        band = mode.band(x * x)
    wrong = x.bfloat16().float() * x.bfloat16().float()
    assert worst(distance(band, wrong)) > THRESHOLD


def test_what_is_added_to_a_product_is_not_rounded() -> None:
    mode = Shadow(64, 0, products=lambda func: BFLOAT16)
    a, b, bias = torch.zeros(3, 4), torch.zeros(4, 5), drawn(5)
    with mode:
        band = mode.band(torch.addmm(bias, a, b))
    wrong = bias.bfloat16().float().expand(3, 5).contiguous()
    assert worst(distance(band, wrong)) > THRESHOLD


def test_the_gradient_of_a_product_with_a_vector_is_a_product() -> None:
    """The test notices if autograd's private `_current_autograd_node` or the names change."""
    a, v, start = drawn(5, 4).requires_grad_(), drawn(4), drawn(5)
    mode = Shadow(64, 0, products=lambda func: BFLOAT16)
    with mode:
        torch.mv(a, v).backward(start)
        assert a.grad is not None
        band = mode.band(a.grad)
    rounded = start.bfloat16().float()[:, None] * v.bfloat16().float()[None]
    assert worst(distance(band, rounded)) < THRESHOLD


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_are_not_rounded(dtype: torch.dtype) -> None:
    assert not BFLOAT16.rounds(dtype)
    assert BFLOAT16.rounds(torch.float32)
    assert BFLOAT16.rounds(torch.float16)
    assert TF32.rounds(torch.float32)
    assert not TF32.rounds(torch.float16)


def test_a_number_beyond_bfloat16_becomes_infinite() -> None:
    x = torch.tensor([3.4e38])
    made = BFLOAT16.of(x.double().expand(9, 1), x, torch.zeros_like)
    assert torch.isinf(made[1]).all()
    assert torch.isfinite(made[0]).all()
