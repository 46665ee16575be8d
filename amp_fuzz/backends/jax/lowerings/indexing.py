"""Lowerings of ops that move elements: joining, indexing, gathering, rolling, triangles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from amp_fuzz.backends.jax.lowerings.table import (
    Array,
    cast,
    is_array,
    lower,
    opmath,
    promote,
    spread,
)
from amp_fuzz.catalogue.promotion import is_float

# -- joining ------------------------------------------------------------------------------------


@lower("cat")
def _cat(parts: Sequence[Array], dim: int = 0) -> Array:
    dtype = promote(*parts)
    parts = [p for p in parts if p.shape != (0,)] or [parts[0]]
    return jnp.concatenate([cast(p, dtype) for p in parts], axis=dim)


@lower("stack")
def _stack(parts: Sequence[Array], dim: int = 0) -> Array:
    dtype = promote(*parts)
    return jnp.stack([cast(p, dtype) for p in parts], axis=dim)


@lower("repeat")
def _repeat(x: Array, sizes: Sequence[int]) -> Array:
    return cast(jnp.tile(opmath(x), tuple(sizes)), x.dtype.name)


@lower("repeat_interleave.self_int")
def _repeat_interleave(x: Array, repeats: int, dim: int | None = None, **_: Any) -> Array:
    return cast(jnp.repeat(opmath(x), repeats, axis=dim), x.dtype.name)


@lower("flip")
def _flip(x: Array, dims: Sequence[int]) -> Array:
    return jnp.flip(x, tuple(dims)) if dims else x


@lower("roll")
def _roll(x: Array, shifts: Sequence[int], dims: Sequence[int] = ()) -> Array:
    if not dims:
        return jnp.roll(x.reshape(-1), shifts[0]).reshape(x.shape)
    return jnp.roll(x, tuple(shifts), tuple(dims))


@lower("rot90")
def _rot90(x: Array, k: int = 1, dims: Sequence[int] = (0, 1)) -> Array:
    return jnp.rot90(x, k, (dims[0], dims[1]))


@lower("tril")
def _tril(x: Array, diagonal: int = 0) -> Array:
    return jnp.tril(x, diagonal)


@lower("triu")
def _triu(x: Array, diagonal: int = 0) -> Array:
    return jnp.triu(x, diagonal)


@lower("diag_embed")
def _diag_embed(x: Array, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Array:
    size = x.shape[-1] + abs(offset)
    made = jnp.zeros((*x.shape[:-1], size, size), x.dtype)
    at = jnp.arange(x.shape[-1])
    made = made.at[..., at + max(-offset, 0), at + max(offset, 0)].set(x)
    rank = x.ndim + 1
    return jnp.moveaxis(made, (-2, -1), (dim1 % rank, dim2 % rank))


@lower("trace")
def _trace(x: Array) -> Array:
    if not is_float(x.dtype.name):
        return jnp.trace(x, dtype="int64")
    # torch's kernel adds float32 in float64.
    diagonal = jnp.diagonal(opmath(x)).astype("float64")
    return cast(jnp.sum(diagonal), x.dtype.name)


# -- indexing -----------------------------------------------------------------------------------
# The gradients of elements that are read several times are summed in float32, rounded once.


def _widely(function: Any) -> Any:
    def lowered(x: Array, *args: Any, **kwargs: Any) -> Array:
        return cast(function(opmath(x), *args, **kwargs), x.dtype.name)

    return lowered


@lower("index_select")
@_widely
def _index_select(x: Array, dim: int, index: Array) -> Array:
    if not x.ndim:
        return x
    return jnp.take(x, index.reshape(-1), axis=dim)


@lower("gather")
def _gather(x: Array, dim: int, index: Array, *, sparse_grad: bool = False) -> Array:
    return _gathered(x, dim, index)


@_widely
def _gathered(x: Array, dim: int, index: Array) -> Array:
    if not x.ndim:
        return spread(x, index.shape)
    return x[_along(x, dim, index)]


def _along(x: Array, dim: int, index: Array) -> tuple[Array, ...]:
    """Return the indices of the elements for ``gather`` and ``scatter``."""
    if not index.ndim and x.ndim == 1:
        return (index,)
    grid = list(jnp.indices(index.shape, sparse=True))
    grid[dim % x.ndim] = index
    return tuple(grid)


@lower("embedding")
def _embedding(
    weight: Array,
    index: Array,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Array:
    own = opmath(weight)
    if padding_idx >= 0:
        own = own.at[padding_idx].set(lax.stop_gradient(own[padding_idx]))
    made = jnp.take(own, index, axis=0)
    if scale_grad_by_freq:
        counts = jnp.sum(index.reshape(-1)[:, None] == index.reshape(-1)[None], 1)
        scale = 1 / counts.reshape(*index.shape, 1).astype(own.dtype)
        made = lax.stop_gradient(made - made * scale) + made * scale
    return cast(made, weight.dtype.name)


@lower("index")
@_widely
def _index(x: Array, indices: Sequence[Array | None]) -> Array:
    return x[_indices(x, indices)]


def _indices(x: Array, indices: Sequence[Array | None]) -> tuple[Any, ...]:
    return tuple(slice(None) if i is None else i for i in indices)


@lower("index_put", "_unsafe_index_put", "_index_put_impl")
def _index_put(
    x: Array, indices: Sequence[Array | None], values: Array, accumulate: bool = False, *_: Any
) -> Array:
    at = _indices(x, indices)
    values = cast(values, x.dtype.name)
    if accumulate:
        return cast(opmath(x).at[at].add(opmath(values)), x.dtype.name)
    return x.at[at].set(values)


@lower("index_fill")
def _index_fill(x: Array, dim: int, index: Array, value: Any) -> Array:
    value = cast(value, x.dtype.name)
    if not x.ndim:
        return value.reshape(())
    return x.at[_on(x, dim, index.reshape(-1))].set(value)


def _on(x: Array, dim: int, index: Array) -> tuple[Any, ...]:
    return (*[slice(None)] * (dim % x.ndim), index)


@lower("index_copy")
def _index_copy(x: Array, dim: int, index: Array, source: Array) -> Array:
    if not x.ndim:
        return source.reshape(())
    return x.at[_on(x, dim, index)].set(cast(source, x.dtype.name))


@lower("index_add")
def _index_add(x: Array, dim: int, index: Array, source: Array, *, alpha: Any = 1) -> Array:
    own, more = opmath(x), opmath(source)
    more = more if alpha == 1 else more * cast(alpha, own.dtype.name)
    if not x.ndim:
        return cast(own + jnp.sum(more), x.dtype.name)
    return cast(own.at[_on(x, dim, index)].add(more), x.dtype.name)


@lower("scatter")
def _scatter(x: Array, dim: int, index: Array, source: Any, *, reduce: str | None = None) -> Array:
    if not is_array(source):
        source = jnp.full(index.shape, source, x.dtype)
    if reduce is not None:
        return _scatter_reduced(x, dim, index, source, {"add": "sum", "multiply": "prod"}[reduce])
    if not x.ndim:
        return source.reshape(()) if index.size else x
    own = source[tuple(slice(0, n) for n in index.shape)]
    return x.at[_along(x, dim, index)].set(own)


@lower("scatter_add")
def _scatter_add(x: Array, dim: int, index: Array, source: Array) -> Array:
    return _scatter_reduced(x, dim, index, source, "sum")


def _scatter_reduced(x: Array, dim: int, index: Array, source: Array, how: str) -> Array:
    own, more = opmath(x), opmath(source)
    if not x.ndim:
        own, more, index = own.reshape(1), more.reshape(-1), index.reshape(-1)
    else:
        more = more[tuple(slice(0, n) for n in index.shape)]
    at = own.at[_along(own, dim, index)]
    made = at.add(more) if how == "sum" else at.multiply(more)
    return cast(made.reshape(x.shape), x.dtype.name)


@lower("take")
@_widely
def _take(x: Array, index: Array) -> Array:
    return jnp.take(x.reshape(-1), jnp.where(index < 0, index + x.size, index))


@lower("put")
def _put(x: Array, index: Array, source: Array, accumulate: bool = False) -> Array:
    own, more = opmath(x).reshape(-1), opmath(source).reshape(-1)
    at = own.at[index.reshape(-1)]
    made = at.add(more) if accumulate else at.set(more)
    return cast(made.reshape(x.shape), x.dtype.name)


@lower("masked_scatter")
def _masked_scatter(x: Array, mask: Array, source: Array) -> Array:
    shape = jnp.broadcast_shapes(x.shape, mask.shape)
    mask, own = jnp.broadcast_to(mask, shape).reshape(-1), spread(x, shape).reshape(-1)
    number = jnp.clip(jnp.cumsum(mask) - 1, 0, max(source.size - 1, 0))
    if not source.size:
        return own.reshape(shape)
    return jnp.where(mask, source.reshape(-1)[number], own).reshape(shape)


# -- slices written back ------------------------------------------------------------------------


@lower("select_scatter")
def _select_scatter(x: Array, source: Array, dim: int, index: int) -> Array:
    return x.at[(*[slice(None)] * (dim % x.ndim), index)].set(source)


@lower("slice_scatter")
def _slice_scatter(
    x: Array, source: Array, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Array:
    return x.at[(*[slice(None)] * (dim % x.ndim), slice(start, end, step))].set(source)


@lower("im2col", "unfold_copy")
def _im2col(
    x: Array,
    kernel: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> Array:
    batched = x.ndim == 4
    own = opmath(x if batched else x[None])
    low = [(0, 0), (0, 0), (padding[0],) * 2, (padding[1],) * 2]
    own = jnp.pad(own, low)
    spans = [
        (own.shape[2 + i] - dilation[i] * (kernel[i] - 1) - 1) // stride[i] + 1 for i in range(2)
    ]
    rows, columns = (
        jnp.arange(kernel[i])[:, None] * dilation[i] + jnp.arange(spans[i])[None] * stride[i]
        for i in range(2)
    )
    made = own[:, :, rows[:, None, :, None], columns[None, :, None, :]]
    n, c = own.shape[:2]
    made = cast(made.reshape(n, c * kernel[0] * kernel[1], spans[0] * spans[1]), x.dtype.name)
    return made if batched else made[0]


@lower("col2im")
def _col2im(
    x: Array,
    size: Sequence[int],
    kernel: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> Array:
    batched = x.ndim == 3
    own = opmath(x if batched else x[None])
    n, rows = own.shape[:2]
    channels = rows // (kernel[0] * kernel[1])
    like = jnp.zeros((n, channels, *size), own.dtype)
    # It is linear, and what im2col's derivative does.
    (made,) = jax.linear_transpose(lambda y: _im2col(y, kernel, dilation, padding, stride), like)(
        own.reshape(n, rows, -1)
    )
    made = cast(made, x.dtype.name)
    return made if batched else made[0]
