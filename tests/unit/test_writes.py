"""A program writes buffers and values of its own, and no input through an alias."""

from __future__ import annotations

import pytest

from amp_fuzz.cases.build import call, program, x
from amp_fuzz.cases.program import Program
from amp_fuzz.catalogue import CATALOGUE
from amp_fuzz.catalogue.writes import wrongly_written

_WRITE = call("exp", "v0", to="v9", form="inplace")


@pytest.mark.parametrize(
    ("made", "name"),
    [
        (program([x("x0", 2)], call("exp", "x0", form="inplace")), "x0"),
        (program([x("w0", 2)], call("exp", "w0", form="inplace")), "w0"),
        (program([x("x0", 2), x("x1", 2)], call("exp", "x0", form="out", out="x1")), "x1"),
        (program([x("x0", 2, 3)], call("feature_dropout", "x0", 0.5, False), _WRITE), "x0"),
        (program([x("x0", 2, 3)], call("einsum", "ij->ji", "x0"), _WRITE), "x0"),
        (program([x("x0", 2, 3)], call("einsum", "ij", "x0"), _WRITE), "x0"),
        (
            program(
                [x("x0", 3), x("x1", dtype="int64", domain="index", bound=3)],
                call("getitem.tensor", "x0", "x1", form="operator"),
                _WRITE,
            ),
            "x0",
        ),
        (
            program(
                [x("x0", 2)],
                call("detach", "x0", to="v1"),
                call("abs", "v1", to="v0", form="inplace"),
            ),
            "x0",
        ),
        (program([x("b0", 2, 3)], call("unbind", "b0", to="v0 v1"), _WRITE), "v0"),
        (program([x("b0", 1)], call("expand", "b0", [2], form="method"), _WRITE), "v0"),
    ],
)
def test_a_write_to_an_input_or_to_shared_elements_is_named(made: Program, name: str) -> None:
    assert wrongly_written(made, CATALOGUE) == name


@pytest.mark.parametrize(
    "made",
    [
        program([x("b0", 2)], call("exp", "b0", form="inplace")),
        program([x("x0", 2), x("b1", 2)], call("exp", "x0", form="out", out="b1"), _WRITE),
        program([x("b0", 2, 3)], call("feature_dropout", "b0", 0.5, False), _WRITE),
        program([x("x0", 2)], call("clone", "x0"), _WRITE),
        program([x("x0", 2, 3)], call("einsum", "ij->", "x0"), _WRITE),
        program(
            [x("x0", 3), x("x1", 3, dtype="int64", domain="index", bound=3)],
            call("getitem.tensor", "x0", "x1", form="operator"),
            _WRITE,
        ),
        program(
            [x("b0", 2, 3)],
            call("unbind", "b0", to="v0 v1"),
            call("exp", "b0", to="v2", form="inplace"),
        ),
    ],
)
def test_a_write_to_a_buffer_or_to_a_value_of_the_program_is_allowed(made: Program) -> None:
    assert wrongly_written(made, CATALOGUE) == ""
