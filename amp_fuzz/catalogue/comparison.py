"""Comparisons, selections by a mask, orders: results that rounding can flip."""

from __future__ import annotations

from amp_fuzz.catalogue.arithmetic import EITHER, pair, receiver_kind, torch_forms
from amp_fuzz.catalogue.core import Builder, Call, Kind, Out, Shape, op, out
from amp_fuzz.catalogue.promotion import result_type
from amp_fuzz.catalogue.statistics import reduced


def _compare(g: Builder) -> Call:
    a, b, shape = pair(g)
    return Call((a, b), out(shape, dtype="bool"))


def _compare_scalar(g: Builder) -> Call:
    x = g.receiver(kind=receiver_kind(g, "real"))
    return Call((x, g.choice((0.5, 0, 1, -1.5, 0.1))), out(x.shape, dtype="bool"))


_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
for _name, _operator in _COMPARISONS.items():
    _text = f"{{0}} {_operator} {{1}}"
    op(_name, **torch_forms(_name, operator=_text), cpu_scalars=EITHER)(_compare)
    op(f"{_name}.scalar", **torch_forms(_name, operator=_text))(_compare_scalar)


def _predicate(g: Builder) -> Call:
    x = g.receiver(kind="real")
    return Call((x,), out(x.shape, dtype="bool"))


for _name in ("isnan", "isinf", "isfinite"):
    op(_name, **torch_forms(_name, "fm"))(_predicate)
for _name in ("isposinf", "isneginf", "signbit"):
    op(_name, **torch_forms(_name, "fmo"))(_predicate)


@op("isclose", **torch_forms("isclose", "fm"), mixed="raises")
def _isclose(g: Builder) -> Call:
    a, b, shape = pair(g, "float", "float")
    tolerances = g.options(rtol=(1e-5, 0.1), atol=(1e-8, 0.5), equal_nan=(False, True))
    return Call((a, b), out(shape, dtype="bool"), tolerances)


# On the CPU, many elements are concatenated and sorted.
@op("isin", "aten::cat", function="torch.isin")
def _isin(g: Builder) -> Call:
    x = g.tensor()
    return Call((x, g.tensor(rank=1)), out(x.shape, dtype="bool"), g.options(invert=(False, True)))


def _logical(g: Builder) -> Call:
    # No complex ones: of a float16 tensor and a complex 0-d one the kernel would make complex32.
    a, b, shape = pair(g, second=g.choice(("bool", "real")))
    return Call((a, b), out(shape, dtype="bool"))


for _name in ("logical_and", "logical_or", "logical_xor"):
    op(_name, **torch_forms(_name), cpu_scalars=EITHER)(_logical)


@op("logical_not", **torch_forms("logical_not"))
def _logical_not(g: Builder) -> Call:
    x = g.receiver(kind=g.choice(("real", "bool")))
    return Call((x,), out(x.shape, dtype="bool"))


def _bits(g: Builder) -> Call:
    kind: Kind = g.choice(("bool", "int"))
    a = g.receiver(kind=kind)
    b = g.broadcastable(a.shape, kind=kind)
    # In-place, int32 may not take a result of int64: the second one is then of the first's dtype.
    if g.form == "inplace" and b.dtype != a.dtype:
        b = g.tensor(a.shape, dtype=a.dtype)
    return Call((a, b), out(a.shape, dtype=result_type(a, b)))


for _name, _operator in {"bitwise_and": "&", "bitwise_or": "|", "bitwise_xor": "^"}.items():
    _text = f"{{0}} {_operator} {{1}}"
    op(_name, **torch_forms(_name, operator=_text), cpu_scalars=EITHER)(_bits)


@op("bitwise_not", **torch_forms("bitwise_not", operator="~{0}"))
def _bitwise_not(g: Builder) -> Call:
    x = g.receiver(kind=g.choice(("bool", "int")))
    return Call((x,), out(x.shape, dtype=x.dtype))


# -- by a mask --------------------------------------------------------------------------------


# The mask comes second, as in `a.where(mask, b)`: the first argument is what a method is called on.
@op(
    "where",
    function="torch.where({1}, {0}, {2})",
    method="where",
    out="torch.where({1}, {0}, {2}, out={out})",
    cpu_scalars=(0, 1, 2),
)
def _where(g: Builder) -> Call:
    a, b, shape = pair(g)
    mask = g.broadcastable(shape, kind="bool")
    return Call((a, mask, b), out(shape, dtype=result_type(a, b)))


@op("where.scalar", function="torch.where({1}, {0}, {2})", method="where")
def _where_scalar(g: Builder) -> Call:
    x = g.tensor(kind="real")
    mask = g.broadcastable(x.shape, kind="bool")
    number = g.choice((0.0, 1, -1.5, float("nan")))
    return Call((x, mask, number), out(x.shape, dtype=result_type(x, number)))


@op("masked_fill", **torch_forms("masked_fill", "fmi"), cpu_scalars=(2,))
def _masked_fill(g: Builder) -> Call:
    x = g.receiver()
    mask = g.broadcastable(x.shape, kind="bool")
    value = g.choice((0.0, float("-inf"), 1, None))
    if value is None:
        value = g.tensor(())
    return Call((x, mask, value), out(x.shape, dtype=x.dtype))


# -- orders -----------------------------------------------------------------------------------


def _arg_extreme(g: Builder) -> Call:
    x = g.tensor(kind="real")
    if g.flag():
        return Call((x,), out((), dtype="int64"))
    dim, keep = g.dimension(x.rank), g.flag()
    return Call((x, dim, keep), out(reduced(x.shape, dim, keep), dtype="int64"))


op("argmax", **torch_forms("argmax", "fm"))(_arg_extreme)
op("argmin", **torch_forms("argmin", "fm"))(_arg_extreme)


def _ordered(shape: Shape, dtype: str, *, indices: bool) -> tuple[Out, ...]:
    return Out(shape, dtype), Out(shape, "int64", keep=indices)


# Among equal values only a stable sort says which index comes first: no other's indices are kept.
@op("sort", **torch_forms("sort", "fmo"))
def _sort(g: Builder) -> Call:
    x = g.tensor(kind="real")
    options = {"dim": g.dimension(x.rank)} | g.options(descending=(False, True))
    return Call((x,), _ordered(x.shape, x.dtype, indices=True), {"stable": True} | options)


@op("topk", **torch_forms("topk", "fmo"))
def _topk(g: Builder) -> Call:
    x = g.tensor(rank=(1, 3), kind="real")
    dim = g.dimension(x.rank)
    shape = list(x.shape)
    shape[dim] = g.int(1, shape[dim])
    options = {"dim": dim} | g.options(largest=(True, False))
    return Call((x, shape[dim]), _ordered(tuple(shape), x.dtype, indices=False), options)


@op("kthvalue", **torch_forms("kthvalue", "fmo"))
def _kthvalue(g: Builder) -> Call:
    x = g.tensor(rank=(1, 3), kind="real")
    dim, keep = g.dimension(x.rank), g.flag()
    outputs = _ordered(reduced(x.shape, dim, keep), x.dtype, indices=False)
    return Call((x, g.int(1, x.shape[dim]), dim, keep), outputs)


@op("msort", **torch_forms("msort", "fmo"))
def _msort(g: Builder) -> Call:
    x = g.tensor(rank=(1, 3))
    return Call((x,), out(x.shape, dtype=x.dtype))


# A binary search in unsorted values finds whatever the kernel's probes hit: the templates sort.
# They make both contiguous, as torch warns of a copy where they are not.
@op(
    "searchsorted",
    function="torch.searchsorted({0}.sort().values.contiguous(), {1}.contiguous(), {args2})",
    mixed="raises",
)
def _searchsorted(g: Builder) -> Call:
    sequence = g.tensor(rank=(1, 2))
    values = g.tensor((*sequence.shape[:-1], g.dim()))
    small, right = g.flag(), g.flag()
    outputs = out(values.shape, dtype="int32" if small else "int64")
    return Call((sequence, values), outputs, {"out_int32": small, "right": right})


@op(
    "bucketize",
    function="torch.bucketize({0}.contiguous(), {1}.sort().values, right={right})",
    mixed="raises",
)
def _bucketize(g: Builder) -> Call:
    x = g.tensor()
    return Call((x, g.tensor(rank=1)), out(x.shape, dtype="int64"), {"right": g.flag()})
