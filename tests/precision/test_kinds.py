"""`amp_fuzz.precision` names the statement of each kind of harm, says why, and finds the remedy."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from amp_fuzz.interfaces.precision import PrecisionResult, precision
from amp_fuzz.interfaces.precision.sites import Place
from tests.helpers import brief
from tests.precision.kinds import KINDS, Cancelling, Gradient, harmful_lines

BF16, F16 = torch.bfloat16, torch.float16


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def small(y: Tensor) -> Tensor:
    """Return a loss with small gradients, as those of a mean over many tokens are."""
    return y.mean() / 4096


FEW = ("Variance", "Logits", "Rotary", "LogEpsilon", "Average", "Gradient", "FilledMask", "Routing")


@pytest.mark.parametrize("name", brief(KINDS, *FEW))
def test_the_harmful_line_is_named_with_its_reason_and_its_remedy(name: str) -> None:
    kind = KINDS[name]
    result = precision(
        kind.module(16),
        torch.randn(2, 6, 16),
        autocast=getattr(torch, kind.dtype),
        device=kind.device,
        loss=small if kind.module is Gradient else None,
    )
    (line,) = harmful_lines(kind.module)
    place = Place("", __file__.replace("test_kinds", "kinds"), line)
    assert result.verdict == kind.verdict
    assert result.culprits[0] == place
    assert not kind.event or kind.event in {e.kind for e in result.events if e.place == place}
    assert place.short in str(result)
    if not kind.remedy:
        assert result.remedy is None
    else:
        assert result.remedy is not None
        assert result.remedy.lines == ((place,) if kind.remedy == "line" else ())
        assert result.remedy.modules == (("",) if kind.remedy == "module" else ())


# -- functions that are no modules: lines are the parts --------------------------------------------


def line_of(function: Callable[..., object], offset: int) -> int:
    return function.__code__.co_firstlineno + offset


def only_line(result: PrecisionResult) -> int:
    assert result.remedy is not None
    (place,) = result.remedy.lines
    assert result.culprits[0] == place
    return place.line


def test_an_epsilon_after_a_product_is_0_in_float16() -> None:
    w = torch.rand(8, 4, requires_grad=True)
    x = torch.rand(5, 8)
    x[0] = 0

    def entropy(x: Tensor) -> Tensor:
        return torch.log(x @ w + 1e-8)

    result = precision(entropy, x, autocast=F16, device="cuda")
    assert result.verdict == "breaks"
    assert only_line(result) == line_of(entropy, 1)
    assert "1e-08 is 0 in float16" in str(result)
    assert "of log are not finite for operands that lost their digits" in str(result.events)
    assert result.remedy is not None
    assert result.remedy.dtype == "bfloat16"


def test_rotary_positions_made_float32_by_hand_are_cast_again() -> None:
    freqs = 1 / 100 ** (torch.arange(4).float() / 4)

    def rotated(x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[0]).float() + 1000
        angles = positions[:, None].float() @ freqs[None].float()
        return x * angles.cos()

    result = precision(rotated, torch.randn(6, 4), autocast=BF16, device="cuda")
    assert result.verdict == "loses digits"
    assert only_line(result) == line_of(rotated, 2)
    assert {"collapse", "lowered"} <= {e.kind for e in result.events}
    assert "6 different whole numbers up to 1005 become 2 in bfloat16" in str(result.events)


def test_gradients_that_are_0_in_float16_need_a_scaled_loss() -> None:
    model = nn.Linear(8, 8)
    result = precision(model, torch.randn(4, 8), autocast=F16, device="cuda", loss=tiny)
    assert result.verdict == "breaks"
    assert {v.name: v.harm for v in result.harmed} == {
        "weight.grad": "vanishes",
        "bias.grad": "vanishes",
    }
    assert result.remedy is not None
    assert result.remedy.scale > 0
    assert result.remedy.dtype == "bfloat16"


def tiny(y: Tensor) -> Tensor:
    return y.mean() * 1e-7


def test_a_variance_as_a_mean_of_squares_cancels() -> None:
    w = torch.eye(32)

    def normalised(x: Tensor) -> Tensor:
        y = x @ w
        variance = (y * y).mean(-1, keepdim=True) - y.mean(-1, keepdim=True) ** 2
        return (y - y.mean(-1, keepdim=True)) / variance.abs().sqrt()

    result = precision(normalised, torch.randn(4, 32) + 30, autocast=F16, device="cuda")
    assert result.verdict == "loses digits"
    assert line_of(normalised, 2) in {place.line for place in result.culprits[:3]}


def cast(count: int) -> Tensor:
    return torch.arange(990, 990 + count).to(BF16)


def made(count: int) -> Tensor:
    return torch.arange(990, 990 + count, dtype=BF16)


@pytest.mark.parametrize("steps", [cast, made])
def test_time_steps_in_bfloat16_become_equal(steps: Callable[[int], Tensor]) -> None:
    """Without autocast too: what the code itself asks for is compared with float32."""
    freqs = torch.linspace(0.1, 1, 8)

    def embedded(x: Tensor) -> Tensor:
        return (x @ x.T) * (steps(9)[:, None] * freqs).cos().sum()

    result = precision(embedded, torch.randn(4, 8), autocast=BF16, device="cuda")
    assert result.verdict == "loses digits"
    assert "9 different whole numbers up to 998 become" in str(result.events)
    assert result.culprits[0].line == line_of(steps, 1)
    assert result.remedy is None
    assert f"the code itself asks for 16 bits at {result.culprits[0].short}" in str(result.skipped)


# -- contexts -------------------------------------------------------------------------------------


def test_a_context_of_another_device_casts_nothing() -> None:
    model = nn.Linear(8, 8)

    def called(x: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=F16):
            return model(x)

    result = precision(called, torch.randn(4, 8), autocast=None)
    assert result.verdict == "casts nothing"
    assert result.contexts == ("cuda",)
    text = " ".join(str(result).split())
    assert "the tensors of the call are on cpu, and autocast is on for cuda only" in text
    assert 'Open torch.autocast("cpu") around the call.' in text


def test_a_call_without_a_context_casts_nothing() -> None:
    result = precision(nn.Linear(8, 8), torch.randn(4, 8), autocast=None)
    assert result.verdict == "casts nothing"
    assert result.contexts == ()
    assert "the call opens no autocast" in " ".join(str(result).split())


def test_a_context_around_ops_without_a_policy_casts_nothing() -> None:
    result = precision(torch.neg, torch.randn(4, 8), autocast=BF16)
    assert result.verdict == "casts nothing"
    assert "would cast" in " ".join(str(result).split())


def test_a_context_of_another_device_is_noted_beside_one_that_casts() -> None:
    model = nn.Linear(8, 8)

    def called(x: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=F16):
            return model(x)

    note = "a context is for cuda; the tensors of the call are on cpu, where it changes nothing"
    x = torch.randn(4, 8)
    result = precision(called, x)
    assert (result.verdict, result.contexts) == ("harmless", ("cpu", "cuda"))
    assert note in " ".join(str(result).split())
    assert note not in " ".join(str(precision(model, x)).split())
    assert note not in " ".join(str(precision(called, x, device="cuda")).split())
    idle = precision(called, x, autocast=None)
    assert (idle.verdict, note in " ".join(str(idle).split())) == ("casts nothing", False)


def test_a_context_that_turns_itself_off_casts_nothing() -> None:
    model = nn.Linear(8, 8)

    def called(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float32):
            return model(x)

    result = precision(called, torch.randn(4, 8), autocast=None)
    assert result.verdict == "casts nothing"
    assert (result.contexts, result.refused) == ((), ("float32",))
    text = " ".join(str(result).split())
    assert "on cpu, where a context of float32 warns and is off" in text
    assert "Give it torch.bfloat16 or torch.float16." in text


def test_a_region_of_float32_is_not_the_dtype_that_is_asked_about() -> None:
    model = nn.Linear(8, 8)

    def called(x: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=torch.float32):
            x = model(x)
        with torch.autocast("cuda", dtype=F16):
            return model(x)

    result = precision(called, torch.randn(4, 8), autocast=None, device="cuda")
    assert (result.verdict, result.dtype) == ("harmless", "float16")
    assert (result.contexts, result.refused) == (("cuda",), ())


def test_the_dtype_is_that_of_a_context_of_its_own() -> None:
    model = nn.Linear(8, 8)

    def called(x: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=BF16):
            return model(x)

    result = precision(called, torch.randn(4, 8), autocast=None, device="cuda")
    assert result.verdict == "harmless"
    assert result.dtype == "bfloat16"


# -- one statement --------------------------------------------------------------------------------


def test_the_share_of_a_line_counts_its_own_products() -> None:
    w, v = torch.rand(8, 8), torch.rand(8, 24)

    def products(x: Tensor) -> Tensor:
        scores = (x @ w) * 1e4
        return scores.softmax(-1) @ v

    result = precision(products, torch.rand(4, 8) + 1, autocast=F16, device="cuda", backward=False)
    assert only_line(result) == line_of(products, 1)
    assert result.remedy is not None
    assert result.remedy.share == pytest.approx(1 / 4)


def test_a_draw_makes_no_error() -> None:
    drop = nn.Dropout(0.5)  # 1 / (1 - p) has no rounding

    def called(x: Tensor) -> Tensor:
        x = x @ x.T
        return drop(x)

    result = precision(called, torch.randn(8, 8), autocast=BF16)
    drawn = [s for s in result.statements if s.place.line == line_of(called, 2)]
    assert drawn
    assert min(s.made for s in drawn) > 7


def test_a_loop_is_given_what_comes_into_it() -> None:
    def stepped(x: Tensor) -> Tensor:
        h = x @ torch.eye(8)
        for _ in range(20):
            h = h + 0.01
        return h

    result = precision(stepped, torch.rand(8, 8) + 8, autocast=BF16, backward=False)
    (step,) = (s for s in result.statements if s.place.line == line_of(stepped, 3))
    assert step.result < step.given
    assert F.relu(torch.tensor(step.given)) > 2


def test_a_module_that_is_held_twice_has_its_first_path() -> None:
    class Adapted(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner
            self.called = inner.forward  # as peft keeps a method of the model that it adapts

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = self.inner(x)
            return made

    result = precision(Adapted(Cancelling(8)), torch.randn(4, 8), autocast=BF16, device="cuda")
    assert result.culprits[0].module == "inner"
