"""Reports say what the records say, to the number, and show what others wrote as it is: as text."""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterable
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from amp_fuzz.cases.case import Case, Plan
from amp_fuzz.cases.program import Program, Ref, Statement, TensorSpec
from amp_fuzz.records.fingerprint import fingerprinted
from amp_fuzz.records.schema import (
    BackendRecord,
    CaseRecord,
    DivergenceRecord,
    EndRecord,
    IncidentRecord,
    KernelRecord,
    KnownRecord,
    Note,
    NoteRecord,
    Outcome,
    Record,
    RunRecord,
)
from amp_fuzz.records.store import Store, StoreError
from amp_fuzz.reports import frames, html, machine, markdown, terminal, text, write
from amp_fuzz.reports.printable import plural
from amp_fuzz.reports.view import View, clean, clean_lines, rate, share, time_of, view
from amp_fuzz.upstream.known import Known
from tests.helpers import leading

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


PLAIN, LOW = case(MM), kernel(MM, "lower_precision_fp")


def ran(
    outcome: Outcome = "agreed",
    *,
    case: Case = PLAIN,
    backend: str = "eager-cpu",
    kernels: tuple[KernelRecord, ...] = (LOW,),
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
    path: Path,
    records: Iterable[Record],
    *,
    backends: tuple[BackendRecord, ...] | None = None,
    command: str = "",
    fail_on: tuple[str, ...] = (),
    require_coverage: float = 0.0,
    options: tuple[str, ...] = (),
    known: tuple[KnownRecord, ...] = (),
    ended: bool = True,
) -> Store:
    """Write the records of a run; unless its end is among them, or it was killed, that too."""
    if backends is None:
        backends = (
            BackendRecord(
                "eager-cpu", "cpu", "torch 2.13.0", (CAT, COS, MM), ("qr: it is an alias",)
            ),
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
            command=command,
            fail_on=fail_on,
            require_coverage=require_coverage,
            options=options,
            known=known,
        )
    )
    writer = store.writer("r1", "0")
    records = list(records)
    for record in records:
        writer.write(record)
    if ended and not any(isinstance(r, EndRecord) and not r.backend for r in records):
        ending = store.writer("r1", "run")
        ending.write(EndRecord("", "", 0, 0.0))
        ending.close()
    writer.close()
    return store


BIG, SMALL = case(CAT, seed=3, calls=4), case(CAT, seed=3)
FOREIGN = case(CAT, seed=5)
DEAD = case("linalg.svd", seed=9)


END = EndRecord("", "", 1, 1.0)


def small_run() -> list[Record]:
    """Two backends; agreed, raised, known and new cases; a worker that died; a run that ended."""
    both = (LOW, kernel(CAT))
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
        found(
            DEAD,
            kind="crash",
            backend="fake-cuda",
            op="",
            where="",
            expected="an answer",
            observed="the worker died of SIGSEGV",
        ),
        EndRecord("fake-cuda", "matmul", 2, 1.0),
        EndRecord("", "", 9, 75.0),
    ]


def view_of(store: Store) -> View:
    return view(frames.load(store, "r1"), KNOWN)


def page_of(shown: View) -> str:
    """Return the first page of the report."""
    return html.pages(shown)["report.html"]


@pytest.fixture
def shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> View:
    """Return the small run as a view, in a store where commands look for it."""
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
        ("", "none", "", "fake-cuda", "crash"): (1, 0, 0, 0),
        (CAT, "promote", pair, "eager-cpu", "dtype"): (2, 0, 0, 4),
        (CAT, "promote", pair, "eager-cpu", "raise"): (1, 1, 0, 2),
        (CAT, "promote", pair, "eager-cpu", "raised"): (1, 0, 0, 2),
        (CAT, "promote", pair, "fake-cuda", "raise"): (1, 1, 0, 2),
        (MM, low, pair, "eager-cpu", "agreed"): (2, 0, 0, 4),
        (MM, low, pair, "eager-cpu", "elsewhere"): (2, 0, 0, 4),
        (MM, low, pair, "eager-cpu", "raised"): (1, 0, 0, 2),
        (MM, low, pair, "fake-cuda", "agreed"): (1, 0, 0, 2),
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


@pytest.mark.thorough
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


@pytest.mark.thorough
def test_a_reached_kernel_that_is_listed_as_unreachable_is_said(tmp_path: Path) -> None:
    head = (BackendRecord("eager-cpu", "cpu", "torch", (), ("mm: because",)),)
    shown = view_of(store_of(tmp_path, [ran()], backends=head))
    assert shown.notes == ("eager-cpu: listed as unreachable, but reached: mm: because",)


def test_values_that_could_not_be_judged_are_said(tmp_path: Path) -> None:
    one, other = msgspec.structs.replace(ran(), unjudged=2), ran(case=case(COS))
    store = store_of(tmp_path, [one, other, msgspec.structs.replace(one, id="1" * 16)])
    (note,) = [n for n in view_of(store).notes if "not judged" in n]
    assert note.startswith("eager-cpu: not judged: 4 values in 2 cases")


def test_cases_that_varied_as_documented_are_counted(tmp_path: Path) -> None:
    one, other = msgspec.structs.replace(ran(), varied=2), ran(case=case(COS))
    store = store_of(tmp_path, [one, other, msgspec.structs.replace(one, id="1" * 16)])
    (note,) = [n for n in view_of(store).notes if "varied" in n]
    assert note == (
        "eager-cpu: 2 cases varied, as documented: 4 values, computed by kernels that torch lists "
        "as nondeterministic"
    )


def test_cases_that_agreed_without_a_graph_are_said(tmp_path: Path) -> None:
    """A compiler that compiled nothing has passed nothing."""
    left = msgspec.structs.replace(ran(), uncompiled=True)
    store = store_of(tmp_path, [left, ran(case=case(COS))])
    (note,) = [n for n in view_of(store).notes if "compiled" in n]
    assert note.startswith("eager-cpu: 1 case agreed without being compiled")


@pytest.mark.thorough
def test_artefacts_of_a_compilers_caches_are_counted(tmp_path: Path) -> None:
    one = msgspec.structs.replace(ran(), hits=2)
    store = store_of(tmp_path, [one, ran(case=case(COS)), replace(one, id="1" * 16)])
    (note,) = [n for n in view_of(store).notes if "artefact" in n]
    assert note == "eager-cpu: 2 cases loaded 4 artefacts from the compiler's caches"


@pytest.mark.thorough
def test_two_bugs_in_one_case_count_for_both(tmp_path: Path) -> None:
    store = store_of(tmp_path, [ran("known", kind="raise", known="a+b"), found(BIG, known="a+b")])
    assert [(k.id, k.cases) for k in view_of(store).known] == [("a", 2), ("b", 2)]


@pytest.mark.thorough
def test_a_known_finding_that_left_the_list_is_shown_by_its_id(tmp_path: Path) -> None:
    (gone,) = view_of(store_of(tmp_path, [found(BIG, known="gone")])).known
    assert gone.id == "gone"
    assert gone.what == "no known bug of this name stands in the record of the run"


# -- notes ----------------------------------------------------------------------------------------


def note(kind: str = "portability", op: str = CAT, **more: str) -> Note:
    about = {
        "backend": "eager-cpu",
        "where": "v0 = torch.cat([x0, x1])",
        "message": "float32 on cpu, bfloat16 on cuda",
        "advice": "Write x0.float() where the dtype matters.",
        "device": "cuda",
    }
    return Note(kind, op=op, **{**about, **more})  # type: ignore[arg-type]


LACKS = note(
    "autocast-raises",
    "linalg.svd",
    where="v0 = torch.linalg.svd(v1)",
    message="RuntimeError: not implemented for 'Half' \x1b[31m<b>",
    advice="Call it outside of autocast.",
)


def noted_run() -> list[Record]:
    """Return a run of two cases with notes: two of one group, one of another."""
    one, other = ran(), ran(case=case(COS), backend="fake-cuda")
    return [
        NoteRecord(note(), BIG),
        replace(one, notes=(note(), LACKS)),
        NoteRecord(replace(note(), backend="fake-cuda"), SMALL),
        NoteRecord(LACKS, DEAD),
        replace(other, notes=(replace(note(), backend="fake-cuda"),)),
        EndRecord("", "", 2, 1.0),
    ]


def test_notes_are_grouped_counted_and_replayed_by_their_smallest_case(tmp_path: Path) -> None:
    seen = view_of(store_of(tmp_path, noted_run()))
    assert [(n.note.op, n.cases, n.on) for n in seen.noted] == [
        (CAT, 2, "eager-cpu 1, fake-cuda 1"),
        ("linalg.svd", 1, "eager-cpu 1"),
    ]
    replay = f"amp-fuzz replay {SMALL.id} --backend=fake-cuda"
    assert seen.noted[0].replay.startswith(replay)


@pytest.mark.thorough
def test_a_note_whose_case_is_lost_is_still_counted(tmp_path: Path) -> None:
    (seen,) = view_of(store_of(tmp_path, [replace(ran(), notes=(note(),))])).noted
    assert (seen.cases, seen.replay) == (1, "")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kinds", "said"),
    [
        ((), ""),
        (("precision",), ""),
        (("portability",), " FAILS: 1 note, as --fail-on=portability says."),
        (
            ("autocast-raises", "portability"),
            " FAILS: 2 notes, as --fail-on=autocast-raises,portability says.",
        ),
    ],
)
def test_notes_fail_no_run_that_was_not_told_so(
    tmp_path: Path, kinds: tuple[str, ...], said: str
) -> None:
    seen = view_of(store_of(tmp_path, noted_run(), fail_on=kinds))
    assert (seen.verdict.kind, seen.tone == "bad") == (("new", True) if said else ("clean", False))
    assert seen.verdict.sentence.endswith(said)
    assert ("FAILS" in seen.verdict.sentence) == bool(said)


INCIDENT = IncidentRecord(
    "eager-cpu", "matmul", "crash", SMALL, "the worker died of SIGKILL", "Killed"
)


@pytest.mark.thorough
@pytest.mark.parametrize("fails", [True, False])
def test_an_incident_is_told_and_fails_only_a_run_that_was_told_so(
    tmp_path: Path, fails: bool
) -> None:
    seen = view_of(store_of(tmp_path, [ran(), INCIDENT], fail_on=("incident",) if fails else ()))
    assert f"incident: the worker died of SIGKILL, case {SMALL.id} of eager-cpu: it gave an" in str(
        seen.notes
    )
    said = " FAILS: 1 incident, as --fail-on=incident says."
    assert seen.verdict.sentence.endswith(said) == fails
    assert seen.verdict.kind == ("new" if fails else "clean")


def test_a_run_that_was_killed_says_so_and_how_to_go_on(tmp_path: Path) -> None:
    store = store_of(tmp_path, [ran()], ended=False, command="amp-fuzz run --seed=7")
    seen = view_of(store)
    assert seen.verdict.kind == "unended"
    assert seen.verdict.sentence.startswith("THE RUN DID NOT END: nothing new so far, of 1 case")
    assert seen.verdict.next.startswith("amp-fuzz run --resume=r1")
    assert seen.tone == "warn"
    with store.running(store.run("r1")):
        assert view_of(store).verdict.sentence.startswith("STILL RUNNING: nothing new so far")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        ("agreed", "nothing new so far, of 1 case on 1 backend."),
        ("known", "of 1 case on 1 backend, of which 1 diverged in a known way."),
    ],
)
def test_a_verdict_counts_known_divergences_if_there_are_any(
    tmp_path: Path, outcome: Outcome, said: str
) -> None:
    store = store_of(tmp_path, [ran(outcome)], ended=False)
    assert view_of(store).verdict.sentence.endswith(said)


@pytest.mark.thorough
def test_a_resumed_run_that_was_killed_did_not_end(tmp_path: Path) -> None:
    ends = [EndRecord("", "", 1, 2.0, "interrupted"), EndRecord("", "", 0, 0.0, "resumed")]
    seen = view_of(store_of(tmp_path, [ran(), *ends]))
    assert seen.verdict.kind == "unended"
    again = view_of(store_of(tmp_path / "again", [ran(), *ends, EndRecord("", "", 1, 3.0)]))
    assert (again.verdict.kind, again.took) == ("clean", 5.0)
    assert not [note for note in again.notes if "ended" in note or "killed" in note]


def test_a_new_finding_of_a_killed_run_is_told_first(tmp_path: Path) -> None:
    found = [r for r in small_run() if not isinstance(r, EndRecord)]
    seen = view_of(store_of(tmp_path, found, ended=False))
    assert seen.verdict.kind == "new"
    assert any(note.startswith("the run was killed") for note in seen.notes)


def test_a_terminal_shows_each_note_with_statement_and_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store_of(tmp_path, noted_run(), fail_on=("autocast-raises",))
    seen = view(frames.load(Store(), "r1"), ())
    short = text.render(seen, width=100)
    assert short.splitlines()[-1] == ("notes: portability 1 group (amp-fuzz report -v shows them)")
    assert "linalg.svd (eager-cpu 1): RuntimeError" in short  # this kind fails the run
    assert "cat (eager-cpu 1, fake-cuda 1)" not in short
    shown = text.render(seen, width=100, verbose=True)
    start, end = shown.index("notes: neither"), shown.index("amp-fuzz run r1")
    assert (
        shown[start:end].strip()
        == f"""\
notes: neither agreement nor divergence (--fail-on=KIND,... fails a run on them)
  autocast raises: the program runs without autocast and raises under it: 1 group, seen 1 time,
    FAILS
    linalg.svd (eager-cpu 1): RuntimeError: not implemented for 'Half' <b>
      | v0 = torch.linalg.svd(v1)
      Call it outside of autocast.
      amp-fuzz replay {DEAD.id} --backend=eager-cpu
  portability: another device's policies raise, or give another dtype: 1 group, seen 2 times
    cat (eager-cpu 1, fake-cuda 1): float32 on cpu, bfloat16 on cuda
      | v0 = torch.cat([x0, x1])
      Write x0.float() where the dtype matters.
      amp-fuzz replay {SMALL.id} --backend=fake-cuda"""
    )


def test_written_reports_show_notes_as_text(tmp_path: Path) -> None:
    seen = view_of(store_of(tmp_path, noted_run()))
    for said in (page_of(seen), markdown.render(seen)):
        assert "Call it outside of autocast." in said
        assert "&lt;b&gt;" in said
        assert "\x1b" not in said
        assert f"replay {SMALL.id}" in said


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
    "junk", leading([b"{", b"\xff\xfe", b'{"type":"future"}', b"[" * 5000, b'{"type":"case"}'])
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
    verdict = view_of(store).verdict
    assert verdict.kind == "unended"
    assert verdict.sentence.startswith("INCOMPLETE: 1 record cannot be read. Nothing new in the ")
    *_, note = view_of(store).notes
    assert note.startswith(f"left out: 1 record that could not be read; the first: {path}:2: ")
    assert " ".join(text.render(view_of(store)).split()).count(note) == 1


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
    lines = said.splitlines()
    assert lines[:3] == [
        "!" * 80,
        "NOTHING RAN: 0 cases, so this run says nothing about autocast.",
        "!" * 80,
    ]
    assert "next: amp-fuzz doctor" in lines
    assert markdown.render(shown).startswith("## \N{WARNING SIGN} amp_fuzz: NOTHING RAN")
    assert page_of(shown).count("NOTHING RAN") == 4  # and the page's title


def test_a_run_without_backends_says_so_too(tmp_path: Path) -> None:
    shown = view_of(store_of(tmp_path, [], backends=()))
    assert "no backends" in text.render(shown)
    assert "No backend was chosen" in page_of(shown)
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
    ends = [
        EndRecord("", "", 1, 2.0, "interrupted"),
        EndRecord("eager-cpu", "x", 1, 1.0, "stopped"),
    ]
    assert view_of(store_of(tmp_path, [ran(), *ends])).notes[1:] == (
        "an interrupt ended the run: the numbers cover only the part that ran",
        "1 task stopped before the end: the numbers cover only the part that ran",
    )


def test_a_run_that_an_error_ended_does_not_begin_with_nothing_new(tmp_path: Path) -> None:
    shown = view_of(store_of(tmp_path, [ran(), EndRecord("", "", 1, 2.0, "crashed")]))
    assert (shown.verdict.kind, shown.tone) == ("unended", "warn")
    assert shown.verdict.sentence == (
        "AN ERROR ENDED THE RUN: nothing new so far, of 1 case on 1 backend."
    )


def test_a_run_whose_time_was_up_says_how_far_it_came(tmp_path: Path) -> None:
    ends = [EndRecord("eager-cpu", "x", 40, 1.0), EndRecord("", "", 8114, 180.2, "stopped", 12000)]
    shown = view_of(store_of(tmp_path, [ran(), ran(backend="fake-cuda"), *ends]))
    assert shown.stopped == "stopped after 3 min 0 s: 8,114 of 12,000 cases"
    assert not shown.notes
    assert shown.tone == "good"  # it is the usual end of a run
    assert shown.stopped in text.render(shown)
    for said in (markdown.render(shown), page_of(shown)):
        assert "Stopped after 3 min 0 s: 8,114 of 12,000 cases." in said
    assert machine.as_json(shown).count(shown.stopped) == 1
    assert not list(machine.annotated(shown))


@pytest.mark.thorough
def test_a_run_that_judged_all_and_was_cut_while_minimising_says_that_all_ran(
    tmp_path: Path,
) -> None:
    end = EndRecord("", "", 50, 19.1, "stopped", 50)
    assert view_of(store_of(tmp_path, [ran(), end])).stopped == (
        "stopped after 19.1 s: all 50 cases ran, but a finding may be larger than necessary"
    )


@pytest.mark.thorough
@pytest.mark.parametrize(("least", "fails"), [(0, False), (66, False), (67, True), (100, True)])
def test_a_run_fails_that_reached_less_of_the_kernels_than_it_has_to(
    tmp_path: Path, least: float, fails: bool
) -> None:
    store = store_of(tmp_path, small_run(), require_coverage=least)
    data = frames.load(store, "r1")
    said = " FAILS: eager-cpu reached 2 of 3 autocast kernels (66.7 %); --require-coverage="
    sentence = view(data, KNOWN).verdict.sentence
    assert (f"{said}{least:g}." in sentence) == fails


def test_too_few_kernels_fail_a_run_without_a_finding(tmp_path: Path) -> None:
    shown = view_of(store_of(tmp_path, [ran(), END], require_coverage=95.0))
    assert (shown.verdict.kind, shown.tone) == ("new", "bad")
    assert shown.verdict.sentence.startswith("Nothing diverged: 1 case on 1 backend agreed")


def test_cases_that_were_not_drawn_are_told_apart(tmp_path: Path) -> None:
    again = [msgspec.structs.replace(ran(), family=name) for name in ("findings", "baseline")]
    end = EndRecord("", "", 3, 1.0)
    assert view_of(store_of(tmp_path, [ran(), *again, end])).verdict.sentence == (
        "Nothing diverged: 3 cases on 1 backend (2 judged again, 1 drawn) agreed with the "
        "reference. But fake-cuda ran nothing."
    )


# -- text -----------------------------------------------------------------------------------------


def test_the_terminal_summary(shown: View) -> None:
    assert (
        text.render(shown, width=80)
        == """\
2 new findings: of 9 cases on 2 backends, 3 diverged in an unknown way.
next: amp-fuzz repro bcc5b4f7a8c23781 --format=issue -o issue.md

  backend    cases  own  known  new  kernels reached
  eager-cpu      6    0      1    2  2/3 (66.7 %)
  fake-cuda      3    0      1    1  2/2 (100 %)

new findings: 2, grouped by cause

  1. crash on fake-cuda: 1 case
     | plan: autocast(device, bfloat16)
     | x0: bfloat16[2, 3] normal, x1: float16[2, 3] normal
     | v0 = linalg.svd(x0, x1)
     kind      crash
     expected  an answer
     observed  the worker died of SIGSEGV
     amp-fuzz replay bcc5b4f7a8c23781
     amp-fuzz repro bcc5b4f7a8c23781 > repro.py

  2. dtype at cat on eager-cpu: 2 cases
     | plan: autocast(device, bfloat16)
     | x0: bfloat16[2, 3] normal, x1: float16[2, 3] normal
     | v0 = cat(x0, x1)
     kind      dtype at v0
     op        cat (promote; bfloat16,float16)
     expected  float32
     observed  bfloat16
     amp-fuzz replay f2b80431386feea6
     amp-fuzz repro f2b80431386feea6 > repro.py
"""
    )


def test_the_terminal_summary_with_all_its_tables(shown: View) -> None:
    assert (
        text.render(shown, width=80, verbose=True)
        == """\
2 new findings: of 9 cases on 2 backends, 3 diverged in an unknown way.
next: amp-fuzz repro bcc5b4f7a8c23781 --format=issue -o issue.md

  backend    cases  agreed  raised  own  known  new  cases/s  kernels reached
  eager-cpu      6       2       1    0      1    2     0.50  2/3 (66.7 %)
  fake-cuda      3       1       0    0      1    1      2.0  2/2 (100 %)
  eager-cpu: torch 2.13.0
  fake-cuda: torch 2.13.0, no values
  raised: both sides raised alike. own: differs in the same way without
    autocast. cases/s: in one worker, including minimising.

autocast kernels that no case reached
  eager-cpu (1): cosh

chance that 1,000 more cases show a cause not seen yet
  eager-cpu: over 99 % (6 drawn cases, 1 cause seen once)
  fake-cuda: over 99 % (3 drawn cases, 2 causes seen once)

op x policy x dtypes x backend x kind: 9 rows, kernels by the outcome of their
  cases (agreed 3, dtype 2, raise 2, elsewhere 2, raised 2, crash 1)
  op      policy              dtypes    backend    kind           cases  calls
  cat     promote             bf16,f16  eager-cpu  dtype (NEW)        2      4
  (none)  none                -         fake-cuda  crash (NEW)        1      0
  cat     promote             bf16,f16  eager-cpu  raise (known)      1      2
  cat     promote             bf16,f16  fake-cuda  raise (known)      1      2
  mm      lower_precision_fp  bf16,f16  eager-cpu  agreed             2      4
  mm      lower_precision_fp  bf16,f16  eager-cpu  elsewhere          2      4
  cat     promote             bf16,f16  eager-cpu  raised             1      2
  mm      lower_precision_fp  bf16,f16  eager-cpu  raised             1      2
  mm      lower_precision_fp  bf16,f16  fake-cuda  agreed             1      2

known findings: 2 cases, each explained
  promote-foreign-half: 2 cases (eager-cpu 1, fake-cuda 1)
    an op of the promote policy raises for a 16-bit input of another dtype
    https://github.com/pytorch/pytorch/issues/132715

new findings: 2, grouped by cause

  1. crash on fake-cuda: 1 case
     | plan: autocast(device, bfloat16)
     | x0: bfloat16[2, 3] normal, x1: float16[2, 3] normal
     | v0 = linalg.svd(x0, x1)
     kind      crash
     expected  an answer
     observed  the worker died of SIGSEGV
     amp-fuzz replay bcc5b4f7a8c23781
     amp-fuzz repro bcc5b4f7a8c23781 > repro.py

  2. dtype at cat on eager-cpu: 2 cases
     | plan: autocast(device, bfloat16)
     | x0: bfloat16[2, 3] normal, x1: float16[2, 3] normal
     | v0 = cat(x0, x1)
     kind      dtype at v0
     op        cat (promote; bfloat16,float16)
     expected  float32
     observed  bfloat16
     amp-fuzz replay f2b80431386feea6
     amp-fuzz repro f2b80431386feea6 > repro.py

amp-fuzz run r1: seed 7, profile dev, 2026-01-02T03:04:05Z, 1 min 15 s
amp-fuzz 0.1.0, torch 2.13.0
store .amp-fuzz
"""
    )


def test_a_clean_summary_on_six_backends_is_short_and_begins_with_its_verdict(
    tmp_path: Path,
) -> None:
    names = tuple(f"fake-{i}" for i in range(6))
    backends = tuple(BackendRecord(name, "cpu", "torch 2.13.0", (CAT, MM)) for name in names)
    records = [ran(backend=name) for name in names]
    end = EndRecord("", "", 6, 90.2, "stopped", 6000)
    shown = view_of(store_of(tmp_path, [*records, end], backends=backends))
    lines = text.render(shown, width=120).splitlines()
    assert lines[:2] == [
        "Nothing diverged: 6 cases on 6 backends agreed with the reference.",
        "stopped after 1 min 30 s: 6 of 6,000 cases",
    ]
    assert len(lines) <= 10


def test_no_line_is_wider_than_the_terminal_but_what_is_to_be_copied(tmp_path: Path) -> None:
    long = found(case(CAT, seed=11), observed="RuntimeError: " + "word " * 90)
    shown = view_of(store_of(tmp_path, [*small_run(), long]))
    for width in (40, 60, 80, 120):
        for line in text.render(shown, width=width).splitlines():
            assert len(line) <= width or "amp-fuzz " in line or len(line.split()) == 1, line


def test_a_narrow_terminal_loses_columns_not_backends(shown: View) -> None:
    said = text.render(shown, width=50)
    assert "  backend    cases  known  new  kernels reached" in said
    assert "  fake-cuda      3      1    1  2/2 (100 %)" in said


def test_each_new_finding_has_two_lines_to_copy_and_they_work(tmp_path: Path) -> None:
    store = store_of(tmp_path, small_run())
    for record in (found(BIG, small=SMALL), found(DEAD, kind="crash")):
        store.save(record)
    said = text.render(view_of(store), width=80)
    commands = re.findall(r"^     amp-fuzz (\w+) (\w+) --store=(\S+)( > repro.py)?$", said, re.M)
    assert [c[0] for c in commands] == ["replay", "repro"] * 2
    for _, identity, root, _ in commands:
        assert Store(root).finding(identity).id == identity


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options", [("--device=npu", "--policies=a.toml"), ("--plugins=mine",), ("--plugins=a b",), ()]
)
def test_commands_carry_what_cases_are_judged_with_where_they_take_it(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    """To say it to `report`, which judges nothing, would be an error."""
    clean = view_of(store_of(tmp_path / "clean", [ran(), END], options=options)).verdict.next
    words = "".join(f" {shlex.quote(option)}" for option in options)
    assert re.fullmatch(r"amp-fuzz report r1 --store=\S+", clean)
    said = text.render(view_of(store_of(tmp_path, small_run(), options=options)))
    for name in ("replay", "repro"):
        assert re.search(rf"amp-fuzz {name} \w+{words} --store=", said)


def test_only_so_many_findings_fill_the_terminal(tmp_path: Path) -> None:
    many = [found(case(f"op{i:02}"), op=f"op{i:02}") for i in range(text.MOST_FINDINGS + 5)]
    said = text.render(view_of(store_of(tmp_path, many)), width=80)
    assert said.count(" > repro.py") == text.MOST_FINDINGS
    assert "and 5 more in the report" in said
    assert "25 new findings: of 25 cases on 1 backend, 25 diverged" in said


def test_new_findings_come_with_the_worst_first(tmp_path: Path) -> None:
    kinds = ["relation", "value", "dtype", "crash", "raise", "no-such-kind"]
    records = [found(case(k), kind=k, op=f"op{i}") for i, k in enumerate(kinds)]
    shown = view_of(store_of(tmp_path, records))
    assert [f.record.kind for f in shown.new] == [
        "crash", "raise", "dtype", "value", "relation", "no-such-kind",
    ]  # fmt: skip


def test_a_run_with_known_divergences_only_is_no_failure(tmp_path: Path) -> None:
    records = [ran(), found(FOREIGN, kind="raise", known=KNOWN[0].id), ran(backend="fake-cuda")]
    shown = view_of(store_of(tmp_path, records))
    assert shown.verdict.kind == "known"
    assert shown.verdict.sentence == (
        "Nothing new: of 3 cases on 2 backends, 1 diverged, and 1 known finding explains them all."
    )
    assert shown.tone == "good"


def test_control_characters_do_not_reach_a_terminal(tmp_path: Path) -> None:
    nasty = found(BIG, observed="\x1b[31mred\x1b[0m\r\n\x07bell \u202eright to left \x00")
    said = terminal(store_of(tmp_path, [nasty]), "r1", known=KNOWN, width=80)
    assert "observed  red bell right to left\n" in said
    assert all(c.isprintable() or c == "\n" for c in said)


@pytest.mark.parametrize("without", [True, False])
def test_reports_say_what_is_no_bug_of_autocast(without: bool, tmp_path: Path) -> None:
    store = store_of(tmp_path, [replace(found(BIG), bare=without)])
    shown = view_of(store)
    for said, line in (
        (terminal(store, "r1", known=KNOWN, width=80), "     also      without autocast\n"),
        (markdown.render(shown), "| also | `without autocast` |"),
        (Page(page_of(shown)).text, "also without autocast"),
    ):
        assert (line in said) == without


# -- Markdown -------------------------------------------------------------------------------------


def test_the_markdown_summary(shown: View) -> None:
    assert (
        markdown.render(shown)
        == """\
## ❌ amp_fuzz: 2 new findings: of 9 cases on 2 backends, 3 diverged in an unknown way.

run `r1`, seed 7, profile `dev`, 2026-01-02T03:04:05Z, 1 min 15 s, amp-fuzz 0.1.0, torch 2.13.0, store `.amp-fuzz`

```sh
amp-fuzz repro bcc5b4f7a8c23781 --format=issue -o issue.md
```

### Backends

| backend | version | cases | agreed | raised alike | own | known | new | cases/s a worker | ops | autocast kernels reached |
|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---|
| `eager-cpu` | torch 2.13.0 | 6 | 2 | 1 | 0 | 1 | **2** | 0.50 | 2 | 2/3 (66.7 %) |
| `fake-cuda` | torch 2.13.0, no values | 3 | 1 | 0 | 0 | 1 | **1** | 2.0 | 2 | 2/2 (100 %) |

<details><summary>Autocast kernels not reached</summary>

- `eager-cpu`, 1 that could be: `cosh`
- `eager-cpu`, `qr` by no caller: it is an alias

</details>

### New findings (2, grouped by cause)

#### crash on `fake-cuda`: 1 case

```
plan: autocast(device, bfloat16)
x0: bfloat16[2, 3] normal, x1: float16[2, 3] normal
v0 = linalg.svd(x0, x1)
```

|  |  |
|---|---|
| kind | `crash` |
| expected | `an answer` |
| observed | `the worker died of SIGSEGV` |

```sh
amp-fuzz replay bcc5b4f7a8c23781
amp-fuzz repro bcc5b4f7a8c23781 > repro.py
```

<details><summary>The case, and its casts written out</summary>

```
case bcc5b4f7a8c23781 seed=9
plan: autocast(device, bfloat16)
x0: bfloat16[2, 3] normal
x1: float16[2, 3] normal
v0 = linalg.svd(x0, x1)
return v0
```

```python
# under autocast(device, bfloat16)
v0 = torch.cat([x0, cast[bfloat16](x1)])
```

</details>

#### dtype at cat on `eager-cpu`: 2 cases

```
plan: autocast(device, bfloat16)
x0: bfloat16[2, 3] normal, x1: float16[2, 3] normal
v0 = cat(x0, x1)
```

|  |  |
|---|---|
| kind | `dtype at v0` |
| op | `cat (promote; bfloat16,float16)` |
| expected | `float32` |
| observed | `bfloat16` |

```sh
amp-fuzz replay f2b80431386feea6
amp-fuzz repro f2b80431386feea6 > repro.py
```

<details><summary>The case, and its casts written out</summary>

```
case f2b80431386feea6 seed=3
plan: autocast(device, bfloat16)
x0: bfloat16[2, 3] normal
x1: float16[2, 3] normal
v0 = cat(x0, x1)
return v0
```

```python
# under autocast(device, bfloat16)
v0 = torch.cat([x0, cast[bfloat16](x1)])
```

</details>

### Known findings (2 cases)

| id | what | why | cases | on |
|---|---|---|---:|---|
| [`promote-foreign-half`](<https://github.com/pytorch/pytorch/issues/132715>) | an op of the promote policy raises for a 16-bit input of another dtype | upstream knows the autocast dtype and float32 only | 2 | `eager-cpu` 1, `fake-cuda` 1 |

<details><summary>Divergences by op and backend (2 ops)</summary>

Cases that diverged first at the op, of those that call it.

| op | `eager-cpu` | `fake-cuda` |
|---|---|---|
| `cat` | 3/6 | 1/2 |
| `(none)` | 0 | 1/3 |

</details>

<details><summary>Device against device</summary>

Of the kernels with a mix of dtypes that both backends reached, those on which outcomes
differ more than chance explains.

| backend | `eager-cpu` | `fake-cuda` |
|---|---|---|
| `eager-cpu` |  | 0/2 |
| `fake-cuda` | 0/2 |  |

</details>

<details><summary>Outcomes that are uneven (2 kernels with dtypes, of which 0 differ more than chance explains)</summary>

| kernel | dtypes | `eager-cpu` | `fake-cuda` | differs between |
|---|---|---|---|---|
| `cat` | bf16,f16 | 2 dtype, 1 raise, 1 raised alike of 4 | 1 raise of 1 | chance may explain it |
| `mm` | bf16,f16 | 1 raised alike of 3 | 1 | chance may explain it |

</details>

<details><summary>Not seen yet</summary>

The chance that 1,000 more cases of the same draw show a cause that no case has
shown, and how many such causes they show on average.

| backend | chance | causes | computed from |
|---|---|---:|---|
| `eager-cpu` | over 99 % | 1.6 | 6 drawn cases, 1 cause seen once |
| `fake-cuda` | over 99 % | 666 | 3 drawn cases, 2 causes seen once |

</details>

<details><summary>What was tested (16 of 18 cells are empty)</summary>

Kernels of a policy that were compared with inputs of a dtype, and under an ingredient
of a plan.

| with | lower\\_precision\\_fp (1) | promote (1) | not compared (1) |
|---|---:|---:|---:|
| `float16` | 0 | 0 | 0 |
| `bfloat16` | 0 | 0 | 0 |
| `float32` | 0 | 0 | 0 |
| `float64` | 0 | 0 | 0 |
| `several` | 1 | 1 | 0 |
| `other` | 0 | 0 | 0 |

</details>

<details><summary>op x policy x dtypes x backend x kind (9 rows)</summary>

| op | policy | dtypes | backend | kind | cases | calls |
|---|---|---|---|---|---:|---:|
| `cat` | promote | bf16,f16 | `eager-cpu` | dtype (NEW) | 2 | 4 |
| `(none)` | none | - | `fake-cuda` | crash (NEW) | 1 | 0 |
| `cat` | promote | bf16,f16 | `eager-cpu` | raise (known) | 1 | 2 |
| `cat` | promote | bf16,f16 | `fake-cuda` | raise (known) | 1 | 2 |
| `mm` | lower\\_precision\\_fp | bf16,f16 | `eager-cpu` | agreed | 2 | 4 |
| `mm` | lower\\_precision\\_fp | bf16,f16 | `eager-cpu` | elsewhere | 2 | 4 |
| `cat` | promote | bf16,f16 | `eager-cpu` | raised | 1 | 2 |
| `mm` | lower\\_precision\\_fp | bf16,f16 | `eager-cpu` | raised | 1 | 2 |
| `mm` | lower\\_precision\\_fp | bf16,f16 | `fake-cuda` | agreed | 1 | 2 |

</details>
"""  # noqa: E501
    )


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("lower_precision_fp", r"lower\_precision\_fp"),
        ("<script>&", "&lt;script&gt;&amp;"),
        ("a\nb | [c](d)", r"a b \| \[c\](d)"),
    ],
)
def test_markdown_shows_text_as_it_is(words: str, shown: str) -> None:
    assert markdown.text(words) == shown


@pytest.mark.parametrize(
    ("words", "shown"),
    [("x", "`x`"), ("a`b", "``a`b``"), ("`a`", "`` `a` ``"), ("a | b", "`a | b`"), ("", "` `")],
)
def test_markdown_shows_code_as_it_is(words: str, shown: str) -> None:
    assert markdown.code(words) == shown


def test_no_text_breaks_out_of_its_cell_or_block(tmp_path: Path) -> None:
    nasty = found(BIG, small=SMALL, observed="a | b\n| c |")
    nasty = replace(nasty, explicit="```\n</details><script>alert(1)</script>")
    said = markdown.render(view_of(store_of(tmp_path, [nasty])))
    assert r"| observed | `a \| b \| c \|` |" in said
    assert "\n````python\n```\n</details><script>alert(1)</script>\n````\n" in said


# -- HTML -----------------------------------------------------------------------------------------

VOID = {"meta", "link", "input", "br"}


class Page(HTMLParser):
    """Reads a page and holds that each element is closed in its turn."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.words: list[str] = []
        self.scripts: list[str] = []
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.ids += [value or "" for name, value in attrs if name == "id"]
        self.links += [
            v or "" for n, v in attrs if n in ("src", "href", "action", "srcset", "data")
        ]
        assert not [name for name, _ in attrs if name.startswith("on")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open
        assert self.open.pop() == tag, self.getpos()

    def handle_data(self, data: str) -> None:
        (self.scripts if self.open[-1:] == ["script"] else self.words).append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def test_the_page_is_whole(shown: View) -> None:
    pages = html.pages(shown)
    assert list(pages) == ["report.html", "ops.html", "tested.html", "devices.html"]
    for source in pages.values():
        page = Page(source)
        assert len(page.ids) == len(set(page.ids))
        assert {link[1:] for link in page.links if link.startswith("#")} <= set(page.ids)
        assert {link for link in page.links if link.endswith(".html")} <= set(pages)
    page = Page(pages["report.html"])
    for said in (
        shown.verdict.sentence,
        "amp-fuzz repro " + SMALL.id + " > repro.py",
        "v0 = torch.cat([x0, cast[bfloat16](x1)])",
        "1 statement, minimised from 4",
        "1 of 3 that a caller can reach",
        "it is an alias",
        KNOWN[0].why,
        "2/3 66.7 %",
        "9.0 s",
    ):
        assert said in page.text


def test_the_page_needs_no_network(shown: View) -> None:
    pages = html.pages(shown)
    for name, source in pages.items():
        others = [u for u in Page(source).links if not u.startswith(("#", "data:"))]
        assert [u for u in others if u not in pages] == [KNOWN[0].link] * (name == "report.html")
        assert not re.search(r"url\(|@import|\bfetch\(|XMLHttpRequest|import\(", source)
        assert "default-src 'none'" in source


NASTY = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&amp;{{ 7919*7907 }}"


def test_everything_that_a_record_holds_is_escaped(tmp_path: Path) -> None:
    head = BackendRecord(NASTY, NASTY, NASTY, (NASTY, CAT), (f"{NASTY}: {NASTY}",))
    records: list[Record] = [
        ran(backend=NASTY, kernels=(KernelRecord(NASTY, NASTY, NASTY, 1),)),
        replace(
            found(case(NASTY), backend=NASTY, op=NASTY, kind=NASTY, where=NASTY),
            expected=NASTY, observed=NASTY, policy=NASTY, dtypes=NASTY, explicit=NASTY,
        ),
        found(BIG, backend=NASTY, op=NASTY, known=NASTY),
        EndRecord("", "", 1, 1.0, "interrupted"),
    ]  # fmt: skip
    known = Known(id=NASTY, what=NASTY, why=NASTY, link=NASTY, quirk="x")
    store = store_of(tmp_path, records, backends=(head,))
    shown = view(frames.load(store, "r1"), (known,))
    for name, source in html.pages(shown).items():
        page = Page(source)
        assert "img" not in page.tags
        assert page.tags.count("script") == (2 if name == "ops.html" else 1)
        assert page.text.count(NASTY) > (20 if name == "report.html" else 1)
        assert "62615533" not in page.text


@pytest.mark.thorough
@pytest.mark.parametrize(
    "link", ["javascript:alert(1)", "data:text/html,x", "//evil", 'https://x/"onclick="', "ftp://x"]
)
def test_only_links_to_the_web_become_links(tmp_path: Path, link: str) -> None:
    known = Known(id="k", what="w", why="y", link=link, quirk="x")
    store = store_of(tmp_path, [found(BIG, known="k")])
    shown = view(frames.load(store, "r1"), (known,))
    page = Page(page_of(shown))
    assert all(re.match(r"#|data:,|\w+\.html$", target) for target in page.links)
    assert f"](<{link}" not in markdown.render(shown)


def test_shades_grow_with_cases_and_stay_in_range() -> None:
    shades = [html._level(n, 1000) for n in range(1001)]
    assert shades == sorted(shades)
    assert (shades[0], shades[1], shades[1000]) == (0, 1, 6)
    assert html._level(1, 1) == 6


@pytest.mark.thorough
def test_the_first_page_of_any_run_stays_small(tmp_path: Path) -> None:
    """1,000 ops with 40 mixes of dtypes on both backends, and 600 findings of a long program."""
    mixes = [f"{a},{b}" for a in ("float16", "bfloat16", "float32", "int64") for b in range(10)]
    records: list[Record] = [
        ran(backend=b, kernels=tuple(kernel(f"op{i}", dtypes=m) for m in mixes))
        for b in ("eager-cpu", "fake-cuda")
        for i in range(1000)
    ]
    long = "\n".join("v0 = torch.cat([x0, cast[bfloat16](x1)])" for _ in range(2000))
    records += [
        replace(found(case(f"op{i}", calls=300), op=f"op{i}", observed=long), explicit=long)
        for i in range(600)
    ]
    pages = html.pages(view_of(store_of(tmp_path, records)))
    assert len(pages["report.html"]) < 2_000_000
    told = [Page(source).text.count("cast[bfloat16]") > 0 for source in pages.values()]
    assert list(pages)[:4] == ["report.html", "ops.html", "tested.html", "devices.html"]
    assert list(pages)[4:] == [f"findings-{i}.html" for i in range(2, 8)]
    assert told == [True, False, False, False] + [True] * 6
    shown = [re.findall(r'id="f-(\w+)"', source) for source in pages.values()]
    assert [len(of) for of in shown] == [50, 0, 0, 0, 100, 100, 100, 100, 100, 50]
    assert len({finding for of in shown for finding in of}) == 600


def test_a_finding_shows_in_which_versions_it_is_there(tmp_path: Path) -> None:
    store = store_of(tmp_path, small_run())
    record = found(BIG, small=SMALL)
    store.keep_range(record, "torch: nobody asked for it")
    assert store.range_of(record) == ""  # it is not kept here
    store.save(record)
    store.keep_range(record, "torch: there since 2.9.0 or earlier; still there in 2.13.0")
    page = Page(page_of(view_of(store))).text
    assert page.count("range torch: there since 2.9.0 or earlier; still there in 2.13.0") == 1
    assert page.count("seen first in this run") == 2


# -- files ----------------------------------------------------------------------------------------


def test_write_makes_the_files(tmp_path: Path) -> None:
    store = store_of(tmp_path, small_run())
    folder = tmp_path / "deep" / "report"
    paths = write(store, "r1", folder, known=KNOWN)
    assert [p.name for p in paths] == [
        "report.html",
        "report.md",
        "report.json",
        "summary.csv",
        "junit.xml",
        "code-quality.json",
        "annotations.txt",
    ]
    # And nothing half written beside them.
    assert {p.name for p in folder.iterdir()} - {p.name for p in paths} == {
        "devices.html",
        "ops.html",
        "tested.html",
    }
    assert paths[0].read_text().startswith("<!DOCTYPE html>")
    rows = paths[3].read_text().splitlines()
    assert rows[0] == "op,policy,dtypes,backend,kind,cases,known,own,calls"
    assert rows[2] == 'cat,promote,"bfloat16,float16",eager-cpu,dtype,2,0,0,4'
    assert len(rows) == 10


def test_a_run_names_the_bugs_that_it_knew_of(tmp_path: Path) -> None:
    """Its report needs neither the list nor the package of that day."""
    kept = tuple(KnownRecord(k.id, k.what, k.why, k.link) for k in KNOWN)
    said = terminal(store_of(tmp_path, small_run(), known=kept), "r1", width=80, verbose=True)
    assert "an op of the promote policy raises" in said


@pytest.mark.thorough
def test_reports_need_no_torch_and_load_pandas_when_one_is_made(tmp_path: Path) -> None:
    store = store_of(tmp_path, small_run())
    code = f"""
import sys
import amp_fuzz.reports as reports
from amp_fuzz.records.store import Store
from pathlib import Path
assert not {{"pandas", "jinja2", "numpy", "torch"}} & set(sys.modules)
sys.modules["torch"] = None  # importing it is an error from here on
reports.write(Store({str(store.root)!r}), "r1", Path({str(tmp_path)!r}))
print(reports.terminal(Store({str(store.root)!r}), "r1"))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "2 new findings" in done.stdout


# -- words ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "want"),
    [
        (plural(0, "case"), "0 cases"),
        (plural(1, "case"), "1 case"),
        (share(0, 0), "-"),
        (share(0, 9), "0 %"),
        (share(1, 100_000), "0.1 %"),
        (share(99_999, 100_000), "99.9 %"),
        (share(9, 9), "100 %"),
        (rate(0.0), "-"),
        (rate(0.123), "0.12"),
        (rate(12.34), "12.3"),
        (rate(1234.5), "1,234"),
        (time_of(0), "-"),
        (time_of(0.0312), "31 ms"),
        (time_of(0.9999), "1.0 s"),
        (time_of(59.96), "1 min 0 s"),
        (time_of(134), "2 min 14 s"),
        (time_of(11_100), "3 h 5 min"),
        (clean(" a\tb\n\x1b[1;31mc\x1b[K "), "a b c"),
        (clean_lines("a:\n    b\x00\x1b[0m"), "a:\n    b "),
    ],
)
def test_numbers_and_words(said: str, want: str) -> None:
    assert said == want


# -- what the backend does without autocast too ----------------------------------------------------


def own_run() -> list[Record]:
    """One cause in two cases of a compiler, one case of another backend, one known bug."""
    where = {"kind": "value", "op": "erf", "known": "backend"}
    shown = fingerprinted(
        replace(
            found(BIG, kind="value", op="erf", known="backend", small=SMALL, where="v0"),
            backend="compile[inductor]",
            stage="compile[inductor]",
            part="lowerings: erf",
        )
    )
    mine = {"backend": "compile[inductor]", **where}
    of = (shown.fingerprint,)
    cases = [replace(ran("backend", case=c, **mine), groups=of) for c in (BIG, case(CAT, seed=4))]
    lone = ran("backend", case=FOREIGN, **{**where, "kind": "nonfinite"})
    name = KNOWN[0].id
    beside = ran("known", case=DEAD, kind="raise", op=CAT, known=f"{name}+backend")
    return [ran(), *cases, shown, lone, beside, EndRecord("", "", 5, 75.0)]


@pytest.fixture
def own(tmp_path: Path) -> View:
    return view_of(store_of(tmp_path, own_run()))


def test_what_shows_without_autocast_too_is_counted_apart_and_fails_nothing(own: View) -> None:
    assert (own.own_cases, own.new_cases, own.known_cases) == (3, 0, 1)
    assert [(b.name, b.own, b.known) for b in own.backends if b.cases] == [
        ("eager-cpu", 1, 1),
        ("compile[inductor]", 2, 0),
    ]
    assert [k.id for k in own.known] == [KNOWN[0].id]
    assert own.verdict.kind == "known"
    assert own.verdict.sentence.startswith("Nothing new about autocast: of 5 cases")
    (group,) = own.own
    assert (group.cases, group.record.stage) == (2, "compile[inductor]")
    assert group.title == "lowerings: erf is wrong, as value at erf"
    assert group.replay.startswith(f"amp-fuzz replay {SMALL.id}")


def test_a_run_of_nothing_else_says_so(tmp_path: Path) -> None:
    records = [r for r in own_run() if not (isinstance(r, CaseRecord) and "+" in r.known)]
    seen = view_of(store_of(tmp_path, records))
    assert seen.verdict.kind == "backend"
    assert "agreed with the reference, or differ without autocast too" in seen.verdict.sentence


def test_the_terminal_says_it_in_a_line_and_shows_the_groups_if_asked(own: View) -> None:
    said = text.render(own, width=120)
    line = (
        "3 cases differ in the same way without autocast: the backend's own (1 group; amp-fuzz "
        "report -v shows it)"
    )
    assert line in said
    assert "lowerings" not in said
    assert len(said.splitlines()) <= 20
    whole = text.render(own, width=120, verbose=True)
    assert "compile[inductor], without autocast's doing: 1 group, 3 cases" in whole
    assert "1. lowerings: erf is wrong, as value at erf on compile[inductor]: 2 cases" in whole
    assert "stage     compile[inductor]" in whole


@pytest.mark.thorough
@pytest.mark.parametrize("kinds", [("backend",), ("incident", "backend")])
def test_it_fails_a_run_that_was_told_so(tmp_path: Path, kinds: tuple[str, ...]) -> None:
    failing = view_of(store_of(tmp_path, own_run(), fail_on=kinds))
    assert failing.verdict.kind == "new"
    sentence = " FAILS: 3 cases of the backend's own, as --fail-on=backend says."
    assert failing.verdict.sentence.endswith(sentence)
    assert "1. lowerings: erf is wrong" in text.render(failing, width=120)
    assert "::error title=amp-fuzz%3A lowerings" in "\n".join(machine.annotated(failing))
    assert failing.own[0].record.fingerprint in machine.code_quality(failing)
    assert '<failure type="value"' in machine.junit(failing)


def test_each_written_report_has_it_in_a_section_of_its_own(own: View) -> None:
    said = markdown.render(own)
    head = "compile[inductor], without autocast's doing (1 group, 3 cases)"
    assert f"<details><summary>{head}</summary>" in said
    assert "3 cases differ in the same way without autocast: the backend's own." in said
    page = html.pages(own)["report.html"]
    assert '<details id="own">' in page
    assert "lowerings: erf" in page.partition('id="own"')[2]
    facts = msgspec.json.decode(machine.as_json(own))
    assert [(f["cases"], f["part"]) for f in facts["own"]] == [(2, "lowerings: erf")]
    assert [b["own"] for b in facts["backends"]] == [1, 0, 2]
    assert facts["new"] == []
    suites = machine.junit(own)
    assert "the backend's own: it differs in the same way without autocast" in suites
    assert "<failure" not in suites
    notices = [line for line in machine.annotated(own) if line.startswith("::notice")]
    assert len(notices) == 1
    assert machine.code_quality(own) == "[]\n"


@pytest.mark.thorough
def test_an_older_run_has_none(shown: View) -> None:
    assert (shown.own, shown.own_cases, shown.own_sentence) == ((), 0, "")
    assert "without autocast" not in text.render(shown, width=120)
