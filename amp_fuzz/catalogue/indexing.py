"""Joining tensors, and writing one into another: ops that autocast promotes."""

from __future__ import annotations

from amp_fuzz.catalogue.arithmetic import torch_forms
from amp_fuzz.catalogue.core import Builder, Call, Kind, Shape, Value, op, out

# -- joining --------------------------------------------------------------------------------------


def _at(shape: Shape, dim: int, size: int) -> Shape:
    """Return `shape` with another size at `dim`."""
    return tuple(size if i == dim % len(shape) else s for i, s in enumerate(shape))


def _parts(g: Builder, shape: Shape, dim: int | None) -> list[Value]:
    """Draw one to three tensors of `shape`, but for their sizes at `dim`."""
    kinds: tuple[Kind, ...] = g.choice((("float",) * 2, ("float",), ("float", "real", "float")))
    parts = [g.tensor(shape, kind=kinds[0])]
    for kind in kinds[1:]:
        if dim is not None and g.flag():
            shape = _at(shape, dim, g.dim())
        parts.append(g.tensor(shape, kind=kind))
    return parts


def _joined(parts: list[Value], dim: int) -> Shape:
    return _at(parts[0].shape, dim, sum(p.shape[dim] for p in parts))


@op("cat", "aten::cat", **torch_forms("cat", "fo"))
@op("concat", "aten::cat", **torch_forms("concat", "fo", module="torch.concatenate"))
def _cat(g: Builder) -> Call:
    shape = g.shape(1, 3)
    dim = g.dimension(len(shape))
    parts = _parts(g, shape, dim)
    # An old exception: an empty vector joins anything.
    empty = [g.tensor((0,))] if g.int(0, 11) == 11 else []
    return Call(([*parts, *empty], dim), out(_joined(parts, dim)))


@op("stack", "aten::stack", **torch_forms("stack", "fo"))
def _stack(g: Builder) -> Call:
    parts = _parts(g, g.shape(0, 3), None)
    shape = parts[0].shape
    dim = g.dimension(len(shape) + 1)
    at = dim % (len(shape) + 1)
    return Call((parts, dim), out((*shape[:at], len(parts), *shape[at:])))


def _along(name: str, rank: int, dim: int) -> None:
    """Register a composite over cat that first makes every tensor `rank`-dimensional, at least."""

    def widened(shape: Shape) -> Shape:
        if name == "column_stack":
            return shape if len(shape) > 1 else (*shape, *(1,) * (2 - len(shape)))
        if rank == 3:  # atleast_3d puts a vector in the middle
            return {0: (1, 1, 1), 1: (1, *shape, 1), 2: (*shape, 1)}.get(len(shape), shape)
        return (1,) * (rank - len(shape)) + shape

    def build(g: Builder) -> Call:
        shape = g.shape(0, 3)
        wide = widened(shape)
        at = dim if len(wide) > dim else 0  # hstack joins vectors along dim 0
        # Where the dimension is one that widening made, all have one size.
        parts = _parts(g, shape, at if wide == shape and shape else None)
        total = sum(widened(p.shape)[at] for p in parts)
        return Call((parts,), out(_at(wide, at, total)))

    op(name, "aten::cat", **torch_forms(name, "fo"))(build)


for _name, _rank, _dim in (
    ("hstack", 1, 1),
    ("vstack", 2, 0),
    ("row_stack", 2, 0),
    ("dstack", 3, 2),
    ("column_stack", 2, 1),
):
    _along(_name, _rank, _dim)


@op("cartesian_prod", "aten::stack", function="torch.cartesian_prod", mixed="raises")
def _cartesian_prod(g: Builder) -> Call:
    a, b = g.tensor(rank=1), g.tensor(rank=1)
    return Call((a, b), out((a.shape[0] * b.shape[0], 2)))


@op("gradient", "aten::cat", function="torch.gradient", unpacks=True)
def _gradient(g: Builder) -> Call:
    shape = (g.int(2, 6), *g.shape(0, 2, empty=False))
    return Call((g.tensor(shape),), out(shape), {"dim": 0} | g.options(spacing=(1, 0.5)))


# -- writing --------------------------------------------------------------------------------------

# Values written to one place, or added to it, come in no order. Where an op must agree with itself,
# argsort turns the drawn index into a permutation; indices with duplicates are left to the CPU.


def _source(g: Builder, shape: Shape, *, grad: bool = True) -> Value:
    """Draw what is written; in-place a fresh input, as a tensor may not be written to itself."""
    return g.tensor(shape, domain="normal" if g.form == "inplace" else None, grad=grad)


@op(
    "index_copy",
    "aten::index_copy",
    function="torch.index_copy({0}, {1}, {2}.argsort(stable=True), {3})",
    method="{0}.index_copy({1}, {2}.argsort(stable=True), {3})",
    inplace="{0}.index_copy_({1}, {2}.argsort(stable=True), {3})",
    out="torch.index_copy({0}, {1}, {2}.argsort(stable=True), {3}, out={out})",
    mixed="raises",
)
def _index_copy(g: Builder) -> Call:
    x = g.receiver(rank=(1, 3))
    dim = g.dimension(x.rank)
    n = g.int(1, x.shape[dim])
    index = g.tensor((n,), kind="index", bound=n)
    return Call((x, dim, index, _source(g, _at(x.shape, dim, n))), out(x.shape))


@op(
    "index_put",
    "aten::index_put",
    function="torch.index_put({0}, [{1}.argsort(stable=True)], {2}, {3})",
    method="{0}.index_put([{1}.argsort(stable=True)], {2}, {3})",
    inplace="{0}.index_put_([{1}.argsort(stable=True)], {2}, {3})",
    mixed="raises",
    cpu_scalars=(2,),
    cpu_tensors=(1,),
)
def _index_put(g: Builder) -> Call:
    x = g.receiver(rank=(1, 3))
    n = g.int(1, x.shape[0])
    index = g.tensor((n,), kind="index", bound=n)
    shape = g.choice(((n, *x.shape[1:]), x.shape[1:], (n, *(1,) * (x.rank - 1))))
    return Call((x, index, _source(g, shape), g.flag()), out(x.shape))


@op(
    "index_put.pairs",
    "aten::index_put",
    function="torch.index_put({0}, [{1}.argsort(stable=True), {2}], {3})",
    method="{0}.index_put([{1}.argsort(stable=True), {2}], {3})",
    inplace="{0}.index_put_([{1}.argsort(stable=True), {2}], {3})",
    mixed="raises",
    cpu_scalars=(3,),
    cpu_tensors=(1, 2),
)
def _index_put_pairs(g: Builder) -> Call:
    x = g.receiver(rank=(2, 3))
    n = g.int(1, x.shape[0])
    rows = g.tensor((n,), kind="index", bound=n)
    columns = g.tensor((n,), kind="index", bound=x.shape[1])
    shape = g.choice(((n, *x.shape[2:]), x.shape[2:]))
    return Call((x, rows, columns, _source(g, shape)), out(x.shape))


@op("index_put.mask", "aten::index_put", **torch_forms("index_put", "fmi"), mixed="raises")
def _index_put_mask(g: Builder) -> Call:
    x = g.receiver(rank=(1, 3))
    mask = g.tensor(x.shape[: g.int(1, x.rank)], kind="bool")
    return Call((x, [mask], _source(g, ())), out(x.shape))


@op(
    "index_put.accumulate",
    "aten::index_put",
    **torch_forms("index_put", "fmi"),
    mixed="raises",
    devices=("cpu",),
)
def _index_put_accumulate(g: Builder) -> Call:
    x = g.receiver(rank=(1, 3))
    n = g.dim()
    index = g.tensor((n,), kind="index", bound=x.shape[0])
    values = _source(g, (n, *x.shape[1:]))
    return Call((x, [index], values), out(x.shape), {"accumulate": True})


def _scattered(g: Builder, *, unique: bool) -> Call:
    x = g.receiver(rank=(1, 3))
    dim = g.dimension(x.rank)
    size = g.int(1, x.shape[dim]) if unique else g.dim()
    shape = _at(x.shape, dim, size)
    index = g.tensor(shape, kind="index", bound=x.shape[dim])
    # The source may be larger than the index, which then names a corner of it: without a gradient,
    # for that is defined for equal shapes only.
    larger = g.flag()
    source = _source(g, _at(shape, dim, size + larger), grad=not larger)
    return Call((x, dim, index, source), out(x.shape))


@op(
    "scatter_add",
    "aten::scatter_add",
    function="torch.scatter_add({0}, {1}, {2}.argsort(dim={1}, stable=True), {3})",
    method="{0}.scatter_add({1}, {2}.argsort(dim={1}, stable=True), {3})",
    inplace="{0}.scatter_add_({1}, {2}.argsort(dim={1}, stable=True), {3})",
    out="torch.scatter_add({0}, {1}, {2}.argsort(dim={1}, stable=True), {3}, out={out})",
    mixed="raises",
)
def _scatter_add(g: Builder) -> Call:
    return _scattered(g, unique=True)


@op(
    "scatter_add.duplicates",
    "aten::scatter_add",
    **torch_forms("scatter_add"),
    mixed="raises",
    devices=("cpu",),
)
def _scatter_add_duplicates(g: Builder) -> Call:
    return _scattered(g, unique=False)
