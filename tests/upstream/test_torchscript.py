"""What TorchScript's documented pass does is no divergence, and hides none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

from amp_fuzz.backends import backends, torchscript
from amp_fuzz.backends.base import Backend
from amp_fuzz.backends.harness import quiet
from amp_fuzz.backends.reference import ReferenceRuntime
from amp_fuzz.backends.torchscript import ScriptBackend
from amp_fuzz.backends.torchscript_autocast import Fallback
from amp_fuzz.cases.case import Case
from amp_fuzz.cases.program import Autocast, NoGrad
from amp_fuzz.oracle import compare
from amp_fuzz.oracle.verdict import Verdict
from amp_fuzz.upstream import quirks, shipped
from amp_fuzz.upstream.explain import judge_of
from tests.helpers import call, case, under, x

pytestmark = pytest.mark.thorough

SCRIPT = ScriptBackend("script")
OFF = Autocast(enabled=False)


def judge(backend: Backend, example: Case) -> Verdict:
    with quiet():
        return judge_of(backend, shipped()).judge(example)


@pytest.mark.parametrize("name", ["script[freeze]", "trace[freeze]"])
def test_a_fault_of_a_frozen_module_that_ran_before_is_seen(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one of the graph that is optimised; it goes where each call has a module of its own."""
    honest = torch.jit.freeze

    class Wrong:
        def __init__(self, *args: Any) -> None:
            self.module, self.calls = honest(*args), 0
            self.graph = self.module.graph

        def __call__(self, *args: Any) -> Any:
            self.calls += 1
            return tree_map(lambda v: v * 3 if self.calls > 2 else v, self.module(*args))

    frozen = backends()[name]
    example = case(
        [x("w0", 2), x("x1", 2)],
        call("type_as", "w0", "x1", form="method"),
        call("exp", "x1", to="v1"),
        contexts=(),
        backward="none",
    )
    assert judge(frozen, example).outcome == "agreed"
    monkeypatch.setattr(torch.jit, "freeze", Wrong)
    assert judge(frozen, example).outcome == "backend"


def test_nothing_falls_back_in_the_body_of_a_custom_op() -> None:
    """It is Python: no graph takes its addmm apart."""
    body = under(Autocast(dtype="bfloat16"), call("addmm", "x1", "x2", "w0"))
    inputs = [x("w0", 3, 3), x("x1", 3, dtype="bfloat16"), x("x2", 3, 3)]
    example = case(inputs, body, entry="register_autocast", backward="none")
    honest, ways = SCRIPT.reference().run(example), SCRIPT.reference().ways(example)
    assert ways is not None
    with ways(), quirks(["torchscript-autodiff", "torchscript-fallback"]):
        imitated = SCRIPT.reference().run(example)
    assert compare(honest, imitated) is None


def test_what_falls_back_and_is_cast_otherwise_is_not_explained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    body = call("mm", "x0", "w1"), call("div.scalar", "v0", -1.5, form="operator", to="v1")
    inputs = [x("x0", 2, 2), x("w1", 2, 2), x("w2", 2)]
    region = under(NoGrad(), under(OFF, *body))
    example = case(inputs, call("atan2", "w2", "w2", to="v2"), region)
    monkeypatch.setattr(
        "amp_fuzz.backends.torchscript.fallback_of", lambda *_: Fallback(frozenset({"v0"}))
    )
    assert judge(SCRIPT, example).outcome == "diverged"


def changed(patch: pytest.MonkeyPatch, label: str, times: float) -> None:
    """Have a value of the backend multiplied, under autocast."""
    honest = ScriptBackend.run

    def run(self: ScriptBackend, cases: Any) -> Any:
        made = honest(self, cases)
        for seen, one in zip(made, cases, strict=True):
            value = seen.values.get(label)
            if value is not None and one.plan.contexts:
                seen.values[label] = value * times
        return made

    patch.setattr(ScriptBackend, "run", run)


def doubted(patch: pytest.MonkeyPatch, label: str) -> None:
    """Have shadows say nothing of a value."""
    honest = ReferenceRuntime.shadowed

    def shadowed(self: ReferenceRuntime, *how: Any) -> Any:
        seen, bands = honest(self, *how)
        bands[label] = replace(bands[label], known=False)
        return seen, bands

    patch.setattr(ReferenceRuntime, "shadowed", shadowed)


BESIDE = case(
    [x("x0", 2, dtype="bfloat16", domain="integers"), x("w1", 2)],
    call("exp", "x0"),
    call("exp", "w1", to="v1"),
)


@pytest.mark.parametrize(("times", "outcome"), [(1 + 2.0**-22, "agreed"), (1.01, "diverged")])
def test_beside_the_casts_of_the_pass_a_rounding_is_none_and_a_fault_is_one(
    times: float, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What follows the pass is compared bit for bit, since no shadows can follow it."""
    assert judge(SCRIPT, BESIDE).outcome == "agreed"
    changed(monkeypatch, "w1.grad", times)
    assert judge(SCRIPT, BESIDE).outcome == outcome


def test_beside_the_casts_of_the_pass_what_shadows_do_not_know_is_compared_bit_for_bit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    doubted(monkeypatch, "w1.grad")
    assert judge(SCRIPT, BESIDE).outcome == "agreed"
    changed(monkeypatch, "w1.grad", 1 + 2.0**-22)
    assert judge(SCRIPT, BESIDE).outcome == "diverged"


def test_a_bug_without_autocast_does_not_stand_in_the_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The casts of the pass agree beside clamp's bounds, which lose their gradients anywhere."""
    example = case(
        [x("x0", 4, dtype="bfloat16"), x("w1", 4), x("x2", 4)],
        call("exp", "x0"),
        call("mul", "x2", "x2", to="v1"),
        call("clamp.Tensor", "v1", None, "w1", to="v2"),
    )
    assert judge(SCRIPT, example).outcome == "backend"
    monkeypatch.setattr("amp_fuzz.backends.torchscript.write_casts", lambda *_: None)
    assert judge(SCRIPT, example).outcome == "diverged"


def test_a_pass_that_is_wrong_is_not_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference casts exp; if torch's pass did not, or did otherwise, that would be new."""
    example = case([x("x0", 4, dtype="bfloat16")], call("exp", "x0"))
    monkeypatch.setattr("amp_fuzz.backends.torchscript.write_casts", lambda *_: None)
    assert judge(SCRIPT, example).outcome == "diverged"


def test_a_graph_that_is_wrong_without_autocast_too_does_not_agree(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The reference runs the same graph under the pass, so only the bare program tells."""
    honest = torchscript.script_source
    example = case([x("x0", 2, 2)], call("mm", "x0", "x0"), call("exp", "v0", to="v1"))
    assert judge(SCRIPT, example).outcome == "agreed"

    def wrong(*how: Any) -> str:
        return honest(*how).replace("torch.exp(", "torch.expm1(")

    monkeypatch.setattr(torchscript, "script_source", wrong)
    assert judge(SCRIPT, example).outcome == "backend"
