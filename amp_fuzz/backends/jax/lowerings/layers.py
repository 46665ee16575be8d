"""Lowerings of the parts of layers: normalisation, pooling, padding, losses, dropout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from amp_fuzz.backends.jax.lowerings.products import precisely
from amp_fuzz.backends.jax.lowerings.reductions import norm
from amp_fuzz.backends.jax.lowerings.table import (
    Array,
    absolute,
    cast,
    derived,
    lower,
    opmath,
    promote,
    wide,
)

# -- normalisation ------------------------------------------------------------------------------


def _normalised(x: Array, over: tuple[int, ...], eps: float) -> tuple[Array, Array, Array]:
    """Return the normalised values over some axes, the mean and the factor, in float32.

    Only the first has a derivative, computed from the factor as in torch, so a variance beyond the
    range gives zeros.
    """

    def moments(x: Array) -> tuple[Array, Array]:
        mean = jnp.mean(x, axis=over, keepdims=True)
        variance = jnp.mean(jnp.square(x - mean), axis=over, keepdims=True)
        return mean, lax.rsqrt(variance + eps)

    @jax.custom_jvp
    def made(x: Array) -> Array:
        mean, factor = moments(x)
        return (x - mean) * factor

    @made.defjvp
    def rule(primals: Any, tangents: Any) -> tuple[Array, Array]:
        (x,), (dx,) = primals, tangents
        mean, factor = moments(x)
        own = (x - mean) * factor
        along = jnp.mean(own * dx, axis=over, keepdims=True)
        return own, factor * (dx - jnp.mean(dx, axis=over, keepdims=True) - own * along)

    x = opmath(x)
    return made(x), *moments(lax.stop_gradient(x))


@lower("native_layer_norm")
def _layer_norm(
    x: Array, shape: Sequence[int], weight: Array | None, bias: Array | None, eps: float
) -> tuple[Array, Array, Array]:
    over = tuple(range(x.ndim - len(shape), x.ndim))
    made, mean, factor = _normalised(x, over, eps)
    if weight is not None:
        made = made * opmath(weight)
    if bias is not None:
        made = made + opmath(bias)
    stats = x.dtype.name if weight is None or weight.dtype == x.dtype else weight.dtype.name
    mean, factor = (cast(s, stats) for s in (mean, factor))
    return cast(made, x.dtype.name), mean, factor


@lower("rms_norm", "_fused_rms_norm")
def _rms_norm(
    x: Array, shape: Sequence[int], weight: Array | None = None, eps: float | None = None
) -> Any:
    over = tuple(range(x.ndim - len(shape), x.ndim))
    own = opmath(x)
    eps = float(jnp.finfo(own.dtype).eps) if eps is None else eps
    factor = lax.rsqrt(jnp.mean(own * own, axis=over, keepdims=True) + eps)
    made = own * factor
    if weight is not None:
        made = made * opmath(weight)
    return cast(made, x.dtype.name), cast(factor, x.dtype.name)


@lower("native_group_norm")
def _group_norm(
    x: Array,
    weight: Array | None,
    bias: Array | None,
    n: int,
    channels: int,
    inner: int,
    groups: int,
    eps: float,
) -> tuple[Array, Array, Array]:
    grouped = x.reshape(n, groups, -1)
    made, mean, factor = _normalised(grouped, (2,), eps)
    made = made.reshape(n, channels, inner)
    if weight is not None:
        made = made * opmath(weight).reshape(1, channels, 1)
    if bias is not None:
        made = made + opmath(bias).reshape(1, channels, 1)
    stats = x.dtype.name if weight is None or weight.dtype == x.dtype else weight.dtype.name
    mean, factor = (cast(s.reshape(n, groups), stats) for s in (mean, factor))
    return cast(made.reshape(x.shape), x.dtype.name), mean, factor


def _sums(x: Array) -> Array:
    """Return the operand of a sum: float32 becomes float64, so no square leaves the range.

    torch's kernel does this for strided memory. For contiguous memory it keeps squares in float32,
    and is further from the exact value.
    """
    return cast(x, "float64") if x.dtype.name == "float32" else opmath(x)


def _per_channel(x: Array | None, rank: int) -> Array | None:
    return None if x is None else opmath(x).reshape(1, -1, *[1] * (rank - 2))


def _weighted(x: Array, mean: Array, factor: Array, weight: Array, over: tuple[int, ...]) -> Array:
    """Return ``(x - mean) * factor * weight`` per channel, in the dtype of weight.

    A gradient is first centred, and then multiplied by the product of both, as in torch
    (batch_norm_backward_cpu_template, aten/src/ATen/native/Normalization.cpp): a factor of 0 with a
    large weight gives 0, and values beyond the range are infinite, not NaN. over: the axes of mean
    and factor; empty if these are given and the gradient does not depend on them.
    """
    dtype = weight.dtype.name

    @jax.custom_jvp
    def made(x: Array, weight: Array, mean: Array, factor: Array) -> Array:
        return cast((x - mean) * factor, dtype) * weight

    @made.defjvp
    def rule(primals: Any, tangents: Any) -> tuple[Array, Array]:
        (x, weight, mean, factor), (dx, dweight, *_) = primals, tangents
        own = (x - mean) * factor
        moved = dx * (factor * weight)  # pulled back, what comes first here comes last
        if over:
            along = own * jnp.mean(own * moved, axis=over, keepdims=True)
            moved = moved - jnp.mean(moved, axis=over, keepdims=True) - along
        own = cast(own, dtype)
        return own * weight, cast(moved, dtype) + own * dweight

    return made(x, weight, *map(lax.stop_gradient, (mean, factor)))


@lower("native_batch_norm", "_native_batch_norm_legit_functional", "_native_batch_norm_legit")
def _batch_norm(
    x: Array,
    weight: Array | None,
    bias: Array | None,
    mean: Any,
    variance: Any,
    training: Any,
    momentum: float | None = None,
    eps: float | None = None,
) -> Any:
    if isinstance(mean, bool):  # without running statistics: (training, momentum, eps)
        mean, variance, training, momentum, eps = None, None, mean, variance, training
    assert eps is not None
    momentum = momentum or 0.0
    over = tuple(d for d in range(x.ndim) if d != 1)
    count = math.prod(x.shape[d] for d in over)
    # Saved statistics of 16-bit inputs are float32 only with float32 weights or statistics.
    given = [o for o in (weight, bias, mean, variance) if o is not None]
    stats = x.dtype.name if all(o.dtype == x.dtype for o in given) else opmath(x).dtype.name
    gain = _per_channel(weight, x.ndim)
    if gain is None:
        gain = jnp.ones((1,) * x.ndim, opmath(x).dtype)
    if training:
        _, own_mean, factor = _normalised(_sums(x), over, eps)
        made = _weighted(_sums(x), own_mean, factor, gain, over)
        saved = tuple(cast(s.reshape(-1), stats) for s in (own_mean, factor))
    else:
        shift: Any = _per_channel(mean, x.ndim)
        size: Any = _per_channel(variance, x.ndim)
        made = _weighted(opmath(x), shift, lax.rsqrt(size + eps), gain, ())
        saved = tuple(jnp.zeros((0,), stats) for _ in range(2))
    if bias is not None:
        made = made + _per_channel(bias, x.ndim)
    made = cast(made, x.dtype.name)
    if not training or mean is None:
        return (made, *saved)
    own = lax.stop_gradient(_sums(x))
    found = jnp.mean(own, axis=over)
    spread_ = jnp.sum(jnp.square(own - jnp.mean(own, axis=over, keepdims=True)), axis=over)
    spread_ = spread_ / max(count - 1, 1)
    moved = (
        cast((1 - momentum) * opmath(old) + momentum * new, old.dtype.name)
        for old, new in ((mean, found), (variance, spread_))
    )
    return (made, *saved, *moved)


# -- dropout ------------------------------------------------------------------------------------


@lower("native_dropout")
def _dropout(x: Array, p: float, train: Any) -> tuple[Array, Array]:
    """Only for p=0: random results are taken from the reference."""
    return x, jnp.ones(x.shape, "bool")


@lower("bernoulli.p")
def _bernoulli(x: Array, p: float) -> Array:
    return jnp.zeros_like(x)


# -- padding ------------------------------------------------------------------------------------


def _pads(x: Array, pad: Sequence[int]) -> list[tuple[int, int]]:
    pairs = [(pad[i], pad[i + 1]) for i in range(0, len(pad), 2)][::-1]
    return [(0, 0)] * (x.ndim - len(pairs)) + pairs


@lower("constant_pad_nd")
def _constant_pad(x: Array, pad: Sequence[int], value: Any = 0) -> Array:
    edges = [(low, high, 0) for low, high in _pads(x, pad)]
    return lax.pad(x, jnp.asarray(value, x.dtype), edges)


def _edged(mode: str) -> Any:
    def lowered(x: Array, pad: Sequence[int]) -> Array:
        made = x
        for axis, (low, high) in enumerate(_pads(x, pad)):
            size = x.shape[axis]
            index = _edge_index(size, low, high, mode)
            if low or high:
                made = cast(jnp.take(opmath(made), index, axis=axis), x.dtype.name)
        return made

    return lowered


def _edge_index(size: int, low: int, high: int, mode: str) -> Array:
    places = list(range(-low, size + high))
    if mode == "replicate":
        found = [min(max(i, 0), size - 1) for i in places]
    else:
        found = [-i if i < 0 else 2 * (size - 1) - i if i >= size else i for i in places]
    return jnp.asarray(found, "int32")


lower("reflection_pad1d", "reflection_pad2d", "reflection_pad3d")(_edged("reflect"))
lower("replication_pad1d", "replication_pad2d", "replication_pad3d")(_edged("replicate"))

# -- pooling ------------------------------------------------------------------------------------


def _numbers(value: Any, n: int) -> tuple[int, ...]:
    values = [value] if isinstance(value, int) else list(value)
    return tuple(values * n if len(values) == 1 else values)


def _pooled_size(size: int, k: int, s: int, p: int, d: int, ceil: bool) -> int:
    span = size + 2 * p - d * (k - 1) - 1
    made = (-(-span // s) if ceil else span // s) + 1
    return made - 1 if ceil and (made - 1) * s >= size + p else made


def _windows(x: Array, n: int, starts: Any, fill: Any) -> tuple[Array, Array]:
    """Return the elements of each window, ``[..., *out, window]``, and which are inside of x.

    starts: for each pooled dimension, for each output, the indices of its window; -1 is outside.
    """
    index, inside = jnp.zeros((1,) * (2 * n), "int32"), jnp.ones((1,) * (2 * n), "bool")
    for axis, rows in enumerate(starts):
        shape = [1] * (2 * n)
        shape[axis], shape[n + axis] = len(rows), len(rows[0])
        at = jnp.asarray(rows, "int32").reshape(shape)
        inside = inside & (at >= 0)
        index = index * x.shape[x.ndim - n + axis] + jnp.maximum(at, 0)
    shape = index.shape
    index = index.reshape(*shape[:n], -1)
    inside = jnp.broadcast_to(inside, shape).reshape(index.shape)
    flat = x.reshape(*x.shape[: x.ndim - n], -1)
    found = jnp.take(flat, index.reshape(-1), axis=-1).reshape(*flat.shape[:-1], *index.shape)
    return jnp.where(inside, found, jnp.asarray(fill, x.dtype)), index


def _rows(size: int, out: int, k: int, s: int, p: int, d: int) -> list[list[int]]:
    return [
        [i if 0 <= (i := o * s - p + j * d) < size else -1 for j in range(k)] for o in range(out)
    ]


def _max_pool(n: int) -> Any:
    def lowered(
        x: Array,
        kernel: Any,
        stride: Any = (),
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
    ) -> tuple[Array, Array]:
        kernel = _numbers(kernel, n)
        stride = _numbers(stride, n) if stride not in ((), []) else kernel
        padding, dilation = _numbers(padding, n), _numbers(dilation, n)
        starts = []
        for axis in range(n):
            size = x.shape[x.ndim - n + axis]
            k, s, p, d = kernel[axis], stride[axis], padding[axis], dilation[axis]
            starts.append(_rows(size, _pooled_size(size, k, s, p, d, ceil_mode), k, s, p, d))
        return _largest(x, n, starts)

    return lowered


def _largest(x: Array, n: int, starts: Any) -> tuple[Array, Array]:
    own = opmath(x)
    windows, index = _windows(own, n, starts, -jnp.inf)
    best = jnp.argmax(lax.stop_gradient(windows), axis=-1)
    found = jnp.take_along_axis(windows, best[..., None], -1)[..., 0]
    where = jnp.take_along_axis(jnp.broadcast_to(index, windows.shape), best[..., None], -1)
    return cast(found, x.dtype.name), where[..., 0].astype("int64")


for _n in (2, 3):
    lower(f"max_pool{_n}d_with_indices")(_max_pool(_n))
lower("max_pool2d")(lambda *args, **kwargs: _max_pool(2)(*args, **kwargs)[0])
lower("max_pool3d")(lambda *args, **kwargs: _max_pool(3)(*args, **kwargs)[0])


def _adaptive_rows(size: int, out: int) -> list[list[int]]:
    rows = [list(range(i * size // out, -(-(i + 1) * size // out))) for i in range(out)]
    longest = max(map(len, rows), default=0)
    return [row + [-1] * (longest - len(row)) for row in rows]


def _adaptive_max(n: int) -> Any:
    def lowered(x: Array, size: Any) -> tuple[Array, Array]:
        starts = [
            _adaptive_rows(x.shape[x.ndim - n + axis], out)
            for axis, out in enumerate(_numbers(size, n))
        ]
        return _largest(x, n, starts)

    return lowered


def _adaptive_average(n: int) -> Any:
    def lowered(x: Array, size: Any) -> Array:
        starts = [
            _adaptive_rows(x.shape[x.ndim - n + axis], out)
            for axis, out in enumerate(_numbers(size, n))
        ]
        windows, _index = _windows(opmath(x), n, starts, 0)
        count = jnp.sum(_windows(jnp.ones(x.shape, windows.dtype), n, starts, 0)[0], -1)
        return cast(jnp.sum(windows, -1) / count, x.dtype.name)

    return lowered


for _n in (2, 3):
    lower(f"adaptive_max_pool{_n}d")(_adaptive_max(_n))
    lower(f"_adaptive_avg_pool{_n}d", f"adaptive_avg_pool{_n}d")(_adaptive_average(_n))


def _average_pool(n: int) -> Any:
    def lowered(
        x: Array,
        kernel: Any,
        stride: Any = (),
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Array:
        kernel = _numbers(kernel, n)
        stride = _numbers(stride, n) if stride not in ((), []) else kernel
        padding = _numbers(padding, n)
        starts, counts = [], jnp.ones((1,) * n, wide(x.dtype.name))
        for axis in range(n):
            size = x.shape[x.ndim - n + axis]
            k, s, p = kernel[axis], stride[axis], padding[axis]
            out = _pooled_size(size, k, s, p, 1, ceil_mode)
            starts.append(_rows(size, out, k, s, p, 1))
            spans = []
            for o in range(out):
                low = o * s - p
                high = min(low + k, size + p)
                if not count_include_pad:
                    low, high = max(low, 0), min(high, size)
                spans.append(high - low)
            shape = [1] * n
            shape[axis] = out
            counts = counts * jnp.asarray(spans, counts.dtype).reshape(shape)
        windows, _ = _windows(opmath(x), n, starts, 0)
        by = counts if divisor_override is None else divisor_override
        return cast(jnp.sum(windows, -1) / by, x.dtype.name)

    return lowered


for _n in (2, 3):
    lower(f"avg_pool{_n}d")(_average_pool(_n))
lower("avg_pool1d")(_average_pool(1))

# -- losses -------------------------------------------------------------------------------------


def _reduce(terms: Array, reduction: int, dtype: str) -> Array:
    if reduction == 1:
        terms = jnp.sum(terms) / terms.size if terms.size else jnp.sum(terms) / 0
    elif reduction == 2:
        terms = jnp.sum(terms)
    return cast(terms, dtype)


def _paired(*names: str, first: bool = False) -> Any:
    """Enter a loss of an input and a target, term by term in float32, and then reduced."""

    def enter(term: Any) -> Any:
        def lowered(x: Array, target: Array, reduction: int = 1, *more: Any, **named: Any) -> Array:
            dtype = x.dtype.name if first else promote(x, target)
            compute = wide(promote(x, target))
            shape = jnp.broadcast_shapes(x.shape, target.shape)
            x, target = (jnp.broadcast_to(cast(o, compute), shape) for o in (x, target))
            return _reduce(term(x, target, *more, **named), reduction, dtype)

        return lower(*names)(lowered)

    return enter


@_paired("mse_loss")
def _mse(x: Array, target: Array) -> Array:
    return jnp.square(x - target)


@_paired("huber_loss", first=True)
def _huber(x: Array, target: Array, delta: float = 1.0) -> Array:
    off = x - target
    size = absolute(off)
    return jnp.where(size <= delta, 0.5 * off * off, delta * (size - 0.5 * delta))


@_paired("smooth_l1_loss")
def _smooth_l1(x: Array, target: Array, beta: float = 1.0) -> Array:
    off = x - target
    size = absolute(off)
    if beta == 0:
        return size
    return jnp.where(size < beta, 0.5 * off * off / beta, size - 0.5 * beta)


@_paired("soft_margin_loss", first=True)
def _soft_margin(x: Array, target: Array) -> Array:
    return jnp.log1p(jnp.exp(-target * x))


@lower("binary_cross_entropy")
def _binary_cross_entropy(
    x: Array, target: Array, weight: Array | None = None, reduction: int = 1
) -> Array:
    p, t = opmath(x), opmath(target)
    low = jnp.asarray(-100, p.dtype)

    def log(x: Array) -> Array:
        return jnp.maximum(jnp.log(x), low)

    rule = derived(
        lambda p, t: (t - 1) * jnp.maximum(jnp.log1p(-p), low) - t * log(p),
        lambda r, p, t: (p - t) / jnp.maximum((1 - p) * p, 1e-12),
        lambda r, p, t: jnp.maximum(jnp.log1p(-p), low) - log(p),
    )
    terms = rule(p, t)
    if weight is not None:
        terms = terms * opmath(weight)
    return _reduce(terms, reduction, x.dtype.name)


def _nll(
    x: Array, target: Array, weight: Array | None, reduction: int, ignore: int
) -> tuple[Array, Array]:
    axis = 0 if x.ndim == 1 else 1
    own, dtype = opmath(x), x.dtype.name
    kept = target != ignore
    safe = jnp.where(kept, target, 0)
    picked = jnp.take_along_axis(own, jnp.expand_dims(safe, axis), axis=axis)
    factor = jnp.ones(target.shape, own.dtype) if weight is None else opmath(weight)[safe]
    factor = jnp.where(kept, factor, 0)
    terms = jnp.where(kept, -jnp.squeeze(picked, axis) * factor, 0)
    whole = jnp.sum(factor)
    if reduction == 0:
        return cast(terms, dtype), jnp.zeros((), dtype)
    made = jnp.sum(terms)
    return cast(made / whole if reduction == 1 else made, dtype), cast(whole, dtype)


lower("nll_loss_forward", "nll_loss2d_forward")(_nll)


def _margins(x: Array, target: Array) -> tuple[Array, Array, bool]:
    single = x.ndim < 2
    return (x[None], target.reshape(1, *target.shape), True) if single else (x, target, False)


@lower("multi_margin_loss")
def _multi_margin(
    x: Array,
    target: Array,
    p: int = 1,
    margin: float = 1.0,
    weight: Array | None = None,
    reduction: int = 1,
) -> Array:
    rows = opmath(x).reshape(-1, x.shape[-1])
    index = target.reshape(-1)
    own = jnp.take_along_axis(rows, index[:, None], 1)
    off = margin - own + rows
    terms = jnp.where(off > 0, off if p == 1 else off * off, 0)
    if weight is not None:
        terms = terms * opmath(weight)[index][:, None]
    terms = jnp.where(jnp.arange(rows.shape[1])[None] == index[:, None], 0, terms)
    sums = jnp.sum(terms, 1) / rows.shape[1]
    return _reduce(sums.reshape(target.shape), reduction, x.dtype.name)


@lower("multilabel_margin_loss_forward")
def _multilabel_margin(x: Array, target: Array, reduction: int) -> tuple[Array, Array]:
    rows, labels = opmath(x).reshape(-1, x.shape[-1]), target.reshape(-1, x.shape[-1])
    ended = jnp.cumsum(labels < 0, axis=1) > 0
    used = ~ended
    safe = jnp.where(used, labels, 0)
    hit = jnp.zeros(rows.shape, rows.dtype)
    hit = hit.at[jnp.arange(len(rows))[:, None], safe].max(used.astype(rows.dtype))
    own = jnp.take_along_axis(rows, safe, 1)
    off = 1 - own[:, :, None] + rows[:, None, :]
    counts = used[:, :, None] & (hit[:, None, :] == 0) & (off > 0)
    sums = jnp.sum(jnp.where(counts, off, 0), (1, 2)) / rows.shape[1]
    sums = sums.reshape(x.shape[:-1])
    return _reduce(sums, reduction, x.dtype.name), cast(hit.reshape(x.shape), x.dtype.name)


# -- distances ----------------------------------------------------------------------------------


def _length(off: Array, p: float) -> Array:
    """Return the norms of rows; each of several largest elements has the whole gradient."""
    if p != math.inf:
        return norm(off, p, (off.ndim - 1,), False)

    @jax.custom_jvp
    def largest(size: Array) -> Array:
        return jnp.max(size, -1)

    @largest.defjvp
    def each(primals: Any, tangents: Any) -> Any:
        made = largest(*primals)
        return made, jnp.sum(jnp.where(primals[0] == made[..., None], tangents[0], 0), -1)

    return largest(absolute(off))


@lower("_cdist_forward")
def _cdist(a: Array, b: Array, p: float, mode: int | None) -> Array:
    off = a[..., :, None, :] - b[..., None, :, :]
    # The largest distance ignores NaN here, like the kernel; that of pdist does not.
    off = jnp.where(jnp.isnan(off), 0, off) if p == math.inf else off
    return _length(off, float(p))


@lower("_euclidean_dist")
def _euclidean(a: Array, b: Array) -> Array:
    squares = (jnp.sum(x * x, -1) for x in (a, b))
    rows, columns = squares
    inner = precisely(a, jnp.swapaxes(b, -1, -2))
    made = rows[..., :, None] + columns[..., None, :] - 2 * inner
    root = derived(jnp.sqrt, lambda r, v: jnp.where(r == 0, 0, 1 / (2 * jnp.where(r == 0, 1, r))))
    return root(jnp.maximum(made, 0))


@lower("_pdist_forward")
def _pdist(x: Array, p: float = 2) -> Array:
    rows, columns = jnp.triu_indices(x.shape[0], 1)
    return _length(x[rows] - x[columns], float(p))
