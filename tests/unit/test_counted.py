"""The last line of `.ci/run` counts the tests of all its parts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.thorough

SCRIPT = Path(__file__).parents[2] / ".ci" / "counted.py"
PASSING = "def test_one(): pass\nimport pytest\n@pytest.mark.skip\ndef test_two(): pass\n"
FAILING = """
import pytest
@pytest.fixture
def broken():
    raise OSError
def test_one(broken): pass
def test_two(): assert 0
def test_three(): pass
"""


def written(folder: Path, text: str) -> Path:
    """Run a file of tests, and return what pytest wrote of it."""
    folder.mkdir()
    (folder / "test_it.py").write_text(text)
    words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--junit-xml=out.xml", "test_it.py")
    subprocess.run([sys.executable, *words], cwd=folder, check=False, capture_output=True)
    return folder / "out.xml"


def counted(*paths: Path) -> tuple[int, str]:
    words = [sys.executable, str(SCRIPT), *map(str, paths)]
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    return done.returncode, done.stdout


def test_the_parts_are_summed_and_a_failure_in_either_fails(tmp_path: Path) -> None:
    passing, failing = written(tmp_path / "a", PASSING), written(tmp_path / "b", FAILING)
    assert counted(passing, passing) == (0, "2 passed, 0 failed, 2 skipped\n")
    assert counted(passing, failing) == (1, "2 passed, 2 failed, 1 skipped\n")
    assert counted(failing, passing) == (1, "2 passed, 2 failed, 1 skipped\n")


def test_a_part_that_wrote_nothing_has_failed(tmp_path: Path) -> None:
    passing = written(tmp_path / "a", PASSING)
    assert counted(passing, tmp_path / "none.xml") == (1, "1 passed, 1 failed, 1 skipped\n")
