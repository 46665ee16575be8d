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
A program that itself changes a weight inside a context depends on the cache: `amp_fuzz.check` says
so, with the verdict ``stale``.
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


class _Uncast(TorchDispatchMode):
    """Run the kernel of every op that is dispatched without autocast.

    Autocast has decided about the op before a mode sees it.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with dispatch.exclude():
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
