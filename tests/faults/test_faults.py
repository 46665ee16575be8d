"""Seeded faults must be found, and honest kernels must not: the engine is the users' own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from amp_fuzz.backends.harness import quiet
from amp_fuzz.cases.program import statements
from amp_fuzz.config import Options
from amp_fuzz.runs.engine import Settings, draw, plan_tasks
from amp_fuzz.upstream.explain import judge_of
from benchmarks.faults import table
from tests.faults.faults import CONTROLS, CUT, EQUIVALENT, FAULTS, POLICY, SEMANTIC
from tests.faults.hunt import Hunt, Step, _counts, hunt, hunt_along, record
from tests.faults.wrapper import POLICIES
from tests.helpers import call, case, eager, x

CASES = 600


@pytest.fixture(scope="module")
def way() -> Sequence[Step]:
    """Return the first cases of the engine over honest kernels."""
    return record(cases=CASES)[0]


def _finds(seed: int) -> bool:
    about = Options()
    settings = Settings(("eager-cpu",), about.cases, about.aimed, seed=seed)
    tasks = [task for task in plan_tasks(settings, [eager()]) if not task.aims]
    cases = [case for task in tasks for case in draw(task, settings)]
    with_op = [c for c in cases if any(s.op == "addmm" for s in statements(c.program.body))]
    steps = [Step(case, "matmul", frozenset({"addmm"}), 0.0) for case in with_op]
    return hunt_along(CUT["addmm:cut-mat2"], steps).found


@pytest.mark.slow
def test_the_default_profile_finds_a_gradient_cut_at_the_weight_of_addmm() -> None:
    """Aimed cases are left out: which they are depends on what others reach.

    Some 15 cases of a run call the op, and a few of these train the weight outside no_grad.
    """
    assert sum(map(_finds, range(8))) >= 7


@pytest.mark.slow
@pytest.mark.parametrize("name", CONTROLS)
def test_honest_kernels_in_python_raise_no_alarm(name: str) -> None:
    assert not hunt(CONTROLS[name], cases=150).found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["conv2d:none", "prelu:promote", "mse_loss:banned"])
def test_the_short_way_finds_what_the_whole_way_finds(name: str, way: Sequence[Step]) -> None:
    """The same find after as many cases and alarms, past a transform over kernels in Python."""
    short = hunt_along(POLICY[name], way)
    whole = hunt(POLICY[name], seconds=600.0, cases=CASES)
    assert short.found
    assert any(not _counts(step.case) for step in way[: short.cases])
    assert replace(short, seconds=0.0) == replace(whole, seconds=0.0)


def test_ignored_lists_show_in_a_gradient_where_the_backward_pass_calls_cat() -> None:
    """The gradient of lu is put together by cat, but for a square matrix."""
    fault = SEMANTIC["promote-ignores-lists"]
    for columns, kind in ((8, "grad-bitwise"), (3, "")):
        example = case([x("w0", 3, columns)], call("lu", "w0", to="v0 v1"), backward="inside")
        with quiet(), fault.corrupt():
            found = judge_of(eager()).judge(example).divergence
        assert (found.kind if found else "") == kind


@pytest.mark.parametrize("name", ["promote-low", "inplace-cast", "cache-survives", "mm:none"])
def test_torch_is_put_back(name: str) -> None:
    before = _kernels()
    with FAULTS[name].corrupt():
        assert _kernels() != before
    assert _kernels() == before


def _kernels() -> tuple[object, ...]:
    names = [f"aten::{op}" for op in POLICIES] + ["aten::addmm_", "aten::addmm.out"]
    dumps = [torch._C._dispatch_dump(n) for n in names if torch._C._dispatch_has_kernel(n)]
    return (*dumps, torch.clear_autocast_cache, torch.autocast.__exit__)


def test_every_op_is_given_every_other_policy() -> None:
    ops = {f.op for f in POLICY.values()}
    given = {o: {n.rpartition(":")[2] for n, f in POLICY.items() if f.op == o} for o in ops}
    plain = {"lower_precision_fp", "fp32", "promote", "none", "banned"}
    for op, policies in given.items():
        assert plain - {POLICIES[op]} <= policies
        assert POLICIES[op] not in policies
    listed = torch._C._dispatch_get_all_op_names()
    kernels = {
        n.removeprefix("aten::")
        for n in listed
        if n.startswith("aten::")
        and torch._C._dispatch_has_kernel_for_dispatch_key(n, "AutocastCPU")
    }
    assert ops == kernels


def test_there_are_more_than_thirty_semantic_faults_each_described() -> None:
    assert len(SEMANTIC) > 30
    assert all(f.what and f.kinds for f in SEMANTIC.values())
    assert set(EQUIVALENT) <= set(POLICY)


def test_the_page_says_what_was_not_found() -> None:
    rows = [
        Hunt("truncated", True, 3, 0.5, "bitwise", "v0", "mm").json(),
        Hunt("cache-views", False, 5000, 60.0).json(),
    ]
    run = {
        "seconds_limit": 60.0,
        "seed": 0,
        "versions": {"torch": "2.13.0"},
        "machine": {"cpu": "a processor", "cores": 2, "system": "Linux"},
    }
    page = table({"run": run, "semantic": {"controls": [], "faults": rows}})
    assert "1 of 2 found (50.0%)" in page
    assert (
        "| truncated | casts truncate instead of rounding to nearest | bitwise | mm | 3 | 0.5 |"
        in page
    )
    assert "| cache-views | leaves that are views are cached | **not found** |" in page


@pytest.mark.slow
@pytest.mark.parametrize("name", SEMANTIC)
def test_every_semantic_fault_is_found_within_a_minute(name: str) -> None:
    _check(hunt(SEMANTIC[name], seconds=60.0))


@pytest.mark.slow
def test_every_wrong_policy_is_found_within_a_minute() -> None:
    steps, control = record(seconds=60.0)
    assert not control.found
    hunts = [hunt_along(fault, steps) for fault in POLICY.values()]
    missed = [h.name for h in hunts if not h.found and not POLICY[h.name].equivalent]
    assert len(missed) <= 0.01 * len(hunts), missed
    told = [POLICY[h.name].equivalent for h in hunts if h.found]
    assert not [why for why in told if why and "seldom" not in why]


def _check(found: Hunt) -> None:
    kinds = FAULTS[found.name].kinds
    assert found.found, found
    assert not kinds or found.kind in kinds, found
