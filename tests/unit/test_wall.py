"""No known bug is named outside its room: the reference, backends and the oracle know none.

Known bugs stand in `amp_fuzz.upstream`, with their imitations. tests/unit/test_layers.py holds that
nothing below imports it.
"""

import re
from pathlib import Path

import pytest

from amp_fuzz.upstream import BUGS

PACKAGE = Path(__file__).parents[2] / "amp_fuzz"
FILES = [
    path
    for room in ("policies", "reference", "backends", "oracle")
    for path in sorted((PACKAGE / room).rglob("*"))
    if path.suffix in (".py", ".toml")
]
WORDS = re.compile("|".join([r"[qQ]uirk|QUIRK", *map(re.escape, sorted(BUGS))]))


def words(text: str) -> list[str]:
    """Return what a text says of known bugs, with its lines."""
    lines = enumerate(text.splitlines(), 1)
    return [f"{number}: {found[0]}" for number, line in lines if (found := WORDS.search(line))]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_file_below_names_a_known_bug(path: Path) -> None:
    assert not words(path.read_text("utf-8"))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('x\nif "cache-ignores-dtype" in active():', ["2: cache-ignores-dtype"]),
        ("# as under the quirk", ["1: quirk"]),
        ("from amp_fuzz.upstream import quirks", ["1: quirk"]),
        ("# linalg-cond-backward: a listed bug", ["1: linalg-cond-backward"]),
        ("the weight cache is keyed by the weight and the dtype", []),
    ],
)
def test_the_search_sees_a_word_of_a_bug(text: str, found: list[str]) -> None:
    assert words(text) == found
