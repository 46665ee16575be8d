"""The experiment with a call's numbers tells what float32 makes of them from other errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from benchmarks.shadow_causes import THRESHOLD, Cause, probe

pytestmark = pytest.mark.thorough

aten = torch.ops.aten


def tried(func: Any, *args: Any, **kwargs: Any) -> dict[str, float]:
    cause = Cause("", 0, "", 0.0, 0.0, (func, args, kwargs), (0.0, 0.0, 0.0))
    return probe(cause)


@pytest.fixture
def image() -> torch.Tensor:
    return torch.randn(2, 3, 10, 20, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def tilted() -> Iterator[Any]:
    """Yield an op that multiplies by a number, and float32 by one that is a little larger."""
    library = torch.library.Library("amp_fuzz_causes", "DEF")
    library.define("tilted(Tensor self, float by) -> Tensor")

    def times(self: torch.Tensor, by: float) -> torch.Tensor:
        return self * (by * (1 + 1e-5 * (self.dtype is torch.float32)))

    library.impl("tilted", times, "CPU")
    yield torch.ops.amp_fuzz_causes.tilted.default
    library._destroy()


def test_a_scale_that_float32_rounds(image: torch.Tensor) -> None:
    """Positions are `scale * (i + 0.5)`: not as exact as the small weights made of them."""
    found = tried(aten._upsample_bilinear2d_aa.default, image, [17, 18], False, 1.7, 0.9)
    assert found["numbers"] <= THRESHOLD < found["alone"], found


def test_a_scale_that_is_the_quotient_of_two_sizes(image: torch.Tensor) -> None:
    given = tried(aten.upsample_bilinear2d.default, image, [17, 18], False, 1.7, 0.9)
    sizes = tried(aten.upsample_bilinear2d.default, image, [17, 18], False)
    assert given["numbers"] == sizes["numbers"] < sizes["alone"], (given, sizes)


def test_the_coordinates_of_a_grid() -> None:
    generator = torch.Generator().manual_seed(0)
    volume = torch.rand(1, 2, 22, 23, 24, generator=generator)
    grid = torch.randn(1, 6, 6, 6, 3, generator=generator)
    found = tried(aten.grid_sampler_3d.default, volume, grid, 0, 1, False)
    assert found["numbers"] <= THRESHOLD < found["alone"], found


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (aten.mul.Tensor, (torch.linspace(0.1, 3, 10_000), 0.001)),  # a bias
        (aten.remainder.Scalar, (torch.tensor(-4), 0.001)),  # a jump
    ],
)
def test_a_python_number(func: Any, args: tuple[Any, ...]) -> None:
    found = tried(func, *args)
    assert found["numbers"] <= THRESHOLD < found["alone"], found


def test_weights_in_16_bits_are_not_explained(image: torch.Tensor) -> None:
    args = (image[:, :, 0].half(), [28], False, 1.4)
    found = tried(aten.upsample_linear1d.default, *args)
    assert min(found["numbers"], found["alone"]) > THRESHOLD >= found["in float32"], found


def test_a_kernel_that_is_wrong_is_not_explained(image: torch.Tensor, tilted: Any) -> None:
    found = tried(tilted, image, 0.001)
    assert min(found["numbers"], found["alone"]) > THRESHOLD, found


@pytest.mark.parametrize(
    ("func", "arguments"),
    [
        (aten.mul.Tensor, (0.25,)),
        (aten.upsample_bilinear2d.default, ([20, 40], False)),
        (aten.upsample_bilinear2d.default, ([5, 10], False, 0.5, 0.5)),
        (aten.upsample_bilinear2d.default, ([17, 18], True)),  # corners have no such scale
    ],
)
def test_exact_numbers_are_left_alone(
    image: torch.Tensor, func: Any, arguments: tuple[Any, ...]
) -> None:
    assert "numbers" not in tried(func, image, *arguments)
