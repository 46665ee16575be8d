"""The explicit program has the casts of autocast as statements, and computes the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from amp_fuzz.cases.case import Case, uses_autocast
from amp_fuzz.cases.program import Autocast, Checkpoint, ProgramError
from amp_fuzz.oracle import explicit as module
from amp_fuzz.oracle.compare import compare
from amp_fuzz.oracle.explicit import Explicit
from amp_fuzz.oracle.trial import Trial
from amp_fuzz.upstream.imitate import imitated
from tests.helpers import BF16, F16, call, case, eager, under, x

SQUARES = [x("x0", 2, 2), x("w1", 2, 2)]
MM = call("mm", "x0", "w1")
AGAIN = call("mm", "v0", "w1", to="v1")
X, W = "a0 = to.dtype[method](x0, bfloat16)", "a1 = to.dtype[method](w1, bfloat16)"
CAST = [X, W, "v0 = mm(a0, a1)"]


def explicit(one: Case) -> Explicit | None:
    """Return the explicit program, which computes what the case does."""
    trial = Trial.of(one, eager())
    made = trial.explicit()
    if made is not None:
        assert compare(trial.expected, made.expected) is None, str(made.case)
    return made


def body(made: Case) -> list[str]:
    """Return the lines of a program, the casts that were written named ``a0``, ``a1``, ..."""
    lines = str(made).splitlines()
    begin = 2 + len(made.program.inputs)
    return [line.strip().replace("v9000000", "a") for line in lines[begin:-1]]


def test_a_program_that_is_called_again_has_no_explicit_program() -> None:
    for context in F16, BF16:  # in the same way too: autocast would stay around a later call
        assert explicit(case(SQUARES, MM, later=((context,),))) is None
    assert explicit(case(SQUARES, MM)) is not None


@pytest.mark.parametrize(
    ("one", "lines"),
    [
        pytest.param(
            case(SQUARES, MM, AGAIN),
            [*CAST, "a2 = to.dtype[method](v0, bfloat16)", "v1 = mm(a2, a1)"],
            id="a cached weight is cast once",
        ),
        pytest.param(
            case(SQUARES, MM, AGAIN, contexts=(Autocast(dtype="bfloat16", cache_enabled=False),)),
            [
                *CAST,
                "a2 = to.dtype[method](v0, bfloat16)",
                "a3 = to.dtype[method](w1, bfloat16)",
                "v1 = mm(a2, a3)",
            ],
            id="without a cache it is cast twice",
        ),
        pytest.param(
            case(
                SQUARES,
                MM,
                under(F16, call("mm", "x0", "x0", to="v1")),
                under(Autocast(enabled=False), call("mm", "x0", "x0", to="v2")),
            ),
            [
                *CAST,
                "a2 = to.dtype[method](x0, float16)",
                "v1 = mm(a2, a2)",
                "v2 = mm(x0, x0)",
            ],
            id="regions",
        ),
        pytest.param(
            case(SQUARES, MM, thread="inside"), ["v0 = mm(x0, w1)"], id="another thread has none"
        ),
        pytest.param(case(SQUARES, MM, thread="whole"), CAST, id="a whole plan in a thread"),
        pytest.param(
            case(SQUARES, under(Checkpoint(), MM)), ["checkpoint:", *CAST], id="checkpoint"
        ),
        pytest.param(
            case([x("x0", 2), x("x1", 2, dtype="float16")], call("stack", ["x0", "x1"])),
            [
                "a0 = to.dtype[method](x0, float32)",
                "a1 = to.dtype[method](x1, float32)",
                "v0 = stack([a0, a1])",
            ],
            id="promotion",
        ),
        pytest.param(
            case([*SQUARES, x("w2", 2)], call("linear", "x0", "w1", "w2", form="module")),
            [X, W, "a2 = to.dtype[method](w2, bfloat16)", "v0 = linear[module](a0, a1, a2)"],
            id="a module whose inputs are cast",
        ),
        pytest.param(
            case(SQUARES, call("einsum", "ij,jk->ik", "x0", "w1")),
            [X, W, "v0 = einsum('ij,jk->ik', a0, a1)"],
            id="a composite op whose inputs are cast",
        ),
    ],
)
def test_the_casts_that_autocast_makes_are_statements(one: Case, lines: Sequence[str]) -> None:
    made = explicit(one)
    assert made is not None
    assert (body(made.case), made.kept) == (list(lines), frozenset())
    assert not uses_autocast(made.case)


@pytest.mark.parametrize(
    ("bug", "one", "casts"),
    [
        (
            "torchax-composites",
            case(
                [x("x0", 1, 1, 2, 2, 2, dtype="float16")],
                call("max_unpool3d", "x0", [1, 1, 1], [2, 2, 2], form="overload"),
            ),
            (1, 0),
        ),
        (
            "torchax-float64",
            case([x("x0", 2, 2, dtype="float64")], call("mm", "x0", "x0"), backward="none"),
            (0, 1),
        ),
        (
            "torchax-float64",
            case([x("x0", 2, 2, dtype="float64")], call("matmul", "x0", "x0"), backward="none"),
            (0, 1),
        ),
        (
            "torchax-float64",
            case(
                [x("x0", 2, 2, dtype="float64")],
                call("tensordot", "x0", "x0", dims=1),
                backward="none",
            ),
            (0, 1),
        ),
    ],
)
def test_the_casts_of_an_imitated_bug_are_statements(
    bug: str, one: Case, casts: tuple[int, int]
) -> None:
    trial = Trial.of(one, eager())
    for each, number in zip((trial, imitated(trial, [bug])), casts, strict=True):
        made = each.explicit()
        assert made is not None
        assert (len(body(made.case)), made.kept) == (number + 1, frozenset())


@pytest.mark.parametrize(
    ("entry", "plainly"),
    [
        ("decorator", "context"),
        ("custom_fwd", "function"),
        ("function", "function"),
        ("function_apart", "function_apart"),
    ],
)
def test_a_program_is_entered_as_one_without_autocast_is(entry: str, plainly: str) -> None:
    backward = "none" if entry == plainly else "outside"  # it recomputes under what is around it
    made = explicit(case(SQUARES, MM, entry=entry, backward=backward))
    assert made is not None
    assert (made.case.plan.entry, body(made.case)) == (plainly, CAST)


@pytest.mark.parametrize(
    ("entry", "plainly"), [("cast_inputs", "function"), ("register_autocast", "custom_op")]
)
def test_a_function_that_casts_its_inputs_to_float32_gets_these_as_they_are_and_casts_others(
    entry: str, plainly: str
) -> None:
    made = explicit(case(SQUARES, MM, entry=entry))
    assert made is not None
    assert (made.case.plan.entry, body(made.case)) == (plainly, ["v0 = mm(x0, w1)"])
    half = [x("x0", 2, 2, dtype="float16"), SQUARES[1]]
    made = explicit(case(half, MM, entry=entry))
    assert made is not None
    cast = ["a0 = to.dtype[method](x0, float32)", "v0 = mm(a0, w1)"]
    assert (made.case.plan.entry, body(made.case), made.kept) == (plainly, cast, frozenset())


def test_a_call_whose_casts_cannot_be_written_stays_under_autocast_alone() -> None:
    """A custom op casts its arguments, and its body is cast otherwise."""
    one = case(SQUARES, call("linear_op", "x0", "w1", None, 1.0), call("mm", "x0", "w1", to="v1"))
    made = explicit(one)
    assert made is not None
    kept = ["autocast(device, bfloat16):", "v0 = linear_op(x0, w1, None, 1.0)"]
    assert body(made.case) == [*kept, X, W, "v1 = mm(a0, a1)"]
    assert made.kept == {"v0"}


def test_there_is_none_of_a_case_without_autocast() -> None:
    assert explicit(case(SQUARES, MM, contexts=())) is None


def test_a_cast_that_the_log_has_wrong_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference of what was written computes another value: that statement stays."""
    honest = module._Writer._cast

    def wrong(self: Any, node: Any, casts: Any) -> Any:
        return honest(self, node, dict.fromkeys(casts, ("float16", False)))

    monkeypatch.setattr(module._Writer, "_cast", wrong)
    made = explicit(case(SQUARES, MM, call("neg", "x0", to="v1")))
    assert made is not None
    assert made.kept == {"v0"}
    assert body(made.case) == ["autocast(device, bfloat16):", "v0 = mm(x0, w1)", "v1 = neg(x0)"]


def test_nothing_is_known_of_a_program_that_never_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.harness, "run_marked", lambda *case: None)
    assert module.calls_of(case(SQUARES, MM), eager().reference()) == {}


def test_a_program_that_would_nest_too_deeply_has_no_explicit_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(program: object) -> None:
        raise ProgramError("too deep")

    monkeypatch.setattr(module, "check", refuse)
    assert explicit(case(SQUARES, MM)) is None


def test_a_statement_that_raises_once_its_inputs_are_cast_stays_under_autocast() -> None:
    """The inverse is cast to float32 inside, the products to bfloat16."""
    inverse = call("matrix_power.negative", "x0", -2, to="v1")
    made = explicit(case(SQUARES, MM, inverse))
    assert made is not None
    assert made.expected.raised is None
    assert made.kept == {"v1"}
