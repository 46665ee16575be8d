"""The audit tests itself: a table with one wrong policy must be seen in its cells."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from amp_fuzz.backends import backends
from amp_fuzz.backends.harness import quiet
from amp_fuzz.reference import Policy, load_table
from benchmarks.audit_tables import BACKENDS, measured
from tests.faults.tables import Audited, Wrong, corrupted, equivalent, wrong_policies
from tests.helpers import brief

_RESULT = Path(__file__).resolve().parents[2] / "benchmarks" / "audit_tables.json"
_SUMS = ("sum", "sum.dim_IntList")


@pytest.fixture(scope="module", params=brief(["eager-cpu", "fake-cuda"], "eager-cpu"))
def audited(request: pytest.FixtureRequest) -> Audited:
    backend = backends()[request.param]
    assert backend.availability().status == "ready"
    return Audited(backend)


@pytest.mark.thorough
@pytest.mark.parametrize("overload", _SUMS)
def test_every_wrong_policy_of_sum_is_seen(audited: Audited, overload: str) -> None:
    """Each of its cells once named a dtype, with which no policy sets one."""
    wrongs = [w for w in wrong_policies(audited.backend.device) if w.overload == overload]
    assert len(wrongs) == 5
    with quiet():
        unseen = [w.name for w in wrongs if audited.sees(w) is None and not equivalent(w)]
    assert not unseen


@pytest.mark.thorough
def test_each_pair_of_a_right_and_a_wrong_policy_is_seen_at_some_op() -> None:
    pairs: dict[tuple[Policy | None, Policy | None], Wrong] = {}
    for wrong in wrong_policies("cpu"):
        if wrong.overload in ("bmm", "cat", "mse_loss", "mv") and not equivalent(wrong):
            pairs.setdefault((wrong.own, wrong.policy), wrong)
    assert len(pairs) > 12
    audited = Audited(backends()["eager-cpu"])
    with quiet():
        assert not [w.name for w in pairs.values() if audited.sees(w) is None]


def test_the_right_table_is_seen_in_no_cell() -> None:
    """A control: what is seen is the wrong rule, not that the table is another object."""
    own = load_table("cpu").rules["mm"].policy
    with quiet():
        assert Audited(backends()["eager-cpu"]).sees(Wrong("cpu", "mm", own, own)) is None


def test_a_wrong_table_is_the_device_s_but_for_one_rule() -> None:
    right = load_table("cuda")
    wrong = corrupted(Wrong("cuda", "mm", Policy.LOWER_PRECISION_FP, None))
    assert set(right.rules) - set(wrong.rules) == {"mm"}
    assert all(wrong.rules[name] is right.rules[name] for name in wrong.rules)


def test_what_was_measured_left_nothing_unexplained() -> None:
    found = json.loads(_RESULT.read_text())["backends"]
    assert set(found) == set(BACKENDS)
    for name, result in found.items():
        assert sum(result["counts"].values()) == result["wrong"], name
        assert not result.get("unseen"), name


@pytest.mark.slow
@pytest.mark.parametrize("name", BACKENDS)
def test_every_wrong_policy_of_every_op_is_seen_or_explained(name: str) -> None:
    before = json.loads(_RESULT.read_text())["backends"][name]
    found = measured(name)
    assert not found.get("unseen")
    for sort in ("unreached", "values only"):
        assert set(found.get(sort, ())) <= set(before.get(sort, ()))
