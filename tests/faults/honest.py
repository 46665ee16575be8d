"""Kernels that are right but not torch's: what no oracle of an inexact backend may object to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from tests.faults.corrupted import Kernel, own, wrong_kernels

__all__ = ["Accurate", "reordered"]

_NARROW = (torch.float32, torch.bfloat16, torch.float16)


class Accurate:
    """Kernels that compute in float64 and round their results once, to the dtypes that torch has.

    Torch's own kernel runs first: what writes in place, returns a view, is random, gives no
    floating result or does not run in float64 is left to it. Calling the instance gives a context
    in which the kernels are these; they stay registered after it, as torch's own again.

    names: the ops, as in ``aten.mm.default``.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.active = False
        self.refused: dict[str, str] = {}
        self.library = torch.library.Library("aten", "IMPL")
        for name in sorted(filter(_computes, names)):
            self.library.impl(name[5:].removesuffix(".default"), self._entry(own(name)), "CPU")

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Compute in float64 for a block."""
        self.active = True
        try:
            yield
        finally:
            self.active = False

    def close(self) -> None:
        """Put torch's kernels back."""
        self.library._destroy()

    def _entry(self, op: Kernel) -> Callable[..., Any]:
        def entry(*args: Any, **kwargs: Any) -> Any:
            return self._run(op, args, kwargs) if self.active else op(*args, **kwargs)

        return entry

    def _run(self, op: Kernel, args: Any, kwargs: Any) -> Any:
        leaves, tree = tree_flatten((args, kwargs))
        self.active = False  # what the kernel calls inside is torch's own
        try:
            out = op(*args, **kwargs)
            results, shape = tree_flatten(out)
            narrow = any(isinstance(v, torch.Tensor) and v.dtype in _NARROW for v in leaves)
            if not narrow or any(_shares(r, leaves) for r in results):
                return out
            wide_args, wide_kwargs = tree_unflatten([_wide(v) for v in leaves], tree)
            try:
                wide = tree_leaves(op(*wide_args, **wide_kwargs))
            except Exception as error:  # no float64 kernel for these arguments
                self.refused[op.name] = f"{type(error).__name__}: {error}".splitlines()[0]
                return out
        finally:
            self.active = True
        rounded = [_rounded(w, r) for w, r in zip(wide, results, strict=True)]
        return tree_unflatten(rounded, shape)


def _computes(name: str) -> bool:
    """Return whether an op has a kernel here, makes its results anew and draws no numbers."""
    _, packet, overload = name.split(".")
    op = getattr(getattr(torch.ops.aten, packet), overload)
    if torch.Tag.nondeterministic_seeded in op.tags:
        return False
    if any(a.alias_info is not None for a in op._schema.arguments):
        return False
    qualified = f"aten::{name[5:].removesuffix('.default')}"
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(qualified, "CPU"))


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
    if not isinstance(plain, torch.Tensor) or wide.shape != plain.shape:
        return plain
    if plain.dtype not in _NARROW:  # pivots and indices go with the values of the same kernel
        return wide if wide.dtype is plain.dtype else plain
    if wide.dtype is not torch.float64:
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


_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm")
_TOTALS = ("sum.dim_IntList", "sum.default", "mean.dim", "mean.default")


def reordered() -> AbstractContextManager[None]:
    """Return a context in which products of matrices, sums and means add up backwards."""
    kernels = {f"aten.{name}.default": _product for name in _PRODUCTS}
    return wrong_kernels(kernels | {f"aten.{name}": _total for name in _TOTALS})
