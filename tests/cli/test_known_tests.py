"""tests_for_pytorch/ has a test of each known bug that torch alone shows, and each still fails."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from amp_fuzz.backends import backends, facts_of
from amp_fuzz.findings.known_tests import bug_of, run
from amp_fuzz.findings.repro.parts import ReproError
from amp_fuzz.interfaces.cli.common import Exit
from amp_fuzz.upstream import BUGS
from amp_fuzz.upstream.bug import Bug
from tests.forks import Done
from tests.helpers import needs_torch

Command = Callable[..., Done]

FILE = Path(__file__).parents[2] / "tests_for_pytorch" / "test_autocast_findings.py"
MADE_ON = "2.13.0"


def ids(text: str) -> set[str]:
    """Return the bugs that tests are about."""
    return {bug_of(name) for name in re.findall(r"^    def (test_\w+)\(self", text, re.MULTILINE)}


def shows(bug: Bug) -> bool:
    """Return whether torch alone shows a bug."""
    made = [e.backend for e in bug.examples]
    facts = [facts_of(backends()[name]) for name in made if not name.startswith("privateuse1")]
    return bug.entry.holds(MADE_ON) and any(f.scripts and not f.library for f in facts)


def test_the_file_has_each_bug_that_torch_alone_shows() -> None:
    """`amp-fuzz known tests` writes it: CONTRIBUTING.md, "Adding a known bug"."""
    assert ids(FILE.read_text()) == {bug.id for bug in BUGS.values() if shows(bug)}


@pytest.mark.thorough
def test_each_test_fails_as_expected(tmp_path: Path) -> None:
    needs_torch("==2.13.*")
    states = run([sys.executable, "-W", "ignore", "-I"], FILE, tmp_path)
    elsewhere = {b.id for b in BUGS.values() if any(e.processor for e in b.examples)}
    other = {bug_of(name) for name, state in states.items() if state != "there"}
    assert other <= elsewhere, states


def test_tests_that_do_not_run_are_an_error(tmp_path: Path) -> None:
    path = tmp_path / "test_none.py"
    path.write_text("raise SystemExit('no torch')")
    with pytest.raises(ReproError, match="0 of 0 tests ran, then exit code 1:\nno torch"):
        run([sys.executable], path, tmp_path)


def test_tests_whose_class_cannot_start_are_an_error(tmp_path: Path) -> None:
    path = tmp_path / "test_none.py"
    path.write_text(
        "import unittest\n\n\nclass T(unittest.TestCase):\n"
        "    def setUpClass():\n        raise OSError\n\n"
        "    def test_one(self):\n        pass\n\n\nunittest.main()\n"
    )
    with pytest.raises(ReproError, match="0 of 1 tests ran"):
        run([sys.executable], path, tmp_path)


def _raising(text: str) -> set[str]:
    raise ReproError("0 of 1 tests ran")


@pytest.mark.parametrize(
    ("ran", "said"),
    [(lambda text: set(), "no test fails here as expected"), (_raising, "0 of 1 tests ran")],
    ids=["none fails", "none runs"],
)
def test_where_no_test_fails_none_is_written(
    ran: Callable[[str], set[str]],
    said: str,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr("amp_fuzz.findings.known_tests.failing", ran)
    path = tmp_path / "test_bugs.py"
    done = command("known", "tests", "custom-op-weight-cache", "-o", str(path))
    assert done.code == Exit.NOTHING
    assert said in done.out + done.err
    assert not path.exists()


def test_the_command_writes_tests_that_run(amp_fuzz: Command, tmp_path: Path) -> None:
    wanted = ["custom-op-weight-cache", "compile-backward-untold"]
    done = amp_fuzz("known", "tests", *wanted, "-o", "test_bugs.py")
    assert done.code == 0, done
    assert "  custom-op-weight-cache: 1 test" in done.out
    assert "  compile-backward-untold: no test: " in done.out
    assert done.out.endswith("wrote test_bugs.py: 1 test; run it: python test_bugs.py -v\n")
    text = (tmp_path / "test_bugs.py").read_text()
    assert f"found on torch {torch.__version__}" in text
    assert ids(text) == {"custom-op-weight-cache"}
    nothing = amp_fuzz("known", "tests", wanted[1], "-o", "none.py")
    assert nothing.code == Exit.NOTHING
    assert not (tmp_path / "none.py").exists()
    unknown = amp_fuzz("known", "tests", "custom-op-weight")
    assert unknown.code == Exit.USAGE
    assert "did you mean" in unknown.err
