"""``amp-fuzz store``: what people read, and exit codes."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow")

from msgspec.structs import replace

from amp_fuzz.records.schema import CaseRecord
from amp_fuzz.records.store import Store
from tests.unit.test_keeping import NEW, OLD, store_of
from tests.unit.test_store import RECORDS

Command = Callable[..., Any]
SIZE = r"[\d.]+ k?B"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return store_of(tmp_path / ".amp-fuzz", OLD, NEW)


def test_all_runs_are_compacted_and_said(command: Command, store: Store) -> None:
    done = command("store", "compact")
    assert (done.code, done.err) == (0, "")
    assert re.fullmatch(
        rf"{OLD}: 1 case, 1 kernel, 3 findings: {SIZE} -> {SIZE}\n"
        rf"{NEW}: 1 case, 1 kernel, 3 findings: {SIZE} -> {SIZE}\n"
        rf"a run's report: amp-fuzz report {NEW}\n",
        done.out,
    )
    assert list(store.records(OLD)) == RECORDS
    done = command("store", "compact")
    assert done.out == f"nothing to compact\na run's report: amp-fuzz report {NEW}\n"


def test_some_runs_are_compacted(command: Command, store: Store) -> None:
    assert command("store", "compact", "latest~1").code == 0
    assert store.tables(OLD) is not None
    assert store.tables(NEW) is None


def test_damage_is_said(command: Command, store: Store) -> None:
    path = store.run_path(OLD) / "records-0.jsonl"
    path.write_bytes(b"{\n" + path.read_bytes() + b'{"type"')
    done = command("store", "compact", OLD)
    lines = done.out.splitlines()
    name = f".amp-fuzz/runs/{OLD}"
    assert lines[1] == f"  {name}/records-0.jsonl: dropped a last line that was cut short"
    assert lines[2].startswith(f"  damaged: {name}/records-0.jsonl:1: ")
    assert lines[3] == f"  kept as it was: 1 damaged line in {name}/damaged-1.jsonl"


def test_runs_that_cannot_be_compacted_are_left_alone(command: Command, store: Store) -> None:
    store.begin(replace(store.run(OLD), format=99))
    with store.running(store.run(NEW)):
        done = command("store", "compact")
        assert done.code == 0
        newer = "written by a newer amp-fuzz: upgrade amp-fuzz"
        assert done.out.splitlines() == [
            f"left alone: .amp-fuzz/runs/{OLD}/run.json: {newer}",
            f"left alone: .amp-fuzz/runs/{NEW}: running now: wait until it has ended",
            "nothing to compact",
            f"a run's report: amp-fuzz report {NEW}",
        ]
        done = command("store", "compact", NEW)
        assert (done.code, done.out) == (2, "")
        assert done.err.endswith("running now: wait until it has ended\n")


def test_without_pyarrow_commands_say_how_to_install_it(
    command: Command, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    command("store", "compact", OLD)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for words in (["store", "compact"], ["report", OLD], ["compare", OLD, NEW]):
        done = command(*words)
        assert done.code == 2
        assert done.err.count("\n") == 1
        assert done.err.endswith("pip install 'amp-fuzz[parquet]'\n")


@pytest.mark.thorough
@pytest.mark.parametrize("words", [["report"], ["compare", OLD, NEW], ["list"], ["list", "runs"]])
def test_commands_say_the_same_of_a_compacted_run(
    command: Command, store: Store, words: list[str]
) -> None:
    before = command(*words)
    assert store.run(OLD)
    command("store", "compact")
    assert command(*words) == before


def test_stores_are_merged(command: Command, store: Store, tmp_path: Path) -> None:
    store_of(tmp_path / "other", "20260102-000000-dddd", OLD)
    done = command("store", "merge", "other", ".amp-fuzz")
    assert done.out == (
        ".amp-fuzz: 1 run and 0 findings copied; 2 here already\nsee them: amp-fuzz list\n"
    )
    assert done.code == 0


def test_a_conflict_exits_with_2(command: Command, store: Store, tmp_path: Path) -> None:
    other = store_of(tmp_path / "other", OLD, NEW)
    for run in (OLD, NEW):
        other.begin(replace(other.run(run), seed=8))
    done = command("store", "merge", "other")
    assert (done.code, done.out) == (2, "")
    assert done.err == (
        f"amp-fuzz: run {OLD} of other is not the one of .amp-fuzz (and 1 more): nothing was "
        "merged: remove one of the two, or keep both stores\n"
    )


def test_runs_are_pruned(command: Command, store: Store) -> None:
    done = command("store", "prune", "--keep=1", "--dry-run")
    assert re.fullmatch(
        rf"would remove {OLD}: {SIZE}\n1 run would be removed, {SIZE}; 1 run left\n", done.out
    )
    assert store.runs() == [OLD, NEW]
    done = command("store", "prune", "--keep=1")
    assert re.fullmatch(rf"removed {OLD}: {SIZE}\n1 run removed, {SIZE}; 1 run left\n", done.out)
    assert store.runs() == [NEW]
    assert store.findings()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["prune"], "store prune: say which runs: --keep=N, --older-than=30d, or both"),
        (["prune", "--older-than=3"], "--older-than: '3' is not an age: write it like 12h, 30d"),
        (["prune", "--keep=-1"], "--keep"),
        (["merge"], "store merge: missing argument FROM..."),
        (["merge", "nowhere"], "nowhere: no such folder: give the folder of a store"),
        (["merge", "file"], "file: no such folder: give the folder of a store"),
        (["merge", "empty"], "empty: not a store: it has neither runs/ nor findings/"),
        (["compact", "zz"], "no run's id starts with 'zz'"),
        (["compact", "--store=file"], "file: not a folder: give another with --store"),
        (["compct"], "store: No such command 'compct'"),
    ],
)
def test_bad_input_is_an_error_of_one_line(
    command: Command, store: Store, tmp_path: Path, words: list[str], said: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    done = command("store", *words)
    assert (done.code, done.out) == (2, "")
    assert said in done.err
    assert done.err.count("\n") == 1


@pytest.mark.parametrize("words", [["compact"], ["prune", "--keep=0"]])
def test_a_store_without_runs_says_how_to_start_one(command: Command, words: list[str]) -> None:
    done = command("store", *words)
    assert (done.code, done.err) == (0, "")
    assert done.out == "no runs in .amp-fuzz yet; start one: amp-fuzz run\n"


def test_a_group_without_a_command_shows_its_help(command: Command) -> None:
    done = command("store")
    assert done.code == 2
    assert "\nCommands:\n  compact " in done.out + done.err


@pytest.mark.thorough
def test_a_compacted_run_is_resumed(amp_fuzz: Command, tmp_path: Path) -> None:
    words = ("--backends=eager-cpu", "--ops=abs", "--cases=6", "--workers=1", "--seed=1")
    assert amp_fuzz("run", *words).code == 0
    store = Store(tmp_path / ".amp-fuzz")
    (run,) = store.runs()

    def cases() -> list[str]:
        return [r.id for r in store.records(run) if isinstance(r, CaseRecord)]

    drawn = cases()
    head = store.run(run)
    assert head.machine["cores"]
    assert head.configuration["ops"] == "abs"
    assert head.flags["torch.backends.cuda.matmul.allow_tf32"] == "False"
    assert head.flags["torch.are_deterministic_algorithms_enabled()"] == "False"
    # As if it had been killed before its last case.
    lines = (store.run_path(run) / "records-0.jsonl").read_bytes().splitlines(keepends=True)
    of_cases = [line for line in lines if line.startswith(b'{"type":"case"')]
    (store.run_path(run) / "records-0.jsonl").write_bytes(b"".join(of_cases[:-1]))
    assert amp_fuzz("store", "compact").code == 0
    done = amp_fuzz("run", f"--resume={run}")
    assert (done.code, done.err) == (0, "")
    assert sorted(cases()) == sorted(drawn)
    assert re.search(r"^ *eager-cpu +6 ", done.out, re.MULTILINE)
    # Elsewhere, its folder names it.
    (tmp_path / "elsewhere").mkdir()
    done = amp_fuzz("run", f"--resume={store.run_path(run)}", cwd=tmp_path / "elsewhere")
    assert (done.code, done.err) == (0, "")
    assert not (tmp_path / "elsewhere" / ".amp-fuzz").exists()
    before = amp_fuzz("report").out
    assert amp_fuzz("store", "compact").code == 0
    assert not store.fresh(run)
    assert amp_fuzz("report").out == before
