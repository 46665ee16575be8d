"""Records survive what happens to files: kills, damage, full disks, hostile names."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import msgspec
import pytest
from filelock import FileLock

from amp_fuzz.cases.case import CaseError
from amp_fuzz.records.schema import (
    BackendRecord,
    CaseRecord,
    DivergenceRecord,
    EndRecord,
    KernelRecord,
    Note,
    NoteRecord,
    Record,
    RunRecord,
)
from amp_fuzz.records.store import Store, StoreError, Writer, find_case, load_finding
from tests.helpers import call, case, one_line, x

RUN = RunRecord(
    id="r1",
    seed=7,
    profile="dev",
    backends=(BackendRecord("eager-cpu", "cpu", "torch 2.13.0", ("mm",), ("x",)),),
    versions={"torch": "2.13.0"},
    started="2026-01-01T00:00:00Z",
)
CASE = case([x("x0", 2, 2)], call("mm", "x0", "x0"))
FINDING = DivergenceRecord(
    backend="eager-cpu",
    kind="bitwise",
    where="v0",
    op="mm",
    policy="lower_precision_fp",
    dtypes="float32,float32",
    expected="1.0",
    observed="nan \u2028 \N{SNOWMAN} \ud7ff",
    known="",
    case=CASE,
    minimised=case([x("x0", 1, 1)], call("mm", "x0", "x0")),
)
NOTED = case([x("x0", 2, 3)], call("relu", "x0"))
NOTE = Note(
    "autocast-raises",
    "eager-cpu",
    "relu",
    "v0 = torch.relu(x0)",
    "no kernel for [2, 3]",
    "Cast x0.",
)
RECORDS: list[Record] = [
    CaseRecord(
        id=CASE.id,
        backend="eager-cpu",
        family="matmul",
        outcome="diverged",
        ops=("mm",),
        kernels=(KernelRecord("mm", "lower_precision_fp", "float32,float32", 2),),
        seconds={"backend": 0.25},
        kind="bitwise",
        op="mm",
        at=0,
    ),
    FINDING,
    NoteRecord(NOTE, NOTED, "matmul"),
    EndRecord("eager-cpu", "matmul", 1, 0.5),
]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store(tmp_path / "store")
    made.begin(RUN)
    return made


def written(store: Store, *records: Record, worker: str = "0") -> Path:
    """Write records as a worker does; returns the file."""
    writer = store.writer("r1", worker)
    for record in records:
        writer.write(record)
    writer.close()
    return writer.path


# -- round trips ---------------------------------------------------------------------------------


def test_records_read_as_they_were_written(store: Store) -> None:
    written(store, *RECORDS)
    assert list(store.records("r1")) == RECORDS


def test_the_records_of_all_workers_are_read(store: Store) -> None:
    written(store, RECORDS[0], worker="0")
    written(store, RECORDS[2], worker="main")
    assert list(store.records("r1")) == [RECORDS[0], RECORDS[2]]


def test_a_second_writer_appends(store: Store) -> None:
    written(store, RECORDS[0])
    written(store, RECORDS[2])
    assert list(store.records("r1")) == [RECORDS[0], RECORDS[2]]


def test_a_record_is_in_the_file_before_the_writer_is_closed(store: Store) -> None:
    writer = store.writer("r1", "0")
    writer.write(RECORDS[0])
    assert list(store.records("r1")) == [RECORDS[0]]
    writer.close()


def test_the_head_of_a_run_reads_as_it_was_written(store: Store) -> None:
    assert store.run("r1") == RUN
    assert store.runs() == ["r1"]


def test_the_store_ignores_itself_in_git(store: Store) -> None:
    assert "\n*\n" in (store.root / ".gitignore").read_text()


def test_git_rules_of_the_users_own_stay(store: Store) -> None:
    (store.root / ".gitignore").write_text("mine")
    store.create()
    assert (store.root / ".gitignore").read_text() == "mine"


# -- damage --------------------------------------------------------------------------------------


def test_a_last_line_cut_short_is_left_out(store: Store) -> None:
    path = written(store, *RECORDS)
    whole = path.read_bytes()
    last = whole.rstrip(b"\n").rindex(b"\n") + 1
    for end in range(last, len(whole) - 1, 7):
        path.write_bytes(whole[:end])
        assert list(store.records("r1")) == RECORDS[:-1]


def test_a_writer_that_goes_on_drops_a_last_line_cut_short(store: Store) -> None:
    path = written(store, *RECORDS)
    path.write_bytes(path.read_bytes()[:-9])
    written(store, RECORDS[0])
    assert list(store.records("r1")) == [*RECORDS[:-1], RECORDS[0]]


@pytest.mark.parametrize("damage", [b"{", b"\x00\x00", b"\xff\xfe", b'{"type":"new"}', b"5", b"[]"])
def test_a_damaged_line_is_named(store: Store, damage: bytes) -> None:
    path = written(store, *RECORDS)
    lines = path.read_bytes().split(b"\n")
    lines[1] = damage
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(StoreError) as caught:
        list(store.records("r1"))
    assert str(caught.value).startswith(f"{path}:2: ")
    assert one_line(caught.value)


def test_a_run_that_is_not_there_names_those_that_are(store: Store) -> None:
    with pytest.raises(StoreError, match="use one of r1"):
        store.run("r2")


def test_a_damaged_head_is_named(store: Store) -> None:
    (store.run_path("r1") / "run.json").write_text("{")
    with pytest.raises(StoreError, match="the head of the run is damaged"):
        store.run("r1")


def test_a_run_of_a_newer_version_says_upgrade(store: Store) -> None:
    store.begin(msgspec.structs.replace(RUN, format=99))
    with pytest.raises(StoreError, match="upgrade amp-fuzz"):
        store.run("r1")


# -- disks ---------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_an_error_that_says_what_to_do() -> None:
    writer = Writer(Path("/dev/full"))
    with pytest.raises(StoreError, match=r"No space left on device.*free some space") as caught:
        writer.write(RECORDS[0])
    assert one_line(caught.value)
    writer.close()


def test_a_store_in_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="--store"):
        Store(tmp_path / "file").create()


def test_a_writer_without_its_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot write"):
        Store(tmp_path).writer("none", "0")


def test_a_file_is_written_whole_or_not_at_all(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = store.save(FINDING)
    before = path.read_bytes()

    def full(self: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(StoreError, match="No space left"):
        store.save(msgspec.structs.replace(FINDING, observed="2.0"))
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == [path.name]


# -- findings ------------------------------------------------------------------------------------


def test_a_finding_is_kept_under_the_id_of_its_smallest_case(store: Store) -> None:
    path = store.save(FINDING)
    assert FINDING.minimised is not None
    assert path.stem == FINDING.id == FINDING.minimised.id
    assert store.finding(FINDING.id) == FINDING


def test_findings_of_two_backends_with_one_case_do_not_replace_each_other(store: Store) -> None:
    other = msgspec.structs.replace(FINDING, backend="fake-cuda")
    store.save(FINDING)
    assert store.save(other).stem == f"{FINDING.id}@fake-cuda" == store.name_of(other)
    later = msgspec.structs.replace(other, observed="later")
    store.save(later)
    assert store.findings() == [FINDING.id, f"{FINDING.id}@fake-cuda"]
    assert store.finding(FINDING.id) == FINDING
    assert find_case(store, f"{FINDING.id}@fake-cuda") == (FINDING.minimised, later)


def test_a_finding_is_found_by_the_start_of_its_id(store: Store) -> None:
    store.save(FINDING)
    assert store.finding(FINDING.id[:4]) == FINDING
    assert find_case(store, FINDING.id[:4]) == (FINDING.minimised, FINDING)


def test_an_ambiguous_start_names_what_is_kept(store: Store) -> None:
    other = msgspec.structs.replace(FINDING, minimised=None)
    store.save(FINDING)
    store.save(other)
    with pytest.raises(StoreError, match="several findings start with ''") as caught:
        store.finding("")
    assert FINDING.id in str(caught.value)
    assert other.id in str(caught.value)


def test_an_unknown_id_says_what_is_kept(store: Store) -> None:
    with pytest.raises(StoreError, match=r"no finding has the id 'zz' .kept: none yet."):
        store.finding("zz")


def test_the_case_of_a_note_is_found_by_the_start_of_its_id(store: Store) -> None:
    written(store, *RECORDS)
    assert find_case(store, NOTED.id[:8]) == (NOTED, None)
    with pytest.raises(StoreError, match="no finding has the id"):
        find_case(store, CASE.id)


def test_notes_of_one_cause_are_one_group() -> None:
    other = msgspec.structs.replace(NOTE, message="no kernel for [4, 1]", where="v3 = v1.relu()")
    assert NOTE.group == other.group
    assert NOTE.group != msgspec.structs.replace(NOTE, message="no kernel for bfloat16").group


def test_dtypes_tell_groups_apart() -> None:
    cpp = (msgspec.structs.replace(NOTE, message=f"got {d}") for d in ("c10::Half", "float"))
    assert len({note.group for note in cpp}) == 1
    half, wide = (msgspec.structs.replace(NOTE, message=f"float{n} here") for n in (16, 32))
    assert half.group != wide.group


def test_a_case_file_and_a_findings_file_are_both_taken(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "case.json"
    path.write_bytes(CASE.json())
    assert find_case(store, str(path)) == (CASE, None)
    assert find_case(store, str(store.save(FINDING))) == (FINDING.minimised, FINDING)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"type":"divergence"}', '{"type":"end"}', "[" * 99_999]
)
def test_a_damaged_file_is_one_line(store: Store, tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    for read in (lambda: find_case(store, str(path)), lambda: load_finding(path)):
        with pytest.raises((StoreError, CaseError)) as caught:
            read()
        assert one_line(caught.value)
        assert str(path) in str(caught.value)


def test_a_finding_with_a_bad_case_is_refused(store: Store) -> None:
    path = store.save(FINDING)
    path.write_text(path.read_text().replace('"float32"', '"float8"'))
    with pytest.raises(StoreError, match=r"case: \$\.inputs\[0\]\.dtype='float8'"):
        load_finding(path)


# -- hostile names -------------------------------------------------------------------------------

HOSTILE = ["..", ".", "", "../r1", "../../etc", "/etc", "a/b", "r1/../r1", "a\x00b", "~"]


@pytest.mark.parametrize("name", HOSTILE)
def test_an_id_is_no_path_out_of_the_store(store: Store, name: str) -> None:
    with pytest.raises(StoreError) as caught:
        store.run(name)
    assert one_line(caught.value)
    with pytest.raises(StoreError):
        store.finding(name)


@pytest.mark.parametrize("name", ["..", "../r1", "/tmp/r1", "a/b", ""])
def test_a_run_is_not_begun_outside_the_store(store: Store, name: str) -> None:
    with pytest.raises(StoreError, match="not the id of a run"):
        store.begin(msgspec.structs.replace(RUN, id=name))


def test_reading_a_store_needs_no_torch() -> None:
    import subprocess

    code = "import sys, amp_fuzz.records.store; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_who_may_not_write_a_lock_is_told_whether_a_run_is_running(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: FileLock, *_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    with store.running(RUN), monkeypatch.context() as patch:
        patch.setattr(FileLock, "acquire", refused)
        assert store.is_running(RUN.id)
    monkeypatch.setattr(FileLock, "acquire", refused)
    assert not store.is_running(RUN.id)


def test_a_run_starts_while_another_process_asks_whether_it_is_running(tmp_path: Path) -> None:
    """The question takes the lock for a moment."""
    store = Store(tmp_path)
    lock = FileLock(store.begin(RUN) / "running-main.lock", thread_local=False)
    lock.acquire()
    threading.Timer(0.3, lock.release, kwargs={"force": True}).start()
    with store.running(RUN):
        assert store.is_running(RUN.id)
    assert not store.is_running(RUN.id)


def test_a_run_that_runs_elsewhere_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("amp_fuzz.records.store._PROBED", 0.1)
    store = Store(tmp_path)
    with (
        store.running(RUN),
        pytest.raises(StoreError, match="is it running already"),
        store.running(RUN),
    ):
        pass
