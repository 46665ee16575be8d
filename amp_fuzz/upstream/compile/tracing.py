"""A program as AOTAutograd traces it: what autocast decides about, and what the graph returns.

AOTAutograd runs a program once under modes of its own and keeps a graph of the ops that reach them.
The reference can do so, too.

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

## compile-weight-cache: the weight cache is kept in eager only

```python
import torch

x, w = torch.ones(1, 1), torch.ones(1, 1, requires_grad=True)
for mm in torch.mm, torch.compile(torch.mm, backend="aot_eager"):
    with torch.no_grad():
        w.fill_(1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mm(x, w)
        with torch.no_grad():
            w.mul_(2)
        print(mm(x, w).item())  # 1.0, which was cached; then 2.0
```

Stage aot_eager. In one context eager uses the cast of a weight again, even after the weight was
updated in place, until the outermost context ends (documented for `cache_enabled`). AOTAutograd
traces with the cache disabled and has the casts in its graphs: a second step sees the new weight.
A weight that is used twice is cast twice, and the two gradients are added in float32, where eager
adds them in 16 bits.
A program that itself changes a weight inside a context depends on the cache: `amp_fuzz.check` says
so, with the verdict ``stale``.

## compile-functions: l1_loss forgets its weight

```python
import torch

x, y, w = torch.tensor([1.0, 2.0]).bfloat16(), torch.zeros(2).bfloat16(), torch.tensor([3.0, 5.0])
loss = torch.nn.functional.l1_loss
for l1_loss in loss, torch.compile(loss, backend="aot_eager"):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        print(l1_loss(x, y, weight=w.bfloat16(), reduction="sum"))  # 13, bfloat16; 3, float32
```

Stage aot_eager, in an export and on torchax too. `torch.nn.functional.l1_loss` does not hand its
`weight` on to `handle_torch_function`, through which AOTAutograd calls it
([#193003](https://github.com/pytorch/pytorch/pull/193003)). Without autocast the loss is wrong as
well. Under autocast it has another dtype too: without a weight it is one op, which autocast casts to
float32, with a weight it is three, which it leaves alone. A value computed from the result is
right. The reference imitates it by calling the program under a mode of torch functions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from amp_fuzz import reference
from amp_fuzz.backends.imitation import Imitation, inside
from amp_fuzz.cases.build import call, case, x
from amp_fuzz.reference import dispatch
from amp_fuzz.reference.cache import own_cache
from amp_fuzz.reference.state import here
from amp_fuzz.upstream.bug import Bug, Example

__all__ = ["BUGS"]

AOT = "compile[aot_eager]"


class _Uncast(TorchDispatchMode):
    """Run the kernel of every op that is dispatched without autocast.

    Autocast has decided about the op before a mode sees it.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with dispatch.exclude():
            return func(*args, **(kwargs or {}))


@contextmanager
def _casting_anew() -> Iterator[None]:
    """Cast a weight for each use, and leave no cast behind."""
    anew = replace(here().semantics, serves=lambda tensor, made: False)
    with own_cache(), reference.under(anew):
        yield


class _HandedOn(TorchFunctionMode):
    """Call each function through `handle_torch_function`, with the arguments that it is given."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


BUGS = (
    Bug(
        id="compile-kernels",
        what="what the kernel of an op calls is not cast in a compiled program, nor a composite op in inference_mode",
        why="autocast decides while AOTAutograd traces; the graph's ops then run with it disabled",
        torch=">=2.7",
        seen="2.15.0",
        harm="silent dtype",
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
        harm="silent value",
        backends=(
            "compile[aot_*",
            "compile[inductor*",
        ),
        imitation=Imitation(wrap=inside(_casting_anew)),
        examples=(
            Example(
                AOT,
                case(
                    [x("x0", 2, 2), x("w1", 2, 2)], call("mm", "x0", "w1"), steps=2, loop="inside"
                ),
            ),
        ),
    ),
    Bug(
        id="compile-functions",
        what="l1_loss forgets its weight where modes of torch functions are on: in a compiled program, in an export, on torchax",
        why="the Python function does not hand it on to handle_torch_function; what is left is cast to float32",
        link="https://github.com/pytorch/pytorch/pull/193003",
        torch=">=2.7",
        seen="2.15.0",
        harm="silent value",
        backends=(
            "compile[aot_*",
            "compile[inductor*",
            "export*",
            "torchax*",
        ),
        ops=("l1_loss.weight",),
        imitation=Imitation(wrap=inside(_HandedOn)),
        examples=(
            Example(
                AOT,
                case(
                    [x("x0", 3, dtype="bfloat16"), x("x1", 3, dtype="bfloat16"), x("x2", 3)],
                    call("l1_loss.weight", "x0", "x1", weight="x2", reduction="sum"),
                    backward="none",
                ),
            ),
        ),
    ),
)
