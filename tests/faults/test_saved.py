"""What a saved program loses: faults that only a program that is saved and loaded meets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch

from amp_fuzz.backends import backends
from amp_fuzz.backends.harness import quiet
from amp_fuzz.cases.case import Case
from amp_fuzz.findings.minimize.plans import plans
from amp_fuzz.runs.engine import Settings, Task, draw
from amp_fuzz.upstream.explain import judge_of
from tests.faults.fault import patched
from tests.helpers import F16, call, case, under, x

_INPUTS = [x("x0", 6, 8), x("w1", 8, 6)]
_MM = call("mm", "x0", "w1")
_REGION = case(_INPUTS, under(F16, _MM), saved=True)
_PLAIN = case(_INPUTS, _MM, saved=True)


@contextmanager
def _regions_off() -> Iterator[None]:
    """Let the autocast regions of an exported program be disabled once it is loaded."""
    load = torch.export.load

    def loading(*args: Any, **how: Any) -> Any:
        made = load(*args, **how)
        for node in made.graph.nodes:
            if node.target is torch.ops.higher_order.wrap_with_autocast:
                node.args = (*node.args[:2], False, *node.args[3:])
        return made

    with patched(torch.export, load=loading):
        yield


@contextmanager
def _in_float32() -> Iterator[None]:
    """Let a program of TorchScript return float32 under autocast once it is loaded."""
    load: Callable[..., Any] = torch.jit.load

    def loading(*args: Any, **how: Any) -> Any:
        made = load(*args, **how)

        def program(*inputs: torch.Tensor) -> Any:
            outputs = made(*inputs)
            return [o.float() for o in outputs] if torch.is_autocast_enabled("cpu") else outputs

        return program

    with patched(torch.jit, load=loading):
        yield


_Fault = Callable[[], AbstractContextManager[None]]
_FAULTS: Mapping[str, tuple[_Fault, Case]] = {
    "export": (_regions_off, _REGION),
    "export[strict]": (_regions_off, _REGION.with_plan(contexts=())),
    "script": (_in_float32, _PLAIN),
    "script[freeze]": (_in_float32, _PLAIN),
    "trace": (_in_float32, _PLAIN),
    "trace[freeze]": (_in_float32, _PLAIN),
}


@pytest.mark.parametrize("backend", _FAULTS)
def test_a_program_that_loses_autocast_where_it_is_saved_is_found(backend: str) -> None:
    fault, one = _FAULTS[backend]
    judge = judge_of(backends()[backend], (), "none")
    one = judge.backend.fit(one)
    with quiet():
        honest = judge.judge(one)
        with fault():
            unsaved = judge.judge(one.with_plan(saved=False))
            found = judge.judge(one)
    assert (honest.outcome, unsaved.outcome) == ("agreed", "agreed")
    assert found.outcome == "diverged"
    assert found.divergence is not None
    assert (found.divergence.kind, found.divergence.where) == ("dtype", "v0")


@pytest.mark.parametrize(
    ("backend", "saved"),
    [
        ("export", True),
        ("export[decomposed]", True),
        ("export[strict]", True),
        ("script", True),
        ("trace[freeze]", True),
        ("trace[check]", False),
        ("eager-cpu", False),
        ("compile[aot_eager]", False),
    ],
)
def test_programs_are_saved_where_they_can_be(backend: str, saved: bool) -> None:
    """A module that is loaded has parameters of its own: a checked trace is not saved."""
    found = [one.plan.saved for one in draw(Task(backend, "all", (), 100, 1), Settings((backend,)))]
    assert (2 <= sum(found) <= 30) if saved else not any(found)


def test_a_trace_of_a_function_in_python_is_not_saved() -> None:
    python = case([x("x0", 2), x("x1", 2)], call("mul_function", "x0", "x1"), saved=True)
    assert not backends()["trace"].fit(python).plan.saved
    assert backends()["export"].fit(python).plan.saved


def test_a_script_saves_and_loads_the_program() -> None:
    for name, line in {
        "script": "reloaded(torch.jit, torch.jit.script(plain))",
        "trace[freeze]": "check_trace=False), inputs, [1], True)",
        "export": "exported(plain, inputs, False, saved=True)",
    }.items():
        text = backends()[name].source(_PLAIN)  # type: ignore[attr-defined]
        assert line in text
        assert line not in backends()[name].source(_PLAIN.with_plan(saved=False))  # type: ignore[attr-defined]


def test_the_minimiser_tries_the_program_that_is_not_saved() -> None:
    assert any(not smaller.plan.saved and smaller.plan.contexts for smaller in plans(_PLAIN))
