"""Seeded faults of FP8 layers: each is found, in a small case, and honest layers are not."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch

from amp_fuzz.backends.harness import quiet
from amp_fuzz.cases.program import FP8
from amp_fuzz.oracle.judge import Judge
from tests.faults.fault import patched
from tests.faults.fp8 import ALL, FAULTS, Own, Seeded, drawn, hunt


@pytest.mark.slow
@pytest.mark.parametrize("context", ALL, ids=lambda c: c.recipe)
def test_honest_layers_agree(context: FP8) -> None:
    judge = Judge(Own(contexts=(context,)), relations="all")
    with quiet():
        for case in islice(drawn((context,), 3), 12):
            assert judge.judge(case).divergence is None, case


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.name)
def test_a_fault_is_found_and_made_small(fault: Seeded) -> None:
    with quiet():
        found = hunt(fault, seconds=12)
    assert found["found"], fault.what
    assert found["statements"] <= 2, found["case"]


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_the_direction_of_the_roll_cannot_be_told(algorithm: Any) -> None:
    """A history holds the same magnitudes whichever way it rolls: this is no fault.

    The algorithms read the largest of all, or slot 0, and the oldest is dropped either way.
    """
    region = FP8("delayed", history=3, algorithm=algorithm)
    plain = torch.Tensor.roll
    backwards = Own(
        contexts=(region,), corrupt=lambda: patched(torch.Tensor, roll=lambda x, n: plain(x, -n))
    )
    judge = Judge(backwards, relations="none")
    with quiet():
        for case in islice(drawn((region,), 1), 25):
            assert judge.judge(case).divergence is None, case
