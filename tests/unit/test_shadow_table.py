"""docs/evidence/shadow-operators.md says what was measured, and each row's kind is borne out."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import shadow_table as table

pytestmark = pytest.mark.thorough

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_the_page_is_what_was_measured() -> None:
    assert table.PAGE.read_text() == table.page(*table.load()), (
        "run python benchmarks/shadow_table.py"
    )


@pytest.mark.parametrize("part", table.PARTS)
def test_what_is_left_open_is_listed(part: str) -> None:
    """And nothing else is listed: an entry goes when its row is explained."""
    measured, known = table.load()
    (entry,) = [e for e in known["_open"] if e["part"] == part]
    assert table.left_open(measured, known, part) == sorted(entry["kernels"])


def test_a_row_of_the_database_is_open_only_by_name() -> None:
    row = {"operator": "new", "kernel": "new.default", "result": "float32", "experiments": {}}
    entry = {"part": "operator database", "kernels": ["new float32"], "why": "its sums"}
    assert table.explained(row, {"_open": [entry]}) == (table.OPEN, "its sums")
    for other in ({"kernels": ["new float16"]}, {"part": "random cases"}):
        with pytest.raises(table.Unexplained, match=r"no new\.default"):
            table.explained(row, {"_open": [entry | other]})


def test_a_finding_that_is_named_has_a_page() -> None:
    _, known = table.load()
    for entries in known.values():
        for entry in entries:
            if "why" in entry and "](" in entry["why"]:
                page = entry["why"].partition("](")[2].partition(")")[0]
                assert (table.PAGE.parent / page).exists(), page


def test_every_operator_and_dtype_has_its_distribution() -> None:
    measured, _ = table.load()
    lines = (BENCHMARKS / "shadow.csv").read_text().splitlines()[1:]
    assert len({line.split(",")[0] for line in lines}) == measured["operator database"]["operators"]
    counted = sum(int(line.split(",")[3]) for line in lines)
    assert counted == measured["operator database"]["comparisons"]


@pytest.mark.parametrize("experiment", ["alone", "in float32"])
def test_a_row_whose_experiments_say_otherwise_is_unexplained(experiment: str) -> None:
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


def test_a_kernel_that_nobody_explained_is_an_error() -> None:
    row = {"kernel": "new.default", "result": "float32", "experiments": {"scaled": 0.4}}
    with pytest.raises(table.Unexplained, match=r"no new\.default"):
        table.kind(row, {})
