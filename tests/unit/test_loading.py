"""`amp_fuzz.reports.load` gives the same rows of JSON lines, Parquet, stores and URLs."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from pandas.testing import assert_frame_equal

pytest.importorskip("pyarrow")
import fsspec

from amp_fuzz import reports
from amp_fuzz.records.compaction import compact
from amp_fuzz.records.rows import COLUMNS, TABLES, Table
from amp_fuzz.records.schema import CaseRecord
from amp_fuzz.records.store import Store, StoreError
from tests.helpers import one_line
from tests.unit.test_compaction import ALL, append
from tests.unit.test_reports import store_of
from tests.unit.test_store import RECORDS, RUN

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "store.md"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return store_of(tmp_path, ALL)


@pytest.mark.thorough
@pytest.mark.parametrize("table", TABLES)
def test_lines_and_parquet_give_the_same_rows(store: Store, table: Table) -> None:
    lines = reports.load(store.root, table)
    compact(store, "r1")
    assert_frame_equal(reports.load(store.root, table), lines)
    assert_frame_equal(reports.load(store.run_path("r1"), table), lines)
    append(store, RECORDS[0])
    mixed = reports.load(store.root, table)
    compact(store, "r1")
    assert_frame_equal(reports.load(store.root, table), mixed)


def test_cases_say_what_the_records_say(store: Store) -> None:
    compact(store, "r1")
    frame = reports.load(store.root)
    cases = [record for record in ALL if isinstance(record, CaseRecord)]
    own = frame[frame["recorded"]]
    assert list(own["id"]) == [record.id for record in cases]
    assert list(own["ops"]) == [",".join(record.ops) for record in cases]
    assert list(own["seconds"]) == pytest.approx([sum(r.seconds.values()) for r in cases])
    assert own["seconds_a new part"].notna().sum() == 1
    assert list(frame[~frame["recorded"]]["kind"]) == ["crash"]


def test_kernels_are_of_the_rows_of_cases(store: Store) -> None:
    compact(store, "r1")
    cases, kernels = reports.load(store.root), reports.load(store.root, "kernels")
    both = kernels.merge(cases, left_on=["run", "case"], right_on=["run", "row"])
    assert len(both) == len(kernels)
    assert (both["backend_x"] == both["backend_y"]).all()
    recorded = sum(len(r.kernels) for r in ALL if isinstance(r, CaseRecord))
    assert (kernels["at"] >= 0).sum() == recorded


def test_words_are_categories_and_the_rest_has_its_dtype(store: Store) -> None:
    frame = reports.load(store.root, "findings")
    words = [name for name, kind in COLUMNS["findings"].items() if kind == "word"]
    assert [name for name in frame if isinstance(frame[name].dtype, pd.CategoricalDtype)] == words
    assert frame["row"].dtype == "int64"
    assert set(frame["type"]) == {"divergence", "note", "incident", "end"}


def test_several_runs_are_one_frame(store: Store) -> None:
    from msgspec.structs import replace

    store.begin(replace(RUN, id="r2"))
    writer = store.writer("r2", "0")
    writer.write(replace(RECORDS[0], backend="another"))  # type: ignore[type-var]
    writer.close()
    compact(store, "r1")
    frame = reports.load(store.root)
    assert list(frame["run"].cat.categories) == ["r1", "r2"]
    assert frame["backend"].iloc[-1] == "another"


@pytest.mark.parametrize("table", TABLES)
def test_a_store_without_runs_has_all_columns(tmp_path: Path, table: Table) -> None:
    empty = Store(tmp_path / "empty")
    empty.create()
    frame = reports.load(empty.root, table)
    assert len(frame) == 0
    full = reports.load(store_of(tmp_path, ALL[:4]).root, table)
    assert frame.dtypes.map(str).equals(full.dtypes.map(str))


# -- URLs -----------------------------------------------------------------------------------------


@pytest.fixture
def memory(store: Store) -> Any:
    files = fsspec.filesystem("memory")
    files.put(str(store.root), "/stored", recursive=True)
    yield files
    files.rm("/stored", recursive=True)


@pytest.mark.thorough
@pytest.mark.parametrize("compacted", [False, True])
@pytest.mark.parametrize("table", TABLES)
def test_a_url_is_read_as_a_folder_is(
    store: Store, memory: Any, table: Table, compacted: bool
) -> None:
    expected = reports.load(store.root, table)
    if compacted:
        compact(store, "r1")
        memory.rm("/stored", recursive=True)
        memory.put(str(store.root), "/stored", recursive=True)
    assert_frame_equal(reports.load("memory://stored", table), expected)
    assert_frame_equal(reports.load("memory://stored/", table), expected)
    own = reports.load("memory://stored/runs/r1", table)
    assert_frame_equal(own, expected)


def test_a_run_that_was_copied_out_of_its_store_is_read(store: Store, tmp_path: Path) -> None:
    expected = reports.load(store.root)
    shutil.copytree(store.run_path("r1"), tmp_path / "a copy" / "r1")
    assert_frame_equal(reports.load(tmp_path / "a copy" / "r1"), expected)


def test_a_store_in_a_zip_file_is_read(store: Store, tmp_path: Path) -> None:
    expected = reports.load(store.root)
    archive = shutil.make_archive(str(tmp_path / "kept"), "zip", store.root)
    assert_frame_equal(reports.load(f"zip://::file://{archive}"), expected)


# -- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "table", "said"),
    [
        ("memory://nothing", "cases", "neither a run nor a store"),
        ("nosuch://bucket", "cases", "cannot be read"),
        ("{tmp}", "cases", "neither a run nor a store: it has no run.json and no runs/"),
        ("{tmp}/nothing", "kernels", "neither a run nor a store"),
        ("{tmp}", "case", "table='case': use cases, kernels, findings"),
    ],
)
def test_what_cannot_be_read_is_an_error_of_one_line(
    tmp_path: Path, path: str, table: Table, said: str
) -> None:
    with pytest.raises(StoreError, match=re.escape(said)) as caught:
        reports.load(path.format(tmp=tmp_path), table)
    assert one_line(caught.value)


def test_a_url_without_fsspec_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(StoreError, match="pip install fsspec"):
        reports.load("memory://stored")


# -- the documentation ----------------------------------------------------------------------------


@pytest.mark.parametrize("table", TABLES)
def test_the_page_documents_each_column(table: Table) -> None:
    section = PAGE.read_text("utf-8").partition(f"## `{table}`")[2].partition("\n## ")[0]
    named = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", section, re.MULTILINE)
    assert [(name, kind.strip("` ")) for name, kind in named] == list(COLUMNS[table].items())


def test_reports_are_reached_from_the_package_and_import_no_torch() -> None:
    """As the README loads them, in a process that has imported nothing else."""
    code = "import sys, amp_fuzz; amp_fuzz.reports.load; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
