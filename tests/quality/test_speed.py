"""docs/speed.md says what was measured."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_table_is_that_of_the_benchmark() -> None:
    backends = json.loads((ROOT / "benchmarks" / "compilers.json").read_text())["backends"]
    rows = [
        f"| `{name}` | {row['cases']} | {row['bare, cases/s']} | {row['judged, cases/s']} |"
        f" {row['ratio']} |"
        for name, row in backends.items()
    ]
    page = (ROOT / "docs" / "speed.md").read_text().splitlines()
    assert [line for line in page if line.startswith("| `")] == rows
