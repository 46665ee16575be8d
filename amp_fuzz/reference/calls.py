"""What reaches a kernel of the reference, and what is said of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

from amp_fuzz.policies.tables import Policy, Rule

if TYPE_CHECKING:
    from amp_fuzz.reference.state import State

__all__ = ["Call", "Cast", "KernelCall", "Supposed", "Treatment"]

Supposed: TypeAlias = Policy | torch.dtype | None
"""What an op is supposed to have: a policy, the dtype of `Policy.CAST_INPUTS`, or none."""


@dataclass(slots=True, eq=False)
class Call:
    """One call of an op, where autocast decides about it.

    name: of the overload, without ``aten::``. function: what is called with the casts: the
    overload. tensors: those among the arguments, in order. onward: makes the call as it is made
    without autocast, by the keys of the dispatch.
    """

    name: str
    overload: Any
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: list[torch.Tensor]
    state: State
    onward: Callable[[Call], Any]
    keyset: Any


class Treatment(NamedTuple):
    """Whose autocast handles a call, and by which rule."""

    device: str
    rule: Rule


class Cast(NamedTuple):
    """One cast that the reference made: which tensor (by `id`), from and to which dtype."""

    source: int
    old: torch.dtype
    new: torch.dtype
    cached: bool = False


class KernelCall(NamedTuple):
    """One call that reached an autocast kernel of the reference.

    overload: without ``aten::``. policy: its policy. dtypes: of its tensor arguments, in order.
    casts: those that were made. sets_dtype: whether it set the op's ``dtype=`` instead of casting.
    """

    device: str
    overload: str
    policy: Policy
    dtypes: tuple[torch.dtype, ...]
    casts: tuple[Cast, ...]
    sets_dtype: bool = False
