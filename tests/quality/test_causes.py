"""One cause is one group, whatever it shows as; and each rule that joins two tells others apart."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from amp_fuzz.backends.harness import quiet
from amp_fuzz.cases.case import Case, bare
from amp_fuzz.cases.program import Autocast
from amp_fuzz.findings.entered import inside
from amp_fuzz.findings.examination import Met, Step, examine
from amp_fuzz.findings.groups import Groups
from amp_fuzz.findings.judge_again import happens
from amp_fuzz.findings.minimize.target import working
from amp_fuzz.findings.wrong_context import acts_as, unrestored
from amp_fuzz.oracle.judge import Judge
from amp_fuzz.oracle.verdict import Verdict
from amp_fuzz.records.baseline import entry_of
from amp_fuzz.records.fingerprint import Fingerprint, fingerprint, fingerprinted, title
from amp_fuzz.records.schema import DivergenceRecord
from amp_fuzz.upstream import shipped
from amp_fuzz.upstream.explain import judge_of
from tests.faults.corrupted import Corrupted, Patches, wrong_kernels
from tests.faults.many import seeded
from tests.helpers import BF16, F16, WrongKernel, call, case, eager, under, x

pytestmark = pytest.mark.thorough

UNCACHED = Autocast(dtype="bfloat16", cache_enabled=False)

# A context within another turns the weight cache off; what is left is the state alone, or that the
# second step sees a new weight: the reference's is cached, since the outer context stays.
LEFT = case([x("x0", 2)], under(UNCACHED, call("abs", "x0")), contexts=(), backward="none")
SECOND_STEP = case(
    [x("x0", 2, 2), x("w1", 2, 2), x("x2", 2)],
    call("mm", "x0", "w1"),
    under(UNCACHED, call("abs", "x2", to="v1")),
    contexts=(BF16,),
    steps=2,
    loop="inside",
)
DECORATED = case([x("x0", 2, 2)], call("mm", "x0", "x0"), contexts=(F16,), entry="decorator")
INTO_HALF = case(
    [x("x0", 2, 2, dtype="float16"), x("b1", 2, 2, dtype="float16")],
    call("chain_matmul", "x0", "x0", "x0", form="out", out="b1"),
    contexts=(F16,),
    entry="decorator",
    backward="none",
)


def faulty(*faults: str, patches: Patches | None = None) -> Judge:
    wrong = patches or (lambda: seeded(*faults))
    return judge_of(Corrupted(patches=wrong), shipped(), "none")


def verdict_of(judge: Judge, case: Case) -> Verdict:
    with quiet():
        verdict = judge.judge(case)
    assert verdict.divergence is not None, case
    return verdict


def causes(
    judge: Judge, case: Case, groups: Groups | None = None
) -> tuple[list[DivergenceRecord], list[str]]:
    """Return the findings of a case, and the fingerprints of the causes that it shows."""
    groups = Groups() if groups is None else groups
    with quiet():
        steps: list[Step | Met] = list(examine(judge, verdict_of(judge, case), groups))
    found = [s.record for s in steps if isinstance(s, Step) and s.last]
    return found, [s.fingerprint for s in steps if isinstance(s, Met)]


@pytest.mark.parametrize("cases", [(LEFT, SECOND_STEP), (SECOND_STEP, LEFT)], ids=["LS", "SL"])
def test_an_unrestored_state_is_one_cause_as_state_or_as_values(cases: tuple[Case, ...]) -> None:
    judge, groups = faulty("cache-flag-not-restored"), Groups()
    found, met = zip(*(causes(judge, case, groups) for case in cases), strict=True)
    ((record,), ()) = found
    assert met[0] == met[1] == [record.fingerprint]
    assert fingerprint(record) == Fingerprint(
        *("state", "eager-cpu", "", "*", "none", ()), "leaves=weight cache"
    )
    assert title(record).startswith("state: weight cache not restored")


def test_each_way_alone_comes_to_the_same_fingerprint() -> None:
    judge = faulty("cache-flag-not-restored")
    ((state,), _), ((value,), _) = causes(judge, LEFT), causes(judge, SECOND_STEP)
    assert (state.kind, value.kind) == ("state", "value")
    assert state.fingerprint == value.fingerprint
    assert title(value).startswith("state: weight cache not restored, as value at mm")


def test_other_ingredients_do_not_belong_to_an_unrestored_state() -> None:
    judge = faulty("cache-flag-not-restored")
    ((plain,), _) = causes(judge, LEFT)
    more = msgspec.structs.replace(LEFT, plan=msgspec.structs.replace(LEFT.plan, calls=2))
    record = msgspec.structs.replace(plain, case=more, minimised=more)  # as where time was up
    assert fingerprint(record).hash == plain.fingerprint
    # What a checkpoint leaves, and contexts do not, is its own.
    own = msgspec.structs.replace(record, left=())
    assert fingerprint(own).ingredient == "leaves=weight cache+calls"


def test_a_search_is_limited_by_what_the_process_works(monkeypatch: pytest.MonkeyPatch) -> None:
    wall = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: wall[0])
    clock = working()
    wall[0] = 4.0  # others had the machine
    assert 1 <= clock() < 4
    wall[0] = 800.0
    assert clock() >= 200


def test_a_case_that_killed_a_process_does_not_run_again() -> None:
    """Nor does the smallest case without its autocast, which nobody drew."""
    judge = faulty("cache-flag-not-restored")
    ((record,), _) = causes(judge, LEFT)
    assert record.minimised is not None
    plain, ran = bare(record.minimised).id, set()
    with quiet():
        verdict = verdict_of(judge, LEFT)
        for groups in (Groups(), Groups(deadly={plain})):
            for _ in examine(judge, verdict, groups, seen=lambda case: ran.add(case.id)):
                pass
            assert (plain in ran) == (not groups.deadly)
            ran.clear()


def test_a_divergence_with_the_state_restored_is_another_cause() -> None:
    both = faulty("cache-flag-not-restored", "cache-not-cleared")
    with quiet():
        assert unrestored(faulty("cache-flag-not-restored"), SECOND_STEP) == ("weight cache",)
        # A cache that is not cleared is no part of the state that a context puts back.
        again = msgspec.structs.replace(
            SECOND_STEP, plan=msgspec.structs.replace(SECOND_STEP.plan, loop="outside")
        )
        assert faulty("cache-not-cleared").judge(again).divergence is not None
        assert unrestored(faulty("cache-not-cleared"), again) == ()
        assert unrestored(both, again) == ()
    groups = Groups()
    first, second = causes(both, LEFT, groups)[1], causes(both, again, groups)[1]
    assert set(first).isdisjoint(second)


def test_honest_contexts_leave_nothing() -> None:
    with quiet():
        assert (
            unrestored(judge_of(eager()), LEFT) == unrestored(judge_of(eager()), SECOND_STEP) == ()
        )


def test_a_context_that_acts_otherwise_is_one_cause_as_a_dtype_or_as_an_error() -> None:
    judge = faulty("decorator-dtype")
    ((dtype,), _), ((error,), _) = causes(judge, DECORATED), causes(judge, INTO_HALF)
    assert (dtype.kind, error.kind) == ("dtype", "raise")
    assert dtype.fingerprint == error.fingerprint
    assert dtype.as_if == ("dtype=bfloat16",)
    assert fingerprint(dtype).ingredient == "entry=decorator+acts=dtype"
    assert title(dtype) == "autocast with entry=decorator acts as if it said dtype=bfloat16"
    groups = Groups()
    causes(judge, DECORATED, groups)
    assert causes(judge, INTO_HALF, groups) == ([], [dtype.fingerprint])  # and is not minimised


# A decorator that loses its dtype takes that of the context around it.
WITHIN = (Autocast(dtype="float32"), F16)


def test_a_context_may_act_by_an_outer_one_that_minimising_removes() -> None:
    judge = faulty("decorator-dtype")
    within = case([x("x0", 2, 2)], call("mm", "x0", "x0"), contexts=WITHIN, entry="decorator")
    with quiet():
        assert acts_as(judge, within, judge.backend.run([within])[0])[0] == "dtype=float32"
    ((record,), _), ((plain,), _) = causes(judge, within), causes(judge, DECORATED)
    assert record.as_if == ("dtype=bfloat16",)
    assert record.fingerprint == plain.fingerprint


def test_a_context_that_acts_as_another_setting_is_another_cause() -> None:
    ((dtype,), _) = causes(faulty("decorator-dtype"), DECORATED)
    ((nothing,), _) = causes(faulty("decorator-does-nothing"), DECORATED)
    assert nothing.as_if == ("enabled=False",)
    assert nothing.fingerprint != dtype.fingerprint
    # An error of the op's own, in a decorated program, is not the decorator's.
    raising = judge_of(WrongKernel(eager(), "mm"), shipped(), "none")
    ((own,), _) = causes(raising, DECORATED)
    assert fingerprint(own).kind == "value"
    assert not own.as_if


def test_contexts_are_not_blamed_without_a_special_plan() -> None:
    plain = case([x("x0", 2, 2)], call("mm", "x0", "x0"), contexts=(F16,), backward="none")
    with quiet():
        assert acts_as(faulty("mm:none"), plain, Corrupted().run([plain])[0]) == ()
    ((record,), _) = causes(faulty("mm:none"), plain)
    assert fingerprint(record).kind == "policy"


# -- what the values decide -----------------------------------------------------------------------


def _saturated(op: Any, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = op(x)
    return out.clamp(max=torch.finfo(out.dtype).max)


def test_an_op_that_is_wrong_only_out_of_range_stays_range() -> None:
    judge = faulty(patches=lambda: wrong_kernels({"aten.exp.default": _saturated}))
    large = case([x("x0", 1, values="42c80000")], call("exp", "x0"), contexts=(), backward="none")
    ((record,), _) = causes(judge, large)
    assert fingerprint(record).kind == "range"


def half(text: str) -> Case:
    """Return a logsumexp of one float16 element."""
    spec = x("x0", 1, dtype="float16", values=text)
    return case([spec], call("logsumexp", "x0", 0), contexts=(), backward="none")


def test_an_overflow_in_float16_and_in_float32_is_one_cause() -> None:
    ((record,), _) = causes(faulty("logsumexp-no-max"), half("4a00"))  # 12
    assert fingerprint(record).dtypes == ("float32",)
    assert record.minimised is not None
    assert [s.dtype for s in record.minimised.program.inputs] == ["float32"]


def _wrong_in_half(op: Any, x: torch.Tensor, *args: Any) -> torch.Tensor:
    out: torch.Tensor = op(x, *args)
    return out * float("inf") if x.dtype is torch.float16 else out


def test_an_overflow_only_in_float16_keeps_its_dtype() -> None:
    judge = faulty(patches=lambda: wrong_kernels({"aten.logsumexp.default": _wrong_in_half}))
    ((record,), _) = causes(judge, half("4a00"))
    assert fingerprint(record).dtypes == ("float16",)


# -- in a baseline --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "other", "shown"),
    [
        ("cache-flag-not-restored", "cache-not-cleared", SECOND_STEP),
        ("decorator-dtype", "decorator-does-nothing", DECORATED),
        ("decorator-dtype", "decorator-does-nothing", INTO_HALF),
    ],
)
def test_a_baseline_knows_what_is_wrong_with_a_context(fault: str, other: str, shown: Case) -> None:
    judge = faulty(fault)
    ((record,), _) = causes(judge, shown)
    entry = entry_of(record, (), reason="waits")
    with quiet():
        assert happens(judge, entry, judge.judge(entry.load()))
        honest = judge_of(Corrupted(), shipped(), "none")
        assert not happens(honest, entry, honest.judge(entry.load()))
        wrong = faulty(other)
        assert not happens(wrong, entry, wrong.judge(entry.load()))


def test_a_baseline_knows_a_wrong_value_on_eager_again() -> None:
    judge = judge_of(WrongKernel(eager(), "abs"), shipped(), "none")
    ((record,), _) = causes(judge, case([x("x0", 2)], call("abs", "x0"), backward="none"))
    entry = entry_of(record, (), reason="waits")
    assert (record.kind, entry.kind) == ("bitwise", "value")
    with quiet():
        assert happens(judge, entry, judge.judge(entry.load()))
        assert not happens(judge_of(eager()), entry, judge_of(eager()).judge(entry.load()))


# -- several at once ------------------------------------------------------------------------------

# Without a policy of its own, conv2d's parts are cast: in groups, it puts its results together with
# cat, in whatever dtype that makes of them.
GROUPED = case(
    [x("x0", 2, 1, 1), x("w1", 2, 1, 1, 1)],
    call("conv2d", "x0", "w1", groups=2),
    contexts=(BF16,),
)
CAT = case([x("x0", 2)], call("cat", ["x0", "x0"], 0), contexts=(BF16,), backward="none")
LOSS = case([x("x0", 2)], call("mse_loss", "x0", "x0"), contexts=(BF16,), backward="none")
CONV = case(
    [x("x0", 1, 2, 2), x("x1", 1, 1, 1, 1)],
    call("conv2d", "x0", "x1"),
    contexts=(BF16,),
    backward="none",
)


def test_two_causes_together_are_no_third() -> None:
    judge, groups = faulty("conv2d:none", "cat:lower_precision_fp", "mse_loss:banned"), Groups()
    causes(judge, LOSS, groups)  # has no part in it
    known = {cause for case in (CAT, CONV) for cause in causes(judge, case, groups)[1]}
    assert len(known) == 2
    assert verdict_of(judge, GROUPED).divergence.kind == "raise"  # type: ignore[union-attr]
    found, met = causes(judge, GROUPED, groups)
    assert (found, set(met)) == ([], known)


def test_a_context_that_acted_as_something_else_elsewhere_is_no_third() -> None:
    judge, groups = faulty("decorator-dtype", "cat:lower_precision_fp"), Groups()
    half = x("x0", 2, 2, dtype="bfloat16")
    within = case([half], call("fft.ifft", "x0"), contexts=WITHIN, entry="decorator")
    ((dtype,), _) = causes(judge, within, groups)
    assert dtype.as_if == ("dtype=float32",)
    ((cat,), _) = causes(judge, CAT, groups)
    body = call("cat", ["x0", "x0"], 0)
    inputs = [x("x0", 2, dtype="float16")]  # which cat leaves as it is where the decorator does
    both = case(inputs, body, contexts=(F16,), entry="decorator", backward="none")
    found, met = causes(judge, both, groups)
    assert (found, set(met)) == ([], {dtype.fingerprint, cat.fingerprint})


def test_a_divergence_that_two_causes_do_not_explain_is_a_third() -> None:
    judge, groups = faulty("conv2d:none", "cat:lower_precision_fp", "sin-tail"), Groups()
    known = {cause for case in (CAT, CONV) for cause in causes(judge, case, groups)[1]}
    sine = case([x("x0", 3)], call("sin", "x0"), contexts=(BF16,), backward="none")
    ((third,), _) = causes(judge, sine, groups)
    assert third.fingerprint not in known


@pytest.mark.skipif(
    not hasattr(torch.library, "get_kernel"), reason="torch 2.7 has no torch.library.get_kernel"
)
def test_a_torch_without_get_kernel_looks_into_no_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch 2.7: the kernel that autograd calls is seen, those that it calls are not."""

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            names.append(str(func))
            return inside(self, func, args, kwargs or {})

    names: list[str] = []
    x0 = torch.ones(2, 2, 2)
    with Seen():
        torch.ops.aten.linalg_vector_norm(torch.ops.aten.baddbmm(x0, x0, x0))
    looked, names = names, []
    monkeypatch.delattr(torch.library, "get_kernel")
    with Seen():
        torch.ops.aten.linalg_vector_norm(torch.ops.aten.baddbmm(x0, x0, x0))
    assert names == ["aten.baddbmm.default", "aten.linalg_vector_norm.default"]
    assert len(looked) > len(names)


LINEAR = case([x("x0", 2, 2), x("w1", 2, 2)], call("linear", "x0", "w1"), backward="none")
PRODUCT = case([x("x0", 2, 2), x("w1", 2, 2)], call("mm", "x0", "w1"), backward="none")


@pytest.mark.parametrize(("early", "joins"), [(LINEAR, True), (PRODUCT, False)], ids=["own", "mm"])
def test_a_policy_that_is_found_later_explains_an_earlier_finding(early: Case, joins: bool) -> None:
    """One with its cause, and one that differs by another."""
    judge, groups = faulty("linear:fp32", "mm:none"), Groups()
    ((first,), _) = causes(judge, early)
    plain = msgspec.structs.replace(first, as_if=(), overload="", policy="none")
    loose = fingerprinted(msgspec.structs.replace(plain, case=early, minimised=early))
    assert groups.take(loose)
    groups.looks["look",] = (loose.fingerprint,)
    found, _ = causes(judge, msgspec.structs.replace(LINEAR, seed=1), groups)
    (policy, *joined) = found
    assert policy.as_if
    assert not policy.joins
    assert [record.joins for record in joined] == [loose.fingerprint] * joins
    assert {record.fingerprint for record in found} == {policy.fingerprint}
    cause = policy.fingerprint if joins else loose.fingerprint
    assert groups.looks["look",] == (cause,)
    assert bool(groups.loose) is not joins
    again, _ = causes(judge, msgspec.structs.replace(LINEAR, seed=2), groups)
    assert again == []
