"""A finding as a test fails where the divergence is, passes elsewhere, and leaves no trace."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from amp_fuzz.backends import Backend, backends
from amp_fuzz.backends.harness import quiet
from amp_fuzz.backends.privateuse1.module import supported
from amp_fuzz.cases.case import Case, Plan
from amp_fuzz.findings.repro.as_test import pytest_form
from amp_fuzz.findings.repro.parts import Found
from amp_fuzz.oracle import Divergence
from amp_fuzz.upstream import shipped
from amp_fuzz.upstream.explain import judge_of
from tests.helpers import BF16, F16, FAULT, Run, call, case, runner, under, x

# Runs pytest on a file.
RUNNER = """
import os
import pytest, torch, torch._dynamo, torch._subclasses.fake_tensor


def run(path):
    options = ["-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir=/"]
    return int(pytest.main([path, *options]))
"""


MM = case([x("x0", 2, 3), x("w1", 3, 2)], call("mm", "x0", "w1"))
NESTED = case(
    [x("x0", 2, 2), x("w1", 2, 2)],
    call("mm", "x0", "w1"),
    under(F16, call("mm", "x0", "w1", to="v1")),
    backward="none",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    environment = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PATH": "/usr/bin:/bin"}
    with runner(RUNNER, tmp_path_factory.mktemp("form"), "test_form", environment) as run:
        yield run


def planned(**changes: Any) -> Case:
    return case([x("x0", 2, 3), x("w1", 3, 2)], call("mm", "x0", "w1"), **changes)


def backend(name: str) -> Backend:
    return backends()[name]


def form(case_: Case, name: str, finding: Found | None = None, **options: str) -> str:
    on = backend(name)
    if finding is None:
        with quiet():
            finding = judge_of(on, shipped()).judge(case_).finding("")
    return pytest_form(case_, on, finding, **options)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "where", "body", "case_"),
    [
        ("raise", "v0 = torch.mm(x0, w1)", "raise ValueError('seeded')", MM),
        ("dtype", "v0", "y = y.float()", MM),
        ("grad-bitwise", "w1.grad", "y = y * 2", MM),
        ("state", "after the case", "torch.autocast_increment_nesting()", MM),
        ("relation", "second call: call1.v0", "y = y + len(calls)", planned(calls=2)),
        ("bitwise", "v0", "y = y * 1.01", MM),
        ("value", "v0", "y = y * 1.1", MM),
        ("nonfinite", "v0", "y = y / 0", MM),
        ("grad-missing", "w1.grad", "y = y.detach()", MM),
        ("nondeterminism", "v0", "y = y + len(calls)", MM),
        (
            "relation",
            "cache: v0",
            "y = y + torch.is_autocast_cache_enabled()",
            planned(backward="none"),
        ),
        (
            "relation",
            "transform: v0",
            "raise ValueError('seeded')",
            planned(transform="vmap_grad"),
        ),
        ("crash", "", "import os; os.abort()", MM),
    ],
)
def test_every_kind_fails_with_the_bug_and_passes_without(
    run: Run, kind: Any, where: str, body: str, case_: Case
) -> None:
    expected, observed = "this", "that"
    if body.startswith("raise"):
        expected, observed = "no error", "ValueError: seeded"
    finding = Divergence(kind, where, expected, observed)
    code, printed, _ = run(form(case_, "eager-cpu", finding))
    assert (code, "1 passed" in printed) == (0, True), printed
    code, printed, _ = run(form(case_, "eager-cpu", finding, prefix=FAULT.format(body=body)))
    assert (code, "1 failed" in printed) == (1, True), printed


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "case_"),
    [
        ("eager-cpu", NESTED),
        ("fake-cuda", planned(entry="custom_op", backward="none")),
        ("compile[aot_eager]", planned(entry="custom_op")),
        ("compile[aot_eager+default]", planned(entry="custom_op")),
    ],
)
def test_upstream_bugs_fail(run: Run, name: str, case_: Case) -> None:
    code, printed, _ = run(form(case_, name))
    assert (code, "1 failed" in printed, "AssertionError" in printed) == (1, True, True), printed


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["script", "trace", "export", "compile[aot_eager]", "fake-cuda"])
def test_honest_backends_pass(run: Run, name: str) -> None:
    finding = Divergence("dtype", "v0", "this", "that")
    code, printed, _ = run(form(MM, name, finding))
    assert (code, "1 passed" in printed) == (0, True), printed


@pytest.mark.thorough
@pytest.mark.skipif(not supported(), reason="needs torch 2.10")
def test_a_device_of_ours_is_installed_first(tmp_path: Path) -> None:
    """The test needs amp-fuzz then, which `run` hides."""
    text = form(MM, "privateuse1", Divergence("dtype", "v0", "this", "that"))
    (tmp_path / "test_it.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert (done.returncode, "1 passed" in done.stdout) == (0, True), done.stdout


LEAVES = """

def test_nothing_is_left():
    assert torch.get_num_threads() == 3
    assert torch.initial_seed() == 5
    assert type(torch.ones(1)) is torch.Tensor
    for name, value in {"backward_pass_autocast": "same_as_forward"}.items():
        assert getattr(torch._functorch.config, name, value) == value
"""


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["compile[aot_eager+default]", "fake-cuda"])
def test_nothing_is_left_behind(run: Run, name: str) -> None:
    prefix = "torch.set_num_threads(3)\ntorch.manual_seed(5)\nimport torch._functorch.config\n"
    text = form(MM, name, Divergence("dtype", "v0", "this", "that"), prefix=prefix)
    code, printed, _ = run(text + LEAVES)
    assert (code, "2 passed" in printed) == (0, True), printed


def test_a_string_of_a_case_stays_a_string() -> None:
    """A case file may come from anybody, and `amp-fuzz repro` runs the test that it writes."""
    (statement,) = MM.program.body
    odd = msgspec.structs.replace(statement, kwargs=(("reduction", "'''; boom(); r'''"),))
    made = MM.with_program(body=(odd,))
    text = form(made, "eager-cpu", Divergence("crash", "", "an answer", "SIGSEGV"))
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    assert "boom" not in map(ast.unparse, (node.func for node in calls))
    (script,) = (n.value for n in ast.parse(text).body if isinstance(n, ast.Assign))
    assert "'''; boom(); r'''" in {
        node.value
        for node in ast.walk(ast.parse(ast.literal_eval(script)))
        if isinstance(node, ast.Constant)
    }


def test_only_torch_and_pytest_are_imported() -> None:
    for name in ("eager-cpu", "fake-cuda", "compile[aot_eager]"):
        text = form(MM, name, Divergence("dtype", "v0", "this", "that"))
        nodes = ast.walk(ast.parse(text))
        names = {a.name for n in nodes if isinstance(n, ast.Import) for a in n.names}
        assert {n.partition(".")[0] for n in names} - sys.stdlib_module_names == {"pytest", "torch"}


@pytest.mark.thorough
def test_it_reads_like_a_handwritten_test() -> None:
    threads = torch.get_num_threads()
    plain = case(
        [x("x0", 2, 2), x("x1", 2, 2)],
        call("mm", "x0", "x1"),
        contexts=(BF16,),
        backward="none",
    )
    assert isinstance(plain.plan, Plan)
    text = form(plain, "eager-cpu", Divergence("dtype", "v0", "bfloat16", "float32"))
    assert (
        text
        == f"""\
# found by amp-fuzz 0.1.0, case {plain.id} on eager-cpu
# dtype: v0
# expected: bfloat16
# observed: float32
import pytest
import torch
from torch import autocast


@pytest.fixture
def as_before():
    \"""Leave torch as the test found it.\"""
    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        yield
    torch.set_num_threads(threads)


def test_mm_dtype_{plain.id[:8]}(as_before):
    device = "cpu"
    torch.set_num_threads({threads})

    x0 = torch.tensor([[-0.66681874, 0.7735588], [1.3836, -1.8026496]], dtype=torch.float32)
    x1 = torch.tensor([[0.07555825, -0.5473053], [-0.48715296, 0.97741425]], dtype=torch.float32)

    with autocast(device, dtype=torch.bfloat16):
        v0 = torch.mm(x0, x1)
        value = v0

    expected, observed = torch.bfloat16, value.dtype
    print("expected:", expected, "observed:", observed)
    assert observed == expected
"""
    )
