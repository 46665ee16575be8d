"""A run says how likely causes are that it has not seen, and which ingredients no case had."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from amp_fuzz.records.compaction import compact
from amp_fuzz.records.fingerprint import plan_words
from amp_fuzz.records.schema import CaseRecord, EndRecord, Record
from amp_fuzz.records.store import Store
from amp_fuzz.reports import text
from amp_fuzz.reports.machine import as_json
from amp_fuzz.reports.markdown import render
from amp_fuzz.reports.unseen import Unseen, estimate
from tests.helpers import leading

from .test_reports import CAT, END, PLAIN, case, found, page_of, ran, store_of, view_of

BUG, OTHER, GROUP = "promote-foreign-half", "other-bug", "0123456789"


def one(known: str = "", *, groups: Sequence[str] = (), own: bool = False) -> CaseRecord:
    """Return a drawn case that shows known bugs, or causes that nothing explains."""
    outcome = "known" if known else "backend" if own else "diverged"
    record = ran(outcome, kind="dtype", op=CAT, known=known or "backend" * own)
    return replace(record, groups=tuple(groups))


def causes(path: Path, records: Sequence[Record]) -> list[Unseen]:
    return list(view_of(store_of(path, records)).unseen)


# -- the estimator --------------------------------------------------------------------------------


def test_a_cause_seen_once_in_n_cases_makes_the_next_one_as_likely_as_1_in_n() -> None:
    said = estimate([1, 2, 5], 1000)
    assert said.next_case == pytest.approx(1 / 1000)
    assert said.chance == pytest.approx(1 - (1 - 1 / 1000) ** 1000)


def test_without_a_rare_cause_the_bound_is_the_rule_of_three() -> None:
    said = estimate([50, 400], 10_000)
    assert (said.next_case, said.chance, said.causes) == (0.0, 0.0, 0.0)
    assert said.at_most == pytest.approx(1 - (1 - 3 / 10_000) ** 1000, rel=0.02)  # 26 %


def test_a_cause_that_is_seen_a_second_time_counts_no_more() -> None:
    """A seeded fault: counted as seen once, it would make an unseen cause seem likelier."""
    once, twice = estimate([1], 5000), estimate([2], 5000)
    assert once.chance == pytest.approx(0.18, abs=0.01)
    assert twice.chance == 0.0
    assert twice.causes < once.causes


@pytest.mark.parametrize(
    ("count", "most"), leading([(0, 2.996), (1, 4.744), (3, 7.754), (30, 40.69)])
)
def test_the_bound_is_that_of_a_poisson_mean(count: int, most: float) -> None:
    """The exact ones are half the 95 % quantile of chi squared with 2 count + 2 degrees."""
    assert estimate([1] * count, 10**6, 1).at_most * 10**6 == pytest.approx(most, rel=0.01)


@pytest.mark.thorough
def test_causes_seen_twice_make_the_bound_wider() -> None:
    plain, more = estimate([1] * 30, 10**6, 1), estimate([1] * 30 + [2] * 30, 10**6, 1)
    assert more.at_most > plain.at_most


def test_the_number_of_new_causes_is_that_of_good_and_toulmin() -> None:
    """Efron and Thisted's weights hardly change it while few cases more are asked about."""
    said = estimate([1] * 40 + [2] * 10 + [3] * 4, 1000, 250)
    assert said.causes == pytest.approx(40 / 4 - 10 / 16 + 4 / 64, rel=0.01)


@pytest.mark.thorough
def test_beyond_the_cases_of_the_run_the_number_is_in_proportion() -> None:
    counts = [1] * 10 + [2] * 3
    assert estimate(counts, 100, 1000).causes == pytest.approx(
        10 * estimate(counts, 100, 100).causes
    )


def test_without_cases_nothing_is_known() -> None:
    assert (estimate([], 0).chance, estimate([], 0).at_most) == (1.0, 1.0)
    assert estimate([1, 1], 2).at_most == 1.0


@pytest.mark.thorough
@pytest.mark.parametrize("spread", [1.0, 1.5, 2.0])
def test_estimates_of_drawn_causes_come_true(spread: float) -> None:
    """60 causes, of which the i-th is i ** spread times as rare as the first."""
    shares = 0.1 / np.arange(1, 61) ** spread
    runs = np.random.default_rng(7).binomial(300, shares, (2, 400, 60))
    first, second = runs
    new = (second * (first == 0) > 0).sum(1)
    unseen = 1 - np.where(first, 1.0, 1 - shares).prod(1)
    said = [estimate(counts.tolist(), 300, 300) for counts in first]
    bounds = [estimate(counts.tolist(), 300, 1).at_most for counts in first]
    assert sum(s.causes for s in said) == pytest.approx(new.sum(), rel=0.15)
    assert sum(s.chance for s in said) == pytest.approx((new > 0).sum(), rel=0.15)
    assert sum(s.next_case for s in said) == pytest.approx(unseen.sum(), rel=0.15)
    assert (unseen <= bounds).mean() >= 0.94
    assert (unseen <= [s.next_case for s in said]).mean() < 0.9  # a seeded fault: no bound


# -- of a run -------------------------------------------------------------------------------------


def test_known_bugs_and_new_causes_are_causes_and_own_ones_are_apart(tmp_path: Path) -> None:
    records = [ran() for _ in range(20)]
    records += [one(BUG), one(BUG), one(f"{BUG}+{OTHER}"), one(groups=[GROUP])]
    records += [one(groups=["a", "b"], own=True), one(groups=["b"], own=True), END]
    ours, theirs = causes(tmp_path, records)
    assert (ours.cases, ours.causes, ours.once, ours.twice, ours.own) == (26, 3, 2, 0, False)
    assert (theirs.cases, theirs.causes, theirs.once, theirs.twice) == (26, 2, 1, 1)
    assert (ours.name, theirs.name) == ("eager-cpu", "eager-cpu, its own")


@pytest.mark.parametrize("family", leading(["coverage", "findings", "corpus", "baseline"]))
def test_what_was_not_drawn_counts_for_nothing_but_what_it_shows_is_seen(
    family: str, tmp_path: Path
) -> None:
    records = [ran(), ran(), one(BUG), one(OTHER), replace(one(BUG), family=family), END]
    (only,) = causes(tmp_path, records)
    assert (only.cases, only.causes, only.once) == (4, 1, 1)


@pytest.mark.thorough
def test_a_fingerprint_that_joined_a_cause_is_that_cause(tmp_path: Path) -> None:
    joined = replace(found(PLAIN), fingerprint=GROUP, joins="earlier")
    records = [ran(), one(groups=[GROUP]), one(groups=["earlier"]), joined, END]
    (only,) = causes(tmp_path, records)
    assert (only.causes, only.once, only.twice) == (1, 0, 1)


@pytest.mark.thorough
def test_a_case_that_was_not_examined_is_told_by_its_kind_and_op(tmp_path: Path) -> None:
    records = [one(), one(), replace(one(), op="mm"), END]
    (only,) = causes(tmp_path, records)
    assert (only.causes, only.once, only.twice) == (2, 1, 1)


def test_a_run_of_cases_that_only_aim_says_that_it_does_not_know(tmp_path: Path) -> None:
    (only,) = causes(tmp_path, [replace(ran(), family="coverage"), END])
    assert (only.likely, only.counted, only.expected) == (
        "unknown: too few cases",
        "0 drawn cases, 0 causes seen once",
        "-",
    )


def planned(plan: str, backend: str = "eager-cpu") -> CaseRecord:
    return replace(ran(backend=backend), plan=plan)


def test_ingredients_are_those_that_no_case_had_on_any_backend(tmp_path: Path) -> None:
    records = [planned("autocast+second=double"), planned("nested+settings=a, b", "fake-cuda"), END]
    view = view_of(store_of(tmp_path, records))
    assert "second=double" in view.untried["fake-cuda"]
    assert "settings" in view.untried["eager-cpu"]
    left = view.untried_anywhere
    assert not {"autocast", "nested", "second=double", "settings"} & {*left}
    assert {"transform=vmap", "checkpoint"} <= {*left}


@pytest.mark.thorough
def test_a_case_that_died_had_its_ingredients(tmp_path: Path) -> None:
    dead = found(case("linalg.svd", seed=9), kind="crash", op="")
    assert (
        "autocast"
        not in view_of(store_of(tmp_path, [dead, planned("steps"), END])).untried["eager-cpu"]
    )


@pytest.mark.thorough
def test_an_earlier_amp_fuzz_did_not_record_plans(tmp_path: Path) -> None:
    assert view_of(store_of(tmp_path, [ran(), END])).untried == {}


@pytest.mark.thorough
def test_a_compacted_run_has_seen_the_same(store: Store) -> None:
    pytest.importorskip("pyarrow")
    before = view_of(store)
    compact(store, "r1")
    after = view_of(store)
    assert (after.unseen, after.untried) == (before.unseen, before.untried)
    assert after.untried["fake-cuda"]


# -- reports --------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Return a run of 2,000 cases on eager, of which one shows a bug, and 60 on another backend."""
    words = [word for word in plan_words() if word not in ("steps", "transform=vmap")]
    records = [planned("+".join(words)) for _ in range(1999)]
    records += [one(BUG)] + [planned("nested", "fake-cuda") for _ in range(60)]
    return store_of(tmp_path, [*records, EndRecord("", "", 2060, 1.0)])


def test_the_terminal_says_it_only_if_asked(store: Store) -> None:
    view = view_of(store)
    said = text.render(view, width=80, verbose=True)
    start = said.index("chance that")
    assert (
        said[start:].split("\n\n")[0]
        == """\
chance that 1,000 more cases show a cause not seen yet
  eager-cpu: 39 %, at most 91 % (2,000 drawn cases, 1 cause seen once)
  fake-cuda: unknown: too few cases (60 drawn cases, 0 causes seen once)
no case had: steps, transform=vmap"""
    )


def test_written_reports_have_the_numbers(store: Store) -> None:
    view = view_of(store)
    facts: dict[str, Any] = json.loads(as_json(view))["unseen"]
    eager, _ = facts["causes"]
    assert (eager["backend"], eager["cases"], eager["once"]) == ("eager-cpu", 2000, 1)
    assert eager["ahead"]["cases"] == 1000
    assert eager["ahead"]["chance"] == pytest.approx(0.3935, abs=1e-4)
    assert facts["ingredients"]["eager-cpu"] == ["steps", "transform=vmap"]
    line = "| `eager-cpu` | 39 %, at most 91 % | 0.5 | 2,000 drawn cases, 1 cause seen once |"
    assert line in render(view)
    page = page_of(view)
    assert "39 %, at most 91 %" in page
    assert "<code>transform=vmap</code>" in page
