"""Passes of Inductor over a graph that change what it computes.

All of it shows on stage `inductor`, without autocast too.

## compile-index-put-alias: values that are the input

```python
import torch


def f(x, index):
    y = x @ x
    return y.index_put([index], y)


x, index = torch.eye(3) * torch.tensor([1.0, 2, 3]), torch.tensor([2, 0, 1])
print(f(x, index).sum(1))  # 4, 9, 1
print(torch.compile(f)(x, index).sum(1))  # 4, 1, 1
```

**What torch does** (2.13.0). If nothing else needs `y`, Inductor turns `y.index_put(index, y)`
into an `index_put_` on `y` itself. It then reads values that it has overwritten.

**What the entry explains.** A program that agrees if Inductor writes no result of `index_put`
into its input.

**Upstream.** [#156786](https://github.com/pytorch/pytorch/issues/156786). A pull request that
mends it, [#160311](https://github.com/pytorch/pytorch/pull/160311), was not merged.

## compile-counted-constant: cumsum of a constant

```python
a, b = torch.bfloat16, torch.bool
torch.ones_like(x, dtype=b).cumsum(0, dtype=a)  # of dtype bfloat16; int64 when compiled
torch.full_like(x, 2, dtype=b).cumsum(0)  # 1, 2, 3, 4; 2, 4, 6, 8 when compiled
torch.full_like(x, 0.5, dtype=torch.int64).cumsum(0)  # 0, 0, 0, 0; 0.5, 1.0, 1.5, 2.0
torch.ones_like(x[0]).cumsum(0)  # 1; IndexError: tuple index out of range
```

**What torch does** (2.13.0). The pass `pointless_cumsum_replacement` replaces `cumsum` of a
constant by a range times the number that the constant was filled with. It overlooks the `dtype=`
of the `cumsum`, that the constant's dtype may change the number, and that there may be no
dimension.

**What the entry explains.** A program with a `cumsum` that agrees without that pass.

**Upstream.** [#189518](https://github.com/pytorch/pytorch/issues/189518) reports the first line.

## compile-randperm-index: Inductor does not compile x[torch.randperm(n)]

**What torch does** (2.13.0). The pattern of `x[torch.randperm(n)[:k]]` also matches an index
without a slice. Inductor raises "Not all inputs to pattern found in match.kwargs". amp-fuzz draws
no such index; a model that `amp_fuzz.check` is given may have one.

**Upstream.** [#183988](https://github.com/pytorch/pytorch/issues/183988),
[#158457](https://github.com/pytorch/pytorch/issues/158457).
"""

from __future__ import annotations

from amp_fuzz.cases.build import call, case, x
from amp_fuzz.cases.literals import bits_of
from amp_fuzz.cases.program import DType, Statement
from amp_fuzz.upstream.bug import Bug, Example

__all__ = ["BUGS"]


def _counted(constant: Statement) -> Example:
    counted = call("cumsum", "v0", 0, to="v1")
    return Example("compile[inductor]", case([x("x0", 4)], constant, counted, contexts=()))


BUGS = (
    Bug(
        id="compile-index-put-alias",
        what="y.index_put(index, y) is wrong when Inductor compiles it",
        why="the result is written into y, which is read on the way: the pass that reuses inputs does not ask whether the values are the input",
        link="https://github.com/pytorch/pytorch/issues/156786",
        torch=">=2.7,<2.15",
        seen="2.13.0",
        backends=("compile[inductor*",),
        kinds=("value", "nonfinite", "grad-value", "grad-nonfinite"),
        ops=("index_put*",),
        without="reused-inputs",
        examples=(
            Example(
                "compile[inductor]",
                case(
                    [x("x0", 3, 3), x("x1", 3, dtype="int64", values=bits_of([2, 0, 1], "int64"))],
                    call("mm", "x0", "x0"),
                    call("index_put", "v0", "x1", "v0", False, to="v1"),
                    returns=("v1",),
                    contexts=(),
                    backward="none",
                ),
            ),
        ),
    ),
    Bug(
        id="compile-counted-constant",
        what="cumsum of a constant forgets its dtype and the constant's when Inductor compiles it",
        why="a pass replaces it by a range times the fill value as it was written; a 0-d constant has no size to range over",
        link="https://github.com/pytorch/pytorch/issues/189518",
        torch=">=2.7,<2.15",
        seen="2.13.0",
        backends=("compile[inductor*",),
        kinds=("dtype", "value", "raise"),
        ops=("cumsum",),
        without="counted-constants",
        examples=(
            Example(
                "compile[inductor]",
                case(
                    [x("x0", 4)],
                    call("ones_like", "x0", dtype=DType("bool")),
                    call("cumsum", "v0", 0, dtype=DType("bfloat16"), to="v1"),
                    contexts=(),
                    backward="none",
                ),
            ),
            _counted(call("full_like", "x0", 2, dtype=DType("bool"))),
            _counted(call("full_like", "x0", 0.5, dtype=DType("int64"))),
            _counted(call("new_ones", "x0", [], form="method")),
        ),
    ),
    Bug(
        id="compile-randperm-index",
        what="x[torch.randperm(n)] cannot be compiled by Inductor",
        why="a pattern matches an index without the slice that it asks for",
        link="https://github.com/pytorch/pytorch/issues/183988",
        torch=">=2.7",
        seen="2.13.0",
        backends=("compile[inductor*",),
        kinds=("raise",),
        ops=("*",),
        expected="^no error$",
        observed=r"RuntimeError: Not all inputs to pattern found in match\.kwargs\..*argname=slice_shape",
        unshown="no op of the catalogue is a random permutation",
    ),
)
