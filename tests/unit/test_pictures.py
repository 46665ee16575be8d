"""The pictures of a report show what a count by hand gives, before and after a compaction."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from amp_fuzz.cases.case import Plan
from amp_fuzz.records.compaction import compact
from amp_fuzz.records.fingerprint import ingredient, plan_words
from amp_fuzz.records.lives import history
from amp_fuzz.records.schema import BackendRecord, CaseRecord, EndRecord, Record, RunRecord
from amp_fuzz.records.store import Store
from amp_fuzz.reports import frames, html, load, read, write
from amp_fuzz.reports.conformance import audited
from amp_fuzz.reports.pictures import Cell, Heat, Pictures, excess_text, far, pictures
from amp_fuzz.reports.trend import MOST, Numbers, keep, trend

from .test_lives import FINDING, again, drawn
from .test_lives import store_of as days_of
from .test_reports import CAT, COS, MM, Page, case, found, kernel, ran, view_of

HEADS = (
    BackendRecord("script", "cpu", "torch", (CAT, COS, MM)),
    BackendRecord("eager-cpu", "cpu", "torch", (CAT, MM)),
)


def one(
    number: int,
    backend: str = "script",
    *,
    ops: tuple[str, ...] = (MM,),
    excess: float = -1.0,
    by: str = "",
    plan: str = "autocast",
    **more: object,
) -> CaseRecord:
    kernels = tuple(kernel(op, "fp32", "float32") for op in ops)
    record = replace(ran(backend=backend, kernels=kernels), id=f"{number:016x}", ops=ops)
    return replace(record, excess=excess, excess_op=by, plan=plan, **more)


def bad(number: int, op: str, known: str = "", **more: object) -> CaseRecord:
    outcome = "known" if known else "diverged"
    return one(number, **{"ops": (op,), "outcome": outcome, "kind": "dtype", "op": op,
                          "known": known, "at": 0} | more)  # fmt: skip


# script: mm in 4 cases, cat in 3, cosh in 1; eager-cpu: mm in 2.
RUN: list[Record] = [
    one(1, excess=0.0, by=MM),
    one(2, excess=0.25, by=MM, plan="autocast+steps"),
    one(3, ops=(MM, CAT, CAT), excess=4.0, by=CAT, plan="nested+steps+settings=a = 1, b = 2"),
    one(4, ops=(COS,), excess=0.3, by=COS, outcome="raised"),
    bad(5, CAT, known="k", excess=4.5, by=CAT),
    bad(6, CAT, excess=1e9, by=CAT),
    bad(7, MM, known="k", ops=(MM, COS)),  # cosh came after it and was not compared
    one(8, "eager-cpu", plan=""),
    bad(9, MM, backend="eager-cpu", kernels=(kernel(MM, "fp32", "float32,bfloat16"),)),
    EndRecord("", "", 9, 1.0),
]


def store_of(path: Path, records: list[Record], threshold: float = 4.0) -> Store:
    store = Store(path / ".amp-fuzz")
    head = RunRecord("r1", 7, "dev", HEADS, {"torch": "2.13.0"}, "2026-01-02", threshold=threshold)
    store.begin(head)
    writer = store.writer("r1", "0")
    for record in records:
        writer.write(record)
    writer.close()
    return store


@pytest.fixture(params=["lines", "tables"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    store = store_of(tmp_path, RUN)
    if request.param == "tables":
        pytest.importorskip("pyarrow")
        assert compact(store, "r1").changed
    return store


@pytest.fixture
def shown(store: Store) -> Pictures:
    return pictures(frames.load(store, "r1"))


def texts(heat: Heat) -> dict[str, list[str]]:
    return {op: [cell.text for cell in cells] for op, cells in heat.rows}


@pytest.mark.thorough
def test_tables_of_an_earlier_amp_fuzz_lack_five_columns(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    store = store_of(tmp_path, RUN)
    compact(store, "r1")
    tables = store.tables("r1")
    assert tables is not None
    for path in tables.files["cases"]:
        table = parquet.read_table(path)
        added = ["plan", "excess", "excess_op", "hits", "promises"]
        parquet.write_table(table.drop_columns(added), path)
    shown = pictures(frames.load(store, "r1"))
    assert (shown.spreads, shown.excess.rows) == ((), ())
    assert texts(shown.divergences) == {CAT: ["2/3", ""], MM: ["1/4", "1/2"]}
    assert shown.tested.plans == ()  # not a row of empty cells
    assert {len(counts) for *_, counts in shown.tested.rows} == {len(shown.tested.dtypes)}
    pages = html.pages(read(store, "r1").view)
    for name in ("report.html", "tested.html"):
        assert "an earlier amp-fuzz, which did not record plans" in pages[name]
    first = next(r for r in store.records("r1") if isinstance(r, CaseRecord))
    assert first == replace(RUN[0], plan="", excess=-1.0, excess_op="")
    assert set(load(store.root)["excess"]) == {-1.0}


# -- heat maps ------------------------------------------------------------------------------------


def test_divergences_are_counted_by_op_and_backend(shown: Pictures) -> None:
    heat = shown.divergences
    assert heat.columns == ("script", "eager-cpu")
    # mm: cases 1, 2, 3 and 7 of script; 8 and 9 of eager-cpu. cat: 3, 5 and 6.
    assert texts(heat) == {CAT: ["2/3", ""], MM: ["1/4", "1/2"]}
    (cat, (both, none)), (mm, (old, new)) = heat.rows
    assert (cat, mm) == (CAT, MM)
    assert both.said == "2 of 3 diverged here: 1 known, 1 new"
    assert none.said == "not called"
    assert [cell.over for cell in (both, none, old, new)] == [True, False, False, True]
    assert [cell.level for cell in (both, none, old, new)] == [6, 0, 4, 5]


def test_a_divergence_at_no_single_op_is_of_all_cases_of_its_backend(tmp_path: Path) -> None:
    store = store_of(tmp_path, [one(1), one(2), bad(3, "", ops=(MM,)), EndRecord("", "", 3, 1.0)])
    assert texts(pictures(frames.load(store, "r1")).divergences) == {"": ["1/3", ""]}


@pytest.mark.parametrize("compacted", [False, True])
def test_a_case_that_died_is_one_of_those_that_call_its_op(tmp_path: Path, compacted: bool) -> None:
    died = replace(found(case(MM, seed=3)), backend="script", kind="crash", op=MM, known="")
    store = store_of(tmp_path, [one(1), died, EndRecord("", "", 2, 1.0)])
    if compacted:
        pytest.importorskip("pyarrow")
        compact(store, "r1")
    assert texts(pictures(frames.load(store, "r1")).divergences) == {MM: ["1/2", ""]}


def test_a_case_that_died_at_no_known_op_counts_once_among_all(tmp_path: Path) -> None:
    died = replace(found(case(MM, seed=3)), backend="script", kind="crash", op="", known="")
    store = store_of(tmp_path, [one(1), died, EndRecord("", "", 2, 1.0)])
    assert texts(pictures(frames.load(store, "r1")).divergences) == {"": ["1/2", ""]}


@pytest.mark.parametrize("compacted", [False, True])
def test_a_case_that_died_has_its_plan_in_the_frame(tmp_path: Path, compacted: bool) -> None:
    record = replace(found(case(MM, seed=3)), backend="script", kind="crash", known="")
    store = store_of(tmp_path, [record, EndRecord("", "", 1, 1.0)])
    if compacted:
        pytest.importorskip("pyarrow")
        compact(store, "r1")
    assert [*load(store.root)["plan"]] == [ingredient(record.case)]
    assert ingredient(record.case)


def test_of_two_ops_together_no_share_is_known(tmp_path: Path) -> None:
    both = f"{MM}+{CAT}"
    records = [one(1, ops=(MM, CAT)), bad(2, both, ops=(MM, CAT), at=-1), one(3, "eager-cpu")]
    heat = pictures(frames.load(store_of(tmp_path, records), "r1")).divergences
    numbers = {"own": 0, "known": 0, "new": 1, "called": None}
    assert heat.rows == ((both, (Cell("1", 1, "1 diverged here: 0 known, 1 new", True, numbers),
                                 Cell("", 0, "not called"))),)  # fmt: skip


def test_an_op_that_is_called_and_never_diverged_shows_a_zero(tmp_path: Path) -> None:
    records = [bad(1, CAT), one(2, "eager-cpu", ops=(CAT,)), EndRecord("", "", 2, 1.0)]
    heat = pictures(frames.load(store_of(tmp_path, records), "r1")).divergences
    assert texts(heat) == {CAT: ["1/1", "0"]}
    assert heat.rows[0][1][1].said == "none of 1 diverged here"


def test_the_largest_excess_is_of_the_op_that_computed_the_value(shown: Pictures) -> None:
    heat = shown.excess
    assert heat.columns == ("script",)  # eager-cpu is compared bit for bit
    assert texts(heat) == {CAT: ["beyond"], COS: ["0.3"], MM: ["0.25"]}
    assert [(c.level, c.over) for _, (c,) in heat.rows] == [(6, True), (1, False), (1, False)]


@pytest.mark.parametrize(
    ("excess", "level", "over"), [(0.5, 1, 0), (0.51, 2, 0), (2.0, 3, 0), (4.0, 5, 0), (4.01, 6, 1)]
)
def test_an_excess_darkens_towards_the_threshold_and_is_red_over_it(
    tmp_path: Path, excess: float, level: int, over: bool
) -> None:
    records = [one(1, excess=excess, by=MM), EndRecord("", "", 1, 1.0)]
    ((_, (cell,)),) = pictures(frames.load(store_of(tmp_path, records), "r1")).excess.rows
    assert (cell.level, cell.over) == (level, over)


def test_an_excess_that_was_not_measured_leaves_its_cell_empty() -> None:
    assert far(-1.0, 4.0) == Cell("", 0, "not measured")


# -- the distribution -----------------------------------------------------------------------------


def test_the_distribution_counts_each_case_once_and_the_threshold_is_an_edge(
    shown: Pictures,
) -> None:
    assert shown.edges == (0.0625, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
    (script,) = shown.spreads
    # 0, 0.25, 0.3, 4.0, 4.5, 1e9: what equals the threshold is not over it.
    assert script.counts == (1, 0, 1, 1, 0, 0, 1, 1, 0, 0, 1)
    assert (script.measured, script.over) == (6, 2)
    assert (script.median, script.most_of_all, script.largest) == (4.0, 1e9, 1e9)


@pytest.mark.thorough
def test_a_run_that_recorded_no_threshold_has_no_bins(tmp_path: Path) -> None:
    shown = view_of(store_of(tmp_path, RUN, threshold=0.0))
    page = Page(html.pages(shown)["report.html"]).text
    assert "99 %" in page
    assert "threshold" not in page.partition("Excess:")[2].partition("The largest")[0]


def test_a_run_without_an_excess_says_why_there_is_no_picture(tmp_path: Path) -> None:
    shown = view_of(store_of(tmp_path, [one(1, "eager-cpu"), EndRecord("", "", 1, 1.0)]))
    assert shown.pictures.spreads == ()
    page = Page(html.pages(shown)["report.html"]).text
    for said in ("No picture: no case", "No table: nothing diverged", "No curve: this is the first",
                 "No matrix: no audit"):  # fmt: skip
        assert said in page


@pytest.mark.parametrize(
    ("excess", "text"), [(0.0, "0"), (0.0625, "0.062"), (4, "4"), (99.6, "100"), (123.4, "123"),
                         (1e9, "beyond")]
)  # fmt: skip
def test_an_excess_as_text(excess: float, text: str) -> None:
    assert excess_text(excess) == text


# -- what was tested ------------------------------------------------------------------------------


def test_what_was_tested_counts_what_was_compared(shown: Pictures) -> None:
    tested = shown.tested
    names = (*tested.dtypes, *tested.plans)
    found = {
        (op, policy): {n: c for n, c in zip(names, counts, strict=True) if c}
        for op, policy, counts in tested.rows
    }
    assert found == {
        # Case 3 calls cat twice with one kernel each, cases 5 and 6 once.
        (CAT, "fp32"): {"float32": 4, "autocast": 2, "nested": 2, "steps": 2, "settings": 2},
        (COS, "fp32"): {"float32": 1, "autocast": 1},
        (MM, "fp32"): {"float32": 5, "several": 1, "autocast": 4, "nested": 1, "steps": 2,
                       "settings": 1},
    }  # fmt: skip
    assert tested.size == 3 * len(names)
    assert tested.empty == tested.size - 5 - 2 - 6


@pytest.mark.parametrize("compacted", [False, True])
def test_what_is_no_kernel_of_its_case_was_not_tested(tmp_path: Path, compacted: bool) -> None:
    lost = replace(
        found(case(MM, seed=3)), backend="script", kind="crash", op="hardtanh", policy=""
    )
    other = bad(2, "hardtanh", known="k", ops=(MM, "hardtanh"), at=-1)  # its kernel: elsewhere
    store = store_of(tmp_path, [other, lost, EndRecord("", "", 2, 1.0)])
    if compacted:
        pytest.importorskip("pyarrow")
        compact(store, "r1")
    data = frames.load(store, "r1")
    assert {op for op, *_ in data.plans} == set()
    assert {row[:2] for row in pictures(data).tested.rows} == {(CAT, ""), (COS, ""), (MM, "")}


def test_a_kernel_that_was_not_compared_has_an_empty_row(tmp_path: Path) -> None:
    store = store_of(tmp_path, [one(1), EndRecord("", "", 1, 1.0)])
    tested = pictures(frames.load(store, "r1")).tested
    assert [(op, policy, sum(counts)) for op, policy, counts in tested.rows] == [
        (CAT, "", 0), (COS, "", 0), (MM, "fp32", 2),
    ]  # fmt: skip
    at = tested.dtypes.index("float32")
    assert [(p, n, counts[at]) for p, n, counts in tested.policies] == [("fp32", 1, 1), ("", 2, 0)]


@pytest.mark.parametrize(
    "plan",
    [
        Plan(),
        Plan(entry="custom_op", backward="inside", second="double", steps=2, loop="inside"),
        Plan(first_pass="no_grad", calls=2, checkpoint="reentrant", thread="whole"),
        Plan(transform="vmap", precision="high", deterministic=True, interrupted=True, scaler=True),
    ],
)
def test_each_ingredient_of_a_plan_has_a_column(plan: Plan) -> None:
    words = ingredient(replace(case(MM), plan=plan)).split("+")
    assert words
    assert set(words) <= set(plan_words())


# -- trend ----------------------------------------------------------------------------------------


def test_the_history_says_what_each_run_changed(tmp_path: Path) -> None:
    other = replace(found(case(MM, seed=2)), fingerprint="ffffffffff")
    runs = [[drawn(), FINDING], [ran()], [again("agreed"), other], [drawn()], [drawn()]]
    steps, told = history(days_of(tmp_path, *runs), [FINDING, other])
    assert [(s.seen.run, *s[1:]) for s in steps] == [
        ("r1", 1, 0, 0, 1), ("r2", 0, 0, 0, 1), ("r3", 1, 1, 0, 1), ("r4", 0, 0, 1, 2),
        ("r5", 0, 0, 0, 2),
    ]  # fmt: skip
    assert [life.state for life in told.values()] == ["back", "new"]
    assert history(days_of(tmp_path / "b", *runs), [FINDING, other], "r2")[0] == steps[:2]


def test_without_a_finding_no_record_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = days_of(tmp_path, [ran()], [ran()])
    monkeypatch.setattr(Store, "lines", None)
    steps, told = history(store, [])
    assert [(s.seen.run, *s[1:]) for s in steps] == [("r1", 0, 0, 0, 0), ("r2", 0, 0, 0, 0)]
    assert told == {}


def test_the_trend_has_the_runs_of_which_a_report_was_made(tmp_path: Path) -> None:
    store = days_of(tmp_path, [ran()], [ran()], [ran()])
    for run, rate in (("r1", 2.0), ("r2", 3.0)):
        keep(store, run, {"eager-cpu": Numbers(10, rate, 1, 2)})
    (store.run_path("r2") / "summary.json").write_text('{"backends":{},"format":99}')
    steps, _ = history(store, [])
    now = trend(store, steps, "r3", {"eager-cpu": Numbers(1, 0.5, 2, 2)})
    assert [(p.run, p.backends["eager-cpu"].rate) for p in now.points] == [("r1", 2.0), ("r3", 0.5)]
    assert (now.left_out, now.earlier) == (1, 0)


@pytest.mark.thorough
def test_a_report_keeps_the_numbers_of_a_run_that_has_ended(tmp_path: Path) -> None:
    ended, killed = store_of(tmp_path / "a", RUN), store_of(tmp_path / "b", RUN[:-1])
    for store in (ended, killed):
        write(store, "r1", tmp_path / "report")
    assert not (killed.run_path("r1") / "summary.json").exists()
    (ended.run_path("r1") / "run.json").replace(tmp_path / "run.json")  # only the numbers are read
    assert (
        (ended.run_path("r1") / "summary.json")
        .read_text()
        .startswith(
            '{"backends":{"script":{"cases":7,"rate":2.0,"reached":3,"reachable":3},"eager-cpu":{"cases":2,'
        )
    )


def test_only_the_last_runs_are_in_the_picture(tmp_path: Path) -> None:
    store = days_of(tmp_path, [ran()])
    head = store.run("r1")
    for i in range(MOST + 3):
        store.begin(replace(head, id=f"s{i:03}", started="2026-02-01"))
        keep(store, f"s{i:03}", {})
    steps, _ = history(store, [])
    found = trend(store, steps, f"s{MOST + 2:03}", {})
    assert (len(found.points), found.left_out, found.earlier) == (MOST, 1, 3)
    assert [p.run for p in found.points] == [f"s{i:03}" for i in range(3, MOST + 3)]


def test_the_curves_run_through_the_numbers_of_the_runs(tmp_path: Path) -> None:
    store = days_of(tmp_path, [drawn(), FINDING], [again("agreed")], [ran()], [drawn()])
    store.save(FINDING)
    for run, rate in (("r1", 4.0), ("r2", 2.0), ("r3", 1.0)):
        keep(store, run, {"b": Numbers(1, rate, 1, 2)} if run != "r3" else {})
    shown = read(store, "r4").view
    findings, kernels, speed = html._charts(shown.trend)
    assert {line.name: line.pieces for line in findings.lines} == {
        "open": ("0.00,0.00 33.33,100.00 66.67,100.00 100.00,0.00",),
        "new": ("0.00,0.00 33.33,100.00 66.67,100.00 100.00,100.00",),
        "fixed": ("0.00,100.00 33.33,0.00 66.67,100.00 100.00,100.00",),
    }
    assert [(line.name, line.pieces, line.last) for line in kernels.lines] == [
        ("b", ("0.00,50.00 33.33,50.00",), "50 %")
    ]
    of = {line.name: line.pieces for line in speed.lines}
    assert of["b"] == ("0.00,0.00 33.33,50.00",)
    rows = re.findall(r"<tr><th scope=\"row\">(r\d)<.*?</tr>", html.pages(shown)["report.html"])
    assert rows == ["r4", "r3", "r2", "r1"]  # the table says the same, the newest first


@pytest.mark.thorough
def test_a_run_alone_is_a_dot_of_its_curve(tmp_path: Path) -> None:
    store = days_of(tmp_path, [ran()], [ran()], [ran()])
    for run, numbers in (("r1", {"b": Numbers(1, 4.0, 1, 2)}), ("r2", {})):
        keep(store, run, numbers)
    _, _, speed = html._charts(read(store, "r3").view.trend)
    # SVG draws nothing for a single point, but a dot for a line of no length with round ends.
    assert {line.name: line.pieces for line in speed.lines}["b"] == ("0.00,0.00 0.00,0.00",)


# -- conformance ----------------------------------------------------------------------------------

AUDIT = """backend,op,overload,call,shapes,autocast_dtype,inputs,status,observed
eager-cpu,mm,mm,mm(x0),2x2,bfloat16,float32,agree,bfloat16
eager-cpu,mm,mm,mm(x0),2x2,bfloat16,float16,agree,bfloat16
eager-cpu,mm,mm,mm(x0),2x2,float16,float32,raise,raises RuntimeError
fake-cuda,mm,mm,mm(x0),2x2,bfloat16,float32,known,float16
eager-cpu,cat,,cat(x0),2x2,bfloat16,float32,agree,float32
eager-cpu,cat,,cat(x0),2x2,bfloat16,float16,differs,float16
"""


@pytest.mark.thorough
def test_an_audit_beside_the_report_becomes_a_matrix(tmp_path: Path) -> None:
    folder = tmp_path / "report"
    folder.mkdir()
    assert audited(folder) is None
    (folder / "audit.csv").write_text(AUDIT)
    audit = audited(folder)
    assert audit is not None
    cpu, half, cuda = ("eager-cpu", "bfloat16"), ("eager-cpu", "float16"), ("fake-cuda", "bfloat16")
    assert audit.columns == (cpu, half, cuda)
    assert [dict(n) for n in audit.totals] == [
        {"agree": 3, "differs": 1},
        {"raise": 1},
        {"known": 1},
    ]
    assert [(op, [dict(n) for n in cells]) for op, cells in audit.rows] == [
        ("cat", [{"agree": 1, "differs": 1}, {}, {}]),
        ("mm", [{"agree": 2}, {"raise": 1}, {"known": 1}]),
    ]
    store = store_of(tmp_path, RUN)
    write(store, "r1", folder)
    assert "1 differs, 1 agree" in Page((folder / "conformance.html").read_text()).text
    (folder / "audit.csv").write_text("another program's\n")
    write(store, "r1", folder)
    assert not (folder / "conformance.html").exists()
    assert "No matrix" in (folder / "report.html").read_text()
