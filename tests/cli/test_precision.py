"""`amp-fuzz precision` says what autocast costs a model in a file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from amp_fuzz.interfaces.cli import main
from tests.forks import Done, forked

MODEL = """
import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x) * 1e30 * 1e-30


def harmless():
    return torch.nn.Linear(4, 4), torch.ones(2, 4)


def breaks():
    return Model(), torch.ones(2, 4)


def two_inputs():
    return torch.matmul, torch.ones(2, 2), torch.ones(2, 2)


def no_tuple():
    return Model()


def wrong_shape():
    return Model(), torch.ones(2, 5)


def raises():
    return {}["model"]
"""


@pytest.fixture
def precision(tmp_path: Path) -> Callable[..., Done]:
    """Run the command in a folder with a model, in a fork that has imported torch."""
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "broken.py").write_text("import torch\n\n1 +\n")

    def run(*arguments: str) -> Done:
        return forked(
            main,
            ("precision", *arguments),
            folder=tmp_path,
            environment=dict(os.environ),
            files=tmp_path,
        )

    return run


def test_a_harmless_model_exits_with_0(precision: Callable[..., Done]) -> None:
    done = precision("model.py:harmless")
    assert done.code == 0, done.err
    assert done.out.startswith(
        "amp_fuzz.precision of Linear, bfloat16 autocast on cpu: harmless\n  keeps     output keeps"
    )
    assert done.err == ""


def test_a_model_that_breaks_exits_with_1_and_names_the_line(
    precision: Callable[..., Done], tmp_path: Path
) -> None:
    done = precision(
        *("model.py:breaks", "--autocast=float16", "--device=cuda", "--seconds=5"),
        *("--json=result.json", "--html=result.html", "--no-backward"),
    )
    assert done.code == 1, done.err
    assert "float16 autocast on cuda: BREAKS" in done.out
    assert "model.py:11" in done.out
    data = json.loads((tmp_path / "result.json").read_text())
    assert data["verdict"] == "breaks"
    assert [value["name"] for value in data["values"]] == ["output"]
    assert "<!DOCTYPE html>" in (tmp_path / "result.html").read_text()


def test_each_input_is_given_to_the_callable(precision: Callable[..., Done]) -> None:
    assert precision("model.py:two_inputs").code == 0


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("model.py", "model.py: give a Python file and the name of a function: "),
        ("model:make", "model:make: give a Python file and the name of a function: "),
        ("none.py:make", "none.py: no such file"),
        ("model.py:make", "model.py: make is not there: it has Model, harmless, breaks,"),
        ("model.py:no_tuple", "model.py: no_tuple() returns Model: return a tuple of a callable"),
        ("model.py:raises", "model.py: raises() raises: KeyError: 'model' (model.py:35)"),
        ("model.py:wrong_shape", "RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x5"),
        ("broken.py:make", "broken.py: cannot be imported: SyntaxError: invalid syntax ("),
    ],
)
def test_what_cannot_be_used_is_one_line(
    precision: Callable[..., Done], target: str, said: str
) -> None:
    done = precision(target)
    assert done.code == 2
    assert said in done.error


def test_an_error_of_the_model_names_its_line(precision: Callable[..., Done]) -> None:
    assert precision("model.py:wrong_shape").error.endswith("(model.py:11)")


def test_a_wrong_option_is_one_line(precision: Callable[..., Done]) -> None:
    assert "0<x<8" in precision("model.py:harmless", "--digits=9").error
    assert "has no policy table: use one of cpu, cuda" in (
        precision("model.py:harmless", "--device=tpu").error
    )


def test_the_help_imports_no_torch() -> None:
    text = "import sys; from amp_fuzz.interfaces.cli import main; main(['precision', '--help']); "
    text += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", text], check=False).returncode == 0
