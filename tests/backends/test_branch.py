"""A branch that depends on data, in a function that a compiler inlines and that returns early."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from amp_fuzz.backends import Backend, backends
from amp_fuzz.backends.compile import CompileBackend
from amp_fuzz.backends.harness import quiet
from amp_fuzz.backends.source import program_source
from amp_fuzz.cases.case import Case, loads
from amp_fuzz.cases.program import (
    Autocast,
    Branch,
    Node,
    Region,
    Uncompiled,
    regions,
    transform,
)
from amp_fuzz.findings.minimize.bodies import regions as without_regions
from amp_fuzz.findings.repro.script import repro
from amp_fuzz.oracle import Divergence
from amp_fuzz.oracle.judge import Verdict
from amp_fuzz.upstream import shipped
from amp_fuzz.upstream.explain import judge_of
from tests.faults.corrupted import Seeded
from tests.faults.fault import patched
from tests.helpers import F16, brief, call, case, drawn, under, x

_ISLAND = under(Autocast(enabled=False), call("mm", "x0", "x1", to="v1"))
CALLEE = case(
    [x("x0", 8, 8), x("x1", 8, 8)],
    under(F16, call("mm", "x0", "x1"), under(Branch(), _ISLAND), call("mm", "v1", "x1", to="v2")),
    contexts=(),
    backward="none",
)
SOURCE = """\
def program(x0, x1):
    with autocast(device, dtype=torch.float16):
        v0 = torch.mm(x0, x1)
        def block0(x0, x1):
            with autocast(device, enabled=False):
                if decided(x0):
                    v1 = torch.mm(x0, x1)
                    return v1,
                v1 = torch.mm(x0, x1)
                return v1,
        v1, = block0(x0, x1)
        v2 = torch.mm(v1, x1)
    return v0, v1, v2
"""


def branches(of: Case) -> bool:
    """Return whether a case has such a branch."""
    return any(isinstance(context, Branch) for context in regions(of.program.body))


def judged(backend: Backend, of: Case) -> Verdict:
    """Return what is said of a case on a backend."""
    with quiet():
        return judge_of(backend, shipped(), "none").judge(of)


def test_it_is_a_function_that_returns_early_in_its_last_region() -> None:
    assert program_source(CALLEE.program) == SOURCE
    assert loads(CALLEE.json()) == CALLEE


def test_a_graph_breaks_there_and_the_case_agrees() -> None:
    with quiet():
        assert (CompileBackend("aot_eager").run([CALLEE])[0].graphs or 0) > 2
    assert judged(CompileBackend("aot_eager"), CALLEE).outcome == "agreed"


@contextmanager
def enabled_after_branches() -> Iterator[None]:
    """Let dynamo enter a context as an enabled one if a branch has ended the graph in it."""
    from torch._dynamo import symbolic_convert

    honest = symbolic_convert.ReenterWith

    def reenter(index: int, values: tuple[Any, ...] | None = None) -> Any:
        jumps = any(frame.function == "jump_graph_break" for frame in inspect.stack(0))
        if jumps and values and values[0] == "cpu":
            values = ("cpu", values[1], True, values[3])
        return honest(index, values)

    with patched(symbolic_convert, ReenterWith=reenter):
        yield


def test_a_context_that_is_lost_at_a_branch_diverges() -> None:
    broken = Seeded("eager", patches=enabled_after_branches)
    found = judged(broken, CALLEE).divergence
    assert found is not None
    assert (found.where, found.expected, found.observed) == ("v1", "float32", "float16")
    elsewhere = CALLEE.with_program(
        body=transform(CALLEE.program.body, region=lambda node, body: (_left(node, body),))
    )
    assert judged(broken, elsewhere).outcome == "agreed"


def _left(node: Region, body: tuple[Node, ...]) -> Region:
    """Return a region; a branch is a part that is left to eager."""
    return Region(Uncompiled() if isinstance(node.context, Branch) else node.context, body)


@pytest.mark.parametrize(
    "name", brief(["script", "trace", "export", "jax[jit]", "fake-cuda"], "fake-cuda", "export")
)
def test_what_cannot_branch_on_values_is_given_the_whole(name: str) -> None:
    assert not branches(backends()[name].fit(CALLEE))


def test_the_minimiser_takes_it_away() -> None:
    assert any(not branches(smaller) for smaller in without_regions(CALLEE))


def test_a_script_has_it(tmp_path: Path) -> None:
    finding = Divergence("dtype", "v1", "float32", "float16")
    text = repro(CALLEE, CompileBackend("eager"), finding)
    assert "def decided(x):" in text
    (tmp_path / "script.py").write_text(text)
    ran = subprocess.run([sys.executable, "-I", "script.py"], cwd=tmp_path, check=False)
    assert ran.returncode == 0  # both are float32


def test_programs_have_one_where_breaks_are_asked_for() -> None:
    made = [*drawn(80, breaks=1)]
    assert any(map(branches, made))
    for one in made:
        one.program.check()
    assert not any(map(branches, drawn(60)))
