"""What the schema of an op says of a call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

__all__ = ["bound", "draws"]


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
