"""One call of an op, as shadow arithmetic sees it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from amp_fuzz.reference.shadow.band import UNIT_ROUNDOFF
from amp_fuzz.reference.shadow.copies import is_plain, resolved, tensors_in, with_tensors
from amp_fuzz.reference.shadow.exact import EXACT
from amp_fuzz.reference.shadow.ops import (
    ADDING,
    AVERAGING,
    BOUNDING,
    CASTING_REDUCTIONS,
    COPIES,
    EQUATING,
    EXPANDING,
    FACTORING,
    SCALING,
    SORTING,
    TRANSFORMS,
    UNINITIALISED,
    UPDATING,
)
from amp_fuzz.reference.shadow.products import factors
from amp_fuzz.reference.shadow.schemas import bound, draws, targets_of

__all__ = ["Call", "Facts", "facts_of"]

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Facts:
    """What the schema and the name of an op say of it.

    batched: it works element by element and writes nothing, so that all copies go in one call.
    """

    writes: bool
    view: bool
    draws: bool
    uninitialised: bool
    moves: bool
    pointwise: bool
    batched: bool
    factors: bool
    adds: bool
    expands: bool
    casts: bool
    divides: bool
    normalises: bool


@cache
def facts_of(func: Any) -> Facts:
    """Return what is known of an op."""
    aliases = [a.alias_info for a in func._schema.arguments if a.alias_info is not None]
    writes = any(alias.is_write for alias in aliases) or func in UPDATING
    name, moves = func.__name__, func in COPIES
    pointwise = torch.Tag.pointwise in func.tags
    return Facts(
        writes=writes,
        view=not writes and bool(aliases),
        draws=torch.Tag.nondeterministic_seeded in func.tags,
        uninitialised=name.partition(".")[0] in UNINITIALISED,
        moves=moves,
        pointwise=pointwise or moves,
        batched=pointwise and not moves and not writes,
        factors=name.startswith(FACTORING),
        adds=name.partition(".")[0] in ADDING,
        expands=name.partition(".")[0] in EXPANDING,
        casts=name.partition(".")[0] in CASTING_REDUCTIONS,
        divides=name in ("div.Tensor", "div_.Tensor"),
        normalises=any(part in name for part in ("batch_norm", "group_norm", "layer_norm")),
    )


class Call:
    """One call of an op: which arguments are tensors, and which of them it writes."""

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.tensors = tensors_in((args, kwargs))
        facts = facts_of(func)
        self.view, self.draws, self.uninitialised = facts.view, facts.draws, facts.uninitialised
        self.moves, self.pointwise = facts.moves, facts.pointwise
        self.factors, self.adds, self.divides = facts.factors, facts.adds, facts.divides
        self.expands = facts.expands and all(
            math.isfinite(abs(n))
            for n in tree_leaves((args, kwargs))
            if isinstance(n, float | complex)
        )
        self.normalises = facts.normalises
        self.averages = AVERAGING.get(func, 1)
        self.bounds = func in BOUNDING
        self.scales = func in SCALING and bound(func, args, kwargs)["alpha"] != 1
        self.narrow = self._narrow() if facts.casts else 0.0
        self.transforms = func in TRANSFORMS
        self.crosses = func is _aten.linalg_cross.default
        self.random = facts.draws and draws(func, args, kwargs)
        self.unstable = func in SORTING and self.tensors[0].dim() > 0
        self.unstable = self.unstable and not bound(func, args, kwargs).get("stable")
        self.equates = (
            func in EQUATING
            and len(self.tensors) == 2
            and all(t.dtype.is_floating_point for t in self.tensors)
        )
        copies = func in (_aten.clone.default, _aten._to_copy.default)
        copies = copies and kwargs.get("memory_format") in (None, torch.preserve_format)
        self.elementwise = bool(self.tensors) and (facts.batched or copies)
        self.targets = targets_of(func, args, kwargs) if facts.writes else []
        self.follows = all(is_plain(t) for t in self.tensors)

    def _narrow(self) -> float:
        """Return the roundoff of the dtype that a reduction is told; it may cast to it first."""
        dtype = bound(self.func, self.args, self.kwargs).get("dtype")
        return 0.0 if dtype is None else UNIT_ROUNDOFF.get(dtype, 0.0)

    def integral(self, results: Sequence[torch.Tensor]) -> bool:
        """Return whether the op computes a floating result of integers: float64 shows its rounding.

        Not all that do take floats in their place: a condition is a bool.
        """
        written = [self.tensors[i] for i in self.targets] or list(results)
        floats = (torch.bfloat16, torch.float16, torch.float32)
        if self.moves or not self.pointwise or not written or written[0].dtype not in floats:
            return False
        read = [t for i, t in enumerate(self.tensors) if i not in self.targets]
        if not read or any(t.dtype in UNIT_ROUNDOFF for t in read):
            return False
        try:
            found = self.on(
                self.widened([t.detach()[..., :1] if t.dim() else t.detach() for t in self.tensors])
            )
        except Exception:
            return False
        return bool(found) and found[0].dtype is torch.float64

    @property
    def factor(self) -> list[bool] | None:
        """Which tensors are factors of a matrix product or a convolution; None: it is neither."""
        return factors(self.func, self.args, self.kwargs)

    def widened(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return integers that are read as float64, and what is written too."""
        return [t.double() for t in tensors]

    def views(self, results: Sequence[torch.Tensor]) -> bool:
        """Return whether the results are the arguments' own memory, unwritten."""
        if self.targets or not results:
            return self.view
        # Some views do not say so (_unsafe_view), and some that say so copy: inference_mode brings
        # composite ops here whole, `to` and `reshape` among them.
        own = {t.untyped_storage()._cdata for t in self.tensors if not t._is_zerotensor()}
        return all(t.untyped_storage()._cdata in own for t in results if not t._is_zerotensor())

    def terms(self, result: torch.Tensor) -> int:
        """Return of how many elements one of a result is made, at most: none that is only moved."""
        if self.moves:
            return 0
        return max([4, *(t.numel() // max(result.numel(), 1) for t in self.tensors)])

    def gain(self, results: Sequence[torch.Tensor]) -> float:
        """Return how much larger a number may come out than it was inside of a kernel.

        A norm multiplies what is left of a mean by the reciprocal of a deviation, which is told
        beside it: one over the root of `eps`, where all elements are small.
        """
        if self.func is _aten.renorm.default:  # what it multiplies by may be as small
            return max(1.0, float(self.tensors[0].detach().nan_to_num().abs().amax()))
        if not self.normalises:
            return 1.0
        given = bound(self.func, self.args, self.kwargs)
        told = [given[name] for name in ("rstd", "save_invstd") if name in given]
        sizes = [t for t in (*told, *results[2:3]) if isinstance(t, torch.Tensor) and t.numel()]
        if given.get("eps"):
            return 1 / math.sqrt(given["eps"])
        return max([1.0, *(float(t.detach().nan_to_num().abs().amax()) for t in sizes)])

    def on(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run the op on other tensors and return what `written` returns, as new tensors."""
        own = list(tensors)
        for i in self.targets:
            own[i] = own[i].clone()
        turn = iter(own)
        args = [with_tensors(a, turn) for a in self.args]
        kwargs = {name: with_tensors(a, turn) for name, a in self.kwargs.items()}
        func = self.func
        floats = [t for t in own if t.dtype in UNIT_ROUNDOFF]
        if floats and all(t.dtype is torch.float64 for t in floats):
            func = EXACT.get(func, func)
        out = func(*args, **kwargs)
        return [resolved(t) for t in [*(own[i] for i in self.targets), *self._fresh(out, own)]]

    def at_once(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run an elementwise op on all copies ``[K + 1, *shape]`` in one call."""
        return self.on(self.aligned(tensors))

    def aligned(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return copies of one rank, so that they broadcast."""
        rank = max(t.dim() for t in tensors)
        return [t.reshape(len(t), *[1] * (rank - t.dim()), *t.shape[1:]) for t in tensors]

    def written(self, results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return what the op wrote: arguments in place, then the results that are new."""
        return [self.tensors[i] for i in self.targets] + self._fresh(results, self.tensors)

    def _fresh(self, out: Any, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if not self.targets:
            return tensors_in(out)
        targets = [given[i] for i in self.targets]
        return [t for t in tensors_in(out) if not any(t is g for g in targets)]
