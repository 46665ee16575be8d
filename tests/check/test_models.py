"""`amp_fuzz.check` on real models: honest ones pass, and in broken ones the place is named."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import amp_fuzz
from amp_fuzz.backends import Backend
from amp_fuzz.backends.fake import FakeBackend
from amp_fuzz.backends.harness import quiet
from amp_fuzz.upstream.explain import judge_of
from amp_fuzz.versions import holds
from tests.check.faults import (
    COMPILED,
    FAKED,
    FAULTS,
    LOWERED,
    Broken,
    BrokenCompiler,
    BrokenFake,
    kernels,
    lowering,
)
from tests.check.models import MODELS, training_step
from tests.faults.numeric import NUMERIC
from tests.faults.wrapper import POLICIES, Wrapper, installed
from tests.helpers import brief, lstm_of_bfloat16

HALVES = [torch.bfloat16, torch.float16]
DTYPES = ["bfloat16", "float16"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what a check stores out of the repository."""
    monkeypatch.chdir(tmp_path)


def statuses(result: amp_fuzz.CheckResult) -> dict[tuple[str, str], str]:
    return {(run.backend, run.autocast): run.status for run in result.runs}


@pytest.mark.parametrize("name", brief(sorted(set(MODELS) - {"gru-tagger", "tagger"}), "cnn"))
@pytest.mark.parametrize("train", brief([True, False], True), ids=["train", "eval"])
def test_an_honest_model_agrees(name: str, train: bool) -> None:
    model, inputs = MODELS[name]()
    model.train(train)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    result = amp_fuzz.check(model, *inputs, autocast=HALVES)
    assert result.ok, result
    backends = ("eager-cpu", "fake-cuda", "compile[aot_eager]")
    assert statuses(result) == {(b, d): "agreed" for b in backends for d in DTYPES}
    assert all(run.gradients for run in result.runs if run.backend != "fake-cuda")
    assert model.training is train
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.thorough
def test_a_recurrent_model_agrees_where_torch_can_run_it() -> None:
    """The CPU has no LSTM of float16, and dynamo before 2.15 leaves modules with one to eager."""
    model, inputs = MODELS["tagger"]()
    result = amp_fuzz.check(model, *inputs, backends=["eager-cpu", "fake-cuda"])
    assert result.ok == lstm_of_bfloat16(), result
    assert statuses(result) == {
        ("eager-cpu", "bfloat16"): "agreed" if lstm_of_bfloat16() else "fails",
        ("fake-cuda", "bfloat16"): "agreed",
    }
    half = amp_fuzz.check(model, *inputs, autocast="float16", backends=["eager-cpu", "fake-cuda"])
    assert statuses(half) == {
        ("eager-cpu", "float16"): "fails",
        ("fake-cuda", "float16"): "agreed",
    }
    assert not half.ok
    compiled = amp_fuzz.check(model, *inputs, backends=["compile[aot_eager]"])
    if holds(">=2.15"):
        assert compiled.ok == lstm_of_bfloat16()
        return
    if lstm_of_bfloat16():
        assert statuses(compiled) == {("compile[aot_eager]", "bfloat16"): "skipped"}
        assert re.search(r"RNN, GRU,( or)? LSTM", compiled.runs[0].detail)
    assert not compiled.ok  # nothing was compared


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", HALVES, ids=DTYPES)
def test_an_honest_training_step_agrees(dtype: torch.dtype) -> None:
    step, given = training_step(dtype)
    backends = ["eager-cpu", "compile[aot_eager]"]
    result = amp_fuzz.check(step, *given, backends=backends, autocast=None, backward=False)
    assert [run.status for run in result.runs] == ["agreed"] * 2, result
    assert "4 gradients, 4 tensors written" in result.runs[0].detail


@pytest.mark.parametrize("name", sorted(set(MODELS) - {"gru-tagger", "tagger"}))
@pytest.mark.slow
def test_an_honest_model_agrees_with_inductor(name: str) -> None:
    model, inputs = MODELS[name]()
    result = amp_fuzz.check(model, *inputs, backends=["compile[inductor]"], autocast=HALVES)
    assert result.ok, result
    assert {run.status for run in result.runs} == {"agreed"}


# -- seeded faults --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", brief(FAULTS, "gpt"))
@pytest.mark.parametrize("dtype", HALVES, ids=DTYPES)
def test_a_wrong_kernel_is_found_in_its_submodule(name: str, dtype: torch.dtype) -> None:
    if name == "tagger" and (dtype is torch.float16 or not lstm_of_bfloat16()):
        pytest.skip("this CPU has no LSTM of this dtype")
    wrong, module, op = FAULTS[name]
    _finds(name, dtype, Broken(patches=kernels(wrong)), module, op)


def _finds(name: str, dtype: torch.dtype, backend: Backend, module: str, op: str) -> None:
    """Check a model on a backend with a fault, and hold the check to naming the place."""
    if name == "scaler":
        step, given = training_step(dtype)
        more: Any = {"autocast": None, "backward": False}
        result = amp_fuzz.check(step, *given, backends=[backend], seconds=300, **more)
    else:
        model, inputs = MODELS[name]()
        result = amp_fuzz.check(model, *inputs, backends=[backend], autocast=dtype, seconds=300)
    (found,) = result.divergences + result.own
    assert (found.module, found.op) == (module, op), result
    if found.case is not None:
        _replays(found, backend)


@pytest.mark.thorough
@pytest.mark.parametrize("name", brief(FAKED, "cnn"))
@pytest.mark.parametrize("dtype", HALVES, ids=DTYPES)
def test_a_wrong_cast_inside_is_found_on_a_fake_device(name: str, dtype: torch.dtype) -> None:
    wrong, module, op = FAKED[name]
    _finds(name, dtype, BrokenFake(op=wrong), module, op)


@pytest.mark.parametrize("name", sorted(set(COMPILED) - {"gru-tagger", "tagger"}))
@pytest.mark.parametrize("dtype", HALVES, ids=DTYPES)
@pytest.mark.slow
def test_a_wrong_kernel_is_found_under_a_compiler(name: str, dtype: torch.dtype) -> None:
    wrong, module, op = COMPILED[name]
    _finds(name, dtype, BrokenCompiler("aot_eager", patches=kernels(wrong)), module, op)


@pytest.mark.parametrize("name", LOWERED)
@pytest.mark.slow
def test_a_wrong_lowering_is_found_under_inductor(name: str) -> None:
    wrong, module, op = LOWERED[name]
    backend = BrokenCompiler("inductor", patches=lowering(wrong))
    _finds(name, torch.bfloat16, backend, module, op)


@pytest.mark.thorough
def test_a_wrong_kernel_within_an_op_is_found() -> None:
    """Eager's rms_norm is made of others."""
    model, inputs = MODELS["gpt"]()
    backend = Broken(patches=kernels({"aten.rsqrt.default": lambda op, x: op(x) * 1.01}))
    (found,) = amp_fuzz.check(model, *inputs, backends=[backend]).own
    assert (found.module, found.op) == ("layers.0.norm1", "rms_norm")
    _replays(found, backend)


def _mended(backend: Any) -> Backend:
    return replace(backend, patches=nullcontext)  # type: ignore[no-any-return]


def _replays(found: Any, backend: Backend) -> None:
    """Hold the case that was cut to diverging alike where the fault is, and to agreeing without."""
    assert found.case is not None
    assert found.path is not None
    assert amp_fuzz.loads(found.case.json()) == found.case
    with quiet():
        again = judge_of(backend).judge(found.case)
        fake = isinstance(backend, BrokenFake)
        mended: Any = FakeBackend("cuda") if fake else _mended(backend)
        assert judge_of(mended).judge(found.case).outcome == "agreed"
    assert again.outcome in ("backend", "diverged")


@pytest.mark.parametrize(
    ("name", "op", "policy", "module", "own"),
    [
        ("gpt", "linear", "fp32", "layers.0.attn.qkv", "lower_precision_fp"),
        pytest.param(  # on the CPU no table lists it
            *("vit", "layer_norm", "lower_precision_fp", "encoder.layers.0.norm1", ""),
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_a_wrong_cast_policy_is_found_in_its_submodule(
    name: str, op: str, policy: str, module: str, own: str
) -> None:
    model, inputs = MODELS[name]()
    backend = Broken(patches=lambda: installed(Wrapper(), {**POLICIES, op: policy}))
    result = amp_fuzz.check(model, *inputs, backends=[backend], autocast=HALVES)
    for found in result.divergences:
        assert found.kind in ("bitwise", "dtype")
        assert (found.module, found.op, found.policy) == (module, op, own)
        _replays(found, backend)
    assert len(result.divergences) == 2


@pytest.mark.thorough
def test_a_wrong_gradient_is_found_in_its_submodule() -> None:
    model, inputs = MODELS["vit"]()
    backend = Broken(patches=NUMERIC["gelu-saved"].corrupt)
    result = amp_fuzz.check(model, *inputs, backends=[backend])
    (found,) = result.divergences + result.own
    assert found.kind.startswith("grad-")
    assert (found.module, found.op) == ("encoder.layers.0", "gelu")
    _replays(found, backend)


@pytest.mark.parametrize(
    ("name", "fault", "module", "op"),
    [
        # In the graph of its backward pass: addmm has one, too.
        ("gpt", "graph-mm-gain", "layers.0.attn.qkv", "linear"),
        ("gpt", "inductor-sigmoid-sign", "layers.0.mlp", "silu"),
    ],
)
@pytest.mark.slow
def test_a_fault_of_a_compiler_is_found_in_its_submodule_and_stage(
    name: str, fault: str, module: str, op: str
) -> None:
    model, inputs = MODELS[name]()
    stage = NUMERIC[fault].stage
    rung = stage.removeprefix("compile[").removesuffix("]")
    backend = BrokenCompiler(rung, patches=NUMERIC[fault].corrupt)
    result = amp_fuzz.check(model, *inputs, backends=[backend], seconds=300)
    (found,) = result.divergences + result.own
    assert (found.module, found.op, found.stage) == (module, op, stage), str(result)
    _replays(found, backend)
