"""Pooling in 3-d, unpooling, and padding that reflects or replicates: what CPU autocast lists."""

from __future__ import annotations

from typing import Any

from amp_fuzz.catalogue.core import Build, Builder, Call, Out, Shape, Value, op, out

_F = "torch.nn.functional"


def _image(g: Builder, rank: int, low: int, high: int, *, batch: bool = False) -> Value:
    """Draw an image of `rank` spatial dimensions, without a batch dimension now and then."""
    lead = g.choice(((1, 2), (2, 1)) if batch else ((1, 2), (2, 1), (2,)))
    return g.tensor((*lead, *(g.int(low, high) for _ in range(rank))))


# -- windows --------------------------------------------------------------------------------------

_GEOMETRIES: tuple[tuple[list[int], dict[str, Any]], ...] = (
    ([2, 2, 2], {}),
    ([2, 2, 2], {"stride": 1}),
    ([2, 3, 2], {"stride": 2, "padding": 1}),
    ([3, 2, 1], {"stride": [1, 2, 3]}),
    ([3, 3, 3], {"stride": 2, "padding": [0, 1, 1]}),
    ([1, 1, 1], {"stride": 2}),
)


def _three(value: Any) -> list[int]:
    return [value] * 3 if isinstance(value, int) else value


def _windows(x: Value, kernel: list[int], options: dict[str, Any]) -> Shape:
    """Return the output shape, as pooling_output_shape does (aten/src/ATen/native/Pool.h)."""
    sizes = []
    stride, padding = _three(options.get("stride", kernel)), _three(options.get("padding", 0))
    dilation = options.get("dilation", 1)
    for n, k, s, p in zip(x.shape[-3:], kernel, stride, padding, strict=True):
        room = n + 2 * p - dilation * (k - 1) - 1
        size = room // s + 1
        if "ceil_mode" in options:
            size = -(-room // s) + 1
            size -= (size - 1) * s >= n + p  # the last window must not start in the right padding
        sizes.append(size)
    return (*x.shape[:-3], *sizes)


def _pool(g: Builder, **more: tuple[Any, ...]) -> Call:
    x = _image(g, 3, 3, 6)
    kernel, options = g.choice(_GEOMETRIES)
    options = options | g.options(ceil_mode=(False, True), **more)
    return Call((x, kernel), out(_windows(x, kernel, options)), options)


@op(
    "avg_pool3d",
    "aten::avg_pool3d",
    function=f"{_F}.avg_pool3d",
    out=f"{_F}.avg_pool3d",
    floats=("float32", "float64"),
)
def _avg_pool(g: Builder) -> Call:
    return _pool(g, count_include_pad=(True, False), divisor_override=(None, 3))


@op("max_pool3d", "aten::max_pool3d", function=f"{_F}.max_pool3d", module="torch.max_pool3d")
def _max_pool(g: Builder) -> Call:
    call = _pool(g)
    kernel, options = call.args[1], call.kwargs
    if kernel == [2, 2, 2] and g.flag():
        options = {**options, "dilation": 2}
    return Call(call.args, out(_windows(call.args[0], kernel, dict(options))), options)


def _adaptive(g: Builder) -> tuple[Value, list[int], Shape]:
    x = _image(g, 3, 1, 5)
    size = g.choice(([1, 1, 1], [2, 2, 2], [3, 1, 2], [2, 7, 1]))
    return x, size, (*x.shape[:-3], *size)


@op(
    "adaptive_avg_pool3d",
    "aten::adaptive_avg_pool3d",
    function=f"{_F}.adaptive_avg_pool3d",
    out="torch._C._nn.adaptive_avg_pool3d",
)
def _adaptive_avg(g: Builder) -> Call:
    x, size, shape = _adaptive(g)
    return Call((x, size), out(shape))


# Which of equal maxima an index names is the kernel's choice: programs do not keep indices.
@op(
    "adaptive_max_pool3d",
    "aten::adaptive_max_pool3d",
    function=f"{_F}.adaptive_max_pool3d_with_indices",
    overload="adaptive_max_pool3d",
)
def _adaptive_max(g: Builder) -> Call:
    x, size, shape = _adaptive(g)
    return Call((x, size), (Out(shape), Out(shape, "int64", keep=False)))


def _fractional(rank: int) -> Build:
    def build(g: Builder) -> Call:
        x = _image(g, rank, 5, 7)
        kernel, size = [g.int(1, 2)] * rank, [g.int(1, 3) for _ in range(rank)]
        batch = x.shape[0] if x.rank == rank + 2 else 1
        # With the samples given: those that torch draws itself differ from run to run.
        samples = g.tensor((batch, x.shape[-rank - 1], rank), domain="unit", grad=False)
        shape = (*x.shape[:-rank], *size)
        return Call((x, kernel, size, samples), (Out(shape), Out(shape, "int64", keep=False)))

    return build


for _rank in (2, 3):
    _name = f"fractional_max_pool{_rank}d"
    op(
        _name,
        f"aten::{_name}",
        function=f"{_F}.{_name}_with_indices({{0}}, {{1}}, {{2}}, None, True, {{3}})",
        overload=_name,
        mixed="raises",
    )(_fractional(_rank))


def _unpool(rank: int) -> Build:
    def build(g: Builder) -> Call:
        x = _image(g, rank, 2, 5)
        return Call((x, [g.int(1, 2)] * rank, list(x.shape[-rank:])), out(x.shape))

    return build


# Indices come from a pooling whose windows do not overlap: two values for one place have no order.
for _rank in (1, 2, 3):
    _name = f"max_unpool{_rank}d"
    _pooled = f"*{_F}.max_pool{_rank}d({{0}}, {{1}}, return_indices=True)"
    _rest = ", {1}, [0, 0, 0]" if _rank == 3 else ""
    op(
        _name,
        f"aten::{_name}" if _rank > 1 else "aten::max_unpool2d",
        function=f"{_F}.{_name}({_pooled}, {{1}}, output_size={{2}})",
        overload=f"torch.ops.aten.{_name}({_pooled}, {{2}}{_rest})" if _rank > 1 else None,
    )(_unpool(_rank))


# -- padding --------------------------------------------------------------------------------------


def _pad(rank: int, kind: str) -> Build:
    def build(g: Builder) -> Call:
        low, high = g.int(0, 2), g.int(0, 2)
        # A reflection must be smaller than what it reflects. Other dimensions have the two swapped.
        x = _image(g, rank, 3 if kind == "reflection" else 1, 5)
        pads = [[low, high], [high, low], [low, low]][:rank]
        sizes = (n + sum(p) for n, p in zip(reversed(x.shape), pads, strict=False))
        shape = (*x.shape[:-rank], *reversed(list(sizes)))
        return Call((x, [n for pair in pads for n in pair]), out(shape))

    return build


for _kind, _mode in (("reflection", "reflect"), ("replication", "replicate")):
    for _rank in (1, 2, 3):
        _name = f"{_kind}_pad{_rank}d"
        # reflection_pad3d, the youngest, is in no table.
        op(
            _name,
            *((f"aten::{_name}",) if _name != "reflection_pad3d" else ()),
            function=f"{_F}.pad({{args}}, mode='{_mode}')",
            module=f"torch.nn.{_kind.capitalize()}Pad{_rank}d({{1}})({{0}})",
            out=f"torch._C._nn.{_name}",
        )(_pad(_rank, _kind))
