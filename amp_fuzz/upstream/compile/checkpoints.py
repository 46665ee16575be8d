"""Checkpoints that do not compile, or that have nothing to compute again.

All of it shows without autocast too.

## compile-checkpoint-random: a random op in a checkpoint

**What torch does** (2.13.0), from stage `aot_eager` on. It raises "Activation checkpoint
rematerialization in `forward-loss-backward` graph does not support RNG ops in recompute regions":
a limitation that the error states.

**Upstream.** [#168082](https://github.com/pytorch/pytorch/pull/168082).

## compile-checkpoint-cse: a checkpoint computes again what stands before it

```python
import torch
from torch.utils.checkpoint import checkpoint


@torch.compile(backend="aot_eager")
def f(x, w):
    first = torch.topk(x, 1)[0]
    return first, checkpoint(lambda x, w: torch.topk(x, 1)[0] * w, x, w, use_reentrant=False)


f(torch.ones(2), torch.ones(1, requires_grad=True))
# BackendCompilerFailed: AOT Autograd failed to partition the joint forward-backward graph
```

**What torch does** (2.13.0), from stage `aot_eager` on. AOTAutograd merges common subexpressions
before it partitions the graph. Let an op with two results (`topk`, `linalg.lu_factor`) stand
before a checkpoint and, on the same inputs, inside it. The one inside becomes the one before,
which the backward pass does not compute again. But its results, as the checkpoint takes them out,
are marked to be computed again.

**What the entry explains.** A program with this error that agrees if AOTAutograd does not merge
(`torch._functorch.config.cse = False`).

**Upstream.** Not reported that we know of.

## compile-checkpoint-dead: a checkpoint with nothing to do

```python
import torch
from torch.utils.checkpoint import checkpoint


def body(x, w):
    return w * w, x + x


@torch.compile(backend="eager")
def f(x, w):
    return checkpoint(body, x, w, use_reentrant=True)[1]


x, w = torch.ones(1), torch.ones(1, requires_grad=True)
checkpoint(f, x, w, use_reentrant=True).backward()
# RuntimeError: none of output has requires_grad=True, this checkpoint() is not necessary
```

**What torch does** (2.13.0), from stage `eager` on. All results of a reentrant checkpoint require
grad. If the program uses only those that do not depend on a weight, dynamo drops the others, and
the checkpoint that it makes has no result that requires grad. That one raises in the backward
pass. See [compile-checkpoint-zeros] for the checkpoints that dynamo makes not reentrant.

**Upstream.** Not reported that we know of.
"""

from __future__ import annotations

from amp_fuzz.cases.build import call, case, under, x
from amp_fuzz.cases.program import Checkpoint
from amp_fuzz.upstream.bug import Bug, Example

__all__ = ["BUGS"]

BUGS = (
    Bug(
        id="compile-checkpoint-random",
        what="a checkpoint with a random op in it does not compile",
        why="the graph that recomputes cannot hold random ops, and says so",
        link="https://github.com/pytorch/pytorch/pull/168082",
        torch=">=2.13",
        seen="2.15.0",
        backends=("compile[aot_*", "compile[inductor*"),
        kinds=("raise",),
        ops=("*",),
        expected="^no error$",
        observed="Activation checkpoint rematerialization in .* does not support RNG ops in recompute regions",
        examples=(
            Example(
                "compile[aot_eager]",
                case(
                    [x("x0", 4)],
                    under(
                        Checkpoint(use_reentrant=True), call("dropout", "x0", p=0.5, training=True)
                    ),
                ),
            ),
        ),
    ),
    Bug(
        id="compile-checkpoint-cse",
        what="an op with two results that a checkpoint makes again of what it was made of before does not compile",
        why="common subexpressions are one op, which is saved, but the results that are taken out of it are to be made again",
        torch=">=2.7,<2.15",
        seen="2.13.0",
        backends=("compile[aot_*", "compile[inductor*"),
        kinds=("raise",),
        ops=("*",),
        expected="^no error$",
        # Until 2.9 it then draws the graph, for which most lack the package.
        observed=(
            "^BackendCompilerFailed: .*(AOT Autograd failed to partition the joint forward-backward "
            "graph|No module named 'pydot')"
        ),
        without="common-subexpressions",
        examples=(
            Example(
                "compile[aot_eager]",
                case(
                    [x("x0", 3), x("w1", 1)],
                    call("topk", "x0", 1, to="v0 v1"),
                    under(
                        Checkpoint(),
                        call("topk", "x0", 1, to="v2 v3"),
                        call("mul", "v2", "w1", to="v4"),
                    ),
                    contexts=(),
                ),
            ),
        ),
    ),
    Bug(
        id="compile-checkpoint-dead",
        what="a reentrant checkpoint of which only results without grad are used raises in its backward pass",
        why="dynamo makes a checkpoint of what is used of the function, and that one has nothing to do",
        torch=">=2.7",
        seen="2.15.0",
        backends=("compile[*",),
        kinds=("raise",),
        ops=("*",),
        expected="^no error$",
        observed=r"^RuntimeError: none of output has requires_grad=True, this checkpoint\(\) is not necessary",
        examples=(
            Example(
                "compile[eager]",
                case(
                    [x("x0"), x("w1")],
                    under(
                        Checkpoint(use_reentrant=True),
                        call("logaddexp", "w1", "w1"),
                        call("add", "x0", "x0", to="v1"),
                    ),
                    returns=("v1",),
                    checkpoint="reentrant",
                    contexts=(),
                ),
            ),
        ),
    ),
)
