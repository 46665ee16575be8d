"""Real devices: late errors, lost devices and little memory are no findings, and cost one case.

The tests marked `gpu` run on the accelerator that torch sees. `make gpu` runs them, also on a
device on PrivateUse1.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from amp_fuzz.backends import Backend, accelerator, backends
from amp_fuzz.backends.harness import quiet
from amp_fuzz.cases.build import BF16, call, case, under, x
from amp_fuzz.upstream import shipped
from amp_fuzz.upstream.explain import judge_of
from tests import helpers
from tests.helpers import WrongKernel, drawn

# -- on an accelerator ----------------------------------------------------------------------------


def _own() -> Backend:
    return backends()[f"eager-{helpers.accelerator()}"]


@pytest.mark.gpu
def test_honest_cases_agree_and_their_values_are_on_the_cpu() -> None:
    backend = _own()
    judge = judge_of(backend, shipped())
    with quiet():
        verdicts = [judge.judge(c) for c in drawn(40, backend.device, seed=1)]
    assert [v.case.id for v in verdicts if v.outcome == "diverged"] == []
    assert sum(v.outcome == "agreed" for v in verdicts) > 20
    values = [t for v in verdicts if v.seen for t in v.seen.values.values() if t is not None]
    assert {t.device.type for t in values} == {"cpu"}


@pytest.mark.gpu
def test_one_wrong_bit_is_found() -> None:
    backend = _own()
    program = case(
        [x("x0", 3, 4), x("w1", 4, 2)],
        under(BF16, call("mm", "x0", "w1", to="v0"), call("relu", "v0", to="v1")),
        backward="inside",
    )
    assert judge_of(backend).judge(program).outcome == "agreed"
    found = judge_of(WrongKernel(backend, "mm")).judge(program).divergence
    assert found is not None
    assert found.kind == "bitwise"


@pytest.mark.gpu
def test_what_is_drawn_on_the_device_is_drawn_again() -> None:
    """The seed of a case is that of the device's generator too."""
    program = case([x("x0", 64)], call("native_dropout", "x0", 0.5, True, to="v0 v1"))
    first, second = _own().run([program, program])
    assert first.raised is None, first.raised
    assert all(torch.equal(first.values[n], second.values[n]) for n in first.values)


@pytest.mark.gpu
def test_too_large_a_tensor_is_no_finding() -> None:
    device = helpers.accelerator()
    module = torch.get_device_module(device)
    if not hasattr(module, "mem_get_info"):
        pytest.skip(f"torch.{device} does not say how much memory there is")
    with pytest.raises(accelerator.DeviceFailure, match="out of memory") as raised:
        _checked(
            device,
            lambda: torch.empty(8 * module.mem_get_info()[1], dtype=torch.int8, device=device),
        )
    assert raised.value.kind == "memory"


def _checked(device: str, function: object) -> None:
    try:
        function()  # type: ignore[operator]
    except Exception as error:
        accelerator.check(device, error)
        raise


_ASSERTS = """
import torch
from amp_fuzz.backends import accelerator

try:
    torch.zeros(2, device="cuda")[torch.tensor([5], device="cuda")].cpu()
except Exception as error:
    try:
        accelerator.check("cuda", error)
    except accelerator.DeviceFailure as failure:
        print(failure.kind)
"""
_LIMITS = """
import torch
from amp_fuzz.backends import accelerator

accelerator.bounded("cuda", 0.5)
torch.empty(2**28, dtype=torch.int8, device="cuda")
try:
    torch.empty(2**30, dtype=torch.int8, device="cuda")
except torch.OutOfMemoryError:
    print("limited")
"""


@pytest.mark.gpu
@pytest.mark.parametrize(("script", "said"), [(_ASSERTS, "lost"), (_LIMITS, "limited")])
def test_cuda_is_lost_by_an_assertion_and_limited_in_memory(script: str, said: str) -> None:
    if helpers.accelerator() != "cuda":
        pytest.skip("needs CUDA")
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120
    )
    assert said in done.stdout, done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("rung", ["aot_eager", "inductor"])
def test_a_compiled_program_agrees_and_a_wrong_one_is_found(rung: str) -> None:
    backend = backends().get(f"compile[{rung}]@{helpers.accelerator()}")
    if backend is None:
        pytest.skip("nothing compiles for this device")
    program = case(
        [x("x0", 8, 16), x("w1", 16, 4)],
        under(BF16, call("mm", "x0", "w1", to="v0"), call("softmax", "v0", -1, to="v1")),
        backward="inside",
    )
    verdict = judge_of(backend, shipped()).judge(program)
    assert verdict.outcome == "agreed", verdict.divergence
    assert verdict.unjudged == 0
    assert judge_of(WrongKernel(backend, "mm")).judge(program).outcome == "diverged"
