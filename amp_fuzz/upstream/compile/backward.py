"""Backward passes of compiled programs: their autocast, and their checkpoints.

## compile-backward-autocast: the backward pass takes the forward's autocast

AOTAutograd traces the backward pass while the forward is compiled, under the autocast around the
forward. In eager a backward pass runs under the autocast around its own call: outside the context,
as the documentation of `torch.autocast` recommends, under none. A compiled gradient is computed in
16 bits where eager computes it in float32. That happens to a float32 island in the program
([#179804](https://github.com/pytorch/pytorch/issues/179804),
[#153044](https://github.com/pytorch/pytorch/issues/153044)), and to the gradients of a matrix
product of float32 tensors ([#157104](https://github.com/pytorch/pytorch/issues/157104)).

```python
import torch


def program(x, w):
    with torch.autocast("cpu", enabled=False):
        return torch.mm(x, w)


x, w = torch.full((2, 2), 1.001), torch.ones(2, 2, requires_grad=True)
for function in (program, torch.compile(program, backend="aot_eager")):
    w.grad = None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = function(x, w)
    y.sum().backward()
    print(w.grad[0, 0])  # 2.0020, then 2.0000
```

Since [#156780](https://github.com/pytorch/pytorch/pull/156780) it can be configured.
`torch._functorch.config.backward_pass_autocast` is `"same_as_forward"` by default, `"off"`, or a
list of keyword arguments for contexts. The backends `compile[...]` set it to what the plan does:
then eager means the same, and must agree. `compile[aot_eager+default]` and
`compile[inductor+default]` keep the default. The reference that imitates it runs each backward pass
where the forward stood, and must agree on the whole case.

## compile-backward-untold: before torch 2.9, no backward pass can have another autocast

The same on every rung from aot_eager on: torch 2.7.1 has no `backward_pass_autocast`, so each
compiled backward pass takes the forward's autocast, wherever it runs. The script above prints
2.0020, then 2.0000, on 2.7.1 too. With `torch._functorch.config.backward_pass_autocast = "off"`,
2.9.1 and later print 2.0020 twice.

## compile-checkpoint-zeros: a gradient of zeros is none

Stage eager, without autocast too. All results of a reentrant checkpoint require grad in eager, and
zeros come back to a weight on which none of the used ones depends. Dynamo makes each checkpoint one
that is not reentrant, and the weight has no gradient. If no result depends on a weight (`x <= w`,
`x + x`), eager's `backward()` raises "none of output has requires_grad=True, this checkpoint() is
not necessary". An `out=` into such a result raises that "functions with out=... arguments don't
support automatic differentiation". The compiled program does neither.

```python
def body(w, x):
    return x.mean(), w * x


def program(w, x):
    used, _ = torch.utils.checkpoint.checkpoint(body, w, x, use_reentrant=True)
    return used


w, x = torch.ones(1, 1, requires_grad=True), torch.ones(1, 1)
program(w, x).requires_grad  # True; False when compiled
```
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from amp_fuzz.backends.imitation import Imitation
from amp_fuzz.cases.build import call, case, under, x
from amp_fuzz.cases.case import Case
from amp_fuzz.cases.program import Autocast, Checkpoint
from amp_fuzz.reference.semantics import Semantics
from amp_fuzz.upstream.bug import Bug, Example

__all__ = ["BUGS"]


def _inside(case: Case) -> Case:
    """Return the case with its backward pass where its forward stands."""
    if case.plan.backward == "none":
        return case
    return case.with_plan(backward="inside", backward_context=None)


def _never_reentrant(semantics: Semantics) -> Semantics:
    def checkpoint(function: Any, *args: Any, use_reentrant: bool) -> Any:
        return semantics.checkpoint(function, *args, use_reentrant=False)

    return replace(semantics, checkpoint=checkpoint)


_ISLAND = case(
    [x("x0", 8, 8, domain="uniform"), x("w1", 8, 8)],
    under(
        Autocast(enabled=False),
        call("mm", "x0", "w1"),
        call("mm", "v0", "w1", to="v1"),
    ),
)

BUGS = (
    Bug(
        id="compile-backward-autocast",
        what="the backward pass of a compiled program is traced under the autocast around its forward",
        why="documented: torch._functorch.config.backward_pass_autocast is 'same_as_forward' by default",
        link="https://github.com/pytorch/pytorch/issues/157104",
        torch=">=2.7",
        seen="2.15.0",
        backends=("compile[*+default]",),
        imitation=Imitation(rewrite=_inside),
        examples=(Example("compile[aot_eager+default]", _ISLAND, torch=">=2.9"),),
    ),
    Bug(
        id="compile-backward-untold",
        what="the backward pass of a compiled program is traced under the autocast around its forward, and nothing changes this",
        why="there is no torch._functorch.config.backward_pass_autocast before torch 2.9",
        link="https://github.com/pytorch/pytorch/issues/157104",
        torch=">=2.7,<2.9",
        seen="2.7.1",
        backends=("compile[aot_eager*", "compile[inductor*"),
        imitation=Imitation(rewrite=_inside),
        examples=(Example("compile[aot_eager]", _ISLAND),),
    ),
    Bug(
        id="compile-checkpoint-zeros",
        what="a weight that goes into a reentrant checkpoint, but into none of its used results, has no gradient when compiled",
        why="in eager all its results require grad, and zeros come back; dynamo makes every checkpoint one that is not reentrant",
        torch=">=2.7",
        seen="2.15.0",
        backends=("compile[*",),
        imitation=Imitation(semantics=_never_reentrant),
        examples=(
            Example(
                "compile[eager]",
                case(
                    [x("x0"), x("w1")],
                    under(
                        Checkpoint(use_reentrant=True),
                        call("le", "x0", "w1"),
                        call("add", "x0", "x0", to="v1"),
                    ),
                    contexts=(),
                ),
            ),
            Example(
                "compile[eager]",
                case(
                    [x("x0"), x("w1")],
                    under(
                        Checkpoint(use_reentrant=True),
                        call("le", "x0", "w1"),
                        call("add", "x0", "x0", to="v1"),
                    ),
                    call("neg", "x0", form="out", out="v1", to="v2"),
                    contexts=(),
                ),
            ),
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
                    contexts=(),
                ),
            ),
        ),
    ),
)
