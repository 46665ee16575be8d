"""The runs of a store say since when a finding is seen, whether it is fixed, and whether back."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from amp_fuzz.records.compaction import compact
from amp_fuzz.records.lives import Life, lives
from amp_fuzz.records.schema import CaseRecord, DivergenceRecord, EndRecord, Outcome, RunRecord
from amp_fuzz.records.store import Store
from amp_fuzz.reports import read

from .test_reports import CAT, case, found, ran

FINDING = replace(found(case(CAT)), fingerprint="0123456789")
OTHER = case(CAT, seed=9)


def drawn(outcome: Outcome = "diverged", group: str = FINDING.fingerprint) -> CaseRecord:
    """Return the record of another case of the cause."""
    groups = (group,) if outcome == "diverged" else ()
    return replace(ran(outcome, case=OTHER, kind="dtype", op=CAT), groups=groups)


def again(outcome: Outcome, group: str = "") -> CaseRecord:
    """Return the record of the finding's case, judged again."""
    record = replace(ran(outcome, case=FINDING.case), family="findings")
    return replace(record, groups=(group,)) if group else record


def store_of(path: Path, *runs: list[CaseRecord | DivergenceRecord]) -> Store:
    """Write a run a day, the first with torch 2.11.0 and the others with 2.13.0."""
    store = Store(path)
    for day, records in enumerate(runs, start=1):
        name, torch = f"r{day}", "2.11.0" if day == 1 else "2.13.0"
        started = f"2026-01-0{day}T00:00:00+00:00"
        store.begin(RunRecord(name, 1, "dev", (), {"torch": torch}, started))
        writer = store.writer(name, "0")
        for record in (*records, EndRecord("", "", len(records), 1.0)):
            writer.write(record)
        writer.close()
    return store


def life(store: Store, finding: DivergenceRecord = FINDING) -> Life:
    return lives(store, [finding])[finding.backend, finding.id]


def test_a_cause_is_seen_from_the_first_run_to_the_last(tmp_path: Path) -> None:
    one = life(store_of(tmp_path, [drawn(), FINDING], [], [drawn()], [ran()]))
    assert (one.state, one.first.run, one.last.run, one.fixed) == ("new", "r1", "r3", None)
    assert str(one) == (
        "first seen 2026-01-01 on torch 2.11.0, last seen 2026-01-03 on torch 2.13.0"
    )


def test_it_is_fixed_when_its_case_agrees_and_back_when_it_is_seen_again(tmp_path: Path) -> None:
    runs = [[drawn(), FINDING], [again("agreed")], [again("raised")], [drawn()]]
    fixed = life(store_of(tmp_path / "fixed", *runs[:3]))
    assert (fixed.state, fixed.fixed and fixed.fixed.run, fixed.last.run) == ("fixed", "r2", "r1")
    back = life(store_of(tmp_path / "back", *runs))
    assert (back.state, back.last.run) == ("back", "r4")
    assert str(back) == (
        "first seen 2026-01-01 on torch 2.11.0, fixed 2026-01-02 on torch 2.13.0, "
        "back 2026-01-04 on torch 2.13.0"
    )


def test_a_finding_is_judged_again_by_its_minimised_case(tmp_path: Path) -> None:
    small = replace(FINDING, minimised=OTHER)
    records = [replace(again("agreed"), id=OTHER.id)]
    store = store_of(tmp_path, [drawn(), small], records)
    assert life(store, small).state == "fixed"


def test_runs_count_in_the_order_in_which_they_started(tmp_path: Path) -> None:
    store = store_of(tmp_path, [again("agreed")], [drawn(), FINDING])
    later = replace(store.run("r1"), started="2026-01-03T00:00:00+00:00")
    store.begin(replace(later, versions=store.run("r2").versions))
    assert life(store).state == "fixed"


def test_the_newest_torch_decides_where_each_night_has_two(tmp_path: Path) -> None:
    nights = [[drawn(), FINDING], [again("agreed")], [again("diverged", FINDING.fingerprint)]]
    store = store_of(tmp_path, *nights)
    assert life(store).state == "back"
    store.begin(replace(store.run("r3"), versions=store.run("r1").versions))
    assert (life(store).state, life(store).last.run) == ("fixed", "r1")


def test_a_case_that_shows_another_cause_now_is_neither_fixed_nor_seen(tmp_path: Path) -> None:
    store = store_of(tmp_path, [drawn(), FINDING], [again("diverged", "fedcba9876")])
    assert (life(store).state, life(store).last.run) == ("new", "r1")


def test_a_case_that_a_list_explains_now_is_known(tmp_path: Path) -> None:
    store = store_of(tmp_path, [drawn(), FINDING], [replace(again("known"), known="some-bug")])
    assert life(store).state == "known"


def test_nondeterminism_that_does_not_show_is_not_fixed(tmp_path: Path) -> None:
    odd = replace(FINDING, kind="nondeterminism")
    assert life(store_of(tmp_path, [drawn(), odd], [again("agreed")]), odd).state == "new"


def test_a_drawn_case_that_agrees_fixes_nothing(tmp_path: Path) -> None:
    store = store_of(tmp_path, [drawn(), FINDING], [ran(case=FINDING.case)])
    assert life(store).state == "new"


def test_a_crash_has_no_record_of_its_case(tmp_path: Path) -> None:
    crash = replace(FINDING, kind="crash", fingerprint="")
    store = store_of(tmp_path, [crash], [again("agreed")])
    one = life(store, crash)
    assert one.state == "fixed"
    pytest.importorskip("pyarrow")
    compact(store, "r1")
    assert life(store, crash) == one


def test_another_backend_s_run_says_nothing(tmp_path: Path) -> None:
    store = store_of(tmp_path, [drawn(), FINDING], [replace(again("agreed"), backend="fake-cuda")])
    assert life(store).state == "new"


def test_two_backends_that_diverge_on_one_case_have_lives_of_their_own(tmp_path: Path) -> None:
    other = replace(FINDING, backend="fake-cuda")
    seen = replace(drawn(), backend="fake-cuda")
    store = store_of(tmp_path, [drawn(), FINDING], [seen, other])
    told = lives(store, [FINDING, other])
    assert [told[f.backend, f.id].first.run for f in (FINDING, other)] == ["r1", "r2"]
    assert read(store, "r2").view.new[0].life == ""


def test_runs_are_searched_in_blocks_of_whole_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_of(tmp_path, [drawn(), ran(), FINDING, drawn()], [again("agreed"), ran()])
    whole = life(store)
    assert whole.state == "fixed"
    for size in (1, 100, 1000):
        monkeypatch.setattr("amp_fuzz.records.lives._BLOCK", size)
        assert life(store) == whole


def test_runs_whose_tables_cannot_be_read_are_named(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    store = store_of(tmp_path, [drawn(), FINDING], [drawn(), FINDING])
    compact(store, "r1")
    for path in store.run_path("r1").glob("tables-1/cases/*.parquet"):
        path.write_bytes(b"PAR1")
    unread: list[str] = []
    assert lives(store, [FINDING], unread=unread)[FINDING.backend, FINDING.id].first.run == "r2"
    assert ["cannot be read" in line for line in unread] == [True]
    (note,) = read(store, "r2").view.notes
    assert note.startswith("earlier runs that cannot be read: 1: ")


def test_a_store_that_never_met_it_says_nothing(tmp_path: Path) -> None:
    assert lives(store_of(tmp_path, [ran()]), [FINDING]) == {}


def test_compacted_runs_say_the_same(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    store = store_of(tmp_path, [drawn(), FINDING], [again("agreed")], [drawn()])
    before = life(store)
    compact(store, "r1")
    compact(store, "r2")
    assert life(store) == before


def test_damage_and_foreign_runs_are_passed_over(tmp_path: Path) -> None:
    store = store_of(tmp_path, [drawn(), FINDING], [drawn()])
    with (store.run_path("r2") / "records-0.jsonl").open("ab") as file:
        file.write(b'{"type":"case","family":"findings"\n{"type":"div')
    (tmp_path / "runs" / "r3").mkdir()
    (tmp_path / "runs" / "r3" / "run.json").write_text("{")
    assert life(store).last.run == "r2"


def test_a_report_tells_the_life_up_to_its_run(tmp_path: Path) -> None:
    runs = [[drawn(), FINDING], [again("agreed")], [drawn(), FINDING], [again("agreed")]]
    store = store_of(tmp_path, *runs)
    assert read(store, "r1").view.new[0].life == ""
    report = read(store, "r3")
    assert report.view.new[0].life.endswith("back 2026-01-03 on torch 2.13.0")
    assert "seen      first seen 2026-01-01 on torch 2.11.0" in report.terminal(width=120)
