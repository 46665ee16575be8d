"""The audit covers every combination, tells agreement from divergence, and survives a crash."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from amp_fuzz.backends import Backend, backends
from amp_fuzz.cases.case import uses_autocast
from amp_fuzz.cases.program import FLOAT_DTYPES
from amp_fuzz.catalogue import CATALOGUE, check
from amp_fuzz.records.schema import DivergenceRecord
from amp_fuzz.records.store import Store, StoreError, find_case
from amp_fuzz.reports.conformance import (
    Cell,
    compared,
    describe,
    differences,
    frame,
    markdown,
    matrix,
    missing,
    not_judged,
    summary,
    write,
)
from amp_fuzz.runs.audit import (
    audit,
    audit_op,
    calls,
    case_of,
    cases_of,
    combinations,
    count,
    judged,
    left_out,
    run_cells,
    samples,
    traits,
)
from amp_fuzz.upstream import shipped

CPU, CUDA = backends()["eager-cpu"], backends()["fake-cuda"]


@pytest.fixture(autouse=True)
def _guards() -> None:
    assert CUDA.availability().status == "ready"


# -- cases ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("floats", "number"), [(0, 1), (1, 4), (2, 16), (3, 64), (4, 52), (9, 112)]
)
def test_combinations_are_exhaustive_up_to_three_inputs(floats: int, number: int) -> None:
    found = combinations(floats)
    assert len(found) == len(set(found)) == number
    assert {mix for mix in found if len(set(mix)) == 1} == {
        (d,) * floats for d in FLOAT_DTYPES if floats
    }
    for i in range(floats):  # each input has each dtype beside others of each other one
        assert {(mix[i], mix[i - 1]) for mix in found} >= {
            (odd, most) for odd in FLOAT_DTYPES for most in FLOAT_DTYPES if floats > 1
        }


def test_samples_hold_one_dtype_and_mixes_with_float32() -> None:
    assert samples(0) == ((),)
    assert samples(1) == tuple((dtype,) for dtype in FLOAT_DTYPES)
    for floats in (2, 5):
        found = samples(floats)
        assert len(found) == len(set(found)) == 4 + 6
        assert set(found) <= set(combinations(floats)) | {(m[0], *m[1:]) for m in found}
        assert all("float32" in mix for mix in found if len(set(mix)) > 1)


@pytest.mark.thorough
def test_every_op_has_calls_that_are_the_same_each_time() -> None:
    for name in CATALOGUE:
        for program in calls(name):
            check(program)
            assert not any(spec.requires_grad for spec in program.inputs), name
    first = calls("addmm")
    calls.cache_clear()
    assert calls("addmm") == first


def test_each_further_call_has_a_trait_of_its_own() -> None:
    for name in ("sum.dim", "matmul", "svd", "add"):
        seen: set[object] = set()
        for program in calls(name):
            assert not traits(program) <= seen
            seen |= traits(program)


def test_an_op_is_called_with_a_dtype_and_without_in_each_form() -> None:
    """With a dtype= the policies that set one cannot show."""
    for name in ("sum", "sum.dim", "softmax", "cumsum"):
        said = [dict(p.body[0].kwargs) for p in calls(name)]  # type: ignore[union-attr]
        assert "dtype" not in said[0]
        assert sum("dtype" in kwargs for kwargs in said) > 1
        forms = {p.body[0].form for p in calls(name)}  # type: ignore[union-attr]
        assert forms == set(CATALOGUE[name].forms)


def test_cells_are_cases_that_can_be_made_again() -> None:
    programs = {p.body: p for p in calls("mm")}
    ids = [case.id for case in cases_of(CPU, CATALOGUE["mm"])]
    cells = audit_op(CPU, CATALOGUE["mm"])
    assert [cell.case_id for cell in cells] == ids
    for case, cell in zip(cases_of(CPU, CATALOGUE["mm"]), cells, strict=True):
        again = case_of(programs[case.program.body], cell.autocast_dtype, cell.input_dtypes)
        assert again.id == cell.case_id


def test_an_op_without_a_cell_has_a_reason() -> None:
    ops = [CATALOGUE["mm"], CATALOGUE["_mps_convolution"]]
    assert left_out(CPU, ops) == {"other devices have them, cpu does not": ["_mps_convolution"]}
    assert left_out(backends()["fake-mps"], ops) == {}
    lines = missing("eager-cpu", left_out(CPU, ops))
    assert lines == [
        "no cell on eager-cpu: 1 op (_mps_convolution): other devices have them, cpu does not"
    ]


# -- judging --------------------------------------------------------------------------------------


def test_cells_say_what_comes_out() -> None:
    found = audit_op(CPU, CATALOGUE["mm"])
    cells = {(c.autocast_dtype, c.input_dtypes): c for c in found[: 2 * 16]}
    assert len(cells) == 2 * 16
    assert {c.call for c in cells.values()} == {"torch.mm(x0, w1)"}
    cell = cells["bfloat16", ("float32", "float16")]
    assert (cell.expected, cell.observed, cell.status) == ("bfloat16", "bfloat16", "agree")
    assert (cell.overload, cell.policy) == ("mm", "lower_precision_fp")
    assert cells["float16", ("float32", "float16")].observed == "float16"
    assert cells["float16", ("float64", "float64")].observed == "float64"
    assert cells["float16", ("float64", "float32")].observed == "raises RuntimeError"
    assert cells["float16", ("float64", "float32")].status == "raise"
    assert {c.status for c in found} == {"agree", "raise"}
    assert {c.call for c in found} > {"x0.mm(w1)", "torch.mm(x0, x1, out=b2)"}


@pytest.mark.thorough
def test_known_bugs_are_known_cells() -> None:
    cells = audit_op(CPU, CATALOGUE["cat"], shipped())
    known = [c for c in cells if c.status == "known"]
    assert known
    assert {c.known for c in known} == {"promote-foreign-half"}
    assert all(c.finding is not None and c.kind == "raise" for c in known)
    unlisted = [c for c in audit_op(CPU, CATALOGUE["cat"]) if c.status == "differs"]
    assert [c.case_id for c in unlisted] == [c.case_id for c in known]


@dataclass
class Faulty:
    """A backend whose results under autocast are float32 where they should be of 16 bits."""

    inner: Backend
    name: str = "eager-cpu"
    device: str = "cpu"
    trains: bool = False
    values: bool = True
    exact: bool = True
    repeats: bool = True

    def supports(self, op: str, form: str) -> bool:
        return True

    def fit(self, case: Any) -> Any:
        return case

    def reference(self) -> Any:
        return self.inner.reference()

    def run(self, cases: Any) -> Any:
        seen = self.inner.run(cases)
        for case, one in zip(cases, seen, strict=True):
            if uses_autocast(case):
                one.values = {n: t if t is None else t.float() for n, t in one.values.items()}
        return seen


def test_a_wrong_dtype_is_a_finding() -> None:
    faulty: Any = Faulty(CPU)
    cells = judged(faulty, cases_of(CPU, CATALOGUE["mm"])[:32], shipped())
    counts = Counter((c.expected, c.status) for c in cells)
    assert counts == {
        ("bfloat16", "differs"): 9,
        ("float16", "differs"): 9,
        ("float64", "differs"): 2,
        ("raises RuntimeError", "raise"): 12,
    }
    finding = next(c.finding for c in cells if c.status == "differs")
    assert isinstance(finding, DivergenceRecord)
    assert (finding.kind, finding.op, finding.where) == ("dtype", "mm", "v0")
    assert f"amp-fuzz replay out/cells/eager-cpu-{finding.id}.json" in summary(cells, Path("out"))


# -- many processes -------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.usefixtures("forked_workers")
def test_workers_find_what_one_process_finds() -> None:
    ops = [CATALOGUE[name] for name in ("mm", "cat", "_addmm_activation")]
    parts = list(audit([CPU, CUDA], ops, known=shipped(), workers=2))
    assert len(parts) == count([CPU, CUDA], ops)
    cells = [cell for part in parts for cell in part]
    alone = [c for b in (CPU, CUDA) for op in ops for c in audit_op(b, op, shipped())]
    assert frame(cells).equals(frame(alone))


PLUGIN = """
import os
from amp_fuzz.backends.eager import EagerBackend


class Deadly(EagerBackend):
    name = "deadly"

    def run(self, cases):
        if any(case.id == {case!r} for case in cases):
            os._exit(1)
        return EagerBackend.run(self, cases)


def backends():
    return [Deadly("cpu")]
"""


@pytest.fixture
def deadly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Install a backend plugin that dies of one case; give the case's id."""
    case = case_of(calls("mm")[0], "float16", ("bfloat16", "float32"))
    info = tmp_path / "deadly-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: deadly\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[amp_fuzz.backends]\ndeadly = deadly:backends\n")
    (tmp_path / "deadly.py").write_text(PLUGIN.format(case=case.id))
    monkeypatch.syspath_prepend(tmp_path)  # spawned workers get it too
    backends.cache_clear()
    yield case.id
    backends.cache_clear()


@pytest.mark.thorough
def test_a_cell_that_kills_its_worker_is_a_crash(deadly: str) -> None:
    ops = [CATALOGUE["mm"], CATALOGUE["bmm"]]
    parts = list(audit([backends()["deadly"]], ops))
    assert sorted(map(len, parts)) == sorted(len(cases_of(CPU, op)) for op in ops)
    crashed = [c for part in parts for c in part if c.kind]
    assert [(c.case_id, c.kind) for c in crashed] == [(deadly, "crash")]
    assert crashed[0].finding is not None
    assert crashed[0].finding.id == deadly
    assert crashed[0].observed == "the process died with exit code 1"


def test_a_worker_is_given_the_name_of_a_backend_and_cases() -> None:
    cases = cases_of(CPU, CATALOGUE["cat"])[:8]
    assert run_cells("eager-cpu", cases, shipped()) == judged(CPU, cases, shipped())


# -- tables ---------------------------------------------------------------------------------------


def cell(backend: str, op: str, policy: str, **changes: Any) -> Cell:
    made = Cell(
        device=backend.partition("-")[2],
        backend=backend,
        op=op,
        overload=op,
        policy=policy,
        call=f"torch.{op}(x0)",
        shapes="x0[2]",
        autocast_dtype="bfloat16",
        input_dtypes=("float32",),
        expected="bfloat16",
        observed="bfloat16",
        status="agree",
        kind="",
        known="",
        case_id="0123456789abcdef",
    )
    return replace(made, **changes)


_RAISES = {"expected": "raises RuntimeError", "observed": "raises RuntimeError", "status": "raise"}
CELLS = [
    cell("eager-cpu", "mv", "none", expected="float32", observed="float32"),
    cell("eager-cpu", "mv", "none", input_dtypes=("bfloat16",)),
    cell("fake-cuda", "mv", "lower_precision_fp"),
    cell(
        "fake-cuda",
        "mv",
        "lower_precision_fp",
        input_dtypes=("bfloat16",),
        observed="float32",
        status="differs",
        kind="dtype",
        case_id="fedcba9876543210",
    ),
    cell("eager-cpu", "cat", "promote", observed="raises RuntimeError", status="known", known="a"),
    cell("eager-cpu", "cat", "promote", input_dtypes=("float32", "float16")),
    cell("eager-cpu", "dot", "none", **_RAISES),
    cell("eager-cpu", "bce", "banned", **_RAISES),
]
OUT = Path("out")


def test_summary_counts_each_cell_once_and_ends_in_what_to_type() -> None:
    notes = ["no cell on fake-cuda: 1 op (dot): fake-cuda cannot express them"]
    assert (
        summary(CELLS, OUT, notes)
        == """\
             cells    agree  both raise      own    known   differ
eager-cpu        6        3           2        0        1        0
fake-cuda        2        1           0        0        0        1
8 cells of 4 ops: 4 agree, 2 raise the same on both sides, 0 own, 1 known, 1 differ
not judged on eager-cpu: 1 op (dot): both sides raise in every cell
no cell on fake-cuda: 1 op (dot): fake-cuda cannot express them
known: a (1 cell)
       amp-fuzz replay out/cells/eager-cpu-0123456789abcdef.json
differs: fake-cuda mv(bfloat16) under bfloat16: bfloat16 expected, float32 observed (1 cell)
         amp-fuzz replay out/cells/fake-cuda-fedcba9876543210.json
tables: out/audit.md, out/audit.csv"""
    )


def test_what_differs_without_autocast_too_is_counted_apart() -> None:
    own = replace(CELLS[3], status="own", known="backend")
    text = summary([own], OUT)
    assert "1 own, 0 known, 0 differ" in text
    assert "without autocast too: fake-cuda mv(bfloat16)" in text


def test_a_difference_of_values_alone_is_named_by_its_kind() -> None:
    differing = replace(CELLS[0], status="differs", kind="bitwise")
    assert describe(differing) == "eager-cpu mv(float32) under bfloat16: bitwise, float32"


def test_the_cells_of_an_op_that_differs_are_one_line() -> None:
    differing = [replace(CELLS[3], case_id=f"{i:016x}") for i in range(30)]
    assert "bfloat16 expected, float32 observed (30 cells)" in summary(differing, OUT)


def test_long_lists_are_cut_short() -> None:
    differing = [replace(CELLS[3], op=f"op{i}", case_id=f"{i:016x}") for i in range(30)]
    assert "and 10 more, all in the tables" in summary(differing, OUT)
    silent = [replace(CELLS[6], op=f"op{i}") for i in range(8)]
    assert "not judged on eager-cpu: 8 ops (op0, op1, op2, op3, op4, op5 and 2 more)" in summary(
        silent, OUT
    )


def test_matrix_counts_cells_by_status() -> None:
    assert matrix(CELLS).to_dict("index") == {
        ("bce", "bce", "banned"): {"eager-cpu": "1 raise", "fake-cuda": ""},
        ("cat", "cat", "promote"): {"eager-cpu": "1 agree, 1 known", "fake-cuda": ""},
        ("dot", "dot", "none"): {"eager-cpu": "1 raise", "fake-cuda": ""},
        ("mv", "mv", "lower_precision_fp"): {"eager-cpu": "", "fake-cuda": "1 agree, 1 differs"},
        ("mv", "mv", "none"): {"eager-cpu": "2 agree", "fake-cuda": ""},
    }


def test_an_op_that_is_banned_is_judged_by_its_error() -> None:
    assert not_judged(CELLS) == {"eager-cpu": ["dot"]}


def test_differences_are_what_comes_out_otherwise_on_another_device() -> None:
    call = ("mv", "mv", "torch.mv(x0)", "x0[2]", "bfloat16")
    assert differences(CELLS).to_dict("index") == {
        (*call, "bfloat16"): {"eager-cpu": "bfloat16", "fake-cuda": "float32"},
        (*call, "float32"): {"eager-cpu": "float32", "fake-cuda": "bfloat16"},
    }


def test_devices_are_compared_on_inputs_of_several_dtypes_and_errors_come_first() -> None:
    mixed: dict[str, Any] = {"input_dtypes": ("float32", "bfloat16")}
    cells = [
        *CELLS[:4],
        cell("eager-cpu", "zip", "none", **mixed, **_RAISES),
        cell("fake-cuda", "zip", "promote", **mixed),
    ]
    table = compared(cells).reset_index().to_numpy().tolist()
    assert table == [
        ["zip", "torch.zip(x0)", "float32, bfloat16", 1, "raises RuntimeError", "bfloat16"],
        ["mv", "torch.mv(x0)", "bfloat16", 1, "bfloat16", "float32"],
        ["mv", "torch.mv(x0)", "float32", 1, "float32", "bfloat16"],
    ]


def test_errors_of_fake_devices_are_no_difference() -> None:
    broken = "raises DataDependentOutputException"
    cells = [
        cell("eager-cpu", "cov", "none"),
        cell("fake-cuda", "cov", "none", expected=broken, observed=broken, status="raise"),
    ]
    assert differences(cells).empty
    assert not_judged(cells) == {"fake-cuda": ["cov"]}
    assert "- fake-cuda: cov" in markdown(cells, OUT)


def test_one_device_is_compared_with_none() -> None:
    assert "Only eager-cpu was audited: name more with `--backends`." in markdown(CELLS[:1], OUT)


def test_tables_are_written(tmp_path: Path) -> None:
    page, table = write(CELLS, tmp_path / "new", ["not finished on eager-cpu: 3 of 9 ops"])
    text = page.read_text()
    assert text == markdown(CELLS, tmp_path / "new", ["not finished on eager-cpu: 3 of 9 ops"])
    assert "not finished on eager-cpu: 3 of 9 ops" in text
    assert "| mv | torch.mv(x0) | float32 | 1 | float32 | bfloat16 |" in text
    assert f"# Conformance of autocast, torch {version('torch')}" in text
    assert len(table.read_text().splitlines()) == 1 + len(CELLS)
    with pytest.raises(StoreError, match="cannot make the folder"):
        write(CELLS, page / "inside")


@pytest.mark.thorough
def test_each_cell_that_does_not_agree_has_a_file_and_a_command(tmp_path: Path) -> None:
    cells = audit_op(CPU, CATALOGUE["cat"], shipped())
    _, table = write(cells, tmp_path)
    odd = [c for c in cells if c.status not in ("agree", "raise")]
    assert odd
    rows = list(csv.DictReader(table.read_text().splitlines()))
    commands = {row["case_id"]: row["replay"] for row in rows if row["replay"]}
    assert set(commands) == {c.case_id for c in odd}
    for identity, command in commands.items():
        *_, path = command.split()
        assert command.startswith("amp-fuzz replay ")
        case, finding = find_case(Store(tmp_path), path)
        assert case.id == identity
        assert finding is not None
        assert finding.backend == "eager-cpu"
