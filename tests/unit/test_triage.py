"""What is guilty is found by running it alone; a fingerprint names the cause and nothing else."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from amp_fuzz.backends.harness import quiet
from amp_fuzz.cases.case import Case, Plan
from amp_fuzz.cases.program import Autocast, Checkpoint, Node, NoGrad, statements
from amp_fuzz.findings.guilty import Fingerprint, alone, fingerprint, guilty, ingredient
from amp_fuzz.findings.minimize import Values, capture
from amp_fuzz.findings.minimize.target import Answer, Target
from amp_fuzz.records.schema import DivergenceRecord
from amp_fuzz.upstream.explain import judge_of
from tests.helpers import BF16, F16, WrongKernel, call, case, eager, under, x

CHAIN = case(
    [x("x0", 2, 3), x("w1", 3, 2)],
    call("relu", "x0", to="v0"),
    call("mm", "v0", "w1", to="v1"),
    call("exp", "v1", to="v2"),
    call("softmax", "v2", 0, to="v3"),
    contexts=(BF16,),
)


def values(case: Case) -> Values:
    return capture(case, eager().reference())


def ops(case: Case) -> list[str]:
    return [s.op for s in statements(case.program.body)]


@pytest.mark.parametrize("op", ["relu", "mm", "exp", "softmax"])
def test_the_statement_that_diverges_alone_is_guilty(op: str) -> None:
    judge = judge_of(WrongKernel(eager(), op), relations="none")

    def diverges(candidate: Case) -> bool:
        return judge.judge(candidate).divergence is not None

    with quiet():
        found = guilty(CHAIN, values(CHAIN), diverges)
    assert found.op == op
    assert found.case is not None
    assert ops(found.case) == [op]


def test_the_first_of_several_is_guilty_unless_another_is_guessed() -> None:
    def diverges(candidate: Case) -> bool:
        return {"mm", "softmax"} & set(ops(candidate)) != set()

    assert guilty(CHAIN, values(CHAIN), diverges).op == "mm"
    assert guilty(CHAIN, values(CHAIN), diverges, guess="softmax").op == "softmax"
    assert guilty(CHAIN, values(CHAIN), diverges, guess="relu").op == "mm"


def test_where_none_diverges_alone_the_smallest_pair_is_guilty() -> None:
    def diverges(candidate: Case) -> bool:
        return {"mm", "exp"} <= set(ops(candidate))

    found = guilty(CHAIN, values(CHAIN), diverges)
    assert (found.op, found.numbers) == ("mm+exp", (1, 2))
    assert guilty(CHAIN, values(CHAIN), diverges, pairs=False).op == ""


def test_two_that_are_the_whole_case_return_what_it_returns() -> None:
    """Returned as well, the first may show another divergence, or hide this one."""
    two = case(CHAIN.program.inputs[:1], call("relu", "x0"), call("exp", "v0", to="v1"))
    two = msgspec.structs.replace(
        two, program=msgspec.structs.replace(two.program, outputs=("v1",))
    )
    found = guilty(two, values(two), lambda c: len(ops(c)) == 2 and c.program.outputs == ("v1",))
    assert (found.op, found.case) == ("relu+exp", two)


def test_where_it_takes_all_none_is_guilty() -> None:
    found = guilty(CHAIN, values(CHAIN), lambda c: len(ops(c)) == 4)
    assert (found.op, found.numbers, found.case) == ("", (), None)


def test_a_statement_alone_has_the_values_that_the_reference_gives_it() -> None:
    whole = eager().run([CHAIN])[0].values
    for number, name in enumerate(("v0", "v1", "v2", "v3")):
        small = alone(CHAIN, (number,), values(CHAIN))
        assert small is not None
        assert small.program.outputs == (name,)
        part = eager().run([small])[0].values[name]
        want = whole[name]
        assert part is not None
        assert want is not None
        assert part.equal(want)


def test_a_statement_alone_stays_in_its_regions_and_can_be_trained_through() -> None:
    nested = case(
        [x("w0", 2)],
        call("exp", "w0", to="v0"),
        under(F16, call("abs", "v0", to="v1")),
    )
    small = alone(nested, (1,), values(nested))
    assert small is not None
    assert [type(n).__name__ for n in small.program.body] == ["Region"]
    assert [s.role for s in small.program.inputs] == ["weight"]


def test_a_pass_under_no_grad_does_not_hide_that_a_value_is_trained_through() -> None:
    trained = case(
        [x("w0", 2)],
        call("exp", "w0", to="v0"),
        call("abs", "v0", to="v1"),
        first_pass="no_grad",
    )
    small = alone(trained, (1,), values(trained))
    assert small is not None
    assert [s.role for s in small.program.inputs] == ["weight"]


# -- fingerprints ---------------------------------------------------------------------------------


def record(**changes: Any) -> DivergenceRecord:
    plain = DivergenceRecord(
        backend="eager-cpu",
        kind="dtype",
        where="v0",
        op="mm",
        policy="lower_precision_fp",
        dtypes="float32,float32",
        expected="bfloat16",
        observed="float32",
        known="",
        case=CHAIN,
    )
    return msgspec.structs.replace(plain, **changes)


def test_a_fingerprint_is_the_same_on_every_machine_and_version() -> None:
    found = fingerprint(record())
    assert found == Fingerprint(
        *("dtype", "eager-cpu", "", "mm", "lower_precision_fp", ("float32", "float32")),
        "autocast+backward=outside",
    )
    assert found.hash == "1d10055658"


def test_a_fingerprint_does_not_depend_on_machine_or_draw() -> None:
    seeded = msgspec.structs.replace(CHAIN, seed=9)
    same = record(where="v7", expected="1.5 at [0]", observed="2", case=seeded, explicit="# ...")
    assert fingerprint(same) == fingerprint(record())


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": "bitwise"},
        {"backend": "fake-cuda"},
        {"stage": "compile[aot_eager]"},
        {"op": "bmm"},
        {"policy": "fp32"},
        {"dtypes": "float16,float32"},
        {"case": msgspec.structs.replace(CHAIN, plan=Plan(steps=2))},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_each_part_tells_two_causes_apart(changes: dict[str, Any]) -> None:
    assert fingerprint(record(**changes)).hash != fingerprint(record()).hash


@pytest.mark.parametrize(
    ("plan", "body", "text"),
    [
        ({"contexts": (), "backward": "none"}, (), ""),
        ({"contexts": (F16,), "backward": "none"}, (), "autocast"),
        ({"contexts": (F16, BF16), "backward": "none"}, (), "nested"),
        ({"contexts": (BF16,)}, (), "autocast+backward=outside"),
        ({"contexts": (), "backward": "none", "calls": 2}, (), "calls"),
        ({"contexts": (), "backward": "none", "settings": ("a", "b")}, (), "settings=a, b"),
        ({"contexts": (), "checkpoint": "reentrant"}, (), "backward=outside+checkpoint=reentrant"),
        (
            {"contexts": (Autocast(enabled=False),), "backward": "none"},
            (under(NoGrad(), call("abs", "x0", to="v1")),),
            "autocast+disabled+no_grad",
        ),
        (
            {"contexts": (), "backward": "none"},
            (under(Checkpoint(), under(BF16, call("abs", "x0", to="v1"))),),
            "autocast+checkpoint",
        ),
    ],
)
def test_an_ingredient_is_what_is_not_plain(
    plan: dict[str, Any], body: tuple[Node, ...], text: str
) -> None:
    assert ingredient(case([x("x0", 2)], call("abs", "x0"), *body, **plan)) == text


# -- what stays -----------------------------------------------------------------------------------

TARGET = Target("value", "v0", "mm", known="", stage="compile[inductor]")
SAME = Answer("diverged", "value", "v3", "mm")


@pytest.mark.parametrize(
    ("answer", "reply"),
    [
        (SAME, "same"),
        (Answer("agreed"), "agrees"),
        (Answer("raised"), "other"),
        (Answer("skipped"), "other"),
        (Answer("crash"), "other"),
        (msgspec.structs.replace(SAME, kind="grad-value"), "other"),
        (msgspec.structs.replace(SAME, op="bmm"), "other"),
        (msgspec.structs.replace(SAME, below=True), "other"),
        (msgspec.structs.replace(SAME, known="a-known-bug"), "other"),
        (msgspec.structs.replace(SAME, errors="A -> B"), "other"),
    ],
)
def test_only_the_same_divergence_is_the_same(answer: Answer, reply: str) -> None:
    assert TARGET.reply(answer) == reply


def test_parts_that_need_not_match_may_differ() -> None:
    loose = msgspec.structs.replace(SAME, op="bmm", kind="range", below=True)
    assert Target("value", "v0", "mm", parts=()).reply(loose) == "same"
    assert Target("value", "v0", "mm", parts=("where",)).reply(loose) == "other"
    assert Target("crash").reply(Answer("crash")) == "same"
    assert Target("crash").reply(Answer("timeout")) == "other"
