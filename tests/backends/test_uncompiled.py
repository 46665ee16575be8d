"""A part of a program that compilers leave to eager: `torch.compiler.disable` over a region."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from amp_fuzz.backends import backends
from amp_fuzz.backends.compile import CompileBackend
from amp_fuzz.backends.harness import quiet
from amp_fuzz.cases.case import Case
from amp_fuzz.cases.program import Autocast, Uncompiled, regions
from amp_fuzz.findings.minimize.bodies import regions as without_regions
from amp_fuzz.findings.repro.script import repro
from amp_fuzz.oracle import Divergence
from amp_fuzz.upstream import shipped
from amp_fuzz.upstream.explain import judge_of
from tests.helpers import F16, brief, call, case, drawn, under, x

_INPUTS = [x("x0", 3, 8), x("w1", 8, 8)]
_MM = call("mm", "x0", "w1")
_AGAIN, _LAST = call("mm", "v0", "w1", to="v1"), call("mm", "v1", "w1", to="v2")
MIDDLE = case(_INPUTS, under(F16, _MM, under(Uncompiled(), _AGAIN), _LAST), contexts=())


def left(of: Case) -> bool:
    """Return whether a case has a part that compilers leave to eager."""
    return any(isinstance(context, Uncompiled) for context in regions(of.program.body))


def test_a_graph_breaks_there_inside_a_context_and_the_case_agrees() -> None:
    backend = CompileBackend("aot_eager")
    plain = case(_INPUTS, under(F16, _MM, _AGAIN, _LAST), contexts=())
    with quiet():
        assert backend.run([MIDDLE])[0].graphs == 2
        assert backend.run([plain])[0].graphs == 1
        assert judge_of(backend, shipped(), "none").judge(MIDDLE).outcome == "agreed"


@pytest.mark.parametrize(
    "name", brief(["script", "trace", "jax[jit]", "torchax"], "script", "trace")
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


def test_gradients_of_several_graphs_need_a_compiler_that_is_told_of_their_context() -> None:
    assert CompileBackend("aot_eager").fit(MIDDLE).plan.backward == "outside"
    assert backends()["compile[aot_eager+default]"].fit(MIDDLE).plan.backward == "none"


def test_the_minimiser_takes_it_away() -> None:
    assert any(not left(smaller) for smaller in without_regions(MIDDLE))


@pytest.mark.parametrize(("name", "helped"), [("compile[eager]", True), ("eager-cpu", False)])
def test_a_script_has_it_only_for_a_compiler(name: str, helped: bool, tmp_path: Path) -> None:
    finding = Divergence("dtype", "v2", "float16", "float32")
    text = repro(MIDDLE, backends()[name], finding)
    assert ("@torch.compiler.disable\ndef uncompiled(" in text) == helped
    assert ("uncompiled(block0, " in text) == helped
    (tmp_path / "script.py").write_text(text)
    ran = subprocess.run([sys.executable, "-I", "script.py"], cwd=tmp_path, check=False)
    assert ran.returncode == 0  # both are float16


def test_programs_have_one_where_it_is_asked_for() -> None:
    made = [*drawn(60, breaks=1)]
    assert all(left(one) for one in made)
    for one in made:
        one.program.check()
    assert not any(left(one) for one in drawn(60))
