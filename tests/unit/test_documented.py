"""The minimiser runs no call that torch does not check and that reads past its inputs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from amp_fuzz.backends.harness import quiet
from amp_fuzz.cases.case import Case
from amp_fuzz.cases.program import statements
from amp_fuzz.catalogue.unchecked import UNCHECKED
from amp_fuzz.findings.minimize.documented_shapes import documented
from amp_fuzz.findings.minimize.target import Target, asker
from amp_fuzz.runs.engine import Settings, Task, draw
from amp_fuzz.upstream.explain import judge_of
from tests.helpers import BF16, call, case, eager, needs_torch, x

pytestmark = pytest.mark.thorough

FLAGS = (True, 1, 0.0, False, False, False)


def cell(op: str, gates: int, *state: int, before: tuple[Any, ...] = (), **plan: Any) -> Case:
    """Return a case of a cell with a state of this shape."""
    inputs = [x("x0", 1, 1), x("x1", *state), x("x2", gates, 1), x("x3", gates)]
    name = "v9" if before else "x1"
    states = [name, name] if op == "lstm_cell" else name
    return case(inputs, *before, call(op, "x0", states, "x2", "x2", "x3", "x3"), **plan)


def layer(op: str, tall: int, *state: int) -> Case:
    inputs = [x("x0", 1, 1, 1), x("x1", *state), x("x2", tall, 1), x("x3", tall)]
    states = ["x1", "x1"] if op == "lstm" else "x1"
    return case(inputs, call(op, "x0", states, ["x2", "x2", "x3", "x3"], *FLAGS), backward="none")


def norm(*shape: int) -> Case:
    return case([x("x0", 2, 3), x("x1", *shape)], call("_weight_norm", "x0", "x1", 0))


SQUEEZED = call("unsqueeze", "x1", 0, to="v9")

GOOD = [
    *(cell("lstm_cell", 4, 1, 1), cell("gru_cell", 3, 1, 1), norm(2, 1)),
    *(layer("lstm", 4, 1, 1, 1), layer("gru", 3, 1, 1, 1)),
]
BAD = [
    *(cell("lstm_cell", 4, 1, 1, 1), cell("gru_cell", 3, 1, 1, 1)),
    cell("lstm_cell", 4, 1, 1, before=(SQUEEZED,)),  # the state is no input
    cell("gru_cell", 3, 1, 1, 1, contexts=(BF16,), thread="inside"),
    *(layer("gru", 3, 1, 1, 1, 1), layer("gru", 1, 1, 1, 1), layer("lstm", 1, 1, 1, 1)),
    *(norm(), norm(1), norm(1, 1), norm(2)),
]


@pytest.mark.parametrize("example", GOOD, ids=lambda c: c.id)
def test_documented_shapes_are_taken(example: Case) -> None:
    assert documented(example, eager().reference())


@pytest.mark.parametrize("example", BAD, ids=lambda c: c.id)
def test_a_candidate_that_reads_past_its_inputs_is_invalid(example: Case) -> None:
    ask = asker(judge_of(eager()), Target("bitwise"))
    assert ask(example).said == "invalid"


@pytest.mark.parametrize("op", sorted(UNCHECKED))
def test_no_program_is_drawn_so(op: str) -> None:
    backend = eager()
    cases = draw(Task("eager-cpu", "all", (op,), 40, 5), Settings(("eager-cpu",)))
    shown = [c for c in cases if op in {s.op for s in statements(c.program.body)}]
    assert shown
    with quiet():
        for example in map(backend.fit, shown):
            assert documented(example, backend.reference()), example


CRASHES = {
    "torch.lstm_cell(zeros(1, 1), [zeros(1, 1, 1)] * 2, zeros(4, 1), zeros(4, 1))": "<2.15",
    "torch.nn.GRUCell(1, 1)(zeros(1), zeros(1, 1))": "<2.15",
    "torch.gru(zeros(1, 1, 1), zeros(1, 1, 1), [zeros(1, 1)] * 2, False, 1, 0.0, *[False] * 3)": "",
}


@pytest.mark.parametrize("crash", CRASHES)
def test_torch_does_not_check_them(crash: str) -> None:
    needs_torch(CRASHES[crash])
    text = f"import torch\nfrom torch import zeros\n{crash}"
    quiet = {**os.environ, "PYTHONFAULTHANDLER": ""}
    died = subprocess.run([sys.executable, "-c", text], env=quiet, capture_output=True, check=False)
    # What they read may also be a tensor with an impossible dispatch key.
    odd = (b"please report a bug to PyTorch", b"[backend fallback]")
    mended = "torch is mended: see catalogue/unchecked.py"
    assert died.returncode == -signal.SIGSEGV or any(text in died.stderr for text in odd), mended
