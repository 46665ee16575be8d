"""An issue is written by one command, and the ones in docs/findings/ are what it writes."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.thorough

Command = Callable[..., Any]

FINDINGS = Path(__file__).parents[2] / "docs" / "findings"
WRITTEN = {"issue-cache-ignores-dtype": "eager-cpu", "issue-matrix-rank-out": "compile[aot_eager]"}


def without_versions(text: str) -> str:
    text = re.sub(r"(?s)### Versions.*</details>", "", text)
    text = re.sub(r"amp-fuzz \d+(\.\w+)+", "amp-fuzz VERSION", text)
    text = re.sub(r"As torch \S+ computes", "As torch VERSION computes", text)
    return re.sub(r"(/docs|/v|/blob/v)/?\d+(\.\d+)+/", r"\1/VERSION/", text)


@pytest.mark.parametrize("name", WRITTEN)
def test_the_issues_in_the_docs_are_what_the_command_writes(
    amp_fuzz: Command, tmp_path: Path, name: str
) -> None:
    path = FINDINGS / f"{name}.json"
    backend = f"--backend={WRITTEN[name]}"
    done = amp_fuzz("repro", path, backend, "--format=issue", "-o", "issue.md")
    assert (done.code, done.err) == (0, "")
    assert done.out == (
        "wrote issue.md, whose script reproduces the finding; its first line is the title: "
        "https://github.com/pytorch/pytorch/issues/new/choose\n"
    )
    text = (tmp_path / "issue.md").read_text()
    assert without_versions(text) == without_versions((FINDINGS / f"{name}.md").read_text())
    for wanted in ("PyTorch version: ", "Python version: ", "CPU: ", "[pip3] torch=="):
        assert wanted in text


@pytest.mark.parametrize("name", WRITTEN)
def test_the_script_of_an_issue_reproduces(tmp_path: Path, name: str) -> None:
    text = (FINDINGS / f"{name}.md").read_text()
    script = re.findall(r"(?s)```python\n(.*?)```", text)[-1]
    (tmp_path / "repro.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "-I", "repro.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 1, done.stdout + done.stderr


def test_a_case_that_agrees_gives_no_issue(amp_fuzz: Command) -> None:
    """Whoever reports what is fixed wastes the time of others."""
    path = FINDINGS / "issue-matrix-rank-out.json"
    done = amp_fuzz("repro", path, "--format=issue")
    assert done.error == (
        f"amp-fuzz: {path}: agrees with the reference on eager-cpu now: nothing to report;"
        f" see: amp-fuzz replay {path}"
    )
    assert done.code == 2


def test_an_issue_of_a_crash(amp_fuzz: Command) -> None:
    path = FINDINGS / "issue-cache-ignores-dtype.json"
    done = amp_fuzz("repro", path, "--backend=dying-cpu", "--format=issue")
    assert done.code == 0
    assert done.err.startswith(
        "amp-fuzz: the script does not reproduce the finding here: exit code"
    )
    assert done.out.splitlines()[0] == (
        "# [amp, cpu] mm under nested autocast: the process died of SIGSEGV"
    )
    assert "ends in a result or an exception" in done.out


def test_an_issue_is_held_against_the_template(amp_fuzz: Command) -> None:
    path = FINDINGS / "issue-cache-ignores-dtype.json"
    done = amp_fuzz("repro", path, "--check")
    assert (done.code, done.out, done.err) == (0, "all 13 rules hold\n", "")


def test_a_broken_rule_is_a_line(amp_fuzz: Command) -> None:
    path = FINDINGS / "issue-cache-ignores-dtype.json"
    done = amp_fuzz("repro", path, "--backend=dying-cpu", "--check")
    assert done.code == 1
    assert done.out == (
        "shown: the script shows the finding; do not report it before a script does\n"
        "versions: the text names the first bad and the last good version;"
        " run amp-fuzz bisect, then give --last-good=VERSION, or none\n"
    )


def test_a_finding_as_a_test(amp_fuzz: Command, tmp_path: Path) -> None:
    path = FINDINGS / "issue-cache-ignores-dtype.json"
    done = amp_fuzz("repro", path, "--format=pytest", "-o", "test_it.py")
    assert (done.code, done.out) == (
        0,
        "wrote test_it.py, which reproduces the finding; run it: pytest test_it.py\n",
    )
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert (ran.returncode, "1 failed" in ran.stdout) == (1, True), ran.stdout


def test_an_unknown_form_is_refused(command: Command) -> None:
    done = command("repro", "x.json", "--format=html")
    assert done.code == 2
    assert "'html' is not one of 'script', 'pytest', 'testcase', 'issue'" in done.error
