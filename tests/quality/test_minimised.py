"""How small findings get: a fault in one op leaves one plain call of it, and nothing beside.

benchmarks/minimize.json has the numbers for every fault; these are a few of each sort.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from amp_fuzz.backends.harness import quiet
from amp_fuzz.cases.case import Case
from amp_fuzz.cases.program import regions, statements
from amp_fuzz.findings.minimize.target import (
    Shrunk,
    Target,
    answer_of,
    asker,
    confirmed,
    shrink,
    stage_of,
)
from amp_fuzz.oracle.judge import Judge
from amp_fuzz.oracle.verdict import Verdict
from amp_fuzz.upstream import shipped
from amp_fuzz.upstream.explain import judge_of
from benchmarks.minimize_page import JSON, PAGE, SECONDS, page
from tests.faults.numeric import NUMERIC
from tests.faults.numeric_hunt import backend_of, hunt, way

pytestmark = pytest.mark.thorough


def found(name: str, *focus: str, cases: int = 40, seed: int = 0) -> tuple[Judge, Verdict]:
    """Return the first divergence that shows a fault, among programs with these ops."""
    fault = NUMERIC[name]
    judge = judge_of(backend_of(fault), shipped(), "none")
    first = hunt(fault, list(way(cases, seed=seed, focus=focus)))
    assert first.case is not None, name
    with quiet():
        return judge, judge.judge(first.case)


def minimised(judge: Judge, verdict: Verdict, stage: str = "") -> tuple[Shrunk, Verdict]:
    """Return what is left of a divergence, and the verdict of it."""
    target = replace(Target.of(verdict), stage=stage)
    ask, reference = asker(judge, target), judge.backend.reference()
    with quiet():
        *_, last = shrink(verdict.case, target, ask, reference, seconds=120)
        assert isinstance(last, Shrunk)
        again = confirmed(judge, target, last.chain)
    assert again is not None
    assert again.case == last.case
    return last, again


def ops(case: Case) -> list[str]:
    return [s.op for s in statements(case.program.body)]


def elements(case: Case) -> int:
    return sum(math.prod(s.shape) for s in case.program.inputs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "op", "most", "seed"),
    [
        # From a program of twelve statements; shadows of that of seed 0, a large SVD, take 20 s.
        ("softmax-tail", "softmax", 1, 3),
        ("gelu-tanh", "gelu", 1, 0),
        ("layer-norm-no-eps", "layer_norm", 4, 0),
    ],
)
def test_a_fault_in_a_kernel_leaves_one_call_of_its_op(
    name: str, op: str, most: int, seed: int
) -> None:
    judge, verdict = found(name, op, seed=seed)
    last, again = minimised(judge, verdict)
    assert ops(last.case) == [op] == [last.op]
    assert elements(last.case) <= most
    assert list(regions(last.case.program.body)) == []
    assert last.case.plan.backward == "none"
    assert answer_of(again).kind == answer_of(verdict).kind
    assert last.nearest is None or judge.judge(last.nearest).outcome == "agreed"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "op"), [("mm-gain", "mm"), ("tanh-saved", "tanh")])
def test_a_fault_at_the_threshold_may_leave_a_second_statement(name: str, op: str) -> None:
    """What the samples draw depends on the statements: with one fewer it may just be explained."""
    judge, verdict = found(name, op)
    last, _ = minimised(judge, verdict)
    assert op in ops(last.case)
    assert op in last.op.split("+")
    assert len(ops(last.case)) <= 2


@pytest.mark.slow
@pytest.mark.parametrize(("name", "op"), [("gelu-saved", "gelu")])
def test_a_fault_in_a_gradient_keeps_the_backward_pass_and_one_weight(name: str, op: str) -> None:
    judge, verdict = found(name, op)
    last, _ = minimised(judge, verdict)
    assert ops(last.case) == [op] == [last.op]
    assert last.case.plan.backward == "outside"
    assert [s.role for s in last.case.program.inputs] == ["weight"]
    assert elements(last.case) <= 1


@pytest.mark.slow
def test_a_fault_in_a_compiler_is_minimised_on_its_stage_and_confirmed_on_the_whole() -> None:
    judge, verdict = found("graph-mm-gain", "mm")
    with quiet():
        stage = stage_of(judge, verdict)
    assert stage == "compile[aot_eager]"
    last, again = minimised(judge, verdict, stage)
    assert again.backend == "compile[inductor]"
    with quiet():
        assert stage_of(judge, again) == stage
    assert ops(last.case) == ["mm"]
    # None smaller was found that the whole of Inductor shows too.
    assert elements(last.case) <= 6


# -- what is published ----------------------------------------------------------------------------


# Rows that changed their fingerprint, or are larger than they may be. docs/evidence/minimize.md
# says why.
CHANGED = {"eager/neg-backward"}
LARGER = {"eager/var-of-squares": 4}


def named_rows() -> dict[str, dict[str, Any]]:
    sections = json.loads(JSON.read_text())
    return {f"{s}/{n}": r for s in SECONDS for n, r in sections.get(s, {}).items() if r["found"]}


def rows() -> list[dict[str, Any]]:
    sections = json.loads(JSON.read_text())
    return [r for s in SECONDS for r in sections.get(s, {}).values() if r["found"]]


def test_the_page_says_what_was_measured() -> None:
    assert PAGE.read_text() == page(json.loads(JSON.read_text()))


def test_measured_findings_are_small_and_anyone_can_run_them() -> None:
    left = sorted(r["statements"][1] for r in rows())
    assert len(left) >= 50
    assert left[len(left) // 2] == 1
    large = {n: r["statements"][1] for n, r in named_rows().items() if r["statements"][1] > 3}
    assert large == LARGER
    assert left[math.ceil(0.9 * len(left)) - 1] <= 2
    assert [r["program"] for r in rows() if r["repro"] not in ([1, 0], [1])] == []
    assert [r["program"] for r in rows() if not r["confirmed"]] == []
    elements_left = sorted(r["elements"][1] for r in rows())
    assert elements_left[math.ceil(0.9 * len(elements_left)) - 1] <= 4


def test_measured_findings_kept_their_fingerprint() -> None:
    """What names no op as it was drawn may have one when it is small: nothing else may change."""
    changed = set()
    for name, row in named_rows().items():
        before = {**row["before"], "op": row["before"]["op"] or row["after"]["op"]}
        if before != row["after"]:
            changed.add(name)
    assert changed == CHANGED
    findings = json.loads(JSON.read_text())["findings"]
    assert [name for name, row in findings.items() if not row["found"]] == []


def test_a_case_that_agrees_on_the_rung_below_is_told_from_one_that_does_not() -> None:
    judge, verdict = found("mm-gain", "mm")
    target = Target.of(verdict)
    both = replace(asker(judge, target), below=judge)
    with quiet():
        assert target.reply(asker(judge, target)(verdict.case)) == "same"
        assert target.reply(both(verdict.case)) == "other"
