"""Ops that torchax computes by other steps or in another dtype: imitated.

Seen with torchax 0.0.13 and jax 0.10.2 on the CPU; scripts begin as [torchax](../torchax.md) says.

## torchax-dtype-argument, torchax-mean-dtype: `dtype=` is ignored

`torch.sum(x, dtype=torch.float32)` of bfloat16 is bfloat16. `torch.mean(x, dtype=...)` raises
TypeError. Without autocast too.

## torchax-promotion: dtypes are promoted after JAX's rules

JAX has no lower priority for 0-d tensors: `bfloat16[4] * float32[]` is float32 (torch: bfloat16).
And ops that refuse inputs of several dtypes on the CPU promote them (`dot`, `mv`, `lu_solve`,
`linalg.solve`, `binary_cross_entropy`, `layer_norm` of bfloat16 with float32 weights,
`linalg.cross`). A mean by `nll_loss` with weights of 16 bits divides by their sum, rounded to 16
bits. `addr` promotes as torch does, and computes in float32 (torch's decomposition); `atan2` of
integers first makes float32 of them, whatever the other is. Without autocast too. The reference
imitates all of it, so that what comes after is compared.

## torchax-norms: norms are computed step by step in 16 bits

`layer_norm`, `group_norm` and `batch_norm` are written as a few JAX ops in the dtype of the
input, each of which rounds; in float16 squares overflow. torch's kernels compute in float32. The
statistics that `native_layer_norm` returns have gradients (torch gives none), and running
statistics of `batch_norm` are not updated. The reference computes the same steps.

## torchax-scalars: numbers are rounded to the dtype of the tensor

JAX gives a Python number the tensor's dtype: `x / 65536.0` of float16 divides by infinity, `x *
0.001` of bfloat16 is off by up to 0.2 %. torch computes with the number in float32.

## torchax-sums: a product is rounded before it is added to

`addmm`, `addbmm`, `addmv`, `baddbmm` and `linear` with a bias are a product, which is rounded to
the dtype, and a sum. torch's kernels add before they round. This is no bug: torchax rounds twice.
The reference computes the same two steps.
"""

from __future__ import annotations

from amp_fuzz.cases.build import call, case, x
from amp_fuzz.cases.literals import bits_of
from amp_fuzz.cases.program import DType
from amp_fuzz.upstream.bug import Bug, Example
from amp_fuzz.upstream.torchax.rules import imitation

__all__ = ["BUGS"]

BUGS = (
    Bug(
        id="torchax-dtype-argument",
        what="dtype= of sum, nansum and norms, and of cumsum of a 0-d tensor, is ignored; a cumprod of 0-d integers keeps their dtype",
        why="the lowerings take a dtype and do not use it, or return what they are given",
        torch=">=2.7",
        seen="2.13.0",
        backends=("torchax*",),
        imitation=imitation(frozenset({"torchax-dtype-argument"})),
        examples=(
            Example(
                "torchax",
                case([x("x0", 2, 2, dtype="bfloat16")], call("sum", "x0", dtype=DType("float32"))),
            ),
        ),
    ),
    Bug(
        id="torchax-mean-dtype",
        what="mean(dtype=) raises",
        why="the lowering takes no dtype",
        torch=">=2.7",
        seen="2.13.0",
        backends=("torchax*",),
        ops=("mean*", "nanmean"),
        kinds=("raise",),
        expected="^no error",
        observed="^TypeError: _aten_mean\\(\\) got an unexpected keyword argument 'dtype'",
        examples=(
            Example(
                "torchax",
                case([x("x0", 2, 2, dtype="bfloat16")], call("mean", "x0", dtype=DType("float32"))),
                wrong="",
            ),
        ),
    ),
    Bug(
        id="torchax-promotion",
        what="a 0-d tensor takes part in type promotion as any other; inputs of two dtypes run where torch refuses them, and softmax of integers; a remainder of integers by a number is float64",
        why="JAX has no lower priority for 0-d tensors, promotes everywhere, and torchax adds nothing",
        torch=">=2.7",
        seen="2.13.0",
        backends=("torchax*",),
        imitation=imitation(frozenset({"torchax-promotion"})),
        examples=(
            Example(
                "torchax", case([x("x0", 4, dtype="bfloat16"), x("x1")], call("mul", "x0", "x1"))
            ),
        ),
    ),
    Bug(
        id="torchax-norms",
        what="layer, group and batch norms, vector and weight norms, logaddexp are computed step by step in 16 bits; statistics have gradients; that of a norm of zeros is NaN",
        why="torchax writes them so in JAX; torch's kernels compute in float32",
        torch=">=2.7",
        seen="2.13.0",
        backends=("torchax*",),
        imitation=imitation(frozenset({"torchax-norms"})),
        examples=(
            Example(
                "torchax",
                case(
                    [x("x0", 2, 4, dtype="float16"), x("x1", 4, dtype="float32")],
                    call("layer_norm", "x0", [4], "x1", None),
                    backward="none",
                ),
            ),
        ),
    ),
    Bug(
        id="torchax-scalars",
        what="a Python number is rounded to the 16-bit dtype of the tensor it meets: beyond the range of float16 it is infinite",
        why="JAX gives the number the tensor's dtype before it computes; torch computes in float32",
        torch=">=2.7",
        seen="2.13.0",
        backends=("torchax*",),
        imitation=imitation(frozenset({"torchax-scalars"})),
        examples=(
            Example(
                "torchax",
                case([x("x0", 2, dtype="float16")], call("div.scalar", "x0", 65536.0), contexts=()),
            ),
        ),
    ),
    Bug(
        id="torchax-sums",
        what="addmm, linear with a bias, convolutions with one, bilinear: the product is rounded before it is added to",
        why="torchax writes them as a product and a sum; torch's kernels round once",
        torch=">=2.7",
        seen="2.13.0",
        backends=("torchax*",),
        imitation=imitation(frozenset({"torchax-sums"})),
        examples=(
            Example(
                "torchax",
                case(
                    [
                        x("x0", 1, 1, dtype="bfloat16", values=bits_of([-1.015625], "bfloat16")),
                        x("x1", 1, 1, dtype="bfloat16", values=bits_of([1.0078125], "bfloat16")),
                        x("x2", 1, 1, dtype="bfloat16", values=bits_of([1.0078125], "bfloat16")),
                    ],
                    call("addmm", "x0", "x1", "x2"),
                    backward="none",
                ),
            ),
        ),
    ),
)
