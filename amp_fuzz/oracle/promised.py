"""What a verdict's case could have falsified of what torch's documents promise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from amp_fuzz.backends.harness import Observation
from amp_fuzz.cases.case import Case
from amp_fuzz.cases.program import statements
from amp_fuzz.catalogue import CATALOGUE
from amp_fuzz.policies.tables import load_table
from amp_fuzz.records.facts import Reached, Seen, facts, listed
from amp_fuzz.records.promises import promises
from amp_fuzz.records.schema import Outcome
from amp_fuzz.reference import KernelCall

__all__ = ["falsifiable"]


def falsifiable(
    case: Case,
    device: str,
    implements: Sequence[str],
    outcome: Outcome,
    seen: Observation,
    kernels: Sequence[KernelCall],
) -> tuple[str, ...]:
    """Return the ids of the promises that a case could have falsified.

    Of a case that diverged only the kernels at which it did were compared. kernels: these, or all
    that the reference reached. seen: what the reference did. implements: see
    `amp_fuzz.backends.base.Facts`.
    """
    reached = [_reached(kernel) for kernel in kernels]
    ops = {s.op for s in statements(case.program.body)}
    if outcome not in ("agreed", "raised"):
        return promises().falsifiable(frozenset(listed(reached, ops)))
    known = Seen(
        case,
        device,
        implements,
        reached,
        {op: _ruled(op, device) for op in ops},
        _dtypes(case, seen),
        raised=outcome == "raised",
        random=any(op in CATALOGUE and CATALOGUE[op].random for op in ops),
        overflow=case.plan.scaler and _overflows(seen),
    )
    return promises().falsifiable(facts(known))


def _reached(kernel: KernelCall) -> Reached:
    casts = tuple((c.source, _name(c.old), _name(c.new), c.cached) for c in kernel.casts)
    dtypes = tuple(map(_name, kernel.dtypes))
    policy = kernel.policy.value
    return Reached(kernel.device, kernel.overload, policy, dtypes, casts, kernel.sets_dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _ruled(op: str, device: str) -> Mapping[str, str]:
    """Return the policies of the kernels that an op may reach on a device, by overload."""
    rules = load_table(device).rules
    entry = CATALOGUE.get(op)
    names = [name.removeprefix("aten::") for name in entry.overloads] if entry else []
    return {name: rules[name].policy.value for name in names if name in rules}


def _dtypes(case: Case, seen: Observation) -> dict[str, str]:
    """Return the dtypes of inputs, and of values that were observed in the first call, by name."""
    found = {spec.name: spec.dtype for spec in case.program.inputs}
    for label, value in seen.values.items():
        name = label.rpartition(".")[2]
        if value is not None and name[:1] == "v" and name[1:].isdigit():
            found.setdefault(name, _name(value.dtype))
    return found


def _overflows(seen: Observation) -> bool:
    grads = (value for label, value in seen.values.items() if label.endswith(".grad"))
    return any(g is not None and not bool(torch.isfinite(g).all()) for g in grads)
