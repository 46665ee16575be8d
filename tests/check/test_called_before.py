"""A compiled callable is called under another autocast first, and that call leaves nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp_fuzz
from amp_fuzz import CheckResult
from amp_fuzz.backends.compile import CompileBackend
from amp_fuzz.upstream import shipped
from amp_fuzz.upstream.explain import judge_of
from tests.check.faults import kernels
from tests.faults.compiled import COMPILED
from tests.faults.corrupted import Seeded
from tests.faults.fault import patched
from tests.helpers import leading

AOT = "compile[aot_eager]"
X = torch.arange(64.0).reshape(8, 8) / 7


@dataclass(frozen=True)
class Region(CompileBackend):
    """A rung whose compiled code runs under the autocast of its first call."""

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        made = CompileBackend.compiled(self, function)
        first: list[torch.autocast] = []

        def region(*args: Any, **kwargs: Any) -> Any:
            dtype, on = torch.get_autocast_dtype("cpu"), torch.is_autocast_enabled("cpu")
            first.append(torch.autocast("cpu", dtype=dtype, enabled=on))
            with first[0]:
                return made(*args, **kwargs)

        return region

    def ladder(self) -> list[Any]:
        return [Region(r.rung) for r in CompileBackend.ladder(self)]  # type: ignore[attr-defined]


@contextmanager
def _first_default() -> Iterator[None]:
    """Let compiled contexts without a dtype have the one that the first of them had."""
    from torch._dynamo.variables.ctx_manager import AutocastModeVariable

    honest, found = AutocastModeVariable.create, list[torch.dtype]()

    def create(*args: Any) -> Any:
        made = honest(*args)
        device, dtype, *rest = made.target_values
        if dtype is None:
            found.append(torch.get_autocast_dtype(device))
            made.target_values = [device, found[0], *rest]
        return made

    with patched(AutocastModeVariable, create=staticmethod(create)):
        yield


FORGETFUL = Seeded("aot_eager", patches=COMPILED["guards-forget"].corrupt)


def checked(function: Callable[..., Any], backend: Any = AOT, **how: Any) -> CheckResult:
    return amp_fuzz.check(function, X, backends=[backend], **{"store": None, **how})


def _region(x: Tensor) -> Tensor:
    with torch.autocast("cpu"):
        return x @ x


def test_an_honest_compiler_agrees_and_makes_one_graph_a_call() -> None:
    result = checked(nn.Linear(8, 8), autocast=[torch.bfloat16, torch.float16, {"enabled": False}])
    assert result.ok, str(result)
    assert all(run.detail.endswith(", 1 graph") for run in result.runs)
    result = checked(_region, autocast=None)
    assert result.ok, str(result)


@pytest.mark.parametrize(
    ("autocast", "after"),
    leading(
        [
            (torch.bfloat16, "float16"),
            (torch.float16, "bfloat16"),
            ({}, "float16"),
            ({"enabled": False}, "float16"),
            (None, "float16"),
        ]
    ),
)
def test_guards_that_forget_autocast_are_found(autocast: Any, after: str) -> None:
    result = checked(nn.Linear(8, 8), FORGETFUL, autocast=autocast, seconds=0)
    assert result.verdict == "diverges", str(result)
    (found,) = result.divergences
    assert (found.kind, found.where, found.after) == ("dtype", "output", after)
    assert found.observed == after


@pytest.mark.thorough
def test_the_place_and_a_case_are_told(tmp_path: Path) -> None:
    model = nn.Sequential(nn.ReLU(), nn.Linear(8, 8))
    result = checked(model, FORGETFUL, store=tmp_path)
    (found,) = result.divergences
    assert (found.module, found.op, found.stage) == ("1", "linear", AOT)
    assert found.case is not None
    assert str(found.case.plan.contexts[0].dtype) == "float16"
    told = judge_of(FORGETFUL, shipped(), "none").judge(found.case)
    assert told.outcome == "diverged"
    head, line, *_ = str(result).splitlines()
    assert head.endswith("DIVERGES")
    assert line.endswith("DIVERGES: dtype, only after a call under float16")
    assert str(found).splitlines()[:6] == [
        "compile[aot_eager], bfloat16: dtype at output",
        "  expected  bfloat16",
        "  observed  float16",
        "  only      after a call under float16: that call's compiled code, or something else",
        "            that it left, is used. Compiled anew, it agrees.",
        "  module    1 (Linear)",
    ]


@pytest.mark.thorough
def test_a_context_that_keeps_its_first_default_is_found() -> None:
    wrong = Seeded("aot_eager", patches=_first_default)
    for autocast in (None, torch.bfloat16):
        (found,) = checked(_region, wrong, autocast=autocast, seconds=0).divergences
        assert (found.kind, found.after, found.observed) == ("dtype", "float16", "float16")


@pytest.mark.thorough
def test_a_region_that_keeps_the_state_of_its_first_call_is_found() -> None:
    (found,) = checked(nn.Linear(8, 8), Region("aot_eager")).divergences
    assert (found.kind, found.after, found.op) == ("dtype", "float16", "linear")
    assert found.stage == "compile[eager]"


@pytest.mark.thorough
def test_what_is_wrong_anyway_is_told_as_without_the_earlier_call() -> None:
    doubles = {"aten.relu.default": lambda op, *args: op(*args) * 2}
    both = COMPILED["guards-forget"].corrupt

    @contextmanager
    def patches() -> Iterator[None]:
        with both(), kernels(doubles)():
            yield

    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    alone = checked(model, Seeded("aot_eager", patches=kernels(doubles)))
    assert [run.status for run in alone.runs] == ["backend"]  # without autocast too
    assert str(checked(model, Seeded("aot_eager", patches=patches))) == str(alone)


def test_an_earlier_call_that_raises_says_nothing() -> None:
    class Picky(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if torch.get_autocast_dtype("cpu") is torch.float16:
                raise ValueError("not in float16")
            return x @ x

    result = checked(Picky())
    assert result.ok, str(result)
    assert "1 graph" in result.runs[0].detail


@pytest.mark.thorough
def test_state_is_restored_between_the_two_calls() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(8)
            self.seen: list[torch.dtype] = []

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(nn.functional.dropout(x @ x))
            self.seen.append(y.dtype)
            return y * len(self.seen)

    result = checked(Counting())
    assert result.ok, str(result)


def test_other_backends_are_called_once() -> None:
    calls: list[bool] = []

    def counted(x: Tensor) -> Tensor:
        calls.append(torch.get_autocast_dtype("cpu") is torch.float16)
        return x @ x

    assert checked(counted, "eager-cpu", isolate=False).ok
    assert not any(calls)


@dataclass(frozen=True)
class Deadly(CompileBackend):
    """A rung that kills its process at the second call of what it compiled, or under float16."""

    when: str = "second"

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        made, calls = CompileBackend.compiled(self, function), list[torch.dtype]()

        def deadly(*args: Any, **kwargs: Any) -> Any:
            calls.append(torch.get_autocast_dtype("cpu"))
            if len(calls) == 2 if self.when == "second" else calls[-1] is torch.float16:
                os.kill(os.getpid(), signal.SIGSEGV)
            return made(*args, **kwargs)

        return deadly


@pytest.mark.thorough
def test_a_second_call_that_kills_the_process_is_a_crash_after_the_first() -> None:
    result = checked(nn.Linear(8, 8), Deadly("eager"))
    (found,) = result.divergences
    assert (found.kind, found.after) == ("crash", "float16")
    assert "DIVERGES: crash, only after a call under float16" in str(result)
    assert "Compile the code named below once" in result.advice


@pytest.mark.thorough
def test_an_earlier_call_that_kills_the_process_says_nothing() -> None:
    result = checked(nn.Linear(8, 8), Deadly("eager", when="float16"))
    assert result.ok, str(result)
