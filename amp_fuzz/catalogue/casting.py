"""Explicit casts, and constants and complex numbers made in a given dtype.

A program that casts by hand inside autocast is the most common mixed-precision code there is: what
it casts must stay what it asked for until the next listed op.
"""

from __future__ import annotations

from typing import Any

from amp_fuzz.cases.program import FLOAT_DTYPES, DType
from amp_fuzz.catalogue.arithmetic import torch_forms
from amp_fuzz.catalogue.core import Build, Builder, Call, op, out

CASTS = frozenset(("to.dtype", "to.other", "type_as", "float", "half", "bfloat16", "copy_"))
"""The ops by which a program asks for a rounding."""

_FLOATS = ("bfloat16", "float16", "float32", "float64")


# `to` gives the tensor itself where it has that dtype already.
@op("to.dtype", method="to", view=True)
def _to_dtype(g: Builder) -> Call:
    x = g.tensor(kind="real")
    dtype = g.choice(_FLOATS)
    return Call((x, DType(dtype)), out(x.shape, dtype=dtype), g.options(copy=(False, True)))


@op("to.other", method="to", view=True)
def _to_other(g: Builder) -> Call:
    x = g.tensor(kind="real")
    other = g.tensor()
    return Call((x, other), out(x.shape, dtype=other.dtype))


@op("type_as", method="type_as", view=True)
def _type_as(g: Builder) -> Call:
    return _to_other(g)


def _to_float(dtype: str) -> Build:
    def build(g: Builder) -> Call:
        x = g.tensor(kind="real")
        return Call((x,), out(x.shape, dtype=dtype))

    return build


for _name, _dtype in {
    "float": "float32",
    "half": "float16",
    "bfloat16": "bfloat16",
    "double": "float64",
}.items():
    op(_name, method=_name, view=True)(_to_float(_dtype))

op("bool", method="bool")(_to_float("bool"))


# What a NaN, an infinity or a value out of range becomes as an integer is undefined in C++: the
# templates leave none.
def _to_integer(dtype: str) -> Build:
    def build(g: Builder) -> Call:
        x = g.tensor()
        return Call((x,), out(x.shape, dtype=dtype))

    return build


for _name, _dtype, _low in (("int", "int32", -9), ("long", "int64", -9), ("byte", "uint8", 0)):
    _template = f"{{0}}.nan_to_num().clamp({_low}, 9).{_name}()"
    op(_name, method=_template)(_to_integer(_dtype))


@op("copy_", inplace="copy_", cpu_tensors=(1,))
def _copy(g: Builder) -> Call:
    x = g.receiver()
    return Call((x, g.broadcastable(x.shape, kind="real")), out(x.shape, dtype=x.dtype))


# -- constants --------------------------------------------------------------------------------


def _like(*values: Any) -> Build:
    """Return a build function of a tensor shaped like another, in its dtype or a given one."""

    def build(g: Builder) -> Call:
        x = g.tensor(kind="real")
        dtype = g.choice((None, *FLOAT_DTYPES, "int64", "bool"))
        options = {} if dtype is None else {"dtype": DType(dtype)}
        fill = [g.choice(values)] if values else []
        return Call((x, *fill), out(x.shape, dtype=dtype or x.dtype), options)

    return build


op("zeros_like", function="torch.zeros_like")(_like())
op("ones_like", function="torch.ones_like")(_like())
op("full_like", function="torch.full_like")(_like(0.5, 2, -1.5, True))


def _new(*, fills: bool = False) -> Build:
    """Return a build function of a tensor of a given shape, in another's dtype or a given one."""

    def build(g: Builder) -> Call:
        x = g.tensor()
        shape = g.shape(0, 3)
        dtype = g.choice((None, None, None, *FLOAT_DTYPES, "int64", "bool"))
        options = {} if dtype is None else {"dtype": DType(dtype)}
        fill = [g.scalar()] if fills else []
        return Call((x, list(shape), *fill), out(shape, dtype=dtype or x.dtype), options)

    return build


op("new_full", method="new_full")(_new(fills=True))
op("new_zeros", method="new_zeros")(_new())
op("new_ones", method="new_ones")(_new())


# -- complex ----------------------------------------------------------------------------------

_COMPLEX = {"float32": "complex64", "float64": "complex128"}


# Of two float16 tensors complex makes complex32, which few kernels know.
@op("complex", **torch_forms("complex", "fo"), mixed="raises", floats=("float32", "float64"))
def _complex(g: Builder) -> Call:
    real = g.tensor()
    imaginary = g.tensor(real.shape)
    return Call((real, imaginary), out(real.shape, dtype=_COMPLEX.get(real.dtype, "complex64")))


def _part(g: Builder) -> Call:
    x = g.tensor(kind="complex")
    dtype = "float64" if x.dtype == "complex128" else "float32"
    return Call((x,), out(x.shape, dtype=dtype))


op("real", function="torch.real", method="{0}.real", view=True)(_part)
op("imag", function="torch.imag", method="{0}.imag", view=True)(_part)
