"""The audit covers every combination, tells agreement from divergence, and survives a crash."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from amp_fuzz.audit import audit, audit_op, case_of, combinations, count, template
from amp_fuzz.backends import Backend, backends
from amp_fuzz.catalogue import CATALOGUE, check
from amp_fuzz.conformance import (
    Cell,
    describe,
    differences,
    frame,
    markdown,
    matrix,
    silent,
    summary,
    write,
)
from amp_fuzz.known import shipped
from amp_fuzz.program import FLOAT_DTYPES
from amp_fuzz.records import DivergenceRecord
from amp_fuzz.store import StoreError

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


def test_every_op_has_a_template_that_is_the_same_each_time() -> None:
    for name in CATALOGUE:
        program = template(name)
        check(program)
        assert not any(spec.requires_grad for spec in program.inputs), name
    first = template("addmm")
    template.cache_clear()
    assert template("addmm") == first


def test_cells_are_cases_that_can_be_made_again() -> None:
    for cell in audit_op(CPU, CATALOGUE["mm"]):
        case = case_of(CATALOGUE["mm"], cell.autocast_dtype, cell.input_dtypes)
        assert case.id == cell.case_id
        assert tuple(spec.dtype for spec in case.program.inputs) == cell.input_dtypes


# -- judging --------------------------------------------------------------------------------------


def test_cells_say_what_comes_out() -> None:
    cells = {(c.autocast_dtype, c.input_dtypes): c for c in audit_op(CPU, CATALOGUE["mm"])}
    assert len(cells) == 2 * 16
    cell = cells["bfloat16", ("float32", "float16")]
    assert (cell.expected, cell.observed, cell.status) == ("bfloat16", "bfloat16", "agree")
    assert (cell.overload, cell.policy) == ("mm", "lower_precision_fp")
    assert cells["float16", ("float32", "float16")].observed == "float16"
    assert cells["float16", ("float64", "float64")].observed == "float64"
    assert cells["float16", ("float64", "float32")].observed == "raises RuntimeError"
    assert {c.status for c in cells.values()} == {"agree"}


def test_known_bugs_are_known_cells() -> None:
    cells = audit_op(CPU, CATALOGUE["cat"], shipped())
    known = [c for c in cells if c.status == "known"]
    assert known
    assert {c.known for c in known} == {"promote-foreign-half"}
    assert all(c.finding is None and c.kind == "raise" for c in known)
    unlisted = [c for c in audit_op(CPU, CATALOGUE["cat"]) if c.status == "differs"]
    assert [c.case_id for c in unlisted] == [c.case_id for c in known]


@dataclass
class Faulty:
    """A backend whose results are float32 where they should be of 16 bits."""

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
        for one in seen:
            one.values = {n: t if t is None else t.float() for n, t in one.values.items()}
        return seen


def test_a_wrong_dtype_is_a_finding() -> None:
    faulty: Any = Faulty(CPU)
    cells = audit_op(faulty, CATALOGUE["mm"], shipped())
    counts = Counter((c.expected, c.status) for c in cells)
    assert counts == {
        ("bfloat16", "differs"): 9,
        ("float16", "differs"): 9,
        ("float64", "differs"): 2,
        ("raises RuntimeError", "agree"): 12,
    }
    finding = next(c.finding for c in cells if c.status == "differs")
    assert isinstance(finding, DivergenceRecord)
    assert (finding.kind, finding.op, finding.where) == ("dtype", "mm", "v0")
    assert "amp-fuzz repro " + finding.id in summary(cells)


# -- many processes -------------------------------------------------------------------------------


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
    case = case_of(CATALOGUE["mm"], "float16", ("bfloat16", "float32"))
    info = tmp_path / "deadly-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: deadly\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[amp_fuzz.backends]\ndeadly = deadly:backends\n")
    (tmp_path / "deadly.py").write_text(PLUGIN.format(case=case.id))
    monkeypatch.syspath_prepend(tmp_path)  # spawned workers get it too
    backends.cache_clear()
    yield case.id
    backends.cache_clear()


def test_a_cell_that_kills_its_worker_is_a_crash(deadly: str) -> None:
    ops = [CATALOGUE["mm"], CATALOGUE["bmm"]]
    parts = list(audit([backends()["deadly"]], ops))
    assert sorted(map(len, parts)) == [32, 32]
    crashed = [c for part in parts for c in part if c.status != "agree"]
    assert [(c.case_id, c.kind) for c in crashed] == [(deadly, "crash")]
    assert crashed[0].finding is not None
    assert crashed[0].finding.id == deadly


# -- tables ---------------------------------------------------------------------------------------


def cell(backend: str, op: str, policy: str, **changes: Any) -> Cell:
    made = Cell(
        device=backend.partition("-")[2],
        backend=backend,
        op=op,
        overload=op,
        policy=policy,
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
    cell("eager-cpu", "dot", "none", observed="raises RuntimeError"),
]


def test_summary_ends_in_what_to_type() -> None:
    assert (
        summary(CELLS)
        == """\
             cells    agree    raise    known   differ
eager-cpu        5        3        1        1        0
fake-cuda        2        1        0        0        1
7 cells of 3 ops: 4 agree, 1 raise on both sides, 1 known, 1 differ
known: a (1 cells)
differs: fake-cuda mv(bfloat16) under bfloat16: bfloat16 expected, float32 observed
         amp-fuzz repro fedcba9876543210
for the tables: amp-fuzz audit --report=FOLDER"""
    )
    assert summary(CELLS, Path("out")).splitlines()[-1] == "tables: out/audit.md, out/audit.csv"


def test_a_difference_of_values_alone_is_named_by_its_kind() -> None:
    differing = replace(CELLS[0], status="differs", kind="bitwise")
    assert describe(differing) == "eager-cpu mv(float32) under bfloat16: bitwise, float32"


def test_long_lists_are_cut_short() -> None:
    differing = [replace(CELLS[3], case_id=f"{i:016x}") for i in range(30)]
    assert "and 10 more, all in the tables" in summary(differing)


def test_matrix_counts_agreement() -> None:
    assert matrix(CELLS).to_dict("index") == {
        ("cat", "cat", "promote"): {"eager-cpu": "1/2, 1 known", "fake-cuda": ""},
        ("dot", "dot", "none"): {"eager-cpu": "1", "fake-cuda": ""},
        ("mv", "mv", "lower_precision_fp"): {"eager-cpu": "", "fake-cuda": "1/2"},
        ("mv", "mv", "none"): {"eager-cpu": "2", "fake-cuda": ""},
    }


def test_differences_are_what_comes_out_otherwise_on_another_device() -> None:
    assert differences(CELLS).to_dict("index") == {
        ("mv", "mv", "bfloat16", "bfloat16"): {"eager-cpu": "bfloat16", "fake-cuda": "float32"},
        ("mv", "mv", "bfloat16", "float32"): {"eager-cpu": "float32", "fake-cuda": "bfloat16"},
    }


def test_what_a_fake_device_cannot_do_is_no_difference() -> None:
    cells = [
        cell("eager-cpu", "cov", "none"),
        cell("fake-cuda", "cov", "none", observed="raises DataDependentOutputException"),
    ]
    assert differences(cells).empty
    assert silent(cells) == {"fake-cuda": ["cov"]}
    assert "- fake-cuda: cov" in markdown(cells)


def test_tables_are_written(tmp_path: Path) -> None:
    page, table = write(CELLS, tmp_path / "new")
    assert page.read_text() == markdown(CELLS)
    assert "| mv | mv | bfloat16 | float32 | float32 | bfloat16 |" in page.read_text()
    assert f"# Conformance of autocast, torch {torch.__version__}" in page.read_text()
    assert len(table.read_text().splitlines()) == 1 + len(CELLS)
    with pytest.raises(StoreError, match="cannot make the folder"):
        write(CELLS, page / "inside")
