"""Pointwise arithmetic: what stands between the ops that autocast lists.

None of these casts, so a wrong dtype that an autocast op lets out meets type promotion here. Where
integers are drawn they never divide: integer division by zero raises on some kernels only.
"""

from __future__ import annotations

from typing import Any

from amp_fuzz.catalogue.core import Builder, Call, Kind, Shape, Value, broadcasts, op, out
from amp_fuzz.catalogue.promotion import floating, is_float, result_type

__all__ = ["EITHER", "pair", "receiver_kind", "torch_forms"]

EITHER = (0, 1)
"""The operands of an op that takes a CPU scalar for either (TensorIterator, allow_cpu_scalars)."""

_LETTERS = {"f": "function", "m": "method", "i": "inplace", "o": "out"}


def torch_forms(name: str, letters: str = "fmio", **others: Any) -> dict[str, Any]:
    """Return the forms that `letters` name: function, method, in-place, out, spelled as torch does.

    `others` are further keywords for `op`; a form among them replaces the spelling.
    """
    spelled = {"f": f"torch.{name}", "m": name, "i": f"{name}_", "o": f"torch.{name}"}
    return {_LETTERS[c]: spelled[c] for c in letters} | others


def receiver_kind(g: Builder, kind: Kind) -> Kind:
    """Return `kind`, or float in-place: an integer tensor cannot hold a floating result."""
    return "float" if g.form == "inplace" else kind


def pair(g: Builder, first: Kind = "real", second: Kind = "real") -> tuple[Value, Value, Shape]:
    """Draw two tensors that broadcast, in either order, and the shape of the result.

    Two of different kinds keep their order, and so does an in-place form, which writes the first.
    """
    a = g.receiver(kind=receiver_kind(g, first))
    b = g.broadcastable(a.shape, kind=second, either=g.form != "inplace")
    shape = b.shape if broadcasts(a.shape, b.shape) else a.shape
    if g.form != "inplace" and first == second and g.flag():
        return b, a, shape
    return a, b, shape


def _number(g: Builder) -> int | float:
    """Draw a Python number other than 0; the last one is what losses are scaled by."""
    number: int | float = g.choice((2.0, 2, 0.5, -1.5, 3, 1e-3, 300.0, 65536.0))
    return number


def _alpha(g: Builder, dtype: str) -> dict[str, Any]:
    if g.form == "operator":
        return {}
    return g.options(alpha=(1, 2, -0.5 if is_float(dtype) else -1))


@op("add", **torch_forms("add", operator="{0} + {1}"), cpu_scalars=EITHER)
def _add(g: Builder) -> Call:
    a, b, shape = pair(g)
    dtype = result_type(a, b)
    return Call((a, b), out(shape, dtype=dtype), _alpha(g, dtype))


@op("sub", **torch_forms("sub", operator="{0} - {1}"), cpu_scalars=EITHER)
def _sub(g: Builder) -> Call:
    return _add(g)


@op("rsub", function="torch.rsub", cpu_scalars=EITHER)
def _rsub(g: Builder) -> Call:
    return _add(g)


@op("mul", **torch_forms("mul", operator="{0} * {1}"), cpu_scalars=EITHER)
def _mul(g: Builder) -> Call:
    a, b, shape = pair(g)
    return Call((a, b), out(shape, dtype=result_type(a, b)))


@op("div", **torch_forms("div", operator="{0} / {1}"), cpu_scalars=EITHER)
def _div(g: Builder) -> Call:
    a, b, shape = pair(g)
    return Call((a, b), out(shape, dtype=floating(result_type(a, b))))


@op("div.mode", **torch_forms("div"), cpu_scalars=EITHER)
def _div_mode(g: Builder) -> Call:
    a, b, shape = pair(g, second="float")
    mode = g.choice(("floor", "trunc", None))
    return Call((a, b), out(shape, dtype=result_type(a, b)), {"rounding_mode": mode})


def _rest(g: Builder) -> Call:
    a, b, shape = pair(g, second="float")
    return Call((a, b), out(shape, dtype=result_type(a, b)))


op("remainder", **torch_forms("remainder", operator="{0} % {1}"), cpu_scalars=EITHER)(_rest)
op("fmod", **torch_forms("fmod"), cpu_scalars=EITHER)(_rest)


# floor_divide and heaviside have no derivative: tensors that require grad would end a backward.
@op("floor_divide", **torch_forms("floor_divide", operator="{0} // {1}"), cpu_scalars=EITHER)
def _floor_divide(g: Builder) -> Call:
    a = g.receiver(kind=receiver_kind(g, "real"), grad=False)
    b = g.tensor(g.choice((a.shape, ())), grad=False)
    return Call((a, b), out(a.shape, dtype=result_type(a, b)))


@op("floor_divide.scalar", **torch_forms("floor_divide", operator="{0} // {1}"))
def _floor_divide_scalar(g: Builder) -> Call:
    x = g.receiver(kind=receiver_kind(g, "real"), grad=False)
    number = _number(g)
    return Call((x, number), out(x.shape, dtype=result_type(x, number)))


@op("heaviside", **torch_forms("heaviside"), mixed="raises", cpu_scalars=EITHER)
def _heaviside(g: Builder) -> Call:
    a = g.receiver(grad=False)
    b = g.tensor(g.choice((a.shape, ())), grad=False)
    return Call((a, b), out(a.shape, dtype=a.dtype))


for _name in ("maximum", "minimum", "fmax", "fmin"):
    op(_name, **torch_forms(_name, "fmo"), cpu_scalars=EITHER)(_mul)


def _floating_pair(g: Builder) -> Call:
    a, b, shape = pair(g)
    return Call((a, b), out(shape, dtype=floating(result_type(a, b))))


for _name in ("copysign", "xlogy"):
    op(_name, **torch_forms(_name), cpu_scalars=EITHER)(_floating_pair)


def _floats(g: Builder) -> Call:
    a, b, shape = pair(g, "float", "float")
    return Call((a, b), out(shape, dtype=result_type(a, b)))


op("hypot", **torch_forms("hypot"), cpu_scalars=EITHER)(_floats)
op("logaddexp", **torch_forms("logaddexp", "fmo"))(_floats)
op("logaddexp2", **torch_forms("logaddexp2", "fmo"))(_floats)


# -- with a Python number ---------------------------------------------------------------------

# In torch there is no `rsub` operator: `number - tensor` is how Python reaches it.
_SCALAR_OPS: dict[str, dict[str, Any]] = {
    "add": torch_forms("add", operator="{0} + {1}"),
    "sub": torch_forms("sub", operator="{0} - {1}"),
    "rsub": {"function": "torch.rsub", "operator": "{1} - {0}"},
    "mul": torch_forms("mul", operator="{1} * {0}"),
    "remainder": torch_forms("remainder", operator="{0} % {1}"),
    "fmod": torch_forms("fmod"),
}


def _scalar_call(g: Builder) -> Call:
    x = g.receiver(kind=receiver_kind(g, "real"))
    number = _number(g)
    return Call((x, number), out(x.shape, dtype=result_type(x, number)))


for _name, _forms in _SCALAR_OPS.items():
    op(f"{_name}.scalar", **_forms)(_scalar_call)


@op("div.scalar", **torch_forms("div", operator="{0} / {1}"))
def _div_scalar(g: Builder) -> Call:
    x = g.receiver(kind=receiver_kind(g, "real"))
    number = _number(g)
    return Call((x, number), out(x.shape, dtype=floating(result_type(x, number))))


@op("rdiv.scalar", "aten::reciprocal", operator="{1} / {0}")
def _rdiv_scalar(g: Builder) -> Call:
    # Tensor.__rtruediv__ multiplies the reciprocal, which some devices list.
    x = g.tensor()
    return Call((x, g.scalar()), out(x.shape))


# -- of one tensor ----------------------------------------------------------------------------


def _same_dtype(g: Builder) -> Call:
    x = g.receiver(kind=receiver_kind(g, "real"))
    return Call((x,), out(x.shape, dtype=x.dtype))


def _float_unary(g: Builder) -> Call:
    x = g.receiver()
    return Call((x,), out(x.shape, dtype=x.dtype))


op("neg", **torch_forms("neg", operator="-{0}"))(_same_dtype)
for _name in ("abs", "sign", "sgn", "floor", "ceil", "trunc", "round", "nan_to_num"):
    op(_name, **torch_forms(_name))(_same_dtype)
for _name in ("frac", "deg2rad", "rad2deg"):
    op(_name, **torch_forms(_name))(_float_unary)


@op("round.decimals", **torch_forms("round"))
def _round_decimals(g: Builder) -> Call:
    x = g.receiver()
    return Call((x,), out(x.shape, dtype=x.dtype), {"decimals": g.choice((1, 2, 0, -1))})


@op("nan_to_num.values", **torch_forms("nan_to_num"))
def _nan_to_num(g: Builder) -> Call:
    x = g.receiver()
    values = g.options(nan=(0.0, 2.0), posinf=(None, 1.0), neginf=(None, -1.0))
    return Call((x,), out(x.shape, dtype=x.dtype), values)


# -- bounds and blends ------------------------------------------------------------------------


@op("clamp", **torch_forms("clamp"))
def _clamp(g: Builder) -> Call:
    x = g.receiver(kind=receiver_kind(g, "real"))
    low, high = g.choice(((-0.5, 0.5), (-1, None), (None, 1), (0, 6.0), (1, -1)))
    bounds = [b for b in (low, high) if b is not None]
    # The kernel promotes with the numbers: an integer tensor and a float bound make floats.
    return Call((x, low, high), out(x.shape, dtype=result_type(x, *bounds)))


@op("clamp.Tensor", **torch_forms("clamp"))
def _clamp_tensor(g: Builder) -> Call:
    x, low, shape = pair(g)
    bounds = [low] if g.flag() else [low, g.broadcastable(shape, kind="real")]
    return Call((x, *bounds), out(shape, dtype=result_type(x, *bounds)))


def _clamp_one(g: Builder) -> Call:
    x = g.receiver(kind=receiver_kind(g, "real"))
    bound = g.choice((0.5, 0, -1, None))
    if bound is None:
        bound = g.broadcastable(x.shape)
    return Call((x, bound), out(x.shape, dtype=result_type(x, bound)))


op("clamp_min", **torch_forms("clamp_min"))(_clamp_one)
op("clamp_max", **torch_forms("clamp_max"))(_clamp_one)


@op("lerp", **torch_forms("lerp"), mixed="raises", cpu_scalars=(2,))
def _lerp(g: Builder) -> Call:
    start = g.receiver()
    end = g.broadcastable(start.shape)
    weight = g.scalar() if g.flag() else g.broadcastable(start.shape)
    return Call((start, end, weight), out(start.shape))


# -- dtypes far apart -------------------------------------------------------------------------

_DTYPES = ("float32", "bfloat16", "float16", "float64", "int64", "int32", "uint8", "bool")


def _mixed(g: Builder) -> Call:
    # Each of two dtypes and two ranks, so that every corner of the promotion rule is met.
    shape = g.shape(1, 2)
    a = g.tensor(shape, dtype=g.choice(_DTYPES[:6]))
    b = g.tensor(g.choice((shape, ())), dtype=g.choice(_DTYPES))
    arguments = (b, a) if g.flag() else (a, b)
    return Call(arguments, out(shape, dtype=result_type(a, b)))


for _name, _operator in {"add": "+", "mul": "*"}.items():
    _forms = torch_forms(_name, "fm", operator=f"{{0}} {_operator} {{1}}")
    op(f"{_name}.mixed", **_forms, cpu_scalars=EITHER)(_mixed)
for _name in ("maximum", "fmin"):
    op(f"{_name}.mixed", **torch_forms(_name, "fm"), cpu_scalars=EITHER)(_mixed)
