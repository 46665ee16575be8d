"""A compacted run says what its JSON lines said, and nothing is lost on the way to it."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

pytest.importorskip("pyarrow")
import pyarrow.parquet

from amp_fuzz import reports
from amp_fuzz.records import compaction
from amp_fuzz.records.compaction import compact
from amp_fuzz.records.lives import lives
from amp_fuzz.records.schema import (
    CaseRecord,
    DivergenceRecord,
    EndRecord,
    IncidentRecord,
    KernelRecord,
    Record,
    RunRecord,
)
from amp_fuzz.records.store import Store, StoreError, find_case
from amp_fuzz.records.tables import TABLES_FORMAT, Tables
from amp_fuzz.reports import frames
from tests.helpers import leading, one_line
from tests.unit.test_reports import DEAD, found, ran, small_run, store_of
from tests.unit.test_store import FINDING, NOTE, NOTED, RECORDS, RUN


def case_with(**fields: object) -> CaseRecord:
    return replace(ran(), **fields)


ALL: list[Record] = [
    *small_run()[:-1],
    *RECORDS,
    IncidentRecord("eager-cpu", "matmul", "crash", DEAD, "died of SIGSEGV", "last\nlines"),
    case_with(notes=(NOTE, replace(NOTE, message="no kernel for [9]")), unjudged=3, varied=2),
    case_with(hits=3),
    case_with(promises=("autocast.context", "cpu:mm")),
    case_with(uncompiled=True, platform="gpu", seconds={}, ops=(), kernels=()),
    case_with(seconds={"oracle": 0.1, "a new part": 0.2}, backend="compile[inductor]@cuda"),
    ran("diverged", kind="value", op="mm", at=0, kernels=(KernelRecord("mm", "fp32", "", 1),)),
    replace(ran("diverged", kind="dtype", op="cat"), groups=("aa", "bb")),
    case_with(at=0, known="only the record has it"),
    EndRecord("", "", 9, 75.0),
]


def report_of(store: Store, folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in reports.read(store, "r1").write(folder)}


def files(store: Store) -> set[str]:
    folder = store.run_path("r1")
    kept = {p.name for p in folder.iterdir() if not p.name.startswith("running-")}
    return kept - {"summary.json"}  # of a report


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return store_of(tmp_path, ALL)


def append(store: Store, *records: Record) -> None:
    with closing(store.writer("r1", "0")) as writer:
        for record in records:
            writer.write(record)


# -- the same run ---------------------------------------------------------------------------------


def test_the_records_are_the_same(store: Store) -> None:
    before = list(store.records("r1"))
    assert compact(store, "r1").changed
    assert list(store.records("r1")) == before == ALL
    assert files(store) == {"run.json", "tables-1"}


def test_the_report_is_the_same_to_the_byte(store: Store, tmp_path: Path) -> None:
    before = report_of(store, tmp_path / "before")
    compact(store, "r1")
    assert report_of(store, tmp_path / "after") == before


def test_frames_have_the_same_rows(store: Store) -> None:
    before = frames.load(store, "r1")
    compact(store, "r1")
    after = frames.load(store, "r1")
    assert after.cases.astype(object).equals(before.cases.astype(object))
    for name in ("kernels", "ops", "parts", "divergences", "ends"):
        was, now = (sorted(getattr(d, name).itertuples(index=False)) for d in (before, after))
        assert now == was, name
    for name in (
        "records",
        "incidents",
        "unjudged",
        "varied",
        "uncompiled",
        "hits",
        "promised",
        "state",
        "notes",
    ):
        assert getattr(after, name) == getattr(before, name), name


@pytest.mark.thorough
def test_a_run_without_cases_is_the_same(tmp_path: Path) -> None:
    store = store_of(tmp_path, [EndRecord("eager-cpu", "matmul", 0, 1.0)])
    before = report_of(store, tmp_path / "before")
    compact(store, "r1")
    assert report_of(store, tmp_path / "after") == before


@pytest.mark.thorough
def test_cases_that_reach_no_kernel_are_the_same(tmp_path: Path) -> None:
    cases: list[Record] = [case_with(kernels=()), case_with(kernels=(), backend="fake-cuda")]
    store = store_of(tmp_path, [*cases, EndRecord("", "", 2, 1.0)])
    before = report_of(store, tmp_path / "before")
    compact(store, "r1")
    assert list(store.records("r1"))[:2] == cases
    assert report_of(store, tmp_path / "after") == before


def test_the_case_of_a_note_is_found(store: Store) -> None:
    compact(store, "r1")
    assert find_case(store, NOTED.id[:8]) == (NOTED, None)
    with pytest.raises(StoreError, match="no finding has the id"):
        find_case(store, FINDING.case.id)


def test_a_run_that_is_compacted_already_does_not_change(store: Store) -> None:
    compact(store, "r1")
    stamp = (store.run_path("r1") / "tables-1").stat()
    assert not compact(store, "r1").changed
    assert (store.run_path("r1") / "tables-1").stat() == stamp


def test_each_backend_has_a_file_with_the_version_in_its_metadata(store: Store) -> None:
    done = compact(store, "r1")
    tables = store.tables("r1")
    assert tables is not None
    names = {path.stem for path in tables.files["cases"]}
    assert names == {"eager-cpu", "fake-cuda", "compile[inductor]@cuda"}
    assert {path.stem for path in tables.files["findings"]} == {"eager-cpu", "fake-cuda", "-"}
    for paths in tables.files.values():
        for path in paths:
            file = pyarrow.parquet.ParquetFile(path)
            assert file.schema_arrow.metadata[b"amp_fuzz.tables"] == str(TABLES_FORMAT).encode()
            assert file.metadata.row_group(0).column(0).compression == "ZSTD"
    assert done.counts["findings"] == sum(not isinstance(r, CaseRecord) for r in ALL)


# -- a run that goes on ---------------------------------------------------------------------------


@pytest.mark.thorough
def test_a_run_that_goes_on_has_its_old_records_and_its_new_ones(
    store: Store, tmp_path: Path
) -> None:
    compact(store, "r1")
    late = [ran("diverged", case=DEAD, backend="fake-cuda", kind="crash"), RECORDS[0]]
    append(store, *late)
    assert list(store.records("r1")) == [*ALL, *late]
    before = report_of(store, tmp_path / "before")
    compact(store, "r1")
    assert list(store.records("r1")) == [*ALL, *late]
    assert files(store) == {"run.json", "tables-2"}
    assert report_of(store, tmp_path / "after") == before


def test_a_divergence_that_comes_later_says_where_the_case_diverged(tmp_path: Path) -> None:
    case = ran("diverged", kind="dtype", op="mm")
    divergence = found(DEAD, op="cat")
    store = store_of(tmp_path, [replace(case, id=DEAD.id)])
    compact(store, "r1")
    append(store, divergence)
    mixed = frames.load(store, "r1").cases
    compact(store, "r1")
    merged = frames.load(store, "r1").cases
    assert list(mixed["op"]) == list(merged["op"]) == ["cat"]


# -- kills ----------------------------------------------------------------------------------------

KILL = """
import os, signal, sys
from amp_fuzz.records import compaction
from amp_fuzz.records.store import Store
def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
setattr(compaction, sys.argv[2], die)
compaction.compact(Store(sys.argv[1]), "r1")
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("moment", "left"),
    [
        ("write", {"run.json", "records-0~1.jsonl"}),
        ("_verify", {"run.json", "records-0~1.jsonl", ".tables"}),
        ("_clean", {"run.json", "records-0~1.jsonl", "tables-1"}),
    ],
    ids=["before the tables are written", "before the rename", "before the removal"],
)
@pytest.mark.parametrize("goes_on", [False, True])
def test_a_kill_loses_nothing(
    store: Store, tmp_path: Path, moment: str, left: set[str], goes_on: bool
) -> None:
    damaged = store.run_path("r1") / "records-0.jsonl"
    damaged.write_bytes(damaged.read_bytes() + b"{damaged\n")
    before = report_of(store, tmp_path / "before")
    done = subprocess.run([sys.executable, "-c", KILL, str(store.root), moment], check=False)
    assert done.returncode == -signal.SIGKILL
    kept = {name for name in files(store) if not name.startswith("damaged")}
    assert kept == left
    assert report_of(store, tmp_path / "killed") == before
    more: list[Record] = [RECORDS[2]] if goes_on else []
    if more:
        append(store, *more)
    compact(store, "r1")
    number = 2 if goes_on else 1
    assert {n for n in files(store) if n != "run.json"} == {
        f"tables-{number}",
        # Lines of tables that were complete stay in their own file.
        f"damaged-{1 if moment == '_clean' else number}.jsonl",
    }
    assert list(store.records("r1")) == [*ALL, *more]
    if not goes_on:
        assert report_of(store, tmp_path / "after") == before


def test_what_a_killed_compaction_kept_beside_is_written_again(store: Store) -> None:
    folder = store.run_path("r1")
    (folder / "records-0.jsonl").write_bytes(b"{\n")
    (folder / "records-0.jsonl").rename(folder / "records-0~1.jsonl")
    (folder / "damaged-1.jsonl").write_bytes(b"{\n")
    append(store, RECORDS[2])
    compact(store, "r1")
    assert files(store) == {"run.json", "tables-2", "damaged-2.jsonl"}


def test_a_copy_that_somebody_made_is_left_alone(store: Store) -> None:
    lines = store.run_path("r1") / "records-0.jsonl"
    lines.with_name("records-0~copy.jsonl").write_bytes(lines.read_bytes())
    assert list(store.records("r1")) == ALL
    compact(store, "r1")
    assert list(store.records("r1")) == ALL
    assert files(store) == {"run.json", "tables-1", "records-0~copy.jsonl"}


# -- damage ---------------------------------------------------------------------------------------


def test_a_last_line_cut_short_is_dropped_and_named(store: Store) -> None:
    path = store.run_path("r1") / "records-0.jsonl"
    path.write_bytes(path.read_bytes() + b'{"type":"case","id":')
    done = compact(store, "r1")
    assert (done.torn, done.damaged, done.beside) == ([path], [], None)
    assert list(store.records("r1")) == ALL


@pytest.mark.parametrize("line", leading([b"{", b"\x00\x00", b"\xff\xfe", b'{"type":"new"}', b"5"]))
def test_a_damaged_line_is_kept_beside_and_the_report_says_so(
    store: Store, tmp_path: Path, line: bytes
) -> None:
    path = store.run_path("r1") / "records-0.jsonl"
    first, _, rest = path.read_bytes().partition(b"\n")
    path.write_bytes(b"\n".join([first, line, rest]))
    before = report_of(store, tmp_path / "before")
    assert b"could not be read" in before["report.md"]
    done = compact(store, "r1")
    assert [str(d).startswith(f"{path}:2: ") for d in done.damaged] == [True]
    assert done.beside == store.run_path("r1") / "damaged-1.jsonl"
    assert done.beside.read_bytes() == line + b"\n"
    assert list(store.records("r1")) == ALL
    assert report_of(store, tmp_path / "after") == before
    append(store, RECORDS[2])
    compact(store, "r1")
    assert done.beside.read_bytes() == line + b"\n"
    assert frames.load(store, "r1").damage == tuple(map(str, done.damaged))


def test_a_damaged_table_is_an_error_of_one_line(store: Store) -> None:
    compact(store, "r1")
    path = store.run_path("r1") / "tables-1" / "cases" / "eager-cpu.parquet"
    whole = path.read_bytes()
    for damage in (b"", whole[:-9], b"PAR1" + bytes(len(whole) - 8) + b"PAR1"):
        path.write_bytes(damage)
        for read in (lambda: list(store.records("r1")), lambda: frames.load(store, "r1")):
            with pytest.raises(StoreError, match="cannot be read") as caught:
                read()
            assert one_line(caught.value)
            assert str(path) in str(caught.value)


def test_tables_that_do_not_hold_all_rows_do_not_replace_lines(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tables, "count", lambda *_: 1)
    with pytest.raises(StoreError, match=r"has 1 rows of \d+: .*the JSON lines are intact"):
        compact(store, "r1")
    assert store.tables("r1") is None
    assert list(store.records("r1")) == ALL


def test_a_file_that_cannot_be_opened_stops_the_compaction(store: Store) -> None:
    (store.run_path("r1") / "records-x.jsonl").mkdir()
    with pytest.raises(StoreError, match=r"records-x.jsonl: Is a directory.*intact"):
        compact(store, "r1")
    assert store.tables("r1") is None


# -- what stays as it is --------------------------------------------------------------------------


def test_a_run_of_a_newer_version_is_left_alone(store: Store) -> None:
    store.begin(replace(store.run("r1"), format=99))
    before = files(store)
    with pytest.raises(StoreError, match="upgrade amp-fuzz"):
        compact(store, "r1")
    assert files(store) == before


def test_tables_of_a_newer_version_are_left_alone(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("amp_fuzz.records.tables.TABLES_FORMAT", TABLES_FORMAT + 1)
    compact(store, "r1")
    monkeypatch.undo()
    append(store, RECORDS[2])
    before = files(store)
    for use in (compact, frames.load, lambda s, r: list(s.records(r))):
        with pytest.raises(StoreError, match="written by a newer amp-fuzz: upgrade amp-fuzz"):
            use(store, "r1")
    assert files(store) == before


def test_a_running_run_is_refused(store: Store) -> None:
    before = files(store)
    with store.running(store.run("r1")), pytest.raises(StoreError, match="running now"):
        compact(store, "r1")
    assert files(store) == before


def test_a_run_does_not_start_while_it_is_compacted(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    verify = compaction._verify
    monkeypatch.setattr(
        compaction, "_verify", lambda *a: (seen.append(store.is_running("r1")), verify(*a))
    )
    compact(store, "r1")
    assert seen == [True]
    assert not store.is_running("r1")


def test_a_run_that_starts_just_then_is_not_compacted(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The question whether it runs was answered before it started."""
    asked = Store.is_running
    monkeypatch.setattr("amp_fuzz.records.store._PROBED", 0.1)
    head = store.run("r1")
    with store.running(head), monkeypatch.context() as patch:
        patch.setattr(Store, "is_running", lambda s, r, but="": but != "" and asked(s, r, but=but))
        with pytest.raises(StoreError, match="running now"):
            compact(store, "r1")
    waits = pytest.raises(StoreError, match="changes its files: wait")
    with store.alone("r1"), waits, store.running(head):
        pass
    with store.running(head):
        assert store.is_running("r1")


READERS: dict[str, Callable[[Store], object]] = {
    "report": lambda store: reports.read(store, "r1").data.cases.to_csv(),
    "frame": lambda store: reports.load(store.run_path("r1")).to_csv(),
    "lives": lambda store: lives(store, [one for one in ALL if isinstance(one, DivergenceRecord)]),
    "note": lambda store: find_case(store, NOTED.id),
}


@pytest.mark.thorough
@pytest.mark.parametrize("when", ["before its lines are listed", "before they are opened"])
@pytest.mark.parametrize("name", READERS)
def test_who_reads_while_a_run_is_compacted_misses_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch, name: str, when: str
) -> None:
    before, lines = READERS[name](store), Store.lines

    def late(self: Store, run: str) -> list[Path]:
        monkeypatch.setattr(Store, "lines", lines)
        listed = self.lines(run)
        compact(self, run)
        return listed if when == "before they are opened" else self.lines(run)

    monkeypatch.setattr(Store, "lines", late)
    assert READERS[name](store) == before
    assert files(store) == {"run.json", "tables-1"}


def test_a_run_that_is_not_there_is_named(store: Store) -> None:
    with pytest.raises(StoreError, match="use one of r1"):
        compact(store, "r2")


LIMIT = """
import resource, sys
from amp_fuzz.records.compaction import compact
from amp_fuzz.records.store import Store, StoreError
import pyarrow.parquet
sys.dont_write_bytecode = True  # Python would cut the bytecode of what it imports, for all
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
try:
    compact(Store(sys.argv[1]), "r1")
except StoreError as error:
    sys.exit(str(error))
"""


@pytest.mark.thorough
def test_a_full_disk_loses_nothing(store: Store) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIMIT, str(store.root)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "cannot write (" in line
    assert line.endswith("free some space; the records are intact")
    assert ".tables" not in files(store)
    assert list(store.records("r1")) == ALL


def test_without_pyarrow_the_error_says_how_to_install_it(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    compact(store, "r1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for use in (
        lambda: list(store.records("r1")),
        lambda: frames.load(store, "r1"),
        lambda: reports.load(store.root),
        lambda: store.noted("0"),
    ):
        with pytest.raises(StoreError, match=r"pip install 'amp-fuzz\[parquet\]'$") as caught:
            use()
        assert one_line(caught.value)


def test_lines_need_no_pyarrow(store: Store) -> None:
    code = (
        "import sys; sys.modules['pyarrow'] = None\n"
        "from pathlib import Path\n"
        "from amp_fuzz import reports\n"
        "from amp_fuzz.records.store import Store\n"
        "store = Store(Path(sys.argv[1]))\n"
        "print(len(list(store.records('r1'))), len(reports.load(store.root)))\n"
    )
    command = [sys.executable, "-c", code, str(store.root)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [f"{len(ALL)}", f"{len(frames.load(store, 'r1').cases)}"]


@pytest.mark.thorough
def test_pyarrow_is_imported_only_where_it_is_used() -> None:
    code = "import sys, amp_fuzz.interfaces.cli; sys.exit('pyarrow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_head_of_an_earlier_run_still_loads(store: Store) -> None:
    head = msgspec.json.decode(msgspec.json.encode(RUN))
    for name in ("machine", "commits", "flags", "configuration"):
        del head[name]
    assert msgspec.convert(head, RunRecord) == RUN
