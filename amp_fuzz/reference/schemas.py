"""What the schemas of ops say: of one of their calls, and which there are."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from amp_fuzz.reference.tables import PolicyTable, PolicyTableError, all_overloads

__all__ = ["bound", "check_ops", "draws"]


def check_ops(table: PolicyTable, file: str) -> None:
    """Raise `PolicyTableError` for an op of a table that this torch does not have.

    Only of torch's own: a library of a vendor's may not be loaded yet. file: where the table is.
    """
    for rule in table.rules.values():
        for op in filter(None, (rule.overload, rule.redispatch)):
            name, _, overload = op.partition(".")
            there = [o.removeprefix("default") for o in _overloads(name)]
            if "::" in op or overload in there:
                continue
            others = [f"{name}.{o}".removesuffix(".") for o in there]
            others = others or sorted(all_overloads())
            near = difflib.get_close_matches(op, others, n=1)
            way_out = f"did you mean {near[0]!r}?" if near else "write it as in 'sum.dim_IntList'"
            place = f"{rule.policy}, {rule.versions}"
            problem = f"torch {table.torch_version} has no op {op!r}; {way_out}"
            raise PolicyTableError(file, place, problem)


def _overloads(name: str) -> Sequence[str]:
    """Return the overloads of one of torch's ops, or () if there is none of the name."""
    try:
        packet = getattr(torch.ops.aten, name)
    except AttributeError:
        return ()
    found: Sequence[str] = packet.overloads()
    return found


def bound(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name, those that are not given too."""
    arguments = func._schema.arguments
    defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
    return {**defaults, **{a.name: v for a, v in zip(arguments, args, strict=False)}, **kwargs}


def draws(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call draws: not with a probability of 0, nor where nothing is trained.

    The dispatcher leaves out arguments that are the default: attention without ``dropout_p`` is
    tagged as random, and draws nothing.
    """
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    given = bound(func, args, kwargs)
    if any(given.get(name) is False for name in ("training", "train")):
        return False
    chances = [given.get(name) for name in ("p", "dropout_p", "dropout")]  # or a tensor of them
    return not any(isinstance(chance, int | float) and chance == 0 for chance in chances)
