"""Tensors of two devices in one program: the rules, the draws, the faults, and what is written."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
import torch

from amp_fuzz.backends import Backend, BackendError, backends, privateuse1
from amp_fuzz.backends.base import mixes
from amp_fuzz.backends.harness import Observation, quiet
from amp_fuzz.backends.privateuse1.backend import PrivateUse1Backend
from amp_fuzz.backends.source import driver_source
from amp_fuzz.cases.case import Case, CaseError, loads
from amp_fuzz.cases.program import Autocast, ProgramError, Statement, TensorSpec, statements, uses
from amp_fuzz.catalogue import CATALOGUE, check
from amp_fuzz.catalogue.places import calls_of_both, on_the_cpu
from amp_fuzz.findings.explicit_form import explicit_form
from amp_fuzz.findings.minimize.data import devices
from amp_fuzz.findings.minimize.target import Shrunk, Target, asker, shrink
from amp_fuzz.findings.repro.issue import _driven
from amp_fuzz.findings.repro.script import repro
from amp_fuzz.oracle.compare import Divergence, compare
from amp_fuzz.records.fingerprint import ingredient
from amp_fuzz.runs.engine import MIXED
from amp_fuzz.strategies import drawing
from amp_fuzz.upstream import shipped
from amp_fuzz.upstream.explain import judge_of
from tests.faults.device import faulty_device
from tests.faults.places import FAULTS
from tests.helpers import BF16, call, case, drawn, under, x

CPU_BF16 = Autocast("cpu", "bfloat16")
TWO = [
    pytest.param("fake-cuda", id="fake"),
    pytest.param(
        "privateuse1",
        marks=pytest.mark.skipif(not privateuse1.supported(), reason="needs torch 2.10"),
    ),
]


def cpu(name: str, *shape: int, dtype: str = "float32") -> TensorSpec:
    return msgspec.structs.replace(x(name, *shape, dtype=dtype), device="cpu")


def forward(inputs: Sequence[TensorSpec], *body: object, **plan: object) -> Case:
    return case(list(inputs), *body, **{"backward": "none", **plan})  # type: ignore[arg-type]


MIXED_CASE = case(
    [x("x0", 2, 2), cpu("w1", 2, 2), cpu("x2"), x("w3", 2, 2)],
    call("mm", "x0", "w3"),
    call("mm", "w1", "w1", to="v1"),
    call("mul", "v0", "x2", to="v2"),
)


# -- a case ---------------------------------------------------------------------------------------


def test_an_input_on_the_cpu_is_read_again_and_shown() -> None:
    assert loads(MIXED_CASE.json()) == MIXED_CASE
    assert "x2: float32[] normal on the CPU" in str(MIXED_CASE)


def test_an_input_on_the_device_has_the_json_that_it_had() -> None:
    plain = case([x("x0", 2)], call("sin", "x0"))
    assert b'"device":""' not in plain.json()
    assert plain.id == "d805870a90262fca"


def test_another_device_is_refused() -> None:
    text = MIXED_CASE.json().replace(b'"device":"cpu"', b'"device":"cuda"')
    with pytest.raises(CaseError, match="device"):
        loads(text)


def test_what_is_computed_from_cpu_tensors_alone_is_on_the_cpu() -> None:
    assert on_the_cpu(MIXED_CASE.program) == {"w1", "x2", "v1"}
    assert [c.op for c in calls_of_both(MIXED_CASE.program, on_the_cpu(MIXED_CASE.program))] == [
        "mul"
    ]


@pytest.mark.parametrize(
    ("inputs", "statement"),
    [
        ((x("x0", 2, 2), cpu("x1", 2, 2)), call("mm", "x0", "x1")),
        ((x("x0", 2), cpu("x1", 2)), call("mul", "x0", "x1")),
        ((x("x0", 2), cpu("b1")), call("mul", "b1", "x0", form="inplace")),
        ((x("x0", 2), cpu("x1"), cpu("x2")), call("addcmul", "x0", "x1", "x2")),
        ((x("x0", 2), x("x1"), cpu("b2", 2)), call("mul", "x0", "x1", form="out", out="b2")),
    ],
    ids=["product", "no number", "written", "two numbers", "out"],
)
def test_a_call_that_no_device_runs_is_refused(
    inputs: tuple[TensorSpec, ...], statement: Statement
) -> None:
    with pytest.raises(ProgramError, match="is on the CPU, where"):
        check(forward(inputs, statement).program)


@pytest.mark.parametrize(
    ("inputs", "statement"),
    [
        ((x("x0", 2), cpu("x1")), call("mul", "x1", "x0")),
        ((x("b0", 2), cpu("x1")), call("mul", "b0", "x1", form="inplace")),
        ((x("b0", 2), cpu("x1", 2)), call("copy_", "b0", "x1", form="inplace")),
        (
            (x("x0", 2), cpu("x1", 2, dtype="int64")),
            call("getitem.tensor", "x0", "x1", form="operator"),
        ),
        ((x("x0", 2, dtype="bool"), cpu("x1"), cpu("x2")), call("where", "x0", "x1", "x2")),
    ],
    ids=["number", "in-place", "copy", "index", "two numbers"],
)
def test_a_call_that_takes_a_cpu_tensor_is_not(
    inputs: tuple[TensorSpec, ...], statement: Statement
) -> None:
    check(forward(inputs, statement).program)


# -- what autocast means --------------------------------------------------------------------------


def dtypes(backend: Backend, one: Case) -> dict[str, str]:
    """Return what a case comes to, the same on both sides: dtype and device by label."""
    with quiet():
        seen, expected = backend.run([one])[0], backend.reference().run(one)
    assert compare(expected, seen, values=backend.values, devices=True) is None
    assert seen.raised is None
    dtype = {
        n: str(v.dtype).removeprefix("torch.") for n, v in seen.values.items() if v is not None
    }
    return {n: f"{dtype[n]} {'cpu' if seen.devices[n] == 'cpu' else 'device'}" for n in dtype}


@pytest.mark.parametrize("name", TWO)
def test_only_the_cpus_autocast_casts_a_call_of_cpu_tensors(name: str) -> None:
    one = forward(
        [x("x0", 2, 2), cpu("x1", 2, 2)],
        call("mm", "x0", "x0"),
        call("mm", "x1", "x1", to="v1"),
        under(CPU_BF16, call("mm", "x1", "x1", to="v2"), call("mm", "x0", "x0", to="v3")),
        contexts=(Autocast(dtype="float16"),),
    )
    assert dtypes(backends()[name], one) == {
        "v0": "float16 device",
        "v1": "float32 cpu",
        "v2": "bfloat16 cpu",
        "v3": "float16 device",
    }


@pytest.mark.parametrize("name", TWO)
def test_promotion_asks_the_tensors_of_the_device_alone(name: str) -> None:
    one = forward(
        [x("x0", 2, dtype="bfloat16"), cpu("x1"), x("x2")],
        call("atan2", "x0", "x1"),
        call("atan2", "x0", "x2", to="v1"),
    )
    found = dtypes(backends()[name], one)
    assert found == {"v0": "bfloat16 device", "v1": "float32 device"}


@pytest.mark.parametrize("name", TWO)
def test_a_call_of_both_devices_comes_to_the_kernels_of_both(name: str) -> None:
    """Each casts its own: the accelerator's first, then that of the CPU, if its autocast is on."""
    backend = backends()[name]
    inputs = [x("x0", 2, dtype="bfloat16"), cpu("x1", dtype="bfloat16")]
    loss = call("poisson_nll_loss", "x0", "x1", reduction="none")
    for body in (loss, under(CPU_BF16, loss)):
        one = forward(inputs, body)
        assert dtypes(backend, one) == {"v0": "float32 device"}
        kernels = [
            k for k in backend.reference().run(one).kernels if k.overload == "poisson_nll_loss"
        ]
        own = [(k.device == "cpu", [old for _, old, *_ in k.casts]) for k in kernels]
        half = [torch.bfloat16]
        assert own == [(False, half)] + ([(True, half)] if body is not loss else [])


@pytest.mark.skipif(not privateuse1.supported(), reason="needs torch 2.10")
def test_gradients_of_cpu_leaves_come_back_on_the_cpu() -> None:
    backend = backends()["privateuse1"]
    one = case(
        [x("w0", 2, 2), cpu("w1", 2, 2), cpu("w2")],
        call("mm", "w0", "w0"),
        call("mm", "w1", "w1", to="v1"),
        call("mul", "v0", "w2", to="v2"),
    )
    found = dtypes(backend, one)
    assert found["w1.grad"] == "float32 cpu"
    assert found["w2.grad"] == "float32 cpu"
    assert found["w0.grad"] == "float32 device"


# -- drawing --------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_drawn_programs_are_well_formed_and_of_three_kinds() -> None:
    kinds: Counter[str] = Counter()
    for one in drawn(600, "cuda", mixed=1):
        check(one.program)
        there = on_the_cpu(one.program)
        kinds["mixed"] += one.program.mixed
        assert not (one.program.mixed and one.plan.transform != "none")
        both = list(calls_of_both(one.program, there))
        kinds["a number"] += any(not CATALOGUE[c.op].cpu_tensors for c in both)
        kinds["indices or a copy"] += any(CATALOGUE[c.op].cpu_tensors for c in both)
        calls = list(statements(one.program.body))
        kinds["a part"] += any(set(uses(c)) and set(uses(c)) <= there for c in calls)
        contexts = [*one.plan.contexts]
        kinds["context"] += one.program.mixed and any(c.device == "cpu" for c in contexts)
    assert kinds["mixed"] > 360, kinds
    assert kinds["a number"] > 120, kinds
    assert kinds["indices or a copy"] > 3, kinds  # some 13 of 1,000, over two seeds
    assert kinds["a part"] > 120, kinds
    assert kinds["context"] > 80, kinds


def test_the_rest_of_a_case_does_not_depend_on_it() -> None:
    pool = drawing.usable(CATALOGUE.values(), "cuda")
    changed = 0
    for seed in range(200):
        plain, mixed = (
            drawing.draw_case(random.Random(seed).randbytes, "cuda", ops=pool, mixed=m)
            for m in (0, MIXED)
        )
        changed += plain != mixed
        assert plain == mixed or mixed.program.mixed
    assert 5 < changed < 35


def test_only_backends_of_two_devices_draw_them() -> None:
    found = {name for name, backend in backends().items() if mixes(backend)}
    plain = ("eager-cuda", "eager-xpu", "eager-mps", "privateuse1", "fake-")
    assert found == {name for name in backends() if name.startswith(plain)}


@pytest.mark.parametrize("name", ["fake-cuda", "fake-maia"])
@pytest.mark.parametrize("op", ["binary_cross_entropy", "mse_loss"])
def test_a_fake_device_refuses_no_call_of_cpu_tensors(name: str, op: str) -> None:
    if name not in backends() or backends()[name].availability().status != "ready":
        pytest.skip(f"{name} is not here")
    inputs = [msgspec.structs.replace(x(n, 2, domain="unit"), device="cpu") for n in ("x0", "x1")]
    one = case([*inputs, x("x2", 2)], call(op, "x0", "x1"), call("exp", "x2", to="v1"))
    with quiet():
        verdict = judge_of(backends()[name]).judge(one)
    moved = (name, op) == ("fake-maia", "binary_cross_entropy")
    assert verdict.outcome == ("raised" if moved else "agreed")
    assert verdict.case.program.mixed != moved


@pytest.mark.parametrize("name", ["compile[inductor]@cuda", "eager-cuda[shadow]", "jax"])
def test_another_backend_refuses_the_case(name: str) -> None:
    if name not in backends() or backends()[name].device == "cpu":
        pytest.skip(f"{name} is not here, or works on the CPU")
    with pytest.raises(BackendError, match="takes no tensors of two devices"):
        judge_of(backends()[name]).judge(MIXED_CASE)


def test_on_the_cpu_all_tensors_are_of_one_device() -> None:
    with quiet():
        assert judge_of(backends()["eager-cpu"]).judge(MIXED_CASE).outcome == "agreed"


# -- judging --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", TWO)
def test_honest_draws_agree_or_are_known(name: str) -> None:
    backend = backends()[name]
    judge = judge_of(backend, shipped())
    outcomes: Counter[str] = Counter()
    with quiet():
        for one in drawn(60, "cuda", seed="mixed", mixed=1, trains=backend.trains):
            if one.program.mixed:
                verdict = judge.judge(one)
                outcomes[verdict.outcome] += 1
                assert verdict.outcome != "diverged", f"{verdict.divergence}\n{one}"
    assert outcomes["agreed"] > 20


def test_a_result_on_the_wrong_device_is_a_divergence() -> None:
    values = {"v0": torch.zeros(2), "w1.grad": torch.zeros(2)}
    right = Observation(values=dict(values), devices={"v0": "cuda", "w1.grad": "cpu"})
    for label, kind in (("v0", "device"), ("w1.grad", "grad-device")):
        other = "cuda" if right.devices[label] == "cpu" else "cpu"
        wrong = Observation(values=dict(values), devices={**right.devices, label: other})
        found = compare(right, wrong, devices=True)
        assert found is not None
        assert (found.kind, found.where, found.observed) == (kind, label, other)
        assert compare(right, wrong) is None  # a backend whose tensors are elsewhere


def test_a_backward_pass_of_two_devices_has_one_thread() -> None:
    """Otherwise gradients are added in the order in which the threads come."""
    once = "with torch.autograd.set_multithreading_enabled(False):"
    assert once in driver_source(MIXED_CASE)
    assert once not in driver_source(case([x("w0", 2)], call("sin", "w0")))


# -- faults ---------------------------------------------------------------------------------------

WITHIN = 400
"""Drawn cases with CPU tensors, of which one shows a fault: 1 to 347 over three seeds."""


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[PrivateUse1Backend, Path]]:
    with faulty_device("tests.faults.places:FaultyOfTwo", tmp_path_factory) as found:
        yield found


@pytest.mark.slow
@pytest.mark.skipif(not privateuse1.supported(), reason="needs torch 2.10")
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_and_minimised(faulty: tuple[PrivateUse1Backend, Path], name: str) -> None:
    backend, file = faulty
    judge = judge_of(backend, shipped())
    cases = (one for one in drawn(2 * WITHIN, "cuda", seed="a", mixed=1) if one.program.mixed)
    with quiet():
        file.write_text(name)
        for one, _ in zip(cases, range(WITHIN), strict=False):
            verdict = judge.judge(one)
            if verdict.outcome == "diverged":
                break
        else:
            pytest.fail(f"not found in {WITHIN} cases")
        target = Target.of(verdict)
        found = shrink(one, target, asker(judge, target), backend.reference(), seconds=60)
        *_, last = found
        assert isinstance(last, Shrunk)
        small = last.case
        assert judge.judge(small).outcome == "diverged"
        assert len(list(statements(small.program.body))) <= 2, small
        assert small.program.mixed, small  # it does not show on one device
        file.write_text("")
        # The smallest case may be a convolution that reads memory nobody wrote (onednn-conv-gap),
        # which is "known" whenever that memory is not zero.
        honest = judge.judge(small)
        assert honest.outcome in ("agreed", "raised") or honest.known == "onednn-conv-gap"


# -- what is written ------------------------------------------------------------------------------


def test_a_plainer_case_has_fewer_cpu_tensors() -> None:
    found = [on_the_cpu(one.program) & {"w1", "x2"} for one in devices(MIXED_CASE)]
    assert found == [set(), {"x2"}, {"w1"}]
    assert list(devices(case([x("x0", 2)], call("sin", "x0")))) == []


def test_a_fingerprint_names_them() -> None:
    assert "cpu tensors" in ingredient(MIXED_CASE)


def test_an_issue_names_them() -> None:
    assert "`w1` and `x2` on the CPU" in _driven(MIXED_CASE)


@pytest.mark.parametrize("name", TWO)
def test_the_explicit_form_casts_each_device_by_itself(name: str) -> None:
    one = forward(
        [x("x0", 2, 2), cpu("x1", 2, 2)],
        call("mm", "x0", "x0"),
        call("chain_matmul", "x1", "x1", to="v1"),
        under(CPU_BF16, call("chain_matmul", "x1", "x1", to="v2")),
        contexts=(BF16,),
    )
    with quiet():  # torch warns of `chain_matmul`, once
        lines = explicit_form(one, backends()[name].reference()).splitlines()
    assert lines[1] == (
        "v0 = torch.mm(cast[bfloat16](x0), cast[bfloat16](x0))  # mm: lower_precision_fp"
    )
    assert lines[2] == "v1 = torch.chain_matmul(x1, x1)"
    assert "lower_precision_fp" in lines[4]


@pytest.mark.thorough
@pytest.mark.skipif(not privateuse1.supported(), reason="needs torch 2.10")
def test_a_script_puts_each_tensor_in_its_place(
    faulty: tuple[PrivateUse1Backend, Path], tmp_path: Path
) -> None:
    backend, file = faulty
    one = forward([x("x0", 2), cpu("x1")], call("mul", "x0", "x1"))
    with quiet():
        file.write_text("result-on-the-cpu")
        verdict = judge_of(backend).judge(one)
        file.write_text("")
        assert verdict.divergence is not None
        assert verdict.divergence.kind == "device"
        script = repro(one, backend, verdict.finding(""))
    lines = script.splitlines()
    (first,) = (line for line in lines if line.startswith("x0 = "))
    (second,) = (line for line in lines if line.startswith("x1 = "))
    assert first.endswith(".to(device)")
    assert "device" not in second
    path = tmp_path / "repro.py"
    path.write_text(script)
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (0, "")  # this device has no fault
    assert "expected: ampdev" in done.stdout


def test_a_fake_script_puts_each_tensor_in_its_place() -> None:
    backend = backends()["fake-cuda"]
    one = forward([x("x0", 2, dtype="bfloat16"), cpu("x1")], call("atan2", "x0", "x1"))
    with quiet():
        seen = backend.reference().run(one)
    wrong = msgspec.structs.replace(one, seed=1)
    assert compare(seen, backend.run([wrong])[0], values=False, devices=True) is None
    script = repro(one, backend, Divergence("dtype", "v0", "bfloat16", "float32"))
    assert 'x1 = torch.empty((), dtype=torch.float32, device="cpu")' in script
    assert "x0 = torch.empty((2,), dtype=torch.bfloat16, device=device)" in script
