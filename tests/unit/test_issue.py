"""What the text of an issue says of each kind of divergence, on each kind of backend."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch

from amp_fuzz.backends import backends
from amp_fuzz.cases.case import Case
from amp_fuzz.findings.diagnosis import Examined, _eager
from amp_fuzz.findings.repro.issue import issue, title
from amp_fuzz.oracle.judge import Judge
from amp_fuzz.policies.tables import Policy
from amp_fuzz.records.schema import DivergenceRecord
from amp_fuzz.upstream.known import Known
from tests.helpers import F16, call, case, under, x

MM = case([x("x0", 2, 3), x("w1", 3, 2)], call("mm", "x0", "w1"))
NESTED = case([x("x0", 2, 2)], call("mm", "x0", "x0"), under(F16, call("exp", "x0", to="v1")))


def record(kind: str, case_: Case = MM, **fields: Any) -> DivergenceRecord:
    filled = {"where": "v0", "op": "mm", "policy": "lower_precision_fp", "dtypes": "float32"}
    filled |= {"backend": "eager-cpu", "expected": "this", "observed": "that", "known": ""}
    return DivergenceRecord(kind=kind, case=case_, **(filled | fields))


def said(kind: str, backend: str = "eager-cpu", case_: Case = MM, **fields: Any) -> str:
    return title(case_, backends()[backend], record(kind, case_, backend=backend, **fields))


@pytest.mark.parametrize(
    ("kind", "expected", "observed", "wanted"),
    [
        ("dtype", "bfloat16", "float32", "result is float32, not bfloat16"),
        ("shape", "[2, 2]", "[4]", "shape of the result is [4], not [2, 2]"),
        ("bitwise", "1.0", "2.0", "values of the result differ from documented behaviour"),
        (
            "nonfinite",
            "1",
            "nan",
            "NaN or infinities of the result differ from documented behaviour",
        ),
        ("grad-dtype", "float32", "float16", "gradient is float16, not float32"),
        ("grad-missing", "float32[2]", "None", "no gradient"),
        ("grad-missing", "None", "float32[2]", "unexpected gradient"),
        ("raise", "no error", "RuntimeError: no", "raises RuntimeError"),
        ("raise", "RuntimeError: no", "no error", "raises no error, but must raise RuntimeError"),
        ("raise", "TypeError: a", "RuntimeError: b", "raises RuntimeError, not TypeError"),
        ("state", "state as before", "nesting: 0", "leaves autocast's state changed"),
        ("nondeterminism", "1", "2", "differs from run to run"),
        ("relation", "1", "2", "two equivalent ways differ (v0)"),
        ("crash", "an answer", "the process died of SIGSEGV", "the process died of SIGSEGV"),
        ("timeout", "an answer", "no answer for 4 s", "hangs (no answer for 4 s)"),
    ],
)
def test_titles(kind: str, expected: str, observed: str, wanted: str) -> None:
    text = said(kind, expected=expected, observed=observed)
    assert text.startswith(f"[amp, cpu] torch.mm(x0, w1): {wanted}")


@pytest.mark.parametrize(
    ("backend", "stage", "wanted"),
    [
        ("fake-cuda", "", "[amp, cuda] torch.mm(x0, w1): result is"),
        ("compile[inductor]", "compile[aot_eager]", "[torch.compile, aot_eager] torch.mm(x0, w1)"),
        ("compile[inductor+dynamic]", "compile[inductor+dynamic]", "[torch.compile, inductor] "),
        ("export", "", "[torch.export] torch.mm(x0, w1)"),
        ("trace[freeze]", "", "[torch.jit.trace] torch.mm(x0, w1)"),
    ],
)
def test_titles_name_the_backend(backend: str, stage: str, wanted: str) -> None:
    assert said("dtype", backend, stage=stage).startswith(wanted)


def test_titles_of_long_calls_name_the_function() -> None:
    long = case([x("x0", 2, 3)], call("sum", "x0", [0, 1], keepdim=True, dtype="float64" * 12))
    assert said("dtype", case_=long, op="sum").startswith("[amp, cpu] torch.sum: result is")


def written(found: Examined, backend: str = "eager-cpu", case_: Case = MM, **more: Any) -> str:
    return issue(case_, backends()[backend], found, "print()\n", **more)


def test_rounding_is_explained_where_it_was_measured() -> None:
    off = record(
        "value",
        backend="compile[inductor]",
        expected="1.5 +- 0.01 at [0, 1], bfloat16",
        observed="1.9: excess 40, bias 3.5",
        stage="compile[inductor]",
        part="lowerings: mm",
    )
    text = written(Examined(off, (("mm", "lower_precision_fp"),), "agrees"), "compile[inductor]")
    assert "| expected | `1.5 at [0, 1], bfloat16 (one unit of rounding: 0.01)` |" in text
    assert "| observed | `1.9 (40 units away)` |" in text
    assert "The result is 40 of these units off at its worst element and 3.5 overall" in text
    assert "honest kernels stay below 4." in text
    assert "Eager gives the expected result here." in text
    assert "First stage that shows it: `compile[inductor]`; `compile[aot_eager_decomp" in text
    assert "Part that torch's own bisector names: `lowerings: mm`." in text
    text = written(Examined(off, (), "diverges"), "compile[inductor]")
    assert "Eager itself differs from its documentation here." in text


def test_exact_values_are_not_said_to_round() -> None:
    exact = record("value", expected="2 +- 0 at [], int64", observed="-1: excess inf, bias 0")
    text = written(Examined(exact), "compile[aot_eager]")
    assert "these values are exact" in text
    assert "units" not in text
    assert "| expected | `2 at [], int64` |" in text


def test_the_policy_row_is_that_of_the_guilty_op() -> None:
    both = (("exp", "fp32"), ("mm", "lower_precision_fp"))
    text = written(Examined(record("dtype", NESTED, op="exp"), both), "fake-cuda", NESTED)
    assert "`aten::exp` has the policy `fp32` on cuda" in text
    assert "aten::mm" not in text
    assert "autocast casts every floating-point argument but float64 to float32" in text
    assert "/aten/src/ATen/autocast_mode.h), `AT_FORALL_FP32`; [op reference](https://docs." in text


def test_an_op_without_a_policy_says_so() -> None:
    plain = case([x("x0", 2, 3)], call("abs", "x0"))
    text = written(Examined(record("dtype", plain, op="abs")), case_=plain)
    assert "`abs` is in none of autocast's lists for cpu" in text


def test_every_policy_has_a_sentence() -> None:
    from amp_fuzz.findings.repro.issue import _MEANING

    assert set(_MEANING) == {policy.value for policy in Policy}


def test_without_autocast_too() -> None:
    found = Examined(record("dtype", bare=True))
    assert "It also occurs without autocast." in written(found)
    found = replace(found, record=record("dtype"))
    assert "It does not occur without autocast." in written(found)
    bare = case([x("x0", 2, 3)], call("abs", "x0"), contexts=())
    text = written(Examined(record("dtype", bare, op="abs", explicit="# x")), case_=bare)
    assert "No autocast is involved." in text
    assert "casts written out" not in text


def test_an_earlier_report_is_linked_on_top() -> None:
    entry = Known(id="there", what="a", why="b", link="https://example.org/1", quirk="q")
    found = Examined(record("dtype", known="there"))
    text = written(found, known=[entry])
    assert text.splitlines()[2] == (
        "> Already reported: https://example.org/1. Comment there instead of opening another."
    )
    assert "Already reported" not in written(found, known=[msgspec.structs.replace(entry, link="")])


def test_a_fence_is_longer_than_those_inside() -> None:
    text = issue(MM, backends()["eager-cpu"], Examined(record("dtype")), "# ```\nprint()\n")
    assert "````python\n# ```\nprint()\n````" in text


def test_an_issue_says_what_its_script_imports() -> None:
    plain, device = (
        issue(MM, backends()["eager-cpu"], Examined(record("dtype")), script)
        for script in (
            "import sys\nimport torch\n",
            "import torch\nfrom amp_fuzz import privateuse1\n",
        )
    )
    assert "The script imports only torch. It exits with 1" in plain
    assert "The script imports only torch and amp_fuzz. It exits with 1" in device


@pytest.mark.skipif(torch.cuda.is_available(), reason="eager-cuda is here")
def test_eager_is_not_asked_where_its_device_is_not_here() -> None:
    """The casts of jax are those of CUDA."""
    assert _eager(Judge(backends()["jax"]), MM) == ""
    assert _eager(Judge(backends()["compile[eager]"]), MM) == "agrees"


@pytest.mark.parametrize(
    ("backend", "said"),
    [
        ("jax", "[JAX](https://docs.jax.dev): a lowered program computes what eager computes."),
        ("torchax", "a program on JAX computes what eager computes."),
        ("privateuse1", "**What the documentation says.** `aten::mm` has the policy"),
    ],
)
def test_no_other_backend_quotes_the_documentation_of_torchscript(backend: str, said: str) -> None:
    found = Examined(record("dtype", backend=backend), (("mm", "lower_precision_fp"),))
    text = issue(MM, backends()[backend], found, "import torch")
    assert said in text
    assert "TorchScript" not in text
