"""`amp_fuzz.check_op`: honest ops keep every contract, and each fault breaks its own alone."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import amp_fuzz
from amp_fuzz.interfaces.check_op import CONTRACTS, Contract
from tests.check import ops
from tests.helpers import brief

EAGER = "eager-cpu"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what a check stores out of the repository."""
    monkeypatch.chdir(tmp_path)


def leaf(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).requires_grad_()


X, W = leaf(4, 4), leaf(4, 4, seed=1)
POSITIVE = (X @ X.t() + torch.eye(4)).detach().requires_grad_()

HONEST: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "mul": (ops.Mul, (X, W)),
    "matmul": (ops.Matmul, (X, W)),
    "once": (ops.Once, (X, W)),
    "clamp": (ops.Clamp, (X,)),
    "clamp at its limits": (ops.Clamp, (torch.tensor([0.0, 6.0, 3.0, 6.000001]).requires_grad_(),)),
    "apply": (ops.Matmul.apply, (X, W)),
    "plain": (ops.plain, (X, W)),
    "cast": (ops.cast, (X, W, 0.5)),
    "overload": (torch.ops.contracts.plain.default, (X, W)),
    "block": (ops.Block(), (X,)),
    "linear": (nn.Linear(4, 3), (X,)),
    "batch-norm": (nn.BatchNorm1d(4), (X,)),
    "dropout": (nn.Dropout(0.3), (X,)),
    "attention": (nn.MultiheadAttention(4, 2), (X, X, W)),
    "gru": (nn.GRU(4, 3), (leaf(2, 3, 4),)),
    "relu": (F.relu, (X,)),
    "cross-entropy": (F.cross_entropy, (X, torch.tensor([0, 1, 3, 2]))),
    "split": (torch.split, (X, 2)),
    "t": (torch.t, (X,)),
    "sort": (torch.sort, (X,)),
    "cholesky": (torch.linalg.cholesky, (POSITIVE,)),
    "aten.mm": (torch.ops.aten.mm, (X, W)),
    "aten.view": (torch.ops.aten.view.default, (X, (2, 8))),
    "aten.add_": (torch.ops.aten.add_, (X.detach(), W.detach())),
}


@pytest.mark.parametrize("name", brief(HONEST, "linear"))
def test_an_honest_op_keeps_every_contract(name: str) -> None:
    op, inputs = HONEST[name]
    result = amp_fuzz.check_op(op, *inputs, backends=EAGER, autocast=["bfloat16", "float16"])
    assert result.ok, str(result)


WRONG: dict[str, tuple[Any, str]] = {
    "retain": (ops.Freed, "'NoneType' object has no attribute 'isalpha'"),
    "modified": (ops.Attributes, "input[0] is written in place before backward, and no error"),
    "needs": (ops.FirstOnly, "with a gradient for input[1] alone, input[1].grad: None"),
    "gradcheck": (ops.Halved, "backward gives 0.5 times the gradient that numbers give, where"),
    "double": (ops.CutOff, "Numerical gradient for function expected to be zero"),
    "placement": (ops.Undecorated, "Undecorated.backward gives another gradient 0"),
    "state": (ops.Leaving, "after the call, autocast on cpu: True became False"),
    "vmap": (ops.Flipped, "under vmap with in_dims=(0, 0), output: "),
    "alias": (torch.ops.contracts.half, "output 0 shares memory with its input x"),
    "fake": (ops.mm, "output is bfloat16[4, 4] on cpu with strides [4, 1], and float32"),
    "opcheck": (ops.counted, "Argument seen is not defined as mutable but was mutated"),
}


def test_each_contract_has_an_op_that_breaks_it() -> None:
    assert {*WRONG} == {*CONTRACTS}


@pytest.mark.parametrize("name", brief(WRONG, "gradcheck"))
def test_a_wrong_op_breaks_one_contract_alone(name: str) -> None:
    op, said = WRONG[name]
    inputs = (X, W, torch.zeros(2)) if op is ops.counted else (X, W)
    result = amp_fuzz.check_op(op, *inputs, backends=EAGER)
    assert [c.name for c in result.broken] == [name], str(result)
    (broken,) = result.broken
    assert said in broken.detail
    assert broken.advice
    assert (result.verdict, result.divergences) == ("diverges", ())
    # Without that contract nothing is wrong.
    others = [other for other in CONTRACTS if other != name]
    assert amp_fuzz.check_op(op, *inputs, backends=EAGER, contracts=others).ok


TEXT = """\
amp_fuzz.check_op of Freed, autograd.Function, seed 0: {head}
  eager-cpu, bfloat16           agrees: 1 value, 2 gradients, bit for bit
  compile[aot_eager], bfloat16  agrees: 1 value, 2 gradients, within their rounding, 1 graph
  export, bfloat16              agrees: 1 value, within their rounding
  retain                        BROKEN (no context)
  modified                      kept: 3 tensors written in place: 2 an error, 1 without effect
  needs                         kept: 2 gradients, each alone and all together
  gradcheck                     kept: 3 points, in float64
  double                        kept: torch.autograd.gradgradcheck passes, in float64
  placement                     kept: 1 backward of its own, the same wherever it runs
  state                         kept: unchanged after the call and after its backward pass
  alias                         not judged: for ops with a schema
  fake                          kept: 1 output: dtype, shape and strides
  vmap                          not judged: it declares no rule; in_dims= asks for one
  opcheck                       not judged: for ops with a schema

retain: BROKEN (no context)
  where     {where}
  what      the second pass over a retained graph raises AttributeError: 'NoneType'
            object has no attribute 'isalpha' ({where})
  to do     Leave what backward needs on ctx, in ctx.save_for_backward: autograd frees
            it itself after the last pass."""


@pytest.mark.thorough
def test_the_text_of_a_result() -> None:
    result = amp_fuzz.check_op(ops.Freed, X, W)
    assert str(result) == TEXT.format(
        head="BREAKS retain (7 kept, 1 broken, 3 not judged)", where=result.broken[0].where
    )
    assert result.broken[0].where.startswith("ops.py:")
    with pytest.raises(amp_fuzz.CheckFailed, match="BREAKS retain"):
        result.raise_if_failed()


def test_a_custom_op_whose_output_is_its_input_is_told_what_torch_found() -> None:
    @torch.library.custom_op("contracts::same", mutates_args=())
    def same(x: Tensor) -> Tensor:
        return x

    result = amp_fuzz.check_op(same, X, backends=EAGER, contracts=["alias"])
    assert "an output is an input, or shares memory with one" in str(result)
    assert result.verdict == "diverges"


@pytest.mark.thorough
def test_an_op_that_always_raises_cannot_be_judged() -> None:
    def raises(x: Tensor) -> Tensor:
        raise ValueError("no")

    result = amp_fuzz.check_op(raises, X, backends=EAGER)
    assert result.verdict == "unjudged"
    assert not result
    # One text tells what stops several contracts.
    assert str(result).count("it raises: ValueError: no") == 1


def test_an_op_that_does_not_repeat_itself_cannot_be_judged() -> None:
    count = iter(range(1, 1000))

    def counts(x: Tensor) -> Tensor:
        return x * next(count)

    result = amp_fuzz.check_op(counts, X, backends=EAGER, contracts=["retain"], isolate=False)
    assert "it does not repeat its results" in result.contracts[0].detail


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("backward", "kept"),
    [
        (lambda ctx, g: _refuses(RuntimeError), True),
        (lambda ctx, g: _refuses(AttributeError), False),
    ],
)
def test_only_a_runtime_error_refuses_a_second_derivative(
    backward: Callable[..., Any], kept: bool
) -> None:
    class Second(ops.Mul):
        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            if torch.is_grad_enabled():
                backward(ctx, g)
            x, w = ctx.saved_tensors
            return g * w, g * x

    result = amp_fuzz.check_op(Second, X, W, backends=EAGER, contracts=["double"])
    assert result.ok is kept, str(result)


def _refuses(kind: type[Exception]) -> None:
    raise kind("only once")


@pytest.mark.thorough
def test_vmap_is_checked_for_any_op_if_in_dims_are_given() -> None:
    def wrong(x: Tensor, w: Tensor) -> Tensor:
        return x * w + (x.shape != X.shape or torch._C._functorch.is_batchedtensor(x))

    assert amp_fuzz.check_op(torch.mul, X, W, backends=EAGER, in_dims=(0, None)).ok
    result = amp_fuzz.check_op(wrong, X, W, backends=EAGER, in_dims=(1, None))
    assert [c.name for c in result.broken] == ["vmap"]


def test_a_crash_in_a_contract_breaks_it() -> None:
    class Dies(ops.Mul):
        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            if ctx.__dict__.setdefault("calls", 0):
                os.kill(os.getpid(), signal.SIGSEGV)
            ctx.calls += 1
            x, w = ctx.saved_tensors
            return g * w, g * x

    result = amp_fuzz.check_op(Dies, X, W, backends=EAGER, contracts=["retain", "needs"])
    assert [c.name for c in result.broken] == ["retain"]
    assert "SIGSEGV" in result.broken[0].detail


@pytest.mark.thorough
def test_what_a_call_changes_is_restored() -> None:
    module = nn.BatchNorm1d(4)
    x = leaf(3, 4)
    before = {name: t.clone() for name, t in module.state_dict().items()}
    assert amp_fuzz.check_op(module, x, backends=EAGER, isolate=False).ok
    assert all(torch.equal(before[name], t) for name, t in module.state_dict().items())
    assert x.grad is None
    assert all(p.grad is None and p.requires_grad for p in module.parameters())


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: amp_fuzz.check_op(ops.Mul, X, W, contracts=["speed"]), "contracts has 'speed': "),
        (lambda: amp_fuzz.check_op(ops.Mul.__new__(ops.Mul), X), "Mul\\(\\) is an instance"),
        (lambda: amp_fuzz.check_op(torch.autograd.Function, X), "is the base class"),
        (lambda: amp_fuzz.check_op(3, X), "3 is not callable"),
        (lambda: amp_fuzz.check_op(ops.Mul, X, W, backends="fake-cuda"), "add eager-cpu"),
        (
            lambda: amp_fuzz.check_op(torch.ops.contracts.undeclared, X),
            "declare it with amp_fuzz.register_op\\('contracts.undeclared', autocast=...\\)",
        ),
    ],
)
def test_what_cannot_be_checked_is_an_error(call: Callable[[], Any], said: str) -> None:
    with pytest.raises(amp_fuzz.CheckError, match=said):
        call()


# -- the first derivative -------------------------------------------------------------------------


def in_one_dtype(op: Any, dtype: torch.dtype) -> Any:
    """Return an op that runs in no other dtype."""

    class Only(op):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, *args: Tensor) -> Any:
            if args[0].dtype is not dtype:
                raise RuntimeError(f"only for {dtype}")
            return op.forward(ctx, *args)

    return Only


def gradcheck(op: Any, *inputs: Tensor) -> Contract:
    result = amp_fuzz.check_op(op, *inputs, backends=EAGER, contracts=["gradcheck"])
    return result.contracts[0]


def test_a_derivative_that_is_wrong_where_no_input_was_given_is_found_there() -> None:
    found = gradcheck(ops.Open, X)
    assert (found.state, found.where) == ("broken", "input[0].grad")
    assert "backward gives a gradient, and numbers give 0, where input[0]" in found.detail
    assert "at inputs of our own, in float64" in found.detail


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_an_op_that_float64_cannot_run_is_checked_in_its_own_dtype(dtype: torch.dtype) -> None:
    x = X.detach().to(dtype).requires_grad_()
    name = str(dtype).removeprefix("torch.")
    assert gradcheck(in_one_dtype(ops.Open, dtype), x).state == "broken"
    honest = gradcheck(in_one_dtype(ops.Clamp, dtype), x)
    assert honest.state == "kept"
    assert honest.detail.endswith(name)


@pytest.mark.thorough
def test_an_op_whose_gradient_differs_on_purpose_leaves_the_contract_out() -> None:
    result = amp_fuzz.check_op(ops.StraightThrough, X, backends=EAGER)
    assert [c.name for c in result.broken] == ["gradcheck"]
    assert "contracts='-gradcheck'" in result.broken[0].advice
    result = amp_fuzz.check_op(ops.StraightThrough, X, backends=EAGER, contracts="-gradcheck")
    assert result.ok, str(result)
    assert {c.name for c in result.contracts} == {*CONTRACTS} - {"gradcheck"}


@pytest.mark.thorough
def test_own_inputs_keep_the_signs_of_those_given() -> None:
    """An op of positive numbers may say anything of negative ones."""

    class Root(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.abs().sqrt()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            return g * 0.5 / ctx.saved_tensors[0].abs().sqrt()

    assert gradcheck(Root.apply, X.detach().abs().requires_grad_()).state == "kept"
    assert gradcheck(Root.apply, X).state == "broken"


# -- nothing judged is not "keeps" ----------------------------------------------------------------


def test_inputs_of_which_none_requires_grad_are_made_to() -> None:
    x, w = X.detach(), W.detach()
    result = amp_fuzz.check_op(ops.Halved, x, w, backends=EAGER)
    assert [c.name for c in result.broken] == ["gradcheck"]
    assert "None of its inputs requires grad: the floating ones were made to." in str(result)
    assert not x.requires_grad
    # If one does, the others stay as they are.
    result = amp_fuzz.check_op(ops.Mul, X, w, backends=EAGER, contracts=["retain"])
    assert (result.contracts[0].detail, result.remarks) == ("1 gradient, twice over one graph", ())


@pytest.mark.thorough
def test_an_op_without_a_derivative_is_told_what_was_not_judged() -> None:
    result = amp_fuzz.check_op(torch.argmax, X.detach(), backends=EAGER)
    assert result.ok
    assert "keeps its contracts (2 kept, 9 not judged)" in str(result)


def test_contracts_of_which_none_applies_are_not_kept() -> None:
    result = amp_fuzz.check_op(ops.Matmul, X, W, backends=EAGER, contracts=["vmap"])
    assert (result.verdict, result.ok) == ("unjudged", False)
    assert "CANNOT BE JUDGED (1 not judged)" in str(result)


@pytest.mark.thorough
def test_weight_norm_of_torch_has_a_wrong_second_derivative() -> None:
    """The bug weight-norm-second.."""
    g = leaf(4, 1)
    result = amp_fuzz.check_op(torch._weight_norm, X, g, 0, backends=EAGER)
    assert [c.name for c in result.broken] == ["double"]
    plain = amp_fuzz.check_op(
        lambda v, g: v * (g / v.norm(dim=1, keepdim=True)), X, g, backends=EAGER
    )
    assert plain.ok, plain
