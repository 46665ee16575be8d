"""A weight that changes inside a context and is used through its old cast: the program is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp_fuzz
from amp_fuzz.backends import Backend
from amp_fuzz.backends.compile import CompileBackend
from amp_fuzz.backends.harness import Observation
from amp_fuzz.cases.case import Plan
from amp_fuzz.interfaces.check import CheckResult
from amp_fuzz.reference.state import here
from tests.check.faults import BrokenCompiler, kernels

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
AOT = "compile[aot_eager]"


class Twice(nn.Module):
    """A layer that is called before and after a change of its weight."""

    def __init__(self, change: Callable[[Tensor], Any]) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.layer = nn.Linear(4, 4, bias=False)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        self.change(self.layer.weight)
        z: Tensor = self.layer(x)
        return y + z


def _halve(w: Tensor) -> None:
    with torch.no_grad():
        w.mul_(0.5)


def _halve_data(w: Tensor) -> None:
    w.data.mul_(0.5)


def _assign(w: Tensor) -> None:
    w.data = w.detach() * 0.5


def _step(w: Tensor) -> None:
    w.grad = torch.ones_like(w)
    torch.optim.SGD([w], lr=0.5).step()


def _clear(w: Tensor) -> None:
    _halve(w)
    torch.clear_autocast_cache()


def _write_the_same(w: Tensor) -> None:
    with torch.no_grad():
        w.mul_(1.0)


def checked(change: Callable[[Tensor], Any], *on: str | Backend, **how: Any) -> CheckResult:
    return amp_fuzz.check(Twice(change), X, backends=on or ("eager-cpu",), store=None, **how)


def line(function: Callable[..., Any], after: int) -> str:
    return f"test_stale.py:{function.__code__.co_firstlineno + after}"


@pytest.mark.parametrize(
    ("change", "after"), [(_halve, 2), (_halve_data, 1), (_assign, 1), (_step, 2)]
)
def test_eager_agrees_and_a_note_has_both_lines(
    change: Callable[[Tensor], Any], after: int
) -> None:
    result = checked(change)
    assert result.ok, str(result)
    (note,) = result.notes
    changed, used = line(change, after), line(Twice.forward, 3)
    assert (note.kind, note.where) == ("stale-cast", used)
    assert note.message == (
        f"layer.weight changes at {changed} inside an autocast context, and {used} uses its cast "
        "from before"
    )
    assert "torch.clear_autocast_cache()" in note.advice


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("change", "how"),
    [
        (_write_the_same, {}),
        (_clear, {}),
        (_halve, {"autocast": {"dtype": "bfloat16", "cache_enabled": False}}),
        (_halve, {"autocast": None}),
    ],
    ids=["the same values", "cleared", "no cache", "no autocast"],
)
def test_each_remedy_ends_the_note(change: Callable[[Tensor], Any], how: dict[str, Any]) -> None:
    result = checked(change, **how)
    assert (result.ok, result.notes) == (True, ()), str(result)


@pytest.mark.thorough
def test_a_compiler_that_casts_again_does_not_diverge() -> None:
    result = checked(_halve, "eager-cpu", AOT)
    assert (result.verdict, result.ok) == ("stale", False), str(result)
    assert [run.status for run in result.runs] == ["agreed", "stale"]
    assert result.divergences == ()
    changed, used = line(_halve, 2), line(Twice.forward, 3)
    head, eager, compiler, *text = str(result).splitlines()
    assert head == "amp_fuzz.check of Twice, seed 0: DEPENDS ON THE WEIGHT CACHE"
    assert "agrees: 1 value" in eager
    assert compiler.endswith(
        "DEPENDS ON THE WEIGHT CACHE: it agrees if a weight is cast again after it changed"
    )
    assert text == [
        "  to do     Change the weight after the autocast context, call",
        "            torch.clear_autocast_cache() after the change, or give the context",
        "            cache_enabled=False.",
        "",
        "eager-cpu, bfloat16: note, stale-cast",
        f"  where     {used}",
        f"  what      layer.weight changes at {changed} inside an autocast context, and",
        f"            {used} uses its cast from before",
        "  next      Change the weight after the autocast context, call",
        "            torch.clear_autocast_cache() after the change, or give the context",
        "            cache_enabled=False.",
    ]


class Only(BrokenCompiler):
    """A compiler that is wrong only while autocast is around the call."""

    def called(self, function: Callable[..., Any], plan: Plan, call: Any) -> Observation:
        if not plan.contexts:
            return CompileBackend("aot_eager").called(function, plan, call)
        return BrokenCompiler.called(self, function, plan, call)


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "verdict"), [(Only, "diverges"), (BrokenCompiler, "stale")])
def test_a_compiler_that_is_wrong_beside_it_still_fails(
    kind: type[BrokenCompiler], verdict: str
) -> None:
    """Without autocast's doing it says nothing of the weight, which is told."""
    doubles = {"aten.add.Tensor": lambda op, *args, **how: op(*args, **how) * 2}
    result = checked(_halve, kind("aot_eager", patches=kernels(doubles)), seconds=0)
    assert result.verdict == verdict, str(result)


def test_an_eager_backend_that_casts_again_diverges() -> None:
    """Eager keeps the cast, as documented: one that does not has a bug."""

    def halve(w: Tensor) -> None:
        _halve(w)
        if not here().nesting:  # not under the reference
            torch.clear_autocast_cache()

    result = checked(halve, "eager-cpu", seconds=0)
    assert result.verdict == "diverges", str(result)
    assert [note.kind for note in result.notes] == ["stale-cast"]
