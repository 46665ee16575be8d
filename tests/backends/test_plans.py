"""Every plan means on a compiler what it means in eager: one suite over all of them."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from amp_fuzz.backends import backends
from amp_fuzz.backends.harness import quiet
from amp_fuzz.cases.case import Update
from amp_fuzz.cases.program import Around, Autocast, AutocastDType, NoGrad
from amp_fuzz.upstream import shipped
from amp_fuzz.upstream.explain import judge_of
from tests.helpers import BF16, F16, brief, call, case, needs_torch, x

EXPORTS = ("export", "export[decomposed]", "export[strict]")
BACKENDS = ("compile[aot_eager]", "script", "trace", *EXPORTS)
LATERS: tuple[tuple[Around, ...], ...] = (
    (F16,),
    (),
    (Autocast(enabled=False),),
    (NoGrad(), BF16),
    (AutocastDType("float16"), Autocast()),
)
PLANS: tuple[dict[str, Any], ...] = (
    {},
    {"contexts": ()},
    {"contexts": (F16,)},
    {"entry": "decorator"},
    {"entry": "custom_fwd"},
    {"entry": "cast_inputs"},
    {"entry": "register_autocast"},
    {"entry": "register_autocast", "backward": "inside"},
    {"entry": "register_autocast", "calls": 2},
    {"entry": "register_autocast", "contexts": (BF16, Autocast(enabled=False))},
    {"entry": "custom_op", "contexts": (Autocast(enabled=False),)},
    {"entry": "custom_op", "contexts": (Autocast(enabled=False),), "second": "retain"},
    {"backward": "none"},
    {"backward": "inside"},
    {"backward": "under", "backward_context": F16},
    {"backward": "under", "backward_context": Autocast(enabled=False)},
    {"second": "retain"},
    {"second": "double"},
    {"steps": 2},
    *({"steps": 3, "update": update} for update in get_args(Update)),
    {"steps": 2, "update": "frozen", "backward": "under", "backward_context": F16},
    {"calls": 2},
    {"micro_batches": 2},
    {"micro_batches": 2, "loop": "inside", "backward": "inside"},
    {"micro_batches": 2, "scaler": True, "steps": 2},
    {"hook": "tensor"},
    {"hook": "tensor", "backward": "under", "backward_context": F16},
    {"hook": "accumulated"},
    {"hook": "accumulated", "backward": "inside", "micro_batches": 2},
    {"scaler": True},
    {"checkpoint": "reentrant"},
    {"checkpoint": "non_reentrant"},
    {"checkpoint": "selective"},
    {"checkpoint": "selective", "backward": "inside"},
    {"first_pass": "no_grad"},
    {"first_pass": "inference_mode"},
    {"interrupted": True},
    {"thread": "inside"},
    {"thread": "whole"},
    {"transform": "grad"},
    {"saved": True},
    {"saved": True, "entry": "decorator", "backward": "inside"},
    {"saved": True, "entry": "custom_op", "contexts": (Autocast(enabled=False),)},
    {"saved": True, "steps": 2, "update": "replaced", "loop": "inside", "backward": "inside"},
    *({"later": (around,), "reuse": reuse} for reuse in ("calls", "graph") for around in LATERS),
    {"later": LATERS, "backward": "none"},
)
FEW: tuple[dict[str, Any], ...] = (
    {},
    {"entry": "custom_op", "contexts": (Autocast(enabled=False),)},
    {"backward": "under", "backward_context": F16},
    {"saved": True},
    {"later": ((F16,),), "reuse": "graph"},
)
"""Plans of the first tier."""


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("plan", brief(PLANS, *FEW), ids=str)
def test_plans_mean_what_they_mean_in_eager(backend: str, plan: dict[str, Any]) -> None:
    if backend.startswith("compile") and plan.get("entry") == "register_autocast":
        needs_torch(">=2.9")  # before, it cannot be told which autocast is around the backward
    body = call("mm", "x0", "w1"), call("softmax", "v0", -1, to="v1")
    example = case([x("x0", 6, 8), x("w1", 8, 6)], *body, **plan)
    with quiet():
        verdict = judge_of(backends()[backend], shipped()).judge(example)
    assert verdict.outcome == "agreed", verdict.divergence


@pytest.mark.parametrize(
    ("backend", "reuse", "fitted"),
    [
        ("compile[aot_eager]", "region", {"reuse": "region", "backward": "outside"}),
        ("compile[eager]", "region", {"reuse": "graph"}),
        ("compile[aot_eager+default]", "graph", {"reuse": "graph", "backward": "outside"}),
        ("compile[aot_eager+default]", "calls", {"reuse": "calls", "backward": "none"}),
        ("compile[inductor+freezing]", "graph", {"reuse": "calls", "backward": "none"}),
        ("export", "graph", {"reuse": "calls", "later": ()}),
        ("script", "graph", {"reuse": "calls", "later": ()}),
    ],
)
def test_a_backend_gets_the_later_calls_that_it_can_make(
    backend: str, reuse: str, fitted: dict[str, Any]
) -> None:
    needs_torch(">=2.9")
    example = case([x("w0", 2, 2)], call("mm", "w0", "w0"), later=((F16,),), reuse=reuse)
    plan = backends()[backend].fit(example).plan
    plan.check()
    assert {name: getattr(plan, name) for name in fitted} == fitted
