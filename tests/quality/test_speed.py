"""docs/evidence/speed.md says what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "evidence" / "speed.md").read_text()


def measured(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "benchmarks" / name).read_text())["backends"]
    return found


def table(heading: str) -> list[str]:
    """Return the rows of the tables under a heading."""
    section = PAGE.partition(f"# {heading}\n")[2].partition("\n#")[0]
    return [line for line in section.splitlines() if line.startswith("| `")]


def test_the_table_is_that_of_the_benchmark() -> None:
    assert table("Speed") == [
        f"| `{name}` | {row['cases']} | {row['bare, cases/s']} | {row['judged, cases/s']} |"
        f" {row['ratio']} |"
        for name, row in measured("compilers.json").items()
    ]


def test_the_table_of_jax_is_that_of_the_benchmark() -> None:
    parts = ("cold", "same", "disk", "new")
    assert table("JAX and torchax") == [
        f"| `{name}` | {row['compile_s']:.2f} | "
        + " | ".join(f"{row[part]['per_s']}" for part in parts)
        + f" | {row['cold']['MiB a case']} |"
        for name, row in measured("jax_cost.json").items()
    ]


def test_the_parts_of_a_case_are_those_of_the_benchmark() -> None:
    found: dict[str, Any] = json.loads((ROOT / "benchmarks" / "speed.json").read_text())
    rows = found["in bare runs"] | {"all": found["judged / bare"]}
    assert table("Where the time of a case goes") == [f"| `{k}` | {v} |" for k, v in rows.items()]
    assert f"Run again, it takes {found['reference, again / bare']} bare runs." in PAGE
