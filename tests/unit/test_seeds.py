"""A seed draws the same cases, with the same input values, on another processor and in each run."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.thorough

# Prints a digest of the drawn cases of a run, aimed ones too, and of their inputs, by backend; then
# one of the cases that a task which aims at kernels runs, as it stops once they are reached.
DRAWN = """
import hashlib, sys
import torch
from amp_fuzz.backends import backends
from amp_fuzz.cases.inputs import bits_text, tensor
from amp_fuzz.records.schema import CaseRecord
from amp_fuzz.runs import engine
from amp_fuzz.runs.engine import Settings, draw, explore, plan_tasks
{first}
torch.set_num_threads(int(sys.argv[1]))


def digest(parts):
    return hashlib.sha256(" ".join(map(str, parts)).encode()).hexdigest()


def bits(case):
    return [bits_text(tensor(spec, case.seed)) for spec in case.program.inputs]


for name in ("eager-cpu", "fake-cuda", "compile[inductor]", "script"):
    backend = backends()[name]
    settings = Settings((name,), cases=120, aimed=20, seed=7)
    tasks = plan_tasks(settings, [backend])
    cases = [case for task in tasks for case in draw(task, settings)]
    print(name, digest(case.id for case in cases), digest(map(bits, cases[:40])))
settings = Settings(("eager-cpu",), cases=60, aimed=100, seed=7, minimize=0.0)
(task,) = plan_tasks(settings, [backends()["eager-cpu"]])
print("aimed", digest(r.id for r in explore(task, settings) if isinstance(r, CaseRecord)))
"""


def drawn(hashes: int, threads: int, first: str = "", **instructions: str) -> str:
    """Return what a new process draws, with the processor's newest instructions off or on."""
    variables = {**os.environ, "PYTHONHASHSEED": str(hashes), **instructions}
    words = [sys.executable, "-W", "ignore", "-c", DRAWN.format(first=first), str(threads)]
    done = subprocess.run(words, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def here() -> str:
    return drawn(1, 1)


def test_a_seed_draws_the_same_on_an_older_processor(here: str) -> None:
    older = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"}
    assert drawn(99, 2, **older) == here


def test_drawing_by_the_order_of_hashes_would_be_seen(here: str) -> None:
    shuffled = "chosen = engine.select\nengine.select = lambda names: {}(chosen(names), key={})"
    assert drawn(99, 1, shuffled.format("sorted", "lambda op: 0")) == here
    assert drawn(99, 1, shuffled.format("sorted", "lambda op: hash(op.name)")) != here
