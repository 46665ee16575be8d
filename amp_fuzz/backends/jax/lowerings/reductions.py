"""Lowerings of reductions, scans, softmax, norms, sorting."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from amp_fuzz.backends.jax.lowerings.table import (
    LOWERINGS,
    Array,
    absolute,
    cast,
    derived,
    kept,
    lower,
    opmath,
    wide,
)
from amp_fuzz.catalogue.promotion import floating, is_complex, is_float

__all__ = ["axes", "total"]


def axes(x: Array, dims: Any) -> tuple[int, ...]:
    """Return dims as a tuple of normalised axes; None and an empty list mean all."""
    if dims is None or (isinstance(dims, Sequence) and not dims):
        return tuple(range(x.ndim))
    listed = dims if isinstance(dims, Sequence) else [dims]
    return tuple(d % max(x.ndim, 1) for d in listed) if x.ndim else ()


def _counted(dtype: str) -> str:
    return dtype if is_float(dtype) or is_complex(dtype) else "int64"


def total(x: Array, dims: Any = None, keepdim: bool = False, *, dtype: str | None = None) -> Array:
    """Return the sum, accumulated in float32 for 16 bits."""
    dtype = dtype or _counted(x.dtype.name)
    x = cast(cast(x, dtype), wide(dtype)) if is_float(x.dtype.name) else cast(x, wide(dtype))
    return cast(jnp.sum(x, axis=axes(x, dims), keepdims=keepdim), dtype)


lower("sum", "sum_to_size")(total)


@lower("nansum")
def _nansum(
    x: Array, dims: Any = None, keepdim: bool = False, *, dtype: str | None = None
) -> Array:
    clean = jnp.where(jnp.isnan(x), jnp.zeros_like(x), x) if is_float(x.dtype.name) else x
    return total(clean, dims, keepdim, dtype=dtype)


@lower("mean")
def _mean(x: Array, dims: Any = None, keepdim: bool = False, *, dtype: str | None = None) -> Array:
    dtype = dtype or x.dtype.name
    over = axes(x, dims)
    count = math.prod(x.shape[d] for d in over)
    return cast(jnp.sum(cast(x, wide(dtype)), axis=over, keepdims=keepdim) / count, dtype)


@lower("prod")
def _prod(x: Array, dim: Any = None, keepdim: bool = False, *, dtype: str | None = None) -> Array:
    dtype = dtype or _counted(x.dtype.name)
    x = cast(x, wide(dtype))
    return cast(jnp.prod(x, axis=axes(x, dim), keepdims=keepdim), dtype)


def _scanned(function: Any) -> Any:
    def lowered(x: Array, dim: int, *, dtype: str | None = None) -> Array:
        dtype = dtype or _counted(x.dtype.name)
        x = cast(x, wide(dtype))
        return cast(function(x, dim) if x.ndim else x, dtype)

    return lowered


lower("cumsum")(_scanned(lambda x, dim: jnp.cumsum(x, axis=dim)))
lower("cumprod")(_scanned(lambda x, dim: jnp.cumprod(x, axis=dim)))


@lower("logcumsumexp")
def _logcumsumexp(x: Array, dim: int) -> Array:
    if not x.ndim:
        return x
    return cast(lax.cumlogsumexp(opmath(x), axis=dim % x.ndim), x.dtype.name)


# -- extremes -----------------------------------------------------------------------------------


@lower("amax")
def _amax(x: Array, dims: Any = (), keepdim: bool = False) -> Array:
    return jnp.max(x, axis=axes(x, dims), keepdims=keepdim)


@lower("amin")
def _amin(x: Array, dims: Any = (), keepdim: bool = False) -> Array:
    return jnp.min(x, axis=axes(x, dims), keepdims=keepdim)


def _evenly(function: Any) -> Any:
    """Return the extreme of all; equal elements share its gradient, others are not multiplied."""

    @jax.custom_jvp
    def made(x: Array) -> Array:
        return function(x)

    @made.defjvp
    def rule(primals: Any, tangents: Any) -> tuple[Array, Array]:
        (x,), (dx,) = primals, tangents
        out = function(x)
        chosen = jnp.where(jnp.isnan(out), jnp.isnan(x), x == out)
        shared = jnp.sum(jnp.where(chosen, opmath(dx), 0)) / jnp.sum(chosen)
        return out, cast(shared, x.dtype.name)

    return made


lower("max.default")(_evenly(jnp.max))
lower("min.default")(_evenly(jnp.min))
lower("max.other")(lambda a, b: LOWERINGS["maximum"](a, b))
lower("min.other")(lambda a, b: LOWERINGS["minimum"](a, b))


@lower("aminmax")
def _aminmax(x: Array, *, dim: Any = None, keepdim: bool = False) -> tuple[Array, Array]:
    return _amin(x, dim, keepdim), _amax(x, dim, keepdim)


def _taken(x: Array, index: Array, dim: int, keepdim: bool) -> tuple[Array, Array]:
    """Return the elements at an index along a dimension, and the index."""
    wide_index = jnp.expand_dims(index, dim)
    found = jnp.take_along_axis(x, wide_index, axis=dim)
    if keepdim:
        return found, wide_index
    return jnp.squeeze(found, dim), index


def _first(function: Any) -> Any:
    def lowered(x: Array, dim: int, keepdim: bool = False) -> tuple[Array, Array]:
        if not x.ndim:
            return x, jnp.zeros((), "int64")
        index = function(lax.stop_gradient(x), axis=dim).astype("int64")
        return _taken(x, index, dim % x.ndim, keepdim)

    return lowered


lower("max.dim")(_first(jnp.argmax))
lower("min.dim")(_first(jnp.argmin))


def _arg(function: Any) -> Any:
    def lowered(x: Array, dim: Any = None, keepdim: bool = False) -> Array:
        if not x.ndim:
            return jnp.zeros((), "int64")
        if dim is None:
            flat = function(x.reshape(-1)).astype("int64")
            return flat.reshape((1,) * x.ndim) if keepdim else flat
        return function(x, axis=dim, keepdims=keepdim).astype("int64")

    return lowered


lower("argmax")(_arg(jnp.argmax))
lower("argmin")(_arg(jnp.argmin))


@lower("any")
def _any(x: Array, dims: Any = None, keepdim: bool = False) -> Array:
    found = jnp.any(cast(x, "bool"), axis=axes(x, dims), keepdims=keepdim)
    return cast(found, "uint8" if x.dtype == "uint8" else "bool")


@lower("all")
def _all(x: Array, dims: Any = None, keepdim: bool = False) -> Array:
    found = jnp.all(cast(x, "bool"), axis=axes(x, dims), keepdims=keepdim)
    return cast(found, "uint8" if x.dtype == "uint8" else "bool")


@lower("count_nonzero")
def _count_nonzero(x: Array, dims: Any = None) -> Array:
    return jnp.sum(cast(x, "bool"), axis=axes(x, dims), dtype="int64")


# -- softmax ------------------------------------------------------------------------------------


@lower("_softmax")
def _softmax(x: Array, dim: int, half_to_float: bool = False) -> Array:
    if not x.ndim:
        return _softmax(x.reshape(1), 0).reshape(())
    return cast(jax.nn.softmax(opmath(x), axis=dim), x.dtype.name)


@lower("_safe_softmax")
def safe_softmax(x: Array, dim: int, dtype: Any = None) -> Array:
    """Return the softmax; rows that are all -inf, and their gradients, are zeros."""
    masked = jnp.all(x == -jnp.inf, axis=dim, keepdims=True)
    return jnp.where(masked, jnp.zeros_like(x), _softmax(jnp.where(masked, 0, x), dim))


@lower("_log_softmax")
def _log_softmax(x: Array, dim: int, half_to_float: bool = False) -> Array:
    if not x.ndim:
        return _log_softmax(x.reshape(1), 0).reshape(())
    return cast(jax.nn.log_softmax(opmath(x), axis=dim), x.dtype.name)


@lower("logsumexp")
def _logsumexp(x: Array, dims: Any, keepdim: bool = False) -> Array:
    dtype = floating(x.dtype.name)
    x = cast(x, wide(dtype))
    return cast(jax.nn.logsumexp(x, axis=axes(x, dims), keepdims=keepdim), dtype)


# -- moments ------------------------------------------------------------------------------------


def _freedom(x: Array, over: tuple[int, ...], correction: Any) -> float:
    count: int = math.prod(x.shape[d] for d in over)
    return max(count - (1 if correction is None else float(correction)), 0.0)


def _variance(
    x: Array, dims: Any, correction: Any, keepdim: bool
) -> tuple[Array, Array, tuple[int, ...]]:
    over = axes(x, dims)
    x = opmath(x)
    count = math.prod(x.shape[d] for d in over)
    mean = jnp.sum(x, axis=over, keepdims=True) / count
    squares = jnp.sum(jnp.square(x - mean), axis=over, keepdims=keepdim)
    free = _freedom(x, over, correction)
    variance = squares / jnp.asarray(free, squares.dtype)
    return variance, mean.reshape(kept(x.shape, over, keepdim)), over


def _unbiased(args: tuple[Any, ...], correction: Any) -> tuple[Any, Any, bool]:
    """Return dims, correction and keepdim from ``(unbiased)`` or ``(dims, unbiased, keepdim)``."""
    if args and isinstance(args[0], bool):
        return None, int(args[0]), False
    dims = args[0] if args else None
    if len(args) > 1 and isinstance(args[1], bool):
        return dims, int(args[1]), bool(args[2]) if len(args) > 2 else False
    return dims, correction, False


@lower("var")
def _var(x: Array, *args: Any, correction: Any = None, keepdim: bool = False) -> Array:
    dims, correction, keep = _unbiased(args, correction)
    return cast(_variance(x, dims, correction, keep or keepdim)[0], x.dtype.name)


@lower("std")
def _std(x: Array, *args: Any, correction: Any = None, keepdim: bool = False) -> Array:
    dims, correction, keep = _unbiased(args, correction)
    return cast(_root(_variance(x, dims, correction, keep or keepdim)[0]), x.dtype.name)


_root = derived(jnp.sqrt, lambda r, v: jnp.where(r == 0, 0, 1 / (2 * jnp.where(r == 0, 1, r))))


@lower("var_mean")
def _var_mean(
    x: Array, *args: Any, correction: Any = None, keepdim: bool = False
) -> tuple[Array, Array]:
    dims, correction, keep = _unbiased(args, correction)
    variance, mean, _ = _variance(x, dims, correction, keep or keepdim)
    return cast(variance, x.dtype.name), cast(mean, x.dtype.name)


@lower("std_mean")
def _std_mean(
    x: Array, *args: Any, correction: Any = None, keepdim: bool = False
) -> tuple[Array, Array]:
    dims, correction, keep = _unbiased(args, correction)
    variance, mean, _ = _variance(x, dims, correction, keep or keepdim)
    return cast(_root(variance), x.dtype.name), cast(mean, x.dtype.name)


# -- norms --------------------------------------------------------------------------------------


def norm(x: Array, order: float, over: tuple[int, ...], keepdim: bool) -> Array:
    """Return a vector norm of a floating or complex array; its gradient at 0 is 0, as in torch."""
    size = absolute(x)
    if order == 0:
        return jnp.sum(lax.stop_gradient((size != 0).astype(size.dtype)), over, keepdims=keepdim)
    if order == math.inf:
        return jnp.max(size, axis=over, keepdims=keepdim)
    if order == -math.inf:
        return jnp.min(size, axis=over, keepdims=keepdim)
    if order == 1:
        return jnp.sum(size, axis=over, keepdims=keepdim)
    if order == 2:
        squares = jnp.real(x * jnp.conj(x))
        return _root(jnp.sum(squares, axis=over, keepdims=keepdim))
    powers = jnp.sum(_power_of_size(size, order), axis=over, keepdims=keepdim)
    return _fractional(powers, 1 / order)


def _power_of_size(size: Array, order: float) -> Array:
    return derived(
        lambda s: lax.pow(s, jnp.asarray(order, s.dtype)),
        lambda r, s: jnp.where(s == 0, 0, order * lax.pow(s, jnp.asarray(order - 1, s.dtype))),
    )(size)


def _fractional(x: Array, exponent: float) -> Array:
    return derived(
        lambda x: lax.pow(x, jnp.asarray(exponent, x.dtype)),
        lambda r, x: jnp.where(
            r == 0, 0, exponent * lax.pow(x, jnp.asarray(exponent - 1, x.dtype))
        ),
    )(x)


@lower("linalg_vector_norm")
def _vector_norm(
    x: Array,
    ord: Any = 2,  # noqa: A002
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: str | None = None,
) -> Array:
    dtype = dtype or x.dtype.name
    over = axes(x, dim)
    x = cast(x, wide(dtype))
    real = {"complex64": "float32", "complex128": "float64"}.get(dtype, dtype)
    return cast(norm(x, float(ord), over, keepdim), real)


@lower("norm")
def _norm(
    x: Array, p: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: str | None = None
) -> Array:
    return _vector_norm(x, 2 if p is None else p, dim, keepdim, dtype=dtype)


@lower("_weight_norm_interface")
def _weight_norm(v: Array, g: Array, dim: int = 0) -> tuple[Array, Array]:
    over = tuple(d for d in range(v.ndim) if d != dim % v.ndim)
    size = norm(opmath(v), 2.0, over, True)
    made = opmath(v) * (opmath(g) / size)
    return cast(made, v.dtype.name), cast(size, v.dtype.name)


@lower("renorm")
def _renorm(x: Array, p: Any, dim: int, maxnorm: Any) -> Array:
    over = tuple(d for d in range(x.ndim) if d != dim % x.ndim)
    own = opmath(x)
    size = norm(own, float(p), over, True)
    factor = jnp.where(size > maxnorm, maxnorm / (size + 1e-7), jnp.ones_like(size))
    return cast(own * factor, x.dtype.name)


@lower("dist")
def _dist(a: Array, b: Array, p: Any = 2) -> Array:
    return _vector_norm(LOWERINGS["sub"](a, b), p)


# -- order --------------------------------------------------------------------------------------


def _ordered(x: Array, dim: int, descending: bool) -> tuple[Array, Array]:
    if not x.ndim:
        return x, jnp.zeros((), "int64")
    index = jnp.argsort(lax.stop_gradient(x), axis=dim, stable=True, descending=descending)
    index = index.astype("int64")
    return jnp.take_along_axis(x, index, axis=dim), index


@lower("sort")
def _sort(
    x: Array, *args: Any, stable: Any = None, dim: int = -1, descending: bool = False
) -> tuple[Array, Array]:
    dim = args[0] if args else dim
    descending = args[1] if len(args) > 1 else descending
    return _ordered(x, dim, descending)


@lower("argsort")
def _argsort(x: Array, dim: int = -1, descending: bool = False, *, stable: bool = False) -> Array:
    return _ordered(x, dim, descending)[1]
