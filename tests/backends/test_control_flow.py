"""Higher-order ops: `torch.cond`, loops and scans run their body under the autocast of the call."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from amp_fuzz.backends import Backend, backends
from amp_fuzz.backends.compile import CompileBackend
from amp_fuzz.backends.harness import quiet
from amp_fuzz.cases.build import BF16, F16
from amp_fuzz.cases.case import Case
from amp_fuzz.cases.program import DType, statements
from amp_fuzz.catalogue import select
from amp_fuzz.findings.repro.script import repro
from amp_fuzz.oracle import Divergence
from amp_fuzz.oracle.judge import Verdict
from amp_fuzz.oracle.trial import Trial
from amp_fuzz.patching import patched
from amp_fuzz.upstream import shipped
from amp_fuzz.upstream.explain import judge_of
from tests.faults.corrupted import Seeded
from tests.helpers import brief, call, case, needs_torch, x

_SQUARE, _STACK = x("w0", 3, 3), x("w1", 3, 3, 3)
PLAIN = {
    "cond_mm": case([x("x0", 2, 3), x("w1", 3, 4)], call("cond_mm", "x0", "w1", False)),
    "map_mm": case([x("x0", 3, 2, 3), _STACK], call("map_mm", "x0", "w1", False)),
    "while_mm": case([_SQUARE], call("while_mm", "w0", False)),
    "scan_mm": case([_SQUARE, _STACK], call("scan_mm", "w0", "w1", False, to="v0 v1")),
    "associative_scan_mm": case([_STACK], call("associative_scan_mm", "w1", False)),
}


@pytest.fixture(autouse=True)
def _versions() -> None:
    needs_torch(">=2.9")


def judged(backend: Backend, of: Case) -> Verdict:
    """Return what is said of a case on a backend."""
    with quiet():
        return judge_of(backend, shipped(), "none").judge(of)


@contextmanager
def uncast() -> Iterator[None]:
    """Run the branches of `torch.cond` without autocast."""
    with patched(torch, "cond", torch.autocast("cpu", enabled=False)(torch.cond)):
        yield


@pytest.mark.parametrize("name", brief(PLAIN, "cond_mm"))
def test_a_body_runs_under_the_autocast_around_the_call(name: str) -> None:
    for rung in ("eager", "aot_eager"):
        assert judged(CompileBackend(rung), PLAIN[name]).outcome == "agreed"


def test_a_body_that_has_lost_autocast_diverges() -> None:
    found = judged(Seeded("eager", patches=uncast), PLAIN["cond_mm"]).divergence
    assert found is not None
    assert (found.kind, found.expected, found.observed) == ("dtype", "bfloat16", "float32")


@pytest.mark.parametrize("name", ["eager-cpu", "fake-cuda", "script", "trace", "torchax"])
def test_what_does_not_compile_is_given_none(name: str) -> None:
    backend = backends()[name]
    assert not any(backend.supports(op.name, "function") for op in select(["control_flow"]))


def test_a_script_calls_torchs_own(tmp_path: Path) -> None:
    found = Divergence("dtype", "v0", "bfloat16", "float32")
    path = tmp_path / "repro.py"
    path.write_text(repro(PLAIN["while_mm"], CompileBackend("eager"), found))
    assert "from torch._higher_order_ops.while_loop import while_loop\n" in path.read_text()
    ran = subprocess.run([sys.executable, path], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("name", brief(PLAIN, "scan_mm"))
def test_the_explicit_program_casts_in_the_body(name: str) -> None:
    made = Trial.of(PLAIN[name], CompileBackend("eager")).explicit()
    assert made is not None
    assert not made.kept
    (only,) = statements(made.case.program.body)
    assert only.kwargs == (("dtype", DType("bfloat16")),)


@contextmanager
def doubled() -> Iterator[None]:
    """Double what `torch.cond` returns."""
    honest = torch.cond
    with patched(torch, "cond", lambda *args: 2 * honest(*args)):
        yield


def test_a_body_that_is_wrong_without_autocast_too_is_the_backends_own() -> None:
    assert judged(Seeded("eager", patches=doubled), PLAIN["cond_mm"]).outcome == "backend"


def test_two_bugs_that_go_with_two_parts_of_torch_are_explained_together() -> None:
    scan = call("scan_mm", "w0", "w1", True, to="v0 v1")
    both = case([_SQUARE, _STACK], call("mm", "w0", "w0", to="v2"), scan, contexts=(F16,))
    both = both.with_plan(later=((BF16,),), reuse="region")
    verdict = judged(CompileBackend("aot_eager"), both)
    assert set(verdict.known.split("+")) == {"compile-body-island", "compile-region-state"}
