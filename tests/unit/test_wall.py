"""The reference holds autocast as documented: no file of it knows a bug.

What a known bug does stands in `amp_fuzz.upstream`. `LEFT` are the files of which that is not true
yet: imitations that backends import. A file that becomes clean, or goes, has to leave the list.
"""

import ast
import re
from pathlib import Path

import pytest

from amp_fuzz.upstream import QUIRKS
from amp_fuzz.upstream.known import shipped

REFERENCE = Path(__file__).parents[2] / "amp_fuzz" / "reference"
LEFT = (
    "aot.py",  # imported by backends/compiled, exported, torchax and checking/ways
    "formulas.py",  # by backends/scripted
    "lowered.py",  # by backends/compiled, exported, jaxed and torchax
    "torchax.py",  # by backends/torchax
    "xla.py",  # by lowered, torchax and written
)
# Imitations that name no bug, and what else is to leave the reference with them.
IMITATIONS = (*LEFT, "gauge.py", "interpolation.py", "sums.py", "torchscript.py", "written.py")
# Shadow arithmetic asks which casts a program writes, and how a backend adds.
USING = {"shadows.py": {"sums", "written"}}
WORDS = re.compile(
    "|".join([r"[qQ]uirk|QUIRK", *map(re.escape, sorted({*QUIRKS, *(k.id for k in shipped())}))])
)


FILES = [path for path in sorted(REFERENCE.rglob("*")) if path.suffix in (".py", ".toml")]


def words(text: str) -> list[str]:
    """Return what a text says of known bugs, with its lines."""
    lines = enumerate(text.splitlines(), 1)
    return [f"{number}: {found[0]}" for number, line in lines if (found := WORDS.search(line))]


def imported(text: str) -> set[str]:
    """Return the modules of the reference that a text imports."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module == "amp_fuzz.reference":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found.add(node.module.removeprefix("amp_fuzz.reference."))
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_file_of_the_reference_names_a_known_bug(path: Path) -> None:
    found = words(path.read_text("utf-8"))
    if path.name in LEFT:
        assert found, f"{path.name} is clean: take it off LEFT"
    else:
        assert not found, f"{path.name} names known bugs: {found}"


@pytest.mark.parametrize(
    "path", [p for p in FILES if p.suffix == ".py"], ids=lambda path: path.name
)
def test_the_reference_does_not_import_an_imitation(path: Path) -> None:
    if path.name not in IMITATIONS:
        modules = {name.removesuffix(".py") for name in IMITATIONS}
        assert imported(path.read_text("utf-8")) & modules == USING.get(path.name, set())


def test_what_is_left_is_there() -> None:
    assert {name for name in IMITATIONS if not (REFERENCE / name).is_file()} == set()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('x\nif "cache-ignores-dtype" in active():', ["2: cache-ignores-dtype"]),
        ("# as under the quirk", ["1: quirk"]),
        ("from amp_fuzz.backends.imitated import active_quirks", ["1: quirk"]),
        ("# linalg-cond-backward: a listed bug", ["1: linalg-cond-backward"]),
        ("the weight cache is keyed by the weight and the dtype", []),
    ],
)
def test_the_search_sees_a_word_of_a_bug(text: str, found: list[str]) -> None:
    assert words(text) == found


def test_the_search_sees_an_import() -> None:
    text = "from amp_fuzz.reference import dispatch, torchax\nfrom amp_fuzz.backends.imitations.xla import note"
    assert {"torchax", "xla"} <= imported(text)
