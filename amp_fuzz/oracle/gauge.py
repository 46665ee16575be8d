"""What a decomposition leaves free is taken from the backend: it is no divergence.

Singular vectors are determined up to a sign, or a complex factor of size 1, which a column of U
shares with that of V. Those of equal singular values are determined up to a rotation, which U and V
share. Those of 0, and those that full matrices have more, are any basis of what is left, of U and
of V (https://docs.pytorch.org/docs/stable/generated/torch.linalg.svd.html).

A backend with other kernels may choose otherwise. The reference then makes the choice that was
observed. Only the choice is taken: values, gradients, and whether U and V agree on it, are compared
as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch

from amp_fuzz.backends import imitation
from amp_fuzz.backends.imitation import Imitation
from amp_fuzz.cases.program import Program, statements

__all__ = ["Pair", "decomposed", "decomposes", "observing", "pairs", "taking"]

_DECOMPOSITIONS = ("linalg.svd", "svd")  # in the catalogue; they return U, S, and V or its adjoint

Pair: TypeAlias = tuple[torch.Tensor | None, torch.Tensor | None]
"""U, and V or its adjoint, as one call returned them; None for what was not seen."""

_observed: tuple[Pair, ...] = ()  # in every thread

# Vectors that are nearer than that to others, but for what is free, are those.
_NEAR = 0.01
# A decomposition is off by so many eps, times the larger size and the largest singular value.
_ROUNDED = 16
# Singular values, of which the largest is 1, that are nearer than that, in eps, are not told apart.
_EQUAL = 64


def decomposes(program: Program) -> bool:
    """Return whether a program has a decomposition that leaves a choice."""
    return any(s.op in _DECOMPOSITIONS for s in statements(program.body))


def pairs(program: Program, values: Mapping[str, torch.Tensor | None]) -> tuple[Pair, ...]:
    """Return the singular vectors that were observed of each decomposition, at each call of it."""
    calls = [s.outputs for s in statements(program.body) if s.op in _DECOMPOSITIONS]
    ends = dict.fromkeys(label.rpartition(".")[0] for label in values)
    return tuple(
        (values.get(f"{of}{u}"), values.get(f"{of}{v}"))
        for of in (f"{end}." if end else "" for end in ends)
        for u, _, v in calls
    )


@contextmanager
def taking(chosen: Iterable[Pair]) -> Iterator[None]:
    """Have the reference make these choices for a block, beside what it imitates.

    Not beside what shadows cannot follow, such as a TorchScript graph: its interpreter corrupts
    memory under a dispatch mode (torch 2.13).
    """
    current = imitation.current()
    if not current.follows():
        yield
        return
    with observing(chosen), imitation.imitating(current.beside({"gauge": _GAUGE})):
        yield


@contextmanager
def observing(chosen: Iterable[Pair]) -> Iterator[None]:
    """Take the choice of singular vectors from these for a block, in every thread."""
    global _observed
    before = _observed
    _observed = tuple(chosen)
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
    u, v = _chosen(u, s, vh.mH)
    return u, s, v.mH


def _chosen(u: torch.Tensor, s: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return U and V as they were chosen, (..., m, p) and (..., n, q); s: (..., k)."""
    if 0 in (*u.shape, *v.shape) or not bool(u.isfinite().all() and v.isfinite().all()):
        return u, v
    with torch.no_grad():
        best, turns = 0, None
        for left, right in _seen(u, v):
            if not _decomposes(u, s, v, left, right):
                continue
            found = _turns(u, s, v, left, right)
            if found[0] > best:
                best, turns = found[0], found[1:]
    return (u, v) if turns is None else (_turned(u, turns[0]), _turned(v, turns[1]))


def _decomposes(
    u: torch.Tensor,
    s: torch.Tensor,
    v: torch.Tensor,
    left: torch.Tensor | None,
    right: torch.Tensor | None,
) -> bool:
    """Return whether vectors that were seen make up the same matrix, if both were seen."""
    if left is None or right is None or not bool(left.isfinite().all() and right.isfinite().all()):
        return True
    size = s.shape[-1]

    def product(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return (one[..., :size] * s.unsqueeze(-2)) @ other[..., :size].mH

    off = (product(left, right) - product(u, v)).abs().amax((-2, -1))
    unit = torch.finfo(s.dtype).eps * max(u.shape[-2], v.shape[-2])
    return bool((off <= _ROUNDED * unit * s[..., 0]).all())


def _seen(u: torch.Tensor, v: torch.Tensor) -> Iterator[Pair]:
    """Yield what was observed that may be U and V, in the order of the calls."""
    for one, other in _observed:
        left = one if one is not None and _like(one, u) else None
        rights: list[torch.Tensor | None] = [None]
        if other is not None:
            rights = [w for w in (other, other.mH) if _like(w, v)] or rights
        for right in rights:
            yield left, right


def _like(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype


def _turned(vectors: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Return columns times square matrices; most are of signs, with which nothing is rounded."""
    signs = turns.diagonal(dim1=-2, dim2=-1)
    if bool((torch.diag_embed(signs) == turns).all()):
        return vectors * signs.unsqueeze(-2)
    return vectors @ turns


def _turns(
    u: torch.Tensor,
    s: torch.Tensor,
    v: torch.Tensor,
    left: torch.Tensor | None,
    right: torch.Tensor | None,
) -> tuple[int, torch.Tensor, torch.Tensor]:
    """Return how many columns are those that were seen, and what makes all of U and V those."""
    count, of_u, of_v = 0, list[torch.Tensor](), list[torch.Tensor]()
    batch = s.shape[:-1].numel()
    flat = [
        None if t is None else t.reshape(batch, *t.shape[-2:]).unbind() for t in (u, v, left, right)
    ]
    for b, values in enumerate(s.reshape(batch, -1).tolist()):
        x, y, *seen = (None if t is None else t[b] for t in flat)
        assert x is not None
        assert y is not None
        blocks: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        groups, zero = _groups(values, torch.finfo(s.dtype).eps * max(*x.shape, *y.shape))
        for group in groups:
            one, other = (
                _turn(part[:, group], w, group) for part, w in zip((x, y), seen, strict=True)
            )
            turn = one if one is not None else other
            agree = (
                one is not None and other is not None and bool((one - other).abs().max() < _NEAR)
            )
            count += ((one is not None) + (other is not None) + agree) * (group.stop - group.start)
            size = group.stop - group.start
            for made in blocks:
                made.append(torch.eye(size, dtype=u.dtype) if turn is None else turn)
        for made, part, w in zip(blocks, (x, y), seen, strict=True):
            rest = slice(zero, part.shape[1])
            turn = _turn(part[:, rest], w, rest)
            made.append(torch.eye(rest.stop - zero, dtype=u.dtype) if turn is None else turn)
        of_u.append(torch.block_diag(*blocks[0]))
        of_v.append(torch.block_diag(*blocks[1]))
    shape = s.shape[:-1]
    turns = (torch.stack(made).reshape(*shape, *made[0].shape) for made in (of_u, of_v))
    return count, *turns  # type: ignore[return-value]


def _groups(values: list[float], eps: float) -> tuple[list[slice], int]:
    """Return the columns of equal singular values, but of 0, and the first column of those."""
    near = _EQUAL * eps * values[0]
    zero = next((i for i, value in enumerate(values) if value <= near), len(values))
    ends = [i for i in range(1, zero) if values[i - 1] - values[i] > near]
    starts = [0, *ends] if zero else []
    return [slice(a, b) for a, b in zip(starts, [*ends, zero], strict=False)], zero


def _turn(basis: torch.Tensor, seen: torch.Tensor | None, columns: slice) -> torch.Tensor | None:
    """Return the unitary matrix, (r, r), that makes what was seen of columns, or None."""
    if seen is None or not basis.shape[1]:
        return None
    seen = seen[:, columns]
    product = basis.mH @ seen
    if basis.shape[1] == 1:
        turn = product.sgn()
    else:
        one, _, other = torch.linalg.svd(product.nan_to_num())
        turn = one @ other
    near = bool(turn.any() and (basis @ turn - seen).abs().max() < _NEAR)
    return turn if near else None


_GAUGE = Imitation(kernels={torch.ops.aten._linalg_svd.default: decomposed})
