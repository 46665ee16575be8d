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

__all__ = ["CONTROLS", "EQUIVALENT", "FAULTS", "POLICY", "SEMANTIC", "Fault"]

_ALWAYS = ("lower_precision_fp", "fp32", "promote", "none", "banned")


def _sensible(name: str) -> tuple[str, ...]:
    """Return the policies that an op could have been given, its own among them.

    ``fp32_set_opt_dtype`` needs an optional ``dtype`` to set, ``fp32_append_dtype`` a twin overload
    that takes the same arguments and then a dtype: no op of the CPU table has one.
    """
    own = overload_of(name)._schema.arguments  # type: ignore[union-attr]
    sets = any(a.name == "dtype" and isinstance(a.type, torch.OptionalType) for a in own)
    types = [(a.name, str(a.type)) for a in own]
    packet = getattr(torch.ops.aten, name.partition(".")[0])
    twins = [getattr(packet, other)._schema.arguments for other in packet.overloads()]
    appends = any(
        [(a.name, str(a.type)) for a in twin[:-1]] == types and twin[-1].name == "dtype"
        for twin in twins
    )
    more = ["fp32_set_opt_dtype"] * sets + ["fp32_append_dtype"] * appends
    return (*_ALWAYS, *more)


def _policy_fault(name: str, own: str, policy: str) -> Fault:
    title = f"{name}:{policy}"

    def corrupt() -> AbstractContextManager[None]:
        return installed(Wrapper(), {name: policy})

    what = f"{name} has policy {policy} instead of {own}"
    return Fault(title, what, (), corrupt, op=name, equivalent=EQUIVALENT.get(title, ""))


def _policy_faults() -> list[Fault]:
    return [
        _policy_fault(name, own, policy)
        for name, own in POLICIES.items()
        if overload_of(name) is not None  # else a rule for another version of torch
        for policy in _sensible(name)
        if policy != own
    ]


# Faults that no program can tell from honest autocast, each with its proof.
EQUIVALENT: Mapping[str, str] = {}

SEMANTIC: Mapping[str, Fault] = {f.name: f for f in (*casts.FAULTS, *contexts.FAULTS)}
POLICY: Mapping[str, Fault] = {f.name: f for f in _policy_faults()}
FAULTS: Mapping[str, Fault] = {**SEMANTIC, **POLICY}
# Honest kernels in Python: whatever is found under one of these is a mistake of the faults.
CONTROLS: Mapping[str, Fault] = {f.name: f for f in casts.CONTROLS}
