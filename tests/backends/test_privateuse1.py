"""The PrivateUse1 device, its autocast, and the process that it lives in."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import amp_fuzz
from amp_fuzz.backends import backends, privateuse1
from amp_fuzz.backends.harness import Observation, Raised, quiet
from amp_fuzz.backends.privateuse1.backend import PrivateUse1Backend
from amp_fuzz.backends.process import Apart, ApartError
from amp_fuzz.cases.case import Case
from amp_fuzz.cases.program import Autocast, Checkpoint
from amp_fuzz.findings.explanation import explain
from amp_fuzz.findings.explicit_form import explicit_form
from amp_fuzz.findings.repro.script import repro
from amp_fuzz.reference import Policy, supposing
from amp_fuzz.upstream import quirks, shipped
from amp_fuzz.upstream.explain import judge_of
from tests.faults.device import FAULTS, UNREGISTERED, faulty_device
from tests.helpers import BF16, F16, brief, call, case, drawn, stored, under, x

pytestmark = pytest.mark.skipif(not privateuse1.supported(), reason="needs torch 2.10")

CASES = stored("device_faults")
# One of the policies, of the cache, of the state, and of what a device offers.
FEW = ("cache-not-cleared", "dtype-not-restored", "dtype-unsupported", "cast-by-float16")

CPU = Autocast("cpu", "bfloat16")
MM = case([x("x0", 2, 2), x("w1", 2, 2)], call("mm", "x0", "w1"))


@pytest.fixture(scope="module")
def backend() -> Iterator[PrivateUse1Backend]:
    found = backends()["privateuse1"]
    assert isinstance(found, PrivateUse1Backend)
    yield found
    found.process.close()


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[PrivateUse1Backend, Path]]:
    with faulty_device("tests.faults.device:Faulty", tmp_path_factory) as found:
        yield found


# -- honest ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_honest_draws_agree_or_are_known(backend: PrivateUse1Backend) -> None:
    judge = judge_of(backend, shipped())
    outcomes: Counter[str] = Counter()
    with quiet():
        for one in drawn(40, backend.device, seed="privateuse1", statements=8):
            verdict = judge.judge(one)
            outcomes[verdict.outcome] += 1
            assert verdict.outcome != "diverged", f"{verdict.divergence}\n{one}"
    assert outcomes["agreed"] > 20


def test_the_policies_are_those_of_cuda(backend: PrivateUse1Backend) -> None:
    """Float32 is what CUDA computes sums and exponentials in, and the CPU does not."""
    one = case([x("x0", 2, dtype="bfloat16")], call("exp", "x0"), backward="none")
    for name, dtype in (("privateuse1", torch.float32), ("eager-cpu", torch.bfloat16)):
        seen = backends()[name].run([one])[0].values["v0"]
        assert seen is not None
        assert seen.dtype is dtype


def test_gradients_come_back(backend: PrivateUse1Backend) -> None:
    seen, expected = backend.run([MM])[0], backend.reference().run(MM)
    assert list(seen.values) == ["v0", "w1.grad"]
    for label, value in seen.values.items():
        want = expected.values[label]
        assert value is not None
        assert want is not None
        assert value.device.type == "cpu"
        assert torch.equal(value, want)


def test_a_backward_pass_inside_a_context_is_cast(backend: PrivateUse1Backend) -> None:
    """It runs in a thread of autograd's own: the reference is under the context there too."""
    inside = case([x("x0", 2, 2), x("w1", 2, 2)], call("mm", "x0", "w1"), backward="inside")
    with quiet():
        assert judge_of(backend).judge(inside).outcome == "agreed"
    # The gradient of a product is two more of them, which reach kernels.
    assert len(backend.reference().run(inside).kernels) > 1


def test_an_error_in_a_backward_pass_is_an_observation(backend: PrivateUse1Backend) -> None:
    loss = call("huber_loss", "w0", "x1", reduction="mean", delta=1.0)
    one = case([x("w0", 2, dtype="float64"), x("x1", 2)], loss, contexts=())
    seen = backend.run([one])[0]
    assert seen.raised is not None
    assert (seen.raised.kind, "Found dtype" in seen.raised.message) == ("RuntimeError", True)
    assert backend.run([MM])[0].raised is None


FAILING = """
import torch
from amp_fuzz.backends.privateuse1 import install
from amp_fuzz.backends.privateuse1 import tensor

device, call = install("cuda"), tensor.call


def failing(func, args, kwargs):
    if str(func).startswith(("aten.tril", "aten.frexp", "aten.unbind")):
        raise ValueError(f"no kernel for {func}")
    return call(func, args, kwargs)


class InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, op):
        ctx.op = op
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.op(grad)
        return grad, None


tensor.call = failing
for op in (torch.tril, torch.frexp, torch.unbind):
    try:
        x = torch.ones(2, 2, device=device, requires_grad=True)
        InBackward.apply(x, op).sum().backward()
    except RuntimeError as error:
        print(error, flush=True)  # torch may abort where its threads end
"""


@pytest.mark.thorough
def test_a_kernel_that_fails_in_a_backward_pass_says_why() -> None:
    """Whether it returns a tensor, several, or a list of them."""
    done = subprocess.run([sys.executable, "-c", FAILING], capture_output=True, text=True)
    said = [line.partition("ValueError: ")[2].split("'")[0] for line in done.stdout.splitlines()]
    assert [text.removesuffix(" to Tensor") for text in said] == [
        "no kernel for aten.tril.default",
        "no kernel for aten.frexp.Tensor",
        "no kernel for aten.unbind.int",
    ], done.stderr


def test_nested_contexts_and_checkpoints(backend: PrivateUse1Backend) -> None:
    one = case(
        [x("x0", 2, 2), x("w1", 2, 2)],
        under(Checkpoint(), call("mm", "x0", "w1")),
        under(F16, call("mm", "x0", "w1", to="v1")),
        contexts=(BF16,),
    )
    with quiet():
        assert judge_of(backend).judge(one).outcome == "agreed"


def test_the_process_is_left_alone(backend: PrivateUse1Backend) -> None:
    backend.run([MM])
    assert torch._C._get_privateuse1_backend_name() == "privateuseone"
    assert not torch._C._dispatch_has_kernel_for_dispatch_key("aten::mm", "AutocastPrivateUse1")


# -- the reference there --------------------------------------------------------------------------


def test_the_reference_imitates_and_supposes_there(backend: PrivateUse1Backend) -> None:
    reference = backend.reference()

    def dtype() -> torch.dtype:
        value = reference.run(MM).values["v0"]
        assert value is not None
        return value.dtype

    assert dtype() is torch.bfloat16
    with supposing({"mm": Policy.FP32}):
        assert dtype() is torch.float32
    inputs = [x("x0", 2, dtype="float16"), x("x1", 2, dtype="float16", device="cpu")]
    stack = call("stack", ["x1", "x1"], 0, to="v1")
    half = case(inputs, call("dot", "x0", "x0"), under(CPU, stack), backward="none")
    assert reference.run(half).raised is None
    with quirks(["promote-foreign-half"]):
        raised = reference.run(half).raised
    assert raised is not None  # the CPU's kernels are torch's own, those of the device are not
    assert raised.text.startswith("v1 = torch.stack")


def test_the_explicit_form_is_that_of_the_device(backend: PrivateUse1Backend) -> None:
    text = explicit_form(MM, backend.reference())
    assert "cast[bfloat16](x0), cast[bfloat16](w1)" in text


def test_a_finding_is_explained(faulty: tuple[PrivateUse1Backend, Path]) -> None:
    backend, file = faulty
    file.write_text("missing-op")
    with quiet():
        found = explain(MM, backend)
    assert (found.outcome, found.kind, found.first) == ("diverged", "dtype", "v0")
    assert "mm: without its casts (lower_precision_fp)" in found.flips


@pytest.mark.thorough
def test_a_repro_installs_the_device(backend: PrivateUse1Backend, tmp_path: Path) -> None:
    """The weight cache is emptied by a checkpoint's backward pass: see docs/findings."""
    one = case(
        [x("x0", 2, 2), x("w1", 2, 2, domain="integers"), x("w2", 2)],
        under(Checkpoint(), call("mul", "w2", "w2", to="v1")),
        call("mm", "x0", "w1", to="v0"),
        steps=2,
        loop="inside",
    )
    with quiet():
        verdict = judge_of(backend).judge(one)
    script = repro(one, backend, verdict.finding(""))
    assert 'device = privateuse1.install("cuda")' in script
    path = tmp_path / "repro.py"
    path.write_text(script)
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (1, "")


# -- faults ---------------------------------------------------------------------------------------


def test_there_are_more_than_twenty_faults_and_a_case_for_each() -> None:
    assert len(FAULTS) > 20
    assert set(CASES) == {*FAULTS, UNREGISTERED}


@pytest.mark.parametrize("name", brief(FAULTS, *FEW))
def test_a_fault_is_found(faulty: tuple[PrivateUse1Backend, Path], name: str) -> None:
    backend, file = faulty
    judge = judge_of(backend, shipped())
    with quiet():
        file.write_text(name)
        assert judge.judge(CASES[name]).outcome == "diverged"
        file.write_text("")
        assert judge.judge(CASES[name]).outcome in ("agreed", "raised", "known")


def test_a_missing_fallthrough_is_found() -> None:
    process = Apart("tests.faults.device:NoFallthrough", "cuda")
    try:
        with quiet():
            verdict = judge_of(PrivateUse1Backend("cuda", process)).judge(CASES[UNREGISTERED])
        assert verdict.divergence is not None
        assert verdict.divergence.kind == "raise"
    finally:
        process.close()


def test_a_model_is_not_run_on_another_device_instead() -> None:
    """The device is elsewhere: `check` says so, and does not take the policies' own device."""
    linear, one = torch.nn.Linear(2, 2), torch.ones(1, 2)
    result = amp_fuzz.check(linear, one, backends="privateuse1", store=None)
    assert not result.ok
    assert "its device is in a separate process" in str(result)


# -- the process ----------------------------------------------------------------------------------


def test_a_device_that_cannot_be_had_says_why(backend: PrivateUse1Backend) -> None:
    process = Apart("amp_fuzz.backends.privateuse1.backend:Device", "cudda")
    with pytest.raises(ApartError, match="cudda"):
        replace(backend, process=process).run([MM])


@pytest.mark.thorough
def test_a_device_is_installed_once() -> None:
    code = (
        "from amp_fuzz import privateuse1 as p\n"
        "print(p.install('cuda'), p.install('cuda'))\n"
        "try: p.install('cpu')\n"
        "except p.DeviceError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600
    )
    assert done.stdout.splitlines() == [
        "ampdev ampdev",
        (
            "PrivateUse1 is the device 'ampdev' in this process already, with the policies of "
            "cuda: a process can rename it only once, so use another process"
        ),
    ]


@pytest.mark.thorough
def test_a_process_that_dies_takes_this_one_with_it() -> None:
    """Whoever watches this one records the case as a crash."""
    code = (
        "from tests.backends.test_privateuse1 import MM\n"
        "from amp_fuzz.backends.process import Apart\n"
        "Apart('tests.backends.test_privateuse1:Dying').run(MM)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=600)
    assert done.returncode == 7


class Asked:
    """Says whether its process may use oneDNN."""

    def observe(self, case: Case) -> Observation:
        return Observation(raised=Raised("Said", str(bool(torch.backends.mkldnn.enabled)), 0, ""))

    expect = observe


def test_its_process_uses_onednn_only_while_this_one_does() -> None:
    """A known bug of oneDNN is told by running both sides without it."""
    process = Apart("tests.backends.test_privateuse1:Asked")
    try:
        for on in (True, False, True):
            with quiet(), torch.backends.mkldnn.flags(enabled=on):
                for reference in (False, True):
                    seen = process.run(MM, reference=reference)
                    assert seen.raised is not None
                    assert seen.raised.message == str(on)
    finally:
        process.close()


class Dying:
    """Dies of every case."""

    def observe(self, case: Case) -> None:
        import os

        os._exit(7)
