"""The table of torches counts what runs came to."""

from __future__ import annotations

from typing import Any

from benchmarks.matrix import page, put


def row(torch: str, backend: str, **more: Any) -> dict[str, Any]:
    made = {"torch": torch, "python": "3.11.7", "backend": backend, "cases": 10000}
    return {**made, "diverging": 3, "unexplained": {}, **more}


def test_a_row_takes_the_place_of_an_earlier_one_of_the_same_torch_and_backend() -> None:
    result: dict[str, Any] = {}
    for one in (row("2.11.0", "script"), row("2.9.1", "script"), row("2.9.1", "script", cases=7)):
        put(result, "runs", one)
    assert [(r["torch"], r["cases"]) for r in result["runs"]] == [("2.9.1", 7), ("2.11.0", 10000)]


def test_unexplained_divergences_and_failed_tests_are_named() -> None:
    tests = {"torch": "2.7.1", "python": "3.11.7", "folders": "tests/unit"}
    tests |= {"result": "1 failed, 2 passed", "failed": ["tests/unit/test_a.py::test_b"]}
    text = page({"runs": [row("2.7.1", "trace", unexplained={"raise mm": 2})], "tests": [tests]})
    assert "| 2.7.1 | 3.11.7 | `trace` | 10,000 | 3 | 2 `raise mm` |" in text
    assert "| `tests/unit` | 1 failed, 2 passed | `tests/unit/test_a.py::test_b` |" in text
    assert "| 3 | 0 |" in page({"runs": [row("2.7.1", "trace")]})
