"""Operands of two dtypes, which eager's kernels refuse or take otherwise than a compiled program.

## compile-mixed-dtype, compile-mixed-statistics, compile-mixed-layer-norm, compile-mixed-mv, compile-mixed-cross, compile-mixed-index: compiled, kernels take what they refuse

Stage aot_eager_decomp_partition, compile-mixed-index inductor. Eager's kernels check dtypes, the
decompositions promote:

| call | eager raises |
|---|---|
| `layer_norm` and `batch_norm` of bfloat16 with float16 weights | mixed dtype (CPU) |
| `batch_norm` and `instance_norm` with running statistics of bfloat16 and float32 | expected scalar type BFloat16 but found Float |
| `mv`, `matmul` and `cross` of float32 and bfloat16, the gradient of `addr` | addmv input tensors must have the same dtype |
| `index_put` of values of another dtype than the destination's | Index put requires the source and destination dtypes match |

We called each of the 573 ops of the catalogue with mixes of three dtypes (81 at most), forward and
backward. The first text came from batch, instance, group and layer norms and from the transformer
layers that call one; the third from `mv`, `matmul`, `addmv` and `addr`. (`addmv` raises compiled,
too.) The entries name these ops. An error in a backward pass names no op; then the program must
contain one of them. `layer_norm`, `cross` and `mv` are imitated, `group_norm` by
[compile-group-norm]. The values computed from them are judged. The others are listed; no value
after their errors is judged.

The gradients of `cross` are wrong on Inductor alone, and in no list. AOTAutograd takes the dtype of
the incoming gradient from the kernel's meta function. That promises the dtype of the first operand,
and the code reads float32 as float16.

```python
x, y = torch.ones(2, 3, dtype=torch.float16), torch.ones(2, 3, requires_grad=True)
cross = torch.compile(torch.linalg.cross)
(grad,) = torch.autograd.grad(cross(x, y), y, torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]))
print(grad[0])  # tensor([ 1.8750,  0.0000, -1.8750]), and right is [-1, 2, -1]
```

## compile-promotion: soft_margin_loss, huber_loss and addr of two dtypes

Stage aot_eager_decomp_partition, without autocast too. `soft_margin_loss(x, y)` and
`huber_loss(x, y)` have the dtype of `x` in eager; the documentation promises nothing of two dtypes.
Decomposed they have the wider dtype: float64 for a float32 `x` and a float64 `y`. The gradient of
such a `huber_loss` raises in eager ("Found dtype Double but expected Float") and not decomposed.
`addr(x, a, b)` of a float32 `x` without dimensions and vectors of bfloat16 is float32 in eager,
which expands `x` first. Decomposed it is bfloat16: there `x` counts as a number. We know of no
report.
"""

from __future__ import annotations

from typing import Any

import torch

from amp_fuzz.backends.imitation import Imitation
from amp_fuzz.cases.build import call, case, under, x
from amp_fuzz.cases.program import InferenceMode
from amp_fuzz.upstream.bug import Bug, Example
from amp_fuzz.upstream.lowering import HALVES, Lowerings, kernels, out_of, promoted, wide

__all__ = ["BUGS"]

DECOMPOSED = "compile[aot_eager_decomp_partition]"
INDUCTOR = "compile[inductor]"

_aten = torch.ops.aten


def refuses(x: torch.Tensor, *parameters: torch.Tensor | None) -> bool:
    """Return whether the kernel of layer_norm refuses parameters of these dtypes."""
    dtypes = {p.dtype for p in parameters if p is not None} - {x.dtype}
    some = any(p is not None and p.dtype == x.dtype for p in parameters)
    return bool(dtypes) and (some or dtypes != {torch.float32} or x.dtype not in HALVES)


def _layer_norm(
    x: torch.Tensor,
    shape: Any,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> Any:
    """Promote what the kernel refuses; results and statistics have the dtype of x."""
    if not refuses(x, weight, bias):
        return None
    made, mean, rstd = _aten.native_layer_norm(wide(x), shape, None, None, eps)
    made = made if weight is None else made * weight
    made = made if bias is None else made + bias
    return made.to(x.dtype), mean.to(x.dtype), rstd.to(x.dtype)


def _layer_norm_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    shape: Any,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mask: Any,
) -> Any:
    """Convert all to the dtype in which the decomposition computes, which x decides."""
    if not refuses(x, weight, bias):
        return None
    given = wide(x)
    weight_, bias_ = (p if p is None else p.to(given.dtype) for p in (weight, bias))
    grad, mean, rstd = (t.to(given.dtype) for t in (grad, mean, rstd))
    made = _aten.native_layer_norm_backward(grad, given, shape, mean, rstd, weight_, bias_, mask)
    of = (x, weight, bias)
    return tuple(
        m if m is None or t is None else m.to(t.dtype) for m, t in zip(made, of, strict=True)
    )


def _addr(
    x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: Any = 1, alpha: Any = 1
) -> torch.Tensor | None:
    dtype = torch.result_type(x, torch.empty(1, dtype=torch.promote_types(a.dtype, b.dtype)))
    if x.dim() or dtype == torch.promote_types(dtype, x.dtype):
        return None
    return torch.addr(x.to(dtype), a.to(dtype), b.to(dtype), beta=beta, alpha=alpha)


def _huber_backward(
    grad: torch.Tensor, x: torch.Tensor, y: torch.Tensor, *args: Any
) -> torch.Tensor | None:
    """Promote what the kernel refuses."""
    if grad.dtype == x.dtype == y.dtype:
        return None
    dtype = torch.promote_types(torch.promote_types(x.dtype, y.dtype), grad.dtype)
    made: torch.Tensor = _aten.huber_loss_backward(grad.to(dtype), x.to(dtype), y.to(dtype), *args)
    return made


_LAYER_NORMS: Lowerings = {
    _aten.native_layer_norm.default: _layer_norm,
    _aten.native_layer_norm_backward.default: _layer_norm_backward,
}
_PRODUCTS: Lowerings = {
    _aten.mv.default: promoted(_aten.mv.default),
    _aten.mv.out: out_of(promoted(_aten.mv.default)),
}
_CROSSES: Lowerings = {
    _aten.linalg_cross.default: promoted(_aten.linalg_cross.default),
    _aten.linalg_cross.out: out_of(promoted(_aten.linalg_cross.default)),
}
_PROMOTIONS: Lowerings = {
    _aten.addr.default: _addr,
    _aten.huber_loss.default: promoted(_aten.huber_loss.default),
    _aten.huber_loss.out: out_of(promoted(_aten.huber_loss.default)),
    _aten.huber_loss_backward.default: _huber_backward,
    _aten.soft_margin_loss.default: promoted(_aten.soft_margin_loss.default),
}

BUGS = (
    Bug(
        id="compile-mixed-dtype",
        what="norms of operands of two dtypes that eager's kernels refuse are promoted in a compiled program",
        why="the kernels check dtypes, the decompositions promote",
        torch=">=2.7",
        seen="2.15.0",
        backends=(
            "compile[aot_eager_decomp_partition]",
            "compile[inductor*",
        ),
        ops=(
            "*batch_norm*",
            "instance_norm*",
        ),
        kinds=("raise",),
        expected="^RuntimeError: mixed dtype \\(CPU\\): ",
        observed="^no error$",
        examples=(
            Example(
                DECOMPOSED,
                case(
                    [
                        x("x0", 2, 3, 2, dtype="bfloat16"),
                        *(x(n, 3, dtype="float16") for n in ("x1", "x2")),
                    ],
                    call("batch_norm.batch_statistics", "x0", None, None, "x1", "x2", True),
                    contexts=(),
                    backward="none",
                ),
                wrong="",
            ),
        ),
    ),
    Bug(
        id="compile-mixed-index",
        what="index_put of values of another dtype, which eager refuses, is converted when Inductor compiles it",
        why="the kernel checks dtypes, Inductor's lowering stores what it gets",
        torch=">=2.7",
        seen="2.15.0",
        backends=("compile[inductor*",),
        ops=("index_put*",),
        kinds=("raise",),
        expected="^RuntimeError: Index put requires the source and destination dtypes match, got \\w+ for the destination and \\w+ for the source",
        observed="^no error$",
        examples=(
            Example(
                INDUCTOR,
                case(
                    [
                        x("x0", 3),
                        x("b1", 4),
                        x("x2", 2, dtype="int64", domain="index", bound=2),
                        x("x3", 2, dtype="bfloat16"),
                    ],
                    call("neg", "x0", to="v9"),
                    call("index_put", "b1", "x2", "x3", False, form="inplace"),
                    contexts=(),
                    backward="none",
                ),
                wrong="",
            ),
        ),
    ),
    Bug(
        id="compile-mixed-statistics",
        what="a norm of running statistics of two dtypes, which eager's kernel refuses, is promoted in a compiled program",
        why="the kernel checks dtypes, the decomposition promotes",
        torch=">=2.7",
        seen="2.15.0",
        backends=(
            "compile[aot_eager_decomp_partition]",
            "compile[inductor*",
        ),
        ops=(
            "*batch_norm*",
            "instance_norm*",
        ),
        kinds=("raise",),
        where="*_norm*(*",
        expected="^RuntimeError: expected scalar type \\w+ but found \\w+$",
        observed="^no error$",
        examples=(
            Example(
                DECOMPOSED,
                case(
                    [
                        x("x0", 2, 3, 4, dtype="bfloat16"),
                        x("x1", 3, dtype="bfloat16"),
                        x("x2", 3, domain="positive"),
                    ],
                    call("instance_norm", "x0", "x1", "x2", None, None, True),
                    contexts=(),
                    backward="none",
                ),
                wrong="",
            ),
        ),
    ),
    Bug(
        id="compile-mixed-layer-norm",
        what="layer_norm of weights whose dtypes eager's kernel refuses is promoted in a compiled program",
        why="the kernel checks dtypes, the decomposition promotes",
        torch=">=2.7",
        seen="2.15.0",
        backends=(
            "compile[aot_eager_decomp_partition]",
            "compile[inductor*",
        ),
        ops=(
            "*layer_norm",
            "Transformer*Layer",
        ),
        rank=51,  # around compile-norm-statistics, which takes the norms that eager does not refuse
        imitation=Imitation(kernels=kernels(_LAYER_NORMS)),
        examples=(
            Example(
                DECOMPOSED,
                case(
                    [
                        x("x0"),
                        x("x1", 2, 3, dtype="bfloat16"),
                        x("x2", 3),
                        x("x3", 3, dtype="float16"),
                    ],
                    call("layer_norm", "x1", [3], "x2", "x3", to="v1"),
                    contexts=(),
                    backward="none",
                ),
            ),
        ),
    ),
    Bug(
        id="compile-mixed-mv",
        what="a matrix times a vector of another dtype, which eager's kernel refuses, is promoted in a compiled program",
        why="the kernel checks dtypes, the decomposition promotes; the backward pass of addr multiplies so",
        torch=">=2.7",
        seen="2.15.0",
        backends=(
            "compile[aot_eager_decomp_partition]",
            "compile[inductor*",
            "export[decomposed]",
        ),
        ops=(
            "mv",
            "matmul",
            "addr",
        ),
        imitation=Imitation(kernels=kernels(_PRODUCTS)),
        examples=(
            Example(
                DECOMPOSED,
                case(
                    [x("x0"), x("x1", 2, 3, dtype="bfloat16"), x("x2", 3)],
                    call("mv", "x1", "x2", to="v1"),
                    contexts=(),
                    backward="none",
                ),
            ),
            *(
                Example(
                    backend,
                    case(
                        [x("x0", 2, 3, dtype="bfloat16"), x("x1", 3)],
                        under(InferenceMode(), call("matmul", "x0", "x1")),
                        contexts=(),
                        backward="none",
                    ),
                )
                for backend in (DECOMPOSED, "export[decomposed]")
            ),
        ),
    ),
    Bug(
        id="compile-mixed-cross",
        what="cross of vectors of two dtypes, which eager's kernel refuses, is promoted in a compiled program",
        why="the kernel checks dtypes, the decomposition promotes",
        torch=">=2.7",
        seen="2.15.0",
        backends=(
            "compile[aot_eager_decomp_partition]",
            "compile[inductor*",
            "export[decomposed]",
        ),
        ops=(
            "cross",
            "linalg.cross",
        ),
        imitation=Imitation(kernels=kernels(_CROSSES)),
        examples=(
            Example(
                DECOMPOSED,
                case(
                    [x("x0"), x("x1", 3, dtype="bfloat16"), x("x2", 3)],
                    call("cross", "x1", "x2", to="v1"),
                    contexts=(),
                    backward="none",
                ),
            ),
        ),
    ),
    Bug(
        id="compile-promotion",
        what="soft_margin_loss and huber_loss of two dtypes have the dtype of their input in eager, and the wider one when compiled; addr to a number that of its vectors",
        why="the decompositions of losses promote; that of addr takes a tensor of no dimension for a number, which eager expands first",
        torch=">=2.7",
        seen="2.15.0",
        backends=(
            "compile[aot_eager_decomp_partition]",
            "compile[inductor*",
            "export[decomposed]",
        ),
        ops=(
            "addr",
            "huber_loss*",
            "soft_margin_loss",
        ),
        imitation=Imitation(kernels=kernels(_PROMOTIONS)),
        examples=(
            Example(
                DECOMPOSED,
                case(
                    [x("x0", 3), x("x1", 3, dtype="float64")],
                    call("soft_margin_loss", "x0", "x1"),
                    contexts=(),
                    backward="none",
                ),
            ),
            *(
                Example(
                    DECOMPOSED,
                    case(
                        [x("w0", 6), x("x1", 6, dtype="float64")],
                        call("huber_loss", "w0", "x1", reduction=reduction),
                        contexts=(),
                    ),
                )
                for reduction in ("none", "sum")
            ),
        ),
    ),
)
