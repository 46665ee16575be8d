"""What a sum loses that adds one term after the other, as loops of XLA do.

Each addition rounds. Of terms that are equal all round alike for long, so that a sum of 300 of them
can be off by 30 units of its own, where one that adds by halves is off by one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from amp_fuzz.reference.shadow.schemas import bound

__all__ = ["lost"]

_aten = torch.ops.aten
# TreeReductionRewriter (xla/hlo/transforms/simplifiers/tree_reduction_rewriter.h): of longer
# dimensions windows are added first.
_WINDOW = 32


def lost(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """Return what float32 or float64 loses in a sum, a mean, or the mean of squares of a loss.

    Float64, of the shape of the result: by how much a sum in turn is larger than the exact one.
    None: another op, or terms of another dtype than these and what is computed in float32.
    """
    given = bound(func, args, kwargs)
    if func is _aten.mse_loss.default:
        x, other = given["self"], given["target"]
        if not given["reduction"] or x.shape != other.shape:
            return None
        terms, dims, averages = _float(x - other), None, given["reduction"] == 1
        terms = None if terms is None else terms * terms
    elif func in _SUMS:
        terms, dims = _float(given["self"], given.get("dtype")), given.get("dim")
        averages = func in _MEANS
    else:
        return None
    if terms is None or not terms.numel():
        return None
    over = tuple(d % terms.dim() for d in dims) if dims else tuple(range(terms.dim()))
    own = terms.detach().numpy()
    with np.errstate(all="ignore"):
        off = _in_turn(own, over) - own.sum(over, np.longdouble, keepdims=True)
    off = off.astype(np.float64)
    off = np.where(np.isfinite(off), off, 0.0)
    if averages:
        off = off / np.prod([own.shape[d] for d in over])
    return torch.from_numpy(off if given.get("keepdim") else off.squeeze(over))


_MEANS = frozenset((_aten.mean.default, _aten.mean.dim))
_SUMS = frozenset((_aten.sum.default, _aten.sum.dim_IntList)) | _MEANS


def _float(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor | None:
    """Return terms as float32, where they are added in it, or as float64."""
    wide = dtype or x.dtype
    if wide is torch.float64:
        return x.detach().to(wide)
    narrow = wide in (torch.float32, torch.bfloat16, torch.float16)
    return x.detach().to(wide).float() if narrow else None


def _in_turn(x: np.ndarray[Any, Any], over: Sequence[int]) -> np.ndarray[Any, Any]:
    """Return sums over axes, which stay with size 1, each addition rounded to the dtype."""
    while any(x.shape[d] > _WINDOW for d in over):
        sizes = {d: min(_WINDOW, x.shape[d]) for d in over}
        missing = [-n % sizes.get(d, 1) for d, n in enumerate(x.shape)]
        x = np.pad(x, [(m // 2, m - m // 2) for m in missing])
        shape = [
            part for d, n in enumerate(x.shape) for part in (n // sizes.get(d, 1), sizes.get(d, 1))
        ]
        x = _added(x.reshape(shape), [2 * d + 1 for d in range(x.ndim)])
        x = x.reshape(shape[::2])
    return _added(x, over)


def _added(x: np.ndarray[Any, Any], over: Sequence[int]) -> np.ndarray[Any, Any]:
    rest = [d for d in range(x.ndim) if d not in over]
    flat = x.transpose(*rest, *over).reshape(*(x.shape[d] for d in rest), -1)
    found = np.add.accumulate(flat, axis=-1, dtype=x.dtype)[..., -1]
    return found.reshape([1 if d in over else n for d, n in enumerate(x.shape)])
