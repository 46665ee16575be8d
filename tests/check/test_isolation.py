"""What `amp_fuzz.check` runs may crash torch, a case that it cuts out too: the caller lives."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import amp_fuzz
from amp_fuzz.checking import api, locate
from amp_fuzz.checking.apart import apart
from amp_fuzz.processes import unforkable
from tests.check.test_models import Broken, kernels

pytestmark = pytest.mark.skipif(bool(unforkable()), reason="needs forks")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what a check stores out of the repository."""
    monkeypatch.chdir(tmp_path)


def test_a_cut_out_case_that_crashes_torch_is_told_and_the_caller_lives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def dies(*args: Any) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)

    monkeypatch.setattr(locate, "_verdict", dies)
    wrong = Broken(patches=kernels({"aten.tanh.default": lambda op, x: op(x) * 2}))
    result = amp_fuzz.check(torch.tanh, torch.randn(3), backends=wrong)
    (run,) = result.runs
    assert run.status == "diverged"
    assert run.divergence is not None
    assert any("died of SIGSEGV" in note for note in run.divergence.notes), run.divergence.notes


def relu(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x)


def test_a_crash_under_a_backend_is_a_divergence_with_its_line() -> None:
    def dies(op: Any, x: torch.Tensor) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)

    wrong = Broken(patches=kernels({"aten.relu.default": dies}))
    result = amp_fuzz.check(relu, torch.randn(3), backends=[wrong, "fake-cuda"])
    crashed, other = result.runs
    assert (crashed.status, crashed.detail, other.status) == ("diverged", "crash", "agreed")
    found = crashed.divergence
    assert found is not None
    assert (found.kind, found.expected) == ("crash", "an answer")
    assert found.observed == "the process died of SIGSEGV"
    assert found.where.startswith("test_isolation.py:")
    assert (result.verdict, result.ok) == ("diverges", False)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT])
def test_a_crash_under_the_reference_too_cannot_be_judged(number: signal.Signals) -> None:
    def ends(x: torch.Tensor) -> torch.Tensor:
        os.kill(os.getpid(), number)
        return x

    result = amp_fuzz.check(ends, torch.randn(3), backends="eager-cpu")
    (run,) = result.runs
    assert (run.status, result.verdict) == ("raised", "unjudged")
    assert run.detail.startswith(f"the process died of {number.name}")
    assert run.detail.endswith("under the reference too")
    assert "it ends its process under the reference, too" in result.advice


def test_a_fork_is_this_process_or_it_is_not() -> None:
    called = []

    def noted(x: torch.Tensor) -> torch.Tensor:
        called.append(os.getpid())
        return torch.relu(x)

    assert amp_fuzz.check(noted, torch.randn(3), backends="eager-cpu")
    assert not called
    assert amp_fuzz.check(noted, torch.randn(3), backends="eager-cpu", isolate=False)
    assert {*called} == {os.getpid()}


def test_where_no_fork_is_safe_it_must_not_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "unforkable", lambda: "threads are about")
    with pytest.raises(amp_fuzz.CheckError, match=r"^isolate=True: threads are about$"):
        amp_fuzz.check(torch.relu, torch.randn(3), backends="eager-cpu", isolate=True)
    assert amp_fuzz.check(torch.relu, torch.randn(3), backends="eager-cpu")


class Awkward(Exception):
    """Cannot be made again of what it keeps."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def test_an_error_in_a_fork_comes_with_its_traceback() -> None:
    def wrong(error: Exception) -> None:
        raise error

    with pytest.raises(KeyError) as told:
        apart(wrong, KeyError("a"))
    assert "in wrong" in str(told.value.__cause__)
    with pytest.raises(RuntimeError, match="Awkward: 1 and 2"):
        apart(wrong, Awkward(1, 2))
