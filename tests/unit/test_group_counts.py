"""Each new case counts for one finding, in a report as in a pytest item."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from amp_fuzz.interfaces.plugin.items import Outcome
from amp_fuzz.records.schema import CaseRecord, DivergenceRecord, Record
from amp_fuzz.reports.view import View
from amp_fuzz.runs.engine import Progress
from tests.unit.test_reports import CAT, PLAIN, case, found, kernel, ran, store_of, view_of

CAUSES = "abcd"
causes = st.lists(st.sampled_from(CAUSES), max_size=3, unique=True).map(tuple)
policies = st.lists(st.sampled_from(["none", "fp32", "promote"]), max_size=2, unique=True)


@st.composite
def outcomes(draw: st.DrawFn) -> list[Record]:
    """Draw the records of a run: cases with causes, findings with and without, known and joined."""
    records: list[Record] = [ran()]
    for seed in range(draw(st.integers(0, 12))):
        own = case(CAT, seed=seed)
        outcome = draw(st.sampled_from(["diverged", "diverged", "known", "agreed"]))
        more: dict[str, Any] = {"kind": "dtype", "op": CAT, "at": 0, "kernels": (kernel(CAT),)}
        name = "bug" if outcome == "known" else ""
        record = ran(outcome, case=own, **({} if outcome == "agreed" else more), known=name)
        groups = draw(causes) if outcome == "diverged" else ()
        records.append(replace(record, groups=groups))
        for _ in range(draw(st.integers(0, 2))):
            finding = found(draw(st.sampled_from([own, PLAIN])), known=name)
            records.append(
                replace(
                    finding,
                    fingerprint=draw(st.sampled_from(["", *CAUSES])),
                    as_if=tuple(draw(policies)),
                    joins=draw(st.sampled_from(["", "", *CAUSES])),
                    op=draw(st.sampled_from([CAT, "mm"])),
                )
            )
    return draw(st.permutations(records))


def shown(records: list[Record]) -> View:
    with TemporaryDirectory() as folder:
        return view_of(store_of(Path(folder), records))


@pytest.mark.thorough
@settings(max_examples=25, deadline=None)
@given(outcomes())
def test_the_cases_of_findings_and_those_without_add_up_to_the_headline(
    records: list[Record],
) -> None:
    view = shown(records)
    assert sum(finding.cases for finding in view.new) + view.lost == view.new_cases
    fingerprints = [finding.record.fingerprint or finding.id for finding in view.new]
    assert len(set(fingerprints)) == len(fingerprints)


@pytest.mark.thorough
@settings(max_examples=25, deadline=None)
@given(outcomes())
def test_a_finding_with_a_cause_of_some_case_is_shown(records: list[Record]) -> None:
    new = [r for r in records if isinstance(r, DivergenceRecord) and not r.known]
    cases = [r for r in records if isinstance(r, CaseRecord) and r.outcome == "diverged"]
    met = {name for record in cases for name in record.groups}
    titles = {finding.record.fingerprint for finding in shown(records).new}
    joined = {r.joins for r in new}
    assert ({r.fingerprint for r in new} & met) - joined <= titles


@given(st.lists(causes.filter(bool)))
def test_an_item_counts_each_case_once(groups: list[tuple[str, ...]]) -> None:
    outcome = Outcome()
    for own in groups:
        outcome.add(Progress("eager-cpu", "all", "diverged", own, frozenset()))
    assert outcome.diverged.total() == outcome.cases == len(groups)


def test_a_case_of_two_causes_counts_for_the_first_and_is_named_at_the_other() -> None:
    both = {"kind": "dtype", "op": CAT, "at": 0, "kernels": (kernel(CAT),)}
    cases = [case(CAT, seed=seed) for seed in range(3)]
    records = [
        *(replace(ran("diverged", case=c, **both), groups=("a", "b")) for c in cases),
        replace(found(cases[0]), fingerprint="a"),
        replace(found(cases[0], op="mm"), fingerprint="b"),
    ]
    view = shown(records)
    assert sorted(f.counted for f in view.new) == [
        "0 cases, and 3 that count for another finding",
        "3 cases",
    ]


def test_a_finding_that_another_explains_later_counts_with_that() -> None:
    both = {"kind": "raise", "op": CAT, "at": 0, "kernels": (kernel(CAT),)}
    cases = [case(CAT, seed=seed) for seed in range(3)]
    early = replace(found(cases[0], kind="raise"), fingerprint="a")
    records = [
        *(
            replace(ran("diverged", case=c, **both), groups=(n,))
            for c, n in zip(cases, "aab", strict=True)
        ),
        early,
        replace(found(cases[2]), fingerprint="b", as_if=("fp32", "none"), overload="cat"),
        replace(early, fingerprint="b", as_if=("fp32",), overload="cat", joins="a"),
    ]
    (finding,) = shown(records).new
    assert (finding.cases, finding.record.kind) == (3, "dtype")
    assert finding.title == "cat behaves as if its policy were fp32, not promote"
