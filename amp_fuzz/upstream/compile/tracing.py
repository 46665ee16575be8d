"""A program as AOTAutograd traces it: what autocast decides about, and what the graph returns.

AOTAutograd runs a program once under modes of its own and keeps a graph of the ops that reach them.
The reference can do so, too.

## compile-functions, compile-chain-matmul: l1_loss forgets its weight, chain_matmul its out=

Stage aot_eager, without autocast too. `torch.nn.functional.l1_loss` does not hand its `weight` on
to `handle_torch_function`, through which AOTAutograd calls it
([#193003](https://github.com/pytorch/pytorch/pull/193003)):

```python
x, y, w = torch.tensor([1.0, 2.0]), torch.zeros(2), torch.tensor([3.0, 5.0])
torch.nn.functional.l1_loss(x, y, weight=w, reduction="sum")  # 13; 3 when compiled
```

The same happens in an export and on torchax. `torch.chain_matmul(x, y, out=b)` loses its `out=` in
the same way. Dynamo returns `b` all the same, as it was. A value computed from the result is right.

## compile-traced-backward: the backward pass is traced with the forward

Stage aot_eager, without autocast too. `torch.linalg.ldl_factor(w)` of a weight raises "derivative
for aten::linalg_ldl_factor_ex is not implemented" when it is compiled, and
`torch.linalg.cond(w, p="fro")` "one of the variables needed for gradient computation has been
modified". In eager only `backward()` would raise
([linalg-cond-backward](../torch/kernels.md#linalg-cond-backward)). So does
`low, high = torch.aminmax(w); low.mul_(2)`. If a program runs no backward pass, the reference runs
one, and must come to the same error. Of a custom op it runs the op's own backward: that of `t` of a
weight under `no_grad` gives `torch.autograd.backward` a tensor without history.

## compile-kernels: what a kernel calls is not cast

Stage aot_eager. AOTAutograd asks autocast about each op that it traces, and runs the graph with
autocast off. `torch.linalg.pinv` is one op of a graph. Its kernel calls `matmul`, which eager's
autocast casts:

```python
with torch.autocast("cpu", dtype=torch.bfloat16):
    torch.linalg.pinv(x).dtype  # bfloat16; float32 when compiled
```

In an `inference_mode` region composite ops reach AOTAutograd whole, too, and autocast is off in the
ops that they call. `ReplicationPad3d(0)(x)` of bfloat16 stays bfloat16 where eager casts to
float32, and `nll_loss(x, t, weight=w)` with a float16 weight raises "expected scalar type Float but
found Half".

## compile-dropout: a dropout that drops nothing returns a copy

Stage aot_eager, without autocast too. Eager's `dropout` that drops nothing returns the tensor that
it was given. Its decomposition (`torch/_decomp/decompositions.py`) clones it. A write to the result
changes the input in eager only:

```python
def f(x):
    y = x + 0
    torch.nn.functional.dropout(y, training=False).add_(1)
    return y


f(torch.zeros(1)), torch.compile(f, backend="aot_eager")(torch.zeros(1))  # 1, 0
```

`with torch.no_grad(): v = dropout(w, p=0.0)` of a weight is `w` in eager, and a copy without grad
when compiled. We found no report.

## compile-weight-cache: the weight cache is kept in eager only

Stage aot_eager. In one context eager uses the cast of a weight again, even after the weight was
updated in place, until the outermost context ends (documented for `cache_enabled`). AOTAutograd
traces with the cache disabled and has the casts in its graphs: a second step sees the new weight.
A program that itself changes a weight inside a context depends on the cache: `amp_fuzz.check` says
so, with the verdict ``stale``.

## compile-views: a view made under no_grad has a grad_fn

Stage aot_eager, without autocast too. `with torch.no_grad(): v = w.unsqueeze(-1)` of a weight
requires grad and has no `grad_fn` in eager, and `torch.autograd.backward` refuses it. A compiled
program makes the view again from `w`, with grad enabled: a gradient flows. The same holds for a
view of any tensor that requires grad. A `GradScaler` hides the refusal, since the product with the
scale has a history. Then the gradient through the view is missing in eager, and is added when
compiled.
"""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from amp_fuzz.backends.imitation import Imitation, inside
from amp_fuzz.cases.build import call, case, x
from amp_fuzz.reference import dispatch
from amp_fuzz.reference.cache import own_cache
from amp_fuzz.upstream.bug import Bug, Example

__all__ = ["BUGS"]

AOT = "compile[aot_eager]"


# -- the backward pass ---------------------------------------------------------------------------


# -- the ops of a graph --------------------------------------------------------------------------


class _Uncast(TorchDispatchMode):
    """Run the kernel of every op that is dispatched without autocast.

    Autocast has decided about the op before a mode sees it.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with dispatch.exclude():
            return func(*args, **(kwargs or {}))


# -- views ---------------------------------------------------------------------------------------


# Each wraps the program that the one before it has wrapped.
BUGS = (
    Bug(
        id="compile-kernels",
        what="what the kernel of an op calls is not cast in a compiled program, nor a composite op in inference_mode",
        why="autocast decides while AOTAutograd traces; the graph's ops then run with it disabled",
        torch=">=2.7",
        seen="2.15.0",
        backends=(
            "compile[aot_*",
            "compile[inductor*",
            "export[decomposed]",
        ),
        imitation=Imitation(wrap=inside(_Uncast)),
        examples=(Example(AOT, case([x("x0", 4, 4)], call("linalg.pinv", "x0"), backward="none")),),
    ),
    Bug(
        id="compile-weight-cache",
        what="a weight's cast is kept between calls in one context in eager only: two steps see the new weight",
        why="AOTAutograd traces with the cache disabled; the casts are in the graph",
        torch=">=2.7",
        seen="2.15.0",
        backends=(
            "compile[aot_*",
            "compile[inductor*",
        ),
        imitation=Imitation(wrap=inside(own_cache)),
        examples=(
            Example(
                AOT,
                case(
                    [x("x0", 2, 2), x("w1", 2, 2)], call("mm", "x0", "w1"), steps=2, loop="inside"
                ),
            ),
        ),
    ),
)
