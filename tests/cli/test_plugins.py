"""The commands that a run prints replay what it found, plugins and store included."""

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.thorough

Command = Callable[..., Any]

# Changes torch, registers no op: autocast does not cast the arguments of mm.
PLUGIN = """
import torch

library = torch.library.Library("aten", "IMPL")
autocast = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


def mm(a, b):
    with torch._C._ExcludeDispatchKeyGuard(autocast):
        return torch.mm(a, b)


library.impl("mm", mm, "AutocastCPU")
"""


@pytest.fixture
def found(amp_fuzz: Command, tmp_path: Path) -> str:
    """Run with a plugin that breaks torch, in a store of another name; return the output."""
    (tmp_path / "breaks.py").write_text(PLUGIN)
    options = ("--ops=mm", "--cases=12", "--seed=3", "--minimize=2", "--workers=1")
    done = amp_fuzz("run", "--backends=eager-cpu", "--plugins=breaks", "--store=kept", *options)
    assert done.code == 1, done.err
    return str(done.out)


def commands(text: str, name: str) -> list[list[str]]:
    """Return the commands of a kind that a text tells to type, without the program's name."""
    lines = re.findall(rf"amp-fuzz ({name} [^\n`<>]*)", text)
    return [shlex.split(line) for line in dict.fromkeys(map(str.strip, lines))]


def test_a_run_with_a_plugin_is_followed_to_a_script(
    amp_fuzz: Command, tmp_path: Path, found: str
) -> None:
    written = (tmp_path / "amp-fuzz-report" / "report.md").read_text()
    for text in (found, written, amp_fuzz("report", "--store=kept").out):
        assert commands(text, "replay")
        for words in commands(text, "replay") + commands(text, "repro"):
            assert {"--plugins=breaks", "--store=kept"} < set(words)
    replay = commands(found, "replay")[0]
    done = amp_fuzz(*replay)
    assert (done.code, "DIVERGES: " in done.out) == (1, True)
    assert commands(done.out, "repro")
    explained = amp_fuzz("explain", *replay[1:])
    assert explained.code == 1
    for text in (done.out, explained.out):
        for words in commands(text, "repro"):
            assert {"--plugins=breaks", "--store=kept"} < set(words)
    plain = [words for words in commands(found, "repro") if "--format=issue" not in words]
    script = amp_fuzz(*plain[0], "-o", "repro.py")
    assert script.code == 0

    def run() -> int:
        return subprocess.run(
            [sys.executable, "repro.py"], cwd=tmp_path, capture_output=True, check=False
        ).returncode

    assert run() == 1
    (tmp_path / "breaks.py").write_text("")
    assert run() == 0
    (tmp_path / "breaks.py").unlink()
    assert run() == 125
