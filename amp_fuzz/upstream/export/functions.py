'''An autograd.Function in an exported program.

## export-own-backward: the backward of an autograd.Function is gone

```python
import torch


class Straight(torch.autograd.Function):
    """A rounding that lets gradients pass, as in quantisation-aware training."""

    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, g):
        return g


class Module(torch.nn.Module):
    def forward(self, x):
        return Straight.apply(x)


x = torch.tensor([0.3], requires_grad=True)
print(torch.autograd.grad(Module()(x), x))  # 1
print(torch.autograd.grad(torch.export.export(Module(), (x,)).module()(x), x))  # 0
```

**What torch does** (2.9.1 to 2.15.0, CPU, without autocast too; in 2.7.1 the output has no gradient). The export traces through
`autograd.Function.apply`: the graph has the ops of the forward, and the exported program
differentiates these. The function's own backward is nowhere. A straight-through estimator has
gradients of zero, a scaled or clipped gradient is plain, what `mark_non_differentiable` or
`once_differentiable` forbid is differentiated, and a backward that computes in another dtype than its
forward does not. There is no warning.

**What the documentation says.** An exported program "is a sound representation of the original
program" (https://docs.pytorch.org/docs/stable/export.html). `module()` of it can be trained since
2.5, where the programming model names no exception for custom functions.

**What the reference does.** It calls the forward without the function, so that autograd records its
ops. A function that returns its input leaves one op in the graph, by what held while it was traced: a
view if gradients were on; `detach` if they were off and the input required grad; nothing if it did
not. Gradients are off in a `no_grad` or `inference_mode` region, in the forward of a reentrant
checkpoint, and in a program that is exported without grad. Nothing else changes.

**Upstream.** Not reported for `torch.export` that we know of. For the ONNX exporter, the same
inlining was an option for inference alone (https://github.com/pytorch/pytorch/pull/74765).
'''

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from amp_fuzz.backends.imitation import Imitation
from amp_fuzz.cases.build import BF16, call, case, under, x
from amp_fuzz.cases.case import Case
from amp_fuzz.cases.program import (
    Checkpoint,
    InferenceMode,
    Node,
    NoGrad,
    Region,
    Statement,
    statements,
    uses,
)
from amp_fuzz.catalogue import CATALOGUE
from amp_fuzz.upstream.bug import Bug, Example
from amp_fuzz.upstream.export.programs import names_of, without_grad
from amp_fuzz.upstream.inlining import applied_by, inlined

__all__ = ["BUGS"]


@contextmanager
def _without_functions() -> Iterator[None]:
    """Call the forward of a program's function instead of the function."""

    def apply(_: Any, cls: Any, *args: Any, **kwargs: Any) -> Any:
        made = inlined(cls, *args, **kwargs)
        return _given(made) if _users.get() and any(made is a for a in args) else made

    with applied_by(apply):
        yield


_users = ContextVar("how a user's function is exported: with grad or without", default="")


def _given(made: torch.Tensor) -> torch.Tensor:
    """Return what the trace of a user's function has of an input that a function returns."""
    if not made.requires_grad:
        return made
    if _users.get() == "without grad":
        return made.detach() if made.is_leaf else made  # others have no gradient while traced
    return made.view_as(made) if torch.is_grad_enabled() else made.detach()


def _wrap(program: Any, case: Case) -> Any:
    """Return a user's function that knows how it is exported: `_returning` cannot rewrite it."""
    if names_of(program) is not None:
        return program

    def run(*inputs: Any) -> Any:
        token = _users.set("without grad" if without_grad(case) else "with grad")
        try:
            return program(*inputs)
        finally:
            _users.reset(token)

    return run


def _returning(case: Case) -> Case:
    """Return the case with what a trace has in the place of functions that return their input."""
    trained = (spec.name for spec in case.program.inputs if spec.requires_grad)
    body = _Traced(trained).body(case.program.body, grad=not without_grad(case))
    return case.with_program(body=body)


class _Traced:
    """Follows which values require grad while a program is traced. A view of one that does, does."""

    def __init__(self, trained: Iterable[str]) -> None:
        self.trained = set(trained)

    def body(self, body: tuple[Node, ...], *, grad: bool) -> tuple[Node, ...]:
        """Return a body. grad: whether gradients are on in it."""
        nodes: list[Node] = []
        for node in body:
            if isinstance(node, Region):
                nodes.append(Region(node.context, self.region(node, grad=grad)))
                continue
            made = self.same(node, grad=grad) if node.op == "same_function" else node
            nodes.append(made)
            kept = made.op != "detach" and (grad or CATALOGUE[node.op].view)
            if kept and not self.trained.isdisjoint(uses(node)):
                self.trained.update(node.outputs)
        return tuple(nodes)

    def same(self, node: Statement, *, grad: bool) -> Statement:
        """Return what is in the place of the call of a function that returns its input."""
        if self.trained.isdisjoint(uses(node)):
            return node  # inlined, it is that value
        if grad:
            return Statement("expand_as", "method", node.args * 2, (), node.outputs)
        return Statement("detach", "method", node.args, (), node.outputs)

    def region(self, node: Region, *, grad: bool) -> tuple[Node, ...]:
        """Return the body of a region."""
        reentrant = isinstance(node.context, Checkpoint) and node.context.use_reentrant
        off = reentrant or isinstance(node.context, NoGrad | InferenceMode)
        body = self.body(node.body, grad=grad and not off)
        if reentrant and grad:  # all that such a checkpoint returns requires grad
            self.trained.update(name for s in statements(node.body) for name in s.outputs)
        return body


def _applies(case: Case) -> bool:
    body = list(statements(case.program.body))
    return any(s.op not in CATALOGUE or CATALOGUE[s.op].setup for s in body)


BUGS = (
    Bug(
        id="export-own-backward",
        what="an autograd.Function in an exported program has the gradients of its forward's ops, not those of its backward",
        why="the export traces through it: its backward is not in the graph; no autocast needed",
        torch=">=2.9",
        seen="2.15.0",
        backends=("export",),
        imitation=Imitation(
            around=_without_functions, rewrite=_returning, wrap=_wrap, applies=_applies
        ),
        examples=(
            Example(
                "export",
                case(
                    [x("w0", 2)],
                    call("straight_function", "w0"),
                    call("mul", "v0", "v0", to="v1"),
                    contexts=(),
                ),
            ),
            Example(  # a function that returns its input is a view, and detaches it in no_grad
                "export",
                case(
                    [x("w0", 2)],
                    call("same_function", "w0"),
                    under(NoGrad(), call("same_function", "w0", to="v1")),
                    contexts=(),
                ),
                wrong="",
            ),
            Example(  # and so it does in the forward of a reentrant checkpoint
                "export",
                case(
                    [x("x0", 2, 2), x("w1", 2, 2)],
                    call("straight_function", "w1"),
                    under(
                        BF16,
                        under(
                            Checkpoint(use_reentrant=True),
                            call("mm", "x0", "w1", to="v1"),
                            call("same_function", "w1", to="v2"),
                        ),
                    ),
                    contexts=(),
                ),
                wrong="mm",
            ),
        ),
    ),
)
