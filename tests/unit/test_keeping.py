"""Merging loses nothing, and pruning removes only what was asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from msgspec.structs import replace

from amp_fuzz.records.keeping import merge, prune
from amp_fuzz.records.schema import RunRecord
from amp_fuzz.records.store import Store, StoreError
from amp_fuzz.runs.sweep.log import running
from tests.helpers import one_line
from tests.unit.test_store import FINDING, RECORDS

NOW = datetime(2026, 6, 30, tzinfo=UTC)
NEW, OLD, OLDER = "20260629-000000-aaaa", "20260501-000000-bbbb", "20260101-000000-cccc"


def store_of(root: Path, *runs: str, findings: bool = True) -> Store:
    store = Store(root)
    store.create()
    for run in runs:
        day = f"{run[:4]}-{run[4:6]}-{run[6:8]}T00:00:00+00:00"
        store.begin(RunRecord(run, 7, "dev", (), {"torch": "2.13.0"}, day))
        with closing(store.writer(run, "0")) as writer:
            for record in RECORDS:
                writer.write(record)
    if findings:
        store.save(FINDING)
    return store


def content(store: Store) -> dict[str, bytes]:
    paths = [p for p in store.root.rglob("*") if p.is_file() and p.suffix != ".lock"]
    return {str(p.relative_to(store.root)): p.read_bytes() for p in paths}


@pytest.fixture
def one(tmp_path: Path) -> Store:
    return store_of(tmp_path / "one", OLD)


@pytest.fixture
def other(tmp_path: Path) -> Store:
    return store_of(tmp_path / "other", OLD, NEW)


# -- merge ----------------------------------------------------------------------------------------


def test_what_is_new_is_copied_and_what_is_equal_is_skipped(one: Store, other: Store) -> None:
    done = merge(one, [other])
    assert (done.runs, done.findings, done.same, done.skipped) == ((NEW,), (), 2, ())
    assert content(one) == content(other)
    assert merge(one, [other]).same == 3


def test_the_answer_of_bisect_is_copied_with_its_finding(tmp_path: Path, other: Store) -> None:
    other.keep_range(FINDING, "torch: 2.7 to 2.9")
    for here in (Store(tmp_path / "new"), store_of(tmp_path / "equal")):
        merge(here, [other])
        assert here.range_of(FINDING) == "torch: 2.7 to 2.9"
        here.keep_range(FINDING, "torch: all")
        merge(here, [other])
        assert here.range_of(FINDING) == "torch: all"  # the one that was here stays


def test_a_finding_that_differs_takes_no_answer_of_bisect(one: Store, other: Store) -> None:
    other.save(replace(FINDING, observed="another"))
    other.keep_range(FINDING, "torch: 2.7 to 2.9")
    merge(one, [other])
    assert one.range_of(FINDING) == ""


def test_a_store_is_made_where_there_is_none(tmp_path: Path, other: Store) -> None:
    made = Store(tmp_path / "made")
    done = merge(made, [other])
    assert (done.runs, done.findings) == ((OLD, NEW), (FINDING.id,))
    assert content(made) == content(other)


def test_a_compacted_run_equals_its_lines(one: Store, other: Store) -> None:
    pytest.importorskip("pyarrow")
    from amp_fuzz.records.compaction import compact

    compact(other, OLD)
    assert merge(one, [other]).same == 2
    assert list(one.records(OLD)) == RECORDS


@pytest.mark.parametrize("what", ["records", "head"])
def test_an_id_that_differs_is_an_error_and_nothing_is_copied(
    one: Store, other: Store, what: str
) -> None:
    if what == "records":
        with closing(other.writer(OLD, "0")) as writer:
            writer.write(RECORDS[0])
    else:
        other.begin(replace(other.run(OLD), seed=8))
    before = content(one), content(other)
    with pytest.raises(StoreError, match=r"is not .*nothing was merged: remove one") as caught:
        merge(one, [other])
    assert one_line(caught.value)
    assert (content(one), content(other)) == before


def test_findings_of_one_case_on_two_backends_are_both_kept(one: Store, tmp_path: Path) -> None:
    other = store_of(tmp_path / "other", findings=False)
    theirs = replace(FINDING, backend="compile[inductor]@cuda")
    other.save(theirs)
    name = f"{FINDING.id}@compile[inductor]@cuda"
    assert merge(one, [other]).findings == (name,)
    assert (one.finding(FINDING.id), one.finding(name)) == (FINDING, theirs)
    assert merge(one, [other]).same == 1
    # Also where the other store has both, and the other one under the id.
    other.save(FINDING)
    assert (merge(one, [other]).same, merge(other, [one]).same) == (2, 2)
    third = Store(tmp_path / "third")
    assert merge(third, [other, one]).findings == (FINDING.id, f"{FINDING.id}@eager-cpu")


def test_a_finding_that_differs_stays_as_it_is_here(one: Store, other: Store) -> None:
    other.save(replace(FINDING, observed="another"))
    done = merge(one, [other])
    path = Path("findings") / f"{FINDING.id}.json"
    line = f"{other.root / path}: differs from {one.root / path}, which stays"
    assert (done.runs, done.findings, done.skipped) == ((NEW,), (), (line,))
    assert one.finding(FINDING.id) == FINDING


def test_a_damaged_finding_is_left_alone_and_named(one: Store, other: Store) -> None:
    path = other.root / "findings" / "ab.json"
    path.write_text("{")
    done = merge(one, [other])
    assert (done.runs, done.findings) == ((NEW,), ())
    assert [line.startswith(str(path)) for line in done.skipped] == [True]


def test_two_stores_that_differ_from_each_other_are_an_error(tmp_path: Path, other: Store) -> None:
    third = store_of(tmp_path / "third", NEW)
    third.begin(replace(third.run(NEW), seed=8))
    with pytest.raises(StoreError, match=f"run {NEW} of .*third is not the one of .*other"):
        merge(store_of(tmp_path / "one"), [other, third])


def test_running_and_newer_runs_of_another_store_are_left_alone(one: Store, other: Store) -> None:
    other.begin(replace(other.run(OLD), format=99))
    with other.running(other.run(NEW)):
        done = merge(one, [other])
    assert done.runs == ()
    assert ["newer amp-fuzz" in line for line in done.skipped] == [True, False]
    assert "running now" in done.skipped[1]
    assert one.runs() == [OLD]


def test_locks_are_not_copied(one: Store, other: Store) -> None:
    with other.running(other.run(NEW)):
        pass
    merge(one, [other])
    assert list(other.run_path(NEW).glob("*.lock"))
    assert not list(one.run_path(NEW).glob("*.lock"))


def test_a_folder_that_is_no_store_is_named(one: Store, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="not a store: it has neither runs/ nor findings/"):
        merge(one, [Store(tmp_path)])


LIMITED = """
import resource, sys
from amp_fuzz.records.keeping import merge
from amp_fuzz.records.store import Store, StoreError
sys.dont_write_bytecode = True  # Python would cut the bytecode of what it imports, for all
resource.setrlimit(resource.RLIMIT_FSIZE, (1500, 1500))
try:
    merge(Store(sys.argv[1]), [Store(sys.argv[2])])
except StoreError as error:
    sys.exit(str(error))
"""


def test_a_full_disk_leaves_no_run_in_part(one: Store, other: Store) -> None:
    words = [sys.executable, "-c", LIMITED, str(one.root), str(other.root)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.endswith("free some space, or make it writable")
    assert one.runs() == [OLD]
    assert not list(one.root.glob(".merging-*"))


# -- prune ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keep", "days", "gone"),
    [
        (0, None, [OLDER, OLD, NEW]),
        (1, None, [OLDER, OLD]),
        (9, None, []),
        (None, 30, [OLDER, OLD]),
        (None, 100, [OLDER]),
        (2, 30, [OLDER]),
        (0, 100, [OLDER]),
    ],
)
@pytest.mark.parametrize("dry", [False, True])
def test_runs_are_removed_by_number_and_by_age(
    tmp_path: Path, keep: int | None, days: int | None, gone: list[str], dry: bool
) -> None:
    store = store_of(tmp_path, NEW, OLD, OLDER)
    older = None if days is None else timedelta(days=days)
    removed, left = prune(store, now=NOW, keep=keep, older=older, dry=dry)
    assert ([run.run for run in removed], left) == (gone, [])
    assert all(run.size > 100 for run in removed)
    stay = {OLDER, OLD, NEW} - set(gone if not dry else [])
    assert set(store.runs()) == stay
    assert store.finding(FINDING.id) == FINDING
    assert {p.name for p in store.root.iterdir()} == {"runs", "findings", ".gitignore"}


def test_a_sweep_goes_with_its_last_run_unless_it_is_running(tmp_path: Path) -> None:
    first, second = f"{OLD}-0000", f"{OLD}-0001"
    store = store_of(tmp_path, second, first)
    file = tmp_path / "sweep.toml"
    for sweep in ("gone", "begun"):
        with running(store, file, sweep, seed=1, anew=True) as log:
            pass
        if sweep == "gone":
            log.folder.rename(store.root / "sweeps" / OLD)
            (store.root / "sweeps" / f"{log.head.id}.jsonl").rename(
                store.root / "sweeps" / f"{OLD}.jsonl"
            )

    def sweeps() -> set[str]:
        return {path.name for path in (store.root / "sweeps").iterdir()}

    prune(store, now=NOW, keep=0, dry=True)
    with running(store, file, "begun", seed=1, anew=False) as log:
        now = {log.head.id, f"{log.head.id}.jsonl"}
        prune(store, now=NOW, keep=1)
        assert sweeps() == now | {OLD, f"{OLD}.jsonl"}
        prune(store, now=NOW, keep=0)
        assert sweeps() == now
    prune(store, now=NOW, keep=0)
    assert sweeps() == set()


def test_running_newer_and_damaged_runs_stay(tmp_path: Path) -> None:
    store = store_of(tmp_path, NEW, OLD, OLDER)
    store.begin(replace(store.run(OLD), format=99))
    (store.run_path(OLDER) / "run.json").write_text("{")
    with store.running(store.run(NEW)):
        removed, left = prune(store, now=NOW, keep=0)
    assert removed == []
    said = ["damaged", "newer amp-fuzz", "running now"]
    assert [word in line for word, line in zip(said, left, strict=True)] == [True] * 3
    assert store.runs() == [OLDER, OLD, NEW]


def test_a_damaged_run_is_none_of_those_to_keep(tmp_path: Path) -> None:
    store = store_of(tmp_path, NEW, OLD, OLDER)
    (store.run_path(NEW) / "run.json").write_text("{")
    removed, left = prune(store, now=NOW, keep=1)
    assert ([run.run for run in removed], left) == ([OLDER], [])
    assert store.runs() == [OLD, NEW]


def test_tables_of_a_newer_version_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyarrow")
    from amp_fuzz.records.compaction import compact

    store = store_of(tmp_path, OLD)
    with monkeypatch.context() as patch:
        patch.setattr("amp_fuzz.records.tables.TABLES_FORMAT", 99)
        compact(store, OLD)
    removed, (line,) = prune(store, now=NOW, keep=0)
    assert removed == []
    assert "newer amp-fuzz" in line
    # Without pyarrow, nobody can tell.
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    removed, (line,) = prune(store, now=NOW, keep=0)
    assert removed == []
    assert "pip install" in line
    assert store.runs() == [OLD]


def test_a_run_whose_start_is_no_time_has_no_age(tmp_path: Path) -> None:
    store = store_of(tmp_path, OLD)
    store.begin(replace(store.run(OLD), started="2026-01-01T00:00:00"))
    removed, (line,) = prune(store, now=NOW, older=timedelta(days=1))
    assert removed == []
    assert "started '2026-01-01T00:00:00', which is no time" in line
    assert len(prune(store, now=NOW, keep=0)[0]) == 1


def test_what_a_killed_prune_left_is_removed_by_the_next(tmp_path: Path) -> None:
    store = store_of(tmp_path, OLD)
    left = store.root / ".removing-4194305"  # no process has this number
    store.run_path(OLD).rename(left)
    prune(store, now=NOW, keep=0)
    assert not left.exists()


def test_what_another_process_removes_now_is_left_to_it(tmp_path: Path) -> None:
    store = store_of(tmp_path, OLD)
    theirs = store.root / f".removing-{os.getppid()}"
    theirs.mkdir()
    prune(store, now=NOW, keep=0)
    assert theirs.is_dir()


def test_a_run_that_starts_just_then_is_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_of(tmp_path, OLD)
    monkeypatch.setattr("amp_fuzz.records.keeping.untouchable", lambda *_: None)
    with store.running(store.run(OLD)), pytest.raises(StoreError, match="running now"):
        prune(store, now=NOW, keep=0)
    assert list(store.records(OLD)) == RECORDS
