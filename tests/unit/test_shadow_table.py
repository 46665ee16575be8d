"""docs/shadow-operators.md says what was measured, and each row's kind is borne out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def table() -> Any:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import shadow_table
    finally:
        sys.path.remove(str(BENCHMARKS))
    return shadow_table


def test_the_page_is_what_was_measured(table: Any) -> None:
    assert table.PAGE.read_text() == table.page(*table.load()), (
        "run python benchmarks/shadow_table.py"
    )


def test_what_is_left_open_is_listed(table: Any) -> None:
    """No operator of the database is: `page` raises. Kernels of the random cases are counted."""
    measured, known = table.load()
    assert table.left_open(measured, known) == sorted(known["_open"][0]["kernels"])


def test_a_finding_that_is_named_has_a_page(table: Any) -> None:
    _, known = table.load()
    for entries in known.values():
        for entry in entries:
            if "why" in entry and "](" in entry["why"]:
                page = entry["why"].partition("](")[2].partition(")")[0]
                assert (table.PAGE.parent / page).exists(), page


def test_every_operator_and_dtype_has_its_distribution(table: Any) -> None:
    measured, _ = table.load()
    lines = (BENCHMARKS / "shadow.csv").read_text().splitlines()[1:]
    assert len({line.split(",")[0] for line in lines}) == measured["operator database"]["operators"]
    counted = sum(int(line.split(",")[3]) for line in lines)
    assert counted == measured["operator database"]["comparisons"]


@pytest.mark.parametrize("experiment", ["alone", "in float32"])
def test_a_row_whose_experiments_say_otherwise_is_unexplained(table: Any, experiment: str) -> None:
    known = {
        "_honest": [{"kind": "what came in", "why": "several roundings"}],
        "addr": [{"kind": "16 bits inside", "why": "rounds the product"}],
    }
    row = {"kernel": "addr.default", "result": "float16", "experiments": {experiment: 0.4}}
    row["values with 64 samples"] = 1
    assert (
        table.kind(row, known)[0]
        == {
            "alone": "what came in",
            "in float32": "16 bits inside",
        }[experiment]
    )
    row["experiments"] = {experiment: 12.6}
    with pytest.raises(table.Unexplained, match=r"no addr\.default, float16"):
        table.kind(row, known)


def test_a_kernel_that_nobody_explained_is_an_error(table: Any) -> None:
    row = {"kernel": "new.default", "result": "float32", "experiments": {"scaled": 0.4}}
    with pytest.raises(table.Unexplained, match=r"no new\.default"):
        table.kind(row, {})
