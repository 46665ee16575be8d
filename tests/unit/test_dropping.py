"""What is drawn can be left out again, by a choice of its own, and what stays is a program."""

from __future__ import annotations

import random

import pytest

from amp_fuzz.cases.program import (
    Autocast,
    NoGrad,
    Program,
    regions,
    returning_last,
    statements,
    uses,
)
from amp_fuzz.catalogue import check
from amp_fuzz.strategies.dropping import dropped
from tests.helpers import call, drawn, program, under, x

ALL = program(
    [x("x0", 2, 2), x("x1", 2, 2), x("x2", 2, 2)],
    call("neg", "x0", to="v0"),
    under(
        Autocast(dtype="bfloat16"),
        call("mm", "x1", "x1", to="v1"),
        under(NoGrad(), call("exp", "x2", to="v2")),
    ),
    call("relu", "v1", to="v3"),
)
KEPT = [1] * 12


def made(one: Program) -> list[str]:
    return [n for s in statements(one.body) for n in s.outputs]


@pytest.mark.parametrize(
    ("keeps", "names", "inputs"),
    [
        ([1, 1, 1, 1], ["v0", "v1", "v2", "v3"], ["x0", "x1", "x2"]),
        ([0, 1, 1, 1], ["v1", "v2", "v3"], ["x1", "x2"]),
        ([1, 0, 1, 1], ["v0", "v1", "v2", "v3"], ["x0", "x1", "x2"]),  # it is read
        ([1, 1, 0, 1], ["v0", "v1", "v3"], ["x0", "x1"]),
        ([0, 0, 0, 0], ["v1", "v3"], ["x1"]),
        ([], ["v0", "v1", "v2", "v3"], ["x0", "x1", "x2"]),
    ],
)
def test_an_unread_statement_goes_if_its_choice_is_0(
    keeps: list[int], names: list[str], inputs: list[str]
) -> None:
    less = dropped(ALL, keeps, KEPT)
    assert made(less) == list(less.outputs) == names
    assert [s.name for s in less.inputs] == inputs
    less.check()


@pytest.mark.parametrize(
    ("around", "left"),
    [
        ([1, 1], [Autocast(dtype="bfloat16"), NoGrad()]),
        ([0, 1], [NoGrad()]),
        ([1, 0], [Autocast(dtype="bfloat16")]),
        ([0, 0], []),
    ],
)
def test_a_region_goes_and_what_is_in_it_stays(around: list[int], left: list[object]) -> None:
    less = dropped(ALL, KEPT, around)
    assert list(regions(less.body)) == left
    assert made(less) == made(ALL)


def test_a_region_of_nothing_goes() -> None:
    less = dropped(ALL, [1, 1, 0, 1], KEPT)
    assert list(regions(less.body)) == [Autocast(dtype="bfloat16")]


def test_a_program_of_last_values_still_returns_its_last_values() -> None:
    whole = returning_last(ALL)
    assert whole.outputs == ("v0", "v2", "v3")
    assert dropped(whole, [0, 1, 1, 1], KEPT).outputs == ("v2", "v3")
    assert dropped(whole, KEPT, KEPT) is whole


def test_the_remaining_program_is_well_formed() -> None:
    rng, less = random.Random(1), 0
    for case in drawn(200):
        whole = case.program
        part = dropped(whole, rng.choices((0, 1), k=12), rng.choices((0, 1), k=12))
        check(part)
        assert part.outputs
        if part != whole:
            used = {name for statement in statements(part.body) for name in uses(statement)}
            assert used >= {spec.name for spec in part.inputs}
            less += 1
    assert less > 100
