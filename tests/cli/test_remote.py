"""Commands with ``--store=URL``: what people read, and exit codes."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow")

from amp_fuzz.records.store import Store
from tests.objects import Bucket
from tests.unit.test_keeping import NEW, OLD, store_of
from tests.unit.test_store import FINDING

pytestmark = pytest.mark.thorough

Command = Callable[..., Any]


@pytest.fixture
def url(bucket: Bucket, tmp_path: Path) -> str:
    store = store_of(tmp_path / "source", OLD, NEW)
    for path in sorted(store.root.rglob("*.json*")):
        bucket.files[path.relative_to(store.root).as_posix()] = path.read_bytes(), time.time()
    return bucket.url


def test_a_report_names_the_url_in_its_commands(command: Command, url: str, tmp_path: Path) -> None:
    done = command("report", "-v", f"--store={url}")
    assert (done.code, done.err) == (6, "")  # these runs have no end
    assert f"store {url}\n" in done.out
    assert f"amp-fuzz replay {FINDING.id} --store={url}" in done.out
    assert "/tmp" not in (tmp_path / "amp-fuzz-report" / "report.md").read_text()
    quality = (tmp_path / "amp-fuzz-report" / "code-quality.json").read_text()
    assert f'"path": "{url}/findings/{FINDING.id}.json"' in quality


def test_two_runs_at_a_url_are_compared(command: Command, url: str) -> None:
    expected = command("compare", "latest~1", "latest", f"--store={url}")
    assert (expected.code, expected.err) == (0, "")
    assert expected.out.splitlines() != []
    runs = f"{url}/runs/{OLD}", f"{url}/runs/{NEW}"
    assert command("compare", *runs).out == expected.out


def test_runs_and_findings_are_listed(command: Command, url: str) -> None:
    done = command("list", f"--store={url}")
    assert (done.code, done.err) == (0, "")
    assert {OLD, NEW, FINDING.id} <= set(done.out.split())
    assert f"look at one: amp-fuzz replay {FINDING.id} --store={url}" in done.out


def test_a_store_is_copied_from_a_url(command: Command, url: str, tmp_path: Path) -> None:
    done = command("store", "merge", url, "--store=own")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("own: 2 runs and 1 finding copied; 0 here already\n")
    assert Store(tmp_path / "own").runs() == [OLD, NEW]


def test_runs_are_compacted_at_a_url(command: Command, url: str, bucket: Bucket) -> None:
    done = command("store", "compact", f"--store={url}")
    assert (done.code, done.err) == (0, "")
    assert re.match(rf"{OLD}: 1 case, 1 kernel, 3 findings: ", done.out)
    assert done.out.endswith(f"amp-fuzz report {NEW} --store={url}\n")
    assert bucket.names(".jsonl") == []
    assert command("report", NEW, f"--store={url}").code == 6


@pytest.mark.parametrize(
    "words",
    [("run",), ("minimize", "0" * 16), ("store", "prune", "--keep=1"), ("store", "merge", ".")],
)
def test_commands_that_need_a_folder_say_so(
    command: Command, tmp_path: Path, words: tuple[str, ...]
) -> None:
    done = command(*words, "--store=s3://bucket/runs")
    assert done.code == 2
    assert re.fullmatch(
        r"amp-fuzz: store: s3://bucket/runs: amp-fuzz .+ needs a folder: give another, and copy a "
        r"store there with `amp-fuzz store merge s3://bucket/runs`",
        done.error,
    )
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("nosuch://bucket", "nosuch://bucket: cannot be read (ValueError: "),
        ("objects://127.0.0.1:9/b", "objects://127.0.0.1:9/b: cannot be read ("),
    ],
)
def test_a_url_that_cannot_be_read_is_an_error_of_one_line(
    command: Command, bucket: Bucket, place: str, said: str
) -> None:
    for words in (("report",), ("list",), ("compare", "latest"), ("store", "compact")):
        done = command(*words, f"--store={place}")
        assert done.code == 2
        assert done.error.startswith(f"amp-fuzz: {said}")


def test_the_doctor_writes_to_a_url(command: Command, url: str, bucket: Bucket) -> None:
    from amp_fuzz.config import Options
    from amp_fuzz.interfaces.cli.doctor import _store

    found = _store(Options(store=url))
    assert (found.state, found.detail) == ("ok", f"{url}: 2 runs, 1 finding, can be written")
    bucket.fails = lambda name: "you may only read"
    found = _store(Options(store=url))
    assert found.state == "BROKEN"
    assert "you may only read" in found.detail
