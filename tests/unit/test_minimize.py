"""A finding gets small, stays the same finding, and the search ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice, permutations

import msgspec
import pytest

from amp_fuzz.backends import backends
from amp_fuzz.backends.harness import Observation, Raised, quiet
from amp_fuzz.cases.case import Case, Plan
from amp_fuzz.cases.program import (
    Autocast,
    Checkpoint,
    Items,
    NoGrad,
    Ref,
    TensorSpec,
    regions,
    statements,
)
from amp_fuzz.catalogue import CATALOGUE
from amp_fuzz.catalogue.writes import wrongly_written
from amp_fuzz.findings.minimize import (
    Ended,
    Event,
    Reply,
    Smaller,
    Tried,
    Values,
    capture,
    search,
    without,
)
from amp_fuzz.findings.minimize.arguments import arguments, forms
from amp_fuzz.findings.minimize.nearest import distance, nearest
from amp_fuzz.findings.minimize.shapes import frozen_case
from amp_fuzz.findings.minimize.specs import cast, frozen, held_numbers, with_numbers
from amp_fuzz.findings.minimize.target import (
    Answer,
    Shrunk,
    Target,
    answer_of,
    asker,
    confirmed,
    shrink,
    wording,
)
from amp_fuzz.oracle import Divergence
from amp_fuzz.oracle.judge import Judge
from amp_fuzz.oracle.verdict import Verdict
from amp_fuzz.upstream.explain import judge_of
from tests.helpers import BF16, F16, WrongKernel, call, case, drawn, eager, leading, under, x


def size(case: Case) -> int:
    return sum(1 for _ in statements(case.program.body))


def uses(case: Case, op: str) -> bool:
    return any(s.op == op for s in statements(case.program.body))


def given(case: Case) -> Values:
    return capture(case, eager().reference())


def search_while(
    case: Case, wanted: Callable[[Case], bool], seconds: float = 30.0
) -> tuple[Case, list[Event]]:
    """Search for the smallest case that is wanted; return it, and all events."""

    def ask(candidate: Case) -> Reply:
        return "same" if wanted(candidate) else "agrees"

    events = list(search(case, ask, values=given, seconds=seconds))
    last = events[-1]
    assert isinstance(last, Ended)
    return last.case, events


def shrinking(judge: Judge, verdict: Verdict) -> Iterator[Event | Shrunk]:
    target = Target.of(verdict)
    ask, reference = asker(judge, target), judge.backend.reference()
    return shrink(verdict.case, target, ask, reference, seconds=60)


def shrunk(judge: Judge, verdict: Verdict) -> Shrunk:
    *_, last = shrinking(judge, verdict)
    assert isinstance(last, Shrunk)
    return last


def shows_a_value(verdict: Verdict) -> bool:
    return verdict.divergence is not None and verdict.divergence.kind in ("bitwise", "nonfinite")


def found(op: str, count: int, least: int = 5) -> list[Verdict]:
    """Return so many divergences of a backend with one wrong kernel, in programs of some size."""
    judge = judge_of(WrongKernel(eager(), op))
    pool = ["mm", "relu", "softmax", "add", "cat", op]
    cases = (c for c in drawn(2000, ops=pool, focus=[op], seed=op) if size(c) >= least)
    with quiet():
        verdicts = (judge.judge(c) for c in cases)
        return list(islice((v for v in verdicts if shows_a_value(v)), count))


@pytest.mark.parametrize("op", leading(["mm", "softmax", "exp"]))
def test_a_fault_in_one_op_becomes_one_plain_call_on_few_elements(op: str) -> None:
    judge = judge_of(WrongKernel(eager(), op))
    for verdict in found(op, 4):
        with quiet():
            last = shrunk(judge, verdict)
        small = last.case
        assert size(small) == 1, small
        assert uses(small, op)
        assert last.op == op
        contexts = [*small.plan.contexts, *regions(small.program.body)]
        assert [type(context) for context in contexts] == [Autocast]
        assert small.plan == Plan(contexts=small.plan.contexts, backward="none")
        assert small.seed == 0
        for spec in small.program.inputs:
            assert all(d == 1 for d in spec.shape)
            assert spec.dtype in ("float32", "int64")  # exp of integers is another kernel
            assert (spec.layout, spec.role) == ("contiguous", "input")
        with quiet():
            again = confirmed(judge, Target.of(verdict), last.chain)
        assert again is not None
        assert again.case == small


@pytest.mark.thorough
def test_a_fault_on_tensors_without_values_becomes_one_call_too() -> None:
    judge = judge_of(WrongKernel(backends()["fake-cuda"], "mm"))
    cases = drawn(200, "cuda", ops=["mm", "relu", "add", "cat"], focus=["mm"], seed=2)
    with quiet():
        verdicts = (judge.judge(c) for c in cases if size(c) >= 5)
        for verdict in islice((v for v in verdicts if v.outcome == "diverged"), 2):
            last = shrunk(judge, verdict)
            assert [s.op for s in statements(last.case.program.body)] == ["mm"]
            assert all(not s.values for s in last.case.program.inputs)
            assert confirmed(judge, Target.of(verdict), last.chain) is not None


@pytest.mark.thorough
def test_an_error_that_one_side_raises_stays_that_error() -> None:
    judge = judge_of(WrongKernel(eager(), "mm"))
    broken = case(
        [x("x0", 3, 4), x("x1", 5, 6)],
        call("relu", "x0", to="v0"),
        call("mm", "v0", "x1", to="v1"),
        call("exp", "x1", to="v2"),
        contexts=(BF16,),
        steps=2,
    )
    with quiet():
        verdict = judge.judge(broken)
        assert verdict.divergence is not None
        assert verdict.divergence.kind == "raise"
        last = shrunk(judge, verdict)
        again = confirmed(judge, Target.of(verdict), last.chain)
    assert again is not None
    assert [s.op for s in statements(again.case.program.body)] == ["mm"]
    assert Target.of(again).errors == Target.of(verdict).errors == "RuntimeError -> ArithmeticError"


class TwoErrors(WrongKernel):
    """Raises one error for tensors of rank 2, and one of the same class for smaller ones."""

    def run(self, cases: Sequence[Case]) -> list[Observation]:
        return [
            self.raising(case, seen) for case, seen in zip(cases, super().run(cases), strict=True)
        ]

    def raising(self, case: Case, seen: Observation) -> Observation:
        many = any(len(spec.shape) > 1 for spec in case.program.inputs)
        text = f"expected size {3 if many else 4}==3, stride 12==1 at dim={len(case.id)}"
        return replace(seen, values={}, raised=Raised("AssertionError", text, 1, "v0 = relu(x0)"))


def test_an_error_does_not_become_another_of_its_class() -> None:
    judge = judge_of(TwoErrors(eager(), "mm"))
    broken = case([x("x0", 3, 4)], call("relu", "x0", to="v0"), contexts=(BF16,))
    with quiet():
        verdict = judge.judge(broken)
        last = shrunk(judge, verdict)
    assert [s.shape for s in last.case.program.inputs] == [(1, 1)]


INPLACE = (
    "one of the variables needed for gradient computation has been modified by an inplace "
    "operation: [torch.FloatTensor [{0}]], which is output {1} of AsStridedBackward0, is at "
    "version {1}; expected version 0 instead. Hint: enable anomaly detection to find the operation "
    "that failed to compute its gradient, with torch.autograd.set_detect_anomaly(True)."
)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("A: expected size 3==3, stride 4==1", "A: expected size 1==1, stride 2==1", True),
        ("A: expected size 3==3, stride 4==1", "A: expected size 3==1, stride 1==1", False),
        ("R: got Float and BFloat16", "R: got Half and Half", True),
        ("R: got: float != c10::Half", "R: got: double != c10::BFloat16", True),
        ("R: \"addmm\" not implemented for 'Half'", "R: \"mm\" not implemented for 'Byte'", True),
        ("R: size of tensor a (3) must match", "R: size of tensor b (7) must match", True),
        ("R: in /tmp/a/b.cpp: no such op", "R: in /tmp/c.cpp: no such op", True),
        ("R: no attribute 'weights' of it", "R: no attribute 'bias' of it", True),
        (f"R: of {'12 ' * 97}operation", f"R: of {'12 ' * 96}operation", True),  # cut in a word
        ("R: mat1 and mat2 must match", "R: mat1 and mat2 must be 2-D", False),
        (f"R: {INPLACE.format('123, 3, 4, 5', 123)}", f"R: {INPLACE.format('', 1)}", True),
        (f"R: {INPLACE.format('2, 2', 2)}", f"R: {INPLACE.replace('inplace', 'other')}", False),
        (
            "R: expected size 2==2, stride 3==1 at dim=0; expected size 3==3, stride 1==2 at dim=1",
            "R: expected size 1==1, stride 3==1 at dim=0",
            True,
        ),
        ("R: found FloatTensor", "R: found torch.HalfTensor", True),
        ("R: complex64 and UInt16", "R: float and Long", True),
        ("R: takes 2 arguments", "R: takes 1 argument", True),
        ("TypeError: the words", "ValueError: the words", False),
    ],
)
def test_the_words_of_an_error_stay_where_its_numbers_change(
    one: str, other: str, same: bool
) -> None:
    assert (wording(one[:300]) == wording(other[:300])) is same


def test_an_answer_has_the_words_of_both_sides() -> None:
    one = case([x("x0", 2)], call("neg", "x0"))
    said = "no error", "R: this is bad", "R: that is bad"
    words = {
        answer_of(
            Verdict(one, "eager-cpu", "diverged", Divergence("raise", "v0 = -x0", *pair))
        ).wording
        for pair in permutations(said, 2)
    }
    assert len(words) == 6
    value = Verdict(one, "eager-cpu", "diverged", Divergence("bitwise", "v0", "this", "that"))
    assert answer_of(value).wording == ()


def test_a_target_without_words_is_an_error_of_any() -> None:
    answer = Answer("diverged", "raise", op="mm", errors="A -> B", wording=("no", "->", "bad"))
    target = Target("raise", op="mm", errors="A -> B")
    assert target.reply(answer) == "same"
    assert replace(target, wording=answer.wording).reply(answer) == "same"
    assert replace(target, wording=("no", "->", "worse")).reply(answer) == "other"


def test_unconfirmed_cases_leave_the_chain() -> None:
    judge = judge_of(WrongKernel(eager(), "mm"))
    (verdict,) = found("mm", 1)
    honest = drawn(3, ops=["relu"], focus=["relu"])
    with quiet():
        last = confirmed(judge, Target.of(verdict), [verdict.case, *honest])
        none = confirmed(judge_of(eager()), Target.of(verdict), [verdict.case])
    assert last is not None
    assert last.case == verdict.case
    assert none is None


@pytest.mark.thorough
def test_a_case_takes_the_same_way_each_time() -> None:
    judge = judge_of(WrongKernel(eager(), "mm"))
    (verdict,) = found("mm", 1)

    def way() -> list[str]:
        with quiet():
            events = shrinking(judge, verdict)
            return [e.case.id for e in events if isinstance(e, (Tried, Smaller))]

    assert way() == way()


def test_without_time_nothing_is_run() -> None:
    judge = judge_of(WrongKernel(eager(), "mm"))
    (verdict,) = found("mm", 1)
    asked: list[Case] = []

    def ask(candidate: Case) -> Answer:
        asked.append(candidate)
        return Answer("agreed")

    reference = judge.backend.reference()
    *_, last = shrink(verdict.case, Target.of(verdict), ask, reference, seconds=0.0)
    assert isinstance(last, Shrunk)
    assert (asked, last.case, last.chain) == ([], verdict.case, (verdict.case,))


def test_a_parameter_that_a_module_takes_by_name_is_never_left_out() -> None:
    module = case(
        [x("x0", 2, 1, 4), x("x1", 12, 4), x("x2", 4, 4)],
        call(
            "MultiheadAttention",
            *("x0", "x0", "x0"),
            to="v0 _",
            form="module",
            embedding=4,
            heads=1,
            bias=False,
            first=False,
            training=False,
            names=["in_proj_weight", "out_proj.weight"],
            weights=["x1", "x2"],
            need=True,
            average=False,
            mask=None,
        ),
    )
    # Without it the module would compute with memory that nobody has written.
    for candidate in arguments(module):
        (statement,) = statements(candidate.program.body)
        assert dict(statement.kwargs)["names"] == Items(("in_proj_weight", "out_proj.weight"))
    assert list(arguments(BIG))


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


@pytest.mark.thorough
def test_a_statement_whose_value_is_needed_becomes_an_input_with_its_value() -> None:
    seen = eager().run([BIG])[0]
    wanted = seen.values["call0.v2"]
    assert wanted is not None

    def kept(candidate: Case) -> bool:
        """Return whether what softmax is given has the value that it had."""
        last = list(statements(candidate.program.body))[-1]
        if last.op != "softmax" or not isinstance(last.args[0], Ref):
            return False
        name = last.args[0].name
        taken = given(candidate).get((size(candidate) - 1, name))
        return taken == given(BIG)[3, "v2"]

    small, _ = search_while(BIG, kept)
    assert size(small) == 1
    (spec,) = small.program.inputs
    assert spec.shape == tuple(wanted.shape)
    assert spec.dtype == str(wanted.dtype).removeprefix("torch.")


LATER = case(
    BIG.program.inputs,
    *BIG.program.body,
    contexts=(F16, BF16),
    later=((), (NoGrad(), F16, BF16), (Autocast(enabled=False),)),
    reuse="region",
)


@pytest.mark.parametrize(
    ("wanted", "plan"),
    [
        (lambda c: bool(c.plan.later), Plan((), backward="none", later=((),))),
        (
            lambda c: any(NoGrad() in call for call in c.plan.later),
            Plan((), backward="none", later=((NoGrad(),),)),
        ),
        (
            lambda c: c.plan.reuse == "region",
            Plan((), backward="none", later=((),), reuse="region"),
        ),
        (
            lambda c: c.plan.reuse != "calls",
            Plan((), backward="none", later=((),), reuse="graph"),
        ),
        (
            lambda c: any(o.enabled is False for o in c.plan.contexts),
            Plan((Autocast(dtype="bfloat16", enabled=False),), backward="none"),
        ),
    ],
    ids=["another call", "without grad", "a region", "a graph", "the last call alone"],
)
def test_only_the_calls_that_matter_stay(wanted: Callable[[Case], bool], plan: Plan) -> None:
    small, _ = search_while(LATER, wanted)
    assert small.plan == plan


def test_a_value_that_is_not_known_is_not_invented() -> None:
    def ask(candidate: Case) -> Reply:
        return "same" if uses(candidate, "softmax") else "agrees"

    for event in search(BIG, ask, values=lambda _: {}, seconds=30, literal=False):
        names = {s.name for s in event.case.program.inputs}
        if isinstance(event, Tried) and event.by != "names":
            assert names <= {s.name for s in BIG.program.inputs} | {"x0", "x1"}
        event.case.program.check()


@pytest.mark.parametrize(
    "wanted",
    [
        lambda c: any(isinstance(r, Checkpoint) for r in regions(c.program.body)),
        lambda c: len(c.plan.contexts) == 2,
        lambda c: c.plan.calls == 2,
        lambda c: any(s.layout == "strided" for s in c.program.inputs),
        lambda c: c.seed == 5,
        lambda c: any(s.role == "weight" for s in c.program.inputs),
        lambda c: any(2 in s.shape for s in c.program.inputs),
    ],
    ids=["a region", "two contexts", "calls", "a layout", "the seed", "a weight", "a size"],
)
def test_only_the_cause_stays(wanted: Callable[[Case], bool]) -> None:
    small, _ = search_while(BIG, wanted)
    assert wanted(small)
    assert size(small) == 1
    assert len(small.json()) < len(BIG.json())


def test_the_nearest_case_that_agrees_differs_in_what_matters() -> None:
    def wanted(candidate: Case) -> bool:
        return any(isinstance(r, Checkpoint) for r in regions(candidate.program.body))

    small, events = search_while(BIG, wanted)
    ended = events[-1]
    assert isinstance(ended, Ended)
    assert ended.nearest is not None
    assert not wanted(ended.nearest)
    assert list(statements(ended.nearest.program.body)) == list(statements(small.program.body))
    assert (ended.nearest.plan, ended.nearest.seed) == (small.plan, small.seed)


def test_the_nearest_case_that_agrees_is_a_neighbour_where_only_a_value_matters() -> None:
    """Not what was tried long before: the case while its values were drawn and not yet held."""

    def wanted(candidate: Case) -> bool:
        held = [frozen(s, candidate.seed) for s in candidate.program.inputs]
        return any(isinstance(v, float) and v > 3 for s in held for v in held_numbers(s))

    drawn_large = case([x("x0", 3, domain="overflow")], call("exp", "x0"), seed=3)
    small, events = search_while(drawn_large, wanted)
    (spec,) = small.program.inputs
    ended = events[-1]
    assert isinstance(ended, Ended)
    assert ended.nearest is not None
    (other,) = ended.nearest.program.inputs
    assert (held_numbers(spec), held_numbers(other)) == ([4.0], [2.0])
    assert distance(small, ended.nearest)[:3] == (1, 1, 0)


PAIR = case([x("x0", 1, 1), x("x1", 1, 1)], call("mm", "x0", "x1"))


@pytest.mark.parametrize(
    ("near", "far"),
    [
        (case(PAIR.program.inputs, under(NoGrad(), call("mm", "x0", "x1"))), BIG),
        (
            msgspec.structs.replace(PAIR, plan=Plan(calls=2)),
            msgspec.structs.replace(PAIR, plan=Plan(calls=2, second="retain")),
        ),
        (
            case([x("x0", 1, 1)], call("mm", "x0", "x0")),
            case([x("x0", 1, 1)], call("add", "x0", "x0")),
        ),
    ],
    ids=["a region", "a plan", "an op"],
)
def test_the_case_with_fewer_differences_is_nearer(near: Case, far: Case) -> None:
    assert distance(PAIR, PAIR) == (0, 0, 0, 0.0)
    assert distance(PAIR, near) < distance(PAIR, far)
    assert nearest(PAIR, [far, near, far]) == near
    assert nearest(PAIR, []) is None


def test_names_and_what_values_are_drawn_from_are_no_distance() -> None:
    held = next(frozen_case(PAIR))
    first, second = (
        msgspec.structs.replace(s, name=f"x{i}") for i, s in enumerate(held.program.inputs, 3)
    )
    renamed = case([first, second], call("mm", "x3", "x4", to="v5"))
    assert distance(held, renamed) == (0, 0, 0, 0.0)
    assert distance(PAIR, held) == (0, 0, 2, 0.0)
    assert distance(PAIR, held, literal=False)[:2] == (0, 0)


def test_a_dtype_is_nearer_than_another_value_and_a_value_nearer_than_a_large_tensor() -> None:
    one = with_numbers(x("x0", 1), [1.0])
    assert one is not None
    least = case([one], call("exp", "x0"))

    def holding(spec: TensorSpec) -> Case:
        return case([spec], call("exp", "x0"))

    half, far = holding(cast(one, "float16")), with_numbers(one, [300.0])
    two = with_numbers(one, [2.0])
    assert far is not None
    assert two is not None
    others = [holding(x("x0", 9)), holding(x("x0", 1)), holding(far), holding(two), half]
    order = sorted(others, key=lambda other: distance(least, other))
    assert order == [others[i] for i in (4, 3, 2, 1, 0)]


def test_every_candidate_is_well_formed() -> None:
    tried = 0
    for original in drawn(20, statements=8):
        answers = iter(range(10**6))
        _, events = search_while(original, lambda _, n=answers: next(n) % 3 == 0, 5)  # type: ignore[misc]
        for event in events:
            event.case.program.check()
            event.case.plan.check()
            tried += isinstance(event, Tried)
    assert tried > 500


WRITES = case(
    [x("x0", 2, 3), x("b1", 2, 3), x("x2", 2, 3)],
    call("feature_dropout", "b1", 0.5, False, to="v0"),
    call("std", "v0", to="v1"),
    call("logical_and", "v0", "x2", to="v2", form="inplace"),
    call("clone", "x0", to="v3"),
    call("feature_dropout", "v3", 0.5, False, to="v4"),
    call("exp", "v4", to="v5", form="inplace"),
)


@pytest.mark.parametrize("op", ["logical_and", "exp"])
def test_no_candidate_writes_an_input_that_is_no_buffer(op: str) -> None:
    """Warm-up calls of a backend would change such an input."""
    small, events = search_while(WRITES, lambda c: uses(c, op))
    tried = [e.case for e in events if isinstance(e, Tried)]
    assert not [str(c.program) for c in tried if wrongly_written(c.program, CATALOGUE)]
    assert [s.op for s in statements(small.program.body)] == [op]


def test_no_plainer_form_writes_in_place() -> None:
    """A checkpoint runs its body twice, so no drawn case writes in one."""
    for op in CATALOGUE.values():
        for form in op.forms:
            made = case([x("x0", 2), x("x1", 2)], call(op.name, "x0", "x1", form=form))
            offered = {s.form for c in forms(made) for s in statements(c.program.body)}
            assert offered.isdisjoint({"inplace", "out"}), (op.name, form)


def test_a_case_that_writes_an_input_gets_small_all_the_same() -> None:
    by_hand = case(
        [x("x0", 2, 3), x("x1", 2, 3)],
        call("std", "x0", to="v0"),
        call("logical_and", "x0", "x1", to="v1", form="inplace"),
    )
    small, _ = search_while(
        by_hand, lambda c: any(s.form == "inplace" for s in statements(c.program.body))
    )
    assert size(small) == 1


def test_what_is_written_through_an_alias_becomes_a_buffer() -> None:
    found = without(WRITES.program, {0, 3}, given(WRITES))
    assert found is not None
    assert not wrongly_written(found, CATALOGUE)
    assert [s.role for s in found.inputs] == ["input", "buffer", "buffer"]


@pytest.mark.thorough
def test_parts_of_drawn_programs_write_only_what_they_may() -> None:
    written = 0
    for one in drawn(60, statements=6):
        values = given(one)
        for number in range(size(one)):
            part = without(one.program, {number}, values)
            if part is not None:
                assert not wrongly_written(part, CATALOGUE)
                written += any(s.form == "inplace" for s in statements(part.body))
    assert written


def test_no_candidate_is_tried_twice() -> None:
    _, events = search_while(BIG, lambda _: False)
    tried = [e.case.id for e in events if isinstance(e, Tried)]
    assert len(tried) == len(set(tried)) > 20


def test_nothing_smaller_leaves_the_case_as_it_is() -> None:
    small, events = search_while(BIG, lambda _: False)
    assert small is BIG
    assert not [e for e in events if isinstance(e, Smaller)]


def test_a_search_that_is_cut_has_told_of_the_best_so_far() -> None:
    kept: list[Case] = []

    def ask(candidate: Case) -> Reply:
        if len(kept) == 5:
            raise KeyboardInterrupt
        kept.append(candidate)
        return "same"

    told: list[Case] = []
    events = search(BIG, ask, values=given, seconds=30)
    with pytest.raises(KeyboardInterrupt):
        told.extend(e.case for e in events if isinstance(e, Smaller))
    assert told == kept


def test_the_time_limit_holds() -> None:
    asked: list[Case] = []

    def ask(candidate: Case) -> Reply:
        asked.append(candidate)
        return "agrees"

    events = search(BIG, ask, values=given, seconds=3, clock=lambda: float(len(asked)))
    *_, last = events
    assert len(asked) == 4  # the first after 3 s
    assert isinstance(last, Ended)
    assert last.reason == "time"


@pytest.mark.parametrize(("pairs", "left"), [(True, "mm+exp"), (False, "exp+softmax")])
def test_the_guilty_two_are_left_and_not_two_others_that_show_the_same(
    pairs: bool, left: str
) -> None:
    chain = case(
        [x("x0", 2, 3), x("w1", 3, 2)],
        call("relu", "x0", to="v0"),
        call("mm", "v0", "w1", to="v1"),
        call("exp", "v1", to="v2"),
        call("softmax", "v2", 0, to="v3"),
    )

    def ask(candidate: Case) -> Answer:
        ops = {s.op for s in statements(candidate.program.body)}
        if eager().reference().run(candidate).raised:
            return Answer("raised")
        if {"mm", "exp"} <= ops or {"exp", "softmax"} <= ops:
            return Answer("diverged", "value", op="exp")
        return Answer("agreed")

    *_, last = shrink(chain, Target("value"), ask, eager().reference(), seconds=30, pairs=pairs)
    assert isinstance(last, Shrunk)
    assert last.op == left
    assert [s.op for s in statements(last.case.program.body)] == left.split("+")


def test_one_of_a_guilty_pair_may_remain_and_is_named() -> None:
    """A plainer plan shows alone what took two under the plan that was drawn."""
    pair = case(
        [x("x0", 2, 3), x("w1", 3, 2)],
        call("mm", "x0", "w1", to="v0"),
        call("exp", "v0", to="v1"),
        call("relu", "v1", to="v2"),
        steps=2,
    )

    def ask(candidate: Case) -> Answer:
        ops = [s.op for s in statements(candidate.program.body)]
        if eager().reference().run(candidate).raised:
            return Answer("raised")
        if "mm" in ops and ("exp" in ops or candidate.plan.steps == 1):
            return Answer("diverged", "value", op="mm")
        return Answer("agreed")

    *_, last = shrink(pair, Target("value"), ask, eager().reference(), seconds=30, pairs=True)
    assert isinstance(last, Shrunk)
    assert last.op == "mm"
    assert [s.op for s in statements(last.case.program.body)] == ["mm"]


def test_the_op_of_a_program_of_last_values_is_that_of_the_whole_program() -> None:
    """Its first wrong value that is returned names an op that does nothing wrong."""
    whole = case(
        [x("x0", 2, 3), x("w1", 3, 2)],
        call("mm", "x0", "w1", to="v0"),
        call("exp", "v0", to="v1"),
        call("relu", "v1", to="v2"),
    )
    last_value = whole.with_program(outputs=("v2",))

    def ask(candidate: Case) -> Answer:
        ops = {s.outputs[0]: s.op for s in statements(candidate.program.body)}
        wrong = [ops[name] for name in candidate.program.outputs if ops[name] != "mm"]
        if not wrong or not {"mm", "exp"} <= {*ops.values()}:
            return Answer("agreed")
        return Answer("diverged", "value", op=wrong[0])

    target = Target("value", op="relu")
    *_, last = shrink(last_value, target, ask, eager().reference(), seconds=30)
    assert isinstance(last, Shrunk)
    assert [s.op for s in statements(last.case.program.body)] == ["mm", "exp"]
    assert last.op == "exp"
