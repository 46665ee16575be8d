"""The reference takes over what is free in singular vectors, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from amp_fuzz.backends.imitations import gauge

Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def made(
    *shape: int, dtype: torch.dtype = torch.float32, full: bool = False
) -> tuple[torch.Tensor, Parts]:
    x = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(7))
    return x, torch.linalg.svd(x, full_matrices=full)


def chosen(
    x: torch.Tensor, *seen: tuple[torch.Tensor | None, torch.Tensor | None], full: bool = False
) -> Any:
    with gauge.observing(seen):
        return gauge.linalg_svd(torch.linalg.svd, x, full)


def phases(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    drawn = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(3))
    return drawn.sgn()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("shape", [(4, 3), (3, 5), (2, 4, 4)])
def test_the_phase_that_was_observed_is_that_of_both(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    x, (u, s, vh) = made(*shape, dtype=dtype)
    turn = phases(*s.shape, dtype=dtype)
    want = u * turn.unsqueeze(-2), s, vh * turn.conj().unsqueeze(-1)
    for seen in ((want[0], want[2]), (want[0], None), (None, want[2]), (want[0], want[2].mH)):
        for one, other in zip(chosen(x, seen), want, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def test_a_sign_that_u_alone_has_is_taken_for_both() -> None:
    """So that the product stays what was decomposed, and the other one differs."""
    x, (u, _, vh) = made(3, 3)
    one = chosen(x, (-u, vh))
    torch.testing.assert_close(one[0], -u)
    torch.testing.assert_close(one[2], -vh)


def test_of_two_calls_the_one_that_fits_both_is_taken() -> None:
    """The vectors of a matrix are those of its transpose, of its negative and of its double."""
    x, (u, _, vh) = made(3, 3)
    signs = torch.tensor([1.0, -1, 1])
    right = u * signs, vh * signs.unsqueeze(-1)
    for other in ((u, -vh), (vh.mH, u.mH), (-u * signs, vh), (None, -vh)):
        for seen in ((right, other), (other, right)):
            one = chosen(x, *seen)
            torch.testing.assert_close(one[0], right[0])
            torch.testing.assert_close(one[2], right[1])


def test_vectors_of_another_dtype_or_shape_are_those_of_another_call() -> None:
    x, (u, s, vh) = made(3, 3)
    wide, (left, _, right) = made(4, 3)
    one = chosen(x, (-u.double(), -vh.double()), (-left, -right), (None, None))
    assert all(map(torch.equal, one, (u, s, vh)))
    one = chosen(wide, (-u, -vh), (-left, None))
    torch.testing.assert_close((one[0], one[2]), (-left, -right), rtol=0, atol=1e-6)


def test_what_is_no_phase_is_not_taken_over() -> None:
    x, (u, s, vh) = made(3, 3)
    for wrong in (u * 1.1, u.flip(-1), torch.zeros_like(u), torch.full_like(u, torch.nan)):
        for one, other in zip(chosen(x, (wrong, vh * 1.1)), (u, s, vh), strict=True):
            assert one.equal(other)


def rotated(basis: torch.Tensor) -> torch.Tensor:
    size = basis.shape[-1]
    turn = torch.linalg.qr(torch.arange(9.0).reshape(3, 3).sin()[:size, :size] + torch.eye(size))[0]
    return basis @ turn


def test_the_other_columns_of_a_full_matrix_are_any_basis() -> None:
    x, (u, s, vh) = made(5, 2, full=True)
    other = torch.cat([-u[:, :2], rotated(u[:, 2:])], -1)
    for one, want in zip(chosen(x, (other, -vh), full=True), (other, s, -vh), strict=True):
        torch.testing.assert_close(one, want, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda basis: basis * 1.2,
        lambda basis: basis + basis.flip(-1),
        lambda basis: torch.eye(5)[:, :3],
    ],
)
def test_but_a_basis_of_what_is_left(wrong: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x, (u, _, vh) = made(5, 2, full=True)
    other = torch.cat([u[:, :2], wrong(u[:, 2:])], -1)
    one, *_ = chosen(x, (other, vh), full=True)
    assert one.equal(u)


def test_gradients_are_those_of_the_vectors_that_were_chosen() -> None:
    x, (u, _, vh) = made(3, 3)
    leaf, plain = (x.clone().requires_grad_() for _ in range(2))
    u, _, vh = chosen(leaf, (-u, -vh))
    (u[0, 0] * 2 + vh[1, 1]).backward()
    u, _, vh = torch.linalg.svd(plain)
    (-(u[0, 0] * 2 + vh[1, 1])).backward()
    assert leaf.grad is not None
    assert plain.grad is not None
    torch.testing.assert_close(leaf.grad, plain.grad)


def test_what_was_observed_is_forgotten_after_the_block() -> None:
    x, (u, _, vh) = made(3, 3)
    chosen(x, (-u, -vh))
    one, *_ = gauge.linalg_svd(torch.linalg.svd, x, False)
    assert one.equal(u)


def test_each_way_to_decompose_gives_the_same() -> None:
    x, (u, s, vh) = made(4, 3)
    with gauge.observing([(-u, None)]):
        one = gauge.decomposed(torch.ops.aten._linalg_svd.default, x)
        other = gauge.svd(torch.ops.aten.svd.default, x)
        bare = gauge.svd(torch.ops.aten.svd.default, x, True, False)
    torch.testing.assert_close(one, (-u, s, -vh))
    torch.testing.assert_close(other, (-u, s, -vh.mH))
    assert not bare[0].any()


def test_vectors_of_equal_singular_values_are_any_basis_that_both_share() -> None:
    x = torch.diag(torch.tensor([3.0, 3, 3, 1]))
    turn = torch.block_diag(rotated(torch.eye(3)), -torch.eye(1))
    one = chosen(x, (turn, turn.mT))
    for got, want in zip(one, (turn, torch.tensor([3.0, 3, 3, 1]), turn.mT), strict=True):
        torch.testing.assert_close(got, want)
    u, _, vh = chosen(x, (turn, torch.eye(4)))
    torch.testing.assert_close(u @ torch.diag(torch.tensor([3.0, 3, 3, 1])) @ vh, x)


def test_vectors_of_no_singular_value_are_any_basis_of_each() -> None:
    """Of two of three the values are 0: U and V share nothing there."""
    x = torch.tensor([[1.0], [2], [2]]) @ torch.tensor([[3.0, 0, 4]])
    u, s, vh = torch.linalg.svd(x)
    other = torch.cat([-u[:, :1], rotated(u[:, 1:])], -1), torch.cat([-vh[:1], -vh[1:].flip(0)])
    for one, want in zip(chosen(x, other), (other[0], s, other[1]), strict=True):
        torch.testing.assert_close(one, want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0), (2, 0, 3), (0, 2, 2)])
@pytest.mark.parametrize("full", [False, True])
def test_a_matrix_may_be_empty(shape: tuple[int, ...], full: bool) -> None:
    x = torch.empty(shape)
    want = torch.linalg.svd(x, full_matrices=full)
    one = chosen(x, (want[0], want[2]), full=full)
    assert [part.shape for part in one] == [part.shape for part in want]


def test_what_is_not_finite_is_left() -> None:
    x = torch.full((2, 2), torch.inf)
    one = chosen(x, (torch.eye(2), torch.eye(2)))
    assert one[0].isnan().all()
