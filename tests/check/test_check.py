"""`amp_fuzz.check` on any callable: what it keeps, what it refuses, what it prints."""

from __future__ import annotations

import copy
import inspect
import random
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import amp_fuzz
from amp_fuzz.backends import BackendError
from amp_fuzz.backends.harness import quiet
from amp_fuzz.backends.reference import within
from amp_fuzz.backends.registry import MissingBackend, choose_backends
from amp_fuzz.cases.case import Plan
from amp_fuzz.interfaces import check
from amp_fuzz.interfaces.check import custom_ops, judging
from amp_fuzz.interfaces.check.adapters import CheckedReference
from amp_fuzz.interfaces.check.call import Names, call
from amp_fuzz.interfaces.check.extract import cut
from amp_fuzz.interfaces.check.subject import Subject
from amp_fuzz.interfaces.check.trace import function_calls, names_called
from amp_fuzz.upstream.explain import judge_of
from tests.check.faults import (
    Broken,
    BrokenCompiler,
    BrokenFake,
    BrokenUnderAutocast,
    kernels,
)
from tests.helpers import eager, one_line

EAGER = ["eager-cpu"]
CHEAP = ["eager-cpu", "fake-cuda"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what a check stores out of the repository."""
    monkeypatch.chdir(tmp_path)


class Counting(nn.Module):
    """Changes all that a call may change: buffers, attributes, lists, weights, gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.calls = 0
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        with torch.no_grad():
            self.linear.weight.mul_(0.5)
        noise = random.random() + float(np.random.rand())  # noqa: NPY002
        return self.drop(self.norm(self.linear(x))) * noise


def test_everything_is_as_it_was() -> None:
    model = Counting()
    model.norm.eval()
    x = torch.randn(6, 4, requires_grad=True)
    model(x).sum().backward()
    assert model.linear.weight.grad is not None
    before = {k: v.clone() for k, v in model.state_dict().items()}
    grads = {n: (p.grad, p.grad.clone()) for n, p in model.named_parameters() if p.grad is not None}
    generators = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index,union-attr]  # noqa: NPY002
    result = amp_fuzz.check(model, x, backends=[*CHEAP, "compile[aot_eager]"])
    assert result, str(result)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    for name, parameter in model.named_parameters():
        if name in grads:
            assert parameter.grad is grads[name][0]
            assert torch.equal(parameter.grad, grads[name][1])
    assert (model.calls, model.seen) == (1, [1])
    assert (model.training, model.norm.training) == (True, False)
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index,union-attr]  # noqa: NPY002
    assert torch.equal(generators[0], after[0])
    assert generators[1:] == after[1:]


@pytest.mark.thorough
def test_dropout_draws_the_same_on_both_sides() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))
    result = amp_fuzz.check(model, torch.randn(5, 8), backends=["eager-cpu", "compile[inductor]"])
    assert result, str(result)


def test_a_function_is_checked_with_what_it_closes_over() -> None:
    model, scale = nn.Linear(4, 3), torch.ones(3, requires_grad=True)

    def loss(x: Tensor, *, weight: float) -> dict[str, Any]:
        return {"loss": (model(x) * scale).square().mean() * weight, "n": len(x)}

    result = amp_fuzz.check(loss, torch.randn(2, 4), kwargs={"weight": 2.0}, backends=CHEAP[:1])
    assert result, str(result)
    (run,) = result.runs
    assert (run.values, run.gradients) == (2, 3)  # the number too; weight, bias and scale


@pytest.mark.thorough
def test_contexts_of_its_own_are_the_references() -> None:
    """Otherwise the reference would run without autocast, and every result would differ."""
    model = nn.Linear(4, 4)

    def step(x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, dtype=torch.float16):
            y = model(x)
            with torch.autocast(x.device.type, enabled=False):
                y = model(y.float()).relu()
        return torch.utils.checkpoint.checkpoint(model, y, use_reentrant=False)

    result = amp_fuzz.check(step, torch.randn(2, 4), backends=CHEAP, autocast=None)
    assert result, str(result)
    wrong = Broken(patches=kernels({"aten.relu.default": lambda op, x: op(x) + 1}))
    assert not amp_fuzz.check(step, torch.randn(2, 4), backends=[wrong], autocast=None)


def test_a_step_with_its_own_backward_and_optimiser_is_compared() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    before = model.weight.detach().clone()
    result = amp_fuzz.check(step, torch.randn(3, 4), backends=EAGER, autocast=None, backward=False)
    assert result, str(result)
    assert "2 gradients, 2 tensors written" in str(result)
    assert torch.equal(before, model.weight)


_CUSTOM_OPS = """
import amp_fuzz, torch

@torch.library.custom_op("mylib::wide", mutates_args=())
def wide(x: torch.Tensor) -> torch.Tensor:
    return x * 2

@torch.library.custom_op("mylib::plain", mutates_args=())
def plain(x: torch.Tensor) -> torch.Tensor:
    return x @ x

wide.register_fake(torch.empty_like)
plain.register_fake(torch.empty_like)
wide.register_autocast("cpu", torch.float32)

def both(x):
    return wide(x @ x), plain(x)

result = amp_fuzz.check(both, torch.randn(3, 3), backends=["eager-cpu", "compile[aot_eager]"])
print(result)
assert result
assert [run.status for run in result.runs] == ["agreed", "known"]
assert result.known[0].known == "custom-op-body-off"

@torch.library.custom_op("mylib::matmul", mutates_args=())
def matmul(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ w

def readme():
    x, w = torch.ones(2, 2), torch.ones(2, 2, requires_grad=True)
    with torch.autocast("cpu"):
        matmul(x, w)
        return (x @ w).requires_grad

result = amp_fuzz.check(readme, backends="eager-cpu", autocast=None)
print(result)
assert [run.status for run in result.runs] == ["known"]
assert result.known[0].known == "custom-op-weight-cache"
assert result.known[0].where == "output"
"""


@pytest.mark.thorough
def test_custom_ops_are_cast_as_they_asked() -> None:
    """In a process of its own: what an op registers stays with the dispatcher."""
    done = subprocess.run(
        [sys.executable, "-c", _CUSTOM_OPS], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("kept", "found"),
    [
        ({"_autocast_dtype": {"cpu": torch.float32}}, {"cpu": torch.float32}),
        ({"_autocast_cpu_dtype": torch.float32}, {"cpu": torch.float32, "cuda": None}),
    ],
    ids=["since 2.12", "until 2.11"],
)
def test_what_an_op_asked_is_read_from_every_torch(kept: dict[str, Any], found: Any) -> None:
    assert custom_ops._casts(SimpleNamespace(**kept)) == found


# -- what does not pass ---------------------------------------------------------------------------


def test_a_callable_that_compares_nothing_does_not_pass() -> None:
    result = amp_fuzz.check(lambda: None, backends=EAGER)
    assert not result
    assert result.verdict == "unjudged"
    assert "compared nothing: it returned no tensor" in str(result)
    with pytest.raises(amp_fuzz.CheckFailed, match="returned no tensor"):
        result.raise_if_failed()


def test_a_callable_that_raises_does_not_pass() -> None:
    def broken(x: Tensor) -> Tensor:
        return torch.nn.functional.binary_cross_entropy(x.sigmoid(), x)

    result = amp_fuzz.check(broken, torch.rand(3), backends=CHEAP)
    assert not result
    assert [run.status for run in result.runs] == ["agreed", "fails"]  # cuda alone bans it
    assert "is unsafe to autocast" in result.runs[1].detail
    assert result.verdict == "raises"
    with pytest.raises(amp_fuzz.CheckFailed, match="RAISES UNDER AUTOCAST"):
        result.raise_if_failed()


@pytest.mark.thorough
def test_a_backend_that_cannot_call_it_is_shown_and_does_not_count() -> None:
    def looks(x: Tensor) -> Tensor:
        return x * 2 if x.sum().item() > 0 else x

    result = amp_fuzz.check(looks, torch.ones(3), backends=[*CHEAP, "trace"])
    assert result, str(result)
    skipped = {run.backend: run.detail for run in result.skipped}
    assert "raises on tensors without values" in skipped["fake-cuda"]
    assert "TorchScript" in skipped["trace"]
    assert not amp_fuzz.check(looks, torch.ones(3), backends=["fake-cuda"])


def _on_backend() -> bool:
    frame, names = sys._getframe(), set()
    while frame.f_back is not None:
        frame = frame.f_back
        names.add(frame.f_code.co_name)
    return "_observe" in names


def _raises_otherwise(x: Tensor) -> Tensor:
    raise KeyError("values") if _on_backend() else ValueError("no values")


def _raises_on_one_side(x: Tensor) -> Tensor:
    if torch.is_autocast_enabled("cuda") and _on_backend():
        raise KeyError("values")
    return x.relu()


def _raises_otherwise_under_autocast(x: Tensor) -> Tensor:
    if torch.is_autocast_enabled("cuda"):
        raise KeyError("values") if _on_backend() else ValueError("no values")
    return x.relu()


@pytest.mark.thorough
def test_two_errors_at_one_line_without_values_cannot_be_judged() -> None:
    result = amp_fuzz.check(_raises_otherwise, torch.randn(3), backends=CHEAP)
    assert [run.status for run in result.runs] == ["raised", "skipped"]
    assert result.runs[1].detail.startswith("it raises on tensors without values: KeyError:")
    assert result.verdict == "unjudged"


@pytest.mark.thorough
@pytest.mark.parametrize("function", [_raises_on_one_side, _raises_otherwise_under_autocast])
def test_an_error_on_one_side_or_only_under_autocast_diverges_without_values(
    function: Callable[[Tensor], Tensor],
) -> None:
    (run,) = amp_fuzz.check(function, torch.randn(3), backends="fake-cuda").runs
    assert (run.status, run.detail) == ("diverged", "raise")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("raising", "said"),
    [
        ({1}, "it raised in one call and not in the next: ValueError: now (test_check.py:"),
        ({2, 3, 4}, "it raised, but not in the call before: ValueError: now (test_check.py:"),
    ],
)
def test_a_callable_that_raises_at_some_calls_is_said_to_do_so(
    raising: set[int], said: str
) -> None:
    """The first call is of the reference, and those that are compared come after it."""
    calls = [0]

    def sometimes(x: Tensor) -> Tensor:
        calls[0] += 1
        if calls[0] in raising:
            raise ValueError("now")
        return x.relu()

    result = amp_fuzz.check(sometimes, torch.randn(3), backends=EAGER)
    (run,) = result.runs
    assert (run.status, run.notes) == ("nothing", ())
    assert run.detail.startswith(said)
    assert "the same in every call" in result.advice


def test_a_callable_that_changes_is_reported() -> None:
    calls = [0]

    def restless(x: Tensor) -> Tensor:
        calls[0] += 1
        return x * calls[0]

    result = amp_fuzz.check(restless, torch.ones(3), backends=EAGER)
    (found,) = result.divergences
    assert found.kind == "nondeterminism"
    assert found.module == found.op == ""


def test_only_a_divergence_asks_which_ops_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def names(*of: Any) -> set[str]:
        asked.append(of)
        return names_called(*of)

    monkeypatch.setattr(judging, "names_called", names)
    for backend in ("eager-cpu", "fake-cuda"):
        assert amp_fuzz.check(torch.tanh, torch.randn(3), backends=backend, isolate=False).ok
    assert not asked
    twice = kernels({"aten.tanh.default": lambda op, x: op(x) * 2})
    wrong = BrokenUnderAutocast(patches=twice)
    assert not amp_fuzz.check(torch.tanh, torch.randn(3), backends=wrong, isolate=False).ok
    assert asked


def test_a_known_divergence_passes_and_is_shown() -> None:
    w = torch.randn(3, 3, requires_grad=True)

    def nested(x: Tensor) -> Tensor:
        y = x @ w
        with torch.autocast("cpu", torch.float16):
            return x @ w + y.float().sum()

    result = amp_fuzz.check(nested, torch.randn(2, 3), backends=EAGER)
    assert result, str(result)
    assert result.runs[0].status == "known"
    assert "known as  cache-ignores-dtype" in str(result)


def test_a_divergence_in_a_thread_of_the_callables_own_is_known_as_in_one() -> None:
    """In a pool too, whose thread was there before the run."""
    w = torch.randn(3, 3, requires_grad=True)

    def other() -> Tensor:
        with torch.autocast("cpu", torch.float16):
            return w @ w

    def started() -> tuple[Tensor, Tensor]:
        found: list[Tensor] = []
        thread = threading.Thread(target=lambda: found.append(other()))
        y = w @ w
        thread.start()
        thread.join()
        return y, found[0]

    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()

        def submitted() -> tuple[Tensor, Tensor]:
            return w @ w, pool.submit(other).result()

        for function in (started, submitted):
            result = amp_fuzz.check(function, backends=EAGER, isolate=False)
            assert result.runs[0].status == "known", str(result)
            assert "known as  cache-ignores-dtype" in str(result)


class _Noted(TorchDispatchMode):
    """Notes the ops that are called."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("pooled", [True, False])
def test_what_is_around_a_run_is_around_each_of_its_threads_once(pooled: bool) -> None:
    """Shadows and wrong kernels are modes, which are thread-local."""

    def apart(x: Tensor) -> None:
        if pooled:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(torch.tanh, x).result()
        else:
            thread = threading.Thread(target=torch.tanh, args=(x,))
            thread.start()
            thread.join()

    found: list[str] = []
    runtime = within(eager().reference().runtime, lambda: _Noted(found))
    seen = call(Subject(apart, (torch.ones(2),), {}), runtime, Plan(), Names(), redirect=True)
    assert seen.raised is None
    assert found.count("aten.tanh.default") == 1
    assert threading.Thread.start.__module__ == "threading"  # put back
    assert ThreadPoolExecutor.submit.__module__ == "concurrent.futures.thread"


_TANH = """
[[known]]
id = "tanh-doubles"
what = "tanh is twice as large"
why = "seeded"
kinds = ["bitwise"]
ops = ["tanh"]
"""


@pytest.mark.thorough
@pytest.mark.parametrize("beside", [True, False])
def test_a_known_bug_of_an_op_hides_nothing_else(tmp_path: Path, beside: bool) -> None:
    (tmp_path / "known.toml").write_text(_TANH)
    wrong = {"aten.tanh.default": lambda op, x: op(x) * 2}
    if beside:
        wrong["aten.sigmoid.default"] = lambda op, x: op(x) / 2
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Sigmoid())
    (found,) = amp_fuzz.check(
        model,
        torch.ones(2, 3),
        backends=[BrokenUnderAutocast(patches=kernels(wrong))],
        known=[tmp_path / "known.toml"],
    ).divergences
    if beside:
        assert (found.module, found.op, found.notes) == ("3", "sigmoid", ())
    else:  # the whole is not shown to be that
        assert (found.module, found.op) == ("1", "tanh")
        assert "tanh-doubles explains the op alone, but not the whole" in found.notes[0]


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


@dataclass
class Output:
    """What some libraries return, and pytrees do not know."""

    logits: Tensor
    extra: Tensor | None = None


def test_the_text_of_a_divergence() -> None:
    torch.manual_seed(1)
    model = Tiny()
    wrong = BrokenUnderAutocast(patches=kernels({"aten.tanh.default": lambda op, x: op(x) * 2}))
    result = amp_fuzz.check(
        lambda x: Output(model(x)), torch.ones(1, 2), backends=["fake-cuda", wrong]
    )
    (found,) = result.divergences
    text = str(result).replace(found.expected, "EXPECTED").replace(found.observed, "OBSERVED")
    assert found.case is not None
    text = text.replace(found.case.id, "ID")
    lines = text.splitlines()
    lines[0] = lines[0].replace(result.name, "NAME")
    assert lines == [
        "amp_fuzz.check of NAME, seed 0: DIVERGES",
        "  fake-cuda, bfloat16  agrees: 1 value, 2 results inside, dtypes and shapes",
        "  eager-cpu, bfloat16  DIVERGES: bitwise",
        "  to do     Run the commands after `next`: they shrink the case and write a script for a",
        "            bug report.",
        "",
        "eager-cpu, bfloat16: bitwise at output.logits",
        "  expected  EXPECTED",
        "  observed  OBSERVED",
        "  also      model.inner.0.weight.grad, model.inner.0.bias.grad",
        "  module    model.inner.1 (Tanh)",
        "  op        tanh of bfloat16",
        "  case      .amp-fuzz/findings/ID.json",
        "  next      amp-fuzz minimize ID",
        "  next      amp-fuzz repro ID > repro.py",
    ]
    assert repr(result).endswith("diverges: 1 agreed, 1 diverged>")


def _refuse(op: Any, x: Tensor) -> Tensor:
    raise RuntimeError("no kernel today")


def test_what_shows_without_autocast_too_is_not_autocasts() -> None:
    """It is told with its place, and fails no check."""
    twice = kernels({"aten.tanh.default": lambda op, x: op(x) * 2})
    result = amp_fuzz.check(Tiny(), torch.ones(1, 2), backends=[Broken(patches=twice)])
    assert (result.verdict, result.divergences) == ("agrees", ())
    (found,) = result.own
    assert (found.module, found.op, found.known) == ("inner.1", "tanh", "backend")
    line = "  eager-cpu, bfloat16  differs without autocast too: not autocast's (bitwise)\n"
    assert line in str(result)
    only = BrokenUnderAutocast(patches=twice)
    result = amp_fuzz.check(Tiny(), torch.ones(1, 2), backends=[only])
    assert (result.verdict, result.own) == ("diverges", ())


def test_a_backend_that_raises_without_autocast_too_cannot_call_it() -> None:
    wrong = Broken(patches=kernels({"aten.tanh.default": _refuse}))
    result = amp_fuzz.check(Tiny(), torch.ones(1, 2), backends=[wrong])
    (run,) = result.runs
    assert (result.verdict, run.status) == ("unjudged", "skipped")
    assert run.detail == "it raises without autocast too: no kernel today"


def test_a_backend_that_differs_without_autocast_too_before_both_sides_raise_is_no_pass() -> None:
    class Raises(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            raise ValueError("no gradient")

    def function(x: Tensor) -> Tensor:
        return Raises.apply(torch.tanh(x))

    wrong = Broken(patches=kernels({"aten.tanh.default": lambda op, x: op(x) * 2}))
    x = torch.ones(2, requires_grad=True)
    (run,) = amp_fuzz.check(function, x, backends=[wrong]).runs
    assert run.status == "raised"


def test_autocast_inside_the_callable_is_not_taken_for_none() -> None:
    """Without the contexts around it, it is still under autocast: nothing is shown."""

    def step(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.tanh(x @ x)

    twice = kernels({"aten.tanh.default": lambda op, x: op(x) * 2})
    result = amp_fuzz.check(step, torch.ones(2, 2), backends=[Broken(patches=twice)])
    assert result.verdict == "diverges"


def test_an_op_that_raises_is_named_with_a_case() -> None:
    wrong = BrokenUnderAutocast(patches=kernels({"aten.tanh.default": _refuse}))
    (found,) = amp_fuzz.check(Tiny(), torch.ones(1, 2), backends=[wrong]).divergences
    assert (found.kind, found.module, found.op) == ("raise", "inner.1", "tanh")
    assert found.case is not None


@pytest.mark.thorough
def test_an_op_that_raises_in_the_reference_alone_is_named_with_a_case() -> None:
    """The reference cannot return what the op makes, and the case has to hold the call."""
    norm = nn.LayerNorm(8).bfloat16()
    backend = "compile[aot_eager_decomp_partition]"
    with mock.patch("amp_fuzz.interfaces.check.api.known_of", return_value=()):
        result = amp_fuzz.check(norm, torch.ones(1, 8), backends=[backend])
    (found,) = result.own
    assert (found.kind, found.op) == ("raise", "layer_norm")
    assert found.case is not None


@pytest.mark.thorough
def test_an_op_outside_the_catalogue_is_named_without_a_case() -> None:
    def odd(x: Tensor) -> Tensor:
        return torch.special.bessel_j0(x)

    wrong = BrokenUnderAutocast(
        patches=kernels({"aten.special_bessel_j0.default": lambda op, x: op(x) + 1})
    )
    (found,) = amp_fuzz.check(odd, torch.ones(2), backends=[wrong]).divergences
    assert (found.op, found.dtypes) == ("torch.special.bessel_j0", "float32")
    assert found.case is None
    assert "torch.special.bessel_j0 is not in the catalogue" in str(found)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"backends": "eager-gpu"}, BackendError, "did you mean 'eager-cpu'?"),
        ({"backends": ["eager-xpu"]}, MissingBackend, "no xpu device"),
        ({"backends": []}, BackendError, "none is ready here"),
        ({"autocast": torch.int8}, amp_fuzz.CheckError, "is not a floating dtype"),
        ({"autocast": []}, amp_fuzz.CheckError, "nothing to check"),
        ({"autocast": {"device_type": "cpu"}}, amp_fuzz.CheckError, "takes dtype, enabled"),
    ],
)
def test_bad_arguments_say_what_to_write(
    options: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error) as caught:
        amp_fuzz.check(nn.Linear(2, 2), torch.ones(1, 2), **options)
    assert said in str(caught.value)
    assert one_line(caught.value)


def test_an_invalid_argument_says_what_to_pass() -> None:
    x = torch.ones(1, 2)
    with pytest.raises(amp_fuzz.CheckError, match="already compiled"):
        amp_fuzz.check(torch.compile(nn.Linear(2, 2), backend="eager"), x)
    with pytest.raises(amp_fuzz.CheckError, match="call the lazy"):
        amp_fuzz.check(nn.LazyLinear(2), x)
    with pytest.raises(amp_fuzz.CheckError, match="not callable"):
        amp_fuzz.check(3, x)  # type: ignore[arg-type]
    with torch.autocast("cpu"), pytest.raises(amp_fuzz.CheckError, match="autocast is on"):
        amp_fuzz.check(nn.Linear(2, 2), x)
    with torch.no_grad():
        with pytest.raises(amp_fuzz.CheckError, match="backward=False"):
            amp_fuzz.check(nn.Linear(2, 2), x)
        assert amp_fuzz.check(nn.Linear(2, 2), x, backends=EAGER, backward=False)


def test_the_public_name_is_the_function() -> None:
    assert amp_fuzz.check is check.check
    assert callable(amp_fuzz.check)


def _lower_inside(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(x, torch.ones(2, 2, device=x.device)).relu().float()


def test_a_wrong_dtype_inside_is_seen_on_a_fake_device() -> None:
    """What comes out is float32 all the same."""
    honest = amp_fuzz.check(_lower_inside, torch.ones(3, 2), backends="fake-cuda")
    assert honest.ok
    assert "4 results inside" in honest.runs[0].detail
    wrong = BrokenFake(op="linear")
    (found,) = amp_fuzz.check(_lower_inside, torch.ones(3, 2), backends=wrong).divergences
    assert (found.kind, found.where) == ("dtype", "linear")
    assert (found.expected, found.observed) == ("bfloat16", "float32")
    assert found.also == ("relu",)
    assert found.op == "linear"
    assert found.case is not None


def test_inner_calls_of_only_one_side_are_not_compared() -> None:
    def asks(x: torch.Tensor) -> torch.Tensor:
        if _under_reference():
            x = x + 1
        return x * 2

    assert amp_fuzz.check(asks, torch.ones(3, 2), backends="fake-cuda")


def test_results_inside_are_compared_until_one_side_calls_something_else() -> None:
    """Behind that, `mul` is another call on each side, of another dtype."""
    calls = []

    def counts(x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(x)
        calls.append(x)
        if len(calls) % 2:
            x * 3
        return (x.bfloat16() * 2).float()

    result = amp_fuzz.check(counts, torch.ones(3, 2), backends="fake-cuda")
    assert "1 value, 1 result inside" in str(result), result
    assert result.ok


@pytest.mark.thorough
def test_a_copy_of_a_module_that_the_callable_makes_is_called_on_a_fake_device() -> None:
    class Copies(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.act = nn.Linear(2, 2), nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            again = copy.copy(self.linear)
            return self.linear(copy.deepcopy(self.act)(again(x)))

    result = amp_fuzz.check(Copies(), torch.ones(3, 2), backends=CHEAP)
    assert [run.status for run in result.runs] == ["agreed", "agreed"], result
    wrong = BrokenFake(op="relu")
    (found,) = amp_fuzz.check(Copies(), torch.ones(3, 2), backends=wrong).divergences
    assert found.where == "relu"


def test_naming_a_value_takes_no_longer_the_more_there_are() -> None:
    steps = [_steps_of_naming(count) for count in (200, 400)]
    assert steps[1] < 2.1 * steps[0]


def _steps_of_naming(count: int) -> int:
    """Return how many lines of Python run, comprehensions included, to name so many values."""
    names, seen = Names(), 0

    def step(frame: object, event: str, argument: object) -> Any:
        nonlocal seen
        seen += 1
        return step

    sys.settrace(step)
    try:
        labels = [names.label("i", f"relu #{i}") for i in range(count)]
    finally:
        sys.settrace(None)
    assert labels == [f"i{i}" for i in range(count)]
    return seen


def _under_reference() -> bool:
    frame: Any = sys._getframe()
    while frame is not None:
        if isinstance(frame.f_locals.get("self"), CheckedReference):
            return True
        frame = frame.f_back
    return False


@pytest.mark.thorough
@pytest.mark.parametrize("inplace", [False, True])
def test_a_function_with_a_plainer_name_is_named_by_it_with_a_case(inplace: bool) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(inplace=inplace))
    twice = kernels({"aten.relu.default": lambda op, x: op(x) * 2})
    wrong = BrokenCompiler("aot_eager", patches=twice)
    torch.nn.init.eye_(model[0].weight)  # so that some values are positive
    torch.nn.init.zeros_(model[0].bias)
    (found,) = amp_fuzz.check(model, torch.ones(8, 2), backends=wrong).own
    assert (found.module, found.op) == ("1", "relu")
    assert found.case is not None


@pytest.mark.thorough
def test_a_dropout_that_was_cut_out_draws_the_same_under_inductor() -> None:
    x = torch.randn(4, 8)
    subject = Subject.of(nn.Dropout(0.5), (x,), None, 0)
    (backend,) = choose_backends(["compile[inductor]"])
    calls = function_calls(subject, backend.reference(), Plan())
    case = cut(calls, (), backward=False, values=True)
    with quiet():
        seen = judge_of(backend).judge(case)
    assert seen.outcome == "agreed", seen.divergence


class _NamesCuda(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                x = self.linear(x)
        return x


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch warns of a missing device")
@pytest.mark.parametrize("isolate", [True, False])
def test_a_device_that_is_missing_is_warned_of_once_at_the_line_that_names_it(
    isolate: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with warnings.catch_warnings():  # pytest would keep those of this process
        warnings.showwarning = lambda *a, **k: sys.stderr.write(warnings.formatwarning(*a[:4], ""))
        amp_fuzz.check(_NamesCuda(), torch.ones(2, 4), backends=EAGER, isolate=isolate)
        amp_fuzz.check(_NamesCuda(), torch.ones(2, 4), backends=EAGER, isolate=isolate)
    text = capsys.readouterr().err
    assert text.count("Disabling autocast") == 2  # one for each check
    line = inspect.getsourcelines(_NamesCuda.forward)[1] + 2
    assert text.count(f"{Path(__file__).name}:{line}: UserWarning") == 2


def test_a_tensor_on_the_meta_device_is_an_error_of_one_line() -> None:
    module = nn.Sequential(nn.Linear(4, 4, device="meta"))
    with pytest.raises(amp_fuzz.CheckError, match=r"0\.weight is on the meta device.*to_empty"):
        amp_fuzz.check(module, torch.ones(2, 4))
    with pytest.raises(amp_fuzz.CheckError, match=r"input\[0\] is on the meta device"):
        amp_fuzz.check(torch.relu, torch.ones(2, device="meta"))


def test_a_dtype_that_autocast_refuses_is_advised_against_not_the_backend() -> None:
    result = amp_fuzz.check(torch.relu, torch.ones(2), autocast=torch.float32, backends=EAGER)
    assert result.verdict == "unjudged"
    assert "autocast=torch.bfloat16 or torch.float16" in result.advice
    assert "eager-cpu" not in result.advice


def test_the_advice_names_no_backend_that_was_skipped() -> None:
    def mixed(x: Tensor) -> Tensor:
        return x * 2 if x.sum().item() > 0 else x

    result = amp_fuzz.check(mixed, torch.ones(3), backends=["fake-cuda"])
    assert "such as eager-cpu" in result.advice
    runs = (*result.runs, replace(result.runs[0], backend="eager-cpu", advice=""))
    skipped = replace(result, runs=runs).advice
    assert "Choose a backend" in skipped
    assert "eager-cpu" not in skipped


def test_an_unknown_backend_is_corrected_to_one_that_is_ready() -> None:
    with pytest.raises(BackendError, match="'eager': did you mean 'eager-cpu'"):
        choose_backends(["eager"])
