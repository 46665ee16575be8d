"""The pages of known bugs are what their records say."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from amp_fuzz.upstream.registry import BUGS, FILES
from tests.helpers import brief

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def pages() -> ModuleType:
    return script("findings")


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.__name__.rpartition(".")[2])
def test_a_page_is_what_the_file_says(pages: ModuleType, file: ModuleType) -> None:
    assert pages.path_of(file).read_text() == pages.page(file), "run make pages"


def test_the_table_lists_every_bug(pages: ModuleType) -> None:
    readme = (DOCS / "findings" / "README.md").read_text()
    assert readme == pages.index(readme), "run make pages"


def test_each_bug_has_a_section(pages: ModuleType) -> None:
    heads = [line for f in FILES for line in (f.__doc__ or "").splitlines() if line[:3] == "## "]
    said = [name for head in heads for name in pages.ids(head)]
    for bug in BUGS.values():
        if bug.own:
            assert f'<a id="{bug.id}"></a>' in (DOCS / "findings" / bug.page).read_text("utf-8")
            said.append(bug.id)
    assert sorted(said) == sorted(BUGS)


def test_each_file_of_a_page_is_written(pages: ModuleType) -> None:
    homes = {pages.home_of(bug) for bug in BUGS.values()}
    assert homes == set((DOCS / "findings").glob("*/*.md"))


def test_the_page_of_versions_is_what_was_measured(pages: ModuleType) -> None:
    assert pages.VERSIONS.read_text() == pages.by_version(pages.measured()), "run make pages"


@pytest.mark.parametrize("name", brief(["honest", "policy-costs", "unseen"], "honest"))
def test_a_page_of_benchmarks_is_what_was_measured(name: str) -> None:
    (page,) = (page for path, page in script("measured").PAGES.items() if path.stem == name)
    assert (DOCS / "evidence" / f"{name}.md").read_text() == page(), "run make pages"


def test_each_page_of_benchmarks_is_looked_at() -> None:
    assert {path.stem for path in script("measured").PAGES} == {"honest", "policy-costs", "unseen"}


def test_the_page_of_versions_shows_each_state(pages: ModuleType) -> None:
    states = {"2.9.1": ("cannot tell", "died of <lambda> 0x7f"), "2.13.0": ("gone", "")}
    found = {
        version: {
            "torch": version,
            "bugs": {name: {"state": state, "detail": detail} for name in BUGS},
        }
        for version, (state, detail) in states.items()
    }
    text = pages.by_version(found)
    row = next(line for line in text.splitlines() if line.startswith("| [cache-ignores-dtype]"))
    assert "(../findings/torch/cache.md#cache-ignores-dtype)" in row
    assert "| ? | **gone** |" in row
    assert f"| **gone** | 0 | {len(BUGS)} |" in text
    assert "| cache-ignores-dtype | 2.9.1 | died of \\<lambda> 0x... |" in text


def test_the_page_of_versions_leaves_a_new_bug_open(pages: ModuleType) -> None:
    found = pages.measured()
    for one in found.values():
        del one["bugs"]["cache-ignores-dtype"]
    lines = pages.by_version(found).splitlines()
    row = next(line for line in lines if line.startswith("| [cache-ignores-dtype]"))
    assert [cell.strip() for cell in row.split("|")[3:-2]] == [""] * len(found)
