"""What is kept of weights between steps: faults that one update of the weights meets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, get_args

import pytest
import torch

from amp_fuzz.backends import backends, prelude
from amp_fuzz.backends.eager import EagerBackend
from amp_fuzz.backends.harness import Runtime, quiet
from amp_fuzz.cases.case import Case, Update
from amp_fuzz.findings.minimize.plans import plans
from amp_fuzz.oracle.judge import Judge
from amp_fuzz.upstream import shipped
from amp_fuzz.upstream.explain import judge_of
from tests.faults.kept import GUARDED
from tests.helpers import F16, call, case, x

UPDATES: tuple[Update, ...] = get_args(Update)
_DONE: Mapping[Update, Callable[[list[torch.Tensor]], None]] = {
    "in_place": prelude.nudge,
    "copied": prelude.copy_halves,
    "data": prelude.set_data,
    "cast": prelude.recast,
    "frozen": prelude.freeze,
}
_INPUTS = [x("x0", 6, 8), x("w1", 8, 8)]
_BODY = call("mm", "x0", "w1"), call("neg", "w1", to="v1")

Kept = dict[object, Any]


def _in_place_of(weight: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """Return old values, whose gradient is the weight's; the weight itself if it has them."""
    old = old.to(weight.dtype)
    return weight if torch.equal(old, weight) else old + (weight - weight.detach())


def _values(key: Callable[[torch.Tensor], object]) -> Callable[[Kept, int, torch.Tensor], Any]:
    """Return a fault: a weight has the values that it had when it was first seen under its key."""

    def given(kept: Kept, number: int, weight: torch.Tensor) -> torch.Tensor:
        held = weight.detach()  # the memory stays: no other gets its address
        old, _ = kept.setdefault((number, key(weight)), (held.clone(), held))
        return _in_place_of(weight, old)

    return given


def _memory(kept: Kept, number: int, weight: torch.Tensor) -> torch.Tensor:
    """Return the memory that a weight had at first."""
    return _in_place_of(weight, kept.setdefault(id(weight), weight.detach()))


def _dtype(kept: Kept, number: int, weight: torch.Tensor) -> torch.Tensor:
    """Return a weight in the dtype that it had at first."""
    return weight.to(kept.setdefault(number, weight.dtype))


def _first(kept: Kept, number: int, weight: torch.Tensor) -> Any:
    """Return the first weight that was at this place."""
    return kept.setdefault(number, weight)


def _constant(kept: Kept, number: int, weight: torch.Tensor) -> torch.Tensor:
    """Return a weight that has once required no grad without grad."""
    constant = kept[number] = kept.get(number, False) or not weight.requires_grad
    return weight.detach() if constant else weight


class Fault(NamedTuple):
    """given: what a program gets for a weight under autocast. met: by these updates alone."""

    given: Callable[[Kept, int, torch.Tensor], Any]
    met: frozenset[Update]


FAULTS: Mapping[str, Fault] = {
    "known by version and memory": Fault(
        _values(lambda w: (id(w), w._version, w.data_ptr(), w.dtype)), frozenset({"copied"})
    ),
    "known by version": Fault(
        _values(lambda w: (id(w), w._version)), frozenset({"copied", "data", "cast"})
    ),
    "first memory": Fault(_memory, frozenset({"data", "cast"})),
    "first dtype": Fault(_dtype, frozenset({"cast"})),
    "first weight": Fault(_first, frozenset({"replaced"})),
    "a constant": Fault(_constant, frozenset({"frozen"})),
}


class Keeping(EagerBackend):
    """Eager, but under autocast a program gets weights as a fault gives them."""

    fault: Fault

    def runtime(self, **more: Any) -> Runtime:
        """Return torch's autocast."""

        def driver(names: Mapping[str, Any]) -> dict[str, Any]:
            kept: Kept = {}

            def program(*inputs: torch.Tensor) -> Any:
                if not torch.is_autocast_enabled("cpu"):
                    return names["program"](*inputs)
                first, weight = inputs
                return names["program"](first, self.fault.given(kept, 1, weight))

            return {"program": program}

        return EagerBackend.runtime(self, **{"driver": driver, **more})


def keeping(name: str) -> Keeping:
    """Return a backend with a fault."""
    made = type("Keeping", (Keeping,), {"fault": FAULTS[name]})
    found: Keeping = made("cpu")
    return found


def updating(update: Update, **plan: Any) -> Case:
    """Return a case of three steps."""
    return case(_INPUTS, *_BODY, steps=3, update=update, **plan)


@pytest.mark.parametrize(
    ("update", "kept"),
    [
        ("in_place", {"address", "dtype", "requires_grad"}),
        ("copied", {"version", "address", "dtype", "requires_grad"}),
        ("data", {"version", "dtype", "requires_grad"}),
        ("cast", {"version", "requires_grad"}),
        ("frozen", {"address", "dtype"}),
    ],
)
def test_an_update_halves_a_weight_and_keeps_the_rest(update: Update, kept: set[str]) -> None:
    def state() -> dict[str, object]:
        return {
            "version": weight._version,
            "address": weight.data_ptr(),
            "dtype": weight.dtype,
            "requires_grad": weight.requires_grad,
        }

    weight = torch.ones(3, requires_grad=True)
    old, before = weight.detach(), state()  # its memory stays
    _DONE[update]([weight])
    assert weight.tolist() == [0.5] * 3
    assert {name for name, value in state().items() if value == before[name]} == kept
    assert len(old) == 3


def test_a_weight_that_is_replaced_is_another_leaf() -> None:
    weight = torch.ones(3, requires_grad=True)
    renewed: Callable[[torch.Tensor], torch.Tensor] = prelude.renewed
    made = renewed(weight)
    assert made.tolist() == [0.5] * 3
    assert weight.tolist() == [1.0] * 3
    assert made.is_leaf
    assert made.requires_grad


def test_frozen_weights_train_again_after_another_step() -> None:
    weights = [torch.ones(1, requires_grad=True) for _ in range(3)]
    _DONE["frozen"](weights)
    assert [w.requires_grad for w in weights] == [False, True, False]
    _DONE["frozen"](weights)
    assert [w.requires_grad for w in weights] == [True] * 3


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("update", UPDATES)
def test_what_is_kept_of_a_weight_shows_after_some_updates(fault: str, update: Update) -> None:
    with quiet():
        found = Judge(keeping(fault)).judge(updating(update))
    assert (found.outcome == "diverged") == (update in FAULTS[fault].met), found


def test_each_update_alone_meets_a_fault_or_shares_it() -> None:
    assert set(UPDATES) - {"in_place"} == frozenset().union(*(f.met for f in FAULTS.values()))


@pytest.mark.parametrize("loop", ["outside", "inside"])
@pytest.mark.parametrize("update", UPDATES)
def test_torch_keeps_of_a_weight_what_is_documented(update: Update, loop: str) -> None:
    """Inside one context a cast serves until it ends, for the same leaf of the same dtype."""
    with quiet():
        found = Judge(EagerBackend("cpu")).judge(updating(update, loop=loop, backward=loop))
    assert found.outcome == "agreed", found


def test_a_guard_that_forgets_dtypes_is_found_where_weights_are_cast() -> None:
    """The same graph serves weights of another dtype: `trace` gets no cast to float32."""
    one = case([x("w0", 4, 4)], call("trace", "w0"), steps=2, update="cast")
    wrong, right = judge_of(GUARDED, shipped()), judge_of(backends()["compile[aot_eager]"], ())
    with quiet():
        found = wrong.judge(one)
        honest = wrong.judge(one.with_plan(update="data")), right.judge(one)
    assert found.outcome == "diverged"
    assert found.divergence is not None
    assert (found.divergence.kind, found.divergence.where) == ("dtype", "step1.v0")
    assert [verdict.outcome for verdict in honest] == ["agreed", "agreed"]


@pytest.mark.parametrize(
    ("backend", "update", "fitted"),
    [
        ("trace", "cast", "data"),
        ("trace", "replaced", "replaced"),
        ("trace[check]", "replaced", "data"),
        ("script", "cast", "cast"),
        ("script[freeze]", "replaced", "in_place"),
        ("export", "cast", "data"),
        ("export[decomposed]", "replaced", "in_place"),
        ("privateuse1", "cast", "data"),
        ("jax", "frozen", "in_place"),
        ("compile[inductor+freezing]", "data", "in_place"),
    ],
)
def test_a_backend_gets_the_updates_that_it_can_follow(
    backend: str, update: Update, fitted: Update
) -> None:
    plan = backends()[backend].fit(updating(update)).plan
    plan.check()
    assert plan.update == fitted


def test_the_minimiser_tries_the_plain_update_and_one_step() -> None:
    one = updating("replaced", contexts=(F16,), backward="inside")
    tried = {(smaller.plan.steps, smaller.plan.update) for smaller in plans(one)}
    assert {(3, "in_place"), (2, "replaced"), (1, "in_place")} <= tried
