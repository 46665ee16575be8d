"""Shadows follow honest code within a few units, and what is not rounding is far away."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from torch.nn import functional

from amp_fuzz import reference
from amp_fuzz.reference.shadow.exact import EXACT
from amp_fuzz.reference.shadow.mode import Band, Shadow, distance, either, shadow, unit

THRESHOLD = 4.0


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def off(band: Band, value: torch.Tensor) -> float:
    found = distance(band, value)
    return max(found.excess, found.bias)


X, W = randn(6, 16), randn(16, 16, seed=1)


def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with reference.autocast("cpu", dtype=torch.bfloat16):
        return torch.softmax(torch.mm(x, w), -1)


def test_an_honest_result_is_in_its_band() -> None:
    found = shadow(layer, X, W)
    band = found.band(found.result)
    assert band.known
    assert band.left == ()
    assert band.samples.shape == (8, 6, 16)
    assert torch.equal(band.nominal, found.result)
    assert distance(band, band.nominal).excess < THRESHOLD
    found = shadow(layer, X, W, samples=64)
    assert distance(band := found.band(found.result), band.nominal).excess < 1.5


def test_the_nominal_computation_is_what_it_is_without_shadows() -> None:
    assert torch.equal(shadow(layer, X, W).result, layer(X, W))


@pytest.mark.parametrize("samples", [8, 64])
def test_another_order_of_summation_is_rounding(samples: int) -> None:
    found = shadow(torch.mm, X, W, samples=samples)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(2))
    other = torch.mm(X[:, order].contiguous(), W[order].contiguous())
    assert off(found.band(found.result), other) < THRESHOLD


# What a wrong kernel does to the result of mm in bfloat16, of 6 x 16 elements.
FAULTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a gain of 2 %": lambda y: y * 1.02,
    "one element": lambda y: y.masked_fill(torch.arange(96).reshape(6, 16) == 37, 9.0),
    "a dropped term": lambda y: y - (X[:, :1] @ W[:1]).to(y.dtype),
    "a sign": lambda y: -y,
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_kernel_is_over_the_threshold(name: str) -> None:
    with reference.autocast("cpu", dtype=torch.bfloat16):
        found = shadow(torch.mm, X, W, samples=64)
    band = found.band(found.result)
    assert off(band, found.result) < THRESHOLD
    assert off(band, FAULTS[name](found.result)) > THRESHOLD


def test_a_sum_in_the_narrow_dtype_is_over_the_threshold() -> None:
    x, w = randn(8, 256).bfloat16(), randn(256, 8, seed=1).bfloat16()
    found = shadow(torch.mm, x, w, samples=64)
    total = torch.zeros(8, 8, dtype=torch.bfloat16)
    for k in range(256):
        total += x[:, k : k + 1] * w[k : k + 1]
    assert off(found.band(found.result), total) > THRESHOLD


def test_a_cast_that_is_skipped_shows_where_it_may_not_be() -> None:
    """Float32 instead of bfloat16 is inside a bfloat16 band; bfloat16 instead of float32 is not."""
    x, w = X.requires_grad_(False), W
    low = shadow(lambda: torch.mm(x.bfloat16(), w.bfloat16()).float())
    assert off(low.band(low.result), torch.mm(x, w)) < THRESHOLD
    high = shadow(torch.mm, x, w)
    assert off(high.band(high.result), torch.mm(x.bfloat16(), w.bfloat16()).float()) > 1000


def test_gradients_have_bands() -> None:
    w = W.clone().requires_grad_()

    def train() -> torch.Tensor:
        layer(X, w).float().square().sum().backward()
        assert w.grad is not None
        return w.grad

    found = shadow(train)
    band = found.band(found.result)
    assert off(band, found.result) < THRESHOLD
    assert off(band, found.result * 1.5) > THRESHOLD


# -- what is exact -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.t().reshape(-1)[2:],
        functional.relu,
        lambda x: -x,
        lambda x: x * 2,
        lambda x: torch.cat([x, x]),
        lambda x: x.clone().fill_(3.0),
        lambda x: torch.where(x > 0, x, 0.0),
    ],
)
def test_what_rounds_nothing_has_no_spread(
    function: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    found = shadow(function, X)
    band = found.band(found.result)
    assert torch.equal(band.samples, band.clean.expand(8, *band.clean.shape))
    assert torch.equal(band.clean, found.result.double())


def test_a_cast_down_has_the_spread_of_its_dtype() -> None:
    found = shadow(lambda: X.bfloat16())
    band = found.band(found.result)
    relative = ((band.samples - band.clean).abs() / band.clean.abs()).amax()
    assert 2**-10 < relative < 2**-7
    assert torch.equal(band.clean, X.double())


# -- memory --------------------------------------------------------------------------------------


def test_views_and_in_place_ops_are_the_same_value() -> None:
    def steps() -> torch.Tensor:
        x = torch.mm(X, W)
        x[:, 1:3].exp_()
        x.t()[0] = 1.0
        return x

    found = shadow(steps)
    band = found.band(found.result)
    assert off(band, found.result) < THRESHOLD
    assert torch.equal(band.clean[:, 0], torch.ones(6, dtype=torch.float64))
    assert (band.samples[:, :, 1:3] != band.clean[:, 1:3]).any()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.div_(x),
        lambda x: x.addcmul_(x, x),
        lambda x: x.hypot_(x),
        lambda x: torch.mul(x, x, out=x),
        lambda x: x.atan2_(x),
    ],
)
def test_an_op_may_write_what_it_also_reads(
    function: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    found = shadow(lambda: function(torch.mm(X, W)))
    assert off(found.band(found.result), found.result) < THRESHOLD
    assert off(found.band(found.result), found.result * 1.1) > THRESHOLD


def test_uninitialised_memory_is_no_result() -> None:
    """What it holds by chance has neither a spread nor an overflow."""

    def fill() -> torch.Tensor:
        torch.full((64,), float("inf"))  # its memory is what the next one may get
        y = torch.empty(64)
        y[:] = 1.0
        return y + torch.full_like(y, 0.1)

    found = shadow(fill)
    band = found.band(found.result)
    assert band.left == ()
    assert off(band, found.result) < THRESHOLD


def test_a_draw_into_uninitialised_memory_is_known() -> None:
    """Whatever it held: NaN is no sign that something inexact came in."""

    def draw() -> torch.Tensor:
        noise = torch.full((64,), float("nan"))
        return noise.bernoulli_(0.5).div_(0.5) * 3

    found = shadow(draw)
    band = found.band(found.result)
    assert band.known
    assert off(band, found.result) < THRESHOLD


def test_out_is_written() -> None:
    target = torch.zeros(6, 16)
    found = shadow(lambda: torch.mm(X, W, out=target))
    band = found.band(target)
    assert band.samples.std(0).max() > 0
    assert off(band, X @ W) < THRESHOLD


def test_complex_and_conjugate_views() -> None:
    found = shadow(lambda: torch.fft.ifft(X, norm="ortho"))
    assert off(found.band(found.result), found.result) < THRESHOLD


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    "function",
    [
        torch.fft.ihfft,
        lambda x: torch.resolve_conj(torch.complex(x, x + 1).conj()),
        lambda x: torch.resolve_neg(torch.complex(x, x + 1).conj().imag),
        lambda x: torch.complex(x, x + 1).conj().add_(1).conj(),
    ],
)
def test_lazy_conjugates_are_followed_in_inference_mode_too(
    function: Callable[[torch.Tensor], torch.Tensor], mode: Any
) -> None:
    def inside() -> torch.Tensor:
        with mode():
            return function(X)

    with mode():
        found = [shadow(function, X)]
    found.append(shadow(inside))
    for each in found:
        band = each.band(each.result)
        assert not band.known or off(band, band.nominal) < THRESHOLD


def test_discrete_results_may_be_what_any_sample_came_to() -> None:
    x = torch.tensor([[1.0, 1.0 + 1e-7, 0.0]])
    found = shadow(lambda: torch.mm(x, torch.eye(3)).argmax(-1), samples=64)
    band = found.band(found.result)
    assert distance(band, torch.tensor([0])).excess == 0
    assert distance(band, torch.tensor([1])).excess == 0
    assert distance(band, torch.tensor([2])).excess == float("inf")


def test_discrete_results_may_be_torchs_own() -> None:
    """Another implementation that is off elsewhere is not blamed for what torch does too."""
    nominal = torch.tensor([True, False, False])
    clean = torch.tensor([False, False, False])
    band = Band(nominal, clean, clean.expand(8, 3), True, ())
    assert distance(band, band.nominal).excess == float("inf")  # torch itself, without allowance
    assert distance(band, torch.tensor([True, False, False])).excess == 0
    assert distance(band, torch.tensor([True, False, True])).index == (2,)


def test_a_seeded_op_takes_the_nominal_draw() -> None:
    torch.manual_seed(0)
    found = shadow(lambda: torch.rand(4) * 3)
    assert off(found.band(found.result), found.result) < THRESHOLD


# -- range ---------------------------------------------------------------------------------------


def test_what_leaves_the_range_is_named() -> None:
    found = shadow(lambda: (torch.full((3,), 300.0).half().square()).float() / 2)
    band = found.band(found.result)
    assert band.left
    assert torch.isinf(found.result).all()
    assert torch.isinf(band.samples).all()


def test_what_stays_in_range_is_not() -> None:
    found = shadow(lambda: torch.full((3,), 200.0).half().square())
    assert found.band(found.result).left == ()


# -- what cannot be followed ---------------------------------------------------------------------


def test_bits_seen_as_another_dtype_are_unknown_and_do_no_harm() -> None:
    c = torch.complex(X, X + 1)
    found = shadow(lambda: ((y := c @ c.t()), y.real.clone()))
    whole, part = found.result
    assert found.band(whole).known
    assert found.band(whole).samples.real.std(0).max() > 0
    assert not found.band(part).known


def test_a_random_op_of_something_inexact_is_unknown() -> None:
    found = shadow(lambda: functional.rrelu(torch.mm(X, W), training=True))
    assert not found.band(found.result).known


@pytest.mark.parametrize("exact", [True, False])
def test_what_may_draw_and_does_not_is_followed(exact: bool) -> None:
    """Attention is tagged as random whether anything is dropped or not."""

    def attend() -> torch.Tensor:
        given = X if exact else torch.mm(X, W)
        heads = given[None, None, :, :8]
        return functional.scaled_dot_product_attention(heads, heads, heads)

    found = shadow(attend)
    band = found.band(found.result)
    assert band.known
    assert 0 < band.samples.std(0).max() < 1e-5
    assert distance(band, found.result * (1 + 1e-7)).excess < 4
    assert distance(band, found.result * 1.001).excess > 4


def test_a_probability_may_be_a_tensor_of_them() -> None:
    chances = torch.tensor([0.0, 0.5, 1.0])
    found = shadow(lambda: torch.ones(3).bernoulli_(chances))
    assert found.result[0] == 0
    assert found.result[2] == 1
    assert bool((found.band(found.result).samples == found.result).all())


def test_a_bound_of_a_draw_is_no_probability() -> None:
    found = shadow(lambda: functional.rrelu(torch.mm(X, W), lower=0.0, upper=0.5, training=True))
    assert not found.band(found.result).known


def test_shadows_leave_the_generator_alone() -> None:
    def draw() -> torch.Tensor:
        functional.rrelu(torch.mm(X, W), lower=0.0, upper=0.5, training=True)
        return torch.rand(4)

    torch.manual_seed(0)
    plain = draw()
    torch.manual_seed(0)
    assert torch.equal(shadow(draw).result, plain)


def test_infinity_where_none_belongs_is_infinitely_far() -> None:
    found = shadow(torch.mm, X, W)
    band = found.band(found.result)
    for bad in (float("nan"), float("inf")):
        assert distance(band, torch.full_like(found.result, bad)).excess == float("inf")


def test_a_distance_is_between_like_tensors() -> None:
    found = shadow(torch.mm, X, W)
    band = found.band(found.result)
    with pytest.raises(ValueError, match=r"value is torch\.float64"):
        distance(band, found.result.double())
    with pytest.raises(ValueError, match=r"value is torch\.float32\[5, 16\]"):
        distance(band, found.result[:5])


def test_an_op_that_refuses_copies_makes_its_results_unknown() -> None:
    library = torch.library.Library("amp_fuzz_shadow_test", "DEF")
    library.define("only_float(Tensor x) -> Tensor")

    def only_float(x: torch.Tensor) -> torch.Tensor:
        if x.dtype != torch.float32:
            raise RuntimeError("float32 only")
        return x + 1

    library.impl("only_float", only_float, "CPU")
    found = shadow(lambda: torch.ops.amp_fuzz_shadow_test.only_float(X) * 2)
    band = found.band(found.result)
    assert not band.known
    assert math.isnan(distance(band, found.result + 100).excess)
    assert "float32 only" in next(iter(found.mode.refused.values()))


def test_autograds_zeros_without_memory_do_no_harm() -> None:
    x = X.clone().requires_grad_()

    def train() -> Any:
        return torch.autograd.grad(torch.sgn(x).sum(), x)

    shadow(train)


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="samples=1 must be at least 2"):
        shadow(torch.neg, X, samples=1)


def test_samples_depend_on_the_seed_alone() -> None:
    def samples(seed: int) -> torch.Tensor:
        found = shadow(torch.mm, X, W, seed=seed)
        return found.band(found.result).samples

    assert torch.equal(samples(1), samples(1))
    assert not torch.equal(samples(1), samples(2))


def test_any_seed_of_64_bits_can_be_given() -> None:
    for seed in (2**64 - 1, 2**60, -(2**63)):
        assert shadow(torch.mm, X, W, seed=seed).mode.refused == {}


def test_equal_elements_count_as_one() -> None:
    """A kernel rounds them alike: a hundred that are off by as much are no hundred witnesses."""

    def bias(x: torch.Tensor) -> float:
        result = shadow(torch.erf, x, samples=8)
        band = result.band(result.result)
        return distance(band, band.nominal * (1 + 2.0**-22)).bias

    assert bias(torch.ones(100)) < 4 < bias(torch.linspace(0.5, 1.5, 100))


def test_subnormal_numbers_of_float64_have_a_unit() -> None:
    result = shadow(lambda x: x * 0.5, torch.tensor([3e-311], dtype=torch.float64))
    band = result.band(result.result)
    assert distance(band, band.nominal + math.ulp(0.0)).excess <= 1


def test_units_are_positive_and_of_the_bands_shape() -> None:
    mode = Shadow()
    with mode:
        y = torch.mm(X, W)
    band = mode.band(y)
    assert unit(band).shape == y.shape
    assert (unit(band) > 0).all()
    assert (unit(band) >= unit(band, own=False)).all()


def test_a_large_element_is_no_licence_for_the_small_ones_beside_it() -> None:
    mode = Shadow()
    with mode:
        y = torch.mm(torch.tensor([[1.25], [18000.0]]), torch.tensor([[1.25]])).half()
    assert y.flatten().tolist() == [1.5625, 22496.0]
    for wrong in (3.125, 1.5645):  # twice the value, and one step of float16 beside it
        value = torch.tensor([[wrong], [22496.0]]).half()
        assert (distance(mode.band(y), value).excess > THRESHOLD) == (wrong == 3.125)


def test_an_element_whose_samples_agree_has_the_spread_of_others() -> None:
    """All digits cancel in it; another order of adding need not come to 0."""
    samples = torch.tensor([[1.01, 0.0, 1.99], [0.99, 0.0, 2.01]], dtype=torch.float64)
    clean = torch.tensor([1.0, 0.0, 2.0], dtype=torch.float64)
    band = Band(clean.float(), clean, samples, known=True, left=())
    assert 1.4 < distance(band, torch.tensor([1.0, 0.001, 2.0])).excess < 1.6
    assert distance(band, torch.tensor([1.0, 0.01, 2.0])).excess > THRESHOLD


def test_a_few_elements_that_spread_are_no_licence_for_many_zeros() -> None:
    """The gradient of a table is 0 in the rows that nothing looked up."""

    def gradient() -> torch.Tensor:
        table = randn(64, 32).bfloat16().requires_grad_()
        torch.nn.functional.embedding(torch.tensor([3]), table).tanh().sum().backward()
        assert table.grad is not None
        return table.grad

    found = shadow(gradient, samples=64)
    band = found.band(found.result)
    leaked = band.nominal.clone()
    leaked[10] = 0.001  # where a number of the third row is rounded by 0.002
    assert distance(band, band.nominal).excess < 2
    assert distance(band, leaked).excess > THRESHOLD


# -- what another implementation may do -----------------------------------------------------------


def test_subnormal_numbers_may_be_taken_for_0_and_others_may_not() -> None:
    small, normal = torch.tensor([1e-40, 1e-38]), torch.tensor([1e-36])
    for flushes in (False, True):
        mode = Shadow(flushes=flushes)
        with mode:
            kept, gone = normal * 1.5, small * 1.5
        assert off(mode.band(kept), kept * 0) > THRESHOLD
        for zeros in (gone * 0, gone * torch.tensor([0.0, 1.0])):
            assert (off(mode.band(gone), zeros) < THRESHOLD) == flushes
        assert off(mode.band(gone), gone * 40) > THRESHOLD


def test_a_reciprocal_that_is_subnormal_may_make_a_quotient_0() -> None:
    """XLA divides many numbers by one as it multiplies with the reciprocal of it."""
    high = torch.tensor([3e38, 3e38])
    for divisor, below in ((3e38, True), (5e37, False)):
        for flushes in (False, True):
            mode = Shadow(flushes=flushes)
            with mode:
                found = high / torch.tensor([divisor])
            assert (off(mode.band(found), found * 0) < THRESHOLD) == (below and flushes)
            assert off(mode.band(found), found * 40) > THRESHOLD


def test_an_infinite_copy_stays_infinite() -> None:
    small = torch.tensor([1e-40])
    mode = Shadow(16, flushes=True)
    with mode:
        found = small.double().pow(-1.5)
    samples = mode.band(found).samples
    assert not torch.isnan(samples).any()
    assert {bool(torch.isinf(s)) for s in samples} == {True, False}


def test_a_sum_may_leave_the_range_in_another_order_where_one_can() -> None:
    """The samples hold what some order comes to, which is what the range rule looks at."""
    high = torch.tensor([8e37, -8e37] * 5)
    for terms, leaves in ((high, True), (high / 4, False)):
        for reorders in (False, True):
            mode = Shadow(reach="bounded", reorders=reorders)
            with mode:
                total = terms.sum()
            assert bool(torch.isnan(mode.band(total).samples).any()) == (leaves and reorders)


@pytest.mark.parametrize("flushes", [False, True])
@pytest.mark.parametrize("reorders", [False, True])
def test_a_bounded_run_is_in_step_with_an_unbounded_one(reorders: bool, flushes: bool) -> None:
    """What left the range is where the two differ: elements beside it are the same, bit by bit."""
    a, b = torch.tensor([1e20, 1e-38, 1.25]), torch.tensor([3e20, 2e-38, 0.75])
    found = []
    for reach in ("unbounded", "bounded"):
        with Shadow(32, 7, reach, flushes=flushes, reorders=reorders) as mode:
            made = (a * a - b * b).exp().mul(0.3)
        found.append(mode.band(made).samples)
    alike = (found[0] == found[1]).all(0)
    assert alike.tolist() == [False, True, True]
    assert len(set(found[0][:, 2].tolist())) > 8


def test_an_op_that_raises_in_one_of_two_runs_leaves_them_in_step() -> None:
    """What it makes of an infinite copy is not known; what other ops make is drawn as before."""
    library = torch.library.Library("amp_fuzz_step_test", "DEF")
    library.define("finite(Tensor x) -> Tensor")

    def finite(x: torch.Tensor) -> torch.Tensor:
        if not torch.isfinite(x).all():
            raise RuntimeError("finite only")
        return x + 1

    library.impl("finite", finite, "CPU")
    a, b = torch.tensor([1e19, 2.0]), torch.tensor([1.25, 0.75])
    found = []
    for reach in ("unbounded", "bounded"):
        with Shadow(32, 7, reach) as mode:
            torch.ops.amp_fuzz_step_test.finite(a * a)
            made = b.exp().mul(0.3)
        assert bool(mode.refused) == (reach == "bounded")
        found.append(mode.band(made).samples)
    assert torch.equal(*found)


def test_a_fused_product_may_be_beyond_the_range_where_another_is_not() -> None:
    """``a * a - b * b`` beyond the range is NaN, or infinite if one product is not rounded."""
    a, b, c = torch.tensor([1e20]), torch.tensor([3e20]), torch.tensor([1e10])
    for high, reorders in ((True, True), (True, False), (False, True)):
        mode = Shadow(64, reach="bounded", reorders=reorders)
        with mode:
            off_ = a * a - b * b if high else c * c - c
            kept = off_.abs() * 2
        samples = mode.band(kept).samples
        assert bool(torch.isinf(samples).any()) == (high and reorders)
        assert bool(torch.isnan(samples).any()) == high


@pytest.mark.parametrize("reorders", [False, True])
def test_a_cross_product_beyond_the_range_may_be_of_products_that_are(reorders: bool) -> None:
    """``a * b - c * d`` of infinite products is NaN where both are rounded, in torch one is."""
    high = torch.tensor([1e20, 3e20, 2e20])
    for vector, leaves in ((high, True), (high / 1e10, False)):
        mode = Shadow(reach="bounded", reorders=reorders)
        with mode:
            kept = torch.linalg.cross(vector, vector).clamp(1, -1)
        assert bool(torch.isnan(mode.band(kept).samples).any()) == leaves


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("norm", ["batch", "statistics", "layer", "group"])
def test_a_variance_beyond_the_range_is_not_sure(norm: str, wide: bool) -> None:
    """Torch sums the squares of a batch norm in float64; what adds in float32 comes to 0 or NaN."""
    x = torch.arange(12.0, dtype=torch.float64 if wide else torch.float32).reshape(3, 2, 2)
    high = torch.tensor([[1.0, -2.0], [3.0, 0.0], [2.0, -2.5]], dtype=x.dtype)
    x[:, 0] = high * (1e299 if wide else 1e38)
    norms: dict[str, Callable[[], torch.Tensor]] = {
        "batch": lambda: functional.batch_norm(x, None, None, training=True),
        "statistics": lambda: functional.batch_norm(
            x, torch.zeros(2).to(x), torch.ones(2).to(x), training=True
        ),
        "layer": lambda: functional.layer_norm(x, (2,)),
        "group": lambda: functional.group_norm(x, 2),
    }
    found = []
    for reach in ("bounded", "unbounded"):
        mode = Shadow(reach=reach)  # type: ignore[arg-type]
        with mode:
            made = norms[norm]() * 1.0
        found.append(mode.band(made))
    assert found[0].left
    equal = found[0].samples == found[1].samples
    assert not equal[:, :, 0].any()  # the first channel
    assert bool(equal[:, :, 1].all())
    assert torch.isfinite(found[1].samples).all()


@pytest.mark.parametrize("norm", ["evaluated", "infinite", "small", "wide"])
def test_a_norm_whose_variance_stays_in_the_range_is_sure(norm: str) -> None:
    """What no order of adding moves is judged: no copy is infinite that the result is not."""
    x = torch.tensor([[1.0, -2.0], [3.0, 0.5], [2.0, -2.5]])
    norms: dict[str, Callable[[], torch.Tensor]] = {
        "evaluated": lambda: functional.batch_norm(x * 1e25, torch.zeros(2), torch.ones(2)),
        "infinite": lambda: functional.layer_norm(torch.full((2, 2), torch.inf), (2,)),
        "small": lambda: functional.layer_norm(x * 1e15, (2,)),
        "wide": lambda: functional.layer_norm(x.double() * 1e100, (2,)),
    }
    mode = Shadow(reach="bounded")
    with mode:
        made = norms[norm]()
    band = mode.band(made)
    assert not band.left
    assert torch.equal(torch.isfinite(band.samples), torch.isfinite(made).expand(8, *made.shape))


def test_a_cross_product_of_which_one_product_leaves_the_range_is_not_sure() -> None:
    """``a * b - c * d`` of one infinite product: it may be rounded or not."""
    one, other = torch.tensor([0.0, 1e20, 1e18]), torch.tensor([0.0, 1e18, 4e18])
    mode = Shadow(reach="bounded")
    with mode:
        made = torch.linalg.cross(one, other)
    samples = mode.band(made).samples
    assert torch.isfinite(samples[:, 1:]).all()
    assert bool(torch.isnan(samples[1::2, 0]).all())
    assert bool(torch.isinf(samples[::2, 0]).all())


def test_a_mean_within_the_range_is_sure_beside_a_variance_that_is_not() -> None:
    x = torch.tensor([[2.0**126, -(2.0**125)], [2.0**127, 2.0**127]])
    for op in (torch.native_layer_norm, torch.ops.aten._native_batch_norm_legit_functional):
        given = x.T.contiguous() if op is not torch.native_layer_norm else x
        more = ([2], None, None, 1e-5)
        if op is not torch.native_layer_norm:
            more = (None, None, torch.zeros(2), torch.ones(2), True, 0.5, 1e-5)  # type: ignore[assignment]
        found = []
        for reach in ("bounded", "unbounded"):
            mode = Shadow(reach=reach)  # type: ignore[arg-type]
            with mode:
                made = op(given, *more)
            found.append([mode.band(t).samples.reshape(8, -1) for t in made])
        for number, sure in enumerate([[False], [True, False], [False, False]]):
            equal = (found[0][number] == found[1][number]).all(0)
            assert [bool(e) for e in equal][: len(sure)] == sure
        for number, sure in enumerate([[True, False], [False, False]][: len(made) - 3], 3):
            assert (found[0][number] == found[1][number]).all(0).tolist() == sure


def test_a_norm_of_nothing_is_followed() -> None:
    mode = Shadow()
    with mode:
        made = functional.group_norm(torch.zeros(0, 4, 2), 2).sum()
    assert mode.band(made).known


def test_elements_may_be_those_of_either_of_two() -> None:
    one, other = torch.zeros(3), torch.tensor([1e-20, 2e-20, 3e-20])

    def chosen() -> torch.Tensor:
        return either(one * 1.0, other * 1.0)

    found = shadow(chosen)
    assert torch.equal(found.result, one)
    band = found.band(found.result)
    for value in (one, other, torch.tensor([0.0, 2e-20, 0.0]), torch.tensor([1e-20, 0.0, 3e-20])):
        assert off(band, value) < THRESHOLD
    for value in (other * 8, torch.tensor([0.0, 1e-10, 0.0]), torch.tensor([1e-18, 0.0, 0.0])):
        assert off(band, value) > THRESHOLD


def test_what_cancels_may_be_0_and_what_does_not_may_not() -> None:
    """Where the sigmoid of noise of the size 1e12 has a gradient at all, it is where it is 0."""

    def slope(w: torch.Tensor, left: float) -> torch.Tensor:
        y = torch.sigmoid(w * 3.0 - 3e19 + left)
        return torch.autograd.grad(y.sum(), w)[0] * 1e30

    w = torch.full((4,), 1e19).requires_grad_()
    for left, cancels in ((0.0, True), (1e19, False)):
        for samples in (8, 64):
            band = (found := shadow(slope, w, left, samples=samples)).band(found.result)
            reached = band.samples.abs().amax() > 1e28
            assert bool(reached) == (cancels and samples > 16)


def test_what_a_norm_loses_comes_out_larger_where_numbers_are_flushed() -> None:
    """A difference below the smallest normal number is multiplied by up to one over root eps."""
    small = torch.tensor([[1e-38, 3e-38, 2e-38, 4e-38]])
    for flushes in (False, True):
        mode = Shadow(flushes=flushes)
        with mode:
            found = functional.layer_norm(small, [4])
        assert (off(mode.band(found), found * 0) < THRESHOLD) == flushes
        assert off(mode.band(found), found * 400) > THRESHOLD


def test_what_a_flushed_number_makes_of_nan_stands_beside_it() -> None:
    small = torch.tensor([-1e-40, -1.0])
    for flushes in (False, True):
        mode = Shadow(flushes=flushes)
        with mode:
            found = small.log()
        samples = mode.band(found).samples
        assert bool(torch.isinf(samples[:, 0]).any()) == flushes
        assert torch.isnan(samples[:, 1]).all()


def test_two_sums_may_be_equal_and_two_others_may_not() -> None:
    some = randn(64) * 8
    other = some.roll(1)
    for gap, equal in ((0.0, True), (1.0, False)):
        mode = Shadow(64)
        with mode:
            sums = some.sum(), other.sum() + gap
            same, unlike = torch.eq(*sums), torch.ne(*sums)
        assert {bool(s) for s in mode.band(same).samples} == {equal, False}
        assert {bool(s) for s in mode.band(unlike).samples} == {not equal, True}


def test_zeros_are_sorted_in_any_order_unless_it_is_promised() -> None:
    zeros = torch.cat([torch.zeros(18), torch.ones(1)])
    for stable in (False, True):
        mode = Shadow(64)
        with mode:
            values, index = torch.sort(zeros, stable=stable)
            argued = torch.argsort(zeros)
        for found in (index, argued) if not stable else (index,):
            samples = mode.band(found).samples
            kept = torch.arange(19).expand(64, -1)
            assert torch.equal(samples.sort(1).values, kept)
            assert bool((samples == kept).all(1).any())
            assert bool((samples != kept).any()) != stable
            assert (samples[:, 18] == 18).all()
        assert torch.equal(mode.band(values).clean, values.double())


def test_a_power_may_round_its_exponent() -> None:
    """Torch's own kernel does, but for the elements that fill no vector."""
    x = torch.full((18,), 1.4689889862971032e19)
    mode = Shadow()
    with mode:
        found = x.pow(1.7)
    band = mode.band(found)
    exact = x.double().pow(1.7), x.double().pow(float(torch.tensor(1.7)))
    assert not torch.equal(*(e.float() for e in exact))
    for power in exact:
        assert off(band, power.float()) < THRESHOLD
    assert off(band, (exact[1] + 6 * (exact[1] - exact[0])).float()) > THRESHOLD


@pytest.mark.parametrize(
    ("op", "high"),
    [
        (lambda x: torch.linalg.cross(x, x.flip(0), dim=0), 1e160),
        (lambda x: torch.vdot(*[torch.complex(x, x).flatten()] * 2), 1e160),
        (lambda x: functional.interpolate(x[None], 1, mode="linear"), 1.5e308),
    ],
    ids=["cross", "complex", "mean"],
)
def test_what_is_beyond_the_range_inside_an_op_is_not_sure(
    op: Callable[[torch.Tensor], torch.Tensor], high: float
) -> None:
    """Nor is what is computed from it."""
    for size, sure in ((high, False), (1.0, True)):
        found = []
        for reach in ("bounded", "unbounded"):
            x = torch.full((3, 2), size, dtype=torch.float64)
            with Shadow(reach=reach, reorders=True) as mode:  # type: ignore[arg-type]
                band = mode.band(op(x).neg())
            found.append(band.samples)
            assert bool(band.left) != sure
        assert torch.equal(found[0], found[1]) == sure
        assert found[1].isfinite().all()  # what is unbounded is some number
        assert sure or not found[0].isfinite().any()


def test_what_is_computed_from_float64_beyond_its_range_is_not_sure() -> None:
    """Copies are no wider than that: what is unbounded is some number there, and not infinite."""
    high, low = (torch.full((3, 3), n, dtype=torch.float64) for n in (1e300, 2.0))
    infinite, nan = low * torch.inf, low * torch.nan
    for given, sure in ((high, False), (low, True), (infinite, True), (nan, True)):
        found = []
        for reach in ("bounded", "unbounded"):
            with Shadow(reach=reach, reorders=True) as mode:  # type: ignore[arg-type]
                product = given @ given
                band = mode.band((product - product * 2).sum(0) * low)
            found.append(band.samples)
        equal = (found[0] == found[1]) | (found[0].isnan() & found[1].isnan())
        assert bool(equal.all()) == sure
        assert bool(found[1].isfinite().all()) == (given is high or given is low)
        assert bool(found[0].isnan().all()) == (given is not low)  # as those of the ops are


def test_what_is_computed_from_float64_beyond_its_range_is_sure_where_nothing_reorders() -> None:
    high, found = torch.full((3, 3), 1e300, dtype=torch.float64), []
    for reach in ("bounded", "unbounded"):
        with Shadow(reach=reach) as mode:  # type: ignore[arg-type]
            product = high @ high
            found.append(mode.band((product - product * 2).sum(0)).samples)
    assert all(samples.isnan().all() for samples in found)


@pytest.mark.parametrize(
    "op",
    [
        lambda x: x / 0.0,
        lambda x: (x - x) / (x - x),
        lambda x: (x - x).log(),
        lambda x: x * torch.inf,
        lambda x: x[:0].mean(),
    ],
    ids=["quotient", "of zeros", "logarithm", "number", "of nothing"],
)
def test_what_is_infinite_of_itself_is_sure(op: Callable[[torch.Tensor], torch.Tensor]) -> None:
    found = []
    for reach in ("bounded", "unbounded"):
        x = torch.full((3, 2), 2.0, dtype=torch.float64)
        with Shadow(reach=reach, reorders=True) as mode:  # type: ignore[arg-type]
            found.append(mode.band(op(x)).samples)
    assert not found[1].isfinite().any()
    assert torch.equal(*(f.nan_to_num(7.0) for f in found))


def test_either_of_two_needs_no_shadows() -> None:
    assert torch.equal(either(X, X + 1), X)


# -- faults of torch that shadows show -----------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_layer_norms_weight_gradient_is_summed_in_16_bits(dtype: torch.dtype) -> None:
    """docs/findings/layer-norm-weight-grad.md. If torch mends it, the page is to be changed."""
    w = torch.ones(4, requires_grad=True)

    def train() -> Any:
        y = functional.layer_norm(randn(4096, 4).to(dtype), (4,), w, torch.zeros(4))
        return torch.autograd.grad(y.float().square().sum(), w)[0]

    found = shadow(train)
    assert found.result.dtype == torch.float32
    band = found.band(found.result)
    assert off(band, band.nominal) > 1000
    right = band.clean.to(torch.float32)
    assert off(replace(band, nominal=right), right) < 1


@pytest.mark.parametrize(
    "pool",
    [
        lambda x, out: torch.nn.functional.avg_pool3d(x, 2, out=out),
        lambda x, out: torch._C._nn.adaptive_avg_pool3d(x, (1, 2, 2), out=out),
    ],
)
def test_3d_pools_overlook_the_strides_of_out(pool: Callable[..., Any]) -> None:
    """docs/findings/avg-pool3d-out.md. If torch mends it, the page is to be changed."""
    x, out = randn(1, 1, 2, 4, 4), torch.zeros(1, 1, 1, 2, 2).transpose(3, 4)
    found = shadow(pool, x, out)
    band = found.band(out)
    assert off(band, band.nominal) > 1000
    right = torch.zeros(1, 1, 1, 2, 2)
    pool(x, right)
    assert off(replace(band, nominal=right), right) < THRESHOLD


def test_float64_rounds_too() -> None:
    """A clean copy in float64 equals a float64 value that was rounded: that proves nothing."""
    x = torch.randn(3, 33, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    seen = shadow(lambda: x / (x.abs() + 1))
    band = seen.band(seen.result)
    assert bool(((band.samples - band.clean).abs().amax(0) > 0).all())
    assert distance(band, torch.nextafter(seen.result, seen.result + 1)).excess < 4


def test_small_integers_are_exact_in_float64() -> None:
    x = torch.arange(-4.0, 5.0, dtype=torch.float64)
    seen = shadow(lambda: x * x + 2)
    band = seen.band(seen.result)
    assert bool((band.samples == band.clean).all())


def test_what_is_computed_of_integers_is_rounded() -> None:
    """A function of an integer is no exact number: what is left of a cancellation shows it."""

    def left_over(n: torch.Tensor) -> torch.Tensor:
        return torch.fmod(n, torch.erf(n))

    found = shadow(left_over, torch.tensor([2, 3]))
    band = found.band(found.result)
    assert off(band, torch.fmod(torch.tensor([2, 3]), band.clean.float() * 0 + 1)) > THRESHOLD
    neighbour = torch.nextafter(torch.erf(torch.tensor([2.0, 3.0])), torch.zeros(2))
    assert off(band, torch.fmod(torch.tensor([2.0, 3.0]), neighbour)) < THRESHOLD
    exact = shadow(lambda n: n * 0.5, torch.tensor([2, 3]))
    assert not (exact.band(exact.result).samples != torch.tensor([1.0, 1.5])).any()


def test_a_sum_may_round_its_terms_to_a_narrower_dtype_that_it_is_told() -> None:
    """Torch does over neighbouring dimensions, and does not over others, as these."""
    x = torch.tensor([[[1.001, -1.0]], [[100.3, -100.2]]], dtype=torch.float16)
    narrow = x.bfloat16().float().sum((0, 2)).bfloat16()
    for dtype, may in ((torch.bfloat16, True), (None, False)):
        found = shadow(lambda t, d=dtype: torch.sum(t, (0, 2), dtype=d), x)
        band = found.band(found.result)
        assert (off(band, narrow.to(found.result.dtype)) < THRESHOLD) == may
        assert off(band, narrow.to(found.result.dtype) * 40) > THRESHOLD


@pytest.mark.parametrize("align", [False, True])
@pytest.mark.parametrize("scales", [(None, None), (1.7, 0.6)])
def test_weights_of_a_cubic_convolution_are_rounded_once(
    align: bool, scales: tuple[float | None, float | None]
) -> None:
    """As torch's, forward and backward, but for what torch's lose where they cancel."""
    ops, rows = torch.ops.aten, torch.arange(60, dtype=torch.float64).cos().reshape(1, 3, 4, 5)
    forward, backward = ops.upsample_bicubic2d.default, ops.upsample_bicubic2d_backward.default
    made = forward(rows, (7, 3), align, *scales)
    torch.testing.assert_close(EXACT[forward](rows, (7, 3), align, *scales), made)
    given = made.sin(), (7, 3), rows.shape, align, *scales
    torch.testing.assert_close(EXACT[backward](*given), backward(*given))
    ones = EXACT[forward](torch.ones_like(rows), (7, 3), align, *scales)
    assert (ones - 1).abs().max() < 3e-16


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_what_gelu_loses_in_float64_is_allowed_to_others(approximate: str) -> None:
    """The copies are float64, too: they take another way than the kernel, which cancels."""
    x = torch.tensor([-5.5, -4.3], dtype=torch.float64)
    gelu = functools.partial(torch.nn.functional.gelu, approximate=approximate)
    found = shadow(gelu, x)
    band = found.band(found.result)
    assert 1e-16 < (band.nominal / band.clean - 1).abs().max() < 1e-3
    assert off(band, band.clean) < 1
    assert off(band, band.clean * (1 + 1e-2)) > THRESHOLD


def test_a_factor_beyond_the_range_may_be_fused_into_a_sum() -> None:
    """``inf - 2 * 3e38`` is NaN where the product is rounded, and infinite where it is not."""
    for alpha, may in ((2.0, True), (1.0, False)):
        bands = []
        for reach in ("unbounded", "bounded"):
            with Shadow(8, 3, reach, reorders=True) as mode:
                found = torch.sub(torch.tensor([torch.inf]), torch.tensor([3e38]), alpha=alpha)
            bands.append(mode.band(found).samples)
        assert bool((bands[0] != bands[1]).any()) == may


def test_a_sum_in_turn_may_lose_what_equal_terms_lose() -> None:
    """Of 288 terms that are equal XLA's sum is off by 32 units; of others it is not."""
    equal, others = torch.full((8, 6, 6), 1.2345), torch.linspace(-1, 1, 288).reshape(8, 6, 6)
    for x in (equal, others):
        in_turn = torch.tensor(numpy.add.accumulate(x.flatten().numpy())[-1])
        for turn in (False, True):
            with Shadow(in_turn=turn) as mode:
                found = x.sum()
            band = mode.band(found)
            if x is equal:
                assert (off(band, in_turn) < THRESHOLD) == turn
            assert off(band, found + x.abs().sum() * 2e-5) > THRESHOLD


@pytest.mark.parametrize("training", [True, False])
def test_running_statistics_are_followed_though_no_schema_says_that_they_are_written(
    training: bool,
) -> None:
    mean, variance = torch.zeros(4), torch.ones(4)

    def norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        made = layer(x, w)[:, :4]  # rounded to bfloat16
        return functional.batch_norm(made, mean, variance, training=training)

    found = shadow(norm, X, W)
    band = found.band(mean)
    assert torch.equal(band.nominal, mean)
    assert bool(mean.any()) is training
    spread = (band.samples - band.clean).abs().amax()
    assert (float(spread) > 1e-5) is training
    assert off(band, mean) < THRESHOLD
    assert (off(band, mean * 1.1) > THRESHOLD) is training
