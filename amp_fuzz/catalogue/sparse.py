"""Products and reductions of sparse tensors, which the call makes of dense ones.

The kernels of the CSR layout have no 16-bit dtypes, so what autocast casts raises there.
"""

from __future__ import annotations

from functools import partial

from amp_fuzz.catalogue.core import Builder, Call, out
from amp_fuzz.catalogue.core import op as registered

_WIDE = ("float32", "float64")

op = partial(registered, mixed="raises", devices=("cpu", "cuda"))


@op(
    "sparse.mm",
    "aten::addmm",
    function="torch.sparse.mm({0}.to_sparse(), {1})",
)
@op(
    "mm.coo",
    "aten::mm",
    function="torch.mm({0}.to_sparse(), {1})",
    operator="{0}.to_sparse() @ {1}",
)
@op(
    "mm.csr",
    "aten::mm",
    function="torch.mm({0}.to_sparse_csr(), {1})",
    operator="{0}.to_sparse_csr() @ {1}",
    floats=_WIDE,
)
@op("mm.dense_coo", "aten::matmul", operator="{0} @ {1}.to_sparse()")
@op(
    "sparse.mm.sparse",
    function="torch.sparse.mm({0}.to_sparse(), {1}.to_sparse()).to_dense()",
    floats=_WIDE,
)
def _mm(g: Builder) -> Call:
    a = g.tensor(rank=2)
    b = g.tensor((a.shape[1], g.dim()), weight=True)
    return Call((a, b), out((a.shape[0], b.shape[1])))


@op(
    "addmm.coo",
    "aten::addmm",
    function="torch.addmm({0}, {1}.to_sparse(), {args2})",
)
@op(
    "sparse.addmm",
    "aten::addmm",
    function="torch.sparse.addmm({0}, {1}.to_sparse(), {args2})",
)
@op(
    "sparse.sampled_addmm",
    function="torch.sparse.sampled_addmm({0}.to_sparse_csr(), {args1}).to_dense()",
    floats=_WIDE,
)
def _addmm(g: Builder) -> Call:
    a = g.tensor(rank=2)
    b = g.tensor((a.shape[1], g.dim()), weight=True)
    shape = (a.shape[0], b.shape[1])
    return Call((g.tensor(shape), a, b), out(shape), g.options(beta=(1, 0.5), alpha=(1, 2.0)))


@op("mv.coo", "aten::mv", function="torch.mv({0}.to_sparse(), {1})")
@op(
    "mv.csr",
    "aten::mv",
    function="torch.mv({0}.to_sparse_csr(), {1})",
    floats=_WIDE,
)
def _mv(g: Builder) -> Call:
    a = g.tensor(rank=2)
    return Call((a, g.tensor(a.shape[1:], weight=True)), out(a.shape[:1]))


@op(
    "linear.coo",
    "aten::linear",
    function="torch.nn.functional.linear({0}, {1}.to_sparse())",
)
def _linear(g: Builder) -> Call:
    x = g.tensor(rank=2)
    weight = g.tensor((g.dim(), x.shape[1]), weight=True)
    return Call((x, weight), out((x.shape[0], weight.shape[0])))


@op("sparse.sum", function="torch.sparse.sum({0}.to_sparse(), {args1}).to_dense()")
def _sum(g: Builder) -> Call:
    x = g.tensor(rank=2)
    return Call((x,), out(x.shape[1:], dtype=x.dtype), {"dim": 0})


@op(
    "sparse.softmax",
    function="torch.sparse.softmax({0}.to_sparse(), {args1}).to_dense()",
    floats=_WIDE,
)
@op(
    "sparse.log_softmax",
    function="torch.sparse.log_softmax({0}.to_sparse(), {args1}).to_dense()",
    floats=_WIDE,
)
def _softmax(g: Builder) -> Call:
    x = g.tensor(rank=2)
    return Call((x,), out(x.shape, dtype=x.dtype), {"dim": 1})
