"""`git bisect run python repro.py` finds the commit at which what a repro needs broke."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from amp_fuzz.backends import backends
from amp_fuzz.findings.repro.script import repro
from amp_fuzz.oracle import Divergence
from tests.helpers import FAULT, GOOD

pytestmark = pytest.mark.thorough

HONEST = "import torch\n"
BROKEN = HONEST + FAULT.format(body="y = y.float()")
OTHER = HONEST + FAULT.format(body="raise ValueError('not this')")


ENVIRONMENT = {
    **os.environ,
    "GIT_CONFIG_GLOBAL": os.devnull,
    "PYTHONDONTWRITEBYTECODE": "1",
    **dict.fromkeys(("GIT_AUTHOR_NAME", "GIT_AUTHOR_EMAIL"), "a@b"),
    **dict.fromkeys(("GIT_COMMITTER_NAME", "GIT_COMMITTER_EMAIL"), "a@b"),
}


def git(folder: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", *words], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_git_bisect_finds_the_commit_and_skips_those_that_cannot_tell(tmp_path: Path) -> None:
    finding = Divergence("dtype", "v0", "bfloat16", "float32")
    script = tmp_path / "repro.py"
    script.write_text(repro(GOOD, backends()["eager-cpu"], finding, prefix="import standin"))
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "--quiet")
    commits = []
    # The first that git tries is the one in the middle.
    for number, text in enumerate([HONEST, HONEST, OTHER, "", HONEST, BROKEN, BROKEN]):
        (folder / "number").write_text(str(number))
        (folder / "standin.py").write_text(text)
        if not text:
            (folder / "standin.py").unlink()
        git(folder, "add", "--all")
        git(folder, "commit", "--quiet", "--message", f"commit {number}")
        commits.append(git(folder, "rev-parse", "HEAD").strip())
    git(folder, "bisect", "start", commits[-1], commits[0])
    # Not found beside the script, but in the commit that is checked out.
    said = git(folder, "bisect", "run", "env", f"PYTHONPATH={folder}", sys.executable, str(script))
    assert f"{commits[5]} is the first bad commit" in said
    assert f"# skip: [{commits[3]}]" in git(folder, "bisect", "log")
