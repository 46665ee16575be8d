"""The fixture `amp_check` and the marker on tests of a user's own, seen from a user's project."""

import os
import sys

import pytest

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.usefixtures("forking")

MODEL = """
import pytest
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(3, 3)
        torch.nn.init.constant_(self.inner.weight, 0.7)  # so that no result is 0
    def forward(self, x):
        return self.inner(x).relu()

X = torch.ones(2, 3)
"""

# A conftest that puts a wrong kernel over torch's own autocast kernel of linear.
FAULT = """
import torch
from torch._C import DispatchKey, DispatchKeySet, _ExcludeDispatchKeyGuard

library = torch.library.Library("aten", "IMPL")

def linear(x, w, b=None):
    with _ExcludeDispatchKeyGuard(DispatchKeySet(DispatchKey.AutocastCPU)):
        return torch.nn.functional.linear(x, w, b)  # no cast

library.impl("linear", linear, "AutocastCPU")
"""
QUIET = "ignore:(?s).*Overriding a previously registered kernel:UserWarning"


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    for name in [name for name in os.environ if name.startswith("AMP_FUZZ_")]:
        monkeypatch.delenv(name)
    return pytester


@pytest.mark.thorough
def test_the_fixture_checks_without_the_flag(project: pytest.Pytester) -> None:
    project.makepyfile(
        MODEL
        + """
def test_model(amp_check):
    result = amp_check(Model(), X)
    assert [run.backend for run in result.runs] == ["eager-cpu", "fake-cuda", "compile[aot_eager]"]

def test_of_mine():
    pass
"""
    )
    done = project.run(sys.executable, "-m", "pytest", "-W", "error")
    done.assert_outcomes(passed=2)
    assert not (project.path / ".amp-fuzz").exists()


@pytest.mark.thorough
def test_the_fixture_for_ops_fails_a_test_whose_op_breaks_a_contract(
    project: pytest.Pytester,
) -> None:
    project.makepyfile(
        """
import pytest
import torch

X = torch.ones(2, 3, requires_grad=True)

class Freed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.gain = 2
        return x * 2

    @staticmethod
    def backward(ctx, g):
        gain, ctx.gain = ctx.gain, None
        return g * gain

@pytest.mark.amp_fuzz(backends="eager-cpu")
class TestOps:
    def test_honest(self, amp_check_op):
        assert amp_check_op(torch.relu, X).form == "callable"

    def test_freed(self, amp_check_op):
        amp_check_op(Freed, X)

    @pytest.mark.amp_fuzz(contracts=["needs", "fake"])
    def test_others(self, amp_check_op):
        assert [c.name for c in amp_check_op(Freed, X).contracts] == ["needs", "fake"]

    @pytest.mark.amp_fuzz(backward=False)
    def test_option_of_the_other(self, amp_check_op):
        pass
"""
    )
    done = project.runpytest_subprocess()
    done.assert_outcomes(passed=2, failed=1, errors=1)
    done.stdout.fnmatch_lines_random(
        [
            "E *amp_fuzz.check_op of Freed, autograd.Function, seed 0: BREAKS retain (*",
            "*pytest.mark.amp_fuzz takes contracts, backends, *, by name, not backward",
        ]
    )


@pytest.mark.thorough
def test_options_and_the_marker_give_defaults(project: pytest.Pytester) -> None:
    project.makefile(".toml", **{"amp-fuzz": "backends = ['fake-xpu']\nseed = 7"})
    project.makepyfile(
        MODEL
        + """
def names(result):
    return {run.backend for run in result.runs}

def test_given(amp_check):
    result = amp_check(Model(), X)
    assert names(result) == {"fake-xpu"}
    assert result.seed == 7

@pytest.mark.amp_fuzz(backends=["fake-cuda", "fake-mps"], autocast=torch.float16)
class TestMarked:
    def test_class(self, amp_check):
        result = amp_check(Model(), X)
        assert names(result) == {"fake-cuda", "fake-mps"}
        assert {run.autocast for run in result.runs} == {"float16"}

    @pytest.mark.amp_fuzz(backends="eager-cpu")
    def test_nearest(self, amp_check):
        result = amp_check(Model(), X)
        assert names(result) == {"eager-cpu"}
        assert {run.autocast for run in result.runs} == {"float16"}

    def test_call(self, amp_check):
        assert names(amp_check(Model(), X, backends="fake-mtia")) == {"fake-mtia"}

def test_plain():
    pass
"""
    )
    project.runpytest_subprocess().assert_outcomes(passed=5)
    project.runpytest_subprocess("-m", "amp_fuzz").assert_outcomes(passed=3, deselected=2)
    done = project.runpytest_subprocess("--amp-fuzz-backends=fake-mtia", "-k", "test_given")
    done.assert_outcomes(failed=1, deselected=4)
    done.stdout.fnmatch_lines(
        ["amp-fuzz: off, --amp-fuzz-backends affects only the fixture amp_check: *"]
    )


def test_a_divergence_fails_the_test_and_is_kept(project: pytest.Pytester) -> None:
    project.makeconftest(FAULT)
    project.makepyfile(
        MODEL
        + """
@pytest.mark.amp_fuzz(backends="eager-cpu")
def test_model(amp_check):
    amp_check(Model(), X)
"""
    )
    done = project.runpytest_subprocess("-W", QUIET)
    done.assert_outcomes(failed=1)
    done.stdout.fnmatch_lines(
        [
            "*amp_fuzz.check of Model, seed 0: DIVERGES",
            "*eager-cpu, bfloat16: dtype at output",
            "*module    inner (Linear)",
            "*op        linear of float32, float32, float32, policy lower_precision_fp",
            "*next      amp-fuzz minimize *",
        ]
    )
    assert len(list((project.path / ".amp-fuzz/findings").glob("*.json"))) == 1
    assert "pytest_check.py" not in done.stdout.str()  # the fixture's own frame is hidden


@pytest.mark.thorough
def test_the_ops_of_a_plugin_are_there(project: pytest.Pytester) -> None:
    project.makepyfile(
        mine="""
import amp_fuzz
from amp_fuzz.catalogue import Call, out

@amp_fuzz.register_op("math.twice", function="torch.add", overload="aten::add.Tensor")
def _(g):
    x = g.tensor()
    return Call((x, x), out(x.shape, dtype=x.dtype))
""",
        test_mine="""
def test_registered(amp_check):
    from amp_fuzz.catalogue import CATALOGUE
    assert "math.twice" in CATALOGUE
""",
    )
    project.runpytest_subprocess("--amp-fuzz-plugins=mine").assert_outcomes(passed=1)
    done = project.runpytest_subprocess(
        "--amp-fuzz", "--amp-fuzz-plugins=mine", "--amp-fuzz-ops=math.twice",
        "--amp-fuzz-cases=5", "--amp-fuzz-backends=eager-cpu", "-k", "math",
    )  # fmt: skip
    done.stdout.fnmatch_lines(["amp-fuzz*"])
    assert done.parseoutcomes().get("passed", 0) >= 1


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("marker", "said"),
    [
        ("backend='eager-cpu'", "pytest.mark.amp_fuzz takes backends, autocast, *, not backend"),
        ("'eager-cpu'", "pytest.mark.amp_fuzz takes *, by name, not 'eager-cpu'"),
    ],
)
def test_a_marker_that_does_not_fit_is_an_error(
    project: pytest.Pytester, marker: str, said: str
) -> None:
    project.makepyfile(
        f"""
import pytest

@pytest.mark.amp_fuzz({marker})
def test_model(amp_check):
    pass
"""
    )
    done = project.runpytest_subprocess()
    done.assert_outcomes(errors=1)
    done.stdout.fnmatch_lines([f"*amp-fuzz: *::test_model: {said}"])


@pytest.mark.thorough
def test_outcomes_that_the_callable_raises_are_those_of_the_test(project: pytest.Pytester) -> None:
    project.makepyfile(
        MODEL
        + """
@pytest.mark.parametrize("how", [pytest.skip, pytest.fail, pytest.xfail])
def test_of(amp_check, how):
    amp_check(lambda x: how("needs a GPU"), X, backends="eager-cpu")
"""
    )
    done = project.runpytest_subprocess("-rsx")
    done.assert_outcomes(skipped=1, failed=1, xfailed=1)
    done.stdout.fnmatch_lines(["SKIPPED*needs a GPU", "XFAIL*needs a GPU"])


@pytest.mark.thorough
def test_amp_precision_fails_a_test_whose_model_loses_digits(project: pytest.Pytester) -> None:
    project.makepyfile(
        MODEL
        + """
def test_honest(amp_precision):
    assert amp_precision(Model(), X).verdict == "harmless"

def test_too_many_digits(amp_precision):
    amp_precision(Model(), X, digits=5, seconds=5)

@pytest.mark.amp_fuzz(digits=5, seconds=5)
class TestMarked:
    def test_too_many_digits(self, amp_precision):
        amp_precision(Model(), X)

    def test_fewer(self, amp_precision):
        result = amp_precision(Model(), X, digits=1)
        assert result.digits == 1

@pytest.mark.amp_fuzz(backends=["eager-cpu"])
def test_option_of_another(amp_precision):
    pass
"""
    )
    done = project.run(sys.executable, "-m", "pytest", "-W", "error", "--amp-fuzz-seed=3")
    done.assert_outcomes(passed=2, failed=2, errors=1)
    done.stdout.fnmatch_lines(
        [
            "*amp_fuzz.precision of Model, bfloat16 autocast on cpu: LOSES DIGITS*",
            "*harmed *output keeps * of 2.4 digits; 5.0 are asked*",
        ]
    )
    assert not (project.path / ".amp-fuzz").exists()
