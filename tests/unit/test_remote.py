"""A store at a URL is read as the folder is that it was copied from, and written as it is."""

from __future__ import annotations

import gc
import os
import re
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

pytest.importorskip("pyarrow")
import fsspec
from fsspec.implementations.memory import MemoryFileSystem

from amp_fuzz import reports
from amp_fuzz.config import ConfigError, as_place, folder_of, is_url
from amp_fuzz.records.compaction import compact
from amp_fuzz.records.keeping import merge
from amp_fuzz.records.objects import Objects
from amp_fuzz.records.parts import Shipper, Superseded
from amp_fuzz.records.remote import RemoteStore, located, store_at
from amp_fuzz.records.store import Store, StoreError, find_run
from tests.helpers import one_line
from tests.objects import Bucket, ObjectFiles
from tests.unit.test_compaction import ALL
from tests.unit.test_reports import store_of
from tests.unit.test_store import FINDING

pytestmark = pytest.mark.thorough


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = store_of(tmp_path, ALL)
    made.save(FINDING)
    return made


def upload(store: Store, bucket: Bucket) -> None:
    """Copy a store as a user does."""
    for path in sorted(store.root.rglob("*")):
        if path.is_file() and path.suffix != ".lock":
            bucket.files[path.relative_to(store.root).as_posix()] = path.read_bytes(), time.time()


def swept(store: Store, bucket: Bucket, spare: Path) -> None:
    """Copy a store as a sweep does."""
    here = Store(spare)
    here.create()
    shipper = Shipper(Objects(bucket.url), "runs/r1", here.run_path("r1"), spare / "mark")
    shipper.begin()
    here.begin(store.run("r1"))
    for path in store.lines("r1"):
        (here.run_path("r1") / path.name).write_bytes(path.read_bytes())
    shipper.ship(ended=True)


def as_folder(store: Store, report: dict[str, str]) -> dict[str, str]:
    """Return the files of a report as if the store were a folder."""
    return {name: text.replace(str(store.place), "PLACE") for name, text in report.items()}


def report_of(store: Store, folder: Path) -> dict[str, str]:
    paths = reports.read(store, "r1").write(folder)
    texts = {path.name: path.read_text() for path in paths if path.name != "code-quality.json"}
    return as_folder(store, texts)


@pytest.mark.parametrize("way", [upload, swept])
def test_a_report_of_a_url_is_that_of_the_folder(
    store: Store, bucket: Bucket, tmp_path: Path, way: object
) -> None:
    expected = report_of(store, tmp_path / "a")
    upload(store, bucket) if way is upload else swept(store, bucket, tmp_path / "spare")
    found = RemoteStore(bucket.url)
    assert report_of(found, tmp_path / "b") == expected
    numbers = bucket.files["runs/r1/summary.json"][0]
    assert numbers == (store.run_path("r1") / "summary.json").read_bytes()


def test_a_run_is_found_by_its_url_and_by_that_of_its_store(store: Store, bucket: Bucket) -> None:
    upload(store, bucket)
    for url in (bucket.url, f"{bucket.url}/", f"{bucket.url}/runs/r1"):
        found, run = find_run(Store("elsewhere"), url)
        assert (found.place, run) == (bucket.url, "r1")
    for word in ("latest", "r", "r1"):
        assert find_run(store_at(bucket.url), word)[1] == "r1"
    with pytest.raises(StoreError, match=re.escape(f"--store={bucket.url}")) as caught:
        find_run(store_at(bucket.url), "nothing")
    assert one_line(caught.value)


def test_only_what_is_read_is_copied(store: Store, bucket: Bucket) -> None:
    compact(store, "r1")
    upload(store, bucket)
    found = RemoteStore(bucket.url, only="findings")
    assert not [*found.root.rglob("records-*"), *found.root.rglob("*.parquet")]
    assert found.tables("r1") is not None
    assert {path.parent.name for path in found.root.rglob("*.parquet")} == {"findings"}


@pytest.mark.parametrize("way", [upload, swept])
def test_a_run_at_a_url_is_compacted_there(
    store: Store, bucket: Bucket, tmp_path: Path, way: object
) -> None:
    upload(store, bucket) if way is upload else swept(store, bucket, tmp_path / "spare")
    before = report_of(RemoteStore(bucket.url), tmp_path / "a")
    assert compact(RemoteStore(bucket.url), "r1").changed
    assert bucket.names(".jsonl") == []
    assert bucket.names(".parquet") != []
    assert report_of(RemoteStore(bucket.url), tmp_path / "b") == before
    assert not compact(RemoteStore(bucket.url), "r1").changed


def test_a_run_whose_folder_is_alone_is_compacted_there(
    store: Store, bucket: Bucket, tmp_path: Path
) -> None:
    for path in store.run_path("r1").glob("*.json*"):
        bucket.files[f"alone/r1/{path.name}"] = path.read_bytes(), time.time()
    found, run = find_run(Store(), f"{bucket.url}/alone/r1")
    assert run == "r1"
    expected = [*found.records(run)]
    compact(found, run)
    reports.read(found, run).write(tmp_path / "report")
    assert {re.sub(r"index-.+", "index", n.split("/")[2]) for n in bucket.names("")} == {
        *("run.json", "summary.json", "tables-1", "index"),
    }
    assert [*RemoteStore(f"{bucket.url}/alone/r1").records("r1")] == expected


def test_a_compaction_that_cannot_write_changes_nothing(
    store: Store, bucket: Bucket, tmp_path: Path
) -> None:
    swept(store, bucket, tmp_path / "spare")
    before = report_of(RemoteStore(bucket.url), tmp_path / "a")
    bucket.fails = lambda name: "no space" if name.endswith("findings/-.parquet") else ""
    with pytest.raises(StoreError, match=r"cannot write \(OSError: no space\)"):
        compact(RemoteStore(bucket.url), "r1")
    assert report_of(RemoteStore(bucket.url), tmp_path / "b") == before


def test_a_running_run_is_not_compacted(store: Store, bucket: Bucket, tmp_path: Path) -> None:
    swept(store, bucket, tmp_path / "spare")
    here = tmp_path / "other"
    Shipper(Objects(bucket.url), "runs/r1", here / "runs/r1", here / "mark").begin()
    with pytest.raises(StoreError, match=rf"^{bucket.url}/runs/r1: running now"):
        compact(RemoteStore(bucket.url), "r1")


def test_a_run_that_starts_while_it_is_compacted_keeps_its_records(
    store: Store, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swept(store, bucket, tmp_path / "spare")
    expected = [*RemoteStore(bucket.url).records("r1")]
    found, here = RemoteStore(bucket.url), tmp_path / "other"
    settle = found.settle

    def late(run: str) -> None:
        Shipper(Objects(bucket.url), "runs/r1", here / "runs/r1", here / "mark").begin()
        settle(run)

    monkeypatch.setattr(found, "settle", late)
    with pytest.raises(Superseded, match="another process continues it: it is unchanged"):
        compact(found, "r1")
    assert [*RemoteStore(bucket.url).records("r1")] == expected


def test_a_reader_lists_again_what_a_compaction_removed(
    store: Store, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swept(store, bucket, tmp_path / "spare")
    found = RemoteStore(bucket.url)
    bring, struck = found._bring, []

    def late(*arguments: object) -> None:
        if not struck:
            struck.append(compact(RemoteStore(bucket.url), "r1"))
        bring(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(found, "_bring", late)
    assert len([*found.records("r1")]) == len(ALL)
    assert found.tables("r1") is not None


def test_a_store_at_a_url_is_merged_into_a_folder(
    store: Store, bucket: Bucket, tmp_path: Path
) -> None:
    swept(store, bucket, tmp_path / "spare")
    upload_findings = {k: v for k, v in bucket.files.items() if k.startswith("findings/")}
    assert upload_findings == {}
    RemoteStore(bucket.url).save(FINDING)
    own = Store(tmp_path / "own")
    done = merge(own, [RemoteStore(bucket.url)])
    assert (done.runs, done.findings) == (("r1",), (FINDING.id,))
    assert [*own.records("r1")] == [*RemoteStore(bucket.url).records("r1")]
    assert merge(own, [RemoteStore(bucket.url)]).same == 2
    compact(own, "r1")
    assert merge(own, [RemoteStore(bucket.url)]).same == 2


def test_findings_of_two_backends_with_one_id_are_both_kept(bucket: Bucket) -> None:
    two = [RemoteStore(bucket.url), RemoteStore(bucket.url)]  # neither knows of the other
    for own, backend in zip(two, ("eager-cpu", "script"), strict=True):
        own.save(replace(FINDING, backend=backend))
    found = RemoteStore(bucket.url)
    assert [found.finding(name).backend for name in found.findings()] == ["eager-cpu", "script"]
    assert found.name_of(FINDING) == f"{FINDING.id}@eager-cpu"
    found.keep_range(FINDING, "torch: from 2.9.1")
    assert RemoteStore(bucket.url).range_of(FINDING) == "torch: from 2.9.1"


def test_a_finding_keeps_the_time_at_which_it_was_saved(bucket: Bucket) -> None:
    RemoteStore(bucket.url).save(FINDING)
    (name,) = bucket.names(".json")
    bucket.files[name] = bucket.files[name][0], 1000.0
    found = RemoteStore(bucket.url)
    assert found.newest(before=999.0) == []
    assert found.newest(before=1001.0) == found.findings()


def test_new_runs_and_records_are_seen_after_a_look(
    store: Store, bucket: Bucket, tmp_path: Path
) -> None:
    found = RemoteStore(bucket.url)
    assert found.runs() == []
    swept(store, bucket, tmp_path / "spare")
    found.refresh()
    assert found.runs() == ["r1"]
    before = found.lines("r1")
    here = tmp_path / "other"
    own = Shipper(Objects(bucket.url), "runs/r1", here / "runs/r1", here / "mark")
    own.begin()
    (here / "runs/r1/records-new.jsonl").write_bytes(b"{}\n")
    own.ship()
    assert found.lines("r1") == before
    found.look_again("r1")
    assert len(found.lines("r1")) == len(before) + 1


def test_what_others_write_is_listed(bucket: Bucket) -> None:
    objects = Objects(bucket.url)
    assert objects.names() == {}
    bucket.files["run.json"] = b"{}", 0.0
    assert [*objects.names()] == ["run.json"]


def test_records_are_read_once_that_were_compacted_since_they_were_read(
    store: Store, bucket: Bucket, tmp_path: Path
) -> None:
    swept(store, bucket, tmp_path / "spare")
    found = RemoteStore(bucket.url)
    assert len([*found.records("r1")]) == len(ALL)
    compact(RemoteStore(bucket.url), "r1")
    found.look_again("r1")
    assert len([*found.records("r1")]) == len(ALL)
    assert found.lines("r1") == []


def test_the_copy_is_removed_with_the_store_but_not_by_a_fork(bucket: Bucket) -> None:
    found = RemoteStore(bucket.url)
    root = found.root
    if (child := os.fork()) == 0:
        del found
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    assert root.is_dir()
    del found
    gc.collect()
    assert not root.exists()


# -- other file systems ---------------------------------------------------------------------------


def test_a_file_system_with_folders_has_them_made(store: Store, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    objects = Objects(f"file://{tmp_path}/there")
    objects.check()
    shipper = Shipper(objects, "runs/r1", tmp_path / "here/runs/r1", tmp_path / "mark")
    shipper.begin()
    Store(tmp_path / "here").begin(store.run("r1"))
    shipper.ship()
    assert RemoteStore(objects.url).run("r1") == store.run("r1")
    assert Objects(f"file://{tmp_path}/there/runs").names() != {}


def test_the_folder_of_a_url_is_not_made(tmp_path: Path) -> None:
    """A disk that is not mounted there, or a bucket, would seem to have been written."""
    with pytest.raises(StoreError, match=r"cannot write \(FileNotFoundError: "):
        Objects(f"file://{tmp_path}/nothing").check()
    assert not (tmp_path / "nothing").exists()


def test_the_memory_of_a_process_is_one() -> None:
    MemoryFileSystem.store.clear()
    objects = Objects("memory://stored")
    objects.check()
    objects.write("runs/a/run.json", b"{}")
    ((name, stat),) = objects.names().items()
    assert (name, stat.size) == ("runs/a/run.json", 2)
    assert abs(stat.saved - time.time()) < 60
    assert fsspec.filesystem("memory").cat_file("/stored/runs/a/run.json") == b"{}"
    MemoryFileSystem.store.clear()


@pytest.mark.parametrize("about", [
    {"size": 3, "LastModified": "2026-01-01T00:00:00+00:00"}, {"size": 3, "mtime": 1767225600},
    {"size": 3, "updated": "2026-01-01T00:00:00Z"},
])  # fmt: skip
def test_the_time_of_a_file_has_many_names(about: dict[str, object]) -> None:
    from amp_fuzz.records.objects import Stat, _stat

    assert _stat(about) == Stat(3, 1767225600.0)
    assert _stat({"size": None, "updated": "yesterday"}) == Stat(0, 0.0)


# -- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("s3://bucket", r"^s3://bucket: a package is missing: .*s3fs"),
        ("nosuch://bucket", r"^nosuch://bucket: cannot be read \(ValueError: "),
    ],
)
def test_a_url_without_its_package_says_which(
    url: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(StoreError, match=said) as caught:
        store_at(url)
    assert one_line(caught.value)


def test_a_bucket_that_does_not_exist_is_named(bucket: Bucket) -> None:
    other = bucket.url.removesuffix("b") + "other"
    for act in (lambda: store_at(other), lambda: Objects(other).check()):
        with pytest.raises(
            StoreError, match="FileNotFoundError: there is no such bucket"
        ) as caught:
            act()
        assert str(caught.value).startswith(other)
        assert one_line(caught.value)
    with pytest.raises(StoreError, match="neither a run nor a store"):
        located(f"{bucket.url}/nothing")


def test_a_store_that_cannot_be_written_is_found_out_first(bucket: Bucket) -> None:
    bucket.fails = lambda name: "you may only read"
    with pytest.raises(StoreError, match=r"cannot write \(OSError: you may only read\)"):
        RemoteStore(bucket.url).create()


def test_a_store_that_reads_back_something_else_is_found_out_first(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ObjectFiles, "cat_file", lambda *_: b"")
    with pytest.raises(StoreError, match="what was written reads back as something else") as caught:
        RemoteStore(bucket.url).create()
    assert str(caught.value).startswith(bucket.url)
    assert one_line(caught.value)


@pytest.mark.parametrize(
    ("text", "url"),
    [("s3://b/x", True), ("zip://::file:///x.zip", True), ("gs://b", True),
     ("zip::/x.zip", True), ("here/there", False), ("/abs", False), ("C:\\x", False),
     ("s3:/b", False), ("./s3://b", False)],
)  # fmt: skip
def test_a_place_is_a_url_or_a_folder(text: str, url: bool) -> None:
    assert is_url(text) == url
    assert as_place(text, Path("/base")) == (text if url else Path("/base") / text)
    if url:
        with pytest.raises(ConfigError, match=r"needs a folder: give another, and copy .+ merge"):
            folder_of(text, "amp-fuzz run")
    else:
        assert folder_of(Path(text), "amp-fuzz run") == Path(text)
