"""Linear interpolation is imitated as torch's decomposition computes it, bit by bit."""

from __future__ import annotations

import pytest
import torch
from amp_fuzz.upstream.compile.interpolation import LINEAR
from torch._decomp import decomposition_table

ATEN = torch.ops.aten
OPS = (ATEN.upsample_linear1d, ATEN.upsample_bilinear2d, ATEN.upsample_trilinear3d)
LARGE = 2.0**127


def drawn(dimensions: int, dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(2, 3, *(4, 3, 5)[:dimensions], generator=torch.Generator().manual_seed(5))
    x.view(-1)[:2] = torch.tensor([LARGE, -LARGE])
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_it_is_that_of_the_decomposition(
    dimensions: int, align_corners: bool, dtype: torch.dtype
) -> None:
    op, x = OPS[dimensions - 1].default, drawn(dimensions, dtype)
    for size, scales in (
        ((7, 6, 9), [None] * 3),
        ((2, 1, 3), [None] * 3),
        ((1, 7, 1), [None] * 3),
        ((9, 7, 12), [2.3, 2.4, 2.5]),
        ((9, 7, 12), [None, 2.4, None]),
    ):
        given = x, size[:dimensions], align_corners, *scales[:dimensions]
        want = decomposition_table[op](*given)
        made = LINEAR[op](*given)
        assert made.dtype is dtype
        assert torch.equal(made.nan_to_num(7.0), want.nan_to_num(7.0)), (size, scales)


def test_neighbours_with_unlike_signs_leave_the_range() -> None:
    x = torch.tensor([[[LARGE, -LARGE]]])
    made = LINEAR[ATEN.upsample_linear1d.default](x, [3], False)
    assert made[0, 0, 1].isinf()
    assert torch.equal(ATEN.upsample_linear1d(x, [3], False)[0, 0, 1], torch.tensor(0.0))


def test_an_out_takes_what_is_made() -> None:
    x, out = torch.arange(12.0).reshape(2, 3, 2).exp(), torch.empty(0)
    made = LINEAR[ATEN.upsample_linear1d.out](x, [7], False, out=out)
    assert made is out
    assert torch.equal(out, LINEAR[ATEN.upsample_linear1d.default](x, [7], False))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64])
def test_integers_are_left_to_torch(dtype: torch.dtype) -> None:
    x = torch.ones(1, 1, 3, dtype=dtype)
    assert LINEAR[ATEN.upsample_linear1d.default](x, [5], False) is None
    assert LINEAR[ATEN.upsample_linear1d.out](x, [5], False, out=torch.empty_like(x)) is None
