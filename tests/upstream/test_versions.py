"""The records of known bugs say what was measured: benchmarks/known/*.json, a file a torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from amp_fuzz.upstream.bug import Bug
from amp_fuzz.upstream.registry import BUGS

FOLDER = Path(__file__).parents[2] / "benchmarks" / "known"
MEASURED: dict[str, dict[str, Any]] = {
    path.stem: json.loads(path.read_text())["bugs"]
    for path in sorted(FOLDER.glob("*.json"), key=lambda path: Version(path.stem))
}


def problems(bug: Bug, states: dict[str, str]) -> list[str]:
    """Return what a record says that was not measured. states: by version, the oldest first."""
    found = [
        f"{state} in {version}, and its record says torch {bug.torch}"
        for version, state in states.items()
        if state != "cannot tell" and (state == "there") != bug.entry.holds(version)
    ]
    there = [version for version, state in states.items() if state == "there"]
    if there and bug.seen != there[-1]:
        found.append(f"seen in {there[-1]}, and its record says {bug.seen}")
    return found


def test_every_torch_was_asked_about_every_bug() -> None:
    assert "2.13.0" in MEASURED
    assert {version: sorted(bugs) for version, bugs in MEASURED.items()} == {
        version: sorted(BUGS) for version in MEASURED
    }


@pytest.mark.parametrize("bug", BUGS.values(), ids=lambda bug: bug.id)
def test_a_record_says_what_was_measured(bug: Bug) -> None:
    states = {version: bugs[bug.id]["state"] for version, bugs in MEASURED.items()}
    assert problems(bug, states) == []


def test_a_record_that_says_otherwise_is_named() -> None:
    bug = BUGS["cache-ignores-dtype"]
    assert problems(bug, {"2.7.1": "gone", "2.11.0": "there", bug.seen: "cannot tell"}) == [
        "gone in 2.7.1, and its record says torch >=2.7",
        f"seen in 2.11.0, and its record says {bug.seen}",
    ]
