"""Lowerings of matrix products and convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from amp_fuzz.backends.jax.lowerings.table import (
    LOWERINGS,
    Array,
    cast,
    lower,
    opmath,
    promote,
    spread,
)
from amp_fuzz.catalogue.promotion import is_float

__all__ = ["precisely", "product"]


def product(a: Array, b: Array) -> Array:
    """Return the matrix product in the common dtype, as one ``dot_general``."""
    if not (is_float(a.dtype.name) or jnp.issubdtype(a.dtype, jnp.complexfloating)):
        return jnp.matmul(cast(a, "int64"), cast(b, "int64")).astype(a.dtype)
    return jnp.matmul(a, b)


def precisely(a: Array, b: Array) -> Array:
    """Return a product inside a lowering of something else, in float32 whatever the precision.

    JAX's own decompositions ask for it, too.
    """
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


for _name in ("mm", "bmm", "mv", "dot"):
    lower(_name)(lambda a, b, **_: product(a, b))
lower("vdot")(lambda a, b: product(jnp.conj(a), b))


def _biased(summed: Any) -> Any:
    """Return a product added to another array: in float32 for 16 bits, rounded once."""

    def lowered(x: Array, a: Array, b: Array, *, beta: Any = 1, alpha: Any = 1, **_: Any) -> Array:
        dtype = a.dtype.name
        compute = opmath(a).dtype
        made = summed(a, b).astype(compute)
        made = made if alpha == 1 else made * cast(alpha, compute.name)
        if beta == 0:
            return cast(made, dtype)
        own = spread(opmath(x), made.shape)
        own = own if beta == 1 else own * cast(beta, compute.name)
        return cast(own + made, dtype)

    return lowered


def _unrounded(made: Any) -> Any:
    """Return a product of two 16-bit arrays as accumulated, in float32.

    made: a function of the arrays and the result's dtype. The gradients are also products of 16-bit
    arrays, as in torch.
    """

    @jax.custom_vjp
    def forward(a: Array, b: Array) -> Array:
        return made(a, b, jnp.float32)

    def keep(a: Array, b: Array) -> tuple[Array, tuple[Array, Array]]:
        return made(a, b, jnp.float32), (a, b)

    def back(given: tuple[Array, Array], cotangent: Array) -> tuple[Array, Array]:
        a, b = given
        pulled: tuple[Array, Array] = jax.vjp(lambda a, b: made(a, b, a.dtype), a, b)[1](
            cotangent.astype(a.dtype)
        )
        return pulled

    forward.defvjp(keep, back)

    def lowered(a: Array, b: Array) -> Array:
        if a.dtype.name in ("bfloat16", "float16"):
            return forward(a, b)
        return made(a, b, None)

    return lowered


def _plain(a: Array, b: Array, dtype: Any) -> Array:
    return product(a, b) if dtype is None else jnp.matmul(a, b, preferred_element_type=dtype)


_accumulated = _unrounded(_plain)


lower("addmm", "addmv", "baddbmm")(_biased(_accumulated))


@lower("addr")
def _addr(x: Array, a: Array, b: Array, *, beta: Any = 1, alpha: Any = 1) -> Array:
    # Unlike similar ops it promotes, and a 0-d tensor counts.
    dtype = promote(*(jnp.reshape(o, -1) for o in (x, a, b)))
    x, a, b = (cast(o, dtype) for o in (x, a, b))
    outer = _biased(lambda a, b: opmath(a)[:, None] * opmath(b)[None])
    return outer(x, a, b, beta=beta, alpha=alpha)


@lower("addbmm")
def _addbmm(x: Array, a: Array, b: Array, *, beta: Any = 1, alpha: Any = 1) -> Array:
    return _biased(lambda a, b: jnp.sum(_accumulated(a, b), 0))(x, a, b, beta=beta, alpha=alpha)


@lower("_addmm_activation")
def _addmm_activation(
    x: Array, a: Array, b: Array, *, beta: Any = 1, alpha: Any = 1, use_gelu: bool = False
) -> Array:
    made = _biased(_accumulated)(x, a, b, beta=beta, alpha=alpha)
    return LOWERINGS["gelu"](made) if use_gelu else LOWERINGS["relu"](made)


@lower("linear")
def _linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    made = _accumulated(x, jnp.swapaxes(weight, -1, -2) if weight.ndim > 1 else weight)
    if bias is not None:
        made = made + opmath(bias)
    return cast(made, x.dtype.name)


@lower("_trilinear")
def _trilinear(
    a: Array,
    b: Array,
    c: Array,
    expand1: Sequence[int],
    expand2: Sequence[int],
    expand3: Sequence[int],
    sumdim: Sequence[int],
    unroll_dim: int = 1,
) -> Array:
    """Return the sum of products of three, summing the first product first, as torch does.

    The gradients use the same order (_trilinear_backward, aten/src/ATen/native/Linear.cpp); in
    another order other products leave the range.
    """
    one, two, three, over = (tuple(dims) for dims in (expand1, expand2, expand3, sumdim))

    @jax.custom_vjp
    def made(a: Array, b: Array, c: Array) -> Array:
        return _contracted((a, b, c), (one, two, three), over)

    def forward(a: Array, b: Array, c: Array) -> Any:
        return made(a, b, c), (a, b, c)

    def backward(given: Any, grad: Array) -> Any:
        a, b, c = given
        return (
            _contracted((grad, b, c), (over, two, three), one),
            _contracted((a, grad, c), (one, over, three), two),
            _contracted((a, b, grad), (one, two, over), three),
        )

    made.defvjp(forward, backward)
    return cast(made(*(opmath(x) for x in (a, b, c))), a.dtype.name)


def _contracted(
    given: Sequence[Array], expand: Sequence[tuple[int, ...]], over: tuple[int, ...]
) -> Array:
    a, b, c = (jnp.expand_dims(x, dims) for x, dims in zip(given, expand, strict=True))
    first = tuple(d for d in over if d in expand[2])
    return jnp.sum(jnp.sum(a * b, axis=first, keepdims=True) * c, axis=over)


# -- convolutions -------------------------------------------------------------------------------

_LETTERS = "DHW"


@lower("convolution", "_convolution", "convolution_overrideable")
def _convolution(
    x: Array,
    weight: Array,
    bias: Array | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    *_: Any,
) -> Array:
    n = weight.ndim - 2
    batched = x.ndim == n + 2
    given = x if batched else x[None]
    stride, padding, dilation, more = (
        _each(v, n) for v in (stride, padding, dilation, output_padding)
    )
    letters = _LETTERS[-n:]
    numbers = ("NC" + letters, "OI" + letters, "NC" + letters)
    size = weight.shape[2:]
    if transposed:
        kernel = jnp.flip(weight, range(2, n + 2))
        inputs, per = kernel.shape[0], kernel.shape[1]
        kernel = kernel.reshape(groups, inputs // groups, per, *size)
        kernel = jnp.swapaxes(kernel, 1, 2).reshape(groups * per, inputs // groups, *size)
        pads = []
        for k, _s, p, d, o in zip(size, stride, padding, dilation, more, strict=True):
            edge = d * (k - 1) - p
            pads.append((edge, edge + o))
        options: dict[str, Any] = {"window_strides": (1,) * n, "lhs_dilation": stride}
    else:
        kernel, pads = weight, [(p, p) for p in padding]
        options = {"window_strides": stride}

    def convolved(x: Array, kernel: Array, dtype: Any) -> Array:
        return lax.conv_general_dilated(
            x,
            kernel,
            padding=pads,
            rhs_dilation=dilation,
            dimension_numbers=numbers,
            feature_group_count=groups,
            preferred_element_type=dtype,
            **options,
        )

    if bias is None:
        made = convolved(given, kernel, None)
    else:
        made = _unrounded(convolved)(given, kernel) + opmath(bias).reshape(-1, *[1] * n)
    made = cast(made, x.dtype.name)
    return made if batched else made[0]


def _each(value: Any, n: int) -> tuple[int, ...]:
    values = [value] if isinstance(value, int) else list(value)
    return tuple(values * n if len(values) == 1 else values)


@lower("conv_tbc")
def _conv_tbc(x: Array, weight: Array, bias: Array, pad: int = 0) -> Array:
    own, kernel = jnp.transpose(x, (1, 2, 0)), jnp.transpose(weight, (2, 1, 0))
    made = _convolution(own, kernel, bias, [1], [pad], [1], False, [0], 1)
    return jnp.transpose(made, (2, 0, 1))
