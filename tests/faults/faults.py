"""The library of faults: ways to corrupt torch's autocast, each a context manager over real torch.

`POLICY` gives every op of the CPU table every other policy that its schema allows. `SEMANTIC` gets
one rule of autocast wrong each: casts and the weight cache (`casts`), contexts, threads,
checkpoints and backward passes (`contexts`).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager

import torch

from tests.faults import casts, contexts
from tests.faults.fault import Fault
from tests.faults.wrapper import POLICIES, Wrapper, installed, overload_of

__all__ = ["CONTROLS", "FAULTS", "POLICY", "SEMANTIC", "Fault"]

_ALWAYS = ("lower_precision_fp", "fp32", "promote", "none", "banned")


def _sensible(name: str) -> tuple[str, ...]:
    """Return the policies that an op could have been given, its own among them."""
    parameters = overload_of(name)._schema.arguments  # type: ignore[union-attr]
    optional = torch.OptionalType.ofTensor().__class__
    more = [
        "fp32_set_opt_dtype"
        for p in parameters
        # An optional ScalarType: the schema's type says "Optional[int]", its real type the rest.
        if p.name == "dtype" and isinstance(p.type, optional)
    ]
    more += ["fp32_append_dtype"] if _appends(name) else []
    return (*_ALWAYS, *more)


def _appends(name: str) -> bool:
    """Return whether an op has a twin overload that takes the same arguments and then a dtype."""
    own = [(a.name, str(a.type)) for a in overload_of(name)._schema.arguments]  # type: ignore[union-attr]
    packet = getattr(torch.ops.aten, name.partition(".")[0])
    for other in packet.overloads():
        theirs = [(a.name, str(a.type)) for a in getattr(packet, other)._schema.arguments]
        if theirs[:-1] == own and theirs[-1][0] == "dtype":
            return True
    return False


def _given(name: str, policy: str) -> AbstractContextManager[None]:
    return installed(Wrapper(), {name: policy})


def _policy_faults() -> Mapping[str, Fault]:
    faults = {}
    for name, own in POLICIES.items():
        if overload_of(name) is None:
            continue  # a rule for another version of torch
        for policy in _sensible(name):
            if policy == own:
                continue
            title = f"{name}:{policy}"
            faults[title] = Fault(
                title,
                f"{name} has policy {policy} instead of {own}",
                (),
                lambda name=name, policy=policy: _given(name, policy),
                op=name,
                equivalent=EQUIVALENT.get(title, ""),
            )
    return faults


# Faults that no program can tell from honest autocast, each with its proof.
EQUIVALENT: Mapping[str, str] = {}

SEMANTIC: Mapping[str, Fault] = {f.name: f for f in (*casts.FAULTS, *contexts.FAULTS)}
POLICY: Mapping[str, Fault] = _policy_faults()
FAULTS: Mapping[str, Fault] = {**SEMANTIC, **POLICY}
# Honest kernels in Python: whatever is found under one of these is a mistake of the faults.
CONTROLS: Mapping[str, Fault] = {f.name: f for f in casts.CONTROLS}
