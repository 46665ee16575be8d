"""A part of the state that a compiler does not keep is found, and the page says how soon."""

from __future__ import annotations

import pytest

from amp_fuzz.backends.harness import quiet
from amp_fuzz.cases.case import Case
from amp_fuzz.cases.program import Autocast, NoGrad
from amp_fuzz.upstream import shipped
from amp_fuzz.upstream.explain import judge_of
from benchmarks.common import read
from benchmarks.kept_state import JSON, PAGE, hunt, page
from tests.faults.kept import GUARDS, KEPT
from tests.helpers import F16, brief, call, case, x

_INPUTS = [x("x0", 3, 8), x("w1", 8, 8)]
_mm = call("mm", "x0", "w1")
_LATER: dict[str, Case] = {
    "autocast-enabled": case(_INPUTS, _mm, later=((Autocast(enabled=False),),)),
    "autocast-dtype": case(_INPUTS, _mm, later=((F16,),)),
    "grad-mode": case(_INPUTS, _mm, first_pass="no_grad"),
}


@pytest.mark.parametrize("part", brief(GUARDS, "autocast-dtype"))
def test_a_guard_that_forgets_a_part_of_the_state_is_found(part: str) -> None:
    fault = KEPT[f"guard-{part}"]
    with quiet():
        wrong = judge_of(fault.wrong, shipped(), "none").judge(_LATER[part])
        honest = judge_of(fault.honest, shipped(), "none").judge(_LATER[part])
    assert wrong.outcome == ("backend" if fault.own else "diverged"), wrong
    assert honest.outcome == "agreed", honest


def test_another_part_is_still_guarded() -> None:
    """So each fault is of the part that it names."""
    later = case(_INPUTS, _mm, later=((NoGrad(), F16),))
    with quiet():
        found = judge_of(KEPT["guard-autocast-dtype"].wrong, shipped(), "none").judge(later)
    assert found.outcome == "agreed", found


@pytest.mark.thorough
def test_a_stream_meets_a_fault() -> None:
    row = hunt(KEPT["break-ends-region"], 7, 60.0)
    assert row["found"], row
    assert row["outcome"] == "diverged"


def test_the_page_has_every_fault() -> None:
    result = read(JSON)
    assert list(result["faults"]) == list(KEPT)
    assert PAGE.read_text() == page(result)
    missed = {name for name, row in result["faults"].items() if not row["found"]}
    assert missed == {"key-default-dtype", "cache-cleared"}
