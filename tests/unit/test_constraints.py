"""The pins of `make venv` and `make test-torch`: one torch a file, and no package pinned twice."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TORCHES = sorted((ROOT / "constraints").glob("torch-*.txt"))


def pins(path: Path) -> list[tuple[str, str]]:
    """Return what a file pins, and what the files pin that it names, in order."""
    found: list[tuple[str, str]] = []
    for line in path.read_text("utf-8").splitlines():
        if named := re.fullmatch(r"-c (\S+)", line):
            found += pins(path.parent / named[1])
        elif pin := re.match(r"([\w.-]+)==([\w.]+)", line):
            found.append((pin[1].lower(), pin[2]))
    return found


@pytest.mark.parametrize("path", TORCHES, ids=lambda path: path.stem)
def test_each_file_pins_the_torch_of_its_name_and_nothing_twice(path: Path) -> None:
    names = [name for name, _ in pins(path)]
    assert dict(pins(path))["torch"] == path.stem.removeprefix("torch-")
    assert len(names) == len(set(names))
    assert {"numpy", "pytest", "setuptools"} < set(names)


def test_development_has_one_of_them() -> None:
    assert pins(ROOT / "constraints.txt") in [pins(path) for path in TORCHES]
