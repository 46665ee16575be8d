"""Held-out cases are counted against what the first cases of a run predict."""

from __future__ import annotations

import pytest

from benchmarks.residual import compared, cut

from .test_unseen import one

pytestmark = pytest.mark.thorough


def test_held_out_cases_are_compared_with_what_the_first_predict() -> None:
    """A seeded fault: of causes that are all seen before, none is new."""
    cases = [one(groups=[f"cause {i % 50}"]) for i in range(100)]
    before, after = cut(cases, 1 / 2)
    assert (len(before), len(after)) == (50, 50)
    assert compared(before, after, own=False)["new_causes"] == 0
    assert compared(before, after, own=False)["causes"] == pytest.approx(50, rel=0.01)
    other = [one(groups=[f"cause {i}"]) for i in range(100)]
    assert compared(*cut(other, 1 / 2), own=False)["new_causes"] == 50
    assert compared(*cut(other, 1 / 2), own=True)["new_causes"] == 0
