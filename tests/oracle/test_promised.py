"""The record of a case names the promises that it could have falsified, as faults show."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from amp_fuzz.backends import backends
from amp_fuzz.backends.base import facts_of
from amp_fuzz.backends.harness import quiet
from amp_fuzz.cases.case import Case
from amp_fuzz.oracle.judge import Judge
from amp_fuzz.policies.tables import Policy, load_table
from amp_fuzz.records.promises import Kernels, promises
from amp_fuzz.reference.suppositions import supposing
from tests.helpers import call, case, drawn, eager, x

from .test_trial import Counting

W = [x("x0", 4, 4), x("w1", 4, 4)]
HALVES = [x("x0", 4, 4, dtype="bfloat16"), x("w1", 4, 4, dtype="bfloat16")]


def named(one: Case, backend: str = "eager-cpu") -> tuple[str, ...]:
    return Judge(backends()[backend], relations="none").judge(one).record("all").promises


def diverges(one: Case, op: str, policy: Policy | None) -> bool:
    """Return whether a case notices that an op has another policy, or none."""
    with supposing({op: policy}):
        return Judge(eager(), relations="none").judge(one).divergence is not None


@pytest.mark.parametrize(
    ("one", "op", "policy"),
    [
        (case(W, call("mm", "x0", "w1")), "mm", None),
        (case(HALVES, call("mm", "x0", "w1")), "mm", None),
        (case(HALVES, call("mse_loss", "x0", "w1")), "mse_loss", None),
        (case(W, call("mse_loss", "x0", "w1")), "mse_loss", None),
        # cat promotes on its own, too: only another policy shows.
        (case([HALVES[0], W[1]], call("cat", ["x0", "w1"])), "cat", Policy.LOWER_PRECISION_FP),
        (case(HALVES, call("cat", ["x0", "w1"])), "cat", Policy.LOWER_PRECISION_FP),
    ],
)
def test_a_case_counts_for_an_op_if_it_notices_that_the_op_has_another_policy(
    one: Case, op: str, policy: Policy | None
) -> None:
    assert (f"cpu:{op}" in named(one)) == diverges(one, op, policy)


@pytest.mark.slow
def test_drawn_cases_notice_that_an_op_they_count_for_runs_in_the_other_dtype() -> None:
    """Of 323, seven do not: inside an op with an op in it, the wrong cast is rounded away."""
    told = [told for one in drawn(1000, seed=9) for told in notices(one)]
    assert len(told) > 100
    assert sum(told) >= 0.95 * len(told)


def notices(one: Case) -> Iterator[bool]:
    """Yield for each op that a case counts for whether it notices that the op is cast wrongly."""
    rules = load_table("cpu").rules
    with quiet():
        record = Judge(eager(), relations="none").judge(one).record("all")
    for name in record.promises if record.outcome == "agreed" else ():
        device, _, op = name.partition(":")
        kernels = promises().kernels.get(op, Kernels((op,))).reaches
        hit = [o for o in rules if {o, o.partition(".")[0]} & {*kernels}] if device == "cpu" else []
        for overload in hit[:1]:
            lowers = rules[overload].policy is Policy.LOWER_PRECISION_FP
            wrong = Policy.FP32 if lowers else Policy.LOWER_PRECISION_FP
            with quiet(), supposing(dict.fromkeys(hit, wrong)):
                judge = Judge(eager(), relations="none", confirm=False)
                yield judge.judge(one).divergence is not None


def test_a_case_that_diverged_counts_for_the_kernel_at_which_it_did() -> None:
    one = case(W, call("mm", "x0", "w1"), call("matmul", "v0", "w1", to="v1"))
    assert {"cpu:mm", "cpu:matmul", "autocast.op-dtype"} <= {*named(one)}
    wrong = Judge(Counting("cpu", wrong=True), relations="none").judge(one)
    assert wrong.outcome == "diverged"
    assert wrong.record("all").promises == ("cpu:mm",)


def test_both_sides_refuse_what_is_banned() -> None:
    loss = case(
        [x("x0", 3, domain="unit"), x("x1", 3, domain="unit")],
        call("binary_cross_entropy", "x0", "x1"),
    )
    assert "amp.banned" in named(loss, "fake-cuda")
    assert "amp.banned" not in named(loss)


def test_torch_promises_nothing_about_an_autocast_that_is_not_its_own() -> None:
    verdict = Judge(eager(), relations="none").judge(case(W, call("mm", "x0", "w1")))
    for name in ("jax[cpu]", "torchax"):
        implements = facts_of(backends()[name]).implements
        assert replace(verdict, implements=implements).record("all").promises == ()
