"""Resizing and grid sampling."""

from __future__ import annotations

from typing import Any

from amp_fuzz.catalogue.core import Build, Builder, Call, Shape, Value, op, out

_F = "torch.nn.functional"


# -- upsample -------------------------------------------------------------------------------------


def _size(g: Builder, rank: int) -> list[int]:
    return [g.int(1, 5) for _ in range(rank)]


def _resize(rank: int, mode: str, *, antialias: bool = False) -> Build:
    aligns = mode in ("linear", "bilinear", "bicubic", "trilinear")

    def build(g: Builder) -> Call:
        x = g.tensor((g.int(1, 2), g.int(1, 3), *(g.int(2, 7 - rank) for _ in range(rank))))
        corners = aligns and g.flag()
        if g.form in ("overload", "out"):
            size = _size(g, rank)
            args = (x, size, corners) if aligns else (x, size)
            return Call(args, out((*x.shape[:2], *size)))
        options: dict[str, Any] = {"mode": mode}
        options |= {"align_corners": True} if corners else {}
        options |= {"antialias": True} if antialias else {}
        scale = g.choice((None, 2.0, 0.5, 1.7))
        if scale is None:
            size = _size(g, rank)
            options["size"] = size
        else:
            size = [int(n * scale) for n in x.shape[2:]]
            # The kernel gets the scale itself, or one recomputed from the sizes.
            options |= {"scale_factor": scale} | g.options(recompute_scale_factor=(None, True))
        return Call((x,), out((*x.shape[:2], *size)), options)

    return build


_MODULE = "torch.nn.Upsample({args1})({0})"

# F.interpolate calls the composite `.vec` overloads, and these the ones that tables list.
for _name, _rank, _mode in (
    ("upsample_nearest1d", 1, "nearest"),
    ("upsample_nearest2d", 2, "nearest"),
    ("upsample_nearest3d", 3, "nearest"),
    ("_upsample_nearest_exact1d", 1, "nearest-exact"),
    ("_upsample_nearest_exact2d", 2, "nearest-exact"),
    ("_upsample_nearest_exact3d", 3, "nearest-exact"),
    ("upsample_linear1d", 1, "linear"),
    ("upsample_bilinear2d", 2, "bilinear"),
    ("upsample_bicubic2d", 2, "bicubic"),
    ("upsample_trilinear3d", 3, "trilinear"),
):
    op(
        _name,
        f"aten::{_name}",
        function=f"{_F}.interpolate",
        overload=f"{_name}.default",
        out=f"torch._C._nn.{_name}",
        module=_MODULE,
    )(_resize(_rank, _mode))

for _mode in ("bilinear", "bicubic"):
    _name = f"_upsample_{_mode}2d_aa"
    op(
        _name,
        f"aten::{_name}",
        function=f"{_F}.interpolate",
        overload=f"{_name}.default",
        out=f"torch._C._nn.{_name}",
        floats=("float32", "float64"),
    )(_resize(2, _mode, antialias=True))


# -- grid sample ----------------------------------------------------------------------------------


_MODES, _PADDINGS = ("bilinear", "nearest", "bicubic"), ("zeros", "border", "reflection")


def _grid(g: Builder, rank: int, padding: int) -> tuple[Value, Value, Shape]:
    """Draw an image, a grid of places in it (-1 to 1 is inside), and the shape of the result.

    A place far outside reads and writes out of bounds where the padding reflects (pytorch#24823).
    """
    n, channels = g.choice(((1, 1), (2, 1), (1, 3)))
    size: Shape = g.choice(((3, 4, 2), (2, 2, 3), (5, 1, 4)))[:rank]
    points: Shape = g.choice(((2, 3, 2), (1, 1, 1), (4, 2, 1)))[:rank]
    x = g.tensor((n, channels, *size))
    domain = "uniform" if _PADDINGS[padding] == "reflection" else None
    return x, g.tensor((n, *points, rank), domain=domain), (n, channels, *points)


@op("grid_sampler", "aten::grid_sampler", function=f"{_F}.grid_sample", mixed="raises")
def _grid_sample(g: Builder) -> Call:
    rank = g.int(2, 3)
    mode, padding, corners = g.digits(5 - rank, len(_PADDINGS), 2)
    x, grid, shape = _grid(g, rank, padding)
    options = {"mode": _MODES[mode], "padding_mode": _PADDINGS[padding]}
    return Call((x, grid), out(shape), options | {"align_corners": corners == 1})


def _grid_kernel(rank: int) -> Build:
    def build(g: Builder) -> Call:
        mode, padding, corners = g.digits(5 - rank, len(_PADDINGS), 2)
        x, grid, shape = _grid(g, rank, padding)
        return Call((x, grid, mode, padding, corners == 1), out(shape))

    return build


for _rank in (2, 3):
    _name = f"grid_sampler_{_rank}d"
    op(_name, f"aten::{_name}", function=f"torch.{_name}", overload=_name, mixed="raises")(
        _grid_kernel(_rank)
    )

# What grid_sampler_2d does for images too large for 32-bit indices: in float32 only.
op(
    "_grid_sampler_2d_cpu_fallback",
    "aten::_grid_sampler_2d_cpu_fallback",
    function="torch._grid_sampler_2d_cpu_fallback",
    overload="_grid_sampler_2d_cpu_fallback",
    mixed="raises",
    floats=("float32",),
    devices=("cpu",),
)(_grid_kernel(2))
