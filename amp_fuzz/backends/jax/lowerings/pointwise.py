"""Lowerings of pointwise ops: arithmetic, functions, activations, comparisons, casts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy import special

from amp_fuzz.backends.jax.lowerings.table import (
    LOWERINGS,
    Array,
    absolute,
    cast,
    derived,
    is_array,
    lower,
    opmath,
    pointwise,
    promote,
    spread,
    wide,
)
from amp_fuzz.catalogue.promotion import floating, is_complex, is_float

# -- one XLA op each ----------------------------------------------------------------------------

for _name, _function in {
    "mul": jnp.multiply,
    "neg": lax.neg,
}.items():
    lower(_name)(pointwise(_function, native=True))


def _sign(x: Array) -> Array:
    """Return the sign, which is 0 for NaN, as in torch."""
    if is_complex(x.dtype.name):
        size = jnp.abs(x)
        return jnp.where(size == 0, 0, x / jnp.where(size == 0, 1, size))
    return jnp.where(jnp.isnan(x), 0, jnp.sign(x)) if is_float(x.dtype.name) else jnp.sign(x)


@lower("abs")
def _abs(x: Array) -> Array:
    return absolute(x)


lower("sign")(pointwise(lambda x: lax.stop_gradient(_sign(x))))
lower("sgn")(
    pointwise(lambda x: _sign(x) if is_complex(x.dtype.name) else lax.stop_gradient(_sign(x)))
)


def _added(sign: int) -> Any:
    def lowered(a: Any, b: Any, *, alpha: Any = 1) -> Array:
        scaled = alpha != 1
        dtype = promote(a, b)
        plain = pointwise(
            (lambda x, y: x + y) if sign > 0 else (lambda x, y: x - y), native=not scaled
        )
        if not scaled:
            return plain(a, b)
        compute = wide(dtype)
        factor = cast(alpha, compute)
        return cast(plain(cast(a, compute), cast(b, compute) * factor), dtype)

    return lowered


lower("add")(_added(1))
lower("sub")(_added(-1))
lower("rsub")(lambda a, b, alpha=1: _added(-1)(b, a, alpha=alpha))

# -- functions ----------------------------------------------------------------------------------


def _where(condition: Array, a: Any, b: Any) -> Array:
    return jnp.where(condition, a, b)


def _integers_stay(function: Any) -> Any:
    return lambda x: function(x) if jnp.issubdtype(x.dtype, jnp.inexact) else x


for _name, _function in {
    "exp": jnp.exp,
    "exp2": jnp.exp2,
    "expm1": jnp.expm1,
    "log": jnp.log,
    "log2": jnp.log2,
    "log10": jnp.log10,
    "log1p": jnp.log1p,
    "sqrt": jnp.sqrt,
    "rsqrt": lax.rsqrt,
    "sin": jnp.sin,
    "cos": jnp.cos,
    "tan": jnp.tan,
    "asin": jnp.arcsin,
    "acos": jnp.arccos,
    "atan": jnp.arctan,
    "sinh": jnp.sinh,
    "cosh": jnp.cosh,
    "tanh": jnp.tanh,
    "asinh": jnp.arcsinh,
    "acosh": jnp.arccosh,
    "atanh": jnp.arctanh,
    "erf": lax.erf,
    "erfc": lax.erfc,
    "erfinv": lax.erf_inv,
    "lgamma": lax.lgamma,
    "digamma": lambda x: jnp.where(x == 0, jnp.copysign(jnp.inf, -x), lax.digamma(x)),
    "i0": special.i0,
    "sinc": jnp.sinc,
    "special_entr": special.entr,
    "special_ndtr": special.ndtr,
    "special_log_ndtr": special.log_ndtr,
    "special_i0e": special.i0e,
    "special_i1": special.i1,
    "special_i1e": special.i1e,
    "sigmoid": jax.nn.sigmoid,
    "deg2rad": lambda x: x * (math.pi / 180),
    "rad2deg": lambda x: x * (180 / math.pi),
}.items():
    lower(_name)(pointwise(_function, floats=True))

lower("reciprocal")(pointwise(lambda x: 1 / x, floats=True))
lower("square")(pointwise(lambda x: x * x))
for _name, _function in {
    "floor": jnp.floor,
    "ceil": jnp.ceil,
    "trunc": jnp.trunc,
}.items():
    lower(_name)(pointwise(_integers_stay(_function)))
lower("frac")(pointwise(lambda x: x - jnp.trunc(x)))
lower("positive", "conj_physical", "_conj_physical")(
    lambda x: jnp.conj(x) if is_complex(x.dtype.name) else x
)


@lower("round")
def _round(x: Array, *, decimals: int = 0) -> Array:
    def rounded(x: Array) -> Array:
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return x
        if not decimals:
            return lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)
        scale = jnp.asarray(10.0 ** abs(decimals), x.dtype)
        to_even = lax.RoundingMethod.TO_NEAREST_EVEN
        if decimals > 0:
            return lax.round(x * scale, to_even) / scale
        return lax.round(x / scale, to_even) * scale

    return pointwise(lambda x: lax.stop_gradient(rounded(x)))(x)


@lower("nan_to_num")
def _nan_to_num(x: Array, nan: Any = None, posinf: Any = None, neginf: Any = None) -> Array:
    if not is_float(x.dtype.name):
        return x
    limits = jnp.finfo(x.dtype)
    high = limits.max if posinf is None else posinf
    low = limits.min if neginf is None else neginf
    parts = [jnp.asarray(v, x.dtype) for v in (0 if nan is None else nan, high, low)]
    x = jnp.where(jnp.isnan(x), parts[0], x)
    x = jnp.where(x == jnp.inf, parts[1], x)
    return jnp.where(x == -jnp.inf, parts[2], x)


# -- two operands -------------------------------------------------------------------------------

lower("hypot")(pointwise(derived(jnp.hypot, lambda r, x, y: x / r, lambda r, x, y: y / r)))
lower("atan2")(
    pointwise(
        derived(
            jnp.arctan2,
            lambda r, x, y: _where(x * x + y * y == 0, 0, y / (x * x + y * y)),
            lambda r, x, y: _where(x * x + y * y == 0, 0, -x / (x * x + y * y)),
        ),
        floats=True,
    )
)
lower("logaddexp")(
    pointwise(
        derived(
            jnp.logaddexp,
            lambda r, x, y: 1 / (1 + jnp.exp(y - x)),
            lambda r, x, y: 1 / (1 + jnp.exp(x - y)),
        )
    )
)
lower("logaddexp2")(
    pointwise(
        derived(
            jnp.logaddexp2,
            lambda r, x, y: 1 / (1 + jnp.exp2(y - x)),
            lambda r, x, y: 1 / (1 + jnp.exp2(x - y)),
        )
    )
)
lower("copysign")(
    pointwise(
        derived(
            lambda x, y: jnp.where(jnp.signbit(x) != jnp.signbit(y), -x, x),
            lambda r, x, y: _where(x == 0, 0, r / x),
            lambda r, x, y: jnp.zeros_like(x),
        ),
        floats=True,
    )
)
lower("xlogy", "special_xlogy")(
    pointwise(
        derived(
            lambda x, y: _where(jnp.isnan(y), y, _where(x == 0, 0, x * jnp.log(y))),
            lambda r, x, y: _where((x == 0) & (y <= 0), 0, jnp.log(y)),
            lambda r, x, y: x / y,
        ),
        floats=True,
    )
)
lower("special_xlog1py")(
    pointwise(
        derived(
            lambda x, y: _where(jnp.isnan(y), y, _where(x == 0, 0, x * jnp.log1p(y))),
            lambda r, x, y: _where((x == 0) & (y <= -1), 0, jnp.log1p(y)),
            lambda r, x, y: x / (y + 1),
        ),
        floats=True,
    )
)


def _halves(function: Any) -> Any:
    """Return the larger or smaller of two; at a tie both share the gradient."""
    return pointwise(function, native=True)


lower("maximum")(_halves(jnp.maximum))
lower("minimum")(_halves(jnp.minimum))


def _larger(x: Array, y: Array) -> Array:
    if not is_float(x.dtype.name):
        return jnp.maximum(x, y)
    return jnp.where((x >= y) | jnp.isnan(y), x, y)


def _smaller(x: Array, y: Array) -> Array:
    if not is_float(x.dtype.name):
        return jnp.minimum(x, y)
    return jnp.where((x <= y) | jnp.isnan(y), x, y)


lower("fmax")(pointwise(_larger, native=True))
lower("fmin")(pointwise(_smaller, native=True))


@lower("div", "true_divide")
def _div(a: Any, b: Any, *, rounding_mode: str | None = None) -> Array:
    if rounding_mode is None:
        return pointwise(lambda x, y: x / y, floats=True)(a, b)
    if rounding_mode == "trunc":
        return pointwise(lambda x, y: _quotient(jnp.trunc, x, y))(a, b)
    return _floor_divide(a, b)


def _quotient(rounded: Any, x: Array, y: Array) -> Array:
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return lax.stop_gradient(rounded(x / y))
    return lax.div(x, y) if rounded is jnp.trunc else jnp.floor_divide(x, y)


@lower("floor_divide")
def _floor_divide(a: Any, b: Any) -> Array:
    def floored(x: Array, y: Array) -> Array:
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return jnp.floor_divide(x, y)
        rest = lax.rem(x, y)
        whole = (x - rest) / y
        whole = jnp.where((rest != 0) & ((rest < 0) != (y < 0)), whole - 1, whole)
        down = jnp.floor(whole)
        down = jnp.where(whole - down > 0.5, down + 1, down)
        zero = jnp.copysign(jnp.zeros_like(x), x / y)
        found = jnp.where(whole != 0, down, zero)
        return lax.stop_gradient(jnp.where(y == 0, x / y, found))

    return pointwise(floored)(a, b)


@lower("remainder")
def _remainder(a: Any, b: Any) -> Array:
    def rest(x: Array, y: Array) -> Array:
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return jnp.remainder(x, y)
        made = lax.rem(x, y)
        return jnp.where((made != 0) & ((y < 0) != (made < 0)), made + y, made)

    def by(_: Array, x: Array, y: Array) -> Array:
        return -jnp.floor(x / y)

    def floating_rest(x: Array, y: Array) -> Array:
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return rest(x, y)
        return derived(rest, lambda _, x, y: jnp.ones_like(x), by)(x, y)

    return pointwise(floating_rest)(a, b)


@lower("fmod")
def _fmod(a: Any, b: Any) -> Array:
    def rest(x: Array, y: Array) -> Array:
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return lax.rem(x, y)
        one = derived(lax.rem, lambda _, x, y: jnp.ones_like(x), lambda _, x, y: -jnp.trunc(x / y))
        return one(x, y)

    return pointwise(rest)(a, b)


def _power(x: Array, y: Array) -> Array:
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return jnp.power(x, y)
    if is_complex(x.dtype.name):
        return jnp.power(x, y)
    return _real_power(x, y)


_real_power = derived(
    lax.pow,
    lambda r, x, y: _where(y == 0, 0, y * lax.pow(x, y - 1)),
    lambda r, x, y: _where((x == 0) & (y >= 0), 0, r * jnp.log(x)),
)


@lower("pow")
def _pow(a: Any, b: Any) -> Array:
    if not is_array(b) and not isinstance(b, (bool, complex)) and is_array(a):
        dtype = promote(a, b)
        compute = wide(dtype)
        x = cast(a, compute)
        if jnp.issubdtype(x.dtype, jnp.inexact):
            return cast(_fixed_power(x, b), dtype)
        return cast(jnp.power(x, jnp.asarray(b, compute)), dtype)
    return pointwise(_power)(a, b)


def _fixed_power(x: Array, exponent: float) -> Array:
    """Return a power to a number, with torch's derivative."""
    if exponent == 0:
        return _ones(x)
    return derived(
        lambda x: _as_torch_powers(x, exponent),
        lambda r, x: exponent * _as_torch_powers(x, exponent - 1),
    )(x)


@jax.custom_vjp
def _ones(x: Array) -> Array:
    """Return ones with a gradient of zeros, whatever it is multiplied with.

    The gradient must exist: a value computed from it may be NaN times it.
    """
    return jnp.ones_like(x)


_ones.defvjp(lambda x: (jnp.ones_like(x), x), lambda x, grad: (jnp.zeros_like(x),))


def _as_torch_powers(x: Array, exponent: float) -> Array:
    """Compute small powers by products and roots: the power -0.5 of -inf is NaN, not 0."""
    if exponent in _POWERS:
        return _POWERS[exponent](x)
    if is_complex(x.dtype.name):
        return jnp.power(x, jnp.asarray(exponent, x.dtype))
    return lax.pow(x, jnp.asarray(exponent, x.dtype))


# aten/src/ATen/native/cpu/PowKernel.cpp
_POWERS: Mapping[float, Callable[[Array], Array]] = {
    0: jnp.ones_like,
    1: lambda x: x,
    2: lambda x: x * x,
    3: lambda x: x * x * x,
    0.5: jnp.sqrt,
    -0.5: lax.rsqrt,
    -1: lambda x: 1 / x,
    -2: lambda x: 1 / (x * x),
}


lower("float_power")(lambda a, b: _pow(*(cast(o, "float64") for o in (a, b))))


@lower("heaviside")
def _heaviside(x: Array, values: Array) -> Array:
    return pointwise(
        lambda x, v: jnp.where(x == 0, v, jnp.where(jnp.isnan(x), 0, (x > 0).astype(x.dtype)))
    )(x, values)


@lower("lerp")
def _lerp(start: Array, end: Array, weight: Any) -> Array:
    def between(s: Array, e: Array, w: Array) -> Array:
        return jnp.where(jnp.abs(w) < 0.5, s + w * (e - s), e - (e - s) * (1 - w))

    def forward(s: Array, e: Array, w: Array) -> Array:
        rule = derived(
            between, lambda r, s, e, w: 1 - w, lambda r, s, e, w: w, lambda r, s, e, w: e - s
        )
        return rule(s, e, w)

    return pointwise(forward)(start, end, weight)


@lower("addcmul")
def _addcmul(x: Array, a: Array, b: Array, *, value: Any = 1) -> Array:
    return pointwise(lambda x, a, b: x + cast(value, x.dtype.name) * a * b)(x, a, b)


@lower("addcdiv")
def _addcdiv(x: Array, a: Array, b: Array, *, value: Any = 1) -> Array:
    return pointwise(lambda x, a, b: x + cast(value, x.dtype.name) * (a / b), floats=True)(x, a, b)


# -- bounds -------------------------------------------------------------------------------------


def _bounded(x: Array, low: Array | None, high: Array | None) -> Array:
    if low is not None:
        given = low if high is None else jnp.where(low < high, low, lax.stop_gradient(low))
        x = jnp.where(jnp.isnan(given), given, x) if is_float(x.dtype.name) else x
        x = jnp.where(x < given, given, x)
    if high is not None:
        x = jnp.where(jnp.isnan(high), high, x) if is_float(x.dtype.name) else x
        x = jnp.where(x > high, high, x)
    return x


@lower("clamp", "clip")
def _clamp(x: Array, min: Any = None, max: Any = None) -> Array:  # noqa: A002
    given = [o for o in (x, min, max) if o is not None]

    def bounded(x: Array, *bounds: Array) -> Array:
        x = jnp.where(jnp.isnan(x), lax.stop_gradient(x), x)  # no gradient between two bounds
        rest = iter(bounds)
        low = next(rest) if min is not None else None
        return _bounded(x, low, next(rest) if max is not None else None)

    return pointwise(bounded)(*given)


lower("clamp_min")(lambda x, min: _clamp(x, min))  # noqa: A006
lower("clamp_max")(lambda x, max: _clamp(x, None, max))  # noqa: A006

# -- comparisons --------------------------------------------------------------------------------

for _name, _function in {
    "eq": lambda x, y: x == y,
    "ne": lambda x, y: x != y,
    "lt": lambda x, y: x < y,
    "le": lambda x, y: x <= y,
    "gt": lambda x, y: x > y,
    "ge": lambda x, y: x >= y,
}.items():
    lower(_name)(pointwise(_function, result="bool"))
lower("isnan")(lambda x: jnp.isnan(x))
lower("isinf")(lambda x: jnp.isinf(x))
lower("isfinite")(lambda x: jnp.isfinite(x))
lower("isposinf")(lambda x: x == jnp.inf)
lower("isneginf")(lambda x: x == -jnp.inf)
lower("signbit")(lambda x: jnp.signbit(x) if is_float(x.dtype.name) else x < 0)
lower("logical_not")(lambda x: cast(x, "bool") == False)  # noqa: E712
for _name, _function in {
    "logical_and": jnp.logical_and,
    "logical_or": jnp.logical_or,
    "logical_xor": jnp.logical_xor,
}.items():
    lower(_name)(pointwise(_function, result="bool"))
for _name, _function in {
    "bitwise_and": jnp.bitwise_and,
    "bitwise_or": jnp.bitwise_or,
    "bitwise_xor": jnp.bitwise_xor,
    "__and__": jnp.bitwise_and,
    "__or__": jnp.bitwise_or,
    "__xor__": jnp.bitwise_xor,
}.items():
    lower(_name)(pointwise(_function))
lower("bitwise_not")(jnp.bitwise_not)


@lower("where")
def _choose(condition: Array, a: Any, b: Any) -> Array:
    dtype = promote(a, b)
    arrays = [o for o in (condition, a, b) if is_array(o)]
    shape = jnp.broadcast_shapes(*(x.shape for x in arrays))
    a, b = (spread(cast(o, dtype), shape) for o in (a, b))
    return jnp.where(cast(condition, "bool"), a, b)


@lower("masked_fill")
def _masked_fill(x: Array, mask: Array, value: Any) -> Array:
    shape = jnp.broadcast_shapes(x.shape, mask.shape)
    filled = spread(cast(value, x.dtype.name), shape)
    return jnp.where(mask, filled, spread(x, shape))


# -- activations --------------------------------------------------------------------------------


def _activation(*names: str) -> Any:
    """Enter a function of one floating array and of numbers, computed with in float32."""

    def enter(function: Any) -> Any:
        def lowered(x: Array, *args: Any, **kwargs: Any) -> Array:
            dtype = floating(x.dtype.name)
            return cast(function(cast(x, wide(dtype)), *args, **kwargs), dtype)

        return lower(*names)(lowered)

    return enter


# Derivatives are torch's (aten/src/ATen/native/cpu/Activation.cpp), computed before they are
# multiplied by the gradient: in another order, large inputs times it become infinite, then NaN.


@_activation("silu")
def _silu(x: Array) -> Array:
    return derived(lambda x: x * jax.nn.sigmoid(x), _silu_slope)(x)


def _silu_slope(out: Array, x: Array) -> Array:
    s = jax.nn.sigmoid(x)
    return s * (1 + x * (1 - s))


@_activation("mish")
def _mish(x: Array) -> Array:
    return derived(lambda x: x * jnp.tanh(_softplus_of(x)), _mish_slope)(x)


def _mish_slope(out: Array, x: Array) -> Array:
    t = jnp.tanh(_softplus_of(x))
    return t + x * jax.nn.sigmoid(x) * (1 - t * t)


def _softplus_of(x: Array) -> Array:
    return jnp.maximum(x, 0) + jnp.log1p(jnp.exp(-jnp.abs(x)))


@_activation("gelu")
def _gelu(x: Array, *, approximate: str = "none") -> Array:
    if approximate == "tanh":
        return derived(lambda x: 0.5 * x * (1 + _gelu_tanh(x)), _gelu_tanh_slope)(x)
    return derived(lambda x: x * _below(x), _gelu_slope)(x)


def _below(x: Array) -> Array:
    """Return the normal distribution function; torch's 1 + erf cancels."""
    return 0.5 * lax.erfc(-x * math.sqrt(0.5))


def _gelu_slope(out: Array, x: Array) -> Array:
    density = jnp.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    return _below(x) + x * density


def _gelu_tanh(x: Array) -> Array:
    return jnp.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x))


def _gelu_tanh_slope(out: Array, x: Array) -> Array:
    t = _gelu_tanh(x)
    inner = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x * x)
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * inner


@_activation("hardswish")
def _hardswish(x: Array) -> Array:
    return jnp.where(x <= -3, 0, jnp.where(x >= 3, x, x * (x + 3) / 6))


@_activation("hardsigmoid")
def _hardsigmoid(x: Array) -> Array:
    return jnp.where(x <= -3, 0, jnp.where(x >= 3, 1, x / 6 + 0.5))


@_activation("softshrink")
def _softshrink(x: Array, lambd: float = 0.5) -> Array:
    return jnp.where(x > lambd, x - lambd, jnp.where(x < -lambd, x + lambd, x * 0))


@_activation("softplus")
def _softplus(x: Array, beta: float = 1, threshold: float = 20) -> Array:
    smooth = derived(
        lambda x: jnp.where(x * beta > threshold, x, jnp.log1p(jnp.exp(x * beta)) / beta),
        lambda r, x: jnp.where(x * beta > threshold, 1, jax.nn.sigmoid(x * beta)),
    )
    return smooth(x)


@_activation("log_sigmoid")
def _log_sigmoid(x: Array) -> Array:
    return jnp.minimum(x, 0) - jnp.log1p(jnp.exp(-absolute(x)))


def _log_sigmoid_forward(x: Array) -> tuple[Array, Array]:
    return LOWERINGS["log_sigmoid"](x), jnp.exp(-jnp.abs(x))


@_activation("elu")
def _elu(x: Array, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Array:
    below = alpha * scale * jnp.expm1(jnp.where(x <= 0, x, 0) * input_scale)
    return jnp.where(x <= 0, below, x * scale)


@_activation("leaky_relu")
def _leaky_relu(x: Array, negative_slope: float = 0.01) -> Array:
    return jnp.where(x > 0, x, x * negative_slope)


@lower("relu")
def _relu(x: Array) -> Array:
    return jnp.where(x <= 0, jnp.zeros_like(x), x)


@lower("hardtanh")
def _hardtanh(x: Array, min_val: float = -1, max_val: float = 1) -> Array:
    low, high = (jnp.asarray(v, x.dtype) for v in (min_val, max_val))
    return jnp.where(x <= low, low, jnp.where(x >= high, high, x))


@lower("hardshrink")
def _hardshrink(x: Array, lambd: float = 0.5) -> Array:
    limit = jnp.asarray(lambd, x.dtype)
    return jnp.where((x >= -limit) & (x <= limit), jnp.zeros_like(x), x)


@lower("threshold")
def _threshold(x: Array, threshold: float, value: float) -> Array:
    return jnp.where(x <= jnp.asarray(threshold, x.dtype), jnp.asarray(value, x.dtype), x)


@lower("glu")
def _glu(x: Array, dim: int = -1) -> Array:
    a, b = jnp.split(opmath(x), 2, axis=dim)
    return cast(a * jax.nn.sigmoid(b), x.dtype.name)


@lower("prelu", "_prelu_kernel")
def _prelu(x: Array, weight: Array) -> Array:
    return pointwise(_leaking)(x, weight)


def _leaking(x: Array, w: Array) -> Array:
    # The product must not see unselected elements: its gradient would be 0 times an infinity.
    low, slope = (jnp.where(x > 0, 0, o) for o in (x, w))
    return jnp.where(x > 0, x, slope * low)


@lower("rrelu_with_noise", "rrelu")
def _rrelu(
    x: Array, noise: Any = None, lower: float = 1 / 8, upper: float = 1 / 3, *_: Any
) -> Array:
    return LOWERINGS["leaky_relu"](x, (lower + upper) / 2)


# -- casts, copies, constants -------------------------------------------------------------------


@lower("_to_copy", "clone", "copy", "lift_fresh_copy", "alias_copy", "contiguous", "detach_copy")
def _to_copy(x: Array, *rest: Any, dtype: str | None = None) -> Array:
    if rest and is_array(rest[0]):  # copy(self, src)
        return spread(cast(rest[0], x.dtype.name), x.shape)
    return cast(x, dtype)


@lower("view_as_real", "view_as_real_copy")
def _view_as_real(x: Array) -> Array:
    return jnp.stack([x.real, x.imag], -1)


@lower("view_as_complex", "view_as_complex_copy")
def _view_as_complex(x: Array) -> Array:
    return lax.complex(x[..., 0], x[..., 1])


lower("complex")(
    lambda a, b: lax.complex(*(spread(o, jnp.broadcast_shapes(a.shape, b.shape)) for o in (a, b)))
)


@lower("polar")
def _polar(size: Array, angle: Array) -> Array:
    shape = jnp.broadcast_shapes(size.shape, angle.shape)
    size, angle = (spread(o, shape) for o in (size, angle))
    return lax.complex(size * jnp.cos(angle), size * jnp.sin(angle))


@lower("angle")
def _angle(x: Array) -> Array:
    dtype = floating(x.dtype.name)
    if is_complex(dtype):
        return jnp.angle(x)
    x = cast(x, dtype)
    return lax.stop_gradient(
        jnp.where(jnp.isnan(x), x, jnp.where(x < 0, jnp.asarray(math.pi, dtype), jnp.zeros_like(x)))
    )


@lower("fill")
def _fill(x: Array, value: Any) -> Array:
    return spread(cast(value, x.dtype.name), x.shape)


lower("zero")(lambda x: jnp.zeros_like(x))
lower("zeros_like")(lambda x, dtype=None: jnp.zeros(x.shape, dtype or x.dtype))
lower("ones_like")(lambda x, dtype=None: jnp.ones(x.shape, dtype or x.dtype))
lower("full_like")(lambda x, value, dtype=None: jnp.full(x.shape, value, dtype or x.dtype))
lower("new_zeros")(lambda x, shape, dtype=None: jnp.zeros(shape, dtype or x.dtype))
lower("new_ones")(lambda x, shape, dtype=None: jnp.ones(shape, dtype or x.dtype))
lower("new_full")(lambda x, shape, value, dtype=None: jnp.full(shape, value, dtype or x.dtype))
lower("zeros")(lambda shape, dtype="float32": jnp.zeros(shape, dtype))
lower("ones")(lambda shape, dtype="float32": jnp.ones(shape, dtype))


@lower("full")
def _full(shape: Any, value: Any, dtype: str | None = None) -> Array:
    return jnp.full(shape, value, dtype or promote(value))


lower("scalar_tensor")(lambda value, dtype="float32": jnp.asarray(value, dtype))


@lower("arange")
def _arange(start: Any, end: Any = None, step: Any = 1, dtype: str | None = None) -> Array:
    if end is None:
        start, end = 0, start
    return jnp.arange(start, end, step, dtype=dtype or promote(start, end, step))


lower("log_sigmoid_forward")(_log_sigmoid_forward)
lower("eye")(lambda n, dtype="float32": jnp.eye(n, dtype=dtype))
lower("eye.m")(lambda n, m, dtype="float32": jnp.eye(n, m, dtype=dtype))
