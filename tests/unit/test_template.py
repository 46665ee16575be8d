"""Each rule of PyTorch's template catches an issue that breaks it, and no other rule does."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.utils

from amp_fuzz.findings.repro.issue import first_bad
from amp_fuzz.findings.repro.template import RULES, Issue, broken, told
from amp_fuzz.findings.repro.torch_same import accepts
from amp_fuzz.upstream.known import MEASURED

FINDINGS = Path(__file__).parents[2] / "docs" / "findings"
TEXT = (FINDINGS / "issue-matrix-rank-out.md").read_text()
SCRIPT = TEXT.rpartition("```python\n")[2].partition("```")[0]
GOOD = Issue(
    TEXT,
    SCRIPT,
    compiled=True,
    values=True,
    op="linalg.matrix_rank",
    dtype="int64",
    same=False,
    rungs=("compile[eager]", "compile[aot_eager]"),
    traced=1,
)


def without(words: str) -> dict[str, Any]:
    assert words in TEXT
    return {"text": TEXT.replace(words, "")}


def test_a_good_issue_breaks_no_rule() -> None:
    assert broken(GOOD) == ()


@pytest.mark.parametrize(
    ("rule", "changes"),
    [
        ("shown", {"shown": False}),
        ("tolerances", {"script": f"{SCRIPT}torch.allclose(v0, v0, rtol=1.0)\n"}),
        ("same", without("`torch._dynamo.utils.same(")),
        ("same", without("fp64_ref")),
        ("disagreement", {"same": True}),
        ("indices", {"op": "argmax"}),
        ("indices", {"op": "special.topk"}),
        ("random", {"draws": True}),
        ("random", {"draws": True, "inductor": True, "script": f"torch.manual_seed(0)\n{SCRIPT}"}),
        ("ablation", without("| `compile[eager]` | agrees |")),
        ("trace", without("TORCH_TRACE=")),
        ("trace", without("tlparse")),
        ("trace", {"traced": 0}),
        ("environment", without("PyTorch version: ")),
        ("environment", {"text": TEXT.replace("### Versions", "### Other")}),
        ("versions", without("; last good:")),
        ("versions", {"text": TEXT.replace("last good: ", "last good: not measured ")}),
        ("own words", without("### In my own words")),
        ("own words", without("<!--")),
        ("own words", without("This text was generated")),
        ("label", without('"topic: fuzzer"')),
        ("alone", {"script": f"from amp_fuzz.backends import backends\n{SCRIPT}"}),
    ],
)
def test_each_rule_catches_what_breaks_it(rule: str, changes: dict[str, Any]) -> None:
    assert rule in [one.name for one in broken(replace(GOOD, **changes))]


@pytest.mark.parametrize(
    "changes",
    [
        {"same": True, "text": f"{TEXT}\n**Why it is wrong all the same.** Every bit must agree."},
        {"op": "argmax", "values": False},
        {"op": "max", "dtype": "float32"},
        {"draws": True, "script": f"torch.manual_seed(0)\n{SCRIPT}"},
        {"traced": None},
        {"compiled": False, "text": TEXT.replace("TORCH_TRACE=", "").replace("fp64_ref", "")},
    ],
)
def test_what_a_rule_is_not_about_breaks_it_not(changes: dict[str, Any]) -> None:
    assert broken(replace(GOOD, **changes)) == ()


def test_every_rule_has_a_test_and_says_what_to_do() -> None:
    marks = test_each_rule_catches_what_breaks_it.pytestmark
    assert {values[0] for values in marks[0].args[1]} == {rule.name for rule in RULES}
    lines = told(RULES).splitlines()
    assert lines[1] == (
        "tolerances: a report of a fuzzer compares with default tolerances; "
        "take rtol=, atol= and tol= out of the script"
    )
    assert len(lines) == len(RULES)


# -- torch's own comparison -----------------------------------------------------------------------


def test_torch_compares_as_this_package_asks_it_to() -> None:
    """It is private: this notices another signature, or another default tolerance."""
    parameters = inspect.signature(torch._dynamo.utils.same).parameters
    assert {"ref", "res", "fp64_ref", "log_error"} <= parameters.keys()
    assert parameters["tol"].default == 1e-4
    one = torch.ones(2, 2)
    assert accepts(one, one + 1e-5, one.double()) is True
    assert accepts(one, one + 1, one.double()) is False
    assert accepts(one, one.double(), None) is False
    # A result is accepted that is nearer to the float64 one than eager's is.
    assert accepts(one + 0.1, one, one.double()) is True
    assert accepts(None, one, None) is None
    assert accepts(one, torch.ones(3), None) is None


# -- versions -------------------------------------------------------------------------------------


OLDEST = "none (2.7.1 is the oldest that was measured)"


@pytest.mark.parametrize(
    ("known", "last_good", "said"),
    [
        ((">=2.9",), "", "First bad: 2.9.1; last good: 2.7.1."),
        ((">=2.7",), "", f"First bad: 2.7.1; last good: {OLDEST}."),
        (("<2.11",), "", f"First bad: 2.7.1; last good: {OLDEST}."),
        ((">=2.9",), "2.8.0", "First bad: 2.9.1; last good: 2.8.0."),
    ],
)
def test_versions_of_a_known_bug(known: tuple[str, ...], last_good: str, said: str) -> None:
    assert first_bad(known, last_good) == said


@pytest.mark.parametrize(("last_good", "kept"), [("", False), ("2.9.1", True), ("none", True)])
def test_versions_of_an_unknown_finding_are_asked_for(last_good: str, kept: bool) -> None:
    said = first_bad((), last_good)
    text = TEXT.replace("First bad: ", "").replace("; last good: ", "")
    found = broken(replace(GOOD, text=f"{text}\n{said}"))
    assert [rule.name for rule in found] == ([] if kept else ["versions"])


def test_the_versions_are_those_that_were_measured() -> None:
    folder = Path(__file__).parents[2] / "benchmarks" / "known"
    assert set(MEASURED) == {path.stem for path in folder.glob("*.json")}
