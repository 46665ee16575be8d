"""The smallest case of each covered feature is kept: whole, bounded, and never a larger one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from amp_fuzz.backends import choose
from amp_fuzz.backends.harness import quiet
from amp_fuzz.cases.case import Case, load
from amp_fuzz.oracle.verdict import Verdict
from amp_fuzz.records.schema import CaseRecord
from amp_fuzz.records.store import Store, StoreError
from amp_fuzz.runs.corpus import folder_cases
from amp_fuzz.runs.coverage import Covered, features
from amp_fuzz.upstream.explain import judge_of
from tests.helpers import BF16, call, case, eager, x

SMALL = case([x("x0", 2, 2)], call("mm", "x0", "x0"), contexts=(BF16,), backward="none")
LARGE = case(
    [x("x0", 2, 2), x("x1", 2, 2)],
    call("mm", "x0", "x1"),
    call("relu", "v0", to="v1"),
    contexts=(BF16, BF16),
    calls=2,
)


def verdict_of(case: Case) -> Verdict:
    with quiet():
        verdict = judge_of(eager(), relations="none").judge(case)
    assert verdict.outcome == "agreed"
    return verdict


def kept(store: Store) -> dict[str, str]:
    """Return the id of each feature's case."""
    folder = store.root / "covered" / "eager-cpu"
    return {path.stem: load(path).id for path in folder.glob("*.json")}


def test_features_are_kernels_ops_and_what_is_not_plain_of_a_plan() -> None:
    assert sorted(features(verdict_of(LARGE))) == [
        *("kernel-mm", "op-mm", "op-relu"),
        *("plan-backward=outside", "plan-calls", "plan-nested"),
    ]
    odd = case([x("x0", 2, 2)], call("linalg.matrix_norm.nuc", "x0", ord="nuc"), contexts=(BF16,))
    names = set(features(verdict_of(odd)))
    assert "op-linalg.matrix_norm.nuc" in names


def test_the_smallest_is_kept_of_each(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for one in (LARGE, SMALL):
        covered = Covered(store, "eager-cpu")
        covered.note(verdict_of(one))
        covered.write()
    assert kept(store) == {
        **dict.fromkeys(("kernel-mm", "op-mm", "plan-autocast"), SMALL.id),
        **dict.fromkeys(
            ("op-relu", "plan-backward=outside", "plan-calls", "plan-nested"), LARGE.id
        ),
    }
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.json")}
    covered = Covered(store, "eager-cpu")
    covered.note(verdict_of(LARGE))
    covered.write()
    assert before == {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.json")}


def test_another_process_that_found_a_smaller_one_is_not_overwritten(tmp_path: Path) -> None:
    store = Store(tmp_path)
    slow, fast = Covered(store, "eager-cpu"), Covered(store, "eager-cpu")
    slow.note(verdict_of(LARGE))
    fast.note(verdict_of(SMALL))
    fast.write()
    slow.write()
    assert kept(store)["kernel-mm"] == SMALL.id


@pytest.mark.parametrize("left", [b"", b'{"program":'])
def test_an_interrupted_write_leaves_no_case(tmp_path: Path, left: bytes) -> None:
    store = Store(tmp_path)
    folder = tmp_path / "covered" / "eager-cpu"
    folder.mkdir(parents=True)
    # The rename comes last, so a process that is killed leaves a file of another name.
    (folder / "kernel-mm.json.123").write_bytes(left)
    if not left:
        (folder / "op-mm.json").write_bytes(left)  # as a full disk or a lost machine may
    covered = Covered(store, "eager-cpu")
    covered.note(verdict_of(SMALL))
    covered.write()
    assert {"kernel-mm", "op-mm", "plan-autocast"} == set(kept(store))


def test_a_full_disk_is_one_error_and_leaves_what_stood_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path)
    covered = Covered(store, "eager-cpu")
    covered.note(verdict_of(LARGE))
    covered.write()
    whole = kept(store)

    def full(path: Path, data: bytes) -> int:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(Path, "write_bytes", full)
    covered.note(verdict_of(SMALL))
    with pytest.raises(StoreError, match=r"cannot write \(No space left on device\)"):
        covered.write()
    assert kept(store) == whole
    assert not list(tmp_path.rglob("*.json.*"))


def test_the_folder_is_a_corpus(tmp_path: Path) -> None:
    store = Store(tmp_path)
    covered = Covered(store, "eager-cpu")
    covered.note(verdict_of(LARGE))
    covered.write()
    found = list(folder_cases([tmp_path / "covered" / "eager-cpu"], choose(["eager-cpu"])))
    assert {one.case for one in found} == {LARGE}
    assert "kernel-mm.json" in {one.name for one in found}


@pytest.mark.thorough
def test_a_run_keeps_them(amp_fuzz: Callable[..., Any], tmp_path: Path) -> None:
    run = ("run", "--backends=eager-cpu,lying-cpu", "--ops=abs,relu", "--cases=20", "--seed=1")
    assert amp_fuzz(*run, "--minimize=0").code == 1
    folder = tmp_path / ".amp-fuzz" / "covered"
    names = {path.name for path in (folder / "eager-cpu").iterdir()}
    assert {"op-abs.json", "op-relu.json"} <= names
    # What diverged is a finding, and covers nothing.
    store = Store(tmp_path / ".amp-fuzz")
    (run_id,) = store.runs()
    diverged = {
        r.id for r in store.records(run_id) if isinstance(r, CaseRecord) and r.outcome == "diverged"
    }
    assert diverged
    assert diverged.isdisjoint(load(path).id for path in folder.rglob("*.json"))
    done = amp_fuzz("replay", ".amp-fuzz/covered/eager-cpu/op-abs.json")
    assert done.code == 0
