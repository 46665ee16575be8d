"""Lowerings of resizing, sampling of grids, shuffles, running extremes, searching."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from amp_fuzz.backends.jax.lowerings.table import (
    LOWERINGS,
    Array,
    absolute,
    cast,
    is_array,
    lower,
    opmath,
    promote,
    wide,
)

# -- resizing -----------------------------------------------------------------------------------


def _scale(size: int, out: int, given: float | None, align: bool, dtype: Any) -> Any:
    """Return the distance of two output elements, in input elements."""
    if align:
        return dtype((size - 1) / (out - 1)) if out > 1 else dtype(0)
    return dtype(1 / given) if given is not None and given > 0 else dtype(size) / dtype(out)


def _nearest(n: int, *, exact: bool) -> Any:
    def lowered(x: Array, size: Sequence[int], *scales: Any) -> Array:
        own = opmath(x)
        for d in range(n):
            have, out = x.shape[2 + d], size[d]
            scale = _scale(have, out, scales[d] if scales else None, False, np.float32)
            at = np.arange(out, dtype=np.float32) + (np.float32(0.5) if exact else 0)
            index = np.minimum(np.floor(at * scale).astype(np.int64), have - 1)
            own = jnp.take(own, jnp.asarray(index), axis=2 + d)
        return cast(own, x.dtype.name)

    return lowered


def _linear(n: int) -> Any:
    def lowered(x: Array, size: Sequence[int], align: bool, *scales: Any) -> Array:
        own = opmath(x)
        dtype: Any = np.float64 if own.dtype == "float64" else np.float32
        for d in range(n):
            have, out, axis = x.shape[2 + d], size[d], 2 + d
            scale = _scale(have, out, scales[d] if scales else None, align, dtype)
            at = np.arange(out, dtype=dtype)
            at = at * scale if align else np.maximum(scale * (at + dtype(0.5)) - dtype(0.5), 0)
            low = np.minimum(at.astype(np.int64), have - 1)
            part = np.clip(at - low, 0, 1).astype(dtype)
            high = np.minimum(low + 1, have - 1)
            part = jnp.asarray(part).reshape([-1 if i == axis else 1 for i in range(x.ndim)])
            first, second = (jnp.take(own, jnp.asarray(i), axis=axis) for i in (low, high))
            own = first * (1 - part) + second * part
        return cast(own, x.dtype.name)

    return lowered


_A = -0.75


def _cubic(x: Array, size: Sequence[int], align: bool, *scales: Any) -> Array:
    own = opmath(x)
    dtype: Any = np.float64 if own.dtype == "float64" else np.float32
    for d in range(2):
        have, out, axis = x.shape[2 + d], size[d], 2 + d
        scale = _scale(have, out, scales[d] if scales else None, align, dtype)
        at = np.arange(out, dtype=dtype)
        at = at * scale if align else scale * (at + dtype(0.5)) - dtype(0.5)
        low = np.floor(at).astype(np.int64)
        t = at - low
        far, near = (
            (lambda v: ((_A * v - 5 * _A) * v + 8 * _A) * v - 4 * _A),
            (lambda v: ((_A + 2) * v - (_A + 3)) * v * v + 1),
        )
        factors = (far(t + 1), near(t), near(1 - t), far((1 - t) + 1))  # rounded as torch rounds
        made = 0
        for k, factor in enumerate(factors):
            index = np.clip(low - 1 + k, 0, have - 1)
            shape = [-1 if i == axis else 1 for i in range(x.ndim)]
            part = jnp.asarray(factor.astype(dtype)).reshape(shape)
            made = made + jnp.take(own, jnp.asarray(index), axis=axis) * part
        own = made
    return cast(own, x.dtype.name)


lower("upsample_bicubic2d")(_cubic)
for _n, _name in ((1, "linear1d"), (2, "bilinear2d"), (3, "trilinear3d")):
    lower(f"upsample_{_name}")(_linear(_n))
for _n in (1, 2, 3):
    lower(f"upsample_nearest{_n}d")(_nearest(_n, exact=False))
    lower(f"_upsample_nearest_exact{_n}d")(_nearest(_n, exact=True))

# -- grids --------------------------------------------------------------------------------------


def _unnormalised(at: Array, size: int, align: bool) -> Array:
    return (at + 1) / 2 * (size - 1) if align else ((at + 1) * size - 1) / 2


def _padded(at: Array, size: int, padding: int, align: bool) -> Array:
    if padding == 1:
        return _clipped(at, size)
    if padding == 2:
        low, high = (0, 2 * (size - 1)) if align else (-1, 2 * size - 1)
        if low == high:
            return jnp.zeros_like(at)
        span, start = (high - low) / 2, low / 2
        off = jnp.where(at < start, start - at, at - start)
        extra = lax.rem(off, jnp.asarray(span, off.dtype))
        flips = jnp.floor(lax.stop_gradient(off) / span)
        at = jnp.where(flips % 2 == 0, extra + start, span - extra + start)
        return _clipped(at, size)
    return at


def _clipped(at: Array, size: int) -> Array:
    """Clip, without a gradient at the border."""
    at = jnp.where(at <= 0, 0, at)
    return jnp.where(at >= size - 1, size - 1, at)


def _grid_sampler(n: int) -> Any:
    def lowered(x: Array, grid: Array, interpolation: int, padding: int, align: bool) -> Array:
        own, at = opmath(x), opmath(grid)
        sizes = x.shape[2:]
        where = [
            _unnormalised(at[..., n - 1 - d], sizes[d], align) for d in range(n)
        ]  # the grid names the last dimension first
        if interpolation != 2:
            where = [_padded(w, s, padding, align) for w, s in zip(where, sizes, strict=True)]
        if interpolation == 1:
            corners = [[(lax.round(w, lax.RoundingMethod.TO_NEAREST_EVEN), 1.0)] for w in where]
        elif interpolation == 0:
            corners = [
                [(jnp.floor(w), 1 - (w - jnp.floor(w))), (jnp.floor(w) + 1, w - jnp.floor(w))]
                for w in where
            ]
        else:
            corners = [_cubic_corners(w) for w in where]
            corners = [
                [(_padded(i, s, padding, align), f) for i, f in row]
                for row, s in zip(corners, sizes, strict=True)
            ]
        return cast(_gathered(own, corners, sizes), x.dtype.name)

    return lowered


def _cubic_corners(w: Array) -> list[tuple[Array, Array]]:
    low = jnp.floor(w)
    t = w - low
    last = (1 - t) + 1
    parts = (
        ((_A * (t + 1) - 5 * _A) * (t + 1) + 8 * _A) * (t + 1) - 4 * _A,
        ((_A + 2) * t - (_A + 3)) * t * t + 1,
        ((_A + 2) * (1 - t) - (_A + 3)) * (1 - t) * (1 - t) + 1,
        ((_A * last - 5 * _A) * last + 8 * _A) * last - 4 * _A,
    )
    return [(low + k - 1, part) for k, part in enumerate(parts)]


def _gathered(x: Array, corners: Any, sizes: Sequence[int]) -> Array:
    """Return the sum of the corner elements times their factors."""
    n = len(sizes)
    made: Any = 0
    for number in range(math.prod(len(row) for row in corners)):
        picked = []
        for row in corners:
            picked.append(row[number % len(row)])
            number //= len(row)
        inside: Any = True
        index: list[Array] = []
        factor: Any = 1.0
        for (at, part), size in zip(picked, sizes, strict=True):
            at = lax.stop_gradient(at)
            within = (at >= 0) & (at <= size - 1)
            inside = inside & within
            # Far outside it is NaN: torch's 3-d kernel leaves such terms out.
            part = jnp.where(within, part, 0) if n == 3 and is_array(part) else part
            index.append(jnp.clip(jnp.nan_to_num(at), 0, size - 1).astype("int32"))
            factor = factor * part
        batch = jnp.arange(x.shape[0]).reshape(-1, *[1] * n)
        found = jnp.moveaxis(jnp.moveaxis(x, 1, -1)[(batch, *index)], -1, 1)
        term = jnp.where(inside[:, None], found, 0)
        made = made + (term * factor[:, None] if not isinstance(factor, float) else term)
    return made


lower("grid_sampler_2d", "_grid_sampler_2d_cpu_fallback")(_grid_sampler(2))
lower("grid_sampler_3d")(_grid_sampler(3))

# -- shuffles -----------------------------------------------------------------------------------


@lower("pixel_shuffle")
def _pixel_shuffle(x: Array, factor: int) -> Array:
    *batch, c, h, w = x.shape
    made = x.reshape(-1, c // factor**2, factor, factor, h, w).transpose(0, 1, 4, 2, 5, 3)
    return made.reshape(*batch, c // factor**2, h * factor, w * factor)


@lower("pixel_unshuffle")
def _pixel_unshuffle(x: Array, factor: int) -> Array:
    *batch, c, h, w = x.shape
    made = x.reshape(-1, c, h // factor, factor, w // factor, factor).transpose(0, 1, 3, 5, 2, 4)
    return made.reshape(*batch, c * factor**2, h // factor, w // factor)


@lower("channel_shuffle", "native_channel_shuffle")
def _channel_shuffle(x: Array, groups: int) -> Array:
    n, c, *rest = x.shape
    return jnp.swapaxes(x.reshape(n, groups, c // groups, *rest), 1, 2).reshape(x.shape)


# -- running extremes ---------------------------------------------------------------------------


def _running(better: Any, function: Any) -> Any:
    def lowered(x: Array, dim: int) -> tuple[Array, Array]:
        if not x.ndim:
            return x, jnp.zeros((), "int64")
        axis = dim % x.ndim
        own = lax.stop_gradient(x)
        best = function(own, axis)
        place = lax.broadcasted_iota("int64", x.shape, axis)
        same = (own == best) | (jnp.isnan(own) if jnp.issubdtype(x.dtype, jnp.floating) else False)
        index = lax.cummax(jnp.where(same, place, 0), axis=axis)
        return jnp.take_along_axis(x, index, axis=axis), index

    return lowered


lower("cummax")(_running(None, lambda x, axis: lax.cummax(x, axis=axis)))
lower("cummin")(_running(None, lambda x, axis: lax.cummin(x, axis=axis)))

# -- searching ----------------------------------------------------------------------------------


@lower("searchsorted")
def _searchsorted(
    ordered: Array,
    values: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Array | None = None,
) -> Array:
    if sorter is not None:
        ordered = jnp.take_along_axis(ordered, sorter, -1)
    right = right or side == "right"
    own = jnp.asarray(values)
    own = own.astype(ordered.dtype) if own.ndim == 0 and not hasattr(values, "aval") else own
    rows = ordered if ordered.ndim > 1 else ordered.reshape(*[1] * max(own.ndim - 1, 0), -1)
    if not own.ndim:
        below = ordered <= own if right else ordered < own
        count = jnp.sum(below, -1)
    else:
        left, point = rows[..., None, :], own[..., :, None]
        count = jnp.sum(left <= point if right else left < point, -1)
    return count.astype("int32" if out_int32 else "int64")


@lower("bucketize")
def _bucketize(
    values: Any, boundaries: Array, *, out_int32: bool = False, right: bool = False
) -> Array:
    own = jnp.asarray(values)
    point = own.reshape(*own.shape, 1)
    count = jnp.sum(boundaries <= point if right else boundaries < point, -1)
    return count.astype("int32" if out_int32 else "int64")


@lower("isin")
def _isin(elements: Any, tests: Any, *, assume_unique: bool = False, invert: bool = False) -> Array:
    found = jnp.any(jnp.asarray(elements)[..., None] == jnp.asarray(tests).reshape(-1), axis=-1)
    return ~found if invert else found


# -- the rest -----------------------------------------------------------------------------------


@lower("celu")
def _celu(x: Array, alpha: float = 1.0) -> Array:
    own = opmath(x)
    below = alpha * jnp.expm1(jnp.where(own <= 0, own, 0) / alpha)
    return cast(jnp.where(own > 0, own, below), x.dtype.name)


@lower("binary_cross_entropy_with_logits")
def _logits(
    x: Array,
    target: Array,
    weight: Array | None = None,
    pos_weight: Array | None = None,
    reduction: int = 1,
) -> Array:
    dtype = target.dtype.name  # the kernel works in the dtype of its target
    own, t = (cast(o, wide(promote(x, target))) for o in (x, target))
    low = jnp.minimum(own, 0) - jnp.log1p(jnp.exp(-absolute(own)))
    factor = 1 if pos_weight is None else (opmath(pos_weight) - 1) * t + 1
    terms = (1 - t) * own - factor * low
    if weight is not None:
        terms = terms * opmath(weight)
    if reduction == 1:
        terms = jnp.sum(terms) / terms.size
    return cast(jnp.sum(terms) if reduction == 2 else terms, dtype)


@lower("log_softmax.int")
def _log_softmax(x: Array, dim: int, dtype: str | None = None) -> Array:
    return LOWERINGS["_log_softmax"](cast(x, dtype), dim)


@lower("softmax.int")
def _softmax(x: Array, dim: int, dtype: str | None = None) -> Array:
    return LOWERINGS["_softmax"](cast(x, dtype), dim)
