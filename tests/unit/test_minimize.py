"""A finding gets small, stays the same finding, and the search ends."""

from __future__ import annotations

import time
from itertools import islice

import pytest

from amp_fuzz.case import Case, Plan
from amp_fuzz.engine import shrink
from amp_fuzz.judge import Judge, Verdict, quiet
from amp_fuzz.minimize import minimize, types_of
from amp_fuzz.program import Checkpoint, NoGrad, regions, statements
from tests.helpers import BF16, F16, WrongKernel, call, case, drawn, eager, under, x


def size(case: Case) -> int:
    return sum(1 for _ in statements(case.program.body))


def uses(case: Case, op: str) -> bool:
    return any(s.op == op for s in statements(case.program.body))


def shows_a_value(verdict: Verdict) -> bool:
    return verdict.divergence is not None and verdict.divergence.kind in ("bitwise", "nonfinite")


def found(op: str, count: int, least: int = 5) -> list[Verdict]:
    """Return so many divergences of a backend with one wrong kernel, in programs of some size."""
    judge = Judge(WrongKernel(eager(), op))
    pool = ["mm", "relu", "softmax", "add", "cat", op]
    cases = (c for c in drawn(2000, ops=pool, focus=[op], seed=op) if size(c) >= least)
    with quiet():
        verdicts = (judge.judge(c) for c in cases)
        return list(islice((v for v in verdicts if shows_a_value(v)), count))


@pytest.mark.parametrize("op", ["mm", "softmax", "exp"])
def test_a_fault_in_one_op_becomes_one_statement_under_a_plain_plan(op: str) -> None:
    judge = Judge(WrongKernel(eager(), op))
    for verdict in found(op, 4):
        with quiet():
            small, last = shrink(judge, verdict, seconds=20)
        assert size(small) == 1, small
        assert uses(small, op)
        assert list(regions(small.program.body)) == []
        # Inputs of two dtypes need a context, or the op raises.
        assert len(small.plan.contexts) <= 1
        assert small.plan == Plan(contexts=small.plan.contexts, backward="none")
        assert small.seed == 0
        assert last.divergence is not None
        assert verdict.divergence is not None
        assert last.divergence.kind == verdict.divergence.kind


def test_what_is_left_still_fails_when_it_is_run_again() -> None:
    judge = Judge(WrongKernel(eager(), "mm"))
    (verdict,) = found("mm", 1)
    with quiet():
        small, last = shrink(judge, verdict, seconds=20)
        again = judge.judge(small)
    assert again.divergence == last.divergence
    assert last.case == small


BIG = case(
    [x("x0", 2, 2), x("w1", 2, 2, layout="strided"), x("x2", 2, 2, domain="ties")],
    call("relu", "x2", to="v0"),
    under(
        Checkpoint(),
        call("mm", "x0", "w1", to="v1"),
        under(NoGrad(), call("add", "v1", "v0", to="v2")),
    ),
    call("softmax", "v2", 0, to="v3"),
    seed=5,
    contexts=(F16, BF16),
    calls=2,
)


def test_a_statement_whose_value_is_needed_becomes_an_input_of_its_type() -> None:
    seen = eager().run([BIG])[0]
    small = minimize(BIG, lambda c: uses(c, "softmax"), types=types_of(seen))
    assert size(small) == 1
    (spec,) = small.program.inputs
    value = seen.values["call0.v2"]
    assert value is not None
    assert spec.shape == tuple(value.shape)
    assert spec.dtype == str(value.dtype).removeprefix("torch.")


def test_without_types_no_value_is_invented() -> None:
    small = minimize(BIG, lambda c: uses(c, "softmax"))
    assert {s.name for s in small.program.inputs} <= {s.name for s in BIG.program.inputs}
    small.program.check()


@pytest.mark.parametrize(
    "wanted",
    [
        lambda c: Checkpoint() in regions(c.program.body),
        lambda c: len(c.plan.contexts) == 2,
        lambda c: c.plan.calls == 2,
        lambda c: any(s.layout == "strided" for s in c.program.inputs),
        lambda c: c.seed == 5,
    ],
    ids=["a region", "two contexts", "calls", "a layout", "the seed"],
)
def test_what_matters_stays_and_the_rest_goes(wanted) -> None:  # type: ignore[no-untyped-def]
    small = minimize(BIG, wanted, types=types_of(eager().run([BIG])[0]))
    assert wanted(small)
    assert size(small) == 1
    assert len(small.json()) < len(BIG.json())


def test_every_candidate_is_well_formed() -> None:
    tried: list[Case] = []

    def note(candidate: Case) -> bool:
        tried.append(candidate)
        return len(tried) % 3 == 0

    for original in drawn(20, statements=8):
        minimize(original, note, types=types_of(eager().run([original])[0]))
    assert len(tried) > 500
    for candidate in tried:
        candidate.program.check()
        candidate.plan.check()


def test_no_candidate_is_tried_twice() -> None:
    tried: list[str] = []
    minimize(BIG, lambda c: bool(tried.append(c.id)))
    assert len(tried) == len(set(tried))


def test_nothing_smaller_leaves_the_case_as_it_is() -> None:
    assert minimize(BIG, lambda _: False) is BIG


def test_the_time_limit_holds() -> None:
    def slow(_: Case) -> bool:
        time.sleep(0.05)
        return False

    start = time.monotonic()
    minimize(BIG, slow, seconds=0.2)
    assert time.monotonic() - start < 2
