"""The reference takes over what is free in singular vectors, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from amp_fuzz.backends import imitation
from amp_fuzz.backends.eager import EagerBackend
from amp_fuzz.backends.harness import Observation
from amp_fuzz.backends.imitation import Imitation
from amp_fuzz.cases.build import call, case, x
from amp_fuzz.cases.case import Case
from amp_fuzz.oracle import gauge
from amp_fuzz.oracle.trial import Trial
from amp_fuzz.upstream import quirks
from amp_fuzz.upstream.explain import judge_of
from tests.helpers import eager

SVD = torch.ops.aten._linalg_svd.default

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
        return gauge.decomposed(SVD, x, full)


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


def test_a_sign_that_u_alone_has_is_no_choice() -> None:
    x, (u, s, vh) = made(3, 3)
    one = chosen(x, (-u, vh))
    for found, want in zip(one, (u, s, vh), strict=True):
        assert torch.equal(found, want)


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
    one, *_ = gauge.decomposed(SVD, x, False)
    assert one.equal(u)


def test_what_computes_no_vectors_chooses_none() -> None:
    x, (u, *_) = made(4, 3)
    with gauge.observing([(-u, None)]):
        bare = gauge.decomposed(SVD, x, True, False)
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


# -- in a trial ------------------------------------------------------------------------------------

SVDS = case(
    [x("x0", 3, 2)],
    call("linalg.svd", "x0", full_matrices=False, to="v0 v1 v2"),
    call("neg", "x0", to="v3"),
    call("svd", "v3", to="v4 v5 v6"),
    calls=2,
    contexts=(),
    backward="none",
)


@dataclass(frozen=True)
class Turned(EagerBackend):
    """An inexact backend that chooses other signs of some values."""

    device: str = "cpu"
    exact: bool = False
    turned: tuple[str, ...] = ()

    def run(self, cases: Sequence[Case]) -> list[Observation]:
        made = EagerBackend.run(self, cases)
        for seen in made:
            for label, value in seen.values.items():
                if value is not None and label.rpartition(".")[2] in self.turned:
                    seen.values[label] = -value
        return made


@pytest.mark.parametrize("outputs", [None, ("v3",)], ids=["all", "one"])
def test_vectors_are_read_of_each_decomposition_at_each_call(
    outputs: tuple[str, ...] | None,
) -> None:
    """Of U and V, whether or not the program returns them."""
    one = SVDS.with_program(outputs=outputs) if outputs else SVDS
    values = eager().run([SVDS])[0].values
    settled = Trial.of(one, Turned(turned=("v0", "v2", "v3"))).settled()
    names = [
        (f"call{n}.{u}", f"call{n}.{v}") for n in range(2) for u, v in (("v0", "v2"), ("v4", "v6"))
    ]
    assert len(settled.choice) == len(names)
    for pair, labels in zip(settled.choice, names, strict=True):
        for vectors, label in zip(pair, labels, strict=True):
            want = values[label]
            assert vectors is not None
            assert want is not None
            turned = label.rpartition(".")[2] in ("v0", "v2")
            assert torch.equal(vectors, -want if turned else want)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("turned", "where"),
    [(("v0", "v2"), ""), (("v0",), "call0.v0"), (("v0", "v1", "v2"), "call0.v1")],
    ids=["both", "one", "values"],
)
def test_signs_that_u_and_v_share_are_free_and_no_others(
    turned: tuple[str, ...], where: str
) -> None:
    found = judge_of(Turned(turned=turned)).judge(SVDS).divergence
    assert (found.where if found else "") in (where, where.replace("v0", "v2"))


def test_the_sign_of_one_vector_of_a_small_singular_value_is_no_choice() -> None:
    """U and V share it, wherever the product shows more than rounding."""
    x = torch.diag(torch.tensor([1.0, 1.2e-5]))
    u, _, vh = torch.linalg.svd(x)
    turned = u * torch.tensor([1.0, -1.0])
    assert torch.equal(chosen(x, (turned, vh))[0], u)
    assert torch.equal(chosen(x, (turned, vh * torch.tensor([[1.0], [-1.0]])))[0], turned)


def test_a_choice_stands_beside_bugs_and_stays_without_one_of_them() -> None:
    with quirks(["export-composites", "promote-foreign-half"]), gauge.taking([(None, None)]):
        current = imitation.current()
        assert current.names == {"export-composites", "promote-foreign-half"}
        fewer = current.without("export-composites")
        assert fewer.names == {"promote-foreign-half"}
        assert "gauge" in fewer.parts
    with gauge.taking([(None, None)]):
        assert imitation.current().names == frozenset()


def test_no_choice_is_made_where_shadows_cannot_follow() -> None:
    """TorchScript's interpreter does not stand a dispatch mode."""
    unfollowed = imitation.compose({"a": Imitation(follows=False)})
    with imitation.imitating(unfollowed), gauge.taking([(None, None)]):
        assert imitation.current() is unfollowed


def test_an_exact_backend_chooses_as_the_reference_does() -> None:
    trial = Trial.of(SVDS, eager())
    assert trial.settled() is trial
