"""Sums, products, softmax, norms, distances and quantiles: long accumulations."""

from __future__ import annotations

from math import inf
from typing import Any

from amp_fuzz.cases.program import DType
from amp_fuzz.catalogue.arithmetic import receiver_kind, torch_forms
from amp_fuzz.catalogue.core import Builder, Call, Kind, Out, Shape, Value, op, out
from amp_fuzz.catalogue.promotion import is_float
from amp_fuzz.catalogue.statistics import reduced

_WIDE = ("float32", "float64")


def _dims(g: Builder, rank: int) -> int | list[int]:
    """Draw one dimension, or a list of one or two."""
    dim, how = g.dimension(rank), g.int(0, 2)
    if how == 2 and rank > 1:
        return [dim, (dim + 1) % rank]
    return [dim] if how else dim


def _dtype(g: Builder, x: Value) -> dict[str, Any]:
    """Draw ``dtype=``, or not: autocast leaves a call alone that names its dtype.

    Masks and integers are counted in a dtype that is asked for more often.
    """
    absent = 5 if is_float(x.dtype) else 2
    name = g.choice((*[None] * absent, "float32", "bfloat16", "float16", "float64"))
    return {} if name is None or g.form == "inplace" else {"dtype": DType(name)}


def _counted(g: Builder) -> Kind:
    """Draw the kind of what is summed: seldom a mask, whose elements are counted in int64."""
    kind: Kind = g.choice(("real", "real", "real", "bool"))
    return receiver_kind(g, kind)


def _summed(x: Value, shape: Shape, options: dict[str, Any]) -> tuple[Out, ...]:
    """Return the output of an op that accumulates integers in int64."""
    dtype = None if is_float(x.dtype) else "int64"
    return out(shape, dtype=options["dtype"].name if "dtype" in options else dtype)


# -- sum, prod, cumsum, cumprod -------------------------------------------------------------------


@op("sum", "aten::sum", **torch_forms("sum", "fm"))
@op("prod", "aten::prod", **torch_forms("prod", "fm"))
def _total(g: Builder) -> Call:
    x = g.tensor(kind=_counted(g), empty=True)
    options = _dtype(g, x)
    return Call((x,), _summed(x, (), options), options)


def _partial(g: Builder, x: Value, dims: int | list[int]) -> Call:
    options = g.options(keepdim=(False, True)) | _dtype(g, x)
    shape = reduced(x.shape, dims, "keepdim" in options)
    return Call((x, dims), _summed(x, shape, options), options)


@op("sum.dim", "aten::sum.dim_IntList", **torch_forms("sum", "fmo"))
def _sum(g: Builder) -> Call:
    x = g.tensor(kind=_counted(g), empty=True)
    return _partial(g, x, _dims(g, x.rank))


@op("prod.dim", "aten::prod.dim_int", **torch_forms("prod", "fmo"))
def _prod(g: Builder) -> Call:
    x = g.tensor(kind=_counted(g), empty=True)
    return _partial(g, x, g.dimension(x.rank))


@op("cumsum", "aten::cumsum", **torch_forms("cumsum"))
@op("cumprod", "aten::cumprod", **torch_forms("cumprod"))
def _scan(g: Builder) -> Call:
    x = g.receiver(kind=_counted(g), empty=True)
    options = _dtype(g, x)
    return Call((x, g.dimension(x.rank)), _summed(x, x.shape, options), options)


@op("sum_to_size", "aten::sum.dim_IntList", "aten::sum", method="sum_to_size", view=True)
def _sum_to_size(g: Builder) -> Call:
    # It returns the tensor itself where every size that it sums over is 1 already.
    x = g.tensor(rank=(1, 3))
    n = g.int(1, x.rank)
    shape = (*((1,) * n if g.flag() else ()), *x.shape[n:])
    return Call((x, list(shape)), out(shape))


@op("cumulative_trapezoid", "aten::cumsum", function="torch.cumulative_trapezoid")
def _cumulative_trapezoid(g: Builder) -> Call:
    x = g.tensor(rank=(1, 3))
    dim = g.dimension(x.rank)
    shape = tuple(s - (i == dim % x.rank) for i, s in enumerate(x.shape))
    return Call((x,), out(shape), {"dim": dim})


@op("cov", "aten::mm", "aten::sum.dim_IntList", **torch_forms("cov", "fm"))
@op("corrcoef", "aten::mm", "aten::sum.dim_IntList", **torch_forms("corrcoef", "fm"))
def _cov(g: Builder) -> Call:
    n = g.dim()
    x = g.tensor((n, g.int(2, 6)))  # one observation warns
    return Call((x,), out((n, n) if n > 1 else ()))


# -- softmax --------------------------------------------------------------------------------------


def _softmax(g: Builder) -> Call:
    x = g.tensor(empty=True)
    options = _dtype(g, x)
    return Call((x, g.dimension(x.rank)), _summed(x, x.shape, options), options)


for _name in ("softmax", "log_softmax"):
    _kernel, _module = f"aten::{_name}.int", f"torch.nn.functional.{_name}"
    op(_name, _kernel, **torch_forms(_name, "fmo", module=_module))(_softmax)
    op(f"special.{_name}", _kernel, function=f"torch.special.{_name}")(_softmax)


@op("softmin", "aten::softmax.int", function="torch.nn.functional.softmin")
def _softmin(g: Builder) -> Call:
    x = g.tensor(empty=True)
    return Call((x, g.dimension(x.rank)), out(x.shape))


@op("logsumexp", "aten::logsumexp", **torch_forms("logsumexp", "fmo"))
@op("special.logsumexp", "aten::logsumexp", **torch_forms("special.logsumexp", "fo"))
def _logsumexp(g: Builder) -> Call:
    x = g.tensor(kind="real")
    dims, keep = _dims(g, x.rank), g.flag()
    return Call((x, dims, keep), out(reduced(x.shape, dims, keep)))


# -- norms ----------------------------------------------------------------------------------------

_ORDERS = (2, 1, inf, 3, 0.5, 0, -inf)


# torch.norm has gone over to linalg_vector_norm: only torch's C++ still calls these two.
@op("norm.Scalar", "aten::norm.Scalar", function="torch._VF.norm", overload="norm.Scalar")
def _norm(g: Builder) -> Call:
    return Call((g.tensor(), g.choice(_ORDERS)), out(()))


@op(
    "norm.dim",
    "aten::norm.ScalarOpt_dim",
    function="torch._VF.norm",
    overload="norm.ScalarOpt_dim",
)
def _norm_dim(g: Builder) -> Call:
    x = g.tensor()
    dims, keep = _dims(g, x.rank), g.flag()
    dims = [dims] if isinstance(dims, int) else dims
    return Call((x, g.choice(_ORDERS), dims, keep), out(reduced(x.shape, dims, keep)))


@op(
    "norm_except_dim",
    "aten::norm.ScalarOpt_dim",
    "aten::norm.Scalar",  # of dim -1, which here means no dim
    function="torch.norm_except_dim",
)
def _norm_except_dim(g: Builder) -> Call:
    x = g.tensor(rank=(1, 3))
    dim = g.choice((*range(x.rank), -1))
    shape = tuple(s if i == dim else 1 for i, s in enumerate(x.shape))
    return Call((x, g.int(1, 3), dim), out(() if dim < 0 else shape))


@op("renorm", "aten::renorm", **torch_forms("renorm"))
def _renorm(g: Builder) -> Call:
    x = g.receiver(rank=(2, 3))
    p, dim, limit = g.choice((2, 1, 0.5, inf)), g.dimension(x.rank), g.choice((1, 0.5, 3.0))
    return Call((x, p, dim, limit), out(x.shape))


# -- distances ------------------------------------------------------------------------------------


@op("dist", "aten::dist", **torch_forms("dist", "fm"))
def _dist(g: Builder) -> Call:
    x = g.tensor()
    return Call((x, g.broadcastable(x.shape)), out(()), g.options(p=(2, 1, inf, 3.0, 0)))


@op("cdist", "aten::cdist", function="torch.cdist", mixed="raises", floats=_WIDE)
def _cdist(g: Builder) -> Call:
    a = g.tensor(rank=(2, 3))
    *batch, m, d = a.shape
    n = g.dim()
    b = g.tensor((*g.choice((batch, [1] * len(batch))), n, d) if batch else (n, d))
    # For p=2 alone there is a way over a matrix product, by default above 25 rows only.
    mode = "use_mm_for_euclid_dist"
    options = g.options(p=(2.0, 1.0, inf, 3.0), compute_mode=(f"{mode}_if_necessary", mode))
    return Call((a, b), out((*batch, m, n)), options)


@op("pdist", "aten::pdist", function="torch.pdist", floats=_WIDE)
def _pdist(g: Builder) -> Call:
    x = g.tensor(rank=2)
    n = x.shape[0]
    return Call((x,), out((n * (n - 1) // 2,)), g.options(p=(2, 1.0, inf, 3.0)))


@op(
    "cosine_similarity",
    "aten::cosine_similarity",
    function="torch.nn.functional.cosine_similarity",
)
def _cosine_similarity(g: Builder) -> Call:
    x = g.tensor(rank=(1, 3))
    dim = g.dimension(x.rank)
    options = {"dim": dim} | g.options(eps=(1e-8, 1e-2))
    return Call((x, g.broadcastable(x.shape)), out(reduced(x.shape, dim, False)), options)


@op(
    "pairwise_distance",
    "aten::norm.ScalarOpt_dim",
    function="torch.nn.functional.pairwise_distance",
)
def _pairwise_distance(g: Builder) -> Call:
    x = g.tensor(rank=(1, 2))
    options = g.options(p=(2.0, 1.0, inf), keepdim=(False, True))
    return Call((x, g.tensor(x.shape)), out(reduced(x.shape, -1, "keepdim" in options)), options)


# -- quantiles ------------------------------------------------------------------------------------


def _quantiles(g: Builder, x: Value, q: Value | float) -> Call:
    dim = g.choice((None, 0, -1))
    modes = ("linear", "lower", "higher", "midpoint", "nearest")
    options = g.options(keepdim=(False, True), interpolation=modes)
    shape = reduced(x.shape, list(range(x.rank)) if dim is None else dim, "keepdim" in options)
    lead = q.shape if isinstance(q, Value) else ()
    return Call((x, q, dim), out((*lead, *shape)), options)


def _quantile(g: Builder) -> Call:
    x = g.tensor(rank=(1, 3))
    return _quantiles(g, x, g.tensor(g.choice(((), (1,), (3,))), domain="unit"))


def _quantile_scalar(g: Builder) -> Call:
    return _quantiles(g, g.tensor(rank=(1, 3)), g.choice((0.5, 0.3, 0.0, 1.0)))


# Off CPU no table lists either; nanquantile sums there to find which rows hold a NaN.
for _name, _sum_kernel in (("quantile", ()), ("nanquantile", ("aten::sum.dim_IntList",))):
    _forms = torch_forms(_name, "fmo", floats=_WIDE)
    op(_name, f"aten::{_name}", *_sum_kernel, mixed="raises", **_forms)(_quantile)
    op(f"{_name}.scalar", f"aten::{_name}.scalar", *_sum_kernel, **_forms)(_quantile_scalar)
