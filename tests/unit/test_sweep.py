"""The parts of a sweep that need no Ray: its plan, its log, and a shard in another process."""

from __future__ import annotations

import _thread
import json
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import msgspec
import psutil
import pytest

from amp_fuzz.config import ConfigError, cache_folder, is_url
from amp_fuzz.interfaces.cli.common import Exit, Internal, Stopped
from amp_fuzz.interfaces.cli.run import _sharded
from amp_fuzz.interfaces.cli.sweep import _conclude, _Tally
from amp_fuzz.records.parts import Index
from amp_fuzz.records.remote import RemoteStore
from amp_fuzz.records.schema import CaseRecord, EndRecord, RunRecord
from amp_fuzz.records.store import Store, StoreError
from amp_fuzz.runs.engine import Settings
from amp_fuzz.runs.setup import Session
from amp_fuzz.runs.sweep import node, places
from amp_fuzz.runs.sweep.following import Follower
from amp_fuzz.runs.sweep.log import Over, ShardEnd, running, unfinished
from amp_fuzz.runs.sweep.matrix import Shard, load
from amp_fuzz.runs.sweep.node import Died, Job, attempt, probe
from tests import deadly
from tests.deadly import fault_of, judged
from tests.objects import Bucket
from tests.unit.test_store import FINDING

pytestmark = pytest.mark.thorough

GUIDE = Path(__file__).parents[2] / "docs" / "guide"


def plan(folder: Path, text: str, seed: int = 7) -> tuple[Shard, ...]:
    path = folder / "sweep.toml"
    path.write_text(text)
    return load(path, "python", seed).shards


# -- the plan -------------------------------------------------------------------------------------


def test_a_matrix_has_a_shard_for_each_combination(tmp_path: Path) -> None:
    shards = plan(
        tmp_path,
        """
        seeds = [3, 4]
        environments = { old = "/opt/old/bin/python", new = "/opt/new" }
        options = { cases = 10, ops = ["mm", "abs"] }
        [[matrix]]
        backends = ["eager-cpu", "fake-*"]
        [[matrix]]
        backends = ["eager-cuda"]
        environments = ["here"]
        seeds = 1
        needs = { num_cpus = 2, num_gpus = 0.5 }
        vary = { relations = ["one", "all"] }
        """,
    )
    assert [(s.environment, s.backend, s.seed) for s in shards] == [
        *((e, b, seed) for seed in (3, 4) for e in ("old", "new") for b in ("eager-cpu", "fake-*")),
        *(("here", "eager-cuda", 7) for _ in range(2)),
    ]
    assert [s.number for s in shards] == list(range(10))
    assert shards[0].words == (
        *("--backends=eager-cpu", "--seed=3", "--cases=10", "--ops=mm,abs", "--workers=1"),
    )
    assert shards[0].needs == {"num_cpus": 1}
    assert shards[2].python == "/opt/new"
    assert [s.named for s in shards[:2]] == [True, False]
    assert [s.varied for s in shards[8:]] == [("--relations=one",), ("--relations=all",)]
    assert shards[8].needs == {"num_cpus": 2, "num_gpus": 0.5}
    assert "--workers=2" in shards[8].words
    assert [s.number for s in shards if s.first] == [0, 1, 2, 3, 8]  # findings are judged once


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "missing required field `matrix`"),
        ("matrix = []", "length >= 1"),
        ("[[matrix]]\nbackends = []", "length >= 1"),
        ("[[matrix]]\nbackend = ['a']", "`$.matrix[0]`"),
        ("[[matrix]]\nbackends = ['a']\nneeds = { TPU = -1 }", ">= 0"),
        ("seeds = 0\n[[matrix]]\nbackends = ['a']", "`$.seeds`"),
        (
            "[[matrix]]\nbackends = ['a']\nenvironments = ['hree']",
            "'hree' is not in [environments]: did you mean 'here'?",
        ),
        (
            "options = { case = 3 }\n[[matrix]]\nbackends = ['a']",
            "options: unknown option 'case': did you mean 'cases'?",
        ),
        (
            "options = { store = 'x' }\n[[matrix]]\nbackends = ['a']",
            "'store' is the sweep's own: leave it out here",
        ),
        (
            "[[matrix]]\nbackends = ['a']\nvary = { cases = [3, 'four'] }",
            "matrix[0].vary: cases: 'four' is a string: write a whole number, as in 200",
        ),
        ("environments = { old = '' }\n[[matrix]]\nbackends = ['a']", "old is empty: write the"),
        ("seeds = []\n[[matrix]]\nbackends = ['a']", "`$.seeds`"),
        ("[[matrix]]\nbackends = ['a']\nseeds = []", "`$.matrix[0].seeds`"),
        ("[[matrix]]\nbackends = ['a']\nenvironments = []", "`$.matrix[0].environments`"),
        ("[[matrix]]\nbackends = ['a']\nvary = { cases = [] }", "`$.matrix[0].vary[...]`"),
        (
            "environments = { here = 'python3.12' }\n[[matrix]]\nbackends = ['a']",
            "environments.here is the Python of the command: rename yours",
        ),
        (
            "[[matrix]]\nbackends = ['a']\nneeds = { CPU = 4 }",
            "matrix[0].needs: 'CPU' cannot be asked for: write num_cpus",
        ),
        (
            "[[matrix]]\nbackends = ['a']\nneeds = { memory = 4 }",
            "matrix[0].needs: 'memory' cannot be asked for: use a custom resource",
        ),
        ("[[matrix", "not TOML"),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)) as error:
        plan(tmp_path, text)
    assert str(error.value).startswith(str(tmp_path / "sweep.toml"))
    assert "\n" not in str(error.value)


# -- the log --------------------------------------------------------------------------------------


def test_a_sweep_goes_on_where_it_was_until_it_is_over(tmp_path: Path) -> None:
    store, path = Store(tmp_path / "store"), tmp_path / "sweep.toml"
    with running(store, path, "text", seed=5, anew=False) as first:
        first.add(ShardEnd(1, 0))
        first.add(ShardEnd(2, 3, "an error"))
        with (
            pytest.raises(StoreError, match="is running: wait"),
            running(store, path, "text", seed=6, anew=False),
        ):
            pass
    with (store.root / "sweeps" / f"{first.head.id}.jsonl").open("ab") as file:
        file.write(b'{"type":"shard","numb')  # the driver was killed
    with running(store, path, "text", seed=6, anew=False) as again:
        assert again.head == first.head
        assert again.ends == {1: ShardEnd(1, 0), 2: ShardEnd(2, 3, "an error")}
        assert [end.ran for end in again.ends.values()] == [True, False]
        again.add(Over(stopped=False))
    assert unfinished(store, path, "text") is None


def test_another_file_or_another_text_begins_another_sweep(tmp_path: Path) -> None:
    store, path = Store(tmp_path / "store"), tmp_path / "sweep.toml"
    with running(store, path, "text", seed=5, anew=False) as log:
        pass
    found = unfinished(store, path, "text")
    assert found is not None
    assert found.head == log.head
    assert unfinished(store, path, "other") is None
    assert unfinished(store, tmp_path / "other.toml", "text") is None
    with running(store, path, "text", seed=6, anew=True) as anew:
        assert anew.head.id != log.head.id


def test_a_log_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    store, path = Store(tmp_path / "store"), tmp_path / "sweep.toml"
    (store.root / "sweeps" / "20260101-000000-aaaa.jsonl").mkdir(parents=True)
    with pytest.raises(StoreError, match=r"aaaa\.jsonl: cannot be read \(Is a directory\)"):
        unfinished(store, path, "text")


@pytest.mark.parametrize(
    ("late", "codes", "code"),
    [
        (False, (0, 1), Exit.DIVERGED),
        (False, (1, -1), Exit.UNENDED),
        (False, (1, 2, -1), Exit.USAGE),
        (False, (0, 5), Exit.NOTHING),  # no case is on record here
        (True, (1, -1), Exit.DIVERGED),  # no time was left for the other
        (True, (1, 4), Exit.MISSING),
        (True, (1, -1, 3), Exit.INTERNAL),
    ],
)
def test_how_the_shards_ended_is_the_exit_code_and_decides_whether_the_sweep_is_over(
    tmp_path: Path, late: bool, codes: tuple[int, ...], code: int
) -> None:
    path = tmp_path / "sweep.toml"
    path.write_text(f"seeds = {len(codes)}\n[[matrix]]\nbackends = ['eager-cpu']")
    read = load(path, sys.executable, 7)
    with running(Store(tmp_path / "store"), path, "text", seed=7, anew=False) as log:
        for number, ended in enumerate(codes):
            log.add(ShardEnd(number, ended, "why"))
        try:
            told = _conclude(_Tally(read, log, []), None, late)
        except Stopped as error:
            told = error.code
        except Internal:
            told = Exit.INTERNAL
        assert told == code
        failed = code in (Exit.USAGE, Exit.INTERNAL, Exit.MISSING, Exit.UNENDED)
        assert log.over == (not failed)


def test_a_case_that_died_counts_and_one_that_diverged_counts_once(tmp_path: Path) -> None:
    path = tmp_path / "sweep.toml"
    path.write_text("[[matrix]]\nbackends = ['eager-cpu']")
    store = Store(tmp_path / "store")
    with running(store, path, "text", seed=7, anew=False) as log:
        read = load(path, sys.executable, 7)
        name = log.run_id(read.shards[0])
        store.begin(RunRecord(name, 7, "dev", (), {}, ""))
        case = CaseRecord("a" * 16, "eager-cpu", "all", "diverged", (), (), {})
        with closing(store.writer(name, "0")) as writer:
            for record in (case, FINDING, msgspec.structs.replace(FINDING, kind="crash")):
                writer.write(record)
        (row,) = _Tally(read, log, []).board.rows.values()
    assert (row.done, row.known, row.new) == (2, 0, 2)


# -- a shard --------------------------------------------------------------------------------------

FAULTS = "24 SIGKILL SIGSEGV SIGABRT once"
WORDS = (
    *("--backends=eager-cpu", "--seed=11", "--cases=40", "--before=0", "--ops=abs,mm", "--aimed=0"),
    *("--workers=1", "--plugins=deadly", "--seconds=600", "--minimize=0"),
)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    shutil.copy(deadly.__file__, tmp_path)
    (tmp_path / "faults.txt").write_text(FAULTS)
    store = Store(tmp_path / "store")
    store.create()
    log, variables = tmp_path / "log", {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    folders = str(store.root), str(tmp_path), str(log)
    return Job(0, "r1", sys.executable, WORDS, *folders, 0.0, variables)


@pytest.fixture
def away(job: Job, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    """Return the same shard, whose store is at a URL."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(places, "_OFTEN", 0.2)
    monkeypatch.setattr(places, "_AGAIN", (0.1,))
    return replace(job, store=bucket.url, log=f"{bucket.url}/sweeps/s/0000.log")


def written_to(job: Job) -> Path:
    """Return the folder in which the process of a shard writes."""
    return cache_folder() / "sweeps" / job.run if is_url(job.store) else Path(job.store)


def until(reached: int, job: Job) -> int:
    """Wait until so many cases are on record, and return the process id of the run."""
    deadline = time.monotonic() + 600
    follower, count = Follower(Store(written_to(job)), job.run), 0
    while count < reached:
        count += sum(isinstance(record, CaseRecord) for record in follower.new())
        assert time.monotonic() < deadline
        time.sleep(0.02)
    named = {f"--shard={job.run}", f"--store={written_to(job)}"}
    found = {
        process.pid: process.info["ppid"]
        for process in psutil.process_iter(["cmdline", "ppid"])
        if named <= {*(process.info["cmdline"] or ())} and _group(process.pid) == os.getpgrp()
    }
    (pid,) = (pid for pid, parent in found.items() if parent not in found)  # no fork of it
    return pid


def _group(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:  # it has just ended
        return 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_shard_whose_process_is_killed_goes_on_and_each_case_is_on_record_once(job: Job) -> None:
    def strike() -> None:
        os.kill(until(12, job), signal.SIGKILL)

    killer = threading.Thread(target=strike)
    killer.start()
    with pytest.raises(Died, match="the process of run r1 died of signal 9"):
        attempt(job)
    killer.join()
    assert 12 <= judged(Path(job.store), "r1")[0].total() < 40
    assert attempt(job) == ShardEnd(0, 1)
    ids, died = judged(Path(job.store), "r1")
    assert set(ids.values()) == {1}
    assert len(ids) == 40
    faults = {case: fault_of(case, FAULTS) for case in ids}
    assert {*faults.values()} == {"", "SIGKILL", "SIGSEGV", "SIGABRT", "once"}
    assert died == {
        case: f"the worker died of {fault}"
        for case, fault in faults.items()
        if fault not in ("", "once")
    }
    ends = [r for r in Store(job.store).records("r1") if isinstance(r, EndRecord) and not r.backend]
    assert [(end.reason, end.cases) for end in ends] == [("resumed", 0), ("done", 40)]
    assert not Path(job.folder, "amp-fuzz-report").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_killed_shard_of_a_store_at_a_url_goes_on_and_each_case_is_there_once(
    away: Job, bucket: Bucket
) -> None:
    def strike() -> None:
        os.kill(until(12, away), signal.SIGKILL)

    killer = threading.Thread(target=strike)
    killer.start()
    with pytest.raises(Died, match="the process of run r1 died of signal 9"):
        attempt(away)
    killer.join()
    assert 12 <= judged(away.store, "r1")[0].total() < 40
    assert not written_to(away).exists()  # all of it was sent
    assert attempt(away) == ShardEnd(0, 1)
    ids, died = judged(away.store, "r1")
    assert (len(ids), {*ids.values()}) == (40, {1})
    assert died.keys() == {case for case in ids if fault_of(case, FAULTS) not in ("", "once")}
    assert [name for name in bucket.names() if "@eager-cpu.json" in name] != []
    assert b"on eager-cpu" in bucket.files["sweeps/s/0000.log"][0]
    assert not RemoteStore(bucket.url).is_running("r1")


def test_what_cannot_be_sent_is_kept_and_sent_by_the_next_attempt(
    away: Job, bucket: Bucket
) -> None:
    Path(away.folder, "faults.txt").write_text("1000")
    bucket.fails = lambda name: "no space" if "/records-" in name else ""
    end = attempt(away)
    kept = written_to(away)
    assert end.code == 2
    assert re.fullmatch(
        rf"{bucket.url}/runs/r1/records-.+\.jsonl: cannot write \(OSError: no space\): the records "
        rf"are kept: amp-fuzz report r1 --store={kept}",
        end.error,
    )
    assert len(judged(kept, "r1")[0]) == 40
    assert judged(away.store, "r1")[0].total() == 0
    bucket.fails = lambda name: ""
    assert attempt(away) == ShardEnd(0, 0)
    ids, _ = judged(away.store, "r1")
    assert (len(ids), {*ids.values()}) == (40, {1})
    ends = [r for r in RemoteStore(bucket.url).records("r1") if isinstance(r, EndRecord)]
    assert sum(end.cases for end in ends if end.backend) == 40  # none ran twice
    assert not kept.exists()


def test_a_store_that_fails_for_a_while_costs_a_shard_nothing(away: Job, bucket: Bucket) -> None:
    Path(away.folder, "faults.txt").write_text("1000")
    failed: list[str] = []

    def fails(name: str) -> str:
        if "/records-" in name and len(failed) < 3:
            failed.append(name)
            return "try later"
        return ""

    bucket.fails = fails
    assert attempt(away) == ShardEnd(0, 0)
    assert len(failed) == 3
    assert {*judged(away.store, "r1")[0].values()} == {1}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_shard_that_another_machine_took_over_stops(away: Job, bucket: Bucket) -> None:
    def take() -> None:
        until(1, away)
        index = msgspec.json.encode(Index((), time.time()))
        bucket.files["runs/r1/index-0009-00000000.json"] = index, time.time()

    taker = threading.Thread(target=take)
    taker.start()
    end = attempt(replace(away, words=(*away.words, "--cases=2000")))
    taker.join()
    assert (end.code, end.error) == (-1, f"{bucket.url}/runs/r1: another process continues it")
    assert judged(away.store, "r1")[0].total() == 0  # its cases run there
    assert not written_to(away).exists()


def test_an_attempt_waits_for_one_that_still_sends(
    away: Job, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "_PATIENCE", 0.1)
    with places.Away(away.store, "r1", away.log).taken(findings=False):
        end = attempt(away)
    assert (end.code, end.error) == (
        2,
        f"{cache_folder()}/locks/r1.lock: an earlier attempt still sends: try again",
    )


def test_a_store_that_is_no_longer_there_ends_a_shard_with_its_name(away: Job) -> None:
    end = attempt(replace(away, store="nosuch://bucket"))
    assert end.code == 2
    assert end.error.startswith("nosuch://bucket: cannot be read (ValueError: ")


def test_a_machine_without_a_place_to_write_is_named(
    away: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    end = attempt(away)
    assert (end.code, end.error) == (2, f"{tmp_path}/file/amp-fuzz: cannot write (Not a directory)")


def test_a_look_that_fails_is_said_and_the_next_reads_it(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "sweep.toml"
    path.write_text(f'store = "{bucket.url}"\nseeds = 2\n[[matrix]]\nbackends = ["eager-cpu"]')
    store = RemoteStore(bucket.url)
    with running(store, path, "text", seed=7, anew=False) as log:
        read = load(path, sys.executable, 7)
        tally = _Tally(read, log, list(read.shards))
        case = CaseRecord("a" * 16, "eager-cpu", "all", "agreed", (), (), {})
        name = f"runs/{log.run_id(read.shards[0])}/records-a.jsonl"
        bucket.files[name] = msgspec.json.encode(case) + b"\n", time.time()
        url, store.objects._root = store.objects._root, "127.0.0.1:9/b"
        tally.look()
        assert "cannot be read" in tally.trouble
        store.objects._root = url
        tally.look(now=False)  # not due yet
        assert tally.trouble
        tally.look()
    (row,) = tally.board.rows.values()
    assert (row.done, tally.trouble) == (1, "")


def test_only_a_shard_that_judges_them_gets_the_findings_of_the_store(
    away: Job, bucket: Bucket
) -> None:
    RemoteStore(bucket.url).save(FINDING)
    (name,) = bucket.names(".json")
    for first in (True, False):
        place = places.Away(away.store, f"r-{first}", away.log)
        with place.taken(findings=first):
            assert place.store.findings() == ([Path(name).stem] if first else [])
        assert bucket.puts[name] == 1  # it did not change


def test_a_node_that_cannot_write_to_the_store_is_found_out_first(
    away: Job, bucket: Bucket
) -> None:
    bucket.fails = lambda name: "you may only read"
    end = probe(away)
    assert end.code == 2
    assert re.fullmatch(rf"{bucket.url}/.+: cannot write \(OSError: you may only read\)", end.error)
    bucket.fails = lambda name: ""
    ready = ("--backends=eager-cpu",)
    assert probe(replace(away, words=ready)) == ShardEnd(0, 0)
    assert bucket.names() == []


def test_a_sweep_at_a_url_goes_on_where_it_was(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "sweep.toml"
    with running(RemoteStore(bucket.url), path, "text", seed=5, anew=False) as first:
        first.add(ShardEnd(1, 0))
        with (
            pytest.raises(StoreError, match="is running: wait"),
            running(RemoteStore(bucket.url), path, "text", seed=5, anew=False),
        ):
            pass
    log = unfinished(RemoteStore(bucket.url), path, "text")  # on another machine
    assert log is not None
    assert (log.head, log.ends) == (first.head, {1: ShardEnd(1, 0)})
    with running(RemoteStore(bucket.url), path, "text", seed=5, anew=False) as again:
        bucket.fails = lambda name: "no space"
        said = r"sweeps/.+\.jsonl: cannot write \(OSError: no space\)"
        with pytest.raises(StoreError, match=said):
            again.add(Over(stopped=False))


def test_a_full_disk_ends_a_shard_with_its_name_and_the_rest_runs_later(job: Job) -> None:
    full = Path(job.folder, "full.txt")
    full.write_text("5000")
    Path(job.folder, "faults.txt").write_text("1000")
    end = attempt(job)
    assert end.code == 2
    assert re.search(
        r"records-\d+.jsonl: cannot write \(No space left on device\): free some", end.error
    )
    before = judged(Path(job.store), "r1")[0]
    assert 0 < before.total() < 40
    full.unlink()
    numbers = Store(job.store).run_path("r1") / "summary.json"
    numbers.write_text("of a report that somebody made of it meanwhile")
    assert attempt(job) == ShardEnd(0, 0)
    assert not numbers.exists()  # no longer true, and a shard makes no report
    ids, _ = judged(Path(job.store), "r1")
    assert set(ids.values()) == {1}
    assert len(ids) == 40


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_cancelled_shard_ends_in_order(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray cancels a task by raising KeyboardInterrupt in its main thread, without a signal.

    The shard has more cases than it can run meanwhile, and as long as it needs to end.
    """
    monkeypatch.setattr(node, "_GRACE", 3600.0)
    Path(job.folder, "faults.txt").write_text("1000")

    def strike() -> None:
        until(1, job)
        _thread.interrupt_main()

    killer = threading.Thread(target=strike)
    killer.start()
    with pytest.raises(KeyboardInterrupt):
        attempt(replace(job, words=(*job.words, "--cases=100000")))
    killer.join()
    ends = [r for r in Store(job.store).records("r1") if isinstance(r, EndRecord) and not r.backend]
    assert [end.reason for end in ends] == ["interrupted"]
    assert not Store(job.store).is_running("r1")


def test_a_shard_that_a_signal_ended_in_order_runs_again(job: Job) -> None:
    python = Path(job.folder, "python")
    python.write_text("#!/bin/sh\nexit 143\n")
    python.chmod(0o755)
    with pytest.raises(Died, match="the process of run r1 died of signal 15"):
        attempt(replace(job, python=str(python)))


@pytest.mark.parametrize(
    ("own", "until", "left"),
    [(0, None, 0), (60, None, 60), (0, 100, 100), (60, 100, 60), (600, 100, 100), (0, -5, 0.001)],
)
def test_the_shorter_time_of_shard_and_sweep_holds(
    own: float, until: float | None, left: float
) -> None:
    settings = Settings(("eager-cpu",), cases=9, seconds=own)
    session = Session(RunRecord("r1", 3, "dev", (), {}, ""), settings, ())
    end = None if until is None else time.time() + until
    sharded = _sharded(session, "s1", end)
    assert sharded.record.id == "s1"
    assert sharded.settings.seconds == pytest.approx(left, abs=1)


def test_a_shard_begins_only_in_its_time(job: Job) -> None:
    assert attempt(replace(job, until=1.0)) == ShardEnd(0, -1, "the time was up before it began")


def test_a_follower_reads_each_whole_line_once(tmp_path: Path) -> None:
    store = Store(tmp_path)
    path = store.run_path("r1")
    path.mkdir(parents=True)
    follower = Follower(store, "r1")
    assert list(follower.new()) == []
    case = CaseRecord("a" * 16, "eager-cpu", "all", "agreed", (), (), {})
    writer = store.writer("r1", "0")
    writer.write(case)
    writer.write(EndRecord("", "", 1, 0.0))
    assert list(follower.new()) == [case]
    with (path / "records-1.jsonl").open("wb") as file:
        file.write(b'{"type":"case"')
        file.flush()
        assert list(follower.new()) == []
        file.write(json.dumps({"id": "b" * 16}).encode()[1:] + b"\nno record\n")
    writer.write(case)
    writer.close()
    assert list(follower.new()) == [case]
    assert list(follower.new()) == []


def test_the_benchmark_sees_what_is_lost_and_what_is_there_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    from benchmarks import sweep

    monkeypatch.setattr(sweep, "FAULTS", "1000000 SIGKILL")
    ids = [*sweep.drawn_ids(3, 5)]
    store = Store(tmp_path)
    path = store.begin(RunRecord("r1", 3, "dev", (), {}, "")) / "records-0.jsonl"

    def wrong(*cases: str, code: int = 1) -> list[str]:
        path.unlink(missing_ok=True)
        with closing(store.writer("r1", "0")) as writer:
            for case in cases:
                writer.write(CaseRecord(case, "eager-cpu", "all", "agreed", (), (), {}))
        return list(sweep.found(tmp_path, 1, 5, code)["wrong"])

    assert len(set(ids)) == 5
    assert wrong(*ids) == []
    assert wrong(*ids, code=0) == ["exit code 0"]
    assert wrong(*ids[1:]) == [f"r1: lost ['{ids[0]}'], more than once []"]
    assert wrong(*ids, ids[2]) == [f"r1: lost [], more than once ['{ids[2]}']"]
    monkeypatch.setattr(sweep, "FAULTS", "1 SIGKILL")
    assert wrong(*ids)[0] == f"r1: {ids[0]} meets 'SIGKILL', on record: None"


# -- the documentation ----------------------------------------------------------------------------


def test_the_file_in_the_documentation_is_one(tmp_path: Path) -> None:
    (text,) = re.findall(r"```toml\n(.+?)```", (GUIDE / "sweep.md").read_text(), re.DOTALL)
    shards = plan(tmp_path, text)
    assert Counter(shard.backend for shard in shards) == {
        "eager-cpu": 8,
        "fake-*": 8,
        "eager-cuda": 8,
        "jax*": 1,
    }


def test_the_clusters_in_the_documentation_are_ones() -> None:
    ray, yaml = pytest.importorskip("ray"), pytest.importorskip("yaml")
    import jsonschema

    schema = json.loads((Path(ray.__file__).parent / "autoscaler/ray-schema.json").read_text())
    cluster = yaml.safe_load((GUIDE / "sweep-cluster.yaml").read_text())
    jsonschema.validate(cluster, schema)
    kinds = cluster["available_node_types"]
    assert all(kind["min_workers"] for name, kind in kinds.items() if name != "head")
    claim, workers, job = yaml.safe_load_all((GUIDE / "sweep-kubernetes.yaml").read_text())
    assert [part["kind"] for part in (claim, workers, job)] == [
        *("PersistentVolumeClaim", "RayCluster", "Job")
    ]
    groups = [workers["spec"]["headGroupSpec"], *workers["spec"]["workerGroupSpecs"]]
    for pod in [*(group["template"] for group in groups), job["spec"]["template"]]:
        (container,) = pod["spec"]["containers"]
        assert {"name": "shared", "mountPath": "/shared"} in container["volumeMounts"]
        assert {v["persistentVolumeClaim"]["claimName"] for v in pod["spec"]["volumes"][:1]} == {
            claim["metadata"]["name"]
        }
    assert (
        f"{workers['metadata']['name']}-head-svc:6379"
        in job["spec"]["template"]["spec"]["containers"][0]["args"][0]
    )
