"""What `amp_fuzz.precision` says of each value holds for the value itself."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from amp_fuzz.interfaces.check.subject import CheckError
from amp_fuzz.interfaces.precision import precision
from amp_fuzz.interfaces.precision.runs import Runs, Seen

BF16, F16 = torch.bfloat16, torch.float16


def waves(*shape: int) -> Tensor:
    return torch.arange(math.prod(shape), dtype=torch.float32).sin().reshape(shape)


def test_float32_is_measured_along_the_way_that_it_takes_itself() -> None:
    logits = torch.tensor([[1.0, 1 + 2**-10]])  # equal in bfloat16
    bias = waves(4).requires_grad_()

    def routed(table: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        h = F.batch_norm(x @ x.T[:, :4] + bias, None, None, training=True)
        return table[(logits @ torch.eye(2)).argmax(-1)], h  # the gradient of the bias is 0

    found = precision(routed, waves(2, 4), waves(32, 4), bias)
    values = {v.name: v for v in found.values}
    assert [v.name for v in found.harmed] == ["output[0]"]
    assert values["output[0]"].without == math.inf
    assert values["input[2].grad"].without < 1
    assert values["output[1]"].without > 6


def test_what_only_autocast_makes_infinite_counts_beside_infinite_elements() -> None:
    def masked(x: Tensor) -> Tensor:
        return (x @ x).masked_fill(torch.eye(4, dtype=torch.bool), -math.inf)

    found = precision(masked, torch.full((4, 4), 300.0), autocast=F16)
    assert [(v.name, v.harm) for v in found.values] == [("output", "not finite")]
    assert found.verdict == "breaks"


def test_infinite_elements_that_float32_has_too_are_no_harm() -> None:
    found = precision(lambda x: (x @ x).fill_diagonal_(math.inf), waves(4, 4))
    assert [v.harm for v in found.values] == [""]
    assert found.ok


def test_no_digits_are_claimed_where_nothing_is_finite() -> None:
    found = precision(lambda x: x @ x, torch.full((4, 4), math.nan))
    assert [(v.digits, v.without, v.harm) for v in found.values] == [(0, 0, "")]


def test_complex_values_are_compared() -> None:
    def spectrum(x: Tensor, w: Tensor) -> Tensor:
        return torch.fft.fft((x @ x).float()) * w

    weight = torch.complex(waves(4), waves(4) + 1).requires_grad_()
    found = precision(spectrum, waves(4, 4), weight, digits=5)
    assert {v.name for v in found.harmed} == {"output", "input[1].grad"}


def test_a_number_that_is_returned_is_compared() -> None:
    found = precision(lambda x: (x @ x).sum().item(), torch.full((4, 4), 300.0), autocast=F16)
    assert [(v.name, v.harm) for v in found.values] == [("output", "not finite")]


def test_a_shape_that_depends_on_lost_digits_is_harm() -> None:
    x = torch.tensor([[1.0, 1 + 2**-10]])

    def larger(x: Tensor) -> Tensor:
        y = x @ torch.eye(2)
        return y[y > 1]

    found = precision(larger, x)
    assert [(v.name, v.digits, v.harm) for v in found.values] == [("output", 0, "digits")]
    assert found.remedy is not None


def test_a_device_is_not_blamed_for_a_kernel_that_the_cpu_lacks() -> None:
    def spectrum(x: Tensor) -> Tensor:
        return torch.fft.rfft(x @ x).abs()  # CUDA takes float16, if the length is a power of 2

    with pytest.raises(CheckError, match="cuda cannot be simulated: the CPU has no kernel"):
        precision(spectrum, waves(4, 4), autocast=F16, device="cuda")


def test_draws_in_the_shape_of_a_tensor_are_exact() -> None:
    found = precision(lambda x: torch.randn_like(x @ x) + torch.rand_like(x), waves(4, 4))
    assert not found.skipped


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_step_of_training_is_harmed_by_the_casts_that_autocast_keeps(momentum: float) -> None:
    weight = torch.nn.Parameter(waves(8, 1))
    optimizer = torch.optim.SGD([weight], lr=0.25, momentum=momentum)

    def train(x: Tensor) -> Tensor:
        for _ in range(3):  # the second step still multiplies by the first cast of the weight
            optimizer.zero_grad()
            loss = (x @ weight).square().mean()
            loss.backward()
            optimizer.step()
        return loss.detach()

    found = precision(train, waves(5, 8))
    assert [v.without > 5 for v in found.values] == [True] * len(found.values)
    assert "output" in {v.name for v in found.harmed}
    assert found.remedy is not None


def test_a_report_says_if_there_is_nothing_to_compare() -> None:
    found = precision(lambda x: (x @ x).argmax(), waves(4, 4))
    assert "nothing to compare" in str(found)


@pytest.mark.parametrize(
    "wrong", [{"seconds": "3"}, {"seconds": math.nan}, {"digits": "3"}, {"digits": 9}, {"loss": 1}]
)
def test_an_argument_of_a_wrong_kind_is_named(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(CheckError, match=f"^{name}="):
        precision(torch.nn.Linear(2, 2), torch.ones(1, 2), **wrong)


def test_an_input_that_one_call_uses_up_is_refused() -> None:
    given = (torch.ones(2, 2) for _ in range(2))
    with pytest.raises(CheckError, match=r"input\[0\] is a generator, .* pass a list"):
        precision(sum, given)
    assert len(list(given)) == 2


def test_a_callable_that_is_another_in_each_call_is_refused() -> None:
    calls = []

    def counted(x: Tensor) -> Tensor:
        calls.append(1)
        return (x @ x) * len(calls) ** 4

    with pytest.raises(CheckError, match=r"output is another in each call.*Make the callable do"):
        precision(counted, torch.eye(4), seconds=0)


def test_a_device_may_have_a_number() -> None:
    result = precision(torch.nn.Linear(2, 2), torch.ones(1, 2), device=torch.device("cpu", 0))
    assert result.device == "cpu"


def test_a_value_near_to_what_is_asked_is_judged_with_the_kernels_of_torch() -> None:
    a, b = waves(64, 300), waves(300, 64)
    exact = a.double() @ b.double()
    with torch.autocast("cpu", dtype=BF16):
        off = ((a @ b).double() - exact).norm() / exact.norm()
    found = precision(torch.matmul, a, b, digits=float(-off.log10()), seconds=0).values[0]
    assert found.digits == pytest.approx(float(-off.log10()), rel=1e-6)
    assert not found.harm or found.digits < -off.log10()


def test_noise_that_is_another_in_each_call_is_no_other_result() -> None:
    """Kernels of a GPU add in any order: what is 0 but for rounding differs from call to call."""
    orders = iter(torch.arange(300).roll(7 * i) for i in range(100))

    def noise(x: Tensor) -> Tensor:
        h = x.sin().square() + x.cos().square() - 1 + 1e-9 * x
        return (h[next(orders)].cumsum(0)[-1] * (x @ x)).sum()

    assert precision(noise, waves(300), seconds=0, backward=False).verdict == "harmless"


def test_a_product_without_a_kernel_of_16_bits_is_judged_by_one_of_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a, b = waves(64, 300), waves(300, 64)
    first = precision(torch.matmul, a, b, seconds=0).values[0].digits
    run = Runs.tried

    def tried(self: Runs, *args: Any, **kwargs: Any) -> Seen:
        return Seen(raised=RuntimeError("no kernel")) if self.native else run(self, *args, **kwargs)

    monkeypatch.setattr(Runs, "tried", tried)
    found = precision(torch.matmul, a, b, digits=first + 0.01, seconds=1)
    assert found.verdict == "loses digits"
    assert found.values[0].digits == first
