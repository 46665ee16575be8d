"""Real devices: late errors, lost devices and little memory are no findings, and cost one case.

The tests marked `gpu` run on the accelerator that torch sees. `make gpu` runs them, also on a
device on PrivateUse1.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from amp_fuzz.backends import Backend, accelerator, backends, privateuse1
from amp_fuzz.backends.harness import quiet
from amp_fuzz.cases.build import BF16, call, case, under, x
from amp_fuzz.cases.case import Case
from amp_fuzz.interfaces.cli import main
from amp_fuzz.records.schema import CaseRecord, DivergenceRecord, IncidentRecord
from amp_fuzz.records.store import Store
from amp_fuzz.upstream import shipped
from amp_fuzz.upstream.explain import judge_of
from tests import helpers
from tests.forks import forked
from tests.helpers import WrongKernel, drawn

pytestmark = pytest.mark.thorough

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
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=600
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


# -- a device that fails --------------------------------------------------------------------------

needs_device = pytest.mark.skipif(not privateuse1.supported(), reason="needs torch 2.10")


@dataclass(frozen=True)
class Outcome:
    """What a run of some cases came to."""

    code: int
    text: str
    records: list[object]

    def of(self, kind: type) -> list[Any]:
        return [record for record in self.records if isinstance(record, kind)]


@pytest.fixture
def ran(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Outcome]:
    """Return a function that runs cases, and one more, on the device of `fragile`."""

    def run(*cases: Case, more: Sequence[str] = ()) -> Outcome:
        (tmp_path / "cases").mkdir()
        for each in cases:
            (tmp_path / "cases" / f"{each.id}.json").write_bytes(each.json())
        root = str(Path(__file__).parents[2])
        environment = {k: v for k, v in os.environ.items() if not k.startswith("AMP_FUZZ_")}
        words = (
            *("run", "--device=fragile", "--plugins=tests.backends.fragile", "--corpus=cases"),
            *("--backends=eager-fragile", "--cases=1", "--ops=relu", "--workers=1", "--seed=1"),
        )
        done = forked(
            main,
            (*words, *more),
            folder=tmp_path,
            environment={**environment, "PYTHONPATH": root},
            files=tmp_path_factory.mktemp("outputs"),
            seconds=500,
        )
        store = Store(tmp_path / ".amp-fuzz")
        records = [r for name in store.runs() for r in store.records(name)]
        return Outcome(done.code, done.out + done.err, records)

    return run


def _chain(op: str, size: int, seed: int = 0) -> Case:
    calls = call(op, "x0", to="v0"), call("relu", "v0", to="v1"), call("cos", "v1", to="v2")
    return case([x("x0", size)], *calls, seed=seed)


@needs_device
def test_a_lost_device_costs_one_case_and_its_statement_is_named(
    ran: Callable[..., Outcome],
) -> None:
    bad, good = _chain("sin", 3), [_chain("exp", 4), _chain("sin", 5)]
    done = ran(bad, *good)
    assert done.code == 1, done.text
    (found,) = done.of(DivergenceRecord)
    assert (found.kind, found.op, found.case.id) == ("crash", "sin", bad.id)
    assert "fragile no longer works: RuntimeError: fragile error" in found.observed
    assert {c.id for c in good} <= {record.id for record in done.of(CaseRecord)}
    assert not done.of(IncidentRecord)


@needs_device
def test_memory_is_given_back_between_cases(ran: Callable[..., Outcome]) -> None:
    done = ran(*(_chain("exp", 8, seed) for seed in range(12)))
    assert done.code == 0, done.text
    assert len(done.of(CaseRecord)) == 13
    assert not done.of(IncidentRecord)


@needs_device
def test_too_little_memory_is_counted_and_is_no_finding(ran: Callable[..., Outcome]) -> None:
    large, small = _chain("exp", 5000), _chain("exp", 4)
    done = ran(large, small, more=("--memory=4",))
    assert done.code == 0, done.text
    assert not done.of(DivergenceRecord)
    (incident,) = done.of(IncidentRecord)
    assert (incident.kind, incident.case.id, incident.unjudged) == ("memory", large.id, True)
    # The device has more: it is shared.
    assert "fragile is out of memory" in incident.detail
    assert "its limit is 4.0 GiB" in incident.detail
    assert small.id in {record.id for record in done.of(CaseRecord)}
    assert "also when it ran alone, so it was not judged" in " ".join(done.text.split())
