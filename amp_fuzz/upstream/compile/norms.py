"""Norms that a decomposition computes otherwise than eager's kernels.

Each stands at the stage aot_eager_decomp_partition and needs no autocast.

## compile-norm-statistics: the dtype of mean and rstd

`native_layer_norm` of bfloat16 with float32 weights returns `mean` and `rstd` in float32 in eager
and in bfloat16 decomposed. `layer_norm` and `batch_norm` do the same, and their backward pass
computes with them. Mixed-precision training on a CPU meets it:

```python
import torch


def norm(x, w):
    return torch.nn.functional.batch_norm(x, None, None, w, None, True)


torch.manual_seed(0)
x = torch.randn(4, 4, 2, 2, dtype=torch.bfloat16) + 3
for f in (norm, torch.compile(norm)):
    w = torch.ones(4, requires_grad=True)
    y = f(x, w)
    torch.manual_seed(1)
    y.backward(torch.randn(y.shape, dtype=y.dtype))
    print(w.grad)  # -0.0794 at [2], as in float64, then -0.1024
```

We know of no report.

## compile-batch-norm-statistics, compile-group-norm: norms of 16-bit inputs

`_native_batch_norm_legit_functional` of bfloat16 returns its statistics in float32 decomposed; the
kernel returns bfloat16. This one is listed, not imitated.

`group_norm` of bfloat16 with float32 weights rounds mean and rstd to bfloat16: the weight's
gradient of `group_norm([[1, 0]], 1, w)` is 1 and -1 instead of 0.99998 and -0.99998. The sums over
each channel are rounded, too ([#190245](https://github.com/pytorch/pytorch/pull/190245)). In
float32 the decomposition computes `x * scale + (bias - mean * scale)`. That cancels where a group
has one element: 1.0415039 instead of 1.0415162, seventeen times what rounding explains.

## compile-weight-norm: of a vector, and of float16

`torch._weight_norm(v, v, 0)` of a vector of 8 is `v * v / norm(v)` instead of `abs(v)`
([#191137](https://github.com/pytorch/pytorch/issues/191137)). Its gradient changes from run to
run. Neither the gradient nor a value computed from it is judged.

A model with `weight_norm` in float16 cannot be trained compiled. The kernels keep their norms in
float32. The decomposition of the forward keeps norms of bfloat16 in float32, and norms of float16
in float16. The backward has no decomposition, and its kernel refuses float16.
[#191141](https://github.com/pytorch/pytorch/pull/191141) would mend it.

```python
v, g = (torch.ones(4, n, dtype=torch.float16, requires_grad=True) for n in (3, 1))
norm = torch.compile(torch._weight_norm, backend="aot_eager_decomp_partition")  # Inductor too
norm(v, g, 0).sum().backward()  # RuntimeError: expected scalar type Float but found Half
```
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from amp_fuzz.backends.imitation import Imitation
from amp_fuzz.cases.build import call, case, x
from amp_fuzz.reference.shadow.run import forget
from amp_fuzz.upstream.bug import Bug, Example
from amp_fuzz.upstream.lowering import HALVES, Lowerings, kernels, wide

__all__ = ["BUGS"]

DECOMPOSED = "compile[aot_eager_decomp_partition]"

_aten = torch.ops.aten


def _rounding_statistics(op: Any) -> Callable[..., Any]:
    """Return a norm that returns its statistics in the dtype of x, whatever that of its weights."""

    def norm(x: torch.Tensor, *args: Any) -> Any:
        if x.dtype not in HALVES:
            return None
        made, mean, rstd = op(x, *args)
        return made, mean.to(x.dtype), rstd.to(x.dtype)

    return norm


def _layer_norm_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    shape: Any,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    *args: Any,
) -> Any:
    """Convert these statistics to the dtype of the weights, in which the kernel wants them."""
    if weight is None or weight.dtype == mean.dtype:
        return None
    mean, rstd = mean.to(weight.dtype), rstd.to(weight.dtype)
    return _aten.native_layer_norm_backward(grad, x, shape, mean, rstd, weight, *args)


def _batch_norm_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor | None,
    variance: torch.Tensor | None,
    saved_mean: torch.Tensor | None,
    saved_rstd: torch.Tensor | None,
    *args: Any,
) -> Any:
    """Convert these statistics likewise."""
    if weight is None or saved_mean is None or saved_rstd is None:
        return None
    if weight.dtype == saved_mean.dtype:
        return None
    saved = saved_mean.to(weight.dtype), saved_rstd.to(weight.dtype)
    return _aten.native_batch_norm_backward(grad, x, weight, mean, variance, *saved, *args)


def _group_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    n: int,
    channels: int,
    inner: int,
    groups: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normalise as ``x * scale + (bias - mean * scale)``; the statistics have the dtype of x."""
    grouped = wide(x).reshape(n, groups, channels // groups, inner)
    variance, mean = torch.var_mean(grouped, dim=(2, 3), correction=0, keepdim=True)
    rstd = torch.rsqrt(variance + eps)
    if weight is not None:
        scale = rstd * weight.reshape(1, groups, -1, 1)
        shift = -mean * scale
        if bias is not None:
            shift = shift + bias.reshape(1, groups, -1, 1)
        made = grouped * scale + shift
    else:
        made = (grouped - mean) * rstd
        if bias is not None:
            made = made + bias.reshape(1, groups, -1, 1)
    mean, rstd = (t.reshape(n, groups).to(x.dtype) for t in (mean, rstd))
    return made.reshape(x.shape).to(x.dtype), mean, rstd


def _group_norm_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    n: int,
    channels: int,
    inner: int,
    groups: int,
    mask: tuple[bool, bool, bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients from sums over each channel, which are rounded to 16 bits."""
    per = channels // groups
    products = (grad * x).reshape(n, channels, inner).sum(2).reshape(n, groups, per)
    sums = grad.reshape(n, channels, inner).sum(2).reshape(n, groups, per)
    mean, rstd = mean.reshape(n, groups, 1), rstd.reshape(n, groups, 1)
    gamma = weight.reshape(1, groups, per) if weight is not None else rstd.new_ones(1, groups, per)
    dx = dweight = dbias = None
    if mask[0]:
        s = 1.0 / (inner * per)
        weighted = ((part * gamma).sum(2, keepdim=True) for part in (products, sums))
        of_products, of_sums = weighted
        c1 = (rstd * gamma).unsqueeze(-1)
        c2 = (of_sums * mean - of_products) * rstd * rstd * rstd * s
        c3 = (-c2 * mean - of_sums * rstd * s).unsqueeze(-1)
        by = (t.reshape(n, groups, per, inner) for t in (grad, x))
        own, input_ = by
        dx = (own * c1 + input_ * c2.unsqueeze(-1) + c3).reshape(x.shape).to(x.dtype)
    if mask[1]:
        dweight = ((products - sums * mean) * rstd).sum(0).reshape(channels)
    if mask[2]:
        dbias = sums.sum(0).reshape(channels)
    return dx, dweight, dbias


def _weight_norm(
    v: torch.Tensor, g: torch.Tensor, dim: int = 0
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Take one norm of the whole vector, and norms in float16, which the kernel has in float32.

    Two dtypes are promoted, which the kernel refuses.
    """
    if v.dim() != 1 and g.dtype != torch.float16 and v.dtype == g.dtype:
        return None
    dims = [i for i in range(v.dim()) if i != dim] or None
    dtype = torch.float32 if g.dtype == torch.bfloat16 else None
    norm = torch.linalg.vector_norm(v, 2, dims, keepdim=True, dtype=dtype)
    return v * (g / norm.to(g.dtype)), norm


def _weight_norm_backward(
    grad: torch.Tensor, v: torch.Tensor, g: torch.Tensor, norms: torch.Tensor, dim: int
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return values of which nothing is known: the kernel reads beyond the one norm."""
    if v.dim() != 1 or norms.dtype == torch.float16:  # which it refuses
        return None
    made = torch.zeros_like(v), torch.zeros_like(g)
    for gradient in made:
        forget(gradient)
    return made


_STATISTICS: Lowerings = {
    **{
        op: _rounding_statistics(op)
        for op in (
            _aten.native_layer_norm.default,
            _aten.native_batch_norm.default,
            _aten._native_batch_norm_legit.default,
            _aten._native_batch_norm_legit.no_stats,
        )
    },
    _aten.native_layer_norm_backward.default: _layer_norm_backward,
    _aten.native_batch_norm_backward.default: _batch_norm_backward,
}
_GROUPS: Lowerings = {
    _aten.native_group_norm.default: _group_norm,
    _aten.native_group_norm_backward.default: _group_norm_backward,
}
_WEIGHTS: Lowerings = {
    _aten._weight_norm_interface.default: _weight_norm,
    _aten._weight_norm_interface_backward.default: _weight_norm_backward,
}

BUGS = (
    Bug(
        id="compile-norm-statistics",
        what="statistics of layer and batch norms are less exact when compiled: in 16 bits beside float32 weights",
        why="the decomposition takes the dtype of the input, the kernels take float32",
        torch=">=2.7",
        seen="2.15.0",
        backends=(
            "compile[aot_eager_decomp_partition]",
            "compile[inductor*",
        ),
        ops=(
            "*layer_norm",
            "Transformer*Layer",
            "*batch_norm*",
            "instance_norm*",
            "BatchNorm*",
            "InstanceNorm*",
        ),
        imitation=Imitation(kernels=kernels(_STATISTICS)),
        examples=(
            Example(
                "compile[aot_eager_decomp_partition]",
                case(
                    [x("x0", 2, 3, dtype="bfloat16"), x("w1", 3), x("w2", 3)],
                    call("native_layer_norm", "x0", [3], "w1", "w2", 1e-5, to="v0 v1 v2"),
                    contexts=(),
                    backward="none",
                ),
            ),
        ),
    ),
    Bug(
        id="compile-batch-norm-statistics",
        what="batch norm of 16-bit inputs answers its statistics in float32 when compiled",
        why="the decomposition computes them so, the kernel answers in the dtype of the input",
        torch=">=2.7",
        seen="2.15.0",
        backends=(
            "compile[aot_eager_decomp_partition]",
            "compile[inductor*",
        ),
        ops=(
            "_native_batch_norm_legit*",
            "native_batch_norm",
        ),
        kinds=("dtype",),
        expected="^b?float16$",
        observed="^float32$",
        examples=(
            Example(
                DECOMPOSED,
                case(
                    [x("x0", 2, 2, dtype="bfloat16"), x("x1", 2, dtype="bfloat16")],
                    call(
                        "_native_batch_norm_legit_functional",
                        *("x0", None, None, "x1", "x1", False, 1.0, 1.0),
                        form="overload",
                        to="v0 v1 v2 v3 v4",
                    ),
                    contexts=(),
                    backward="none",
                ),
            ),
        ),
    ),
    Bug(
        id="compile-group-norm",
        what="group_norm is less accurate when compiled: rounded statistics, and a difference of large numbers",
        why="the decomposition rounds mean and rstd to 16 bits, and computes x * scale + (bias - mean * scale)",
        torch=">=2.7",
        seen="2.15.0",
        backends=(
            "compile[aot_eager_decomp_partition]",
            "compile[inductor*",
        ),
        ops=(
            "group_norm",
            "native_group_norm",
        ),
        imitation=Imitation(kernels=kernels(_GROUPS)),
        examples=(
            Example(
                DECOMPOSED,
                case(
                    [x("x0", 3, 2, dtype="bfloat16"), x("w1", 2)],
                    call("group_norm", "x0", 1, "w1"),
                    contexts=(),
                    seed=1,
                ),
            ),
        ),
    ),
    Bug(
        id="compile-weight-norm",
        what="_weight_norm of a vector is wrong when compiled, and its gradient is memory that nobody wrote; that of float16 raises",
        why="the decomposition keeps the dimensions of a norm that a vector has not, and hands norms of float16 to a kernel that wants float32",
        link="https://github.com/pytorch/pytorch/issues/191137",
        torch=">=2.7",
        seen="2.15.0",
        backends=(
            "compile[aot_eager_decomp_partition]",
            "compile[inductor*",
            "export[decomposed]",
        ),
        ops=("_weight_norm",),
        imitation=Imitation(kernels=kernels(_WEIGHTS)),
        examples=(
            Example(
                DECOMPOSED,
                case(
                    [x("x0"), x("x1", 8)],
                    call("_weight_norm", "x1", "x1", 0),
                    contexts=(),
                    backward="none",
                ),
                torch="<2.15",
            ),
            Example(
                DECOMPOSED,
                case(
                    [x("x0", 4, 3, dtype="bfloat16"), x("x1", 4, 1)],
                    call("_weight_norm", "x0", "x1", 0),
                    contexts=(),
                    backward="none",
                ),
            ),
        ),
    ),
)
