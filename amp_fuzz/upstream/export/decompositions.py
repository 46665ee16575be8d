"""What the decompositions and fake kernels of an export get wrong; no autocast is needed.

None was reported upstream that we know of. An export shares the decompositions of a compiled
program: see [What torch.compile does otherwise under autocast](../compile.md) for those.

## export-layer-norm: statistics of another dtype than promised

The fake kernel of `native_layer_norm` gives mean and reciprocal deviation the dtype of the input.
The kernel gives float32 if the input has 16 bits and a weight or bias is float32. Later
decompositions go by the promise: `silu` of the deviation is cast to bfloat16, a call that eager
refuses for its dtypes runs, `.float()` raises. The entry explains a program that agrees where the
fake kernel says the true dtype.

```python
class Deviation(torch.nn.Module):
    def forward(self, x, w):
        return torch.nn.functional.silu(torch.native_layer_norm(x, [3], w, w, 1.0)[2])


inputs = torch.ones(2, 3, dtype=torch.bfloat16), torch.ones(3)
program = torch.export.export(Deviation(), inputs)
print(program.module()(*inputs).dtype)  # torch.float32
print(program.run_decompositions().module()(*inputs).dtype)  # torch.bfloat16
```

## export-embedding-bag: weights that were computed

`embedding_bag` of weights that need gradients and are no leaf (`w * 2`) is exported. Then
`run_decompositions` raises `RuntimeError: Autograd not support dtype: Long`: its integer offsets
come to need gradients too.

## export-loss-out: losses with an out=

`multi_margin_loss(..., out=)` and `multilabel_margin_loss(..., out=)` of one sample, without a
reduction, cannot be exported. The fake kernel gives the result a dimension that it does not have
(compile-zero-dim-loss), and resizes `out=`. The guards then look for that dimension (`IndexError:
list index out of range`).

## export-promotion: results of another dtype

`select_scatter` of a bfloat16 tensor and a float32 value is bfloat16 in eager, and when compiled.
Its decomposition, which an export has, promotes: float32.

## export-take: an index of no dimension

`torch.take(x, i)` with `i` of no dimension is exported. Then `run_decompositions` raises
`GuardOnDataDependentSymNode`: the decomposition takes such an index for a number.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from amp_fuzz.backends.imitation import Imitation
from amp_fuzz.cases.build import call, case, x
from amp_fuzz.upstream.bug import Bug, Example
from amp_fuzz.upstream.lowering import kernels, promoted

__all__ = ["BUGS"]


class _Losses(TorchFunctionMode):
    """Raises for a margin loss of one sample with an ``out=``, which its fake kernel resizes."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        name = getattr(func, "__name__", "").partition(".")[0]
        writes = given.get("out") is not None and given.get("reduction") == 0
        if name in _LOSSES and writes and args[0].dim() < 2:
            raise IndexError("list index out of range")
        return func(*args, **given)


_LOSSES = {"multi_margin_loss", "multilabel_margin_loss"}


_aten = torch.ops.aten
_DataDependent = type("GuardOnDataDependentSymNode", (RuntimeError,), {})


def _take(x: torch.Tensor, index: torch.Tensor) -> None:
    if not index.dim():
        said = "Could not extract specialized integer from data-dependent expression u0"
        raise _DataDependent(f"{said} (unhinted: u0).  (Size-like symbols: none)")


def _embedding_bag(weight: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    if weight.requires_grad and not weight.is_leaf:
        raise RuntimeError("Autograd not support dtype: Long")


_SCATTERS = {_aten.select_scatter.default: promoted(_aten.select_scatter.default)}


BUGS = (
    Bug(
        id="export-layer-norm",
        what="what is computed from native_layer_norm's statistics has another dtype, or raises, where the export is decomposed",
        why="the fake kernel gives statistics of an input in 16 bits its dtype, with float32 weights too; the kernel gives float32",
        torch=">=2.7",
        seen="2.15.0",
        backends=("export*",),
        ops=("native_layer_norm",),
        kinds=(
            "dtype",
            "raise",
            "value",
        ),
        without="promised-statistics",
        examples=(
            Example(
                "export[decomposed]",
                case(
                    [x("x0", 2, 3, dtype="bfloat16"), x("x1", 3)],
                    call("native_layer_norm", "x0", [3], None, "x1", 1.0, to="_ _ v0"),
                    call("silu", "v0", to="v1"),
                    contexts=(),
                    backward="none",
                ),
            ),
        ),
    ),
    Bug(
        id="export-embedding-bag",
        what="embedding_bag of computed weights that need gradients cannot be exported and decomposed",
        why="its offsets, which are integers, come to need gradients too; no autocast needed",
        torch=">=2.7",
        seen="2.15.0",
        backends=("export[decomposed]",),
        ops=("embedding_bag*",),
        imitation=Imitation(kernels=kernels({_aten._embedding_bag.default: _embedding_bag})),
        examples=(
            Example(
                "export[decomposed]",
                case(
                    [x("x0"), x("w1", 3, 2), x("x2", 2, 2, dtype="int64", domain="index", bound=3)],
                    call("mul", "w1", 2.0),
                    call("embedding_bag", "v0", "x2", mode="sum", to="v1"),
                    contexts=(),
                    backward="none",
                ),
                torch=">=2.9",
            ),
        ),
    ),
    Bug(
        id="export-loss-out",
        what="margin losses with an out= cannot be exported",
        why="their fake kernels resize the out=, and the guards count dimensions that it had; no autocast needed",
        torch=">=2.7",
        seen="2.15.0",
        backends=("export*",),
        ops=(
            "multi_margin_loss*",
            "multilabel_margin_loss*",
        ),
        imitation=Imitation(around=_Losses),
        examples=(
            Example(
                "export",
                case(
                    [x("x0"), x("x1", 3), x("x2", dtype="int64", domain="index", bound=3), x("b3")],
                    call("multi_margin_loss", "x1", "x2", form="out", reduction=0, out="b3"),
                    contexts=(),
                    backward="none",
                ),
                torch=">=2.9",
            ),
        ),
    ),
    Bug(
        id="export-promotion",
        what="select_scatter of two dtypes has the wider one where the export is decomposed",
        why="the decomposition promotes; no autocast needed",
        torch=">=2.7",
        seen="2.15.0",
        backends=("export[decomposed]",),
        ops=("select_scatter",),
        imitation=Imitation(kernels=kernels(_SCATTERS)),
        examples=(
            Example(
                "export[decomposed]",
                case(
                    [x("x0", 2, dtype="bfloat16"), x("x1")],
                    call("select_scatter", "x0", "x1", 0, 0, to="v1"),
                    contexts=(),
                    backward="none",
                ),
            ),
        ),
    ),
    Bug(
        id="export-take",
        what="take with an index of no dimension cannot be exported and decomposed",
        why="the decomposition takes such an index for a number, which depends on data",
        torch=">=2.7,<2.15",
        seen="2.13.0",
        backends=("export[decomposed]",),
        ops=("take",),
        imitation=Imitation(kernels=kernels({_aten.take.default: _take})),
        examples=(
            Example(
                "export[decomposed]",
                case(
                    [x("x0"), x("x1", dtype="int64", domain="index", bound=1)],
                    call("take", "x0", "x1"),
                    contexts=(),
                    backward="none",
                ),
            ),
        ),
    ),
)
