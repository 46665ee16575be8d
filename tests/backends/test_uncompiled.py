"""A part of a program that compilers leave to eager: `torch.compiler.disable` over a region."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from amp_fuzz.backends import backends
from amp_fuzz.backends.compile import CompileBackend
from amp_fuzz.backends.harness import quiet
from amp_fuzz.cases.case import Case, loads
from amp_fuzz.cases.program import (
    Autocast,
    AutocastDType,
    Branch,
    Checkpoint,
    Node,
    Ref,
    Region,
    Statement,
    Uncompiled,
    regions,
    statements,
)
from amp_fuzz.catalogue import CATALOGUE
from amp_fuzz.findings.minimize.bodies import regions as without_regions
from amp_fuzz.findings.repro.issue import _program
from amp_fuzz.findings.repro.script import repro
from amp_fuzz.oracle import Divergence
from amp_fuzz.policies.tables import load_table
from amp_fuzz.upstream import shipped
from amp_fuzz.upstream.explain import judge_of
from tests.helpers import F16, brief, call, case, drawn, leading, under, x

_INPUTS = [x("x0", 3, 8), x("w1", 8, 8)]
_MM = call("mm", "x0", "w1")
_PINV, _THEN = call("linalg.pinv", "x0"), call("linalg.pinv", "v0", to="v1")
_OTHER = call("linalg.pinv", "x0", to="v3")
_AGAIN, _LAST = call("mm", "v0", "w1", to="v1"), call("mm", "v1", "w1", to="v2")
MIDDLE = case(_INPUTS, under(F16, _MM, under(Uncompiled(), _AGAIN), _LAST), contexts=())


def left(of: Case) -> bool:
    """Return whether a case has a part that compilers leave to eager."""
    return any(isinstance(context, Uncompiled) for context in regions(of.program.body))


def has_island(of: Case) -> bool:
    """Return whether a part of a program is without autocast."""
    contexts = regions(of.program.body)
    return any(isinstance(c, Autocast) and not c.enabled and not c.dtype for c in contexts)


def test_a_graph_breaks_there_inside_a_context_and_the_case_agrees() -> None:
    backend = CompileBackend("aot_eager")
    plain = case(_INPUTS, under(F16, _MM, _AGAIN, _LAST), contexts=())
    with quiet():
        assert backend.run([MIDDLE])[0].graphs == 2
        assert backend.run([plain])[0].graphs == 1
        assert judge_of(backend, shipped(), "none").judge(MIDDLE).outcome == "agreed"


@pytest.mark.parametrize(
    "name", brief(["script", "trace", "export", "jax[jit]", "torchax"], "script", "export")
)
def test_other_backends_are_given_the_whole(name: str) -> None:
    assert not left(backends()[name].fit(MIDDLE))


def test_compilers_are_given_no_break_where_they_take_none() -> None:
    """In nested regions and in custom ops, which are whole graphs or in none."""
    backend = CompileBackend("aot_eager")
    assert left(backend.fit(MIDDLE))
    nested = MIDDLE.with_plan(later=((Autocast(enabled=False),),), reuse="region")
    assert not left(backend.fit(nested))
    assert not left(backend.fit(MIDDLE.with_plan(entry="custom_op")))
    default = MIDDLE.with_plan(later=((AutocastDType("float16"),),))
    assert not left(backend.fit(default))


def test_gradients_of_several_graphs_need_a_compiler_that_is_told_of_their_context() -> None:
    assert CompileBackend("aot_eager").fit(MIDDLE).plan.backward == "outside"
    untold = backends()["compile[aot_eager+default]"]
    assert untold.fit(MIDDLE).plan.backward == "none"
    for one in drawn(200, breaks=1):
        fitted = untold.fit(one)
        assert loads(fitted.json()) == fitted


def test_the_minimiser_takes_it_away() -> None:
    assert any(not left(smaller) for smaller in without_regions(MIDDLE))


@pytest.mark.parametrize(
    ("plan", "body"),
    leading(
        [
            ({"steps": 2, "loop": "inside"}, [_MM, under(Uncompiled(), _AGAIN), _LAST]),
            ({"steps": 2, "loop": "inside"}, [_MM, under(Branch(), _AGAIN), _LAST]),
            ({"backward": "none"}, [_PINV, under(Uncompiled(), _THEN)]),
            ({"backward": "none"}, [under(Uncompiled(), _PINV), _THEN]),
            (
                {"backward": "none"},
                [_PINV, under(Checkpoint(), _AGAIN, under(Uncompiled(), _LAST), _OTHER)],
            ),
        ]
    ),
)
def test_a_known_bug_of_compiled_code_is_none_of_the_rest(plan: Any, body: list[Any]) -> None:
    """Here the weight cache between two steps, and what the kernel of pinv calls."""
    broken = case([x("x0", 8, 8), x("w1", 8, 8)], *body, **plan)
    with quiet():
        found = judge_of(CompileBackend("aot_eager"), shipped(), "none").judge(broken)
    assert found.outcome in ("agreed", "known", "raised"), found  # pinv raises in eager


@pytest.mark.parametrize(("name", "helped"), [("compile[eager]", True), ("eager-cpu", False)])
def test_a_script_has_it_only_for_a_compiler(name: str, helped: bool, tmp_path: Path) -> None:
    finding = Divergence("dtype", "v2", "float16", "float32")
    text = repro(MIDDLE, backends()[name], finding)
    assert ("@torch.compiler.disable\ndef uncompiled(" in text) == helped
    assert ("uncompiled(block0, " in text) == helped
    assert ("\n\n\n@torch" in text) == helped
    (tmp_path / "script.py").write_text(text)
    ran = subprocess.run([sys.executable, "-I", "script.py"], cwd=tmp_path, check=False)
    assert ran.returncode == 0  # both are float16


@pytest.mark.parametrize(("name", "told"), [("compile[eager]", True), ("eager-cpu", False)])
def test_an_issue_says_what_is_left_to_eager(name: str, told: bool) -> None:
    text = "\n".join(_program(MIDDLE, backends()[name]))
    assert ("uncompiled(block0, " in text) == ("torch.compiler.disable" in text) == told


def test_programs_may_have_what_autocast_lowers() -> None:
    table = load_table("cpu")
    low = {name for name, rule in table.rules.items() if rule.policy.value == "lower_precision_fp"}

    def lowered(many: Iterable[Case]) -> int:
        ops = [
            {o for s in statements(c.program.body) for o in CATALOGUE[s.op].overloads} for c in many
        ]
        return sum(any(o.removeprefix("aten::") in low for o in found) for found in ops)

    assert lowered(drawn(100, lowers=True)) > lowered(drawn(100)) + 20


def test_programs_have_one_where_it_is_asked_for() -> None:
    made = [*drawn(60, breaks=1)]
    assert all(left(one) for one in made)
    for one in made:
        one.program.check()
    assert not any(left(one) for one in drawn(60))


def test_programs_for_compilers_have_islands_and_ways_to_enter_where_others_are_transformed() -> (
    None
):
    made, others = [*drawn(300, breaks=6)], [*drawn(300)]
    assert {one.plan.transform for one in made} == {"none"} < {one.plan.transform for one in others}
    entered = [sum(one.plan.entry != "context" for one in many) for many in (made, others)]
    assert entered[0] > entered[1]
    around = [one for one in made if one.plan.backward in ("inside", "under")]
    assert sum(has_island(one) for one in around) > len(around) / 3


def test_a_layer_without_autocast_is_first_or_last_where_its_gradients_are_cast() -> None:
    made = [one for one in drawn(300, breaks=6) if one.plan.backward in ("inside", "under")]
    first, last = ([_is_layer(one.program.body[i]) for one in made] for i in (0, -1))
    assert any(first)
    assert any(last)
    assert sum(map(any, zip(first, last, strict=True))) > len(made) / 4


def _is_layer(node: Node) -> bool:
    """Return whether a node is one product of an input and a weight, without autocast."""
    if not isinstance(node, Region) or not isinstance(node.body[0], Statement):
        return False
    one = node.body[0]
    names = [arg.name for arg in one.args if isinstance(arg, Ref)]
    kinds = [name[0] for name in names]
    return one.op == "mm" and kinds == ["x", "w"] and node.context == Autocast(enabled=False)
