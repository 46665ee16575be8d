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
"""

from __future__ import annotations

from amp_fuzz.backends.imitation import Imitation
from amp_fuzz.cases.build import BF16, call, case, under, x
from amp_fuzz.cases.case import Case, Entry
from amp_fuzz.cases.program import Autocast, Checkpoint, Node, NoGrad, Region
from amp_fuzz.upstream.bug import Bug, Example

__all__ = ["BUGS"]


def _as_exported(case: Case) -> Case:
    body = _Modes().body(case.program.body, forgets=_without_grad(case))
    return case.with_program(body=body)


_FUNCTIONS: tuple[Entry, ...] = ("custom_fwd", "cast_inputs", "setup_context")


def _without_grad(case: Case) -> bool:
    """Return whether gradients are off at the first call of a case's program, which is exported.

    They are in the forward of an autograd.Function. A pass that is interrupted calls the program
    itself.
    """
    inside = case.plan.entry in _FUNCTIONS or case.plan.checkpoint == "reentrant"
    return inside and not case.plan.interrupted


class _Modes:
    """Gives a body the grad modes of an export, which has a mode for what is between two switches.

    A switch in an autocast region is forgotten, and ends the mode that was. In a program that is
    exported without grad there are no switches.
    """

    def __init__(self) -> None:
        self.off = False

    def body(self, body: tuple[Node, ...], *, forgets: bool, grad: bool = True) -> tuple[Node, ...]:
        """Return a body.

        forgets: whether switches in it are forgotten. grad: whether it is meant to have gradients.
        """
        nodes: list[Node] = []
        for node in body:
            if isinstance(node, Region):
                nodes += self.region(node, forgets=forgets, grad=grad)
            else:
                nodes.append(Region(NoGrad(), (node,)) if self.off else node)
        return tuple(nodes)

    def region(self, node: Region, *, forgets: bool, grad: bool) -> tuple[Node, ...]:
        """Return what is in the place of a region."""
        if isinstance(node.context, NoGrad):
            self.off = not forgets
            inner = self.body(node.body, forgets=forgets, grad=False)
            self.off = not (grad or forgets)
            return inner
        off = self.off
        forgets |= isinstance(node.context, Autocast)
        inner = self.body(node.body, forgets=forgets, grad=grad)
        if off and isinstance(node.context, Checkpoint):
            return inner  # it saves nothing
        return (Region(node.context, inner),)


BUGS = (
    Bug(
        id="export-no-grad",
        what="a no_grad region inside an autocast region is forgotten when the program is exported",
        why="the autocast region becomes a submodule of its own, and what switches gradients in it is left out; no autocast needed, enabled=False too",
        torch=">=2.7",
        seen="2.15.0",
        harm="silent gradient",
        backends=("export", "export[strict]"),
        imitation=Imitation(rewrite=_as_exported),
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
