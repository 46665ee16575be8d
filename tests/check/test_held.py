"""What a callable holds is found, compared and put back, wherever it stands."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import amp_fuzz
from amp_fuzz.interfaces.check.subject import Subject
from tests.helpers import brief, leading, lstm_of_bfloat16

CHEAP = ["eager-cpu", "fake-cuda", "compile[aot_eager]"]
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what a check stores out of the repository."""
    monkeypatch.chdir(tmp_path)


SHARED = nn.Linear(8, 8)


def _helper(x: Tensor) -> Tensor:
    return SHARED(x)


class Trainer:
    def __init__(self) -> None:
        self.model = nn.Linear(8, 8)
        self.steps = 0

    def step(self, x: Tensor) -> Tensor:
        self.steps += 1
        return self.model(x) * self.steps


def _through_a_helper() -> tuple[Callable[..., Any], nn.Module]:
    return lambda x: _helper(x).relu(), SHARED


def _in_an_inner_function() -> tuple[Callable[..., Any], nn.Module]:
    def outer(x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(lambda y: SHARED(y), x, use_reentrant=False)

    return outer, SHARED


def _as_a_default() -> tuple[Callable[..., Any], nn.Module]:
    model = nn.Linear(8, 8)
    return lambda x, model=model: model(x), model


def _in_an_object() -> tuple[Callable[..., Any], nn.Module]:
    trainer = Trainer()
    return trainer.step, trainer.model


def _in_a_partial() -> tuple[Callable[..., Any], nn.Module]:
    model = nn.Linear(8, 8)
    return functools.partial(lambda models, x: models["a"](x), {"a": model}), model


@pytest.mark.parametrize(
    "made",
    leading(
        [_in_an_object, _through_a_helper, _in_an_inner_function, _as_a_default, _in_a_partial]
    ),
)
def test_the_weights_of_a_function_are_found(
    made: Callable[[], tuple[Callable[..., Any], nn.Module]],
) -> None:
    """Not found, their gradients would not be compared, and would be there afterwards."""
    function, model = made()
    result = amp_fuzz.check(function, X, backends=CHEAP)
    assert result, str(result)
    assert [run.status for run in result.runs] == ["agreed"] * 3
    assert [run.gradients for run in result.runs] == [2, 0, 2]
    assert all(p.grad is None for p in model.parameters())


class Caching(nn.Module):
    """Writes to tensors that are no buffers, and grows a list."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.sums = torch.zeros(4, 8)
        self.several = [torch.zeros(8)]
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.sums.add_(y.detach())
        self.several[0].add_(1)
        self.seen.append(y.detach())
        return y + self.sums + self.several[0] + len(self.seen)


@pytest.mark.thorough
def test_tensors_among_the_attributes_are_put_back() -> None:
    model = Caching()
    result = amp_fuzz.check(model, X, backends=["eager-cpu", "compile[aot_eager]"])
    assert result, str(result)
    assert not model.sums.any()
    assert not model.several[0].any()
    assert model.seen == []


@pytest.mark.thorough
def test_a_tensor_that_no_device_moves_is_in_the_way_only_where_it_is_used() -> None:
    """Also, the LSTM keeps a list of its weights."""
    model = nn.LSTM(8, 8)
    model.unused = torch.ones(3)
    result = amp_fuzz.check(model, X, backends=["eager-cpu", "fake-cuda"])
    runs = "agreed" if lstm_of_bfloat16() else "fails"
    assert [run.status for run in result.runs] == [runs, "agreed"], str(result)
    table = torch.ones(8)
    result = amp_fuzz.check(lambda x: x * table, X, backends=["eager-cpu", "fake-cuda"])
    assert result.skipped[0].detail.startswith("it mixes devices")
    assert "(table)" in result.skipped[0].detail


@dataclass
class Batch:
    x: Tensor
    count: Tensor


class Bag(dict[str, Tensor]):
    """A mapping that pytrees do not know."""


@pytest.mark.parametrize("bag", brief([False, True], True), ids=["dataclass", "mapping"])
def test_inputs_of_any_structure_are_copied(bag: bool) -> None:
    linear = nn.Linear(8, 1)
    x, count = X.clone().requires_grad_(), torch.zeros(4)

    def function(batch: Any) -> Any:
        x, count = (batch["x"], batch["count"]) if bag else (batch.x, batch.count)
        count.add_(1)
        return Bag(y=linear(x).squeeze(1) + count)

    batch = Bag(x=x, count=count) if bag else Batch(x, count)
    result = amp_fuzz.check(function, batch, backends=CHEAP)
    assert result, str(result)
    assert [run.status for run in result.runs] == ["agreed"] * 3
    assert (result.runs[0].values, result.runs[0].gradients) == (1, 3)
    assert x.grad is None
    assert not count.any()


class Odd(nn.Module):
    """Buffers that cannot be written, or come in the call; a weight whose memory is exchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("wide", torch.ones(8, 1).expand(8, 8))
        with torch.inference_mode():
            self.register_buffer("inferred", torch.ones(8))
        self.register_buffer("sparse", torch.eye(4).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "mask"):
            self.register_buffer("mask", torch.ones(8, device=x.device))
        self.linear.weight.data = self.linear.weight.data.half().float() * 0.5
        return self.linear(x) * self.mask * self.wide[0]


@pytest.mark.thorough
def test_buffers_of_any_kind_are_put_back() -> None:
    model = Odd()
    weight = model.linear.weight.detach().clone()
    result = amp_fuzz.check(model, X, backends=["eager-cpu", "fake-cuda"])
    assert result, str(result)
    assert torch.equal(model.linear.weight, weight)
    assert not hasattr(model, "mask")
    assert model.wide.stride() == (1, 0)


class Drawing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.torchs = torch.Generator().manual_seed(3)
        self.numpys = np.random.default_rng(4)

    def forward(self, x: Tensor) -> Tensor:
        return x @ x.T + torch.rand(4, generator=self.torchs) * float(self.numpys.random())


def test_generators_of_its_own_are_put_back() -> None:
    model = Drawing()
    before = model.torchs.get_state(), str(model.numpys.bit_generator.state)
    result = amp_fuzz.check(model, X, backends=["eager-cpu"])
    assert result, str(result)
    assert torch.equal(before[0], model.torchs.get_state())
    assert before[1] == str(model.numpys.bit_generator.state)


def test_a_scaler_and_schedulers_are_put_back() -> None:
    """Else the second call computes with another scale and rate than the first."""
    model = nn.Linear(8, 8)
    weight = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    halved = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    after = torch.optim.lr_scheduler.ConstantLR(optimizer, 0.1)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [halved, after], [3])
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)

    def train(x: Tensor) -> Tensor:
        loss = model(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        return loss.detach() * scaler.get_scale() * scheduler.get_last_lr()[0]

    def state() -> tuple[Any, ...]:
        epochs = scheduler.last_epoch, halved.last_epoch
        return scaler.get_scale(), optimizer.param_groups[0]["lr"], *epochs

    assert state() == (4.0, 1.0, 0, 0)
    result = amp_fuzz.check(train, X, backends=["eager-cpu"], backward=False)
    assert [run.status for run in result.runs] == ["agreed"], str(result)
    assert torch.equal(model.weight, weight)
    assert state() == (4.0, 1.0, 0, 0)
    train(X)
    assert state() == (8.0, 0.5, 1, 1)


class Decaying:
    """A rate that counts its own calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, epoch: int) -> float:
        self.calls += 1
        return 0.5**self.calls


@pytest.mark.parametrize("isolate", [True, False], ids=["apart", "here"])
def test_what_only_a_scheduler_holds_is_put_back(isolate: bool) -> None:
    """Its optimizer, the functions that compute rates, and rates in tensors."""
    lr = torch.optim.lr_scheduler
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(1.0))
    rate = Decaying()
    scheduler = lr.ChainedScheduler(
        [lr.LambdaLR(optimizer, rate), lr.ExponentialLR(optimizer, 0.5)]
    )

    def train(x: Tensor) -> Tensor:
        for one in scheduler._schedulers:
            one.optimizer.step()
        scheduler.step()
        return x * scheduler._schedulers[0].optimizer.param_groups[0]["lr"]

    def state() -> tuple[Any, ...]:
        return float(optimizer.param_groups[0]["lr"]), rate.calls, set(vars(optimizer))

    before = state()
    result = amp_fuzz.check(train, X, backends=["eager-cpu"], backward=False, isolate=isolate)
    assert [run.status for run in result.runs] == ["agreed"], str(result)
    assert state() == before


def test_what_an_optimizer_of_the_users_class_holds_is_put_back() -> None:
    class Slow(torch.optim.SGD):
        steps = 0
        seen: list[int]

        def step(self, closure: Any = None) -> Any:
            self.steps += 1
            self.seen = [*getattr(self, "seen", []), self.steps]
            return super().step(closure) if self.steps % 2 else None

    model = nn.Linear(8, 8)
    optimizer = Slow(model.parameters(), lr=0.1, momentum=0.9)

    def train(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        model(x).float().sum().backward()
        optimizer.step()
        return x + optimizer.steps

    result = amp_fuzz.check(train, X, backends=["eager-cpu"], backward=False, isolate=False)
    assert [run.status for run in result.runs] == ["agreed"], str(result)
    assert not {"steps", "seen"} & vars(optimizer).keys()
    train(X)  # the momentum is restored too, but not compared
    assert Subject.of(train, (X,)).state().keys() == {"model.weight", "model.bias"}


@pytest.mark.thorough
def test_caches_hold_no_fake_tensor() -> None:
    """A fake one would be there for the next backend, and for the user."""

    @functools.lru_cache
    def mask(size: int) -> Tensor:
        return torch.ones(size, size).tril()

    backends = ["fake-cuda", "eager-cpu", "compile[aot_eager]"]
    result = amp_fuzz.check(lambda x: (x @ x.T) * mask(4).to(x.device), X, backends=backends)
    assert result, str(result)
    assert {run.status for run in result.runs} == {"agreed"}
    assert type(mask(4)) is Tensor


@pytest.mark.thorough
def test_the_leaves_behind_a_tensor_are_trained_each_time() -> None:
    """Its graph is older than the call: a backward pass must not take it away."""
    source = nn.Parameter(torch.ones(8))
    computed = source * 2
    result = amp_fuzz.check(lambda x: x * computed, X, backends=["eager-cpu", "compile[aot_eager]"])
    assert result, str(result)
    assert [run.gradients for run in result.runs] == [1, 1]
    assert source.grad is None
    computed.sum().backward()


def test_a_compiled_part_is_refused_by_name() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner: Any = torch.compile(nn.Linear(8, 8), backend="eager")

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    with pytest.raises(amp_fuzz.CheckError, match="inner is already compiled"):
        amp_fuzz.check(Outer(), X)
    compiled = torch.compile(lambda x: x * 2, backend="eager")
    with pytest.raises(amp_fuzz.CheckError, match="compiled is already compiled"):
        amp_fuzz.check(lambda x: compiled(x), X)
    disabled: Any = torch.compiler.disable(lambda x: x @ x.T)
    assert amp_fuzz.check(disabled, X, backends=["eager-cpu"])


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.LBFGS])
def test_an_optimiser_is_restored(kind: Any) -> None:
    weight = torch.nn.Parameter(torch.arange(4.0))
    optimizer = kind([weight], lr=0.25)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        made = weight.square().sum()
        made.backward()
        return made

    def step() -> torch.Tensor:
        optimizer.step(loss)
        optimizer.param_groups[0]["lr"] /= 2
        return weight.detach().clone()

    for _ in range(2):  # without a state, and with one
        kept = Subject.of(step, ()).kept()
        before = str(optimizer.state_dict())
        first = step()
        assert str(optimizer.state_dict()) != before
        kept.restore()
        assert str(optimizer.state_dict()) == before
        assert torch.equal(step(), first)
