"""Singular vectors are those that a backend chose, where that is to be imitated.

They are determined up to a sign, or a complex factor of size 1, which the columns of U and V share;
those that full matrices have more are any basis of what is left
(https://docs.pytorch.org/docs/stable/generated/torch.linalg.svd.html). What a backend chose is read
from its values. Only the choice is taken from there: values, gradients, and whether U and V agree
on it, are compared as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["decomposed", "linalg_svd", "observing", "svd"]

_observed: tuple[torch.Tensor, ...] = ()  # in every thread, as the bugs that are imitated

# A vector that is nearer than that to another one, but for what is free, is that one.
_NEAR = 0.01


@contextmanager
def observing(values: Iterable[torch.Tensor | None]) -> Iterator[None]:
    """Take the choice of singular vectors from these values for a block, in every thread."""
    global _observed
    before = _observed
    _observed = tuple(v for v in values if v is not None and v.dim() >= 2)
    try:
        yield
    finally:
        _observed = before


def decomposed(
    plain: Callable[..., Any],
    x: torch.Tensor,
    full_matrices: bool = False,
    compute_uv: bool = True,
    **how: Any,
) -> Any:
    """Return what ``aten::_linalg_svd`` does, with the vectors that were chosen; x: (..., m, n)."""
    u, s, vh = plain(x, full_matrices, compute_uv, **how)
    if not compute_uv:
        return u, s, vh
    u, v = _chosen(u, vh.mH, s.shape[-1])
    return u, s, v.mH


def linalg_svd(
    plain: Callable[..., Any], x: torch.Tensor, full_matrices: bool = True, **how: Any
) -> Any:
    """Return what `torch.linalg.svd` does, with the vectors that were chosen."""
    u, s, vh = plain(x, full_matrices, **how)
    u, v = _chosen(u, vh.mH, s.shape[-1])
    return u, s, v.mH


def svd(
    plain: Callable[..., Any], x: torch.Tensor, some: bool = True, compute_uv: bool = True
) -> Any:
    """Return what `torch.svd` does, which gives V, with the vectors that were chosen."""
    u, s, v = plain(x, some, compute_uv)
    if compute_uv:
        u, v = _chosen(u, v, s.shape[-1])
    return u, s, v


def _chosen(u: torch.Tensor, v: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return U and V with so many pairs of columns as they were chosen, and a basis of the rest."""
    with torch.no_grad():
        (left, of_u), (right, of_v) = (_match(vectors, count) for vectors in (u, v))
        # U says what both have; V where nobody saw U.
        phases = torch.where(left == 0, right, left)
        phases = torch.where(phases == 0, torch.ones_like(phases), phases).unsqueeze(-2)
        rest = _turned(u[..., count:], of_u), _turned(v[..., count:], of_v)
    made = [torch.cat([x[..., :count] * phases, r], -1) for x, r in zip((u, v), rest, strict=True)]
    return made[0], made[1]


def _match(vectors: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the phases, (..., count), of what was observed of columns, and the others' values.

    A phase is 0 where no such column was observed.
    """
    own = vectors[..., :count]
    best, others = torch.zeros_like(own[..., 0, :]), None
    for value in _observed:
        for seen in (value, value.mH):
            if seen.shape != vectors.shape or seen.dtype != vectors.dtype:
                continue
            phases = (own.conj() * seen[..., :count]).sum(-2).sgn()
            near = (own * phases.unsqueeze(-2) - seen[..., :count]).abs().amax(-2) < _NEAR
            phases = torch.where(near, phases, torch.zeros_like(phases))
            if phases.count_nonzero() > best.count_nonzero():
                best, others = phases, seen[..., count:]
    return best, others


def _turned(basis: torch.Tensor, seen: torch.Tensor | None) -> torch.Tensor:
    """Return the orthonormal basis of the same space, (..., n, r), that is nearest to what is seen.

    That is the basis itself where the other one is of another space.
    """
    if seen is None or not basis.shape[-1]:
        return basis
    u, _, vh = torch.linalg.svd(basis.mH @ seen)
    turned = basis @ (u @ vh)
    near = (turned - seen).abs().amax((-2, -1), keepdim=True) < _NEAR
    return torch.where(near, turned, basis)
