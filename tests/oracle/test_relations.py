"""Each relation holds in honest torch, and is seen to break when torch is not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import msgspec
import pytest
import torch

from amp_fuzz.backends.eager import EagerBackend
from amp_fuzz.backends.harness import Observation, Raised, quiet
from amp_fuzz.backends.reference import ReferenceRuntime
from amp_fuzz.cases.case import Case, Plan, bare, map_autocast
from amp_fuzz.cases.program import (
    FP8,
    Autocast,
    InferenceMode,
    NoGrad,
    Statement,
    regions,
    returning_last,
)
from amp_fuzz.oracle import RELATIONS, Divergence, check_relation, within
from amp_fuzz.oracle.judge import Judge, confirmed
from amp_fuzz.oracle.trial import Trial
from amp_fuzz.upstream import shipped
from amp_fuzz.upstream.explain import Explainer
from tests.helpers import BF16, F16, call, case, drawn, eager, under, x

Run = Callable[[Case], Observation]

W = [x("x0", 4, 4), x("w1", 4, 4)]
CASE = case(W, call("mm", "x0", "w1"), call("mm", "v0", "w1", to="v1"))
TRANSFORMED = msgspec.structs.replace(CASE, plan=Plan(transform="vmap_grad"))


def honest(case: Case) -> Observation:
    return eager().run([case])[0]


def judged(name: str, of: Case, run: Run = honest) -> Divergence | None:
    """Check a relation as the judge does: the reference says where two variants may differ."""
    return check_relation(RELATIONS[name], of, run, judge=Trial.of(of, eager()).related)


def known(explainer: Explainer, case: Case, found: Divergence) -> str:
    """Return the ids that explain a relation that does not hold, as the judge asks for them."""
    trial = Trial.of(case, eager())
    said = explainer(trial, found, confirmed=False)
    return said.known or explainer(trial, confirmed(trial, found), confirmed=True).known


@pytest.mark.slow
@pytest.mark.parametrize("name", RELATIONS)
def test_both_variants_of_a_pair_mean_the_same_in_honest_torch(name: str) -> None:
    relation, explainer = RELATIONS[name], Explainer(shipped())
    tried = 0
    with quiet():
        for case_ in drawn(4000, statements=5, seed=name):
            if relation.pair(case_) is None or honest(case_).raised is not None:
                continue
            found = judged(name, case_)
            assert found is None or known(explainer, case_, found), f"{found}\n{case_}"
            tried += 1
            if tried == 150:
                break
    assert tried == 150


def _checkpoint_runs_bare(case: Case) -> Observation:
    return honest(bare(case) if case.plan.checkpoint != "none" else case)


def _cache_off_is_float16(case: Case) -> Observation:
    off = any(c.cache_enabled is False for c in case.plan.contexts)
    return honest(map_autocast(case, dtype="float16") if off else case)


def _enabled_false_is_ignored(case: Case) -> Observation:
    return honest(map_autocast(case, enabled=True))


def _decorator_does_nothing(case: Case) -> Observation:
    return honest(bare(case) if case.plan.entry == "decorator" else case)


def _transform_raises(case: Case) -> Observation:
    seen = honest(case)
    if case.plan.transform != "none" and case.plan.contexts:
        seen.raised = Raised("RuntimeError", "seeded", 0, "grads, outputs = entered(x0, w1)")
    return seen


VIOLATIONS: dict[str, Run] = {
    "transform": _transform_raises,
    "cache": _cache_off_is_float16,
    "disabled": _enabled_false_is_ignored,
    "entry": _decorator_does_nothing,
    "checkpoint": _checkpoint_runs_bare,
}


@pytest.mark.parametrize("name", RELATIONS)
def test_a_violation_is_found_and_named(name: str) -> None:
    of = TRANSFORMED if name == "transform" else CASE
    assert judged(name, of) is None
    found = judged(name, of, VIOLATIONS[name])
    assert found is not None
    assert found.kind == "relation"
    assert found.where.startswith(f"{name}: ")


# -- how long a cast lives ------------------------------------------------------------------------

# The gradient of w1 is a sum of three: of sin, of the cast that mm reads, and of cos. Where the
# cache kept the cast of an earlier call, the cast's gradient is added last, otherwise in between.
ORDERED = (call("sin", "w1"), call("mm", "x0", "w1", to="v1"), call("cos", "w1", to="v2"))
# Two uses of one cast: their gradients are added in 16 bits, those of two casts in 32.
SHARED = (call("mm", "x0", "w1"), call("mm", "w1", "v0", to="v1"))

LIVES: dict[str, Case] = {
    "entry": case(W, *ORDERED, entry="decorator", calls=2),
    "cache": case(W, *SHARED),
    "cache of two calls": case(W, *ORDERED, calls=2),
}


@pytest.mark.parametrize("kind", LIVES)
def test_the_life_of_a_cast_decides_how_gradients_are_added_and_breaks_no_relation(
    kind: str,
) -> None:
    name, of = kind.partition(" ")[0], LIVES[kind]
    found = check_relation(RELATIONS[name], of, honest)
    assert found is not None, "the two variants agree bit for bit: this case shows nothing"
    assert found.where == f"{name}: w1.grad"
    assert judged(name, of) is None
    assert Judge(eager(), relations="all").judge(of).outcome == "agreed"


@pytest.mark.parametrize("kind", LIVES)
@pytest.mark.parametrize("side", [0, 1])
def test_one_bit_of_such_a_gradient_is_a_violation_in_either_variant(kind: str, side: int) -> None:
    name, of = kind.partition(" ")[0], LIVES[kind]
    pair = RELATIONS[name].pair(of)
    assert pair is not None

    def off(variant: Case) -> Observation:
        seen = honest(variant)
        value = seen.values["w1.grad"]
        if variant == pair[side] and value is not None:
            seen.values["w1.grad"] = value.nextafter(value + 1)
        return seen

    found = judged(name, of, off)
    assert found is not None
    assert found.where == f"{name}: w1.grad"


@dataclass(frozen=True, slots=True)
class Doubling(EagerBackend):
    """Doubles gradients in one entry, and so does its reference: they share the fault."""

    def run(self, cases: Sequence[Case]) -> list[Observation]:
        """Run cases."""
        return [_doubled(one, EagerBackend.observe(self, one)) for one in cases]

    def reference(self) -> ReferenceRuntime:
        """Return the reference with the same fault."""
        return _Doubled(EagerBackend.reference(self).runtime)


class _Doubled(ReferenceRuntime):
    def run(self, case: Case) -> Observation:
        return _doubled(case, super().run(case))


def _doubled(case: Case, seen: Observation) -> Observation:
    gradient = seen.values["w1.grad"]
    if case.plan.entry == "decorator" and gradient is not None:
        seen.values["w1.grad"] = gradient * 2
    return seen


def test_a_fault_that_the_reference_shares_is_no_matter_of_rounding() -> None:
    for of in (LIVES["entry"], CASE):
        trial = Trial.of(of, Doubling("cpu"))
        assert trial.compare() is None
        found = check_relation(RELATIONS["entry"], of, trial.run, judge=trial.related)
        assert found is not None
        assert found.where == "entry: w1.grad"


@pytest.mark.parametrize("body", [ORDERED, SHARED], ids=["ordered", "shared"])
@pytest.mark.parametrize("name", ["disabled", "checkpoint", "transform"])
def test_other_variants_agree_bit_for_bit_however_long_a_cast_lives(
    name: str, body: Sequence[Statement]
) -> None:
    plans: list[dict[str, object]] = [*PLANS, {"micro_batches": 2}, {"hook": "tensor"}]
    plans += [{"steps": 2, "update": update} for update in ("data", "replaced", "frozen")]
    if name == "transform":
        plans = [{"transform": t} for t in ("grad", "vmap_grad")]
    for plan in plans:
        of = case(W, *body, **plan)
        assert RELATIONS[name].pair(of) is not None
        assert check_relation(RELATIONS[name], of, honest) is None


PLANS: list[dict[str, object]] = [
    {},
    {"calls": 2},
    {"backward": "inside"},
    {"backward": "under", "backward_context": BF16, "calls": 2},
    {"steps": 2, "calls": 2},
]


@pytest.mark.parametrize("body", [ORDERED, SHARED], ids=["ordered", "shared"])
@pytest.mark.parametrize("checkpoint", ["none", "reentrant", "non_reentrant"])
def test_what_is_repeated_agrees_bit_for_bit_however_long_a_cast_lives(
    checkpoint: str, body: Sequence[Statement]
) -> None:
    for plan in PLANS:
        again = {"second": "retain", "checkpoint": checkpoint, **plan}
        of = case(W, *body, **again)
        assert within(of, honest(of)) is None


def test_the_value_that_raises_is_named_even_if_it_is_not_returned() -> None:
    def raises_at_v0(case: Case) -> Observation:
        seen = honest(case)
        if case.plan.transform != "none" and case.plan.contexts:
            seen.raised = Raised("RuntimeError", "seeded", 0, "v0 = torch.mm(x0, w1)")
        return seen

    both = case(W, call("mm", "x0", "w1"), call("relu", "v0", to="v1"), transform="vmap_grad")
    last = msgspec.structs.replace(both, program=returning_last(both.program))
    assert last.program.outputs == ("v1",)
    found = check_relation(RELATIONS["transform"], last, raises_at_v0)
    assert found is not None
    assert found.where == "transform: v0"


def test_one_bit_of_what_a_function_returns_is_a_violation() -> None:
    function = msgspec.structs.replace(CASE, plan=Plan(entry="custom_fwd", scaler=True, steps=2))

    def off(variant: Case) -> Observation:
        seen = honest(variant)
        value = seen.values["step1.v1"]
        if variant.plan.entry == "custom_fwd" and value is not None:
            seen.values["step1.v1"] = value.nextafter(value + 1)
        return seen

    assert check_relation(RELATIONS["entry"], function, honest) is None
    found = check_relation(RELATIONS["entry"], function, off)
    assert found is not None
    assert found.where == "entry: step1.v1"


def test_an_error_in_one_variant_alone_is_a_violation() -> None:
    def raises(variant: Case) -> Observation:
        seen = honest(variant)
        if variant.plan.entry == "decorator":
            other = case(W, call("mm", "x0", 1.5))
            seen = honest(msgspec.structs.replace(other, plan=variant.plan))
        return seen

    found = check_relation(RELATIONS["entry"], CASE, raises)
    assert found is not None
    assert "error" in found.expected


# -- what each pair is ---------------------------------------------------------------------------


def contexts(case: Case) -> list[Autocast]:
    inner = [c for c in regions(case.program.body) if isinstance(c, Autocast)]
    return [*case.plan.contexts, *inner]


def pairs(name: str, count: int) -> list[tuple[Case, Case]]:
    found = (RELATIONS[name].pair(c) for c in drawn(2000, statements=3))
    return list(islice((p for p in found if p is not None), count))


def test_cache_pairs_differ_in_the_cache_alone() -> None:
    for on, off in pairs("cache", 50):
        assert all(c.cache_enabled is not False for c in contexts(on))
        assert all(c.cache_enabled is False for c in contexts(off))
        assert map_autocast(on, cache_enabled=None) == map_autocast(off, cache_enabled=None)


def test_disabled_pairs_are_off_and_absent() -> None:
    for off, none in pairs("disabled", 50):
        assert not any(c.enabled for c in contexts(off))
        assert contexts(none) == []
        assert bare(off) == none


def test_entry_pairs_differ_in_the_entry_alone() -> None:
    for one, other in pairs("entry", 50):
        assert one.plan.entry != other.plan.entry
        assert msgspec.structs.replace(one.plan, entry=other.plan.entry) == other.plan
        ungraded = one.plan.entry in ("custom_fwd", "setup_context", "custom_op")
        body = (under(NoGrad(), *one.program.body),) if ungraded else one.program.body
        assert msgspec.structs.replace(one.program, body=body) == other.program


def test_checkpoint_pairs_differ_in_the_checkpoint_alone() -> None:
    for one, other in pairs("checkpoint", 50):
        assert (one.plan.checkpoint, other.plan.checkpoint) == ("non_reentrant", "none")
        assert msgspec.structs.replace(one.plan, checkpoint="none") == other.plan


@pytest.mark.parametrize(
    ("name", "silent"),
    [
        ("cache", case(W, call("mm", "x0", "w1"), contexts=())),
        ("cache", case(W, call("mm", "x0", "w1"), steps=2)),
        ("disabled", case(W, call("mm", "x0", "w1"), contexts=())),
        ("disabled", case(W, call("mm", "x0", "w1"), entry="decorator")),
        ("entry", case(W, call("mm", "x0", "w1"), contexts=())),
        ("entry", case(W, call("mm", "x0", "w1"), thread="inside")),
        ("entry", case(W, call("mm", "x0", "w1"), backward="inside")),
        ("entry", case(W, call("mm", "x0", "w1"), entry="cast_inputs")),
        ("entry", case(W, call("mm", "x0", "w1"), entry="register_autocast")),
        (
            "entry",
            case(W, under(FP8("delayed"), call("neg", "x0")), entry="custom_op", calls=2),
        ),
        (
            "entry",
            case(
                W,
                under(FP8(), call("fp8_linear", "x0", "w1", is_first_microbatch=False)),
                entry="custom_op",
                calls=2,
            ),
        ),
        ("entry", TRANSFORMED),
        ("checkpoint", TRANSFORMED),
        ("transform", CASE),
        ("transform", case(W, call("mm", "x0", "w1"), contexts=(), transform="grad")),
        ("checkpoint", case(W, call("mm", "x0", "w1"), backward="none")),
        ("checkpoint", case([x("b0", 2)], call("neg", "b0", form="inplace"))),
    ],
)
def test_a_relation_says_nothing_where_it_does_not_hold(name: str, silent: Case) -> None:
    assert RELATIONS[name].pair(silent) is None


def test_an_inner_region_is_enough_for_the_relations_of_autocast() -> None:
    inner = case(W, under(InferenceMode(), under(F16, call("mm", "x0", "w1"))), contexts=())
    assert RELATIONS["cache"].pair(inner) is not None
    assert RELATIONS["disabled"].pair(inner) is not None


# -- relations within one observation ------------------------------------------------------------


def test_a_second_call_must_give_what_the_first_gave() -> None:
    twice = case(W, call("mm", "x0", "w1"), calls=2)
    seen = honest(twice)
    assert within(twice, seen) is None
    value = seen.values["call1.v0"]
    assert value is not None
    seen.values["call1.v0"] = value + 1
    found = within(twice, seen)
    assert found is not None
    assert (found.kind, found.where) == ("relation", "second call: call1.v0")


def test_a_second_call_may_draw_other_random_numbers_in_the_same_dtype() -> None:
    one = case([x("x0", 64)], call("dropout.training", "x0", p=0.5), contexts=(), calls=2)
    seen = eager().run([one])[0]
    first, second = (seen.values[f"call{i}.v0"] for i in (0, 1))
    assert first is not None
    assert second is not None
    assert not first.equal(second)
    assert within(one, seen) is None
    seen.values["call1.v0"] = second.double()
    assert within(one, seen) is not None


@pytest.mark.parametrize("steps", [1, 2])
def test_a_retained_graph_must_give_the_same_gradient_again(steps: int) -> None:
    again = case(W, call("mm", "x0", "w1"), second="retain", steps=steps)
    seen = honest(again)
    assert within(again, seen) is None
    label = next(k for k in seen.values if "again." in k)
    seen.values[label] = torch.zeros(4, 4)
    found = within(again, seen)
    assert found is not None
    assert found.where == f"retained graph: {label}"


def test_nothing_is_asked_within_where_nothing_is_repeated() -> None:
    assert within(CASE, honest(CASE)) is None
    assert BF16 in CASE.plan.contexts


def test_a_variant_that_is_the_case_itself_is_not_run_again() -> None:
    ran: list[Case] = []

    class Counting(EagerBackend):
        def run(self, cases: Sequence[Case]) -> list[Observation]:
            ran.extend(cases)
            return super().run(cases)

    checkpointed = list(RELATIONS).index("checkpoint")
    one = msgspec.structs.replace(CASE, seed=checkpointed)
    assert Judge(Counting("cpu")).judge(one).outcome == "agreed"
    assert [c.plan.checkpoint for c in ran] == ["none", "non_reentrant"]


@pytest.mark.parametrize("name", RELATIONS)
def test_variants_of_a_program_that_is_called_again_can_be_driven(name: str) -> None:
    later = (Autocast(enabled=False),), (NoGrad(), F16)
    of = msgspec.structs.replace(CASE, plan=Plan(later=later, reuse="graph"))
    pair = RELATIONS[name].pair(of)
    assert (pair is not None) == (name in ("cache", "disabled"))
    for variant in pair or ():
        variant.plan.check()
    assert judged(name, of) is None
