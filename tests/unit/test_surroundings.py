"""The head of a run says where it ran, and under which settings."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch

from amp_fuzz.backends.settings import current
from amp_fuzz.cases.settings import SETTINGS
from amp_fuzz.config import Options
from amp_fuzz.runs import surroundings


def test_the_machine_has_a_processor_cores_and_memory() -> None:
    machine = surroundings.machine()
    assert machine["cores"] == str(os.cpu_count())
    assert float(machine["memory"].removesuffix(" GiB")) > 0
    assert machine["cpu"]


def test_the_commit_is_that_of_the_checkout_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert "project" not in surroundings.commits()
    name = ("-c", "user.name=a", "-c", "user.email=a@b")
    for words in (["init", "-q"], [*name, "commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run(["git", *words], check=True)
    head = subprocess.run(["git", "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    assert surroundings.commits()["project"] == head.stdout.strip()


BRANCHES = ("GITHUB_HEAD_REF", "GITHUB_REF_NAME", "CI_COMMIT_REF_NAME")


def test_the_branch_is_the_one_that_ci_names_or_git(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*BRANCHES, "CI_MERGE_REQUEST_SOURCE_BRANCH_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert surroundings.branch() == ""
    subprocess.run(["git", "init", "-q", "-b", "trunk"], check=True)
    assert surroundings.branch() == "trunk"
    monkeypatch.setenv("GITHUB_REF_NAME", "12/merge")
    assert surroundings.branch() == "12/merge"
    monkeypatch.setenv("GITHUB_HEAD_REF", "my-change")
    assert surroundings.branch() == "my-change"


def test_without_git_neither_commit_nor_branch_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in BRANCHES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", "/nothing")
    assert surroundings.commits() == {}
    assert surroundings.branch() == ""


def test_the_configuration_is_what_is_not_at_its_default() -> None:
    assert surroundings.configuration(Options()) == {}
    chosen = Options(ops=("abs", "mm"), cases=7)
    assert surroundings.configuration(chosen) == {"ops": "abs,mm", "cases": "7"}


def test_flags_say_how_torch_is_set() -> None:
    before = current()
    assert {setting.get for setting in SETTINGS.values()} <= set(before)
    assert before["torch.get_float32_matmul_precision()"] == "highest"
    torch.set_float32_matmul_precision("high")
    torch.use_deterministic_algorithms(True)
    try:
        now = current()
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.use_deterministic_algorithms(False)
    assert now["torch.get_float32_matmul_precision()"] == "high"
    assert now["torch.are_deterministic_algorithms_enabled()"] == "True"
    assert current() == before


def test_precisions_that_torch_does_not_mix_with_older_settings_are_named() -> None:
    if not hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        pytest.skip("needs torch 2.9")
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32"
    try:
        assert "tf32" in str(current())
    finally:
        matmul.fp32_precision = before
