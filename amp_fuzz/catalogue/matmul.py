"""Matrix and vector products: what autocast exists for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from amp_fuzz.cases.program import Statement
from amp_fuzz.catalogue.core import Builder, Call, Shape, Value, op, out


def _matrix(g: Builder) -> Value:
    return g.tensor(rank=2, empty=True)


def _scales(g: Builder) -> Mapping[str, Any]:
    return g.options(beta=(1, 0.5, 0), alpha=(1, 2.0, -1))


def _added(g: Builder, shape: tuple[int, ...]) -> Value:
    """Draw what a product of that shape is added to."""
    if g.form == "inplace":
        return g.receiver(shape)
    return g.tensor(g.choice([shape, shape[-1:], (*shape[:-1], 1), ()]))


@op("mm", "aten::mm", function="torch.mm", method="mm", out="torch.mm", mixed="raises")
def _mm(g: Builder) -> Call:
    a = _matrix(g)
    b = g.tensor((a.shape[1], g.dim()), weight=True)
    return Call((a, b), out((a.shape[0], b.shape[1])))


@op("bmm", "aten::bmm", function="torch.bmm", method="bmm", out="torch.bmm", mixed="raises")
def _bmm(g: Builder) -> Call:
    a = g.tensor(rank=3, empty=True)
    n, m, k = a.shape
    b = g.tensor((n, k, g.dim()))
    return Call((a, b), out((n, m, b.shape[2])))


@op(
    "matmul",
    "aten::matmul",
    function="torch.matmul",
    method="matmul",
    operator="{0} @ {1}",
    out="torch.matmul",
    mixed="raises",
)
def _matmul(g: Builder) -> Call:
    # With a vector on the left, `out` is resized and back, with a warning.
    a = g.tensor(rank=(2 if g.form == "out" else 1, 4), empty=True)
    k, n = a.shape[-1], g.dim()
    batch = a.shape[:-2]
    wider = (2, 1) if len(batch) < 2 else (batch[0], 1)
    lead = g.choice([(), None, batch, (1,) * len(batch), wider])
    right = (k,) if lead is None else (*lead, k, n)
    b = g.tensor(right, weight=True)
    rows, columns = a.shape[-2:-1], right[len(lead or ()) + 1 :]
    return Call((a, b), out((*_broadcast(batch, lead or ()), *rows, *columns)))


def _broadcast(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    rank = max(len(a), len(b))
    a, b = (1,) * (rank - len(a)) + a, (1,) * (rank - len(b)) + b
    return tuple(y if x == 1 else x for x, y in zip(a, b, strict=True))


@op(
    "linear",
    "aten::linear",
    function="torch.nn.functional.linear",
    out="torch._C._nn.linear",
    module="torch.func.functional_call(torch.nn.Linear({1}.shape[1], {1}.shape[0], device='meta'), "
    "dict(weight={1}, bias={2}), ({0},))",
    mixed="raises",
)
def _linear(g: Builder) -> Call:
    # `out` is right for matrices only: else it is resized, or must be contiguous. The module warns
    # of an empty weight.
    x = g.tensor(rank=2 if g.form == "out" else (1, 4), empty=g.form == "function")
    n = g.dim()
    vector = g.form == "function" and g.int(0, 11) == 11
    weight = g.tensor(x.shape[-1:] if vector else (n, x.shape[-1]), weight=True)
    bias = g.tensor(() if vector else (n,), weight=True) if g.flag() else None
    return Call((x, weight, bias), out(x.shape[:-1] if vector else (*x.shape[:-1], n)))


@op(
    "addmm",
    "aten::addmm",
    function="torch.addmm",
    method="addmm",
    inplace="addmm_",
    out="torch.addmm",
    mixed="raises",
)
def _addmm(g: Builder) -> Call:
    a = _matrix(g)
    m, n = a.shape[0], g.dim()
    b = g.tensor((a.shape[1], n), weight=True)
    return Call((_added(g, (m, n)), a, b), out((m, n)), _scales(g))


@op(
    "_addmm_activation",
    "aten::_addmm_activation",
    function="torch._addmm_activation",
    out="torch._addmm_activation",
    mixed="raises",
)
def _addmm_activation(g: Builder) -> Call:
    # It has no derivative.
    a = g.tensor(rank=2, empty=True, grad=False)
    m, n = a.shape[0], g.dim()
    b, bias = g.tensor((a.shape[1], n), grad=False), g.tensor((n,), grad=False)
    options = g.options(beta=(1, 0.5), alpha=(1, 2.0), use_gelu=(False, True))
    return Call((bias, a, b), out((m, n)), options)


@op(
    "addbmm",
    "aten::addbmm",
    function="torch.addbmm",
    method="addbmm",
    inplace="addbmm_",
    out="torch.addbmm",
    mixed="raises",
)
def _addbmm(g: Builder) -> Call:
    a = g.tensor(rank=3)
    shape = (a.shape[1], g.dim())
    b = g.tensor((a.shape[0], a.shape[2], shape[1]))
    return Call((_added(g, shape), a, b), out(shape), _scales(g))


@op(
    "baddbmm",
    "aten::baddbmm",
    function="torch.baddbmm",
    method="baddbmm",
    inplace="baddbmm_",
    out="torch.baddbmm",
    mixed="raises",
)
def _baddbmm(g: Builder) -> Call:
    a = g.tensor(rank=3, empty=True)
    shape = (*a.shape[:2], g.dim())
    b = g.tensor((a.shape[0], a.shape[2], shape[2]))
    return Call((_added(g, shape), a, b), out(shape), _scales(g))


@op(
    "addmv",
    "aten::addmv",
    function="torch.addmv",
    method="addmv",
    inplace="addmv_",
    out="torch.addmv",
    mixed="raises",
)
def _addmv(g: Builder) -> Call:
    # Not empty: with an empty vector the CPU kernel returns the shape of `self`, not its broadcast.
    a = g.tensor(rank=2)
    return Call((_added(g, a.shape[:1]), a, g.tensor(a.shape[1:])), out(a.shape[:1]), _scales(g))


@op(
    "addr",
    "aten::addr",
    function="torch.addr",
    method="addr",
    inplace="addr_",
    out="torch.addr",
)
def _addr(g: Builder) -> Call:
    a, b = g.tensor(rank=1), g.tensor(rank=1)
    shape = (*a.shape, *b.shape)
    return Call((_added(g, shape), a, b), out(shape), _scales(g))


@op("mv", "aten::mv", function="torch.mv", method="mv", out="torch.mv", mixed="raises")
def _mv(g: Builder) -> Call:
    a = _matrix(g)
    return Call((a, g.tensor(a.shape[1:])), out(a.shape[:1]))


@op("dot", "aten::dot", function="torch.dot", method="dot", out="torch.dot", mixed="raises")
def _dot(g: Builder) -> Call:
    a = g.tensor(rank=1, empty=True)
    return Call((a, g.tensor(a.shape)), out(()))


@op("vdot", "aten::vdot", function="torch.vdot", method="vdot", out="torch.vdot", mixed="raises")
def _vdot(g: Builder) -> Call:
    # Complex inputs are what vdot is for; autocast must leave them alone.
    dtype = g.choice([None, None, "complex64", "complex128"])
    a = g.tensor(rank=1, empty=True, dtype=dtype)
    return Call((a, g.tensor(a.shape, dtype=dtype)), out((), dtype=dtype))


@op(
    "linalg.vecdot",
    "aten::linalg_vecdot",
    "aten::sum.dim_IntList",
    function="torch.linalg.vecdot",
    out="torch.linalg.vecdot",
    mixed="raises",
)
def _vecdot(g: Builder) -> Call:
    a = g.tensor(rank=(1, 3), empty=True)
    b = g.tensor(a.shape)
    dim = g.dimension(a.rank)
    left = list(a.shape)
    del left[dim]
    return Call((a, b), out(tuple(left)), {} if dim == -1 else {"dim": dim})


# A scale that is a power of two rounds nothing by itself.
_PER_CHANNEL = (
    "torch.full({1}.shape[:1], 0.125, device={1}.device), "
    "torch.zeros({1}.shape[:1], dtype=torch.int32, device={1}.device), 0, -128, 127"
)


@op(
    "linear.fake_quantised",
    "aten::linear",
    function="torch.nn.functional.linear({0}, "
    "torch.fake_quantize_per_tensor_affine({1}, 0.125, 0, -128, 127))",
    mixed="raises",
)
@op(
    "linear.fake_quantised_channels",
    "aten::linear",
    function="torch.nn.functional.linear({0}, "
    f"torch.fake_quantize_per_channel_affine({{1}}, {_PER_CHANNEL}))",
    mixed="raises",
)
def _fake_quantised(g: Builder) -> Call:
    x = g.tensor(rank=2)
    weight = g.tensor((g.dim(), x.shape[1]), weight=True)
    return Call((x, weight), out((x.shape[0], weight.shape[0])))


_ALIGNED = 8  # rows are multiples of 16 bytes


@op(
    "grouped_mm",
    function="torch._grouped_mm({0}, {1}, "
    "offs=torch.tensor({2}, dtype=torch.int32, device={0}.device))",
    mixed="raises",
    floats=("bfloat16",),  # "inputs are currently expected to be torch.bfloat16"
    torch=">=2.9",
)
def _grouped_mm(g: Builder) -> Call:
    groups, m, wide = g.int(1, 3), g.int(1, 4), g.flag()
    columns = 2 * _ALIGNED if wide else _ALIGNED
    x = g.tensor((groups * m, _ALIGNED))
    w = g.tensor((groups, _ALIGNED, columns), weight=True)
    ends = [m * (i + 1) for i in range(groups)]
    return Call((x, w, ends), out((x.shape[0], columns), dtype=x.dtype))


@op(
    "grouped_mm.batched",
    function="torch._grouped_mm",
    mixed="raises",
    floats=("bfloat16",),
    torch=">=2.9",
)
def _grouped_mm_batched(g: Builder) -> Call:
    groups, m = g.int(1, 3), g.int(1, 4)
    x = g.tensor((groups, m, _ALIGNED))
    w = g.tensor((groups, _ALIGNED, _ALIGNED), weight=True)
    return Call((x, w), out((groups, m, _ALIGNED), dtype=x.dtype))


def _chain(g: Builder) -> list[Value]:
    matrices = [_matrix(g)]
    for _ in range(g.int(1, 3)):
        matrices.append(g.tensor((matrices[-1].shape[1], g.dim())))
    return matrices


@op(
    "chain_matmul",
    "aten::chain_matmul",
    "aten::mm",
    function="torch.chain_matmul",
    out="torch.chain_matmul",
    mixed="raises",
)
def _chain_matmul(g: Builder) -> Call:
    matrices = _chain(g)
    return Call(tuple(matrices), out((matrices[0].shape[0], matrices[-1].shape[1])))


@op(
    "linalg.multi_dot",
    "aten::linalg_multi_dot",
    "aten::mm",
    function="torch.linalg.multi_dot",
    out="torch.linalg.multi_dot",
    mixed="raises",
)
def _multi_dot(g: Builder) -> Call:
    matrices = _chain(g)
    rows, columns = matrices[0].shape[:1], matrices[-1].shape[1:]
    # The first and the last factor may be vectors.
    ends = g.int(0, 3)
    if ends & 1:
        matrices[0], rows = g.tensor(matrices[1].shape[:1]), ()
    if ends & 2:
        matrices[-1], columns = g.tensor(matrices[-1].shape[:1]), ()
    return Call((matrices,), out((*rows, *columns)))


# Two operands and three, contractions, traces, sums without a product, ellipses.
_EQUATIONS = (
    "ij,jk->ik",
    "ij,kj->ik",
    "bij,bjk->bik",
    "i,i->",
    "i,j->ij",
    "ij->ji",
    "ij->",
    "ij,ij->ij",
    "bhqd,bhkd->bhqk",
    "ij,jk,kl->il",
    "ij,j",
    "bi,ijk,bj->bk",
)


def _moves(call: Statement, _: Mapping[str, Shape]) -> bool:
    """Return whether a call only moves elements: a transpose, or a diagonal."""
    left, arrow, right = str(call.args[0]).partition("->")
    if not arrow:
        right = "".join(c for c in left if left.count(c) == 1)
    return "," not in left and set(left) == set(right)


@op(
    "einsum",
    "aten::einsum",
    "aten::bmm",
    function="torch.einsum",
    mixed="raises",
    view_if=_moves,
)
def _einsum(g: Builder) -> Call:
    equation: str = g.choice(_EQUATIONS)
    left, arrow, right = equation.partition("->")
    sizes = {c: min(g.dim(), 6) for c in dict.fromkeys(left.replace(",", ""))}
    operands = [g.tensor(tuple(sizes[c] for c in labels)) for labels in left.split(",")]
    if not arrow:
        right = "".join(c for c in sorted(sizes) if left.count(c) == 1)
    return Call((equation, *operands), out(tuple(sizes[c] for c in right)))


@op(
    "tensordot",
    "aten::tensordot",
    "aten::mm",
    function="torch.tensordot",
    out="torch.tensordot",
    mixed="raises",
)
def _tensordot(g: Builder) -> Call:
    a = g.tensor(rank=(1, 3), empty=True)
    how = g.choice(("last", "all", "first"))
    n = g.dim()
    if how == "last":
        b, dims = g.tensor((a.shape[-1], n)), 1
        return Call((a, b), out((*a.shape[:-1], n)), {"dims": dims})
    if how == "all":
        return Call((a, g.tensor(a.shape)), out(()), {"dims": a.rank})
    b = g.tensor((n, a.shape[0]))
    return Call((a, b), out((*a.shape[1:], n)), {"dims": [[0], [-1]]})


@op(
    "bilinear",
    "aten::bilinear",
    "aten::bmm",
    function="torch.nn.functional.bilinear",
    module="torch.func.functional_call(torch.nn.Bilinear({2}.shape[1], {2}.shape[2], {2}.shape[0], "
    "device='meta'), dict(weight={2}, bias={3}), ({0}, {1}))",
    mixed="raises",
)
def _bilinear(g: Builder) -> Call:
    x = g.tensor(rank=(1, 3))
    n, m = min(g.dim(), 6), min(g.dim(), 6)
    y = g.tensor((*x.shape[:-1], m))
    weight = g.tensor((n, x.shape[-1], m), weight=True)
    bias = g.tensor((n,), weight=True) if g.flag() else None
    return Call((x, y, weight, bias), out((*x.shape[:-1], n)))


@op(
    "cross",
    "aten::cross",
    function="torch.cross",
    method="cross",
    out="torch.cross",
    mixed="raises",
)
@op("linalg.cross", function="torch.linalg.cross", out="torch.linalg.cross", mixed="raises")
def _cross(g: Builder) -> Call:
    shape = list(g.shape(1, 3))
    dim = g.dimension(len(shape))
    shape[dim] = 3
    a = g.tensor(tuple(shape))
    # Without `dim` cross warns that its default is deprecated.
    return Call((a, g.tensor(a.shape)), out(a.shape), {"dim": dim})


@op(
    "prelu",
    "aten::prelu",
    function="torch.prelu",
    method="prelu",
    module="torch.func.functional_call(torch.nn.PReLU({1}.numel(), device='meta'), "
    "dict(weight={1}), ({0},))",
    mixed="raises",
)
def _prelu(g: Builder) -> Call:
    x = g.tensor(rank=(0, 4), empty=True)
    channels = x.shape[1] if x.rank > 1 else 1
    weight = g.tensor(g.choice([(1,), (max(channels, 1),)]), weight=True)
    return Call((x, weight), out(x.shape))
