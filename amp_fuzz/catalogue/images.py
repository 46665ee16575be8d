"""Poolings, paddings and image rearrangements that no autocast table lists."""

from __future__ import annotations

from typing import Any

from amp_fuzz.catalogue.core import Build, Builder, Call, Out, Shape, Value, op, out

_F = "torch.nn.functional"


def _pooled(size: int, kernel: int, stride: int, padding: int, dilation: int, ceil: bool) -> int:
    """Return an output size as ``pooling_output_shape`` does (aten/src/ATen/native/Pool.h)."""
    span = size + 2 * padding - dilation * (kernel - 1) - 1
    if not ceil:
        return span // stride + 1
    n = -(-span // stride) + 1
    # The last window must start inside the input or its left padding.
    return n - 1 if (n - 1) * stride >= size + padding else n


def _image(g: Builder, rank: int, least: int = 2) -> Value:
    """Draw a batch or a single image of `rank` spatial dimensions of at least `least`."""
    batch = g.choice(((2, 3), (1, 1), (3,)))
    return g.tensor((*batch, *(max(g.dim(), least) for _ in range(rank))))


def _windows(g: Builder, *, dilated: bool) -> dict[str, Any]:
    """Draw the geometry of a pooling whose windows fit into any spatial size of 2 or more."""
    options: dict[str, Any] = g.choice(
        (
            {"kernel_size": 2},
            {"kernel_size": 2, "stride": 1},
            {"kernel_size": 2, "stride": 1, "padding": 1},
            {"kernel_size": 3, "padding": 1, "stride": 2},
            {"kernel_size": 1, "stride": 2},
            {"kernel_size": 2, "padding": 1, "stride": 1, "dilation": 2 if dilated else 1},
        )
    )
    if not dilated:
        options = {k: v for k, v in options.items() if k != "dilation"}
    return options | g.options(ceil_mode=(False, True))


def _spatial(x: Value, rank: int, options: dict[str, Any]) -> Shape:
    kernel = options["kernel_size"]
    sizes = tuple(
        _pooled(
            size,
            kernel,
            options.get("stride", kernel),
            options.get("padding", 0),
            options.get("dilation", 1),
            options.get("ceil_mode", False),
        )
        for size in x.shape[-rank:]
    )
    return (*x.shape[:-rank], *sizes)


def _pool(rank: int, *, dilated: bool = False, indices: bool = False) -> Build:
    def build(g: Builder) -> Call:
        x, options = _image(g, rank), _windows(g, dilated=dilated)
        shape = _spatial(x, rank, options)
        outputs = [Out(shape, x.dtype)]
        if indices:
            # Which of equal maxima the index names is the kernel's choice.
            outputs.append(Out(shape, "int64", keep=False))
        return Call((x,), tuple(outputs), options)

    return build


for _rank in (1, 2):
    _name = f"max_pool{_rank}d"
    op(_name, function=f"{_F}.{_name}")(_pool(_rank, dilated=True))
    op(f"{_name}_with_indices", function=f"{_F}.{_name}_with_indices")(
        _pool(_rank, dilated=True, indices=True)
    )
op("avg_pool1d", function=f"{_F}.avg_pool1d")(_pool(1))


@op("avg_pool2d", function=f"{_F}.avg_pool2d", out="torch.ops.aten.avg_pool2d.out")
def _avg_pool2d(g: Builder) -> Call:
    x, options = _image(g, 2), _windows(g, dilated=False)
    shape = _spatial(x, 2, options)
    more = g.options(count_include_pad=(True, False), divisor_override=(None, 3))
    return Call((x,), out(shape, dtype=x.dtype), options | more)


def _adaptive(rank: int, *, indices: bool = False) -> Build:
    def build(g: Builder) -> Call:
        x = _image(g, rank, least=1)
        size = g.choice((1, 2, 3))
        shape = (*x.shape[:-rank], *(size,) * rank)
        outputs = [Out(shape, x.dtype)]
        if indices:
            outputs.append(Out(shape, "int64", keep=False))
        return Call((x, size), tuple(outputs))

    return build


for _rank in (1, 2):
    _module = f"torch.nn.AdaptiveAvgPool{_rank}d({{1}})({{0}})"
    op(
        f"adaptive_avg_pool{_rank}d",
        function=f"{_F}.adaptive_avg_pool{_rank}d",
        module=_module,
    )(_adaptive(_rank))
    op(f"adaptive_max_pool{_rank}d", function=f"{_F}.adaptive_max_pool{_rank}d")(_adaptive(_rank))


# Composite over pow: lp_pool is the root of a mean of powers.
def _lp_pool(rank: int) -> Build:
    def build(g: Builder) -> Call:
        x = _image(g, rank)
        kernel, norm = g.choice((2, 1)), g.choice((2.0, 1.0, 3.0))
        options: dict[str, Any] = {"kernel_size": kernel} | g.options(ceil_mode=(False, True))
        return Call((x, norm), out(_spatial(x, rank, options)), options)

    return build


op("lp_pool1d", "aten::pow.Tensor_Scalar", function=f"{_F}.lp_pool1d")(_lp_pool(1))
op("lp_pool2d", "aten::pow.Tensor_Scalar", function=f"{_F}.lp_pool2d")(_lp_pool(2))


# -- paddings ---------------------------------------------------------------------------------


def _padded(shape: Shape, pads: list[int]) -> Shape:
    sizes = list(shape)
    for i in range(len(pads) // 2):
        sizes[-1 - i] += pads[2 * i] + pads[2 * i + 1]
    return tuple(sizes)


@op("pad", function=f"{_F}.pad")
def _pad(g: Builder) -> Call:
    # A negative padding crops; no size becomes negative, as one of each pair is at least 0.
    x = g.tensor(rank=(1, 3))
    pads: list[int] = g.choice(([1, 0], [0, 2], [-1, 1], [2, -1]))
    if x.rank > 1 and g.flag():
        pads = [*pads, *g.choice(([1, 1], [0, -1], [0, 0]))]
    return Call((x, pads), out(_padded(x.shape, pads), dtype=x.dtype), g.options(value=(None, 1.5)))


@op("constant_pad_nd", function="torch.constant_pad_nd")
def _constant_pad_nd(g: Builder) -> Call:
    x = g.tensor(rank=(1, 3), kind="real")
    pads = [g.int(-1, 2), 1]
    return Call((x, pads, g.scalar("int")), out(_padded(x.shape, pads), dtype=x.dtype))


@op("pad.circular", function=f"{_F}.pad({{args}}, mode='circular')")
def _pad_circular(g: Builder) -> Call:
    rank = g.int(1, 2)
    shape = tuple(max(g.dim(), 2) for _ in range(rank))
    x = g.tensor((g.int(1, 2), g.int(1, 3), *shape))
    pads: list[int] = [g.choice((1, 0, 2)), 1] * rank
    return Call((x, pads), out(_padded(x.shape, pads), dtype=x.dtype))


# -- rearrangements ---------------------------------------------------------------------------


@op("pixel_shuffle", function="torch.pixel_shuffle", module="torch.nn.PixelShuffle({1})({0})")
def _pixel_shuffle(g: Builder) -> Call:
    batch, channels, height, width = g.int(1, 2), g.int(1, 2), g.int(1, 4), g.int(1, 4)
    factor = g.choice((2, 1, 3))
    x = g.tensor((batch, channels * factor**2, height, width))
    return Call((x, factor), out((batch, channels, height * factor, width * factor), dtype=x.dtype))


@op("pixel_unshuffle", function="torch.pixel_unshuffle")
def _pixel_unshuffle(g: Builder) -> Call:
    batch, channels, height, width = g.int(1, 2), g.int(1, 2), g.int(1, 4), g.int(1, 4)
    factor = g.choice((2, 1, 3))
    x = g.tensor((batch, channels, height * factor, width * factor))
    return Call((x, factor), out((batch, channels * factor**2, height, width), dtype=x.dtype))


@op("channel_shuffle", function="torch.channel_shuffle")
def _channel_shuffle(g: Builder) -> Call:
    groups = g.choice((2, 1, 3))
    x = g.tensor((g.int(1, 2), groups * g.int(1, 3), g.int(1, 4), g.int(1, 4)))
    return Call((x, groups), out(x.shape, dtype=x.dtype))


_BLOCKS: tuple[dict[str, Any], ...] = (
    {"kernel_size": 2},
    {"kernel_size": 2, "stride": 2},
    {"kernel_size": 2, "padding": 1},
    {"kernel_size": 2, "padding": 1, "dilation": 2},
)


def _blocks(g: Builder) -> tuple[Shape, int, dict[str, Any]]:
    """Draw an image shape (N, C, H, W), the number of sliding blocks in it, and their geometry."""
    shape = (g.int(1, 2), g.int(1, 3), g.int(2, 6), g.int(2, 6))
    options = g.choice(_BLOCKS)
    count = 1
    for size in shape[2:]:
        count *= _pooled(
            size,
            2,
            options.get("stride", 1),
            options.get("padding", 0),
            options.get("dilation", 1),
            False,
        )
    return shape, count, options


@op("im2col", function=f"{_F}.unfold")
def _im2col(g: Builder) -> Call:
    shape, count, options = _blocks(g)
    x = g.tensor(shape)
    return Call((x,), out((shape[0], 4 * shape[1], count), dtype=x.dtype), options)


@op("col2im", function=f"{_F}.fold")
def _col2im(g: Builder) -> Call:
    shape, count, options = _blocks(g)
    x = g.tensor((shape[0], 4 * shape[1], count))
    size = [shape[2], shape[3]]
    return Call((x,), out(shape, dtype=x.dtype), {"output_size": size} | options)


# -- normalisations by composition ------------------------------------------------------------


# Which norm it reaches depends on the device type: see `torch.functional.norm`.
@op(
    "normalize",
    "aten::linalg_vector_norm",
    "aten::norm.ScalarOpt_dim",
    function=f"{_F}.normalize",
    out=f"{_F}.normalize",
)
def _normalize(g: Builder) -> Call:
    x = g.tensor(rank=(1, 3))
    options = {"dim": g.dimension(x.rank)} | g.options(p=(2.0, 1.0, 3.0), eps=(1e-12, 0.5))
    return Call((x,), out(x.shape), options)


# Over channels of an image it averages with avg_pool3d, which the CPU lists; then it takes a power,
# which other devices list. The average has no 16-bit kernel on the CPU.
@op(
    "local_response_norm.image",
    "aten::avg_pool3d",
    "aten::pow.Tensor_Scalar",
    function=f"{_F}.local_response_norm",
    floats=("float32", "float64"),
)
def _local_response_norm(g: Builder) -> Call:
    x = g.tensor(rank=4)
    options = g.options(alpha=(1e-4, 0.5), beta=(0.75, 1.0), k=(1.0, 2.0))
    return Call((x, g.choice((2, 1, 3))), out(x.shape), options)
