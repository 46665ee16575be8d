"""The table of torches counts what runs came to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from amp_fuzz.cases.build import call, case, x
from amp_fuzz.records.schema import BackendRecord, CaseRecord, RunRecord, unanswered
from amp_fuzz.records.store import Store
from benchmarks.matrix import page, put, rows

pytestmark = pytest.mark.thorough


def row(torch: str, backend: str, **more: Any) -> dict[str, Any]:
    made = {"torch": torch, "python": "3.11.7", "backend": backend, "cases": 10000}
    counts = {"agreed": 9980, "raised": 14, "own": 1, "known": 5}
    return {**made, **counts, "unexplained": {}, **more}


def test_a_row_takes_the_place_of_an_earlier_one_of_the_same_torch_and_backend() -> None:
    result: dict[str, Any] = {}
    for one in (row("2.11.0", "script"), row("2.9.1", "script"), row("2.9.1", "script", cases=7)):
        put(result, "runs", one)
    assert [(r["torch"], r["cases"]) for r in result["runs"]] == [("2.9.1", 7), ("2.11.0", 10000)]


def test_unexplained_divergences_and_failed_tests_are_named() -> None:
    tests = {"torch": "2.7.1", "python": "3.11.7", "folders": "tests/unit"}
    tests |= {"result": "1 failed, 2 passed", "failed": ["tests/unit/test_a.py::test_b"]}
    text = page({"runs": [row("2.7.1", "trace", unexplained={"raise mm": 2})], "tests": [tests]})
    assert "| `trace` | 10,000 | 9,980 | 14 | 1 | 5 | 2 `raise mm` |" in text
    assert "| `tests/unit` | 1 failed, 2 passed | `tests/unit/test_a.py::test_b` |" in text
    assert "| 1 | 5 | 0 |" in page({"runs": [row("2.7.1", "trace")]})
    before = {k: v for k, v in row("2.7.1", "trace").items() if k != "own"}
    assert "| 14 |  | 5 | 0 |" in page({"runs": [before]})  # when nobody asked


def test_a_case_that_ended_its_process_counts(tmp_path: Path) -> None:
    """It has a divergence, and no record of the case."""
    backend = BackendRecord("fake-mtia", "mtia", "ready")
    versions = {"torch": "2.7.1", "python": "3.11.7"}
    run = RunRecord("r", 7, "dev", (backend,), versions, "2026-01-01T00:00:00+00:00")
    store = Store(tmp_path)
    store.begin(run)
    crash, agreed, left = (case([x("x0", n)], call("exp", "x0")) for n in (1, 2, 3))
    writer = store.writer("r", "0")
    # Listed as open: nobody has explained it.
    known = {"op": "exp", "kind": "dtype", "known": "a-bug+open-exp"}
    writer.write(CaseRecord(left.id, "fake-mtia", "all", "known", ("exp",), (), {}, **known))
    writer.write(CaseRecord(agreed.id, "fake-mtia", "all", "agreed", ("exp",), (), {}))
    writer.write(unanswered("fake-mtia", "crash", crash, "the worker died", "all", "exp"))
    writer.close()
    (found,) = rows(store, "r")
    unexplained = {"dtype exp": 1, "crash exp": 1}
    assert (found["cases"], found["agreed"], found["unexplained"]) == (3, 1, unexplained)
    assert (found["own"], found["known"]) == (0, 0)
