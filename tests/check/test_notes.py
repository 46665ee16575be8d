"""Notes: what a callable does by itself against autocast's policy, beside the verdict."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import amp_fuzz
from tests.check.functions import Right
from tests.check.models import MODELS, training_step
from tests.helpers import leading

CHEAP = ["eager-cpu", "fake-cuda"]
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Pointwise(torch.autograd.Function):
    """Its forward meets no autocast."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.abs()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Block(nn.Module):
    def __init__(self, act: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self, self.linear(x)).float()


def _half(block: Any, y: Tensor) -> Tensor:
    return y.half()


def _before_attention(block: Any, y: Tensor) -> Tensor:
    q = y.to(torch.float16).view(1, 1, 4, 8)
    return F.scaled_dot_product_attention(q, q, q)


def _region(block: Any, y: Tensor) -> Tensor:
    with torch.autocast(y.device.type, dtype=torch.float16):
        return y @ y.t()


def _lowered(block: Any, y: Tensor) -> Tensor:
    return F.softmax(y.float(), -1).bfloat16()


def _function(block: Any, y: Tensor) -> Tensor:
    return Right.apply(y, block.linear.weight)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("act", "kind", "op", "dtypes", "devices"),
    leading(
        [
            (_half, "cast", "half", ("bfloat16", "float16"), ("cpu", "cuda")),
            (_before_attention, "cast", "to", ("bfloat16", "float16"), ("cpu", "cuda")),
            (_region, "region", "torch.autocast", ("bfloat16", "float16"), ("cpu", "cuda")),
            (_lowered, "lowered", "bfloat16", ("float32", "bfloat16"), ("cuda",)),
            (_function, "function", "Right", ("", ""), ("cpu", "cuda")),
        ]
    ),
)
def test_a_cast_of_ones_own_is_noted_with_its_line_and_submodule(
    act: Callable[[Any, Tensor], Tensor],
    kind: str,
    op: str,
    dtypes: tuple[str, str],
    devices: tuple[str, ...],
) -> None:
    model = nn.Sequential(Block(lambda block, y: y), Block(act))
    result = amp_fuzz.check(model, X, backends=CHEAP, store=None)
    assert result.verdict == "agrees", str(result)
    (note,) = result.own_casts
    assert (note.kind, note.op, (note.given, note.made)) == (kind, op, dtypes)
    assert (note.module, note.devices) == ("1", devices)
    line = act.__code__.co_firstlineno + 1
    assert note.line == f"{Path(__file__).name}:{line}"


def test_the_text_of_a_note() -> None:
    model = nn.Sequential(Block(_half))
    text = str(amp_fuzz.check(model, X, backends=CHEAP, store=None))
    text = re.sub(r"test_notes\.py:\d+", "FILE", text)
    assert text.splitlines() == [
        "amp_fuzz.check of Sequential, seed 0: agrees",
        "  eager-cpu, bfloat16  agrees: 1 value, 2 gradients, bit for bit",
        "  fake-cuda, bfloat16  agrees: 1 value, 3 results inside, dtypes and shapes",
        "",
        "The callable's own casts, which do not affect the verdict:",
        "  note      FILE in 0: .half() casts bfloat16 to float16 under bfloat16",
        "            autocast (cpu, cuda)",
        "            Drop the cast, or cast to torch.get_autocast_dtype(): float16 and bfloat16",
        "            differ in range and digits, and many ops refuse or promote a mix.",
    ]


def _same(x: Tensor) -> Tensor:
    return (x @ x.t()).to(torch.get_autocast_dtype(x.device.type)).float()


def _off(x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):
        return x.half().float()


@pytest.mark.thorough
@pytest.mark.parametrize("function", [_same, _off, Pointwise.apply])
def test_casts_that_follow_the_policy_are_not_noted(function: Callable[[Tensor], Tensor]) -> None:
    result = amp_fuzz.check(function, X, backends=CHEAP, store=None)
    assert result.ok, str(result)
    assert result.own_casts == ()


@pytest.mark.thorough
@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_an_honest_model_has_no_notes(name: str, dtype: torch.dtype) -> None:
    model, inputs = MODELS[name]()
    result = amp_fuzz.check(model, *inputs, backends=CHEAP, autocast=dtype, store=None)
    assert result.own_casts == ()
    assert [note for note in result.notes if note.kind == "context"] == []
    step, given = training_step(dtype)
    result = amp_fuzz.check(
        step, *given, backends=["eager-cpu"], autocast=None, backward=False, store=None
    )
    assert (result.ok, result.own_casts) == (True, ())


# -- the verdict ----------------------------------------------------------------------------------


def _raises(x: Tensor) -> Tensor:
    return F.binary_cross_entropy(x.sigmoid(), x.detach().sigmoid())


def test_the_text_of_what_raises_under_autocast_alone() -> None:
    result = amp_fuzz.check(_raises, X, backends=CHEAP, store=None)
    assert (result.verdict, result.ok) == ("raises", False)
    assert [(note.kind, note.backend) for note in result.notes] == [
        ("autocast-raises", "fake-cuda")
    ]
    text = re.sub(r"RuntimeError: .* \(test_notes.py:\d+\)", "ERROR", str(result))
    text = re.sub(r"test_notes.py:\d+", "FILE", text)
    assert text.splitlines() == [
        "amp_fuzz.check of _raises, seed 0: RAISES UNDER AUTOCAST",
        "  eager-cpu, bfloat16  agrees: 1 value, bit for bit",
        "  fake-cuda, bfloat16  RAISES under autocast: ERROR; it runs without autocast",
        "  to do     Call at FILE what the error names instead, which autocast",
        "            allows.",
    ]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("function", "backends", "advice"),
    [
        (lambda x: x @ x, CHEAP[:1], "Fix the callable or its inputs first"),
        (lambda x: None, CHEAP[:1], "Return the tensors to compare"),
        (lambda x: x @ x.t(), ["script"], "Choose a backend that can call it"),
        (lambda x: x @ x.t(), CHEAP[:1], "Nothing to do."),
    ],
    ids=["raises", "nothing", "skipped", "agrees"],
)
def test_each_verdict_says_what_to_do(function: Any, backends: list[str], advice: str) -> None:
    result = amp_fuzz.check(function, X, backends=backends, store=None)
    assert result.advice.startswith(advice)
    assert result.ok is (result.verdict == "agrees") is (advice == "Nothing to do.")
