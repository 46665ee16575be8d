"""Linear algebra: decompositions, solvers, inverses, norms, ranks, determinants.

Nearly all of these kernels take float32 and float64 only, and only CPU's table lists most of them:
there autocast is what makes them run on lower-precision values at all. Norms are the exception,
listed on the accelerators and not on CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from amp_fuzz.catalogue.core import Builder, Call, Out, Shape, Value, op, out
from amp_fuzz.program import DType

FLOATS = ("float32", "float64")  # what LAPACK has
ANY_FLOATS = ("float32", "bfloat16", "float16", "float64")
INF = float("inf")

Build = Callable[[Builder], Call]


def _linalg(
    name: str, mixed: Literal["promotes", "raises"] = "promotes", listed: bool = True
) -> Callable[[Build], Build]:
    """Register a function of torch.linalg: it has an out= and no method."""
    function = f"torch.linalg.{name}"
    overloads = (f"aten::linalg_{name}",) if listed else ()
    return op(
        f"linalg.{name}", *overloads, function=function, out=function, mixed=mixed, floats=FLOATS
    )


def _torch(
    name: str, mixed: Literal["promotes", "raises"] = "promotes"
) -> Callable[[Build], Build]:
    """Register one of torch's older functions: it has a method too."""
    return op(
        name,
        f"aten::{name}",
        function=f"torch.{name}",
        method=name,
        out=f"torch.{name}",
        mixed=mixed,
        floats=FLOATS,
    )


def _batch(g: Builder) -> Shape:
    return g.choice(((), (2,), (3, 1)))  # type: ignore[no-any-return]


def _size(g: Builder) -> int:
    return g.choice((3, 2, 4, 1, 8))  # type: ignore[no-any-return]


def _square(g: Builder, domain: str | None = None) -> Value:
    n = _size(g)
    return g.tensor((*_batch(g), n, n), domain=domain)


def _matrix(g: Builder) -> Value:
    """Any batch of matrices; a decomposition needs no more than that."""
    return g.tensor(rank=(2, 3))


def _complex(x: Value) -> str:
    return "complex128" if x.dtype == "float64" else "complex64"


def _double_or_single(x: Value) -> str:
    return "float64" if x.dtype == "float64" else "float32"


def _tall(g: Builder) -> tuple[Value, Shape, int, int]:
    """Draw a tall matrix, as reflectors need; return it with its batch, rows and columns."""
    batch, n = _batch(g), g.int(1, 3)
    m = n + g.int(0, 2)
    return g.tensor((*batch, m, n)), batch, m, n


# -- one matrix in, one or more out ---------------------------------------------------------------


def _maps_square(domain: str | None, options: dict[str, Sequence[Any]], info: bool) -> Build:
    def build(g: Builder) -> Call:
        x = _square(g, domain)
        outputs = out(x.shape)
        if info:
            outputs += out(x.shape[:-2], dtype="int32")
        return Call((x,), outputs, g.options(**options))

    return build


_UPPER: dict[str, Sequence[Any]] = {"upper": (False, True)}
# name, overload, callable, method, value domain, options, whether an `info` comes with it
for _name, _overload, _function, _method, _domain, _options, _info in (
    ("inverse", "inverse", "torch.inverse", "inverse", None, {}, False),
    ("linalg.inv", "linalg_inv", "torch.linalg.inv", None, None, {}, False),
    ("linalg.inv_ex", "linalg_inv_ex", "torch.linalg.inv_ex", None, None, {}, True),
    ("cholesky", "cholesky", "torch.cholesky", "cholesky", "psd", _UPPER, False),
    ("linalg.cholesky", "linalg_cholesky", "torch.linalg.cholesky", None, "psd", _UPPER, False),
    (
        *("linalg.cholesky_ex", "linalg_cholesky_ex", "torch.linalg.cholesky_ex"),
        *(None, "psd", _UPPER, True),
    ),
    (
        *("cholesky_inverse", "cholesky_inverse", "torch.cholesky_inverse", "cholesky_inverse"),
        *(None, _UPPER, False),
    ),
):
    op(
        _name,
        f"aten::{_overload}",
        function=_function,
        method=_method,
        out=_function,
        mixed="raises",
        floats=FLOATS,
    )(_maps_square(_domain, _options, _info))


def _values_of(shape: Callable[[Value], Shape], square: bool, **options: Sequence[Any]) -> Build:
    """Return a build function for one real output whose shape follows from the matrix."""

    def build(g: Builder) -> Call:
        x = _square(g) if square else _matrix(g)
        return Call((x,), out(shape(x)), g.options(**options))

    return build


def _rank_shape(x: Value) -> Shape:
    return (*x.shape[:-2], min(x.shape[-2:]))


_linalg("svdvals")(_values_of(_rank_shape, square=False))
_linalg("eigvalsh")(_values_of(_rank_shape, square=True, UPLO=("L", "U")))
op("det", function="torch.det", method="det", floats=FLOATS)(
    _values_of(lambda x: x.shape[:-2], square=True)
)
op("logdet", function="torch.logdet", method="logdet", floats=FLOATS)(
    _values_of(lambda x: x.shape[:-2], square=True)
)
_linalg("det", listed=False)(_values_of(lambda x: x.shape[:-2], square=True))
op(
    "linalg.matrix_exp",
    "aten::cat",
    function="torch.linalg.matrix_exp",
    method="matrix_exp",
)(_values_of(lambda x: x.shape, square=True))


@op("slogdet", function="torch.slogdet", method="slogdet", out="torch.slogdet", floats=FLOATS)
def _slogdet(g: Builder) -> Call:
    x = _square(g)
    return Call((x,), out(x.shape[:-2], x.shape[:-2]))


@op("trace", "aten::trace", function="torch.trace", method="trace")
def _trace(g: Builder) -> Call:
    return Call((g.tensor(rank=2, empty=True),), out(()))


# pinverse is listed; linalg.pinv is not, so that its last product runs in lower precision.
@op("pinverse", "aten::pinverse", function="torch.pinverse", method="pinverse", floats=FLOATS)
def _pinverse(g: Builder) -> Call:
    x = _matrix(g)
    *batch, m, n = x.shape
    return Call((x,), out((*batch, n, m)), g.options(rcond=(1e-15, 0.1)))


@op(
    "linalg.pinv",
    "aten::matmul",
    "aten::svd",
    function="torch.linalg.pinv",
    out="torch.linalg.pinv",
    floats=FLOATS,
)
def _pinv(g: Builder) -> Call:
    # It refuses lower precision before it meets a kernel that casts.
    x = g.tensor(rank=(2, 3), dtype=g.choice(FLOATS))
    *batch, m, n = x.shape
    return Call((x,), out((*batch, n, m)), g.options(atol=(None, 0.5), rtol=(None, 0.1)))


@op(
    "linalg.pinv.hermitian",
    "aten::matmul",
    "aten::linalg_eigh",
    function="torch.linalg.pinv",
    floats=FLOATS,
)
def _pinv_hermitian(g: Builder) -> Call:
    n = _size(g)
    x = g.tensor((*_batch(g), n, n), dtype=g.choice(FLOATS), domain="psd")
    return Call((x,), out(x.shape), {"hermitian": True})


# Powers 0 and 1 multiply nothing, so no autocast kernel runs.
@op(
    "matrix_power",
    "aten::matmul",
    function="torch.matrix_power",
    method="matrix_power",
    out="torch.linalg.matrix_power",
)
def _matrix_power(g: Builder) -> Call:
    x, n = _square(g), g.choice((2, 1, 0, 3, 5))
    return Call((x, n), out(x.shape, dtype=x.dtype if n < 2 else None))


@op(
    "matrix_power.inverse",
    "aten::linalg_inv",
    function="torch.linalg.matrix_power",
    floats=FLOATS,
)
def _matrix_power_inverse(g: Builder) -> Call:
    x = _square(g)
    return Call((x, -1), out(x.shape))


@op(
    "matrix_power.negative",
    "aten::matmul",
    "aten::linalg_inv",
    function="torch.linalg.matrix_power",
    floats=FLOATS,
)
def _matrix_power_negative(g: Builder) -> Call:
    x = _square(g)
    return Call((x, g.choice((-2, -3))), out(x.shape))


# -- decompositions -------------------------------------------------------------------------------


@_linalg("qr")
def _linalg_qr(g: Builder) -> Call:
    x = _matrix(g)
    mode = g.choice(("reduced", "complete", "r"))
    *batch, m, n = x.shape
    k = m if mode == "complete" else min(m, n)
    q = (0,) if mode == "r" else (*batch, m, k)
    return Call((x,), out(q, (*batch, k, n)), {"mode": mode})


@_torch("qr")
def _qr(g: Builder) -> Call:
    x, some = _matrix(g), not g.flag()
    *batch, m, n = x.shape
    k = min(m, n) if some else m
    return Call((x,), out((*batch, m, k), (*batch, k, n)), {"some": some})


@_linalg("svd")
def _linalg_svd(g: Builder) -> Call:
    # Full matrices have no gradient: the reduced form is the simpler one.
    x, full = _matrix(g), g.flag()
    *batch, m, n = x.shape
    k = min(m, n)
    u, vh = (m, m if full else k), (n if full else k, n)
    return Call((x,), out((*batch, *u), (*batch, k), (*batch, *vh)), {"full_matrices": full})


@_torch("svd")
def _svd(g: Builder) -> Call:
    x = _matrix(g)
    kwargs = g.options(some=(True, False), compute_uv=(True, False))
    *batch, m, n = x.shape
    k = min(m, n)
    # Without vectors torch returns zeros of the full shapes.
    full = len(kwargs) > 0
    u, v = (m, m if full else k), (n, n if full else k)
    return Call((x,), out((*batch, *u), (*batch, k), (*batch, *v)), kwargs)


@_linalg("eig")
def _eig(g: Builder) -> Call:
    x = _square(g)
    return Call((x,), out(x.shape[:-1], x.shape, dtype=_complex(x)))


@_linalg("eigvals")
def _eigvals(g: Builder) -> Call:
    x = _square(g)
    return Call((x,), out(x.shape[:-1], dtype=_complex(x)))


@_linalg("eigh")
def _eigh(g: Builder) -> Call:
    x = _square(g)  # it reads one triangle: any square matrix will do
    return Call((x,), out(x.shape[:-1], x.shape), g.options(UPLO=("L", "U")))


@op(
    "geqrf", "aten::geqrf", function="torch.geqrf", method="geqrf", out="torch.geqrf", floats=FLOATS
)
def _geqrf(g: Builder) -> Call:
    x = _matrix(g)
    return Call((x,), out(x.shape, _rank_shape(x)))


def _householder(g: Builder) -> Call:
    x, batch, _, n = _tall(g)
    tau = g.tensor((*batch, g.int(1, n)))
    return Call((x, tau), out(x.shape))


_linalg("householder_product", mixed="raises")(_householder)
_torch("orgqr", mixed="raises")(_householder)


@_torch("ormqr", mixed="raises")
def _ormqr(g: Builder) -> Call:
    x, batch, m, k = _tall(g)
    tau, columns = g.tensor((*batch, k)), g.int(1, 4)
    kwargs = g.options(left=(True, False), transpose=(False, True))
    shape = (*batch, columns, m) if "left" in kwargs else (*batch, m, columns)
    return Call((x, tau, g.tensor(shape)), out(shape), kwargs)


def _lu_factor(g: Builder) -> Call:
    x = _matrix(g)
    return Call((x,), (Out(x.shape), Out(_rank_shape(x), "int32")))


_linalg("lu_factor", listed=False)(_lu_factor)


# torch.lu and Tensor.lu are Python over the same kernel, which users reach in no other way.
@op(
    "lu",
    "aten::_lu_with_info",
    function="torch.lu",
    method="lu",
    overload="_lu_with_info.default",
    floats=FLOATS,
)
def _lu(g: Builder) -> Call:
    call = _lu_factor(g)
    x: Value = call.args[0]
    info = Out(x.shape[:-2], "int32")
    if g.form == "overload":
        return Call(call.args, (*call.outputs, info), g.options(check_errors=(True, False)))
    kwargs = g.options(get_infos=(False, True))
    return Call(call.args, (*call.outputs, info) if kwargs else call.outputs, kwargs)


@_linalg("lu", listed=False)
def _linalg_lu(g: Builder) -> Call:
    x = _matrix(g)
    *batch, m, n = x.shape
    k = min(m, n)
    return Call((x,), out((*batch, m, m), (*batch, m, k), (*batch, k, n)))


@_linalg("ldl_factor", listed=False)
def _ldl_factor(g: Builder) -> Call:
    x = _square(g)
    return Call((x,), (Out(x.shape), Out(x.shape[:-1], "int32")))


# -- systems of equations -------------------------------------------------------------------------


def _right_hand_side(g: Builder, a: Value) -> Value:
    return g.tensor((*a.shape[:-1], g.int(1, 4)))


@_linalg("solve", mixed="raises")
def _solve(g: Builder) -> Call:
    a = _square(g)
    how = g.choice(("matrix", "vector", "right"))
    if how == "vector":
        b = g.tensor(a.shape[:-1])
        return Call((a, b), out(b.shape))
    if how == "right":
        b = g.tensor((*a.shape[:-2], g.int(1, 4), a.shape[-1]))
        return Call((a, b), out(b.shape), {"left": False})
    b = _right_hand_side(g, a)
    return Call((a, b), out(b.shape))


@_linalg("solve_ex", mixed="raises", listed=False)
def _solve_ex(g: Builder) -> Call:
    a = _square(g)
    b = _right_hand_side(g, a)
    return Call((a, b), (Out(b.shape), Out(a.shape[:-2], "int32")))


@_torch("cholesky_solve", mixed="raises")
def _cholesky_solve(g: Builder) -> Call:
    factor = _square(g)
    b = _right_hand_side(g, factor)
    return Call((b, factor), out(b.shape), g.options(upper=(False, True)))


@_torch("triangular_solve", mixed="raises")
def _triangular_solve(g: Builder) -> Call:
    a = _square(g)
    b = _right_hand_side(g, a)
    kwargs = g.options(upper=(True, False), transpose=(False, True), unitriangular=(False, True))
    return Call((b, a), out(b.shape, a.shape), kwargs)


@_linalg("solve_triangular", listed=False)
def _solve_triangular(g: Builder) -> Call:
    a = _square(g)
    b = _right_hand_side(g, a)
    kwargs = {"upper": g.flag(), "unitriangular": g.flag()}
    # It takes a right-hand side of any dtype and returns the matrix's, where `solve` would raise.
    return Call((a, b), out(b.shape, dtype=a.dtype), kwargs)


def _lu_and_pivots(g: Builder) -> tuple[Value, Value]:
    """Draw an LU factor and pivots: int32 in [1, n], as the positive domain is from n = 4 on."""
    shape = (*_batch(g), g.choice((4, 5)))
    a = g.tensor((*shape, shape[-1]))
    return a, g.tensor(shape, kind="int", dtype="int32", domain="positive")


@_torch("lu_solve", mixed="raises")
def _lu_solve(g: Builder) -> Call:
    a, pivots = _lu_and_pivots(g)
    b = _right_hand_side(g, a)
    return Call((b, a, pivots), out(b.shape))


@_linalg("lu_solve", mixed="raises", listed=False)
def _linalg_lu_solve(g: Builder) -> Call:
    a, pivots = _lu_and_pivots(g)
    b = _right_hand_side(g, a)
    return Call((a, pivots, b), out(b.shape), g.options(adjoint=(False, True)))


# No out=: into transposed batches torch 2.13 writes beyond the buffer, as torch.triu and tril do.
@op("lu_unpack", function="torch.lu_unpack")
def _lu_unpack(g: Builder) -> Call:
    a, pivots = _lu_and_pivots(g)
    return Call((a, pivots), out(a.shape, a.shape, a.shape))


@_linalg("lstsq", mixed="raises")
def _lstsq(g: Builder) -> Call:
    a = _matrix(g)
    *batch, m, n = a.shape
    b = _right_hand_side(g, a)
    # Not gelsy, CPU's default: its pivots start from uninitialised memory (pytorch#187411).
    driver, k = g.choice(("gels", "gelsd", "gelss")), b.shape[-1]
    by_values = driver != "gels"
    outputs = (
        Out((*batch, n, k)),
        Out((*batch, k) if m > n else (0,)),
        Out(tuple(batch) if by_values else (0,), "int64"),
        Out((*batch, min(m, n)) if by_values else (0,)),
    )
    return Call((a, b), outputs, {"driver": driver})


@_linalg("tensorsolve", mixed="raises")
def _tensorsolve(g: Builder) -> Call:
    a, b, x, dims = g.choice(
        (
            ((4, 2, 2), (4,), (2, 2), None),
            ((2, 3, 6), (2, 3), (6,), None),
            ((2, 2, 2, 2), (2, 2), (2, 2), None),
            ((4, 2, 2), (2, 2), (4,), [0]),
        )
    )
    kwargs = {} if dims is None else {"dims": dims}
    return Call((g.tensor(a), g.tensor(b)), out(x), kwargs)


@_linalg("tensorinv")
def _tensorinv(g: Builder) -> Call:
    shape, ind = g.choice((((2, 2, 4), 2), ((6, 2, 3), 1), ((2, 2, 2, 2), 2)))
    return Call((g.tensor(shape),), out((*shape[ind:], *shape[:ind])), {"ind": ind})


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
        x = _square(g) if square else _matrix(g)
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
        x = _square(g) if hermitian else _matrix(g)
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
        x = _matrix(g)
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
        x = _matrix(g)
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


# -- products -------------------------------------------------------------------------------------


@op("kron", function="torch.kron", method="kron", out="torch.kron")
def _kron(g: Builder) -> Call:
    a, b = (g.tensor(tuple(g.int(1, 4) for _ in range(g.int(0, 2)))) for _ in range(2))
    rank = max(a.rank, b.rank)
    left, right = ((1,) * (rank - v.rank) + v.shape for v in (a, b))
    return Call((a, b), out(tuple(m * n for m, n in zip(left, right, strict=True))))


@op("linalg.vander", "aten::cumprod", "aten::cat", function="torch.linalg.vander", floats=FLOATS)
def _vander(g: Builder) -> Call:
    x, n = g.tensor(rank=(1, 2)), g.int(2, 4)
    return Call((x,), out((*x.shape, n)), {"N": n})
