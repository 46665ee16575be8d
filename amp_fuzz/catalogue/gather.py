"""Reads and writes by index that no autocast table lists, embeddings among them.

Where two writes may meet in one element the order decides, so a scattered source gets an index
without repeats: the stable argsort of drawn integers, a permutation along the dimension. In-place
forms clone the source, which may be the written tensor itself or a view of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from amp_fuzz.cases.program import Ref, Statement
from amp_fuzz.catalogue.arithmetic import torch_forms
from amp_fuzz.catalogue.core import Builder, Call, Shape, Value, op, out

_F = "torch.nn.functional"


def _sized(shape: Shape, dim: int, size: int) -> Shape:
    """Return `shape` with another size at `dim`."""
    dim %= max(len(shape), 1)
    return (*shape[:dim], size, *shape[dim + 1 :])


_SHAPES: tuple[Shape, ...] = ((3,), (), (2, 2), (17,))


def _index(g: Builder, shape: Shape, bound: int) -> Value:
    return g.tensor(shape, kind="index", bound=bound)


# -- reads ------------------------------------------------------------------------------------


@op("index_select", **torch_forms("index_select", "fmo"))
def _index_select(g: Builder) -> Call:
    x = g.tensor(rank=(1, 3), kind="real")
    dim, n = g.dimension(x.rank), g.dim()
    index = _index(g, (n,), x.shape[dim])
    return Call((x, dim, index), out(_sized(x.shape, dim, n), dtype=x.dtype))


@op("gather", **torch_forms("gather", "fmo"))
def _gather(g: Builder) -> Call:
    x = g.tensor(rank=(1, 3), kind="real")
    dim = g.dimension(x.rank)
    shape = _sized(x.shape, dim, g.dim())
    return Call((x, dim, _index(g, shape, x.shape[dim])), out(shape, dtype=x.dtype))


@op("take_along_dim", **torch_forms("take_along_dim", "fmo"))
def _take_along_dim(g: Builder) -> Call:
    x = g.tensor(rank=(1, 3), kind="real")
    dim = g.dimension(x.rank)
    shape = _sized(x.shape, dim, g.dim())
    return Call((x, _index(g, shape, x.shape[dim]), dim), out(shape, dtype=x.dtype))


@op("take", **torch_forms("take", "fmo"))
def _take(g: Builder) -> Call:
    x = g.tensor(kind="real")
    count = 1
    for size in x.shape:
        count *= size
    shape = g.choice(_SHAPES)
    return Call((x, _index(g, shape, count)), out(shape, dtype=x.dtype))


def _selects(call: Statement, shapes: Mapping[str, Shape]) -> bool:
    """Return whether the index has no dimension: it is a number, and what it selects is a view."""
    index = call.args[-1]
    return not (isinstance(index, Ref) and shapes.get(index.name, ()))


@op("getitem.tensor", operator="{0}[{1}]", cpu_tensors=(1,), view_if=_selects)
def _getitem_tensor(g: Builder) -> Call:
    x = g.tensor(rank=(1, 3), kind="real")
    index = _index(g, g.choice(_SHAPES), x.shape[0])
    made = out((*index.shape, *x.shape[1:]), dtype=x.dtype)
    return Call((x, index), made)


@op("getitem.last", operator="{0}[..., {1}]", cpu_tensors=(1,), view_if=_selects)
def _getitem_last(g: Builder) -> Call:
    x = g.tensor(rank=(1, 3), kind="real")
    index = _index(g, g.choice(_SHAPES), x.shape[-1])
    made = out((*x.shape[:-1], *index.shape), dtype=x.dtype)
    return Call((x, index), made)


@op("repeat_interleave", **torch_forms("repeat_interleave", "fm"))
def _repeat_interleave(g: Builder) -> Call:
    x = g.tensor(rank=(1, 3), kind="real")
    repeats, dim = g.choice((2, 1, 3)), g.dimension(x.rank)
    shape = _sized(x.shape, dim, repeats * x.shape[dim])
    return Call((x, repeats, dim), out(shape, dtype=x.dtype))


# -- writes -----------------------------------------------------------------------------------


def _permutation(g: Builder, shape: Shape) -> Value:
    return _index(g, shape, 1 << 16)


@op(
    "scatter",
    function="torch.scatter({0}, {1}, {2}.argsort(dim={1}, stable=True), {3})",
    method="{0}.scatter({1}, {2}.argsort(dim={1}, stable=True), {3})",
    inplace="{0}.scatter_({1}, {2}.argsort(dim={1}, stable=True), {3}.clone())",
    out="torch.scatter({0}, {1}, {2}.argsort(dim={1}, stable=True), {3}, out={out})",
    mixed="raises",
)
def _scatter(g: Builder) -> Call:
    x = g.receiver(rank=(1, 3))
    dim, source = g.dimension(x.rank), g.tensor(x.shape)
    return Call((x, dim, _permutation(g, x.shape), source), out(x.shape, dtype=x.dtype))


@op("scatter.value", **torch_forms("scatter"))
def _scatter_value(g: Builder) -> Call:
    x = g.receiver(rank=(1, 3))
    dim = g.dimension(x.rank)
    index = _index(g, _sized(x.shape, dim, g.dim()), x.shape[dim])
    return Call((x, dim, index, g.scalar()), out(x.shape, dtype=x.dtype))


@op(
    "scatter_reduce",
    **torch_forms("scatter_reduce", "fmo"),
    inplace="{0}.scatter_reduce_({1}, {2}, {3}.clone(), {args4})",
    mixed="raises",
)
def _scatter_reduce(g: Builder) -> Call:
    x = g.receiver(rank=(1, 3))
    dim = g.dimension(x.rank)
    shape = _sized(x.shape, dim, g.dim())
    index = _index(g, shape, x.shape[dim])
    reduce = g.choice(("amax", "amin", "sum", "mean"))
    options = g.options(include_self=(True, False))
    return Call((x, dim, index, g.tensor(shape), reduce), out(x.shape, dtype=x.dtype), options)


@op(
    "index_add",
    **torch_forms("index_add", "fmo"),
    inplace="{0}.index_add_({1}, {2}, {3}.clone(), {args4})",
    mixed="raises",
)
def _index_add(g: Builder) -> Call:
    x = g.receiver(rank=(1, 3))
    dim, n = g.dimension(x.rank), g.dim()
    index, source = _index(g, (n,), x.shape[dim]), g.tensor(_sized(x.shape, dim, n))
    return Call((x, dim, index, source), out(x.shape, dtype=x.dtype), g.options(alpha=(1, 2, 0.5)))


@op("index_fill", **torch_forms("index_fill", "fmi"))
def _index_fill(g: Builder) -> Call:
    x = g.receiver(rank=(1, 3))
    dim = g.dimension(x.rank)
    index = _index(g, (g.dim(),), x.shape[dim])
    return Call((x, dim, index, g.scalar()), out(x.shape, dtype=x.dtype))


@op(
    "masked_scatter",
    **torch_forms("masked_scatter", "fm"),
    inplace="{0}.masked_scatter_({1}, {2}.clone())",
    mixed="raises",
)
def _masked_scatter(g: Builder) -> Call:
    x = g.receiver()
    mask, source = g.broadcastable(x.shape, kind="bool"), g.tensor(x.shape)
    return Call((x, mask, source), out(x.shape, dtype=x.dtype))


@op("select_scatter", **torch_forms("select_scatter", "fm"))
def _select_scatter(g: Builder) -> Call:
    x = g.tensor(rank=(1, 3))
    dim = g.dimension(x.rank) % x.rank
    source = g.tensor((*x.shape[:dim], *x.shape[dim + 1 :]))
    return Call((x, source, dim, g.int(-1, x.shape[dim] - 1)), out(x.shape, dtype=x.dtype))


@op("slice_scatter", **torch_forms("slice_scatter", "fm"))
def _slice_scatter(g: Builder) -> Call:
    x = g.tensor(rank=(1, 3))
    dim = g.dimension(x.rank)
    start = g.int(0, x.shape[dim] - 1)
    source = g.tensor(_sized(x.shape, dim, x.shape[dim] - start))
    return Call((x, source, dim, start), out(x.shape, dtype=x.dtype))


# -- embeddings -------------------------------------------------------------------------------


# The weight comes first, so that it decides the dtype.
@op("embedding", function=f"{_F}.embedding({{1}}, {{0}}, {{args2}})")
def _embedding(g: Builder) -> Call:
    weight = g.tensor(rank=2, weight=True)
    index = _index(g, g.choice(_SHAPES), weight.shape[0])
    options = g.options(padding_idx=(None, 0), scale_grad_by_freq=(False, True))
    return Call((weight, index), out((*index.shape, weight.shape[1]), dtype=weight.dtype), options)


def _bag(g: Builder) -> tuple[Value, Value, Shape]:
    weight = g.tensor(rank=2, weight=True)
    index = _index(g, (g.int(1, 4), g.dim()), weight.shape[0])
    return weight, index, (index.shape[0], weight.shape[1])


@op("embedding_bag", function=f"{_F}.embedding_bag({{1}}, {{0}}, {{args2}})")
def _embedding_bag(g: Builder) -> Call:
    weight, index, shape = _bag(g)
    options: dict[str, Any] = {"mode": g.choice(("mean", "sum", "max"))}
    return Call((weight, index), out(shape, dtype=weight.dtype), options)


@op(
    "embedding_bag.weights",
    function=f"{_F}.embedding_bag({{1}}, {{0}}, mode='sum', per_sample_weights={{2}})",
    mixed="raises",
)
def _embedding_bag_weights(g: Builder) -> Call:
    weight, index, shape = _bag(g)
    return Call((weight, index, g.tensor(index.shape)), out(shape, dtype=weight.dtype))


@op("one_hot", function=f"{_F}.one_hot")
def _one_hot(g: Builder) -> Call:
    classes = g.int(1, 5)
    index = _index(g, g.choice(_SHAPES), classes)
    return Call((index, classes), out((*index.shape, classes), dtype="int64"))
