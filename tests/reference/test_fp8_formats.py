"""Rounding to FP8 and FP4, over every code and every bfloat16, against torch and ml_dtypes.

And the scale of each recipe, against the properties that its publication states, and against
torchao, where it is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch

from amp_fuzz.reference.fp8 import E2M1, E4M3, E5M2, FORMATS, Format, Quantised, rounded, scaling
from amp_fuzz.reference.fp8.formats import power_below, power_up
from tests.helpers import needs_torch

FP8 = (E4M3, E5M2)
formats = pytest.mark.parametrize("to", FORMATS.values(), ids=lambda f: f.name)
fp8_formats = pytest.mark.parametrize("to", FP8, ids=lambda f: f.name)
EVERY_BFLOAT16 = torch.arange(1 << 16).to(torch.int32).to(torch.int16).view(torch.bfloat16)


def codes(to: Format) -> torch.Tensor:
    """Return every finite value of a format, by its definition."""
    bits = {"E4M3": 4, "E5M2": 5, "E2M1": 2}[to.name]
    values = [m * 2.0 ** (to.lowest - to.mantissa) for m in range(1 << to.mantissa)]
    for exponent in range(1, 1 << bits):
        for m in range(1 << to.mantissa):
            scale = 2.0 ** (to.lowest + exponent - 1 - to.mantissa)
            values.append(((1 << to.mantissa) + m) * scale)
    finite = torch.tensor([v for v in values if v <= to.max])
    return torch.cat([-finite.flip(0), finite])


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two float32 tensors have the same bits, NaNs aside."""
    if not torch.equal(a.isnan(), b.isnan()):
        return False
    a, b = a[~a.isnan()], b[~b.isnan()]
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@formats
def test_every_code_is_itself(to: Format) -> None:
    values = codes(to)
    assert len(values) == {"E4M3": 254, "E5M2": 248, "E2M1": 16}[to.name]
    assert same(rounded(values, to), values)


@fp8_formats
def test_the_codes_are_those_of_torch(to: Format) -> None:
    every = torch.arange(256).to(torch.uint8).view(to.dtype).float()
    ours, theirs = codes(to), every[every.isfinite()]
    assert torch.equal(*(x.view(torch.int32).sort().values for x in (ours, theirs)))


@fp8_formats
def test_every_bfloat16_rounds_as_in_torch(to: Format) -> None:
    clamped = EVERY_BFLOAT16.float().clamp(-to.max, to.max)
    assert same(rounded(EVERY_BFLOAT16, to), clamped.to(to.dtype).float())


@formats
def test_every_bfloat16_rounds_as_in_ml_dtypes(to: Format) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    dtype = {"E4M3": "float8_e4m3fn", "E5M2": "float8_e5m2", "E2M1": "float4_e2m1fn"}[to.name]
    finite = EVERY_BFLOAT16[~EVERY_BFLOAT16.isnan()].float().clamp(-to.max, to.max)
    theirs = finite.numpy().astype(getattr(ml_dtypes, dtype)).astype("float32")
    assert same(rounded(finite, to), torch.from_numpy(theirs))


@formats
def test_every_tie_goes_to_even(to: Format) -> None:
    values = codes(to).unique()
    ties = (values[1:] + values[:-1]) / 2
    found = rounded(ties, to)
    even = [v for v in values.tolist() if round(v / _step(v, to)) % 2 == 0]
    assert set(found.tolist()) <= set(even)


def _step(value: float, to: Format) -> float:
    exponent = torch.frexp(torch.tensor(value, dtype=torch.float64))[1].item() - 1
    return 2.0 ** (max(int(exponent), to.lowest) - to.mantissa)


@formats
def test_it_saturates(to: Format) -> None:
    large = torch.tensor([to.max * 1.5, 1e38, torch.inf])
    assert rounded(large, to).tolist() == [to.max] * 3
    assert rounded(-large, to).tolist() == [-to.max] * 3
    assert rounded(torch.tensor(torch.nan), to).isnan()


def test_e4m3_saturates_where_torch_gave_nan_before() -> None:
    needs_torch(">=2.12")
    large = EVERY_BFLOAT16[EVERY_BFLOAT16.float().abs() > 464]
    assert same(rounded(large, E4M3), large.float().to(torch.float8_e4m3fn).float())


def test_powers_of_two_bound_every_bfloat16() -> None:
    positive = EVERY_BFLOAT16[EVERY_BFLOAT16.isfinite() & (EVERY_BFLOAT16 > 0)].float()
    below, up = power_below(positive), power_up(positive)
    assert bool(((below <= positive) & (positive < 2 * below)).all())
    inside = (positive > 2.0**-127) & (positive <= 2.0**127)
    assert bool(((up >= positive) & (up < 2 * positive))[inside].all())
    assert same(torch.frexp(up)[0], torch.full_like(up, 0.5))


@pytest.mark.parametrize(("x", "up"), [(0.0, 2.0**-127), (torch.inf, 2.0**127), (3.0, 4.0)])
def test_e8m0_has_no_zero_and_no_infinity(x: float, up: float) -> None:
    assert power_up(torch.tensor(x)).item() == up
    assert power_up(torch.tensor(torch.nan)).isnan()


# -- scales ---------------------------------------------------------------------------------------

Scaling = Callable[[torch.Tensor], Quantised]
RULES: dict[str, Scaling] = {
    "tensorwise": lambda x: scaling.tensorwise(x, E4M3),
    "rowwise": lambda x: scaling.rowwise(x, 1, E4M3),
    "current": lambda x: scaling.current(x, E5M2),
    "blockwise": lambda x: scaling.blockwise(x, 1, E4M3, square=False),
    "blockwise, square": lambda x: scaling.blockwise(x, 1, E4M3, square=True),
    "mxfp8": lambda x: scaling.mxfp8(x, 1, E4M3),
    "nvfp4": lambda x: scaling.nvfp4(x, 1, square=False),
    "nvfp4, square": lambda x: scaling.nvfp4(x, 1, square=True),
}
rules = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


def matrices(count: int = 200) -> Iterator[torch.Tensor]:
    """Yield matrices of many magnitudes."""
    draw = torch.Generator().manual_seed(0)
    for i in range(count):
        x = torch.randn(48, 160, generator=draw) * 10.0 ** (i % 40 - 20)
        yield x.bfloat16() if i % 3 == 0 else x


@pytest.mark.thorough
@rules
def test_quantising_is_within_half_a_step(rule: Scaling) -> None:
    """No element moves by more than half of the format's step at its block's scale."""
    for x in matrices():
        q = rule(x)
        step = (
            torch.maximum(
                2.0
                ** torch.floor(torch.log2(q.values.abs().double().clamp(min=2.0**q.format.lowest))),
                torch.tensor(2.0**q.format.lowest, dtype=torch.float64),
            )
            * 2.0**-q.format.mantissa
        )
        error = (x.double() * q.scale - q.values).abs()
        saturated = q.values.abs() == q.format.max
        assert bool((error <= step * 0.500001)[~saturated.expand(error.shape)].all())


@pytest.mark.thorough
@rules
def test_the_largest_magnitude_does_not_saturate_by_more_than_a_rounding(rule: Scaling) -> None:
    for x in matrices():
        q = rule(x)
        # NVFP4's scale of a block is rounded to E4M3, so its largest value may lie beyond 6.
        slack = 1 / (1 - 2.0**-4) if q.format is E2M1 else 1 + 2.0**-22
        assert bool((x.double().abs() * q.scale <= q.format.max * slack).all())


@rules
def test_zeros_stay_zeros(rule: Scaling) -> None:
    q = rule(torch.zeros(48, 160))
    assert not q.values.any()
    assert not q.dequantised().isnan().any()


@rules
def test_a_nan_spreads_over_its_block_or_tensor_at_most(rule: Scaling) -> None:
    x = torch.ones(48, 160)
    x[0, 0] = torch.nan
    found = rule(x).dequantised()
    assert found[0, 0].isnan()


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["rowwise", "blockwise", "blockwise, square", "mxfp8"])
def test_scales_are_powers_of_two(name: str) -> None:
    for x in matrices():
        fraction, _ = torch.frexp(RULES[name](x).scale)
        assert bool((fraction == 0.5).all())


def test_blocks_are_along_the_dimension() -> None:
    x = torch.ones(64, 64)
    x[0, 0] = 4096
    by_row, by_column = scaling.mxfp8(x, 1, E4M3).inverse, scaling.mxfp8(x, 0, E4M3).inverse
    assert bool((by_row[0, :32] > by_row[0, 32]).all())
    assert bool((by_row[1:] == by_row[0, 32]).all())
    assert torch.equal(by_column, by_row.t())


@pytest.fixture
def torchao() -> ModuleType:
    needs_torch(">=2.11")
    return pytest.importorskip("torchao.float8.float8_utils")  # type: ignore[no-any-return]


@fp8_formats
def test_scales_are_those_of_torchao(torchao: ModuleType, to: Format) -> None:
    from torchao.float8.config import ScalingGranularity

    rows = {"scaling_granularity": ScalingGranularity.AXISWISE, "round_scales_to_power_of_2": True}
    for x in matrices():
        assert torch.equal(torchao.tensor_to_scale(x, to.dtype), scaling.tensorwise(x, to).scale)
        for dim in (0, 1):
            theirs = torchao.tensor_to_scale(x, to.dtype, axiswise_dim=dim, **rows)
            assert torch.equal(theirs, scaling.rowwise(x, dim, to).scale)


def test_mxfp8_is_that_of_torchao(torchao: ModuleType) -> None:
    module = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    for x in matrices():
        scale, data = module.to_mx(
            x.contiguous(), torch.float8_e4m3fn, 32, module.ScaleCalculationMode.RCEIL
        )
        q = scaling.mxfp8(x, 1, E4M3)
        assert torch.equal(q.inverse, scale.float().repeat_interleave(32, 1))
        assert torch.equal(q.values, data.float())
