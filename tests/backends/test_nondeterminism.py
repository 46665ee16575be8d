"""Cases on a device that adds in another order at each call: `tests.atomics`.

A process can have one such device, so each check runs in a fork.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import amp_fuzz
from amp_fuzz.backends import privateuse1
from amp_fuzz.backends.harness import quiet
from amp_fuzz.cases.case import Case
from amp_fuzz.findings.explanation import explain
from amp_fuzz.findings.repro.script import repro
from amp_fuzz.oracle.verdict import Verdict
from amp_fuzz.upstream.explain import judge_of
from amp_fuzz.versions import holds
from tests.devices import check_on
from tests.helpers import call, case, drawn, x

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(not privateuse1.supported(), reason="needs torch 2.10"),
]

INPUTS = (x("x0", 2), x("x1", 60, dtype="int64", domain="index", bound=2), x("x2", 60))
ADD = case(
    INPUTS,
    call("index_add", "x0", 0, "x1", "x2"),
    call("mul", "x2", "x2", to="v1"),
    backward="none",
)
TIMES = 8  # of these many runs of a sum of 60 numbers one at least differs


def judged(one: Case, op: str = "", way: str = "") -> list[Verdict]:
    """Return the verdicts of several runs, with or without a wrong kernel."""
    from benchmarks.nondeterminism import device, known

    judge = judge_of(device((op, way)), known())
    with quiet():
        return [judge.judge(one) for _ in range(TIMES)]


def kinds(verdicts: list[Verdict]) -> set[str]:
    return {v.divergence.kind if v.divergence else v.outcome for v in verdicts}


def sums_vary_and_nothing_is_found() -> None:
    found = judged(ADD)
    assert kinds(found) == {"agreed"}
    assert {v.varied for v in found} <= {0, 1}
    assert any(v.varied for v in found)
    assert not any(v.unjudged for v in found)


def a_second_call_and_a_relation_may_differ_too() -> None:
    found = judged(ADD.with_plan(calls=2))
    assert kinds(found) == {"agreed"}
    assert max(v.varied for v in found) == 2


def deterministic_algorithms_are_exact() -> None:
    found = judged(ADD.with_plan(deterministic=True))
    assert kinds(found) == {"agreed"}
    assert not any(v.varied for v in found)


def what_has_none_raises_on_both_sides() -> None:
    one = case((x("x0", 9),), call("cumsum", "x0", 0), backward="none")
    assert kinds(judged(one)) == {"agreed"}
    then = "raised" if holds("<2.14") else "agreed"  # it has a deterministic algorithm since
    assert kinds(judged(one.with_plan(deterministic=True))) == {then}


def a_wrong_kernel_is_found() -> None:
    (found, *_) = verdicts = judged(ADD, "index_add", "gain")
    assert kinds(verdicts) == {"value"}
    with quiet():
        from benchmarks.nondeterminism import device

        assert found.divergence is not None
        text = repro(found.case, device(), found.divergence)
        assert "more than rounding" in "".join(
            v.said for v in explain(found.case, device(("index_add", "gain"))).values
        )
    assert "unit = " in text


def a_wrong_bit_is_found_under_deterministic_algorithms() -> None:
    from tests import atomics

    atomics.FAULTS["bit"] = lambda found: found.view(torch.int32).bitwise_xor_(1)
    assert kinds(judged(ADD, "index_add", "bit")) == {"agreed"}
    assert kinds(judged(ADD.with_plan(deterministic=True), "index_add", "bit")) == {"bitwise"}


def other_results_of_the_case_stay_exact() -> None:
    from tests import atomics

    atomics.FAULTS["bit"] = lambda found: found.view(torch.int32).bitwise_xor_(1)
    found = judged(ADD, "mul", "bit")
    assert {(v.divergence.kind, v.divergence.where) for v in found if v.divergence} == {
        ("bitwise", "v1")
    }


def what_is_not_documented_is_a_finding() -> None:
    from tests import atomics

    turns = itertools.count(1)
    atomics.FAULTS["drift"] = lambda found: found.mul_(1 + 1e-3 * next(turns))
    mul = case((x("x0", 60),), call("mul", "x0", "x0"), backward="none")
    assert kinds(judged(mul, "mul", "drift")) == {"nondeterminism"}


def a_check_says_that_it_cannot_judge() -> None:
    from benchmarks.nondeterminism import device

    index, source = (t.to("atomics") for t in (torch.zeros(60, dtype=torch.int64), torch.randn(60)))
    start = torch.zeros(2, device="atomics")
    results = [
        amp_fuzz.check(
            lambda s: start.index_add(0, index, s) * 2, source, backends=["eager-atomics"]
        )
        for _ in range(TIMES)
    ]
    assert device().kernels()
    assert {r.verdict for r in results} <= {"agrees", "unjudged"}, [str(r) for r in results]


def drawn_cases_agree_or_are_known() -> None:
    from benchmarks.nondeterminism import AIMS, device, known

    judge, outcomes, varied = judge_of(device(), known()), Counter[str](), 0
    with quiet():
        for one in drawn(120, "atomics", focus=AIMS, seed="random", varies=True, statements=6):
            verdict = judge.judge(one)
            outcomes[verdict.outcome] += 1
            varied += verdict.varied > 0
            assert verdict.outcome != "diverged", f"{verdict.divergence}\n{one}"
    assert outcomes["agreed"] > 60
    assert varied > 3


CHECKS = (
    sums_vary_and_nothing_is_found,
    a_second_call_and_a_relation_may_differ_too,
    deterministic_algorithms_are_exact,
    what_has_none_raises_on_both_sides,
    a_wrong_kernel_is_found,
    a_wrong_bit_is_found_under_deterministic_algorithms,
    other_results_of_the_case_stay_exact,
    what_is_not_documented_is_a_finding,
    a_check_says_that_it_cannot_judge,
    pytest.param(drawn_cases_agree_or_are_known, marks=pytest.mark.slow),
)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_on_a_device_that_adds_in_any_order(check: Callable[[], None], tmp_path: Path) -> None:
    check_on("atomics", check, tmp_path)
