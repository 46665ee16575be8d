"""Ops that a decomposition computes otherwise than eager's kernels.

None of them needs autocast. The stage is aot_eager_decomp_partition, that of the losses aot_eager.

## compile-zero-dim-loss: one sample has one dimension

`multi_margin_loss(x, t, reduction="none")` and `multilabel_margin_loss` of a vector have the shape
`[]` in eager and `[1]` compiled ([#141017](https://github.com/pytorch/pytorch/issues/141017)).

## compile-cat-empty: cat forgets the dtype of an empty tensor

`torch.cat([a, a, e])` of float32 `a` and `e = torch.empty(0, dtype=torch.float64)` is float64 in
eager. The decomposition leaves `e` out and calls `cat` again: float32. With one `a` it is right. We
know of no report.

## compile-std: a standard deviation beyond the range of its square

Eager's `std` and `std_mean` compute in float64 on the CPU. Compiled they are the root of a variance
in float32 ([#197089](https://github.com/pytorch/pytorch/issues/197089)). Below 1e-19 it is 0, and
so is the gradient. Beyond 1e19 it is infinite, or NaN on Inductor.

```python
x = torch.tensor([1e-30, 0.0])
print(torch.std(x), torch.compile(torch.std)(x))  # tensor(7.0711e-31) tensor(0.)
```

## compile-hardsigmoid: eager has the digits of float32

Eager's kernel multiplies by `1.0f / 6.0f`, in float64 too: there the gradient of `hardsigmoid` is
0.1666666716. The decomposition has 0.1666666667. Here the compiler is right. amp-fuzz follows
eager's kernel, and divides by 6 where it imitates the compiler.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from amp_fuzz.backends.imitation import Imitation
from amp_fuzz.cases.build import call, case, x
from amp_fuzz.cases.literals import bits_of
from amp_fuzz.upstream.bug import Bug, Example
from amp_fuzz.upstream.lowering import Lowerings, kernels, out_of, wide

__all__ = ["BUGS"]

DECOMPOSED = "compile[aot_eager_decomp_partition]"

_aten = torch.ops.aten


# -- losses --------------------------------------------------------------------------------------


def _one(loss: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
    """Return the loss of a sample, which a kernel returns without dimensions, in one dimension."""
    return loss.reshape(1) if x.dim() < 2 and not loss.dim() else None


def _multi_margin(
    x: torch.Tensor,
    target: torch.Tensor,
    p: float = 1,
    margin: float = 1,
    weight: torch.Tensor | None = None,
    reduction: int = 1,
) -> torch.Tensor | None:
    if reduction:
        return None
    return _one(_aten.multi_margin_loss(x, target, p, margin, weight, 0), x)


def _multi_margin_backward(
    grad: torch.Tensor, x: torch.Tensor, target: torch.Tensor, *args: Any
) -> torch.Tensor | None:
    if x.dim() > 1 or target.dim() or grad.shape != (1,):
        return None
    made: torch.Tensor = _aten.multi_margin_loss_backward(grad.reshape(()), x, target, *args)
    return made


def _multilabel_margin(
    x: torch.Tensor, target: torch.Tensor, reduction: int
) -> tuple[torch.Tensor, torch.Tensor] | None:
    if reduction:
        return None
    loss, is_target = _aten.multilabel_margin_loss_forward(x, target, 0)
    one = _one(loss, x)
    return None if one is None else (one, is_target)


def _multilabel_margin_backward(
    grad: torch.Tensor, x: torch.Tensor, target: torch.Tensor, *args: Any
) -> torch.Tensor | None:
    if x.dim() > 1 or grad.shape != (1,):
        return None
    made: torch.Tensor = _aten.multilabel_margin_loss_backward(grad.reshape(()), x, target, *args)
    return made


_LOSSES: Lowerings = {
    _aten.multi_margin_loss.default: _multi_margin,
    _aten.multi_margin_loss.out: out_of(_multi_margin),
    _aten.multi_margin_loss_backward.default: _multi_margin_backward,
    _aten.multilabel_margin_loss_forward.default: _multilabel_margin,
    _aten.multilabel_margin_loss_backward.default: _multilabel_margin_backward,
}


# -- others --------------------------------------------------------------------------------------


def _cat(tensors: list[torch.Tensor], dim: int = 0) -> torch.Tensor | None:
    """Leave out tensors of the shape [0], and with them their dtype."""
    some = [x for x in tensors if tuple(x.shape) != (0,)]
    return torch.cat(some, dim) if 1 < len(some) < len(tensors) else None


def _std(
    x: torch.Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> torch.Tensor | None:
    if x.is_complex():
        return None
    return torch.var(wide(x), dim, correction=correction, keepdim=keepdim).sqrt().to(x.dtype)


def _std_mean(
    x: torch.Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> tuple[torch.Tensor, torch.Tensor] | None:
    if x.is_complex():
        return None
    how = {"correction": correction, "keepdim": keepdim}
    return cast(torch.Tensor, _std(x, dim, **how)), torch.std_mean(x, dim, **how)[1]


_STDS: Lowerings = {
    _aten.std.correction: _std,
    _aten.std.correction_out: out_of(_std),
    _aten.std_mean.correction: _std_mean,
}


def _hardsigmoid_backward(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
    """Divide by 6 in float64, where the kernel multiplies by 1/6 of float32."""
    if x.dtype != torch.float64:
        return None
    return torch.where((x > -3.0) & (x < 3.0), grad * (1.0 / 6.0), torch.zeros_like(grad))


BUGS = (
    Bug(
        id="compile-zero-dim-loss",
        what="margin losses of one sample have one dimension in a compiled program, none in eager",
        why="the fake kernel and the decomposition answer another shape than the kernel",
        link="https://github.com/pytorch/pytorch/issues/141017",
        torch=">=2.7",
        seen="2.15.0",
        backends=(
            "compile[aot_*",
            "compile[inductor*",
            "export[decomposed]",
        ),
        ops=(
            "multi_margin_loss*",
            "multilabel_margin_loss*",
        ),
        imitation=Imitation(kernels=kernels(_LOSSES)),
        examples=(
            Example(
                "compile[aot_eager]",
                case(
                    [x("x0", 3), x("x1", dtype="int64", domain="index", bound=3), x("x2", 2, 3)],
                    call("multi_margin_loss", "x0", "x1", reduction="none"),
                    backward="none",
                ),
            ),
        ),
    ),
    Bug(
        id="compile-cat-empty",
        what="cat of two tensors and more and of one with the shape [0] forgets the dtype of that one",
        why="the decomposition calls cat again without it",
        torch=">=2.7",
        seen="2.15.0",
        backends=(
            "compile[aot_eager_decomp_partition]",
            "compile[inductor*",
        ),
        ops=(
            "cat",
            "concat*",
            "hstack",
            "vstack",
            "dstack",
            "column_stack",
            "row_stack",
        ),
        imitation=Imitation(kernels=kernels({_aten.cat.default: _cat})),
        examples=(
            Example(
                "compile[aot_eager_decomp_partition]",
                case(
                    [x("x0", 2), x("x1", 0, dtype="float64")],
                    call("cat", ["x0", "x0", "x1"], 0),
                    contexts=(),
                    backward="none",
                ),
            ),
        ),
    ),
    Bug(
        id="compile-std",
        what="the standard deviation of numbers below 1e-19 is 0, of those beyond 1e19 infinite, when compiled",
        why="the decomposition takes the root of a variance in float32; the kernel squares in float64, and has no variance",
        link="https://github.com/pytorch/pytorch/issues/197089",
        torch=">=2.7",
        seen="2.15.0",
        backends=(
            "compile[aot_eager_decomp_partition]",
            "compile[inductor*",
            "export[decomposed]",
        ),
        ops=("std*",),
        imitation=Imitation(kernels=kernels(_STDS)),
        examples=(
            Example(
                DECOMPOSED,
                case(
                    [x("x0"), x("x1", 2, values=bits_of([2.0**-100, 0.0], "float32"))],
                    call("std_mean", "x1", to="v0 v1"),
                    contexts=(),
                    backward="none",
                ),
            ),
        ),
    ),
    Bug(
        id="compile-hardsigmoid",
        what="the gradient of hardsigmoid in float64 has the digits of float32 in eager",
        why="the kernel multiplies by 1/6 rounded to float32; the decomposition does not",
        torch=">=2.7",
        seen="2.15.0",
        backends=(
            "compile[aot_eager_decomp_partition]",
            "compile[inductor*",
        ),
        ops=("hardsigmoid*",),
        imitation=Imitation(
            kernels=kernels({_aten.hardsigmoid_backward.default: _hardsigmoid_backward})
        ),
        examples=(
            Example(
                DECOMPOSED,
                case([x("x0"), x("w1", dtype="float64")], call("hardsigmoid", "w1"), contexts=()),
            ),
        ),
    ),
)
