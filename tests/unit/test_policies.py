"""``amp-fuzz policies`` sees the policy of each kernel, and names a wrong table or environment.

`faulty` has a range that is wrong on purpose.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import pytest
import torch

from amp_fuzz.backends.dispatcher import kernels
from amp_fuzz.interfaces.cli import main
from amp_fuzz.policies.tables import PolicyTable
from amp_fuzz.reference import load_table, load_table_file
from amp_fuzz.runs.policies import (
    BUILDS,
    InterpreterError,
    Measured,
    disagreements,
    measure,
    page,
    steps,
    unobserved,
)

pytestmark = pytest.mark.thorough

OLD = Measured("2.11.0+cu130", {"cpu": {"mm": "lower_precision_fp", "qr": "fp32"}})
NEW = Measured("2.15.0", {"cpu": {"mm": "fp32", "exp": "fp32"}, "maia": {"mm": "promote"}})


@pytest.fixture(scope="module")
def here() -> Measured:
    return measure()


def faulty(folder: Path, old: str, new: str) -> Callable[[str, str], PolicyTable]:
    """Return CUDA's table with one piece of its text replaced, for every device and version."""
    text = resources.files("amp_fuzz.policies").joinpath("cuda.toml").read_text("utf-8")
    assert old in text
    path = folder / "cuda.toml"
    path.write_text(text.replace(old, new))
    return lambda device, version: load_table_file(path, torch_version=version)


def test_it_sees_every_policy_of_the_installed_torch_and_our_tables_agree(here: Measured) -> None:
    assert here.torch == torch.__version__
    assert list(disagreements(here)) == []
    assert list(unobserved(here)) == []


def test_it_sees_every_kernel_that_the_dispatcher_lists(here: Measured) -> None:
    for device, rows in here.devices.items():
        listed = kernels(device)
        names = {*listed.reachable, *listed.unreachable}
        assert set(rows) - set(BUILDS.get(device, ())) == names - set(BUILDS.get(device, ()))


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('">=2.12"', '">=2.99"', "rms_norm: torch has a kernel (fp32), our table has no rule"),
        (
            '">=2.7,<2.13"',
            '">=2.7"',
            "cumsum.dimname: our table says fp32_set_opt_dtype, torch has no kernel",
        ),
        (
            'policy = "promote"',
            'policy = "fp32"',
            "addcdiv: our table says fp32, torch does promote",
        ),
    ],
)
@pytest.mark.skipif(torch.__version__ < "2.13", reason="the ranges end or begin at 2.12 and 2.13")
def test_a_wrong_range_or_policy_is_named(
    here: Measured, tmp_path: Path, old: str, new: str, says: str
) -> None:
    cuda = Measured(here.torch, {"cuda": here.devices["cuda"]})
    found = list(disagreements(cuda, faulty(tmp_path, old, new)))
    assert f"torch {here.torch}, cuda: {says}" in found


def test_steps_say_what_changed() -> None:
    assert steps(OLD, NEW) == [
        "maia: a new device, with 1 kernels",
        "cpu: no kernel -> fp32: exp",
        "cpu: lower_precision_fp -> fp32: mm",
        "cpu: fp32 -> no kernel: qr",
    ]
    assert steps(OLD, OLD) == []


def test_the_page_shows_changes_counts_and_disagreements() -> None:
    text = page([NEW, OLD])
    assert "| [cpu](#cpu) | 2 | 2 | 0 | 3 |" in text
    assert "| `qr` | fp32 | – | `>=2.7,<2.14` |" in text
    assert "torch 2.11.0 has no autocast for it." in text
    assert "- torch 2.15.0, cpu: mm: our table says lower_precision_fp, torch does fp32\n" in text


def python(folder: Path, script: str) -> Path:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("", "its answer cannot be read"),
        (
            "echo \"ModuleNotFoundError: No module named 'torch'\" >&2; exit 1",
            "ModuleNotFoundError: No module named 'torch': give a Python that has torch",
        ),
    ],
)
def test_a_python_without_torch_is_named(tmp_path: Path, script: str, says: str) -> None:
    path = python(tmp_path, script)
    with pytest.raises(InterpreterError) as caught:
        measure(str(path))
    assert str(caught.value).startswith(f"{path}: ")
    assert says in str(caught.value)


def test_the_command_ends_with_2_for_a_missing_interpreter(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert main(["policies", "--with=/no/such/python"]) == 2
    said = capfd.readouterr().err
    assert "/no/such/python: cannot run (No such file or directory): give a Python" in said


def test_an_op_that_this_process_declared_is_no_disagreement(
    here: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = load_table("cpu").rules["mm"]
    declared = {"mine::op": dataclasses.replace(rule, overload="mine::op")}
    monkeypatch.setattr("amp_fuzz.policies.tables._declared", {"cpu": declared})
    assert "mine::op" in load_table("cpu").rules
    assert list(disagreements(here)) == []
