"""Reductions and running extremes that no autocast table lists, and what stands next to them."""

from __future__ import annotations

from typing import Any

from amp_fuzz.cases.program import DType
from amp_fuzz.catalogue.arithmetic import torch_forms
from amp_fuzz.catalogue.core import Build, Builder, Call, Kind, Out, Shape, Value, op, out

__all__ = ["reduced"]


def reduced(shape: Shape, dims: int | list[int] | tuple[int, ...], keep: bool) -> Shape:
    """Return the shape that is left after a reduction over `dims`; of none, a 0-d shape."""
    chosen = {d % max(len(shape), 1) for d in ((dims,) if isinstance(dims, int) else dims)}
    return tuple(1 if i in chosen else s for i, s in enumerate(shape) if keep or i not in chosen)


def _dims(g: Builder, rank: int) -> int | list[int]:
    """Draw one dimension, or a list of two."""
    dim = g.dimension(rank)
    if rank > 1 and g.flag():
        return [dim, (dim + g.int(1, rank - 1)) % rank if dim >= 0 else dim % rank - 1]
    return dim


def _whole(kind: Kind = "float") -> Build:
    """Return a build function that reduces a tensor to one value."""

    def build(g: Builder) -> Call:
        x = g.tensor(kind=kind)
        return Call((x,), out((), dtype=x.dtype))

    return build


def _along(kind: Kind = "float") -> Build:
    """Return a build function that reduces along one dimension or two."""

    def build(g: Builder) -> Call:
        x = g.tensor(kind=kind)
        dims, keep = _dims(g, x.rank), g.flag()
        return Call((x, dims, keep), out(reduced(x.shape, dims, keep), dtype=x.dtype))

    return build


op("mean", **torch_forms("mean", "fm"))(_whole())
op("mean.dim", **torch_forms("mean", "fmo"))(_along())
op("amax", **torch_forms("amax", "fmo"))(_along("real"))
op("amin", **torch_forms("amin", "fmo"))(_along("real"))
op("max", **torch_forms("max", "fmo"))(_whole("real"))
op("min", **torch_forms("min", "fmo"))(_whole("real"))
op("median", **torch_forms("median", "fm"))(_whole("real"))
op("nanmedian", **torch_forms("nanmedian", "fm"))(_whole("real"))
# Composite over a sum, but of the booleans that count: autocast reaches it and casts nothing.
op("nanmean", "aten::sum.dim_IntList", **torch_forms("nanmean", "fmo"))(_along())
op("nansum", **torch_forms("nansum", "fmo"))(_along())


def _truth(g: Builder) -> Call:
    x = g.tensor(kind=g.choice(("bool", "real")))
    return Call((x,), out((), dtype=_truth_dtype(x)))


def _truth_along(g: Builder) -> Call:
    x = g.tensor(kind="real")
    dims, keep = _dims(g, x.rank), g.flag()
    return Call((x, dims, keep), out(reduced(x.shape, dims, keep), dtype=_truth_dtype(x)))


def _truth_dtype(x: Value) -> str:
    # A reduction of uint8 keeps its dtype, for the sake of masks of old.
    return "uint8" if x.dtype == "uint8" else "bool"


for _name in ("all", "any"):
    op(_name, **torch_forms(_name, "fm"))(_truth)
    op(f"{_name}.dim", **torch_forms(_name, "fmo"))(_truth_along)


@op("mean.dtype", **torch_forms("mean", "fm"))
def _mean_dtype(g: Builder) -> Call:
    x = g.tensor(kind="real")
    dtype = g.choice(("float32", "float64", "bfloat16", "float16"))
    dims, keep = _dims(g, x.rank), g.flag()
    outputs = out(reduced(x.shape, dims, keep), dtype=dtype)
    return Call((x, dims, keep), outputs, {"dtype": DType(dtype)})


@op("count_nonzero", **torch_forms("count_nonzero", "fm"))
def _count_nonzero(g: Builder) -> Call:
    x = g.tensor(kind="real")
    dims = _dims(g, x.rank)
    return Call((x, dims), out(reduced(x.shape, dims, False), dtype="int64"))


# -- variance ---------------------------------------------------------------------------------


def _spread(g: Builder) -> tuple[Any, dict[str, Any], Shape]:
    """Draw a tensor and the options of a variance, and return the shape of the result."""
    x = g.tensor(rank=(1, 3))
    dims, keep = _dims(g, x.rank), g.flag()
    shape = reduced(x.shape, dims, keep)
    count = 1
    for dim in {d % x.rank for d in ([dims] if isinstance(dims, int) else dims)}:
        count *= x.shape[dim]
    # Fewer than one degree of freedom is a warning, and NaN.
    correction = g.choice((1, 0, 0.5) if count > 1 else (0,))
    return x, {"dim": dims, "correction": correction, "keepdim": keep}, shape


def _variance(g: Builder) -> Call:
    x, options, shape = _spread(g)
    return Call((x,), out(shape, dtype=x.dtype), options)


def _variance_and_mean(g: Builder) -> Call:
    x, options, shape = _spread(g)
    return Call((x,), out(shape, shape, dtype=x.dtype), options)


for _name in ("std", "var"):
    op(_name, **torch_forms(_name, "fmo"))(_variance)
    op(f"{_name}_mean", **torch_forms(f"{_name}_mean", "f"))(_variance_and_mean)


# -- values with indices ----------------------------------------------------------------------


def _indexed(*, indices: bool) -> Build:
    """Return a build function of values and indices along a dimension.

    `indices` False: which of equal values the index names is not specified, so it is not kept.
    """

    def build(g: Builder) -> Call:
        x = g.tensor(kind="real")
        dim, keep = g.dimension(x.rank), g.flag()
        shape = reduced(x.shape, dim, keep)
        return Call((x, dim, keep), (Out(shape, x.dtype), Out(shape, "int64", keep=indices)))

    return build


for _name in ("max", "min"):
    op(f"{_name}.dim", **torch_forms(_name, "fmo"))(_indexed(indices=True))
for _name in ("median", "nanmedian"):
    op(f"{_name}.dim", **torch_forms(_name, "fmo"))(_indexed(indices=False))
op("mode", **torch_forms("mode", "fmo"))(_indexed(indices=False))


@op("aminmax", **torch_forms("aminmax", "fmo"))
def _aminmax(g: Builder) -> Call:
    x = g.tensor(kind="real")
    dim, keep = g.dimension(x.rank), g.flag()
    shape = reduced(x.shape, dim, keep)
    return Call((x,), out(shape, shape, dtype=x.dtype), {"dim": dim, "keepdim": keep})


def _running(g: Builder) -> Call:
    x = g.tensor(kind="real")
    outputs = (Out(x.shape, x.dtype), Out(x.shape, "int64"))
    return Call((x, g.dimension(x.rank)), outputs)


op("cummax", **torch_forms("cummax", "fmo"))(_running)
op("cummin", **torch_forms("cummin", "fmo"))(_running)


@op("logcumsumexp", **torch_forms("logcumsumexp", "fmo"))
def _logcumsumexp(g: Builder) -> Call:
    x = g.tensor()
    return Call((x, g.dimension(x.rank)), out(x.shape, dtype=x.dtype))


@op("argsort", **torch_forms("argsort", "fm"))
def _argsort(g: Builder) -> Call:
    x = g.tensor(kind="real")
    options = {"dim": g.dimension(x.rank)} | g.options(descending=(False, True))
    return Call((x,), out(x.shape, dtype="int64"), {"stable": True} | options)


# -- differences and areas --------------------------------------------------------------------


@op("diff", **torch_forms("diff", "fmo"))
def _diff(g: Builder) -> Call:
    x = g.tensor(rank=(1, 3), kind="real")
    n, dim = g.choice((1, 2)), g.dimension(x.rank)
    shape = list(x.shape)
    shape[dim] = max(shape[dim] - n, 0)
    return Call((x, n, dim), out(tuple(shape), dtype=x.dtype))


@op("trapezoid", "aten::sum.dim_IntList", function="torch.trapezoid")
def _trapezoid(g: Builder) -> Call:
    y = g.tensor(rank=(1, 3))
    dim = g.dimension(y.rank)
    return Call((y,), out(reduced(y.shape, dim, False)), {"dim": dim} | g.options(dx=(1, 0.5)))
