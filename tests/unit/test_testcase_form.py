"""Findings as PyTorch's unit tests: expected to fail where they are, skipped if none can tell."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import pytest

from amp_fuzz.backends import Backend, backends
from amp_fuzz.backends.harness import quiet
from amp_fuzz.cases.case import Case
from amp_fuzz.findings.known_tests import failing
from amp_fuzz.findings.repro.parts import Found
from amp_fuzz.findings.repro.script import TIMEOUT
from amp_fuzz.findings.repro.unit_tests import Method, method_of, unit_tests
from amp_fuzz.oracle import Divergence
from amp_fuzz.upstream import BUGS
from amp_fuzz.upstream.explain import judge_of
from tests.helpers import FAULT, Run, call, case, leading, runner, x

# Runs the tests of a file.
RUNNER = """
import importlib.util
import sys
import unittest
import torch, torch._dynamo, torch._subclasses.fake_tensor, torch._functorch.config
from torch.testing._internal.common_utils import TestCase


def run(path):
    spec = importlib.util.spec_from_file_location("test_form", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    suite = unittest.defaultTestLoader.loadTestsFromModule(module)
    ended = unittest.TextTestRunner(stream=sys.stdout, verbosity=2).run(suite)
    print("after:", torch.get_num_threads() == threads, torch.get_float32_matmul_precision(),
          torch._functorch.config.donated_buffer, len(torch.empty(1).tolist()))
    return not ended.wasSuccessful()


threads = torch.get_num_threads()
"""
RESTORED = "after: True highest True 1"
MM = case([x("x0", 2, 3), x("w1", 3, 2)], call("mm", "x0", "w1"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    with runner(RUNNER, tmp_path_factory.mktemp("form"), "test_form", {}) as run:
        yield run


def planned(**changes: Any) -> Case:
    return case([x("x0", 2, 3), x("w1", 3, 2)], call("mm", "x0", "w1"), **changes)


def method(kind: Any, where: str, case_: Case = MM, name: str = "eager-cpu", **more: Any) -> Method:
    expected = "no error" if kind == "raise" else "this"
    observed = "ValueError: seeded" if kind == "raise" else "that"
    finding = Divergence(kind, where, expected, observed)
    return method_of(case_, backends()[name], finding, **more)


def method_of_bug(name: str) -> Method:
    example = BUGS[name].examples[0]
    on: Backend = backends()[example.backend]
    with quiet():
        found: Found | None = judge_of(on, ()).judge(example.case).divergence
    assert found is not None
    return method_of(example.case, on, found, name=f"test_{name.replace('-', '_')}")


# -- one test -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "where", "body", "case_"),
    leading(
        [
            ("raise", "v0 = torch.mm(x0, w1)", "raise ValueError('seeded')", MM),
            ("dtype", "v0", "y = y.float()", MM),
            ("grad-bitwise", "w1.grad", "y = y * 2", MM),
            ("state", "after the case", "torch.autocast_increment_nesting()", MM),
            ("relation", "second call: call1.v0", "y = y + len(calls)", planned(calls=2)),
            ("nondeterminism", "v0", "y = y + len(calls)", MM),
            ("crash", "", "import os; os.abort()", MM),
        ],
        2,
    ),
)
def test_it_fails_as_expected_where_the_divergence_is(
    run: Run, kind: Any, where: str, body: str, case_: Case
) -> None:
    there = run(unit_tests([method(kind, where, case_, prefix=FAULT.format(body=body))]))
    assert there.code == 0, there
    assert "OK (expected failures=1)" in there.printed
    gone = run(unit_tests([method(kind, where, case_)]))
    assert gone.code == 1, gone
    assert "FAILED (unexpected successes=1)" in gone.printed


def test_it_reads_like_a_test_of_torch(run: Run) -> None:
    text = unit_tests([method_of_bug("compile-std")])
    assert text.startswith('# Owner(s): ["module: amp (automated mixed precision)"]\nimport unitte')
    assert "class TestAutocastFindings(TestCase):\n    def setUp(self):\n" in text
    assert "    @unittest.expectedFailure\n    def test_compile_std(self):\n" in text
    assert text.endswith('        self.assertLessEqual(away, 4.0)\n\n\nif __name__ == "__main__":\n'
                         "    run_tests()\n")  # fmt: skip
    assert not re.search(r"amp_fuzz|sys\.exit|print\(", text.replace("found by amp-fuzz", ""))


def test_it_leaves_torch_as_it_was(run: Run) -> None:
    setting = 'torch.set_float32_matmul_precision("medium")'.replace('"', "'")
    one = method("bitwise", "v0", planned(settings=(setting,)))
    assert setting in one.body
    two = method("grad-dtype", "w1.grad", planned(second="retain"), "compile[aot_eager]")
    assert "donated_buffer=False" in str(two.patches)
    for text in (unit_tests([one]), unit_tests([one, two], doc="Bugs.")):
        assert RESTORED in run(text).printed


# -- many -----------------------------------------------------------------------------------------


def test_another_error_cannot_tell(run: Run) -> None:
    text = unit_tests([method("dtype", "v0"), method("raise", "v0")], doc="Bugs.")
    text = text.replace("torch.mm(", "torch.no_such_op(")
    ended = run(text)
    assert ended.code == 0
    assert "OK (skipped=2)" in ended.printed
    assert "cannot tell: AttributeError: module 'torch' has no attribute" in ended.printed


@pytest.mark.parametrize(
    ("body", "why"),
    [("import os; os.abort()", "its process died"), ("import time; time.sleep(60)", "it hangs")],
)
def test_no_answer_cannot_tell(run: Run, body: str, why: str) -> None:
    fault = FAULT.format(body=body)
    text = unit_tests([method("dtype", "v0", prefix=fault), method("raise", "v0")], doc="Bugs.")
    ended = run(text.replace("ours.poll(600)", "ours.poll(2)"))
    assert f"skipped 'cannot tell: {why}'" in ended.printed
    assert "FAILED (skipped=1, unexpected successes=1)" in ended.printed


@pytest.mark.thorough
@pytest.mark.parametrize("marked", [True, False])
def test_a_hang_is_a_failure_where_that_is_the_finding(run: Run, marked: bool) -> None:
    fault = FAULT.format(body="import time; time.sleep(60)" if marked else "")
    text = unit_tests([method("timeout", "", prefix=fault)])
    ended = run(text.replace(f"timeout={TIMEOUT}", "timeout=10"))
    assert ended.code == (not marked), ended


@pytest.mark.thorough
def test_a_name_of_torch_may_get_another_meaning(run: Run) -> None:
    """FP8 regions have a checkpoint of their own, made of torch's."""
    one = method_of_bug("scaled-mm-autocast")
    assert "checkpoint = fp8_regions(" in one.body
    assert "OK (expected failures=1)" in run(unit_tests([one], doc="Bugs.")).printed


@pytest.mark.thorough
def test_only_tests_that_fail_as_expected_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")  # PyTorch's `run_tests` would write XML
    there = method("dtype", "v0", prefix=FAULT.format(body="y = y.float()"))
    gone = dataclasses.replace(method("dtype", "v0"), name="test_gone")
    assert failing(unit_tests([there, gone], doc="Bugs.")) == {there.name}


def test_what_one_leaves_behind_another_does_not_meet(run: Run) -> None:
    """Here the nesting depth."""
    leak = FAULT.format(body="torch.autocast_increment_nesting()")
    first = method("state", "after the case", prefix=leak)
    second = method("state", "after the case", planned(seed=1))
    ended = run(unit_tests([first, second], doc="Bugs."))
    assert "FAILED (expected failures=1, unexpected successes=1)" in ended.printed, ended


def test_a_script_in_a_test_gives_no_helper(run: Run) -> None:
    """Of a case that may kill its process, all is text."""
    first, second = method("crash", ""), method("grad-dtype", "w1.grad")
    assert "\ndef trains(" in first.helpers[1]
    ended = run(unit_tests([first, second], doc="Bugs."))
    assert "FAILED (unexpected successes=2)" in ended.printed, ended


def test_helpers_of_one_name_stay_apart(run: Run) -> None:
    first, second = method("bitwise", "v0"), method("bitwise", "v0", planned(seed=1))
    helper = "def differs(expected, observed):\n    return True\n"
    wrong = dataclasses.replace(second, name="test_other", helpers=(helper,))
    ended = run(unit_tests([first, wrong], doc="Bugs."))
    assert "FAILED (expected failures=1, unexpected successes=1)" in ended.printed, ended
