"""Remedies of a callable that raises only under autocast: the right one first, and each is run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from amp_fuzz.backends import backends
from amp_fuzz.backends.harness import quiet
from amp_fuzz.cases.case import Case, Plan
from amp_fuzz.cases.program import Program
from amp_fuzz.findings.remedies import Remedy, lacking, remedy
from amp_fuzz.interfaces.check.adapters import Checked
from amp_fuzz.interfaces.check.custom_ops import declare_custom_ops
from amp_fuzz.interfaces.check.subject import Subject
from tests.helpers import BF16

X = torch.randn(4, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()


class Linear(torch.autograd.Function):
    """Its backward runs without autocast, on a 16-bit gradient and float32 tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return g @ w.t(), x.t() @ g


class Mixed(torch.autograd.Function):
    """Its forward brings two dtypes together, in an op without a policy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return torch.tensordot(x @ w, w, dims=1)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        _, w = ctx.saved_tensors
        return g @ w.t() @ w.t(), None


class Apart(Linear):
    """Its forward gets no ``ctx``, on which torch's decorator would keep the state."""

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:  # type: ignore[override]
        return x @ w

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)


class Honest(torch.autograd.Function):
    """Undecorated too, and right."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 2


def found(function: Callable[..., Any]) -> Remedy | None:
    """Return the remedy of a callable that raises."""
    checked = Checked(
        Subject.of(function, (X, X.detach().clone().requires_grad_())), backends()["eager-cpu"]
    )
    case = Case(Program((), (), ()), Plan((BF16,)))
    with quiet():
        assert checked.reference().run(case).raised is not None
        return remedy(case, checked.reference())


def test_a_function_without_custom_fwd_is_told_to_have_it() -> None:
    before = Linear.__dict__["forward"], Linear.__dict__["backward"]
    said = found(lambda x, w: Linear.apply(Honest.apply(x), w))
    assert said == Remedy(
        "decorate",
        "Decorate the forward of Linear with torch.amp.custom_fwd and its backward with "
        "torch.amp.custom_bwd",
    )
    assert (Linear.__dict__["forward"], Linear.__dict__["backward"]) == before


def test_a_function_whose_forward_needs_one_dtype_is_told_to_cast_its_inputs() -> None:
    said = found(Mixed.apply)
    assert said is not None
    assert said.advice.startswith(
        "Decorate the forward of Mixed with torch.amp.custom_fwd(cast_inputs=torch.float32)"
    )


def test_several_functions_are_told_together_if_none_is_enough() -> None:
    class Second(torch.autograd.Function):
        forward = Linear.__dict__["forward"]
        backward = Linear.__dict__["backward"]

    said = found(lambda x, w: Second.apply(Linear.apply(x, w), w))
    assert said is not None
    assert "the forward of Linear and Second with" in said.advice


@torch.library.custom_op("remedies::linear", mutates_args=())
def linear(x: Tensor, w: Tensor) -> Tensor:
    return x @ w


linear.register_autograd(
    Linear.backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)


@pytest.mark.parametrize(("op", "name"), [(Apart.apply, "Apart"), (linear, "remedies::linear")])
def test_a_backward_that_no_decorator_fits_is_told_to_enter_autocast(op: Any, name: str) -> None:
    declare_custom_ops()
    advice = f"Enter torch.autocast in the backward of {name}, as around its forward"
    assert found(op) == Remedy("backward", advice)


def test_the_decorators_are_not_advised_where_they_do_not_help() -> None:
    off = Remedy("off", "Run this part under autocast(enabled=False)")
    assert found(lambda x, w: torch.tensordot(Honest.apply(x) @ w, w, dims=1)) == off


def test_what_runs_with_no_change_has_no_remedy() -> None:
    def never(x: Tensor, w: Tensor) -> Tensor:
        raise ValueError("no")

    assert found(never) is None


def test_lacking_names_the_decorators() -> None:
    class Half(Linear):
        forward = staticmethod(torch.amp.custom_fwd(Linear.forward, device_type="cpu"))

    assert lacking(Half) == ("custom_bwd",)
