"""What a compiled program leaves of autocast's state.

A graph enters a context by one op and leaves it by another. If the second one does not run, the
state of the thread stays as it was inside.

## compile-context-leak: an error leaves autocast on

**What torch does** (2.13.0), from stage `eager` on. A compiled program that raises in an autocast
region leaves autocast on. Its dtype, the nesting depth and the grad mode may stay as well. An
`inference_mode` region inside it raises, for instance: see [compile-inference-tensors].

**What the entry explains.** A state after an error, and no other.

**Upstream.** [#195488](https://github.com/pytorch/pytorch/issues/195488).

## compile-context-fallback: dynamo gives up, and the nesting depth stays

```python
import torch


@torch.compile(backend="aot_eager_decomp_partition")
def f(x, i):
    with torch.autocast("cpu"):
        return torch.take(x, i)


f(torch.ones(2), torch.tensor(0))
print(torch.autocast_increment_nesting())  # 2; right is 1
```

**What torch does** (2.13.0), from stage `aot_eager_decomp_partition` on. The decomposition of
`take` looks at values, which fake tensors do not have. dynamo catches that error and runs the
program in eager, but the op of its graph that enters the context has run. autocast clears the
weight cache when the outermost context ends, and now none is the outermost.

**Upstream.** [#195488](https://github.com/pytorch/pytorch/issues/195488).

## compile-context-stopped: a checkpoint stops before a region ends, and the nesting depth stays

```python
import torch
from torch.utils.checkpoint import checkpoint


@torch.compile(backend="eager")
def f(w):
    with torch.autocast("cpu"):
        return torch.mm(w, w)


checkpoint(f, torch.ones(2, 2, requires_grad=True), use_reentrant=False).sum().backward()
print(torch.autocast_increment_nesting())  # 2; right is 1
```

**What torch does** (2.7.1 to 2.15.0), at stage `eager`. A checkpoint that is not reentrant computes
again until the last saved tensor is there, and stops the function by an exception. The graph's op that
leaves the region does not run. The checkpoint restores autocast, its dtype and its cache, but not the
nesting depth: the weight cache is not cleared any more when the outermost context ends. From stage
`aot_eager` on a graph saves its tensors at its end.

**What the entry explains.** A nesting depth after a case that is right with
`set_checkpoint_early_stop(False)`.

**Upstream.** [#195488](https://github.com/pytorch/pytorch/issues/195488), for any exception.

## compile-context-resume: a second graph break in nested contexts is a KeyError

```python
import torch


@torch.compile(backend="eager")
def f(x):
    with torch.autocast("cpu", torch.bfloat16):
        torch._dynamo.graph_break()
        y = x.sin()
        with torch.autocast("cpu", enabled=False):
            with torch.autocast("cpu", torch.bfloat16):
                torch._dynamo.graph_break()
                return y.cos()


f(torch.ones(2))  # torch 2.7.1: InternalTorchDynamoError: KeyError: 598
```

**What torch does** (2.7.1), from stage `eager` on. dynamo resumes after a graph break in a function
that enters the contexts again. If that function breaks too, two contexts further in, an offset of
its bytecode is missing. 2.9.1 and later compile it.

**Upstream.** Not reported that we know of.
"""

from __future__ import annotations

from amp_fuzz.cases.build import BF16, call, case, under, x
from amp_fuzz.cases.program import Autocast, InferenceMode
from amp_fuzz.upstream.bug import Bug, Example

__all__ = ["BUGS"]

BUGS = (
    Bug(
        id="compile-context-resume",
        what="a second graph break, in contexts that are nested in those of the first, is an internal error of dynamo",
        why="an offset is missing in the bytecode of the function in which dynamo resumes",
        torch=">=2.7,<2.9",
        seen="2.7.1",
        harm="raises",
        backends=("compile[*",),
        kinds=("raise",),
        ops=("*",),
        expected="^no error$",
        observed=r"^InternalTorchDynamoError: KeyError: \d+$",
        examples=(
            Example(
                "compile[eager]",
                case(
                    [x("x0", 2)],
                    call("nanquantile", "x0", 0.5, interpolation="nearest"),
                    under(
                        Autocast(enabled=False),
                        under(
                            BF16, call("nanquantile", "x0", 0.5, interpolation="nearest", to="v1")
                        ),
                    ),
                    backward="none",
                ),
            ),
        ),
    ),
    Bug(
        id="compile-context-leak",
        what="a compiled program that raises in an autocast region leaves autocast on",
        why="the graph enters the context by one op and leaves it by another, which an error skips",
        link="https://github.com/pytorch/pytorch/issues/195488",
        torch=">=2.7",
        seen="2.15.0",
        harm="state",
        backends=("compile[*",),
        kinds=("state",),
        ops=("*",),
        where="after an error",
        observed=r"^(autocast on \w+|its dtype on \w+|weight cache|nesting|grad mode): \S+ became \S+$",
        examples=(
            Example(
                "compile[aot_eager]",
                case(
                    [x("x0", 2, 2)],
                    under(BF16, under(InferenceMode(), call("unsqueeze", "x0", -1, form="method"))),
                    backward="none",
                ),
            ),
        ),
    ),
    Bug(
        id="compile-context-stopped",
        what="a checkpoint that is not reentrant, around a compiled program with an autocast region, leaves the nesting depth",
        why="it stops the recomputation by an exception, which skips the graph's op that leaves the region",
        link="https://github.com/pytorch/pytorch/issues/195488",
        torch=">=2.7",
        seen="2.15.0",
        harm="state",
        backends=("compile[eager]",),
        kinds=("state",),
        ops=("*",),
        where="after the case",
        observed=r"^nesting: 0 became \d+$",
        without="stopped-checkpoints",
        examples=(
            Example(
                "compile[eager]",
                case(
                    [x("x0", 2, 2), x("w1", 2, 2)],
                    under(BF16, call("mm", "x0", "w1")),
                    contexts=(),
                    checkpoint="non_reentrant",
                ),
                wrong="",
            ),
        ),
    ),
    Bug(
        id="compile-context-fallback",
        what="a program that dynamo gives up on in an autocast region, and runs in eager, leaves the nesting depth",
        why="the graph's op that enters the context has run when an op that looks at values ends the compilation",
        link="https://github.com/pytorch/pytorch/issues/195488",
        torch=">=2.7",
        seen="2.15.0",
        harm="state",
        backends=("compile[aot_*", "compile[inductor*"),
        kinds=("state",),
        ops=("*",),
        where="after the case",
        observed=r"^nesting: 0 became \d$",
        examples=(
            Example(
                "compile[aot_eager_decomp_partition]",
                case(
                    [x("x0"), x("x1", dtype="int64", domain="zeros")],
                    under(BF16, call("take", "x0", "x1")),
                    contexts=(),
                    backward="none",
                ),
            ),
        ),
    ),
)
