"""Numeric faults must be found by the rounding oracle, and what is honest must not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from amp_fuzz.backends.compile import CompileBackend
from amp_fuzz.backends.harness import quiet
from amp_fuzz.findings.minimize.target import stage_of
from amp_fuzz.upstream import shipped
from amp_fuzz.upstream.explain import judge_of
from benchmarks.numeric_faults import page
from tests.faults.corrupted import Corrupted, Kernel, reached, wrong_kernels
from tests.faults.fault import NumericFault
from tests.faults.honest import Accurate, reordered
from tests.faults.numeric import COMPILED, EAGER, NUMERIC
from tests.faults.numeric_hunt import Hunt, Step, agrees, backend_of, counts, hunt, way
from tests.faults.shown import path_of, showing
from tests.helpers import call, case, x

# Each mechanism once, where the ordinary way comes to it within some hundred cases.
_EAGER = (
    "mm-bfloat16",
    "sum-bfloat16",
    "addmm-no-bias",
    "layer-norm-no-eps",
    "convolution-gain",
    "sum-last",
    "sigmoid-saved",
    "neg-backward",
    "log-softmax-uncast",
    "softmax-no-max",
)

_TANH = case([x("w0", 6, 8)], call("tanh", "w0"))
_LEAKY = case([x("w0", 6, 8)], call("leaky_relu", "w0", 0.25))
_COMPILED = {
    "graph-tanh-saved": _TANH,
    "decomposed-leaky-relu-sign": _LEAKY,
}


@pytest.fixture(scope="module")
def steps() -> Sequence[Step]:
    """Return the first cases of the ordinary way."""
    return list(way(400))


@pytest.mark.slow
@pytest.mark.parametrize("name", _EAGER)
def test_a_wrong_kernel_is_found(name: str, steps: Sequence[Step]) -> None:
    fault = NUMERIC[name]
    found = hunt(fault, steps)
    assert found.found, found
    assert found.stage == fault.stage == "eager-cpu"
    assert found.case is not None
    with quiet():
        assert agrees(fault, found.case)


def test_mechanisms_are_all_there() -> None:
    assert {NUMERIC[name].mechanism for name in _EAGER} == {f.mechanism for f in EAGER}
    assert len(EAGER) >= 24
    assert len(COMPILED) >= 14
    assert len(NUMERIC) == len(EAGER) + len(COMPILED)


@pytest.mark.parametrize("name", _COMPILED)
def test_a_fault_in_a_compiler_gets_its_stage(name: str) -> None:
    """Judged on the rung above: Inductor would take seconds, and shows no more."""
    fault, example = NUMERIC[name], _COMPILED[name]
    assert set(fault.reached) & reached(example)
    backend = backend_of(fault)
    assert isinstance(backend, CompileBackend)
    rungs = [b for b in backend.ladder() if b.name == "compile[aot_eager_decomp_partition]"]
    judge = judge_of(rungs[0], shipped(), "none")
    with quiet():
        verdict = judge.judge(example)
        assert counts(verdict), verdict
        assert (stage_of(judge, verdict) or judge.backend.name) == fault.stage
        honest = judge_of(CompileBackend("aot_eager_decomp_partition"), shipped(), "none")
        assert honest.judge(example).outcome == "agreed"


def test_kernels_that_only_call_torch_agree() -> None:
    def same(op: Kernel, *args: Any, **kwargs: Any) -> Any:
        return op(*args, **kwargs)

    names = {n.removeprefix("backward:") for fault in EAGER for n in fault.reached}
    backend = Corrupted(patches=lambda: wrong_kernels(dict.fromkeys(names, same)))
    judge = judge_of(backend, shipped(), "none")
    with quiet():
        for case in [showing(fault.name) for fault in EAGER if path_of(fault.name).exists()]:
            assert judge.judge(case).outcome not in ("diverged", "backend")


def test_honest_alternatives_differ_and_agree() -> None:
    """Products of enough terms that their order and their precision show in a bit."""
    inputs = [x("x0", 6, 40), x("w1", 40, 6)]
    example = case(inputs, call("mm", "x0", "w1"), call("softmax", "v0", -1, to="v1"), contexts=())
    accurate = Accurate({"aten.mm.default", "aten._softmax.default"})
    try:
        for patches in (accurate, reordered):
            backend = Corrupted(patches=patches)
            exact = judge_of(replace(backend, exact=True), relations="none").judge(example)
            assert exact.outcome == "backend"
            assert judge_of(backend, shipped(), "none").judge(example).outcome == "agreed"
    finally:
        accurate.close()


@pytest.mark.parametrize("fault", EAGER, ids=lambda f: f.name)
def test_torch_is_put_back(fault: NumericFault) -> None:
    names = [n.removeprefix("backward:").removesuffix(".default") for n in fault.reached]
    dumps = [n.replace("aten.", "aten::", 1) for n in names]
    before = [torch._C._dispatch_dump(n) for n in dumps]
    with fault.corrupt():
        assert [torch._C._dispatch_dump(n) for n in dumps] != before
    assert [torch._C._dispatch_dump(n) for n in dumps] == before


def test_shadows_follow_a_cast_under_inference_mode() -> None:
    """`to` comes whole there, and its schema says that it is a view."""
    from amp_fuzz.reference import shadow

    a, b = torch.ones(3, 4) / 3, torch.ones(4, 5) / 7
    with torch.inference_mode():
        found = shadow(lambda: torch.mm(a, b).to(torch.float64))
    band = found.band(found.result)
    assert band.known
    assert float((band.samples - band.clean).abs().max()) > 1e-9


def test_shadows_pass_by_tensors_without_values() -> None:
    """Modules that are made on the meta device met the shadows there."""
    from amp_fuzz.reference import shadow

    found = shadow(lambda: torch.nn.LSTMCell(3, 4, device="meta"))
    assert found.result.weight_hh.is_meta


def test_the_page_says_what_was_missed() -> None:
    shown = "value", "v0", "mm", "", "eager-cpu"
    found = Hunt("mm-gain", True, 3, 1, 0.5, *shown, outcome="backend").json()
    missed = Hunt("var-of-squares", False, 5000, 30, 9.0).json()
    rows = [r | {"mechanism": "gain", "seeded": "eager-cpu"} for r in (found, missed)]
    run = {
        "seed": 0,
        "seconds_limit": 60.0,
        "versions": {"torch": "2.13.0"},
        "machine": {"cpu": "a processor"},
    }
    text = page({"run": run, "eager": {"faults": rows}}, {})
    assert "| eager | 1 of 2 (50.0%) | 1 of 1 |" in text
    assert "- `var-of-squares`:" in text
    assert (
        "| mm-gain | mm is 1 % too large | gain | value (backend) | mm | 3 | 1 | 0.5 | eager-cpu |"
        in text
    )
