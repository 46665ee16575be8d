"""Each transform of functions shows a fault that only programs under it can meet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, get_args

import pytest
import torch

from amp_fuzz.backends import backends, harness
from amp_fuzz.backends.harness import TRANSFORMS, quiet
from amp_fuzz.cases.build import program
from amp_fuzz.cases.case import Plan, Transform
from amp_fuzz.findings.minimize.plans import plans
from amp_fuzz.strategies.drawing import _sized
from amp_fuzz.upstream import shipped
from amp_fuzz.upstream.explain import judge_of
from tests.faults.fault import patched
from tests.helpers import call, case, eager, x

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own

NAMES: tuple[str, ...] = get_args(Transform)
# Bound here: inside the reference's contexts the public query answers for the reference.
_is_enabled: Any = torch.is_autocast_enabled
_make_dual: Any = torch.autograd.forward_ad.make_dual


def _forgetting(name: str) -> Callable[[], AbstractContextManager[None]]:
    """Return a fault: the transform runs its function without torch's autocast around it."""

    def faulty(function: Any, *given: Any, **options: Any) -> Any:
        within = torch.autocast("cpu", enabled=False)(function)
        return TRANSFORMS[name](within, *given, **options)

    return lambda: patched(harness, TRANSFORMS={**TRANSFORMS, name: faulty})


def _doubled(tensor: Any, tangent: Any, **options: Any) -> Any:
    """Return a dual tensor whose tangent is twice as large under torch's autocast."""
    return _make_dual(tensor, tangent * (2 if _is_enabled("cpu") else 1), **options)


FAULTS: Mapping[str, tuple[Callable[[], AbstractContextManager[None]], set[str]]] = {
    "functionalize": (_forgetting("functionalize"), {"functionalize"}),
    "grad": (_forgetting("grad"), {"grad", "vmap_grad"}),
    "jacfwd": (_forgetting("jacfwd"), {"jacfwd"}),
    "jacrev": (_forgetting("jacrev"), {"jacrev"}),
    "jvp": (_forgetting("jvp"), {"jvp"}),
    "vmap": (_forgetting("vmap"), {"vmap", "vmap_grad"}),
    "duals": (
        lambda: patched(torch.autograd.forward_ad, make_dual=_doubled),
        {"jvp", "forward_ad", "jacfwd"},
    ),
}
"""Each with the transforms that meet it."""


def _outcome(transform: str) -> str:
    """Return what is judged of a product and a sine under a transform inside a context."""
    body = call("mm", "x0", "w1"), call("sin", "v0", to="v1")
    example = case([x("x0", 2, 3), x("w1", 3, 2)], *body, transform=transform, backward="inside")
    with quiet():
        return judge_of(eager(), shipped()).judge(example).outcome


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_transform_is_met_by_programs_under_it_alone(fault: str) -> None:
    corrupt, expected = FAULTS[fault]
    with corrupt():
        assert {name for name in NAMES if _outcome(name) == "diverged"} == expected


@pytest.mark.parametrize("transform", NAMES)
def test_an_honest_transform_agrees(transform: str) -> None:
    assert _outcome(transform) == "agreed"


@pytest.mark.parametrize("transform", ["jvp", "jacfwd", "forward_ad"])
def test_an_op_without_a_forward_formula_raises_the_same_error_under_the_reference(
    transform: str,
) -> None:
    inputs = [x("w0", 4, 2), x("x1", 3, 2, dtype="int64", domain="index", bound=4)]
    example = case(inputs, call("embedding_bag", "w0", "x1"), transform=transform)
    with quiet():
        verdict = judge_of(eager(), shipped()).judge(example)
    assert verdict.outcome == "raised"
    assert verdict.seen is not None
    assert verdict.seen.raised is not None
    assert "Trying to use forward AD with _embedding_bag" in verdict.seen.raised.message


def test_fake_devices_are_given_the_transforms_that_they_have() -> None:
    for name in NAMES:
        one = case([x("w0", 2)], call("sin", "w0"), transform=name)
        assert backends()["fake-cuda"].fit(one).plan.transform in (
            "none",
            "grad",
            "vmap",
            "vmap_grad",
        )


@pytest.mark.parametrize(("whole", "part"), [("jvp", "forward_ad"), ("vmap_grad", "grad")])
def test_the_minimiser_tries_the_transforms_that_one_is_made_of(whole: Any, part: str) -> None:
    one = case([x("w0", 2)], call("sin", "w0"), transform=whole)
    assert part in {smaller.plan.transform for smaller in plans(one)}


def test_no_derivative_pushes_many_tangents_forward() -> None:
    few, many = (program([x("w0", size)], call("sin", "w0")) for size in (8, 800))
    made = [_sized(Plan(transform="jacfwd"), of).transform for of in (few, many)]
    assert made == ["jacfwd", "jvp"]
