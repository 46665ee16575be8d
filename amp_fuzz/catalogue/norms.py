"""Condition numbers, ranks and norms of matrices and vectors.

Conditions and ranks are on the CPU's autocast table, norms on the accelerators'.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from amp_fuzz.cases.program import DType
from amp_fuzz.catalogue.core import Builder, Call, Shape, Value, op, out
from amp_fuzz.catalogue.linalg import ANY_FLOATS, FLOATS, INF, Build, draw_matrix, draw_square

# -- condition numbers and ranks ------------------------------------------------------------------

# The singular values need no square matrix, the other norms need an inverse.
for _name, _overloads, _ps, _is_square in (
    ("linalg.cond", ("linalg_cond",), (None, 2, -2), False),
    ("linalg.cond.p", ("linalg_cond", "linalg_matrix_norm"), (1, -1, INF, -INF), True),
    (
        "linalg.cond.p_str",
        ("linalg_cond.p_str", "linalg_matrix_norm.str_ord", "reciprocal", "sum.dim_IntList"),
        ("fro", "nuc"),
        True,
    ),
):

    def _cond(g: Builder, ps: tuple[Any, ...] = _ps, square: bool = _is_square) -> Call:
        x = draw_square(g) if square else draw_matrix(g)
        p = g.choice(ps)
        return Call((x,), out(x.shape[:-2]), {} if p is None else {"p": p})

    op(
        _name,
        *(f"aten::{o}" for o in _overloads),
        function="torch.linalg.cond",
        out="torch.linalg.cond",
        floats=FLOATS,
    )(_cond)


def _ranks(tolerances: Callable[[Builder], dict[str, Any]]) -> Build:
    def build(g: Builder) -> Call:
        hermitian = g.flag()
        x = draw_square(g) if hermitian else draw_matrix(g)
        kwargs = tolerances(g) | ({"hermitian": True} if hermitian else {})
        return Call((x,), out(x.shape[:-2], dtype="int64"), kwargs)

    return build


def _tolerance(g: Builder) -> Value:
    return g.tensor((), domain="positive", grad=False)


_TOLERANCES: dict[str, tuple[str, Callable[[Builder], dict[str, Any]]]] = {
    "": (".atol_rtol_tensor", lambda g: {}),
    ".tol": ("", lambda g: {"tol": g.choice((0.5, 0.0))}),
    ".tol_tensor": (".tol_tensor", lambda g: {"tol": _tolerance(g)}),
    ".atol_rtol_float": (
        ".atol_rtol_float",
        lambda g: {"atol": 0.5} | g.options(rtol=(None, 0.1)),
    ),
    ".atol_rtol_tensor": (".atol_rtol_tensor", lambda g: {"atol": _tolerance(g)}),
}
for _name, (_overload, _tolerances) in _TOLERANCES.items():
    op(
        f"linalg.matrix_rank{_name}",
        f"aten::linalg_matrix_rank{_overload}",
        "aten::sum.dim_IntList",
        function="torch.linalg.matrix_rank",
        out="torch.linalg.matrix_rank",
        floats=FLOATS,
    )(_ranks(_tolerances))


# -- norms ----------------------------------------------------------------------------------------


def _reduced(shape: Shape, dims: Sequence[int], keepdim: bool) -> Shape:
    gone = {d % len(shape) for d in dims}
    if keepdim:
        return tuple(1 if i in gone else s for i, s in enumerate(shape))
    return tuple(s for i, s in enumerate(shape) if i not in gone)


def _keepdim_and_dtype(g: Builder) -> dict[str, Any]:
    return g.options(keepdim=(False, True), dtype=(None, DType("float64")))


def _norm_dtype(kwargs: dict[str, Any]) -> str | None:
    return "float64" if "dtype" in kwargs else None


@op(
    "linalg.vector_norm",
    "aten::linalg_vector_norm",
    function="torch.linalg.vector_norm",
    out="torch.linalg.vector_norm",
)
def _vector_norm(g: Builder) -> Call:
    x = g.tensor(rank=(1, 3))
    dims = g.choice((None, (-1,), (0,), tuple(range(x.rank))))
    kwargs = g.options(ord=(2, 1, INF, 0, -INF, 3, 0.5, -1.5)) | _keepdim_and_dtype(g)
    over = range(x.rank) if dims is None else dims
    shape = _reduced(x.shape, over, "keepdim" in kwargs)
    if dims is not None:
        kwargs["dim"] = dims
    if g.form == "out":  # a dtype must then be the output's
        kwargs.pop("dtype", None)
    return Call((x,), out(shape, dtype=_norm_dtype(kwargs)), kwargs)


# A matrix norm by singular values computes in float32 or float64 only.
for _name, _overloads, _ords, _floats in (
    ("matrix_norm", ("linalg_matrix_norm.str_ord",), ("fro",), ANY_FLOATS),
    ("matrix_norm.nuc", ("linalg_matrix_norm.str_ord", "linalg_svdvals"), ("nuc",), FLOATS),
    ("matrix_norm.ord", ("linalg_matrix_norm",), (1, -1, INF, -INF), ANY_FLOATS),
    ("matrix_norm.spectral", ("linalg_matrix_norm", "linalg_svdvals"), (2, -2), FLOATS),
    ("norm.ord_str", ("linalg_matrix_norm.str_ord",), ("fro",), ANY_FLOATS),
    ("norm.ord", ("linalg_matrix_norm",), (1, -1, INF, -INF), ANY_FLOATS),
):

    def _matrix_norm(g: Builder, ords: tuple[Any, ...] = _ords) -> Call:
        x = draw_matrix(g)
        dims = g.choice(((-2, -1), (0, 1), (1, 0)))
        kwargs: dict[str, Any] = {"ord": g.choice(ords), **_keepdim_and_dtype(g)}
        if x.rank > 2 or dims != (-2, -1):
            kwargs["dim"] = dims
        if g.form == "out":
            kwargs.pop("dtype", None)
        shape = _reduced(x.shape, dims, "keepdim" in kwargs)
        return Call((x,), out(shape, dtype=_norm_dtype(kwargs)), kwargs)

    op(
        f"linalg.{_name}",
        *(f"aten::{o}" for o in _overloads),
        function=f"torch.linalg.{_name.partition('.')[0]}",
        out=f"torch.linalg.{_name.partition('.')[0]}",
        floats=_floats,
    )(_matrix_norm)


@op(
    "linalg.norm",
    "aten::linalg_vector_norm",
    function="torch.linalg.norm",
    out="torch.linalg.norm",
)
def _linalg_norm(g: Builder) -> Call:
    x = g.tensor()
    kwargs = g.options(keepdim=(False, True))
    return Call((x,), out((1,) * x.rank if kwargs else ()), kwargs)


@op(
    "nuclear_norm",
    "aten::nuclear_norm",
    "aten::linalg_svdvals",
    function="torch.nuclear_norm",
    out="torch.nuclear_norm",
    floats=FLOATS,
)
def _nuclear_norm(g: Builder) -> Call:
    x = g.tensor(rank=2)
    kwargs = g.options(keepdim=(False, True))
    return Call((x,), out((1, 1) if kwargs else ()), kwargs)


for _name, _floats in (("nuclear_norm", FLOATS), ("frobenius_norm", ANY_FLOATS)):

    def _norm_dim(g: Builder) -> Call:
        x = draw_matrix(g)
        dims = g.choice(((-2, -1), (0, 1), (1, 0)))
        kwargs = g.options(keepdim=(False, True))
        return Call((x, dims), out(_reduced(x.shape, dims, bool(kwargs))), kwargs)

    op(
        f"{_name}.dim",
        f"aten::{_name}.dim",
        *(("aten::linalg_svdvals",) if _name == "nuclear_norm" else ()),
        function=f"torch.{_name}",
        out=f"torch.{_name}",
        floats=_floats,
    )(_norm_dim)


# -- parametrisations -----------------------------------------------------------------------------


# What torch.nn.utils.parametrizations.weight_norm calls. It has no policy, and one dtype.
@op("_weight_norm", function="torch._weight_norm", mixed="raises")
def _weight_norm(g: Builder) -> Call:
    direction = g.tensor(rank=(1, 3), weight=True)
    sizes = (direction.shape[0], *[1] * (direction.rank - 1))
    return Call((direction, g.tensor(sizes, weight=True), 0), out(direction.shape))
