"""What the schema of an op says of a call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from amp_fuzz.reference.shadow.copies import tensors_in
from amp_fuzz.reference.shadow.ops import UPDATING

__all__ = ["bound", "draws", "targets_of"]


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


def targets_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[int]:
    """Return the numbers, among the tensors of a call, of those that the op writes.

    By position: an argument that is also read elsewhere (``x.mul_(x)``) is written here only.
    """
    arguments = func._schema.arguments
    writes = {a.name for a in arguments if a.alias_info and a.alias_info.is_write}
    given = [*zip([a.name for a in arguments], args, strict=False), *kwargs.items()]
    if func in UPDATING and dict(given).get("training"):
        writes |= {"running_mean", "running_var"}
    found: list[int] = []
    number = 0
    for name, argument in given:
        count = len(tensors_in(argument))
        if name in writes:
            found += range(number, number + count)
        number += count
    return found
