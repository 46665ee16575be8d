"""The cases that hunts left open can be judged: `make open` says what they come to."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from amp_fuzz.backends import backends
from amp_fuzz.cases.case import Case
from amp_fuzz.cases.program import statements
from amp_fuzz.catalogue import check
from amp_fuzz.catalogue.core import REGISTRY
from amp_fuzz.versions import holds
from benchmarks.open_cases import index
from tests.helpers import case, stored, x

pytestmark = pytest.mark.thorough


def wrong(cases: Mapping[str, Case], entries: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return what is wrong with a folder of open cases and its index."""
    found = [f"{name}: not in both" for name in sorted(set(cases) ^ set(entries))]
    found += [f"{name}: is {one.id}" for name, one in cases.items() if one.id != name]
    for name, entry in entries.items():
        if entry["backend"] not in backends():
            found.append(f"{name}: no backend {entry['backend']}")
        if not entry["note"] or "\n" in entry["note"]:
            found.append(f"{name}: a note is one line")
    return found


def test_each_open_case_is_one_of_the_catalogue() -> None:
    absent = {op.name for op in REGISTRY.values() if not holds(op.torch)}
    for one in stored("open").values():
        if absent.isdisjoint(s.op for s in statements(one.program.body)):
            check(one.program)


def test_each_open_case_names_a_backend_and_has_a_note() -> None:
    assert wrong(stored("open"), index()) == []


ONE = case([x("x0", 2)])
RIGHT = {"backend": "eager-cpu", "note": "a note"}


@pytest.mark.parametrize(
    ("cases", "entries", "said"),
    [
        ({ONE.id: ONE}, {}, ["not in both"]),
        ({}, {ONE.id: RIGHT}, ["not in both"]),
        ({"0": ONE}, {"0": RIGHT}, [f"is {ONE.id}"]),
        ({ONE.id: ONE}, {ONE.id: RIGHT | {"backend": "mine"}}, ["no backend mine"]),
        ({ONE.id: ONE}, {ONE.id: RIGHT | {"note": "two\nlines"}}, ["a note is one line"]),
    ],
)
def test_errors_of_the_index_are_named(
    cases: dict[str, Case], entries: dict[str, dict[str, str]], said: list[str]
) -> None:
    assert [line.partition(": ")[2] for line in wrong(cases, entries)] == said
