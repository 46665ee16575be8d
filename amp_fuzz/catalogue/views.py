"""Views and rearrangements: they move no bits, and decide what a later op aliases or caches.

Autocast's weight cache holds only tensors that are no views, and an in-place write reaches every
alias, so views around a cast are where both go wrong.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

from amp_fuzz.catalogue.arithmetic import torch_forms
from amp_fuzz.catalogue.core import Builder, Call, Kind, Out, Shape, Value, op, out


def _tensor(g: Builder, rank: int | tuple[int, int] | None = None) -> Value:
    kind: Kind = g.choice(("float", "float", "real", "any"))
    return g.tensor(rank=rank, kind=kind)


def _result(x: Value, shape: Shape, *args: Any, **kwargs: Any) -> Call:
    return Call((x, *args), out(shape, dtype=x.dtype), kwargs)


# -- shapes -----------------------------------------------------------------------------------


def _reshaped(shape: Shape) -> list[tuple[list[int], Shape]]:
    """Return ways to write a new shape, with that shape: some leave a size to torch as -1."""
    n = prod(shape)
    ways: list[tuple[list[int], Shape]] = [([-1], (n,)), (list(shape), shape)]
    ways += [([1, *shape], (1, *shape)), ([*shape, 1], (*shape, 1))]
    if len(shape) > 1:
        ways.append(([-1, shape[-1]], (prod(shape[:-1]), shape[-1])))
        ways.append(([*shape[::-1]], shape[::-1]))
    if n % 2 == 0:
        ways.append(([2, -1], (2, n // 2)))
    return ways


@op("reshape", **torch_forms("reshape", "fm"), view=True)
def _reshape(g: Builder) -> Call:
    x = _tensor(g)
    sizes, shape = g.choice(_reshaped(x.shape))
    return _result(x, shape, sizes)


# A tensor of any strides has these views; the other reshapings need a contiguous one.
@op("view", method="view", module="{0}.contiguous().view({args1})", view=True)
def _view(g: Builder) -> Call:
    x = _tensor(g)
    ways = _reshaped(x.shape)
    sizes, shape = g.choice(ways if g.form == "module" else ways[1:4])
    return _result(x, shape, sizes)


@op("flatten", **torch_forms("flatten", "fm"), view=True)
def _flatten(g: Builder) -> Call:
    x = _tensor(g)
    if x.rank < 2:
        return _result(x, (prod(x.shape),))
    start = g.int(0, x.rank - 2)
    end = g.int(start + 1, x.rank - 1)
    merged = prod(x.shape[start : end + 1])
    return _result(x, (*x.shape[:start], merged, *x.shape[end + 1 :]), start, end)


@op("unflatten", **torch_forms("unflatten", "fm"), view=True)
def _unflatten(g: Builder) -> Call:
    x = _tensor(g, (1, 3))
    dim = g.dimension(x.rank) % x.rank
    sizes = g.choice([(1, x.shape[dim]), (x.shape[dim], 1)])
    return _result(x, (*x.shape[:dim], *sizes, *x.shape[dim + 1 :]), dim, list(sizes))


@op("squeeze", **torch_forms("squeeze", "fm"), view=True)
def _squeeze(g: Builder) -> Call:
    x = _tensor(g)
    return _result(x, tuple(s for s in x.shape if s != 1))


@op("squeeze.dim", **torch_forms("squeeze", "fm"), view=True)
def _squeeze_dim(g: Builder) -> Call:
    x = _tensor(g, (1, 3))
    dim = g.dimension(x.rank) % x.rank
    shape = x.shape if x.shape[dim] != 1 else (*x.shape[:dim], *x.shape[dim + 1 :])
    return _result(x, shape, dim)


@op("unsqueeze", **torch_forms("unsqueeze", "fm"), view=True)
def _unsqueeze(g: Builder) -> Call:
    x = _tensor(g)
    dim = g.dimension(x.rank + 1)
    at = dim % (x.rank + 1)
    return _result(x, (*x.shape[:at], 1, *x.shape[at:]), dim)


# -- order of dimensions ----------------------------------------------------------------------


def _order(g: Builder, rank: int) -> list[int]:
    """Draw a permutation other than the identity where there is one."""
    order = list(range(rank))
    return g.choice([order[::-1], order[1:] + order[:1], order[-1:] + order[:-1]]) if rank else []


@op("permute", **torch_forms("permute", "fm"), view=True)
def _permute(g: Builder) -> Call:
    x = _tensor(g)
    order = _order(g, x.rank)
    return _result(x, tuple(x.shape[i] for i in order), order)


def _transposed(g: Builder) -> Call:
    x = _tensor(g, (1, 4))
    a, b = g.dimension(x.rank), g.dimension(x.rank)
    shape = list(x.shape)
    shape[a], shape[b] = shape[b], shape[a]
    return _result(x, tuple(shape), a, b)


op("transpose", **torch_forms("transpose", "fm"), view=True)(_transposed)
op("swapaxes", **torch_forms("swapaxes", "fm"), view=True)(_transposed)


@op("movedim", **torch_forms("movedim", "fm"), view=True)
def _movedim(g: Builder) -> Call:
    x = _tensor(g, (1, 4))
    source, to = g.dimension(x.rank), g.dimension(x.rank)
    shape = list(x.shape)
    shape.insert(to % x.rank, shape.pop(source))
    return _result(x, tuple(shape), source, to)


@op("t", **torch_forms("t", "fm"), operator="{0}.T", view=True)
def _t(g: Builder) -> Call:
    x = _tensor(g, 2)
    return _result(x, x.shape[::-1])


@op("mT", method="{0}.mT", function="torch.adjoint", view=True)
def _matrix_transposed(g: Builder) -> Call:
    x = g.tensor(rank=(2, 4))
    return _result(x, (*x.shape[:-2], x.shape[-1], x.shape[-2]))


# -- parts ------------------------------------------------------------------------------------


@op("narrow", **torch_forms("narrow", "fm"), view=True)
def _narrow(g: Builder) -> Call:
    x = _tensor(g, (1, 3))
    dim = g.dimension(x.rank)
    shape = list(x.shape)
    start = g.int(0, shape[dim] - 1)
    shape[dim] = g.int(1, shape[dim] - start)
    return _result(x, tuple(shape), dim, start, shape[dim])


@op("select", **torch_forms("select", "fm"), view=True)
def _select(g: Builder) -> Call:
    x = _tensor(g, (1, 3))
    dim = g.dimension(x.rank) % x.rank
    index = g.int(-1, x.shape[dim] - 1)
    return _result(x, (*x.shape[:dim], *x.shape[dim + 1 :]), dim, index)


# An index that is no tensor makes views: `x[i]`, `x[..., i:j:k]`, `x[:, None]`.
@op("getitem.int", operator="{0}[{1}]", view=True)
def _getitem_int(g: Builder) -> Call:
    x = _tensor(g, (1, 3))
    return _result(x, x.shape[1:], g.int(-1, x.shape[0] - 1))


@op("getitem.slice", operator="{0}[{1}:{2}:{3}]", view=True)
def _getitem_slice(g: Builder) -> Call:
    x = _tensor(g, (1, 3))
    return _sliced(g, x, 0)


@op("getitem.ellipsis", operator="{0}[..., {1}:{2}:{3}]", view=True)
def _getitem_ellipsis(g: Builder) -> Call:
    x = _tensor(g, (1, 3))
    return _sliced(g, x, x.rank - 1)


def _sliced(g: Builder, x: Value, dim: int) -> Call:
    size = x.shape[dim]
    start, step = g.int(0, size - 1), g.choice((1, 2))
    stop = g.choice((size, -1, 100))
    length = len(range(size)[start:stop:step])
    return _result(x, (*x.shape[:dim], length, *x.shape[dim + 1 :]), start, stop, step)


@op("getitem.none", operator="{0}[:, None]", view=True)
def _getitem_none(g: Builder) -> Call:
    x = _tensor(g, (1, 3))
    return _result(x, (x.shape[0], 1, *x.shape[1:]))


@op("diagonal", **torch_forms("diagonal", "fm"), view=True)
def _diagonal(g: Builder) -> Call:
    x = _tensor(g, (2, 3))
    a, b = g.choice([(0, 1), (1, 0), (-2, -1), (-1, 0)])
    a, b = a % x.rank, b % x.rank
    offset = g.choice((0, 1, -1))
    rows, columns = x.shape[a] + min(offset, 0), x.shape[b] - max(offset, 0)
    kept = tuple(s for i, s in enumerate(x.shape) if i not in (a, b))
    return _result(x, (*kept, max(min(rows, columns), 0)), offset, a, b)


# -- several views ----------------------------------------------------------------------------

_KEPT = 4


def _pieces(x: Value, dim: int, sizes: list[int], *args: Any) -> Call:
    """Return a call with a view for each size along `dim`; programs use the first few."""
    dim %= x.rank
    outputs = tuple(
        Out((*x.shape[:dim], size, *x.shape[dim + 1 :]), x.dtype, keep=i < _KEPT)
        for i, size in enumerate(sizes)
    )
    return Call((x, *args), outputs)


def _steps(size: int, step: int) -> list[int]:
    return [min(step, size - i) for i in range(0, size, step)]


@op("chunk", **torch_forms("chunk", "fm"), view=True, unpacks=True, read_only=True)
def _chunk(g: Builder) -> Call:
    x = _tensor(g, (1, 3))
    dim, chunks = g.dimension(x.rank), g.choice((2, 1, 3))
    return _pieces(x, dim, _steps(x.shape[dim], -(-x.shape[dim] // chunks)), chunks, dim)


@op("split", **torch_forms("split", "fm"), view=True, unpacks=True, read_only=True)
def _split(g: Builder) -> Call:
    x = _tensor(g, (1, 3))
    dim = g.dimension(x.rank)
    size = g.int(-(-x.shape[dim] // 4), x.shape[dim])
    return _pieces(x, dim, _steps(x.shape[dim], size), size, dim)


def _two_sizes(g: Builder) -> Call:
    x = _tensor(g, (1, 3))
    dim = g.dimension(x.rank)
    first = g.int(0, x.shape[dim])
    sizes = [first, x.shape[dim] - first]
    return _pieces(x, dim, sizes, sizes, dim)


op("split.sizes", **torch_forms("split", "fm"), view=True, unpacks=True, read_only=True)(_two_sizes)
op(
    "split_with_sizes",
    **torch_forms("split_with_sizes", "fm"),
    view=True,
    unpacks=True,
    read_only=True,
)(_two_sizes)


@op("tensor_split", **torch_forms("tensor_split", "fm"), view=True, unpacks=True, read_only=True)
def _tensor_split(g: Builder) -> Call:
    x = _tensor(g, (1, 3))
    dim, n = g.dimension(x.rank), g.choice((2, 3))
    least, larger = divmod(x.shape[dim], n)
    return _pieces(x, dim, [least + (i < larger) for i in range(n)], n, dim)


@op("unbind", **torch_forms("unbind", "fm"), view=True, unpacks=True, read_only=True)
def _unbind(g: Builder) -> Call:
    x = _tensor(g, (1, 3))
    dim = g.dimension(x.rank)
    at = dim % x.rank
    shape = (*x.shape[:at], *x.shape[at + 1 :])
    outputs = tuple(Out(shape, x.dtype, keep=i < _KEPT) for i in range(x.shape[at]))
    return Call((x, dim), outputs)


# -- shared elements --------------------------------------------------------------------------


def _expanded(g: Builder) -> Call:
    shape = g.shape(1, 3)
    x = g.broadcastable(shape, kind="real")
    return _result(x, shape, list(shape))


op("expand", method="expand", view=True, read_only=True)(_expanded)
op("broadcast_to", **torch_forms("broadcast_to", "fm"), view=True, read_only=True)(_expanded)


@op("expand_as", method="expand_as", view=True, read_only=True)
def _expand_as(g: Builder) -> Call:
    other = g.tensor()
    return _result(g.broadcastable(other.shape, kind="real"), other.shape, other)


@op("unfold", method="unfold", view=True, read_only=True)
def _unfold(g: Builder) -> Call:
    x = _tensor(g, (1, 3))
    dim = g.dimension(x.rank)
    shape = list(x.shape)
    size, step = g.int(1, shape[dim]), g.choice((1, 2))
    shape[dim] = (shape[dim] - size) // step + 1
    return _result(x, (*shape, size), dim, size, step)


# -- copies -----------------------------------------------------------------------------------


@op("contiguous", method="contiguous", view=True)
def _contiguous(g: Builder) -> Call:
    x = _tensor(g)
    return _result(x, x.shape)


@op(
    "contiguous.channels_last",
    method="{0}.contiguous(memory_format=torch.channels_last)",
    view=True,
)
def _channels_last(g: Builder) -> Call:
    x = g.tensor(rank=4)
    return _result(x, x.shape)


@op("clone", **torch_forms("clone", "fm"))
def _clone(g: Builder) -> Call:
    x = _tensor(g)
    return _result(x, x.shape)


@op("detach", **torch_forms("detach", "fm"), view=True)
def _detach(g: Builder) -> Call:
    x = _tensor(g)
    return _result(replace(x, requires_grad=False), x.shape)


@op("flip", **torch_forms("flip", "fm"))
def _flip(g: Builder) -> Call:
    x = _tensor(g, (1, 3))
    dims = [g.dimension(x.rank)] if g.flag() else list(range(x.rank))
    return _result(x, x.shape, dims)


# The CPU kernel of roll concatenates, under autocast's rule for cat; that of repeat does so with
# indices, which autocast leaves alone.
@op("roll", "aten::cat", **torch_forms("roll", "fm"))
def _roll(g: Builder) -> Call:
    x = _tensor(g, (1, 3))
    return _result(x, x.shape, g.int(-2, 3), g.dimension(x.rank))


@op("rot90", **torch_forms("rot90", "fm"))
def _rot90(g: Builder) -> Call:
    x = _tensor(g, (2, 3))
    k = g.choice((1, 2, 3))
    shape = (x.shape[1], x.shape[0], *x.shape[2:]) if k % 2 else x.shape
    return _result(x, shape, k, [0, 1])


def _repeated(g: Builder) -> Call:
    x = _tensor(g, (0, 2))
    repeats = [g.choice((1, 2, 3)) for _ in range(x.rank + g.int(0, 1))]
    sizes = (1,) * (len(repeats) - x.rank) + x.shape
    return _result(x, tuple(r * s for r, s in zip(repeats, sizes, strict=True)), repeats)


op("repeat", "aten::cat", method="repeat")(_repeated)
op("tile", "aten::cat", **torch_forms("tile", "fm"), view=True)(_repeated)


def _triangle(g: Builder) -> Call:
    x = g.receiver(rank=(2, 3))
    return _result(x, x.shape, g.choice((0, 1, -1)))


op("tril", **torch_forms("tril"))(_triangle)
op("triu", **torch_forms("triu"))(_triangle)


@op("diag_embed", **torch_forms("diag_embed", "fm"))
def _diag_embed(g: Builder) -> Call:
    x = _tensor(g, (1, 2))
    offset = g.choice((0, 1, -1))
    n = x.shape[-1] + abs(offset)
    return _result(x, (*x.shape[:-1], n, n), offset)
