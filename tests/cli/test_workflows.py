"""The workflows to copy use commands, options and files that exist."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import click
import pytest

from amp_fuzz.interfaces.cli import _commands
from amp_fuzz.reports import read
from tests.unit.test_reports import small_run, store_of

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guide"
WORKFLOWS = ("ci-example.yml", "ci-nightly.yml", "gitlab-ci.yml")


@pytest.mark.parametrize("name", WORKFLOWS)
def test_each_command_of_a_workflow_can_be_parsed(name: str) -> None:
    text = (GUIDE / name).read_text().replace("$PROFILE", "ci")
    lines = re.findall(r"(?:^ *|run: |- )amp-fuzz (.+)$", text, re.MULTILINE)
    assert any(line.startswith("store prune") for line in lines)  # else the cache only grows
    for line in lines:
        command: click.Command = _commands
        words = shlex.split(line)
        while isinstance(command, click.Group):
            command = command.commands[words.pop(0)]
        command.make_context(line, words)


@pytest.mark.thorough
@pytest.mark.parametrize("name", WORKFLOWS)
def test_each_file_of_a_workflow_is_one_of_a_report(name: str, tmp_path: Path) -> None:
    paths = read(store_of(tmp_path, small_run()), "r1").write(tmp_path / "report")
    used = set(re.findall(r"amp-fuzz-report/([\w.-]+\.\w+)", (GUIDE / name).read_text()))
    assert used
    assert used <= {path.name for path in paths}


def test_our_own_workflows_use_targets_and_scripts_that_exist() -> None:
    root = GUIDE.parents[1]
    targets = set(re.findall(r"^([a-z-]+):", (root / "Makefile").read_text(), re.MULTILINE))
    for path in (root / ".github" / "workflows").glob("*.yml"):
        text = path.read_text()
        used = set(re.findall(r"run: make ([a-z-]+)", text))
        assert used <= targets, path.name
        for script in re.findall(r"run: (\.ci/\w+)", text):
            assert os.access(root / script, os.X_OK), script
