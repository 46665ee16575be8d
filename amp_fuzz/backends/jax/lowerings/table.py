"""The table of lowerings: ATen op -> an equivalent function on JAX arrays.

A lowering takes the dispatcher's arguments, with arrays for tensors and names for dtypes, and
returns an array or a tuple. It computes its result's dtype by torch's promotion rules and rounds to
it once. It computes 16-bit inputs in float32, as torch's kernels do, unless one XLA op is the whole
lowering. Its derivative follows torch's conventions, at a kink and at a tie.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from amp_fuzz.catalogue.core import Value
from amp_fuzz.catalogue.promotion import floating, is_complex, is_float, result_type

__all__ = [
    "LOWERINGS",
    "Array",
    "absolute",
    "cast",
    "derived",
    "find",
    "is_array",
    "kept",
    "lower",
    "opmath",
    "pointwise",
    "promote",
    "spread",
    "wide",
]

Array: TypeAlias = Any
"""A JAX array, concrete or traced."""

Lowering: TypeAlias = Callable[..., Any]

LOWERINGS: dict[str, Lowering] = {}
"""By name of the overload (``pow.Tensor_Scalar``), or of the op for all its overloads."""

_WIDE: Mapping[str, str] = {"float16": "float32", "bfloat16": "float32", "complex32": "complex64"}


def lower(*names: str) -> Callable[[Lowering], Lowering]:
    """Enter a function into the table under these names."""

    def enter(function: Lowering) -> Lowering:
        for name in names:
            if name in LOWERINGS:
                raise ValueError(f"{name} is lowered twice")
            LOWERINGS[name] = function
        return function

    return enter


@lru_cache(maxsize=4096)
def find(op: str) -> Lowering | None:
    """Return the lowering of an overload, ``add.Tensor``, or None."""
    return LOWERINGS.get(op) or LOWERINGS.get(op.partition(".")[0])


# -- dtypes -------------------------------------------------------------------------------------


def is_array(x: Any) -> bool:
    """Return whether an argument is an array, not a number or None."""
    return isinstance(x, jax.Array) or hasattr(x, "aval")


def wide(dtype: str) -> str:
    """Return the dtype in which torch's kernels compute: float32 for 16 bits."""
    return _WIDE.get(dtype, dtype)


def promote(*operands: Any) -> str:
    """Return the dtype that arrays and numbers promote to, by torch's rules."""
    given = [o for o in operands if o is not None]
    if any(isinstance(o, complex) for o in given):
        rest = promote(*(o for o in given if not isinstance(o, complex)))
        return rest if is_complex(rest) else "complex128" if rest == "float64" else "complex64"
    return result_type(*(_operand(o) for o in given))


def _operand(x: Any) -> Any:
    return Value("", tuple(x.shape), x.dtype.name) if is_array(x) else x


def cast(x: Any, dtype: str | None) -> Array:
    """Return an array or number as an array of a dtype; None leaves it unchanged."""
    if not is_array(x):
        return jnp.asarray(x, dtype)
    if dtype is None or x.dtype == dtype:
        return x
    if is_complex(x.dtype.name) and not is_complex(dtype):
        x = x.real
    if dtype == "bool":
        return x != 0
    if is_float(x.dtype.name) and dtype == "uint8":
        return x.astype("int64").astype("uint8")  # as C++ does for values in range
    return x.astype(dtype)


def opmath(x: Array) -> Array:
    """Return an array in the dtype in which torch's kernels compute."""
    return cast(x, wide(x.dtype.name))


def spread(x: Array, shape: Sequence[int]) -> Array:
    """Broadcast; its derivative sums in float32 and rounds once."""
    if tuple(x.shape) == tuple(shape):
        return x
    return cast(jnp.broadcast_to(opmath(x), tuple(shape)), x.dtype.name)


def kept(shape: Sequence[int], dims: Any, keepdim: bool) -> tuple[int, ...]:
    """Return the shape after a reduction over normalised dims."""
    return tuple(
        1 if d in dims else size for d, size in enumerate(shape) if keepdim or d not in dims
    )


# -- derivatives --------------------------------------------------------------------------------


def derived(function: Lowering, *partials: Lowering) -> Lowering:
    """Return a function of arrays with torch's partial derivatives.

    partials: one for each argument, functions of the result and the arguments; shapes are equal.
    """
    made: Lowering = jax.custom_jvp(function)

    def rule(primals: Any, tangents: Any) -> Any:
        out = made(*primals)
        total = jnp.zeros_like(out)
        for tangent, partial in zip(tangents, partials, strict=True):
            if not isinstance(tangent, jax.custom_derivatives.SymbolicZero):
                total = total + tangent * partial(out, *primals)
        return out, total

    made.defjvp(rule)  # type: ignore[attr-defined]
    return made


def absolute(x: Array) -> Array:
    """Return the absolute value; its derivative is 0 at 0, where JAX has 1, and at NaN."""
    if not is_float(x.dtype.name):
        return jnp.abs(x)
    return derived(jnp.abs, lambda r, x: jnp.where(jnp.isnan(x), 0, jnp.sign(x)))(x)


# -- pointwise ----------------------------------------------------------------------------------


def pointwise(
    function: Lowering, *, floats: bool = False, native: bool = False, result: str | None = None
) -> Lowering:
    """Return the lowering of a pointwise op of arrays and numbers.

    floats: integers become float32. native: one XLA op computes it, in 16 bits too. result: the
    dtype of the result, if it is not what the operands promote to.
    """

    def lowered(*operands: Any) -> Array:
        dtype = promote(*operands)
        dtype = floating(dtype) if floats else dtype
        arrays = [o for o in operands if is_array(o)]
        shape = jnp.broadcast_shapes(*(a.shape for a in arrays))
        plain = native and all(is_array(o) and o.shape == shape for o in operands)
        compute = dtype if plain else wide(dtype)
        given = [jnp.broadcast_to(cast(o, compute), shape) for o in operands]
        return cast(function(*given), result or dtype)

    return lowered
