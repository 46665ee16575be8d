"""Linear algebra: decompositions, solvers, inverses, determinants.

Nearly all of these kernels take float32 and float64 only, and only CPU's table lists most of them:
there autocast is what makes them run on lower-precision values at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from amp_fuzz.catalogue.core import Builder, Call, Out, Shape, Value, op, out

FLOATS = ("float32", "float64")  # what LAPACK has
ANY_FLOATS = ("float32", "bfloat16", "float16", "float64")
INF = float("inf")

Build = Callable[[Builder], Call]


def _linalg(
    name: str,
    mixed: Literal["promotes", "raises"] = "promotes",
    listed: bool = True,
) -> Callable[[Build], Build]:
    """Register a function of torch.linalg: it has an out= and no method."""
    function = f"torch.linalg.{name}"
    overloads = (f"aten::linalg_{name}",) if listed else ()
    return op(
        f"linalg.{name}",
        *overloads,
        function=function,
        out=function,
        mixed=mixed,
        floats=FLOATS,
    )


def _torch(
    name: str, mixed: Literal["promotes", "raises"] = "promotes", torch: str = ""
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
        torch=torch,
    )


def _batch(g: Builder) -> Shape:
    return g.choice(((), (2,), (3, 1)))  # type: ignore[no-any-return]


def _size(g: Builder) -> int:
    return g.choice((3, 2, 4, 1, 8))  # type: ignore[no-any-return]


def draw_square(g: Builder, domain: str | None = None) -> Value:
    """Draw a batch of square matrices."""
    n = _size(g)
    return g.tensor((*_batch(g), n, n), domain=domain)


def draw_matrix(g: Builder) -> Value:
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
        x = draw_square(g, domain)
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
        torch="<2.14" if _name == "cholesky" else "",
    )(_maps_square(_domain, _options, _info))


def _values_of(shape: Callable[[Value], Shape], square: bool, **options: Sequence[Any]) -> Build:
    """Return a build function for one real output whose shape follows from the matrix."""

    def build(g: Builder) -> Call:
        x = draw_square(g) if square else draw_matrix(g)
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
    x = draw_square(g)
    return Call((x,), out(x.shape[:-2], x.shape[:-2]))


@op("trace", "aten::trace", function="torch.trace", method="trace")
def _trace(g: Builder) -> Call:
    return Call((g.tensor(rank=2, empty=True),), out(()))


# pinverse is listed; linalg.pinv is not, so that its last product runs in lower precision.
@op("pinverse", "aten::pinverse", function="torch.pinverse", method="pinverse", floats=FLOATS)
def _pinverse(g: Builder) -> Call:
    x = draw_matrix(g)
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
    x, n = draw_square(g), g.choice((2, 1, 0, 3, 5))
    return Call((x, n), out(x.shape, dtype=x.dtype if n < 2 else None))


@op(
    "matrix_power.inverse",
    "aten::linalg_inv",
    function="torch.linalg.matrix_power",
    floats=FLOATS,
)
def _matrix_power_inverse(g: Builder) -> Call:
    x = draw_square(g)
    return Call((x, -1), out(x.shape))


@op(
    "matrix_power.negative",
    "aten::matmul",
    "aten::linalg_inv",
    function="torch.linalg.matrix_power",
    floats=FLOATS,
)
def _matrix_power_negative(g: Builder) -> Call:
    x = draw_square(g)
    return Call((x, g.choice((-2, -3))), out(x.shape))


# -- decompositions -------------------------------------------------------------------------------


@op(  # TorchScript alone takes its out=
    "linalg.matrix_sqrth",
    "aten::linalg_matrix_sqrth",
    function="torch.linalg.matrix_sqrth",
    floats=FLOATS,
    torch=">=2.14",
)
def _matrix_sqrth(g: Builder) -> Call:
    x = draw_square(g, "psd")
    return Call((x,), out(x.shape))


@_linalg("qr")
def _linalg_qr(g: Builder) -> Call:
    x = draw_matrix(g)
    mode = g.choice(("reduced", "complete", "r"))
    *batch, m, n = x.shape
    k = m if mode == "complete" else min(m, n)
    q = (0,) if mode == "r" else (*batch, m, k)
    return Call((x,), out(q, (*batch, k, n)), {"mode": mode})


@_torch("qr", torch="<2.14")
def _qr(g: Builder) -> Call:
    x, some = draw_matrix(g), not g.flag()
    *batch, m, n = x.shape
    k = min(m, n) if some else m
    return Call((x,), out((*batch, m, k), (*batch, k, n)), {"some": some})


@_linalg("svd")
def _linalg_svd(g: Builder) -> Call:
    # Full matrices have no gradient: the reduced form is the simpler one.
    x, full = draw_matrix(g), g.flag()
    *batch, m, n = x.shape
    k = min(m, n)
    u, vh = (m, m if full else k), (n if full else k, n)
    return Call((x,), out((*batch, *u), (*batch, k), (*batch, *vh)), {"full_matrices": full})


@_torch("svd")
def _svd(g: Builder) -> Call:
    x = draw_matrix(g)
    kwargs = g.options(some=(True, False), compute_uv=(True, False))
    *batch, m, n = x.shape
    k = min(m, n)
    # Without vectors torch returns zeros of the full shapes.
    full = len(kwargs) > 0
    u, v = (m, m if full else k), (n, n if full else k)
    return Call((x,), out((*batch, *u), (*batch, k), (*batch, *v)), kwargs)


@_linalg("eig")
def _eig(g: Builder) -> Call:
    x = draw_square(g)
    return Call((x,), out(x.shape[:-1], x.shape, dtype=_complex(x)))


@_linalg("eigvals")
def _eigvals(g: Builder) -> Call:
    x = draw_square(g)
    return Call((x,), out(x.shape[:-1], dtype=_complex(x)))


@_linalg("eigh")
def _eigh(g: Builder) -> Call:
    x = draw_square(g)  # it reads one triangle: any square matrix will do
    return Call((x,), out(x.shape[:-1], x.shape), g.options(UPLO=("L", "U")))


@op(
    "geqrf", "aten::geqrf", function="torch.geqrf", method="geqrf", out="torch.geqrf", floats=FLOATS
)
def _geqrf(g: Builder) -> Call:
    x = draw_matrix(g)
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
    x = draw_matrix(g)
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
    x = draw_matrix(g)
    *batch, m, n = x.shape
    k = min(m, n)
    return Call((x,), out((*batch, m, m), (*batch, m, k), (*batch, k, n)))


@_linalg("ldl_factor", listed=False)
def _ldl_factor(g: Builder) -> Call:
    x = draw_square(g)
    return Call((x,), (Out(x.shape), Out(x.shape[:-1], "int32")))


# -- systems of equations -------------------------------------------------------------------------


def _right_hand_side(g: Builder, a: Value) -> Value:
    return g.tensor((*a.shape[:-1], g.int(1, 4)))


@_linalg("solve", mixed="raises")
def _solve(g: Builder) -> Call:
    a = draw_square(g)
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
    a = draw_square(g)
    b = _right_hand_side(g, a)
    return Call((a, b), (Out(b.shape), Out(a.shape[:-2], "int32")))


@_torch("cholesky_solve", mixed="raises")
def _cholesky_solve(g: Builder) -> Call:
    factor = draw_square(g)
    b = _right_hand_side(g, factor)
    return Call((b, factor), out(b.shape), g.options(upper=(False, True)))


@_torch("triangular_solve", mixed="raises")
def _triangular_solve(g: Builder) -> Call:
    a = draw_square(g)
    b = _right_hand_side(g, a)
    kwargs = g.options(upper=(True, False), transpose=(False, True), unitriangular=(False, True))
    return Call((b, a), out(b.shape, a.shape), kwargs)


@_linalg("solve_triangular", listed=False)
def _solve_triangular(g: Builder) -> Call:
    a = draw_square(g)
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
    a = draw_matrix(g)
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
