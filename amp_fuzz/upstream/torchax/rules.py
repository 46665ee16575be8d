"""Imitations of how torchax casts ops and of the functions that it calls instead of them.

One imitation covers several bugs, because the function that replaces an op depends on all of them.
"""

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
from amp_fuzz.upstream.torchax import functions as torchax

__all__ = ["RULES", "cutting", "imitation"]

RULES = frozenset(
    {
        *torchax.QUIRKS,
        "torchax-composites",
        "torchax-float64",
        "torchax-torch-autocast",
    }
)
"""The bugs of torchax that change rules of autocast. One imitation may cover several of them."""


def imitation(names: frozenset[str]) -> Imitation:
    """Return the imitation of these bugs."""

    def changed(semantics: Semantics) -> Semantics:
        rules: dict[str, Callable[..., Any]] = {}
        if names & {"torchax-torch-autocast", "torchax-composites"}:
            rules["rule"] = _rule(names, semantics)
        if functions := names & {*torchax.QUIRKS, "torchax-composites"}:
            rules["extra"] = lambda: (*semantics.extra(), *torchax.names(functions))
            rules["call"] = _call(names, semantics)
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


def cutting(program: Callable[..., Any], case: Case) -> Callable[..., Any]:
    """Cut the autograd graph of a program where torchax does."""

    def cut(*inputs: Any) -> Any:
        with torchax.Cutting():
            return program(*inputs)

    return cut


def _rule(names: frozenset[str], semantics: Semantics) -> Callable[[Call], Treatment | None]:
    none = "torchax-torch-autocast" in names
    parts = "torchax-composites" in names

    def rule(call: Call) -> Treatment | None:
        if none or (parts and dispatch.is_composite(call.overload)):
            return None
        return semantics.rule(call)

    return rule


def _call(names: frozenset[str], semantics: Semantics) -> Callable[[Call, Treatment | None], Any]:
    parts = "torchax-composites" in names

    def call(one: Call, found: Treatment | None) -> Any:
        one.function = torchax.made(one.name, names) or one.function
        opaque = parts and one.name in torchax.OPAQUE
        if opaque or (found is None and one.function is not one.overload):
            with dispatch.exclude():
                return one.function(*one.args, **one.kwargs)
        return semantics.call(one, found)

    return call
