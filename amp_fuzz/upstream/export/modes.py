"""Grad modes, inference mode and checkpoints in an exported program.

Seen on torch 2.13, CPU, without autocast too, but where an autocast region is a part of it. None
was reported upstream that we know of. The reference does what an export does: 2,200 programs of
nested `no_grad`, `inference_mode`, autocast and checkpoints at random, more than half of them
wrong, agreed with it.

## export-no-grad: a region that is forgotten

```python
import torch


class Module(torch.nn.Module):
    def forward(self, w):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with torch.no_grad():
                return w * 2


w = torch.ones(2, requires_grad=True)
print(Module()(w).requires_grad)  # False
print(torch.export.export(Module(), (w,)).module()(w).requires_grad)  # True
```

The graph is cut where a grad mode is set, and a part that begins with `no_grad` becomes a
submodule without it (`wrap_with_set_grad_enabled`). A part that begins in an autocast region
begins with `_enter_autocast` instead, and counts as one with gradients
(`torch._export.passes.replace_set_grad_with_hop_pass`): its body, and what comes after it up to
the next cut, even where a `no_grad` region stands around the autocast region. `enabled=False`,
other calls before and after, and two regions change nothing. Gradients silently go where eager
stops them.

A `no_grad` region that is not in an autocast region is kept, and so is one around an autocast
region with none in it. A program that is exported without grad forgets all of them. The forward
of an `autograd.Function` is exported so, and runs again with grad to compute its gradient.

## export-inference-mode: the same of inference mode

`torch.inference_mode()` in the program leaves nothing in the graph. The results of its body have
gradients, and may be written and saved where eager refuses. While tracing it is on, though: a
`no_grad` region in it ends with the grad mode off, for what comes after it.

## export-checkpoint: gradients that are gone

```python
class Checkpointed(torch.nn.Module):
    def forward(self, w):
        y = torch.utils.checkpoint.checkpoint(torch.sin, w, use_reentrant=True)
        return y, w * 2


w = torch.ones(2, requires_grad=True)
print([y.requires_grad for y in Checkpointed()(w)])  # True, True
exported = torch.export.export(Checkpointed(), (w,)).module()
print([y.requires_grad for y in exported(w)])  # False, False
```

The export traces through the checkpoint's `autograd.Function`, whose forward runs under
`no_grad`. The body is left, and no gradient comes of it. The graph does not hold where the
function goes back to the grad mode of before: later values have no gradient either, up to the
next `no_grad` region or the end of one. An input that the body returns unchanged is a view, which
says that it needs a gradient and has none: a backward pass from it raises.

A checkpoint that is not reentrant is right, but not inside another one. It saves values through
the outer one's hook, which switches gradients off and back, and the export keeps the first
switch. All later values have no gradient. The same happens where an `autograd.Function` in a
checkpoint saves a tensor (`ctx.save_for_backward`). In an autocast region grad modes are forgotten
([export-no-grad]), and the gradients are there.

## export-grad-mode-left: an error leaves gradients off

`wrap_with_set_grad_enabled`, which runs a `no_grad` region of an exported program, goes back to
the grad mode of before only where nothing is raised. An error elsewhere that leaves gradients off
is reported.

```python
class Gather(torch.nn.Module):
    def forward(self, x, i):
        with torch.no_grad():
            return x.gather(0, i)


exported = torch.export.export(Gather(), (torch.ones(2), torch.tensor([0, 1]))).module()
try:
    exported(torch.ones(2), torch.tensor([5, 5]))
except RuntimeError:
    print(torch.is_grad_enabled())  # False
```
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from amp_fuzz.backends.imitation import Imitation
from amp_fuzz.cases.build import BF16, call, case, under, x
from amp_fuzz.cases.case import Case
from amp_fuzz.cases.program import (
    Autocast,
    Checkpoint,
    Context,
    InferenceMode,
    Node,
    NoGrad,
    Ref,
    Region,
    Statement,
    uses,
)
from amp_fuzz.upstream.bug import Bug, Example
from amp_fuzz.upstream.export.programs import names_of, without_grad

__all__ = ["BUGS", "RULES", "imitation"]

RULES = frozenset({"export-checkpoint", "export-inference-mode", "export-no-grad"})
"""The bugs that change grad modes. Several of them are one imitation."""

# The functions of the catalogue that call `ctx.save_for_backward`.
_SAVING = frozenset(
    f"{name}_function"
    for name in ("exp", "freed", "linear", "matmul", "mul", "once", "sort", "unasked")
)
# Of these, two save each of their first two arguments for the gradient of the other.
_EACH_FOR_THE_OTHER = frozenset({"freed_function", "linear_function"})


def imitation(names: frozenset[str]) -> Imitation:
    """Return what the reference does otherwise while it imitates these bugs."""

    def rewrite(case: Case) -> Case:
        weights = (spec.name for spec in case.program.inputs if spec.requires_grad)
        body = _Modes(names, weights).body(case.program.body, inside=without_grad(case))
        return case.with_program(body=body)

    if "export-checkpoint" in names:
        return Imitation(rewrite=rewrite, wrap=_traced)
    return Imitation(rewrite=rewrite)


def _traced(program: Any, case: Case) -> Any:
    """Return a program that has, for a reentrant checkpoint, what a trace has of it.

    That is its function, and what that returns as it was given it is a view (`_Modes`). A
    checkpoint of the plan is left as it is: the names of the program's source are its own.
    """
    names = names_of(program)
    if names is not None:
        names["checkpoint"] = partial(_through, names["checkpoint"])
    return program


def _through(honest: Any, function: Any, *args: Any, use_reentrant: bool) -> Any:
    if not use_reentrant:
        return honest(function, *args, use_reentrant=False)
    outputs = function(*args)
    with torch.no_grad():
        return tuple(o.view_as(o) if any(o is a for a in args) else o for o in outputs)


class _Modes:
    """Gives a body the grad modes of an export, which has a mode for what is between two switches.

    The body of a reentrant checkpoint (`_traced`) is without grad, and so is what comes
    after it, up to the next switch: the checkpoint goes back to its grad mode where an export does
    not look. So is the body of a checkpoint of the other kind in one of that kind: what it saves
    goes through the outer one's hook, which switches. So does what a function in it saves, and what
    comes after that function is without grad. A switch in an autocast region is forgotten,
    and ends the mode that was; in a program that is exported without grad there are none. Of
    inference mode an export knows nothing.
    """

    def __init__(self, names: frozenset[str], trained: Iterable[str]) -> None:
        self.names, self.off = names, False
        self.trained = set(trained)

    def body(
        self,
        body: tuple[Node, ...],
        *,
        inside: bool = False,
        grad: bool = True,
        again: bool = False,
    ) -> tuple[Node, ...]:
        """Return a body.

        inside: whether switches are forgotten in it. grad: whether it is meant to have gradients.
        again: whether it is in a checkpoint that is not reentrant.
        """
        nodes: list[Node] = []
        for node in body:
            if isinstance(node, Region):
                nodes += self.region(node.context, node.body, inside, grad, again)
                continue
            nodes.append(Region(NoGrad(), (node,)) if self.off else node)
            if grad and not self.trained.isdisjoint(uses(node)):
                if again and self.saves(node) and "export-checkpoint" in self.names:
                    self.off = not (inside and "export-no-grad" in self.names)
                self.trained.update(node.outputs)
        return tuple(nodes)

    def saves(self, node: Statement) -> bool:
        """Return whether a call of a function that needs a gradient saves a tensor."""
        if node.op in _EACH_FOR_THE_OTHER:
            return any(isinstance(a, Ref) and a.name in self.trained for a in node.args[:2])
        return node.op in _SAVING

    def region(
        self, context: Context, body: tuple[Node, ...], inside: bool, grad: bool, again: bool
    ) -> tuple[Node, ...]:
        """Return what is in the place of a region."""
        forgets = inside and "export-no-grad" in self.names
        if isinstance(context, NoGrad):
            if inside and not forgets:
                return (Region(context, self.body(body, inside=True, grad=False, again=again)),)
            self.off = not forgets
            inner = self.body(body, inside=inside, grad=False, again=again)
            self.off = not (grad or forgets)
            return inner
        if isinstance(context, InferenceMode) and "export-inference-mode" in self.names:
            return self.body(body, inside=inside, grad=False, again=again)
        inside |= isinstance(context, Autocast)
        reentrant = isinstance(context, Checkpoint) and context.use_reentrant
        switches = "export-checkpoint" in self.names and isinstance(context, Checkpoint)
        if switches and (reentrant or (again and grad)):
            self.off = not forgets
        again |= isinstance(context, Checkpoint) and not reentrant
        grad = grad and not (switches and reentrant)
        off = self.off
        inner = self.body(body, inside=inside, grad=grad, again=again)
        if switches and reentrant:
            self.off = not forgets
        elif off and isinstance(context, Checkpoint):
            return inner  # it saves nothing
        return (Region(context, inner),)


BUGS = (
    Bug(
        id="export-no-grad",
        what="a no_grad region inside an autocast region is forgotten when the program is exported",
        why="the autocast region becomes a submodule of its own, and what switches gradients in it is left out; no autocast needed, enabled=False too",
        torch=">=2.7",
        seen="2.15.0",
        backends=("export",),
        imitation=imitation(frozenset({"export-no-grad"})),
        examples=(
            Example(
                "export",
                case(
                    [x("x0", 2), x("w1", 2)],
                    under(BF16, under(NoGrad(), call("mul", "x0", "w1"))),
                    call("exp", "w1", to="v1"),
                    contexts=(),
                ),
            ),
            *(
                Example(  # the forward of an autograd.Function is exported without grad
                    "export",
                    case(
                        [x("x0", 2), x("w1", 2)],
                        under(NoGrad(), call("mul", "x0", "w1")),
                        call("exp", "w1", to="v1"),
                        contexts=(),
                        entry=entry,
                    ),
                )
                for entry in ("custom_fwd", "cast_inputs")
            ),
        ),
    ),
)
