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
from tests.check.functions import Mixing, Undecorated
from tests.helpers import BF16

X = torch.randn(4, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()


class Apart(Undecorated):
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
    before = Undecorated.__dict__["forward"], Undecorated.__dict__["backward"]
    said = found(lambda x, w: Undecorated.apply(Honest.apply(x), w))
    assert said == Remedy(
        "decorate",
        "Decorate the forward of Undecorated with torch.amp.custom_fwd and its backward with "
        "torch.amp.custom_bwd",
    )
    assert (Undecorated.__dict__["forward"], Undecorated.__dict__["backward"]) == before


def test_a_function_whose_forward_needs_one_dtype_is_told_to_cast_its_inputs() -> None:
    said = found(Mixing.apply)
    assert said is not None
    assert said.advice.startswith(
        "Decorate the forward of Mixing with torch.amp.custom_fwd(cast_inputs=torch.float32)"
    )


def test_several_functions_are_told_together_if_none_is_enough() -> None:
    class Second(torch.autograd.Function):
        forward = Undecorated.__dict__["forward"]
        backward = Undecorated.__dict__["backward"]

    said = found(lambda x, w: Second.apply(Undecorated.apply(x, w), w))
    assert said is not None
    assert "the forward of Undecorated and Second with" in said.advice


@torch.library.custom_op("remedies::linear", mutates_args=())
def linear(x: Tensor, w: Tensor) -> Tensor:
    return x @ w


linear.register_autograd(
    Undecorated.backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
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
    """They are private functions of torch: a new name would note every Function."""

    class Half(Undecorated):
        forward = staticmethod(torch.amp.custom_fwd(Undecorated.forward, device_type="cpu"))

    class Whole(Half):
        backward = staticmethod(torch.amp.custom_bwd(Undecorated.backward, device_type="cpu"))

    assert lacking(Undecorated) == ("custom_fwd", "custom_bwd")
    assert lacking(Half) == ("custom_bwd",)
    assert lacking(Whole) == ()
