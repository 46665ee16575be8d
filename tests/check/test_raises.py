"""A call that raises under autocast alone: its verdict says so, and gives one tested remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp_fuzz
from tests.check.functions import Mixing, Undecorated

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
W = torch.randn(8, 8, generator=torch.Generator().manual_seed(1), requires_grad=True)
DEFAULT = ["eager-cpu", "fake-cuda", "compile[aot_eager]"]


def test_a_function_without_custom_fwd_is_told_to_be_decorated() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return Undecorated.apply(x, w)  # type: ignore[no-any-return]

    result = amp_fuzz.check(function, X, W, backends=DEFAULT, store=None)
    assert (result.verdict, result.ok) == ("raises", False), str(result)
    first, *_ = str(result).splitlines()
    assert first == f"amp_fuzz.check of {function.__qualname__}, seed 0: RAISES UNDER AUTOCAST"
    assert result.advice == (
        "Decorate the forward of Undecorated with torch.amp.custom_fwd and its backward with "
        "torch.amp.custom_bwd."
    )
    assert "Turn autocast off" not in str(result)
    assert "CANNOT BE JUDGED" not in str(result)
    trained = [DEFAULT[0], DEFAULT[2]]  # a fake device runs no backward pass
    assert [run.backend for run in result.runs if run.status == "fails"] == trained
    assert [(note.kind, note.backend) for note in result.notes] == [
        ("autocast-raises", name) for name in trained
    ]
    assert {note.advice for note in result.notes} == {result.advice}


def test_a_function_that_only_float32_helps_is_told_to_cast_its_inputs() -> None:
    result = amp_fuzz.check(
        lambda x, w: Mixing.apply(x, w), X, W, backends=["eager-cpu"], store=None
    )
    assert result.verdict == "raises", str(result)
    assert "custom_fwd(cast_inputs=torch.float32)" in result.advice


def _index_add(x: Tensor) -> Tensor:
    return (x @ x.t()).index_add(0, torch.tensor([0], device=x.device), torch.ones_like(x[:1, :4]))


def _in_its_own_context(x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        return _index_add(x)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("function", "autocast"), [(_index_add, torch.bfloat16), (_in_its_own_context, None)]
)
def test_the_line_that_mixes_dtypes_is_told_to_run_in_float32(
    function: Callable[[Tensor], Tensor], autocast: Any
) -> None:
    """Contexts of its own count too: without them it runs."""
    result = amp_fuzz.check(function, X, backends=["eager-cpu"], autocast=autocast, store=None)
    assert result.verdict == "raises", str(result)
    assert result.advice.startswith("Run test_raises.py:")
    assert "under autocast(enabled=False), on inputs cast to float32" in result.advice


def _picky(x: Tensor) -> Tensor:
    y = x @ x.t()
    if y.dtype is not torch.float32:
        raise TypeError("not a matrix of float32")
    return y


def test_a_line_that_raises_in_float32_too_is_no_remedy() -> None:
    """Its inputs are wrong already: only without autocast around it all does it run."""
    result = amp_fuzz.check(_picky, X, backends=["eager-cpu"], store=None)
    assert result.verdict == "raises", str(result)
    assert result.advice == "Call _picky under autocast(enabled=False)."


def test_a_call_that_raises_without_autocast_too_cannot_be_judged() -> None:
    def later(x: Tensor) -> Tensor:
        return Broken.apply(x)  # type: ignore[no-any-return]

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x @ x.t()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise RuntimeError("never runs")

    given = X.clone().requires_grad_()
    result = amp_fuzz.check(later, given, backends=["eager-cpu"], store=None)
    assert result.verdict == "unjudged", str(result)
    assert result.notes == ()
    assert result.advice.endswith("it raises without autocast too.")


def test_a_divergence_counts_before_a_raise() -> None:
    raises = amp_fuzz.check(_index_add, X, backends=["eager-cpu"], store=None)
    diverged = [amp_fuzz.interfaces.check.Ran(backend="b", autocast="a", status="diverged")]
    found = amp_fuzz.interfaces.check.CheckResult("f", (*raises.runs, *diverged))
    assert found.verdict == "diverges"


def test_an_honest_module_does_not_raise() -> None:
    assert (
        amp_fuzz.check(nn.Linear(8, 8), X, backends=["eager-cpu"], store=None).verdict == "agrees"
    )
