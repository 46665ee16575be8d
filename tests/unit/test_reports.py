"""Reports say what the records say, to the number, and show what others wrote as it is: as text."""

import io
import re
import subprocess
import sys
from collections.abc import Iterable
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest

from amp_fuzz.case import Case, Plan
from amp_fuzz.known import Known
from amp_fuzz.program import Program, Ref, Statement, TensorSpec
from amp_fuzz.records import (
    BackendRecord,
    CaseRecord,
    DivergenceRecord,
    EndRecord,
    KernelRecord,
    Outcome,
    Record,
    RunRecord,
)
from amp_fuzz.reports import frames, html, markdown, terminal, text, write
from amp_fuzz.reports.view import View, clean, clean_lines, plural, rate, share, time_of, view
from amp_fuzz.store import Store, StoreError

KNOWN = (
    Known(
        id="promote-foreign-half",
        what="an op of the promote policy raises for a 16-bit input of another dtype",
        why="upstream knows the autocast dtype and float32 only",
        link="https://github.com/pytorch/pytorch/issues/132715",
        quirk="promote-foreign-half",
    ),
)
CAT, MM, COS = "cat", "mm", "cosh"


def case(op: str, seed: int = 0, calls: int = 1) -> Case:
    inputs = (TensorSpec("x0", (2, 3), "bfloat16"), TensorSpec("x1", (2, 3), "float16"))
    body = [
        Statement(op, "function", (Ref("x0"), Ref("x1")), outputs=(f"v{i}",)) for i in range(calls)
    ]
    return Case(Program(inputs, tuple(body), ("v0",)), Plan(), seed)


def kernel(op: str, policy: str = "promote", dtypes: str = "bfloat16,float16") -> KernelRecord:
    return KernelRecord(op, policy, dtypes, 2)


def ran(
    outcome: Outcome = "agreed",
    *,
    case: Case = case(MM),
    backend: str = "eager-cpu",
    kernels: tuple[KernelRecord, ...] = (kernel(MM, "lower_precision_fp"),),
    kind: str = "",
    op: str = "",
    known: str = "",
    at: int = -1,
) -> CaseRecord:
    spent = {"reference": 0.25, "backend": 0.125, "oracle": 0.125}
    return CaseRecord(
        case.id, backend, "matmul", outcome, (MM, CAT), kernels, spent, kind, op, known, at
    )  # fmt: skip


def found(
    case: Case,
    *,
    kind: str = "dtype",
    backend: str = "eager-cpu",
    op: str = CAT,
    known: str = "",
    small: Case | None = None,
    expected: str = "float32",
    observed: str = "bfloat16",
    where: str = "v0",
) -> DivergenceRecord:
    return DivergenceRecord(
        backend=backend,
        kind=kind,
        where=where,
        op=op,
        policy="promote" if op else "none",
        dtypes="bfloat16,float16" if op else "",
        expected=expected,
        observed=observed,
        known=known,
        case=case,
        minimised=small,
        explicit="# under autocast(device, bfloat16)\nv0 = torch.cat([x0, cast[bfloat16](x1)])",
        family="promotion",
    )


def store_of(
    path: Path, records: Iterable[Record], *, backends: tuple[BackendRecord, ...] | None = None
) -> Store:
    if backends is None:
        backends = (
            BackendRecord("eager-cpu", "cpu", "torch 2.13.0", (CAT, COS, MM), ("qr: it is an alias",)),
            BackendRecord("fake-cuda", "cuda", "torch 2.13.0, no values", (CAT, MM)),
        )
    store = Store(path / ".amp-fuzz")
    store.begin(
        RunRecord(
            id="r1",
            seed=7,
            profile="dev",
            backends=backends,
            versions={"amp-fuzz": "0.1.0", "torch": "2.13.0"},
            started="2026-01-02T03:04:05Z",
        )
    )
    writer = store.writer("r1", "0")
    for record in records:
        writer.write(record)
    writer.close()
    return store


BIG, SMALL = case(CAT, seed=3, calls=4), case(CAT, seed=3)
FOREIGN = case(CAT, seed=5)
DEAD = case("linalg.svd", seed=9)


def small_run() -> list[Record]:
    """Two backends; agreed, raised, known and new cases; a worker that died; a run that ended."""
    both = (kernel(MM, "lower_precision_fp"), kernel(CAT))
    new = {"kind": "dtype", "op": CAT, "at": 1, "kernels": both}
    old = {"kind": "raise", "op": CAT, "at": 0, "kernels": (kernel(CAT),)}
    name = KNOWN[0].id
    return [
        ran(),
        ran(),
        ran("raised", kernels=both),
        ran("diverged", case=BIG, **new),
        ran("diverged", case=case(CAT, seed=4), **new),
        found(BIG, small=SMALL),
        ran("known", case=FOREIGN, known=name, **old),
        found(FOREIGN, kind="raise", known=name),
        EndRecord("eager-cpu", "matmul", 6, 12.0),
        ran(backend="fake-cuda"),
        ran("known", case=FOREIGN, backend="fake-cuda", known=name, **old),
        found(DEAD, kind="crash", backend="fake-cuda", op="", observed="died of SIGSEGV", where=""),
        EndRecord("fake-cuda", "matmul", 2, 1.0),
        EndRecord("", "", 9, 75.0),
    ]


def view_of(store: Store) -> View:
    return view(frames.load(store, "r1"), KNOWN)


@pytest.fixture
def shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> View:
    """The small run as a view, in a store where commands look for it."""
    monkeypatch.chdir(tmp_path)
    store_of(tmp_path, small_run())
    return view(frames.load(Store(), "r1"), KNOWN)


# -- frames ---------------------------------------------------------------------------------------


@pytest.fixture
def data(tmp_path: Path) -> frames.RunData:
    return frames.load(store_of(tmp_path, small_run()), "r1")


def test_every_case_has_one_outcome(data: frames.RunData) -> None:
    table = frames.outcomes(data)
    assert table.loc["eager-cpu", ["cases", "agreed", "raised", "known", "diverged"]].tolist() == [
        6, 2, 1, 1, 2,
    ]  # fmt: skip
    # The worker that died wrote no record of its case; who watched it wrote the divergence.
    assert table.loc["fake-cuda", ["cases", "agreed", "raised", "known", "diverged"]].tolist() == [
        3, 1, 0, 1, 1,
    ]  # fmt: skip


def test_rates_come_from_the_tasks_that_ended(data: frames.RunData) -> None:
    table = frames.outcomes(data)
    assert table["rate"].tolist() == [0.5, 2.0]
    assert table["raised_share"].tolist() == [1 / 6, 0.0]
    assert table["ops"].tolist() == [2, 2]


def test_a_run_without_ends_takes_its_rate_from_the_cases(tmp_path: Path) -> None:
    cut = [r for r in small_run() if not isinstance(r, EndRecord)]
    table = frames.outcomes(frames.load(store_of(tmp_path, cut), "r1"))
    assert table.loc["eager-cpu", "rate"] == 2.0  # 0.5 s a case


def test_seconds_add_up_to_those_of_the_tasks(data: frames.RunData) -> None:
    table = frames.seconds(data)
    assert table.loc["eager-cpu"].to_dict() == {
        "reference": 1.5, "backend": 0.75, "oracle": 0.75, "other": 9.0,
    }  # fmt: skip


def test_the_summary_counts_a_divergence_where_it_shows_and_nowhere_else(
    data: frames.RunData,
) -> None:
    table = frames.summary(data)
    rows = {tuple(r[:5]): tuple(r[5:]) for r in table.itertuples(index=False)}
    pair = "bfloat16,float16"
    low = "lower_precision_fp"
    assert rows == {
        ("", "none", "", "fake-cuda", "crash"): (1, 0, 0),
        (CAT, "promote", pair, "eager-cpu", "dtype"): (2, 0, 4),
        (CAT, "promote", pair, "eager-cpu", "raise"): (1, 1, 2),
        (CAT, "promote", pair, "eager-cpu", "raised"): (1, 0, 2),
        (CAT, "promote", pair, "fake-cuda", "raise"): (1, 1, 2),
        (MM, low, pair, "eager-cpu", "agreed"): (2, 0, 4),
        (MM, low, pair, "eager-cpu", "elsewhere"): (2, 0, 4),
        (MM, low, pair, "eager-cpu", "raised"): (1, 0, 2),
        (MM, low, pair, "fake-cuda", "agreed"): (1, 0, 2),
    }


def test_coverage_names_what_is_missing(data: frames.RunData) -> None:
    table = frames.coverage(data)
    assert table["reached"].tolist() == [2, 2]
    assert table["reachable"].tolist() == [3, 2]
    assert table["missing"].tolist() == [(COS,), ()]
    assert table["unreachable"].tolist() == [("qr: it is an alias",), ()]
    assert table["found"].tolist() == [(), ()]


def test_findings_are_counted_and_named_by_the_smallest_case(data: frames.RunData) -> None:
    table = frames.findings(data)
    pair = "bfloat16,float16"
    name = KNOWN[0].id
    assert [tuple(r) for r in table.itertuples(index=False)] == [
        ("eager-cpu", "dtype", CAT, "promote", pair, "", 2, SMALL.id),
        ("eager-cpu", "raise", CAT, "promote", pair, name, 1, FOREIGN.id),
        ("fake-cuda", "crash", "", "none", "", "", 1, DEAD.id),
        # Its like was seen before, so the engine kept no record: nothing is left to replay here.
        ("fake-cuda", "raise", CAT, "promote", pair, name, 1, ""),
    ]


def test_a_divergence_whose_case_record_is_lost_is_still_counted(tmp_path: Path) -> None:
    store = store_of(tmp_path, [ran(), found(BIG)])
    assert view_of(store).verdict.kind == "new"
    assert view_of(store).cases == 2


def test_a_new_divergence_without_a_record_is_counted_and_said(tmp_path: Path) -> None:
    shown = view_of(store_of(tmp_path, [ran("diverged", kind="dtype", op=CAT)]))
    assert shown.verdict.kind == "new"
    assert not shown.new
    assert shown.lost == 1
    assert "1 new diverging case left no record to replay: run again with --seed=7" in shown.notes


def test_a_reached_kernel_that_is_listed_as_unreachable_is_said(tmp_path: Path) -> None:
    head = (BackendRecord("eager-cpu", "cpu", "torch", (), ("mm: because",)),)
    shown = view_of(store_of(tmp_path, [ran()], backends=head))
    assert shown.notes == ("eager-cpu: listed as unreachable, but reached: mm: because",)


def test_two_bugs_in_one_case_count_for_both(tmp_path: Path) -> None:
    store = store_of(tmp_path, [ran("known", kind="raise", known="a+b"), found(BIG, known="a+b")])
    assert [(k.id, k.cases) for k in view_of(store).known] == [("a", 2), ("b", 2)]


def test_a_known_finding_that_left_the_list_is_shown_by_its_id(tmp_path: Path) -> None:
    (gone,) = view_of(store_of(tmp_path, [found(BIG, known="gone")])).known
    assert gone.id == "gone"
    assert gone.what == "no entry of this name stands in the known list now"


# -- damage ---------------------------------------------------------------------------------------


def records_file(store: Store) -> Path:
    return store.run_path("r1") / "records-0.jsonl"


def test_a_last_line_that_was_cut_short_is_left_out_in_silence(tmp_path: Path) -> None:
    store = store_of(tmp_path, [ran(), ran()])
    path = records_file(store)
    path.write_bytes(path.read_bytes()[:-20])
    data = frames.load(store, "r1")
    assert len(data.cases) == 1
    assert data.damage == ()


@pytest.mark.parametrize(
    "junk", [b"{", b"\xff\xfe", b'{"type":"future"}', b"[" * 5000, b'{"type":"case"}', b""]
)
def test_a_damaged_line_costs_itself_only_and_is_said(tmp_path: Path, junk: bytes) -> None:
    store = store_of(tmp_path, [ran(), ran(), ran()])
    path = records_file(store)
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([lines[0], junk, *lines[1:]]))
    data = frames.load(store, "r1")
    assert len(data.cases) == 3
    (line,) = data.damage
    assert line.startswith(f"{path}:2: ")
    assert "1 record could not be read and are left out" not in text.render(view_of(store))
    assert "note: 1 record could not be read" in text.render(view_of(store), width=120)


def test_a_run_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    store = store_of(tmp_path, [])
    with pytest.raises(StoreError, match=r"r2.run\.json: No such file or directory: use one of r1"):
        terminal(store, "r2")


def test_a_report_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    store = store_of(tmp_path, [])
    (tmp_path / "taken").touch()
    with pytest.raises(StoreError, match=r"taken: cannot make the report's folder \(File exists\)"):
        write(store, "r1", tmp_path / "taken")


# -- nothing ran ----------------------------------------------------------------------------------


def test_a_run_of_no_cases_says_so_loudly(tmp_path: Path) -> None:
    shown = view_of(store_of(tmp_path, []))
    said = text.render(shown, width=80)
    assert said.count("NOTHING RAN") == 3  # each backend, and the verdict
    assert said.splitlines()[-4:] == [
        "!" * 80,
        "NOTHING RAN: 0 cases, so this run says nothing about autocast.",
        "!" * 80,
        "next: amp-fuzz doctor",
    ]
    assert markdown.render(shown).startswith("## \N{WARNING SIGN} amp\\_fuzz: NOTHING RAN".replace("\\", ""))
    assert html.render(shown).count("NOTHING RAN") == 4  # and the page's title


def test_a_run_without_backends_says_so_too(tmp_path: Path) -> None:
    shown = view_of(store_of(tmp_path, [], backends=()))
    assert "no backends" in text.render(shown)
    assert "No backend was chosen" in html.render(shown)
    assert "None." in markdown.render(shown)


def test_a_backend_that_ran_nothing_spoils_a_clean_verdict(tmp_path: Path) -> None:
    shown = view_of(store_of(tmp_path, [ran()]))
    assert shown.verdict.kind == "clean"
    assert shown.verdict.sentence == (
        "Nothing diverged: 1 case on 1 backend agreed with the reference. "
        "But fake-cuda ran nothing."
    )
    assert shown.notes == ("fake-cuda ran nothing (torch 2.13.0, no values)",)


def test_a_run_that_was_cut_short_says_so(tmp_path: Path) -> None:
    ends = [EndRecord("", "", 1, 2.0, "interrupted"), EndRecord("eager-cpu", "x", 1, 1.0, "stopped")]
    assert view_of(store_of(tmp_path, [ran(), *ends])).notes[1:] == (
        "the run was interrupted before its end: the numbers are of the part that ran",
        "of 1 task, each was stopped before its end: the numbers are of the part that ran",
    )
