"""Compiled code that is entered again under another autocast state.

## compile-region-state: a nested region runs under the state of another of its calls

```python
import torch

block = torch.compiler.nested_compile_region(lambda x, w: x @ w)


@torch.compile(backend="aot_eager")
def program(x, w):
    with torch.autocast("cpu", dtype=torch.float16):
        first = block(x, w)
    with torch.autocast("cpu", enabled=False):  # a float32 island
        second = block(x, w)
    return first, second


x = torch.ones(2, 2)
print([y.dtype for y in program(x, x)])  # float16 twice; right are float16 and float32
print([y.dtype for y in program(x, x.clone().requires_grad_())])  # float32 twice
```

**What torch does** (2.9.1 to 2.15.0), from stage `aot_eager` on. A region is traced once for all calls whose
inputs are alike, whatever autocast and grad mode are around them. Without gradients the first call
decides. With gradients autocast is on or off as around the last call, and the dtype is the device's
default: two calls under `autocast("cpu", dtype=torch.float16)` are computed in bfloat16 while one
call is not. So a block that is called twice while it trains has another dtype than the same block
alone. After a call under `no_grad`, a later one may lose its gradient. `torch.export` is right.

With Inductor, gradients may be read from memory of another dtype, and beyond its end:

```python
import torch
from torch.nn.functional import mse_loss

block = torch.compiler.nested_compile_region(lambda x: mse_loss(x, -x, reduction="none"))


def program(x):
    with torch.autocast("cpu", dtype=torch.float16):
        first = block(x)  # float32
    return first, block(x)  # float32, float16


x = torch.arange(4.0).half().requires_grad_()
for function in program, torch.compile(program):
    first, second = function(x)
    (first.sum() + second.sum()).backward()
    print(first.dtype, x.grad)
    x.grad = None
```

Right is `0, 16, 32, 48`. Compiled (2.13.0), it was `0, 0.1252, inf, 0`, and something else when run again: the
region's results are float16, and the kernel of its backward pass reads their gradients as float32.

**What the documentation says.** `torch.compiler.nested_compile_region`: "If the compiler detects that
new input conditions (shape, dtype, device, stride, globals etc.) make the cached version invalid to
reuse, it will transparently re-compile the region", "correctness is always preserved".

**What the entry explains.** A program with a nested region that agrees without that region, or shows
what the backend does without autocast too: its calls in the same graph, one after the other.

**Upstream.** Not reported that we know of.

## compile-default-dtype: a context without a dtype keeps the default of its first call

```python
import torch


@torch.compile(backend="aot_eager")
def program(x):
    with torch.autocast("cpu"):
        return x @ x


for dtype in torch.bfloat16, torch.float16:
    torch.set_autocast_dtype("cpu", dtype)
    print(program(torch.ones(2, 2)).dtype)  # bfloat16 twice; right are bfloat16 and float16
```

**What torch does** (2.7.1 to 2.15.0), from stage `aot_eager` on. dynamo guards what autocast is on and in
which dtype, where it is on. A context in the program that names no dtype reads the default when it
is traced, and nothing guards that.

**What the reference does** to imitate it: each call has the default of the first.

**Upstream.** Discussed in [#191110](https://github.com/pytorch/pytorch/pull/191110).

## checkpoint-cast: a checkpoint raises if a weight's cast is in autocast's cache already

```python
import torch
from torch.utils.checkpoint import checkpoint

w = torch.ones(2, 2, requires_grad=True)


@torch.compile(backend="eager")
def f(x):
    return checkpoint(torch.mm, x, w, use_reentrant=False)


with torch.autocast("cpu", dtype=torch.bfloat16):
    torch.mm(torch.ones(2, 2), w)
    y = f(torch.ones(2, 2))
y.sum().backward()
# RuntimeError: aten._to_copy.default invocation index 1 encountered during backward but not found in storage.
```

**What torch does** (2.13.0 to 2.15.0), at stage `eager`. Each op of a compiled checkpoint is counted, and
must come as often when it is computed again. In the forward pass the weight's cast comes from autocast's
cache, where an op before the checkpoint, or an earlier call in the same context, has put it. Computed
again, the checkpoint casts anew. In eager the same checkpoint is right. A selective one
(``create_selective_checkpoint_contexts``) counts its ops there, too, and raises.

**What the entry explains.** A program that raises this error, and agrees when its contexts keep no casts.

**Upstream.** [#193338](https://github.com/pytorch/pytorch/issues/193338).
"""

from __future__ import annotations

from amp_fuzz.backends.imitation import Imitation
from amp_fuzz.cases.build import F16, call, case, under, x
from amp_fuzz.cases.case import Case
from amp_fuzz.cases.program import Autocast, AutocastDType, Checkpoint
from amp_fuzz.upstream.bug import Bug, Example

__all__ = ["BUGS"]


def _as_at_first(case: Case) -> Case:
    """Return the case without changes of the default dtype between its calls."""
    return case.with_plan(
        later=tuple(
            tuple(c for c in around if not isinstance(c, AutocastDType))
            for around in case.plan.later
        )
    )


BUGS = (
    Bug(
        id="compile-region-state",
        what="a nested compiled region is entered under the autocast state of another of its calls",
        why="it is traced once for all calls whose inputs are alike, whatever state is around them",
        torch=">=2.8",
        seen="2.15.0",
        harm="silent dtype",
        backends=("compile[*",),
        kinds=(
            *("dtype", "value", "nonfinite", "range", "precision", "raise"),
            *("grad-dtype", "grad-value", "grad-nonfinite", "grad-missing", "bitwise"),
            "nondeterminism",
        ),
        ops=("*",),
        without="nested-regions",
        examples=(
            Example(
                "compile[aot_eager]",
                case(
                    [x("x0", 2, 2), x("x1", 2, 2)],
                    call("mm", "x0", "x1"),
                    later=((Autocast(enabled=False),),),
                    reuse="region",
                    backward="none",
                ),
                wrong="",
            ),
            Example(
                "compile[aot_eager]",
                case(
                    [x("x0", 2, 2), x("w1", 2, 2)],
                    call("mm", "x0", "w1"),
                    contexts=(F16,),
                    later=((F16,),),
                    reuse="region",
                ),
                wrong="",
            ),
        ),
    ),
    Bug(
        id="compile-default-dtype",
        what="a compiled autocast context that names no dtype keeps the default of its first call",
        why="the default is read when the context is traced, and nothing guards it",
        link="https://github.com/pytorch/pytorch/pull/191110",
        torch=">=2.7",
        seen="2.15.0",
        harm="silent dtype",
        backends=("compile[aot_*", "compile[inductor*"),
        imitation=Imitation(rewrite=_as_at_first, applies=lambda case: _as_at_first(case) != case),
        examples=(
            Example(
                "compile[aot_eager]",
                case(
                    [x("x0", 2, 2), x("x1", 2, 2)],
                    under(Autocast(), call("mm", "x0", "x1")),
                    contexts=(),
                    later=((AutocastDType("float16"),),),
                    backward="none",
                ),
            ),
        ),
    ),
    Bug(
        id="checkpoint-cast",
        what="a compiled or selective checkpoint raises in the backward pass if a weight's cast is in autocast's cache before it",
        why="its ops are counted, and the cast that came from the cache comes anew when it is computed again",
        link="https://github.com/pytorch/pytorch/issues/193338",
        torch=">=2.13",
        seen="2.15.0",
        harm="raises",
        backends=("compile[eager]", "eager-*"),
        kinds=("raise",),
        ops=("*",),
        observed="encountered during backward but not found in storage",
        without="weight-cache",
        examples=(
            Example(
                "compile[eager]",
                case(
                    [x("x0", 2, 2), x("w1", 2, 2)],
                    call("mm", "x0", "w1"),
                    under(Checkpoint(), call("mm", "x0", "w1", to="v1")),
                ),
                wrong="",
            ),
            Example(
                "eager-cpu",
                case(
                    [x("x0", 2, 2), x("w1", 2, 2)],
                    call("mm", "x0", "w1"),
                    under(Checkpoint(selective=True), call("mm", "x0", "w1", to="v1")),
                ),
                wrong="",
            ),
            Example(  # where the scaler refuses a weight afterwards
                "eager-cpu",
                case(
                    [x("x0", 2, 2), x("w1", 2, 2), x("w2", 2, dtype="float16")],
                    call("mm", "x0", "w1"),
                    under(Checkpoint(selective=True), call("mm", "x0", "w1", to="v1")),
                    call("neg", "w2", to="v2"),
                    scaler=True,
                ),
                wrong="",
            ),
        ),
    ),
)
