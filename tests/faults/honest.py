"""Kernels that are right but not torch's: what no oracle of an inexact backend may object to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from tests.faults.corrupted import WrongKernels

__all__ = ["Accurate", "Reordered"]

_NARROW = (torch.float32, torch.bfloat16, torch.float16)


class Accurate(TorchDispatchMode):
    """Computes every op in float64 and rounds its results once, to the dtypes that torch has.

    Torch's own kernel runs first: what writes in place, returns a view, is random, gives no
    floating result or does not run in float64 is left to it.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an op twice."""
        kwargs = dict(kwargs or {})
        out = func(*args, **kwargs)
        seeded = torch.Tag.nondeterministic_seeded in func.tags
        if seeded or any(a.alias_info is not None for a in func._schema.arguments):
            return out
        leaves, tree = tree_flatten((args, kwargs))
        if not any(isinstance(v, torch.Tensor) and v.dtype in _NARROW for v in leaves):
            return out
        wide_args, wide_kwargs = tree_unflatten([_wide(v) for v in leaves], tree)
        results, shape = tree_flatten(out)
        if any(_shares(r, leaves) for r in results):
            return out
        try:
            with torch._C._DisableAutocast():
                wide = tree_leaves(func(*wide_args, **wide_kwargs))
        except Exception:  # no float64 kernel for this op
            return out
        return tree_unflatten([_rounded(w, r) for w, r in zip(wide, results, strict=True)], shape)


def _wide(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.double() if value.dtype in _NARROW else value
    return torch.float64 if value in _NARROW else value


def _shares(result: Any, given: list[Any]) -> bool:
    """Return whether a result is an argument's memory, unsafe views included."""
    if not isinstance(result, torch.Tensor) or result.layout is not torch.strided:
        return True
    own = result.untyped_storage()._cdata
    tensors = (g for g in given if isinstance(g, torch.Tensor) and g.layout is torch.strided)
    return any(t.untyped_storage()._cdata == own for t in tensors)


def _rounded(wide: Any, plain: Any) -> Any:
    alike = isinstance(plain, torch.Tensor) and plain.dtype in _NARROW
    if not alike or wide.shape != plain.shape or wide.dtype is not torch.float64:
        return plain
    made = torch.empty_like(plain)
    made.copy_(wide)
    return made


def _product(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Multiply matrices with the inner dimension backwards."""
    *rest, a, b = args
    return op(*rest, a.flip(-1), b.flip(-2), **kwargs)


def _total(op: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Reduce a tensor that is backwards along every dimension."""
    return op(x.flip(tuple(_reduced(x, args))), *args, **kwargs)


def _reduced(x: torch.Tensor, args: Any) -> Iterator[int]:
    dims = args[0] if args and isinstance(args[0], (list, tuple)) and args[0] else range(x.dim())
    return iter(dims)


class Reordered(WrongKernels):
    """Adds up backwards, in products of matrices, sums and means."""

    def __init__(self) -> None:
        products = dict.fromkeys(("mm", "bmm", "addmm", "baddbmm"), _product)
        totals = dict.fromkeys(("sum.dim_IntList", "mean.dim"), _total)
        kernels = {f"aten.{n}.default": k for n, k in products.items()}
        kernels |= {"aten.sum.default": _total, "aten.mean.default": _total}
        super().__init__(kernels | {f"aten.{n}": k for n, k in totals.items()})
