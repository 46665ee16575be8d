"""Fourier transforms, and the views and constructors that join real and complex tensors.

CPU's table lists them all as float32, no accelerator's lists any. Kernels on CPU take float32 and
float64; an integer input is transformed in the default dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from amp_fuzz.catalogue.core import Builder, Call, Kind, Shape, Value, op, out

FLOATS = ("float32", "float64")

# What a transform does to the size of the (last) dimension: nothing, n -> n // 2 + 1, or back.
Kinds = Literal["full", "half", "back"]
_KINDS: dict[str, Kinds] = {
    "fft": "full",
    "ifft": "full",
    "rfft": "half",
    "ihfft": "half",
    "irfft": "back",
    "hfft": "back",
}
_NORMS = (None, "ortho", "forward", "backward")
_SIZES = (None, 4, 5, 2)


def _dtype(kind: Kinds, *inputs: Value) -> str:
    double = any(x.dtype in ("float64", "complex128") for x in inputs)
    if kind == "back":
        return "float64" if double else "float32"
    return "complex128" if double else "complex64"


def _input_kinds(kind: Kinds) -> Sequence[Kind]:
    # A one-sided transform refuses complex input.
    return ("float", "float", "int") if kind == "half" else ("float", "complex", "float", "int")


def _input(g: Builder, kind: Kinds, shape: Shape) -> Value:
    drawn: Kind = g.choice(_input_kinds(kind))
    return g.tensor(shape, kind=drawn)


def _last(kind: Kinds, given: int | None, size: int) -> int:
    if kind == "back":
        return 2 * (size - 1) if given is None else given
    n = size if given is None else given
    return n // 2 + 1 if kind == "half" else n


def _norm(g: Builder) -> dict[str, Any]:
    return g.options(norm=_NORMS)


for _name, _kind in _KINDS.items():

    def _one_dimensional(g: Builder, kind: Kinds = _kind) -> Call:
        x = _input(g, kind, g.shape(1, 3, empty=False))
        dim = g.dimension(x.rank)
        n = g.choice(_SIZES)
        if kind == "back" and x.shape[dim] == 1 and n is None:
            n = 1  # the default would be 0, which is refused
        shape = list(x.shape)
        shape[dim] = _last(kind, n, x.shape[dim])
        kwargs = {"n": n} if n is not None else {}
        if dim != -1:
            kwargs["dim"] = dim
        return Call((x,), out(tuple(shape), dtype=_dtype(kind, x)), kwargs | _norm(g))

    op(
        f"fft.{_name}",
        f"aten::fft_{_name}",
        function=f"torch.fft.{_name}",
        out=f"torch.fft.{_name}",
        floats=FLOATS,
    )(_one_dimensional)


def _many_dimensional(g: Builder, kind: Kinds, dims: Sequence[tuple[int, ...] | None]) -> Call:
    x = _input(g, kind, g.shape(2, 3, empty=False))
    dim = g.choice(dims)
    over = tuple(range(-x.rank, 0)) if dim is None else dim
    shape, kwargs = list(x.shape), {}
    sizes = [x.shape[d] for d in over]
    if g.flag() or (kind == "back" and sizes[-1] == 1):
        sizes = [g.choice(_SIZES[1:]) for _ in over]
        kwargs["s"] = sizes
    for d, size in zip(over, sizes, strict=True):
        shape[d] = size
    shape[over[-1]] = _last(kind, sizes[-1] if "s" in kwargs else None, sizes[-1])
    if dim is not None and dim != dims[0]:
        kwargs["dim"] = list(dim)
    return Call((x,), out(tuple(shape), dtype=_dtype(kind, x)), kwargs | _norm(g))


# Two and n dimensions; of the Hermitian ones no table has these.
for _name, _kind in _KINDS.items():
    _listed = _name not in ("hfft", "ihfft")

    def _two(g: Builder, kind: Kinds = _kind) -> Call:
        return _many_dimensional(g, kind, ((-2, -1), (0, 1), (1, 0)))

    def _n(g: Builder, kind: Kinds = _kind) -> Call:
        return _many_dimensional(g, kind, (None, (-1,), (0, 1), (1, 0)))

    for _suffix, _build in (("2", _two), ("n", _n)):
        op(
            f"fft.{_name}{_suffix}",
            *((f"aten::fft_{_name}{_suffix}",) if _listed else ()),
            function=f"torch.fft.{_name}{_suffix}",
            out=f"torch.fft.{_name}{_suffix}",
            floats=FLOATS,
        )(_build)


for _name in ("fftshift", "ifftshift"):

    @op(f"fft.{_name}", "aten::cat", function=f"torch.fft.{_name}")
    def _shift(g: Builder) -> Call:
        x = g.tensor(rank=(1, 3), kind="complex") if g.flag() else g.tensor(rank=(1, 3))
        return Call((x,), out(x.shape, dtype=x.dtype), g.options(dim=(None, [0], [-1])))


# -- short-time transforms ------------------------------------------------------------------------


def _stft_call(g: Builder, center: bool) -> Call:
    n_fft = g.choice((4, 8, 5))
    length = n_fft + g.int(0, 9)
    x = g.tensor(g.choice(((length,), (2, length))))
    kwargs: dict[str, Any] = {"n_fft": n_fft, "hop_length": g.choice((2, 1, 3))}
    window = (g.tensor((n_fft - 1,), grad=False),) if g.flag() else ()
    if window:
        kwargs |= {"win_length": n_fft - 1, "window": window[0]}
    kwargs |= g.options(onesided=(None, False), normalized=(False, True))
    kwargs["center"] = center
    kwargs["return_complex"] = True
    padded = length + 2 * (n_fft // 2) if center else length
    frames = 1 + (padded - n_fft) // kwargs["hop_length"]
    bins = n_fft if "onesided" in kwargs else n_fft // 2 + 1
    shape = (*x.shape[:-1], bins, frames)
    return Call((x,), out(shape, dtype=_dtype("full", x, *window)), kwargs)


# torch.stft pads in Python where it centers, and calls the overload without `center` either way.
@op(
    "stft",
    "aten::stft",
    "aten::reflection_pad1d",
    function="torch.stft",
    method="stft",
    floats=FLOATS,
)
def _stft(g: Builder) -> Call:
    return _stft_call(g, center=not g.flag())


@op("stft.center", "aten::stft.center", overload="stft.center", floats=FLOATS)
def _stft_center(g: Builder) -> Call:
    return _stft_call(g, center=not g.flag())


@op(
    "istft",
    "aten::view_as_complex",
    "aten::pow.Tensor_Scalar",
    function="torch.istft",
    method="istft",
    overload="istft.default",
    floats=FLOATS,
)
def _istft(g: Builder) -> Call:
    n_fft, frames, hop = g.choice((4, 8)), g.int(3, 6), g.choice((1, 2))
    shape = (*g.choice(((), (2,))), n_fft // 2 + 1, frames)
    x = g.tensor(shape, kind="complex")
    kwargs = {"n_fft": n_fft, "hop_length": hop, **g.options(normalized=(False, True))}
    return Call((x,), out((*shape[:-2], hop * (frames - 1)), dtype=_dtype("back", x)), kwargs)


# -- real and complex -----------------------------------------------------------------------------


# It refuses most layouts and odd offsets: the `module` form gives it a fresh tensor.
@op(
    "view_as_complex",
    "aten::view_as_complex",
    function="torch.view_as_complex",
    module="torch.view_as_complex({0}.clone(memory_format=torch.contiguous_format))",
    floats=FLOATS,
    view=True,
)
def _view_as_complex(g: Builder) -> Call:
    shape = g.shape(0, 2)
    x = g.tensor((*shape, 2))
    return Call((x,), out(shape, dtype=_dtype("full", x)))


@op("view_as_real", function="torch.view_as_real", view=True)
def _view_as_real(g: Builder) -> Call:
    x = g.tensor(kind="complex", empty=True)
    return Call((x,), out((*x.shape, 2), dtype=_dtype("back", x)))


@op(
    "polar",
    "aten::polar",
    function="torch.polar",
    out="torch.polar",
    mixed="raises",
    floats=FLOATS,
)
def _polar(g: Builder) -> Call:
    magnitude = g.tensor(empty=True)
    angle = g.broadcastable(magnitude.shape)
    dtype = _dtype("full", magnitude, angle)
    return Call((magnitude, angle), out(magnitude.shape, dtype=dtype))
