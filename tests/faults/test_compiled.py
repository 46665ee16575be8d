"""Faults of autocast inside compilers are told as autocast's, whatever else the compiler does."""

from __future__ import annotations

import pytest

from amp_fuzz.backends.harness import quiet
from amp_fuzz.findings.examination import Met, examine
from amp_fuzz.findings.groups import Groups
from amp_fuzz.oracle.judge import Judge
from amp_fuzz.records.fingerprint import title
from amp_fuzz.upstream import shipped
from amp_fuzz.upstream.explain import judge_of
from benchmarks.common import read
from benchmarks.compiled_faults import RESULTS, page
from tests.faults.compiled import CASES, COMPILED, CompiledFault, backend_of, beside
from tests.helpers import brief

ROWS = {row["fault"]: row for row in read(RESULTS)["faults"]}

# One of a context in the program, one of AOTAutograd's trace, one of the list of ops.
_FEW = ("disabled-ignored", "backward-as-forward", "mm-not-listed")


def judge(fault: CompiledFault | None, place: str, *, differs: bool = False) -> Judge:
    return judge_of(backend_of(fault, place, differs=differs), shipped(), "none")


@pytest.mark.parametrize("name", brief(COMPILED, *_FEW[:2]))
def test_a_fault_of_autocast_is_no_difference_of_the_backend(name: str) -> None:
    fault = COMPILED[name]
    case = beside(CASES[ROWS[name]["case"]])
    with quiet():
        told = judge(fault, fault.place, differs=True).judge(case)
        honest = judge(None, fault.place, differs=True).judge(case)
    assert told.outcome == "diverged", told
    assert honest.outcome == "backend", honest


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "first", "second", "said"),
    [
        (
            "disabled-ignored",
            "disabled",
            "nested-off",
            "the backend acts as if: enabled in the program is True",
        ),
        pytest.param(
            "ambient-dtype",
            "inner-bfloat16",
            "plain-float16",
            "the backend acts as if: dtype around the program is bfloat16",
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            "mm-not-listed",
            "plain",
            "mse",
            "mm behaves as if its policy were none or fp32 or promote, not lower_precision_fp",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_a_fault_in_what_is_compiled_is_one_cause(
    name: str, first: str, second: str, said: str
) -> None:
    fault, groups, met, records = COMPILED[name], Groups(), [], []
    how = judge(fault, fault.place)
    for case in (CASES[first], CASES[second]):
        with quiet():
            for event in examine(how, how.judge(case), groups, seconds=3.0):
                if isinstance(event, Met):
                    met.append(event.fingerprint)
                elif event.last:
                    records.append(event.record)
    assert [title(record) for record in records] == [said]
    assert met == [records[0].fingerprint] * 2


def test_the_table_has_every_fault_and_names_those_that_are_masked() -> None:
    assert set(ROWS) == set(COMPILED)
    told = [r for r in ROWS.values() if r["case"] and r["beside"] == "diverged"]
    assert len(told) >= 40
    row = {**ROWS["disabled-ignored"], "masked": ["some: backend"]}
    run = read(RESULTS)["run"]
    assert "\n0 of 1 faults are told" in page({"run": run, "faults": [row]})
