"""``amp-fuzz known check``: its lines, its file, its exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch

from amp_fuzz.findings import presence
from amp_fuzz.findings.presence import Presence
from amp_fuzz.interfaces.cli import main
from amp_fuzz.interfaces.cli.replay import job_of
from amp_fuzz.records.store import Store, StoreError
from amp_fuzz.upstream import BUGS, registry
from tests.forks import Done

pytestmark = pytest.mark.thorough

Command = Callable[..., Done]


def test_it_says_which_bugs_are_there_and_writes_a_file(amp_fuzz: Command, tmp_path: Path) -> None:
    done = amp_fuzz("known", "check", "cache-ignores-*", "-o", "here.json")
    assert (done.code, done.err) == (0, "")
    assert done.out == (
        f"2 known bugs, torch {torch.__version__}\n"
        "  cache-ignores-dtype on eager-cpu: there  (1 left)\n"
        "  cache-ignores-grad-mode: cannot tell: it has no case: the pinned torch is mended: "
        "tests/reference/test_autocast.py holds the imitation\n"
        "\n"
        f"torch {torch.__version__}: 1 there, 0 gone, 1 cannot be told\n"
        "wrote here.json\n"
    )
    written = json.loads((tmp_path / "here.json").read_text())
    assert written["torch"] == torch.__version__
    example = BUGS["cache-ignores-dtype"].examples[0]
    assert written["bugs"]["cache-ignores-dtype"] == {
        "state": "there",
        "backend": "eager-cpu",
        "case": example.case.id,
    }


def test_top_runs_the_gravest_of_torch_and_says_how_to_see_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not one that its record says is fixed, nor one of another library."""
    monkeypatch.setattr(import_module("amp_fuzz.interfaces.cli.known"), "_TOP", 2)
    states = iter([Presence("there", "eager-cpu"), Presence("gone", "eager-cpu")] * 2)
    told = lambda bugs, **_: ((bug, next(states)) for bug in bugs)  # noqa: E731
    monkeypatch.setattr(presence, "presence", told)
    bug = BUGS["cache-ignores-dtype"]
    example = bug.examples[0]
    missing = replace(example, backend="eager-cuda")
    library = replace(example, backend="te-python")
    bugs = [
        replace(bug, id="raises", harm="raises"),
        replace(bug, id="dtype"),
        replace(bug, id="value", harm="silent value"),
        replace(bug, id="fixed", harm="silent value", torch="<2.7"),
        replace(bug, id="missing", harm="silent value", examples=(missing,)),
        replace(bug, id="library", harm="silent value", examples=(library,)),
    ]
    monkeypatch.setattr(registry, "BUGS", {bug.id: bug for bug in bugs})
    assert main(["known", "check", "--top"]) == 0
    assert capsys.readouterr().out == (
        f"2 known bugs, torch {torch.__version__}\n"
        f"  silent value, value on eager-cpu: there: {bug.what}  (1 left)\n"
        f"  silent dtype, dtype on eager-cpu: gone: {bug.what}\n"
        "\n"
        "NEW: dtype is gone, and its record says torch >=2.7: fixed in your torch?\n"
        f"torch {torch.__version__}: 1 there, 1 gone, 0 cannot be told\n"
        "see one as a script: amp-fuzz repro value\n"
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["cache-ignores-dtypes"],
            "no known bug has the id 'cache-ignores-dtypes': did you mean 'cache-ignores-dtype'?",
        ),
        (
            ["--backends=eager-cpus"],
            "backends: no known bug has a case on 'eager-cpus': did you mean 'eager-cpu'?",
        ),
        (
            ["cache-ignores-dtype", "--backends=compile[eager]"],
            "backends: no known bug has a case on 'compile[eager]': use eager-cpu",
        ),
    ],
)
def test_an_unknown_bug_or_backend_is_an_error(
    amp_fuzz: Command, words: list[str], says: str
) -> None:
    done = amp_fuzz("known", "check", *words)
    assert (done.code, done.err) == (2, f"amp-fuzz: {says}\n")


def test_nothing_told_is_no_success(amp_fuzz: Command) -> None:
    assert amp_fuzz("known", "check", "cache-ignores-grad-mode").code == 5


@pytest.mark.parametrize(
    ("state", "versions", "news"),
    [
        ("gone", ">=2.7", "is gone, and its record says torch >=2.7: fixed in your torch?"),
        ("there", "<2.7", "is there, and its record says torch <2.7"),
        ("there", ">=2.7", ""),
        ("gone", "<2.7", ""),
        ("cannot tell", "<2.7", ""),
    ],
)
def test_what_the_record_does_not_say_is_news_and_no_failure(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    state: str,
    versions: str,
    news: str,
) -> None:
    bug = replace(BUGS["cache-ignores-dtype"], torch=versions)
    monkeypatch.setattr(registry, "BUGS", {bug.id: bug})
    seen = Presence(state, "eager-cpu")  # type: ignore[arg-type]
    monkeypatch.setattr(presence, "presence", lambda bugs, **_: [(bug, seen) for bug in bugs])
    assert main(["known", "check"]) == (5 if state == "cannot tell" else 0)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("NEW")]
    assert lines == ([f"NEW: {bug.id} {news}"] if news else [])


def test_a_known_bug_is_its_smallest_case(tmp_path: Path) -> None:
    for name, backend in (
        ("promote-foreign-half", "eager-cpu"),
        ("export-take", "export[decomposed]"),
    ):
        job = job_of(name, Store(tmp_path), None)
        assert (job.case, job.backend) == (BUGS[name].examples[0].case, backend)
    for unknown in ("promote-foreign-halves", "cache-ignores-grad-mode"):  # which has no case
        with pytest.raises(StoreError, match=unknown):
            job_of(unknown, Store(tmp_path), None)
