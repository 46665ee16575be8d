"""What must not pass: too little compared, outputs of another structure, state left changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp_fuzz
from amp_fuzz.backends import backends
from amp_fuzz.backends.eager import EagerBackend
from amp_fuzz.backends.harness import Observation
from amp_fuzz.cases.case import Case
from tests.helpers import WrongKernel, leading, needs_torch

EAGER = ["eager-cpu"]
AOT = ["compile[aot_eager]"]
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what a check stores out of the repository."""
    monkeypatch.chdir(tmp_path)


class Opaque:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def test_gradients_that_neither_side_has_were_not_compared() -> None:
    linear = nn.Linear(8, 8)
    linear.register_buffer("undefined", torch.tensor(float("nan")))
    result = amp_fuzz.check(lambda x: Opaque(linear(x)), X, backends=EAGER)
    assert not result
    assert result.runs[0].status == "nothing"
    assert (result.runs[0].values, result.runs[0].gradients) == (0, 0)


def test_values_that_say_nothing_do_not_pass() -> None:
    """NaN equals NaN, and an empty tensor any other: such values hide every bug."""
    for function in (lambda x: x @ x.T * float("nan"), lambda x: x[:0] @ x.T):
        result = amp_fuzz.check(function, X, backends=[*EAGER, *AOT])
        assert [run.status for run in result.runs] == ["nothing", "nothing"]
        assert "empty, NaN or infinite" in str(result)
    result = amp_fuzz.check(lambda x: (x @ x.T, x / 0), X, backends=EAGER)
    assert result.runs[0].detail.endswith("1 empty, NaN or infinite throughout")


def _fewer(y: Tensor, compiled: bool) -> Any:
    return (y,) if compiled else (y, y)


def _more(y: Tensor, compiled: bool) -> Any:
    return (y, y) if compiled else (y,)


def _none(y: Tensor, compiled: bool) -> Any:
    return None if compiled else y


def _other_names(y: Tensor, compiled: bool) -> Any:
    return {"other": y} if compiled else {"one": y}


@pytest.mark.parametrize("output", leading([_fewer, _more, _none, _other_names]))
def test_outputs_of_another_structure_diverge(output: Callable[[Tensor, bool], Any]) -> None:
    def function(x: Tensor) -> Any:
        return output(x @ x.T, torch.compiler.is_compiling())

    result = amp_fuzz.check(function, X, backends=AOT)
    (found,) = result.divergences
    assert found.kind == "shape"
    assert "None" in (found.expected, found.observed)


@pytest.mark.thorough
def test_outputs_that_come_in_another_order_are_the_same() -> None:
    def function(x: Tensor) -> dict[str, Tensor]:
        made = {"a": x @ x.T, "b": x * 2}
        return dict(reversed(made.items())) if torch.compiler.is_compiling() else made

    result = amp_fuzz.check(function, X, backends=AOT)
    assert result, str(result)


def test_a_number_of_outputs_that_changes_is_nondeterminism() -> None:
    calls = [0]

    def function(x: Tensor) -> Any:
        calls[0] += 1
        return (x @ x.T,) * (1 + calls[0] % 2)

    (found,) = amp_fuzz.check(function, X, backends=EAGER).divergences
    assert found.kind == "nondeterminism"


def _enters(x: Tensor) -> Tensor:
    torch.autocast(x.device.type, torch.bfloat16).__enter__()
    return x @ x.T


def _switches(x: Tensor) -> Tensor:
    torch.set_autocast_enabled("cpu", True)
    return x @ x.T


def _stops_gradients(x: Tensor) -> Tensor:
    torch._C._set_grad_enabled(False)
    return x @ x.T


ASKED = ("is_autocast_enabled", "get_autocast_dtype", "is_autocast_cpu_enabled")


@pytest.mark.parametrize("function", leading([_enters, _switches, _stops_gradients]))
@pytest.mark.parametrize("autocast", [torch.bfloat16, None])
def test_a_callable_that_leaves_state_changed_does_not_pass(
    function: Callable[[Tensor], Tensor], autocast: Any
) -> None:
    backends = [*EAGER, "fake-cuda", *AOT]
    torchs = [getattr(torch, name) for name in ASKED]
    result = amp_fuzz.check(function, X, backends=backends, autocast=autocast)
    assert not result
    statuses = {run.status for run in result.runs}
    # Around it, torch.autocast itself sets its own switch back.
    expected = {"agreed", "leaked"} if function is _switches and autocast else {"leaked"}
    assert statuses <= expected, str(result)
    assert result.verdict == "unjudged"
    assert "leaves state changed" in str(result)
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_grad_enabled()
    assert [getattr(torch, name) for name in ASKED] == torchs, "the reference still answers"
    assert amp_fuzz.check(nn.Linear(8, 8), X, backends=EAGER)


@pytest.mark.thorough
def test_a_failed_export_is_no_divergence() -> None:
    def looks(x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x

    (run,) = amp_fuzz.check(looks, X, backends=["export"]).runs
    assert run.status == "skipped"
    assert "without autocast too" in run.detail


@pytest.mark.thorough
def test_code_left_to_eager_is_reported_for_this_call() -> None:
    def breaks(x: Tensor) -> Tensor:
        y = x @ x.T
        torch._dynamo.graph_break()
        return y * 2

    (broken,) = amp_fuzz.check(breaks, X, backends=AOT).runs
    assert "2 graphs; the rest ran as eager: " in broken.detail
    (whole,) = amp_fuzz.check(lambda x: x @ x.T, X, backends=AOT).runs
    assert whole.detail.endswith("1 graph")


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["script", "privateuse1", "torchax", "jax", "jax[cpu]"])
def test_a_backend_that_would_not_be_run_is_no_pass(name: str) -> None:
    if backends()[name].availability().status != "ready":
        pytest.skip(f"{name} is not here")
    result = amp_fuzz.check(nn.Linear(8, 8), X, backends=[name])
    assert [run.status for run in result.runs] == ["skipped"]
    assert not result


def test_nor_is_a_backend_of_ones_own_that_runs_cases_in_another_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = WrongKernel(EagerBackend("cpu"), "mm")

    class Own(EagerBackend):
        name = "own-cpu"

        def run(self, cases: Sequence[Case]) -> list[Observation]:
            return list(made.run(cases))

    class Same(EagerBackend):
        name = "same-cpu"

    known = {b.name: b for b in (Own("cpu"), Same("cpu"))}
    monkeypatch.setattr("amp_fuzz.backends.registry.backends", lambda: known)
    own, same = amp_fuzz.check(nn.Linear(8, 8), X, backends=["own-cpu", "same-cpu"]).runs
    assert (own.status, own.detail.partition(",")[0]) == (
        "skipped",
        "it runs cases in its own way and cannot call a callable",
    )
    assert same.status == "agreed"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"seed": "a"}, "a whole number"),
        ({"backward": "no"}, "True or False"),
        ({"kwargs": 3}, "a mapping"),
        ({"autocast": {"enabled": "no"}}, "True or False"),
    ],
)
def test_bad_arguments_say_what_to_use(options: dict[str, Any], said: str) -> None:
    with pytest.raises(amp_fuzz.CheckError, match=said):
        amp_fuzz.check(nn.Linear(8, 8), X, **options)


# -- what was a false alarm -----------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("autocast", [None, {}, {"enabled": False}], ids=["none", "on", "off"])
def test_a_context_without_a_dtype_takes_the_one_that_was_set(autocast: Any) -> None:
    """`torch.set_autocast_dtype` is for one thread: compilers run in another."""
    linear = nn.Linear(8, 8)

    def function(x: Tensor) -> Tensor:
        with torch.autocast(x.device.type):
            return linear(x)

    before = {device: torch.get_autocast_dtype(device) for device in ("cpu", "cuda")}
    try:
        torch.set_autocast_dtype("cpu", torch.float16)
        torch.set_autocast_dtype("cuda", torch.bfloat16)
        backends = [*EAGER, "fake-cuda", "compile[eager]", *AOT]
        result = amp_fuzz.check(function, X, backends=backends, autocast=autocast)
        assert [run.status for run in result.runs] == ["agreed"] * 4, str(result)
    finally:
        for device, dtype in before.items():
            torch.set_autocast_dtype(device, dtype)


@pytest.mark.thorough
def test_an_exported_function_has_no_gradients_of_what_it_closes_over() -> None:
    needs_torch(">=2.9")  # before, torch.export raises for it
    linear = nn.Linear(8, 8)
    (run,) = amp_fuzz.check(lambda x: linear(x), X, backends=["export"]).runs
    assert (run.status, run.gradients) == ("agreed", 0)
    (run,) = amp_fuzz.check(linear, X, backends=["export"]).runs
    assert (run.status, run.gradients) == ("agreed", 2)


class MixedNorm(nn.Module):
    """layer_norm of float32 with weights of bfloat16, which eager refuses and a compiler takes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8).bfloat16()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x))


@pytest.mark.thorough
def test_an_error_of_the_reference_alone_without_autocast_too_is_the_backends_own() -> None:
    result = amp_fuzz.check(MixedNorm(), X, backends=["compile[aot_eager_decomp_partition]"])
    (found,) = result.own
    assert (found.kind, found.known) == ("raise", "backend")
    assert result.ok, str(result)


@pytest.mark.slow
def test_running_statistics_of_a_rounded_convolution_are_within_their_rounding() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
    x = torch.randn(2, 3, 8, 8)
    result = amp_fuzz.check(model, x, backends=["compile[inductor]"], autocast=torch.float16)
    assert [run.status for run in result.runs] == ["agreed"], str(result)
