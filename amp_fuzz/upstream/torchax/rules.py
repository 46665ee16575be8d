"""Imitations of how torchax's autocast treats ops, as one, since the bugs change the same rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from amp_fuzz import reference
from amp_fuzz.backends.imitation import Imitation
from amp_fuzz.cases.case import Case
from amp_fuzz.reference import dispatch
from amp_fuzz.reference.calls import Call, Treatment
from amp_fuzz.reference.casts import device_of
from amp_fuzz.reference.semantics import Semantics

__all__ = ["RULES", "imitation"]

RULES = frozenset({"torchax-composites", "torchax-float64", "torchax-torch-autocast"})
"""The bugs of torchax that change rules of autocast. One imitation may cover several of them."""

OPAQUE = (
    "cdist",
    "corrcoef",
    "einsum",
    "linalg_matrix_power",
    "linalg_pinv.atol_rtol_tensor",
    "linalg_solve",
    "linalg_svd",
    "linalg_tensorsolve",
    "linear",
    "lu_solve",
    "pad",
    "svd",
)
"""Ops that torchax 0.0.13 implements as torch functions, without decomposing them.

Source: torchax/ops/jtorch.py.
"""


def imitation(names: frozenset[str]) -> Imitation:
    """Return the imitation of these bugs."""

    def changed(semantics: Semantics) -> Semantics:
        rules: dict[str, Callable[..., Any]] = {}
        if names & {"torchax-torch-autocast", "torchax-composites"}:
            rules["rule"] = _rule(names, semantics)
        if "torchax-composites" in names:
            rules["extra"] = lambda: (*semantics.extra(), *OPAQUE)
            rules["call"] = _call(semantics)
        if "torchax-float64" in names:
            rules["eligible"] = lambda tensor, device: (
                semantics.eligible(tensor, device)
                or (tensor.dtype is torch.float64 and device_of(tensor) == device)
            )
        return replace(semantics, **rules)

    return Imitation(semantics=changed, wrap=_intercepted)


def _intercepted(program: Callable[..., Any], case: Case) -> Callable[..., Any]:
    """Let the reference intercept ops outside autocast contexts, too."""

    def intercepted(*inputs: Any) -> Any:
        with reference.intercepting():
            return program(*inputs)

    return intercepted


def _rule(names: frozenset[str], semantics: Semantics) -> Callable[[Call], Treatment | None]:
    none = "torchax-torch-autocast" in names
    parts = "torchax-composites" in names

    def rule(call: Call) -> Treatment | None:
        if none or (parts and dispatch.is_composite(call.overload)):
            return None
        return semantics.rule(call)

    return rule


def _call(semantics: Semantics) -> Callable[[Call, Treatment | None], Any]:
    def call(one: Call, found: Treatment | None) -> Any:
        if one.name in OPAQUE:
            with dispatch.exclude():
                return one.function(*one.args, **one.kwargs)
        return semantics.call(one, found)

    return call
