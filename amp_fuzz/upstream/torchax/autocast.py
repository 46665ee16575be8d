"""What torchax decides about the ops that autocast would cast, and what it calls in their place.

The page is docs/findings/torchax.md. `amp_fuzz.backends.imitations.torchax` has what is called in
place of an op, `amp_fuzz.backends.torchax.backend` the part of these bugs that is the backend's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from amp_fuzz.backends.imitation import Imitation
from amp_fuzz.backends.imitations import torchax
from amp_fuzz.backends.imitations.xla import note
from amp_fuzz.reference import dispatch
from amp_fuzz.reference.autocast import Snapshot
from amp_fuzz.reference.calls import Call, Treatment
from amp_fuzz.reference.casts import device_of
from amp_fuzz.reference.semantics import Semantics
from amp_fuzz.reference.tables import Policy

__all__ = ["RULES", "imitation"]

RULES = frozenset(
    {
        *torchax.QUIRKS,
        "torchax-backward-dtypes",
        "torchax-checkpoint",
        "torchax-composites",
        "torchax-float64",
        "torchax-torch-autocast",
    }
)
"""The bugs of torchax that are other rules of autocast. Several of them are one imitation."""


def imitation(names: frozenset[str]) -> Imitation:
    """Return what the reference does otherwise while it imitates these bugs."""

    def changed(semantics: Semantics) -> Semantics:
        rules: dict[str, Callable[..., Any]] = {}
        if names & {"torchax-torch-autocast", "torchax-composites", "torchax-backward-dtypes"}:
            rules["rule"] = _rule(names, semantics)
        if functions := names & {*torchax.QUIRKS, "torchax-composites"}:
            rules["extra"] = lambda: (*semantics.extra(), *torchax.names(functions))
        if functions or "torchax-backward-dtypes" in names:
            rules["call"] = _call(names, semantics)
        if "torchax-float64" in names:
            rules["eligible"] = lambda tensor, device: (
                semantics.eligible(tensor, device)
                or (tensor.dtype is torch.float64 and device_of(tensor) == device)
            )
        if "torchax-checkpoint" in names:
            rules["recomputed"] = _recomputed
        return replace(semantics, **rules)

    return Imitation(semantics=changed)


def _rule(names: frozenset[str], semantics: Semantics) -> Callable[[Call], Treatment | None]:
    none = "torchax-torch-autocast" in names
    parts = "torchax-composites" in names
    products = "torchax-backward-dtypes" in names

    def rule(call: Call) -> Treatment | None:
        if none or (parts and dispatch.is_composite(call.overload)):
            return None
        if products and call.name == "matmul":
            return None  # a product of those that it is made of
        return semantics.rule(call)

    return rule


def _call(names: frozenset[str], semantics: Semantics) -> Callable[[Call, Treatment | None], Any]:
    parts = "torchax-composites" in names
    products = "torchax-backward-dtypes" in names

    def call(one: Call, found: Treatment | None) -> Any:
        name, args, kwargs = one.name, one.args, one.kwargs
        one.function = torchax.made(name, names) or one.function
        if parts:
            if name in torchax.OPAQUE and not torchax.is_opaque(name):
                one.function = one.overload
            apart = torchax.TAKEN_APART.get(name)
            if apart and (made := apart(*args, **kwargs)) is not NotImplemented:
                return made
        opaque = parts and torchax.is_opaque(name)
        if opaque or (found is None and one.function is not one.overload):
            with dispatch.exclude():
                return one.function(*args, **kwargs)
        lower = found is not None and found.rule.policy is Policy.LOWER_PRECISION_FP
        if products and lower and torchax.is_product(name, args):
            with dispatch.exclude():
                with torch.no_grad():
                    made = semantics.call(one, found)
                return torchax.differentiated(name, made, args, kwargs)
        return semantics.call(one, found)

    return call


@contextmanager
def _recomputed(forward: Snapshot) -> Iterator[None]:
    """Compute a checkpoint again under whatever surrounds the backward pass."""
    note(["checkpoint"])
    yield
