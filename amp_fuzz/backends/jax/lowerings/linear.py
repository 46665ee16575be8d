"""Lowerings of linear algebra and Fourier transforms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from amp_fuzz.backends.jax.lowerings.products import precisely
from amp_fuzz.backends.jax.lowerings.reductions import safe_softmax
from amp_fuzz.backends.jax.lowerings.table import Array, cast, lower, opmath, spread

# -- linear algebra -----------------------------------------------------------------------------


def _no_error(x: Array) -> Array:
    return jnp.zeros(x.shape[:-2], "int32")


def _singular(lu: Array) -> Array:
    """Return the number of the first zero pivot, counted from 1; 0 if there is none."""
    none = jnp.diagonal(lu, axis1=-2, axis2=-1) == 0
    if not none.shape[-1]:
        return _no_error(lu)
    first = jnp.argmax(none, axis=-1) + 1
    return jnp.where(jnp.any(none, axis=-1), first, 0).astype("int32")


@lower("linalg_inv_ex")
def _inverse(x: Array, *, check_errors: bool = False) -> tuple[Array, Array]:
    return jnp.linalg.inv(x), _singular(lax.linalg.lu(lax.stop_gradient(x))[0])


def _hermitian(x: Array, upper: bool) -> Array:
    """Return the Hermitian matrix given by one triangle; the other may contain anything.

    torch's gradient is for the whole matrix, and Hermitian.
    """

    def adjoint(x: Array) -> Array:
        return jnp.conj(jnp.swapaxes(x, -1, -2))

    @jax.custom_jvp
    def whole(x: Array) -> Array:
        own = jnp.tril(adjoint(x) if upper else x)
        return own + adjoint(jnp.tril(own, -1))

    @whole.defjvp
    def both(primals: Any, tangents: Any) -> Any:
        return whole(*primals), (tangents[0] + adjoint(tangents[0])) / 2

    return whole(x)


@lower("linalg_cholesky_ex")
def _cholesky_ex(
    x: Array, *, upper: bool = False, check_errors: bool = False
) -> tuple[Array, Array]:
    return _cholesky(x, upper), _no_error(x)


@lower("cholesky")
def _cholesky(x: Array, upper: bool = False) -> Array:
    made = lax.linalg.cholesky(_hermitian(x, upper), symmetrize_input=False)
    return jnp.conj(jnp.swapaxes(made, -1, -2)) if upper else made


@lower("_linalg_solve_ex")
def _solve(
    a: Array, b: Array, *, left: bool = True, check_errors: bool = False
) -> tuple[Array, Array, Array, Array]:
    vector = b.ndim == 1 or (b.ndim == a.ndim - 1 and b.shape == a.shape[:-1])
    own = b[..., None] if vector else b
    if left:
        batch = jnp.broadcast_shapes(a.shape[:-2], own.shape[:-2])
        a_, b_ = (jnp.broadcast_to(x, (*batch, *x.shape[-2:])) for x in (a, own))
        made = jnp.linalg.solve(a_, b_)
    else:
        batch = jnp.broadcast_shapes(a.shape[:-2], own.shape[:-2])
        a_, b_ = (
            jnp.swapaxes(jnp.broadcast_to(x, (*batch, *x.shape[-2:])), -1, -2) for x in (a, own)
        )
        made = jnp.swapaxes(jnp.linalg.solve(a_, b_), -1, -2)
    made = made[..., 0] if vector else made
    lu, pivots, _ = lax.linalg.lu(lax.stop_gradient(a))
    return made, lu, pivots + 1, _singular(lu)


@lower("_linalg_det")
def _det(x: Array) -> tuple[Array, Array, Array]:
    lu, pivots, _ = lax.linalg.lu(lax.stop_gradient(x))
    return jnp.linalg.det(x), lu, pivots + 1


@lower("_linalg_slogdet")
def _slogdet(x: Array) -> tuple[Array, Array, Array, Array]:
    sign, size = jnp.linalg.slogdet(x)
    lu, pivots, _ = lax.linalg.lu(lax.stop_gradient(x))
    return sign, size, lu, pivots + 1


@lower("_linalg_svd")
def _svd(
    x: Array, full_matrices: bool = False, compute_uv: bool = True, *, driver: Any = None
) -> tuple[Array, Array, Array]:
    """Return the singular values, without vectors, whose sign is free."""
    if not compute_uv:
        none = jnp.zeros((0,), x.dtype)
        return none, jnp.linalg.svd(x, compute_uv=False), none
    found: tuple[Array, Array, Array] = jnp.linalg.svd(x, full_matrices=full_matrices)
    return found


@lower("_linalg_eigh")
def _eigh(x: Array, UPLO: str = "L", compute_v: bool = True) -> tuple[Array, Array]:
    whole = _hermitian(x, UPLO == "U")
    if not compute_v:
        return jnp.linalg.eigvalsh(whole, symmetrize_input=False), jnp.zeros((0,), x.dtype)
    values, vectors = jnp.linalg.eigh(whole, symmetrize_input=False)
    return values, vectors


@lower("linalg_solve_triangular")
def _solve_triangular(
    a: Array, b: Array, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Array:
    batch = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    b = cast(b, a.dtype.name)  # it may have another dtype; the factor's is that of the result
    a, b = (jnp.broadcast_to(x, (*batch, *x.shape[-2:])) for x in (a, b))
    return lax.linalg.triangular_solve(
        a, b, left_side=left, lower=not upper, unit_diagonal=unitriangular
    )


@lower("triangular_solve")
def _triangular_solve(
    b: Array, a: Array, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> tuple[Array, Array]:
    batch = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = (jnp.broadcast_to(x, (*batch, *x.shape[-2:])) for x in (a, b))
    made = lax.linalg.triangular_solve(
        a,
        b,
        left_side=True,
        lower=not upper,
        transpose_a=transpose,
        unit_diagonal=unitriangular,
    )
    return made, a


@lower("linalg_cross")
def _cross(a: Array, b: Array, *, dim: int = -1) -> Array:
    shape = jnp.broadcast_shapes(a.shape, b.shape)
    own, other = (opmath(spread(x, shape)) for x in (a, b))
    return cast(jnp.cross(own, other, axis=dim), a.dtype.name)


# -- Fourier transforms -------------------------------------------------------------------------


def _scaled(x: Array, sizes: Sequence[int], normalization: int) -> Array:
    if normalization == 0:
        return x
    count = math.prod(sizes)
    return x / jnp.asarray(count if normalization == 2 else math.sqrt(count), x.real.dtype)


def _transform(x: Array, dims: Sequence[int], forward: bool) -> Array:
    for dim in dims:  # unscaled in both directions
        if forward:
            x = jnp.fft.fft(x, axis=dim)
        else:
            x = jnp.fft.ifft(x, axis=dim, norm="forward")
    return x


@lower("_fft_c2c")
def _c2c(x: Array, dims: Sequence[int], normalization: int, forward: bool) -> Array:
    made = _transform(x, dims, forward)
    return _scaled(made, [x.shape[d] for d in dims], normalization)


@lower("_fft_r2c")
def _r2c(x: Array, dims: Sequence[int], normalization: int, onesided: bool) -> Array:
    last = dims[-1]
    if onesided:
        made = _transform(jnp.fft.rfft(x, axis=last), dims[:-1], True)
    else:
        made = _transform(lax.complex(x, jnp.zeros_like(x)), dims, True)
    return _scaled(made, [x.shape[d] for d in dims], normalization)


@lower("_fft_c2r")
def _c2r(x: Array, dims: Sequence[int], normalization: int, last_dim_size: int) -> Array:
    last = dims[-1]
    made = _transform(x, dims[:-1], False)
    made = jnp.fft.irfft(made, n=last_dim_size, axis=last, norm="forward")
    sizes = [last_dim_size if d == last else x.shape[d] for d in dims]
    return _scaled(made, sizes, normalization)


# -- attention ----------------------------------------------------------------------------------


@lower("_scaled_dot_product_flash_attention_for_cpu")
def _attention(
    query: Array,
    key: Array,
    value: Array,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Array | None = None,
    scale: float | None = None,
) -> tuple[Array, Array]:
    q, k, v = (opmath(x) for x in (query, key, value))
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    if k.shape[1] != q.shape[1]:  # grouped queries
        k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    scores = jnp.matmul(q, jnp.swapaxes(k, -1, -2)) * factor
    if is_causal:
        keep = jnp.tril(jnp.ones(scores.shape[-2:], "bool"))
        scores = jnp.where(keep, scores, -jnp.inf)
    if attn_mask is not None:
        if attn_mask.dtype == "bool":
            scores = jnp.where(attn_mask, scores, -jnp.inf)
        else:
            scores = scores + opmath(attn_mask)
    total = jax.nn.logsumexp(scores, axis=-1)
    made = jnp.matmul(safe_softmax(scores, -1), v)
    return cast(made, query.dtype.name), lax.stop_gradient(total)


@lower("_native_multi_head_attention")
def _multi_head_attention(
    query: Array,
    key: Array,
    value: Array,
    embed_dim: int,
    num_head: int,
    qkv_weight: Array,
    qkv_bias: Array,
    proj_weight: Array,
    proj_bias: Array,
    mask: Array | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[Array, Array]:
    """Return attention and its weights: the fast path of layers in inference.

    A mask of any dtype removes elements where it is not 0, and an empty row is NaN
    (aten/src/ATen/native/transformers/attention.cpp).
    """
    batch, _, wide_ = query.shape
    weights, biases = (jnp.split(opmath(x), 3, axis=0) for x in (qkv_weight, qkv_bias))

    def heads(x: Array, weight: Array, bias: Array) -> Array:
        made = jnp.matmul(opmath(x), weight.T) + bias
        return jnp.swapaxes(made.reshape(batch, -1, num_head, wide_ // num_head), 1, 2)

    q, k, v = map(heads, (query, key, value), weights, biases)
    scores = jnp.matmul(q, jnp.swapaxes(k, -1, -2)) / math.sqrt(wide_ // num_head)
    if mask is not None:
        left_out = cast(mask, "bool")
        if mask_type == 1:  # of what is padded, by batch
            left_out = left_out[:, None, None, :]
        scores = jnp.where(left_out, -jnp.inf, scores)
    made = jax.nn.softmax(scores, axis=-1)
    whole = jnp.swapaxes(jnp.matmul(made, v), 1, 2).reshape(batch, -1, wide_)
    whole = jnp.matmul(whole, opmath(proj_weight).T) + opmath(proj_bias)
    dtype = query.dtype.name
    if not need_weights:
        return cast(whole, dtype), jnp.zeros((0,), dtype)
    return cast(whole, dtype), cast(jnp.mean(made, axis=1) if average_attn_weights else made, dtype)


# -- factors ------------------------------------------------------------------------------------


@lower("linalg_qr")
def _qr(x: Array, mode: str = "reduced") -> tuple[Array, Array]:
    if mode == "r":
        return jnp.zeros((0,), x.dtype), jnp.linalg.qr(x, mode="r")
    q, r = jnp.linalg.qr(x, mode=mode)
    return q, r


@lower("linalg_lu_factor_ex")
def _lu_factor(
    x: Array, *, pivot: bool = True, check_errors: bool = False
) -> tuple[Array, Array, Array]:
    lu, pivots, _ = lax.linalg.lu(x)
    return lu, pivots + 1, _no_error(x)


@lower("linalg_lu")
def _lu(x: Array, *, pivot: bool = True) -> tuple[Array, Array, Array]:
    lu, _, order = lax.linalg.lu(x)
    return _permutation(order, x.dtype), *_triangles(lu)


def _permutation(order: Array, dtype: Any) -> Array:
    return jnp.swapaxes(jax.nn.one_hot(order, order.shape[-1], dtype=dtype), -1, -2)


def _triangles(lu: Array) -> tuple[Array, Array]:
    rows, columns = lu.shape[-2:]
    size = min(rows, columns)
    unit = jnp.eye(rows, size, dtype=lu.dtype)
    return jnp.tril(lu[..., :, :size], -1) + unit, jnp.triu(lu[..., :size, :])


def _turned(x: Array) -> Array:
    return jnp.conj(jnp.swapaxes(x, -1, -2))


def _solved(b: Array, x: Array, upper: bool) -> Array:
    for second in (False, True):  # L, then its conjugate transpose; of U the other way round
        turned = second != upper
        b = lax.linalg.triangular_solve(
            x, b, left_side=True, lower=not upper, transpose_a=turned, conjugate_a=turned
        )
    return b


def _factor_gradient(common: Array, x: Array, upper: bool) -> Array:
    """Return torch's gradient of a factor, for all elements, including the other triangle."""
    return -precisely(x, common) if upper else -precisely(common, x)


@lower("cholesky_inverse")
def _cholesky_inverse(x: Array, upper: bool = False) -> Array:
    @jax.custom_vjp
    def inverse(x: Array) -> Array:
        return _solved(jnp.broadcast_to(jnp.eye(x.shape[-1], dtype=x.dtype), x.shape), x, upper)

    def keep(x: Array) -> tuple[Array, tuple[Array, Array]]:
        made = inverse(x)
        return made, (x, made)

    def back(given: tuple[Array, Array], grad: Array) -> tuple[Array]:
        x, made = given
        common = precisely(made, precisely(grad + _turned(grad), made))
        return (_factor_gradient(common, x, upper),)

    inverse.defvjp(keep, back)
    return inverse(x)


@lower("cholesky_solve", "_cholesky_solve_helper")
def _cholesky_solve(b: Array, x: Array, upper: bool = False) -> Array:
    @jax.custom_vjp
    def solve(b: Array, x: Array) -> Array:
        return _solved(b, x, upper)

    def keep(b: Array, x: Array) -> tuple[Array, tuple[Array, Array]]:
        made = solve(b, x)
        return made, (x, made)

    def back(given: tuple[Array, Array], grad: Array) -> tuple[Array, Array]:
        x, made = given
        pulled = _solved(grad, x, upper)
        common = precisely(pulled, _turned(made))
        return pulled, _factor_gradient(common + _turned(common), x, upper)

    solve.defvjp(keep, back)
    batch = jnp.broadcast_shapes(b.shape[:-2], x.shape[:-2])
    b, x = (jnp.broadcast_to(o, (*batch, *o.shape[-2:])) for o in (b, x))
    return solve(b, x)


@lower("linalg_matrix_exp")
def _matrix_exp(x: Array) -> Array:
    return cast(jax.scipy.linalg.expm(opmath(x)), x.dtype.name)
