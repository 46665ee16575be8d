"""A case that `amp_fuzz.check` cuts out of a call may crash torch: not in the caller's process."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import amp_fuzz
from amp_fuzz.checking import locate
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
