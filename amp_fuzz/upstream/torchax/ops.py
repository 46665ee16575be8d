"""Ops that torchax computes in other steps or in another dtype.

Seen with torchax 0.0.13 and jax 0.10.2 on the CPU. The scripts start with the lines that
[torchax](../torchax.md) shows.

The reference imitates most of this. Each section names what it does not imitate: differences that
explained none of the 1,000 random programs that [torchax](../torchax.md) counts. They are reported
as new.

## torchax-dtype-argument, torchax-mean-dtype: `dtype=` is ignored

`torch.sum(x, dtype=torch.float32)` of bfloat16 returns bfloat16. `torch.mean(x, dtype=...)` raises
TypeError. Both also happen without autocast. `sum` is imitated, and `mean` is listed by its error.

Not imitated: `nansum` and the norms of `linalg` also ignore `dtype=`. `cumsum` of a 0-d tensor
returns its input, and so does `cumprod` without a `dtype=`. So both keep the dtype of a 0-d integer
tensor.

## torchax-promotion: dtypes are promoted by JAX's rules

JAX has no lower priority for 0-d tensors: `bfloat16[4] * float32[]` is float32 (torch: bfloat16).
Ops that reject inputs of several dtypes on the CPU promote them on torchax (`dot`, `mv`,
`lu_solve`, `linalg.solve`, `binary_cross_entropy`, `linalg.cross`). The mean of `nll_loss` with
16-bit weights is divided by the sum of the weights, rounded to 16 bits. `addr` promotes by torch's
rules and computes in float32 (torch's decomposition). `atan2` first converts an integer input to
float32, whatever the other input is. All of this also happens without autocast. The reference
imitates it, so the results computed from it are still compared. `layer_norm` of bfloat16 with
float32 weights belongs to [torchax-norms].

Not imitated: `softmax` and `log_softmax` accept integers, which torch rejects. The remainder of
integers by a float is float64 (torch: float32).

## torchax-norms: norms are computed step by step in 16 bits

`layer_norm`, `group_norm` and `batch_norm` consist of a few JAX ops in the dtype of the input.
Each op rounds, and in float16 the squares overflow. torch's kernels compute in float32. The
statistics that `native_layer_norm` returns have gradients (torch gives none), and `batch_norm`
does not update its running statistics. The reference computes the same steps.

Not imitated: vector norms, `_weight_norm`, `logaddexp` and `logaddexp2` are also computed in 16
bits. In float16, the vector norm of four numbers 300 is infinite (torch: 600). The gradient that
`jax.vjp` gives for the norm of zeros is NaN (torch: 0).

## torchax-scalars: numbers are rounded to the dtype of the tensor

JAX converts a Python number to the tensor's dtype. So `x / 65536.0` of float16 divides by infinity,
and `x * 0.001` of bfloat16 is off by up to 0.2 %. torch computes with the number in float32.

## torchax-sums: a product is rounded before the addition

`addmm`, `addbmm`, `addmv`, `baddbmm` and `linear` with a bias compute a product, round it to the
dtype, and then add. torch's kernels add before they round. This is not a bug: torchax only rounds
twice. The reference computes the same two steps.

Not imitated: `bilinear` and convolutions with a bias round twice, too.
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
        what="sum ignores dtype=",
        why="the lowering accepts a dtype and does not use it",
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
        why="the lowering accepts no dtype",
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
        what="0-d tensors count like any others in type promotion, and ops accept inputs of two dtypes where torch rejects them",
        why="JAX gives 0-d tensors no lower priority and promotes everywhere; torchax does not correct this",
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
        what="layer, group and batch norms of 16 bits round and overflow at each step, and their statistics have gradients",
        why="torchax composes them from JAX ops that round to 16 bits; torch's kernels compute in float32",
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
        what="a Python number is rounded to the 16-bit dtype of the other operand: beyond the range of float16 it is infinite",
        why="JAX converts the number to the tensor's dtype first; torch computes in float32",
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
        what="addmm, addbmm, addmv, baddbmm, and linear with a bias round the product before they add",
        why="torchax computes a product and a sum, which round separately; torch's kernels round once",
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
