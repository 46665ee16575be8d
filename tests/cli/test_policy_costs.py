"""`amp-fuzz policies --cost` says what policies cost, drawn or in a callable of a file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from amp_fuzz.interfaces.cli import main
from tests.forks import Done, forked

MODEL = """
import torch


def near(x):
    return torch.dist(x, x + 1e-3) + torch.relu(x).sum()


def make():
    return near, torch.linspace(1, 2, 64)


def raises():
    return torch.mm, torch.ones(3), torch.ones(3)
"""
TABLE = """
device = "npu"
dispatch_key = "AutocastPrivateUse1"
default_dtype = "bfloat16"
source = "made up"

[[context]]
dtypes = ["*"]
does = "on"
versions = ">=2.7"
source = "made up"

[[group]]
policy = "lower_precision_fp"
versions = ">=2.7"
source = "made up"
ops = ["dist", "cdist", "chain_matmul"]  # the last warns that it is deprecated

[[group]]
policy = "fp32"
versions = ">=2.7"
source = "made up"
ops = ["abs", "relu"]
"""


@pytest.fixture
def policies(tmp_path: Path) -> Callable[..., Done]:
    """Run the command in a folder with a model and a table, in a fork that has imported torch."""
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "npu.toml").write_text(TABLE)
    (tmp_path / "broken.toml").write_text(TABLE.replace("fp32", "fp23"))

    def run(*arguments: str) -> Done:
        return forked(
            main,
            ("policies", *arguments),
            folder=tmp_path,
            environment=dict(os.environ),
            files=tmp_path,
        )

    return run


def test_the_ops_of_a_callable_are_judged(policies: Callable[..., Done], tmp_path: Path) -> None:
    done = policies("--cost", "model.py:make", "--device=npu.toml", "-o", "page.md")
    assert done.code == 0, done.err
    head, _, text = done.out.partition("\n")
    assert head.endswith(": 2 calls of 2 ops, made by model.py:make")
    assert "\nlowered, though they amplify: 1 op\nop    dtype " in text
    assert "\nkept in float32 without need: 1 op\n  bfloat16, float16: relu\n" in text
    assert "\ndist  1 " in text.partition("every op")[2]
    assert text.endswith("\nnot judged: 0 ops\n\nwrote page.md\n")
    page = (tmp_path / "page.md").read_text()
    command = "amp-fuzz policies --cost model.py:make --device=npu.toml --seed=0"
    assert page.startswith(
        f"# What a policy costs\n\n<!-- Written by `{command}`. -->\n\n{head}.\n"
    )
    assert "| `dist` | 1 |" in page


@pytest.mark.thorough
def test_calls_are_drawn_of_each_op_of_a_table(policies: Callable[..., Done]) -> None:
    done = policies("--cost", "--device=npu.toml", "--draws=5", "--seed=1")
    assert done.code == 0, done.err
    assert done.err == ""
    assert done.out.splitlines()[0].endswith(": 25 calls of 5 ops, drawn, 5 an op, with seed 1")
    assert "\nkept in float32 without need: 2 ops\n  bfloat16, float16: abs, relu\n" in done.out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("model.py:make",), "a file needs --cost"),
        (("--draws=3",), "--draws needs --cost"),
        (("--seed=0",), "--seed needs --cost"),
        (("--device=cuda",), "--device needs --cost"),
        (("--cost", "--with=env"), "--cost measures the installed torch: leave out --with"),
        (("--cost", "model.py:make", "--draws=3"), "--draws is for drawn calls: leave it out, or"),
        (("--cost", "none.py:make"), "none.py: no such file"),
        (("--cost", "model.py:raises"), "model.py:raises: the call raises RuntimeError: "),
        (("--cost", "--device=cud"), "device='cud': no policy table; did you mean 'cuda'?"),
        (("--cost", "--device=none.toml"), "none.toml: cannot be read"),
        (("--cost", "--device=broken.toml"), "broken.toml: group 2: unknown policy 'fp23'"),
    ],
)
def test_what_cannot_be_measured_is_told_in_a_line(
    policies: Callable[..., Done], arguments: tuple[str, ...], said: str
) -> None:
    done = policies(*arguments)
    assert done.code == 2
    assert done.err.startswith(f"amp-fuzz: {said}"), done.err
    assert len(done.err.splitlines()) == 1
    assert done.out == ""
