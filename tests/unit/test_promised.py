"""Reports say how many cases could have falsified a promise, and a page says who follows it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from amp_fuzz.records.compaction import compact
from amp_fuzz.records.facts import within_reach
from amp_fuzz.records.promises import promises
from amp_fuzz.records.schema import CaseRecord, Record
from amp_fuzz.records.store import Store
from amp_fuzz.reports import html, text
from amp_fuzz.reports.machine import as_json
from amp_fuzz.reports.markdown import render
from amp_fuzz.reports.promised import ENOUGH, totals
from amp_fuzz.reports.view import View
from tests.upstream.test_pages import DOCS, script

from .test_reports import END, ran, store_of, view_of


def counting(*names: str, backend: str = "eager-cpu") -> CaseRecord:
    """Return a case that could have falsified these promises."""
    return replace(ran(backend=backend), promises=names)


MANY: list[Record] = [counting("autocast.context", "cpu:mm") for _ in range(ENOUGH)]
RUN: list[Record] = [*MANY, counting("cpu:mm"), counting("cuda:mm", backend="fake-cuda"), END]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return store_of(tmp_path, RUN)


def cases(view: View) -> dict[str, int]:
    return {p.promise.id: p.cases for p in view.promised}


def test_each_promise_has_the_number_of_its_cases(store: Store) -> None:
    found = cases(view_of(store))
    assert (found["autocast.context"], found["cpu:mm"], found["cuda:mm"]) == (20, 21, 1)
    assert found["cpu:bmm"] == 0


def test_a_promise_about_another_backend_is_left_out(store: Store) -> None:
    found = cases(view_of(store))
    assert not {"xpu:mm", "export.eager", "amp.compile-off", "scaler.growth"} & {*found}
    one = promises().by_id["export.eager"]
    assert within_reach(one, [("device=cpu", "backend=export")])
    assert not within_reach(one, [("device=cuda", "backend=export")])
    assert not within_reach(one, [("device=cpu", "backend=torch")])


def test_totals_tell_enough_cases_from_fewer_and_from_none(store: Store) -> None:
    *documents, whole = totals(view_of(store).promised)
    assert (whole.enough, whole.fewer) == (2, 1)
    assert whole.enough + whole.fewer + whole.none == whole.promises
    assert sum(d.promises for d in documents) == whole.promises


def test_a_promise_with_one_case_less_is_not_tested_enough(tmp_path: Path) -> None:
    """A seeded fault: a limit that is off by one would count this one."""
    view = view_of(store_of(tmp_path, [*MANY[1:], END]))
    assert totals(view.promised)[-1].enough == 0


def test_the_terminal_has_one_line_of_it(store: Store) -> None:
    said = text.render(view_of(store), width=100, verbose=True)
    (line,) = [line for line in said.splitlines() if "promises" in line]
    whole = totals(view_of(store).promised)[-1]
    assert line == (
        f"promises that cases could have falsified, of {whole.promises}: 2 by 20 cases or more, "
        f"{whole.none} by none"
    )
    assert "promises" not in text.render(view_of(store), width=100)


def test_markdown_has_a_table_and_names_what_no_case_tests(store: Store) -> None:
    lines = render(view_of(store)).splitlines()
    assert "| document | promises | by 20 cases or more | by fewer | by none |" in lines
    assert "| `cuda:mm` | mm: its floating inputs are cast to the low dtype. | 1 |" in lines
    (none,) = [line for line in lines if line.startswith("No case could have falsified: ")]
    assert "`cpu:bmm`" in none
    assert "`cpu:mm`" not in none


def test_html_has_a_page_of_all(store: Store) -> None:
    pages = html.pages(view_of(store))
    assert 'href="promises.html"' in pages["report.html"]
    assert "<code>cpu:bmm</code>" in pages["report.html"]
    row = pages["promises.html"].partition(">cpu:mm</th>")[2].partition("</tr>")[0]
    assert '<td class="num">21</td>' in row


def test_json_has_the_numbers_by_backend(store: Store) -> None:
    rows = {row["id"]: row["cases"] for row in json.loads(as_json(view_of(store)))["promises"]}
    assert rows["cpu:mm"] == {"eager-cpu": 21}
    assert rows["cpu:bmm"] == {}


def test_a_run_of_an_earlier_amp_fuzz_says_nothing(tmp_path: Path) -> None:
    view = view_of(store_of(tmp_path, [ran(), END]))
    assert view.promised == ()
    assert "promises.html" not in html.pages(view)
    assert "Promises" not in render(view)


def test_a_compacted_run_counts_the_same(store: Store) -> None:
    pytest.importorskip("pyarrow")
    before = view_of(store)
    compact(store, "r1")
    assert view_of(store).promised == before.promised


# -- the page -------------------------------------------------------------------------------------


def test_the_page_is_what_the_data_says() -> None:
    path = DOCS / "reference" / "promises.md"
    assert path.read_text() == script("promises").page(), "run make pages"


def test_the_page_says_why_a_promise_has_few_cases() -> None:
    pages = script("promises")
    found = json.loads(pages.MEASURED.read_text())
    for promise in promises().by_id.values():
        places = [one["place"] for one in found["backends"].values()]
        if within_reach(promise, places) and pages.expected(found, promise) < ENOUGH:
            assert promise.op or promise.id in promises().rare


def test_the_page_has_every_promise_and_who_follows_it() -> None:
    text = (DOCS / "reference" / "promises.md").read_text()
    for promise in promises().by_id.values():
        assert (f"`{promise.op}` (" if promise.op else f"| `{promise.id}` | ") in text
        assert promise.op or promise.says in text
    for who in ("rule `serves`", "relation cache", "contract `placement`"):
        assert f"| {who} | `" in text
