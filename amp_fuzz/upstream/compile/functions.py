"""An autograd.Function in a compiled program.

## compile-alias-backward: the backward of a function that gives its input is gone

```python
import torch


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, g):
        return g * 0.5


def program(w):
    v = w * 2
    return v, Scaled.apply(v)


w = torch.ones((), requires_grad=True)
print(torch.autograd.grad(program(w)[1], w))  # 1
print(torch.autograd.grad(torch.compile(program, backend="aot_eager")(w)[1], w))  # 2
```

**What torch does** (2.7.1 to 2.15.0, CPU, without autocast too; dynamo alone is right). The two
outputs share memory. AOTAutograd returns one of them from the graph and makes the other from it
outside, as a view. The gradient of the view goes to the first output, around the function's own
backward. It is right where only one of the two is returned, and where the function gives an input of
the program. A gradient reversal or a scaled gradient is silently plain.

**What the documentation says.** A compiled program computes what eager computes
(https://docs.pytorch.org/docs/stable/generated/torch.compile.html).

**What the reference does.** It takes the call of such a function for a view.

**Upstream.** Not reported that we know of.

## compile-given-in-no-grad: a gradient that no_grad takes away

```python
class Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, g):
        return g


def program(w):
    with torch.no_grad():
        return Same.apply(w)


w = torch.ones((), requires_grad=True)
print(program(w).requires_grad)  # False
print(torch.compile(program, backend="eager")(w) is w)  # True, and it requires grad
```

**What torch does** (2.7.1 to 2.15.0, CPU, without autocast too), from dynamo on. In eager, a function
called under `no_grad` returns a tensor that requires no grad. Dynamo inlines its forward, and what
comes back is the input itself, with its gradient.

**What the documentation says.** In `no_grad`, "the result of every computation will have
requires_grad=False" (https://docs.pytorch.org/docs/stable/generated/torch.no_grad.html).

**What the reference does.** It takes the call for one that returns its argument. (A strided argument
would be copied, and is not explained.)

**Upstream.** Not reported that we know of.

## compile-function-double: the second derivative of a function is gone

```python
class Exp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0]


w = torch.ones(3, requires_grad=True)
for f in Exp.apply, torch.compile(lambda w: Exp.apply(w), backend="eager"):
    (first,) = torch.autograd.grad(f(w).sum(), w, create_graph=True)
    print(first.requires_grad)  # True, then False
```

**What torch does** (2.7.1 to 2.15.0, CPU, without autocast too), on dynamo alone. What the backward of
a function computes has no graph. A gradient penalty over it loses that part, without an error.
From `aot_eager` on, torch refuses: "does not currently support double backward".

**What the documentation says.** A compiled program computes what eager computes, or is refused.

**How it is told.** A second derivative that is missing or another number, without autocast too, in a
program with such a function.

**Upstream.** Not reported that we know of.

## compile-freed-state: what a backward frees is there again

```python
class Freed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.gain = 2.0
        return x * 2

    @staticmethod
    def backward(ctx, g):
        gain, ctx.gain = ctx.gain, None
        return g * gain


w = torch.ones((), requires_grad=True)
y = torch.compile(Freed.apply, backend="aot_eager")(w)
y.backward(retain_graph=True)
y.backward()  # raises TypeError without torch.compile
```

**What torch does** (2.13, CPU, without autocast too). The backward is traced once, and what it
assigns to ``ctx`` is no part of the graph. A second backward pass over a retained graph, which raises
in eager (as in Transformer Engine since its pull request 2967), returns gradients when compiled.

**What the documentation says.** A compiled program computes what eager computes.

**What the reference does.** It raises. The entry is listed.

**Upstream.** Not reported that we know of.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from amp_fuzz.backends.imitation import Imitation
from amp_fuzz.cases.build import call, case, under, x
from amp_fuzz.cases.case import Case
from amp_fuzz.cases.program import NoGrad, statements
from amp_fuzz.catalogue import CATALOGUE
from amp_fuzz.patching import patched
from amp_fuzz.upstream.bug import Bug, Example
from amp_fuzz.upstream.inlining import applied_by, inlined, of_a_program

__all__ = ["BUGS"]


def _regenerating(program: Any, case: Case) -> Any:
    """Return a program whose outputs AOTAutograd makes outside of its graph, if it does so."""

    def run(*inputs: Any) -> Any:
        outputs = program(*inputs)
        one = isinstance(outputs, torch.Tensor)
        given = (outputs,) if one else outputs
        tensors = isinstance(given, tuple) and all(isinstance(o, torch.Tensor) for o in given)
        if not (tensors and torch.is_grad_enabled()):
            return outputs
        made = tuple(_regenerated(o, given, inputs) for o in given)
        return made[0] if one else made

    return run


def _regenerated(output: torch.Tensor, outputs: Sequence[Any], inputs: Sequence[Any]) -> Any:
    """Return an output as a view of what it is made of again, or as it is.

    That is an input of the program of which it is a view, unless a function gives it, or, of
    several outputs that share memory, their base.
    """
    if any(output is x for x in inputs) or not output.requires_grad:
        return output
    base = next((x for x in inputs if _shares(x, output)), None)
    if base is not None:
        given = isinstance(output.grad_fn, torch.autograd.function.BackwardCFunction)
        base = None if given else base
    elif sum(_shares(o, output) for o in outputs) > 1:
        base = output._base
    if base is None or not base.requires_grad:
        return output
    return base.as_strided(output.size(), output.stride(), output.storage_offset())


def _shares(one: Any, other: torch.Tensor) -> bool:
    """Return whether something is a tensor with the memory of another one."""
    if not isinstance(one, torch.Tensor):
        return False
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


@contextmanager
def _inlined_in_no_grad() -> Iterator[None]:
    """Call a function's forward alone where gradients are off."""

    def apply(own: Any, cls: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            return own(*args, **kwargs)
        return inlined(cls, *args, **kwargs)

    with applied_by(apply):
        yield


def _backward_once() -> AbstractContextManager[None]:
    """Let what a function's backward computes have no graph."""
    kind = torch.autograd.function.BackwardCFunction
    honest = kind.apply

    def apply(self: Any, *args: Any) -> Any:
        if not of_a_program(self._forward_cls):
            return honest(self, *args)
        with torch.no_grad():
            return honest(self, *args)

    return patched(kind, "apply", apply)


def _has_function(case: Case) -> bool:
    ops = [s.op for s in statements(case.program.body)]
    return any(op not in CATALOGUE or CATALOGUE[op].setup for op in ops)


BUGS = (
    Bug(
        id="compile-given-in-no-grad",
        what="an autograd.Function that gives its input requires grad under no_grad, when it is compiled",
        why="dynamo inlines the forward, and the input itself comes back; no autocast needed",
        torch=">=2.7",
        seen="2.15.0",
        backends=("compile*",),
        ops=("same_function",),
        imitation=Imitation(around=_inlined_in_no_grad, applies=_has_function),
        examples=(
            Example(
                "compile[aot_eager]",
                case(
                    [x("w0", 2), x("w1", 2)],
                    call("mul", "w1", "w1"),
                    under(NoGrad(), call("same_function", "w0", to="v1")),
                    contexts=(),
                ),
                wrong="mul",
            ),
        ),
    ),
    Bug(
        id="compile-alias-backward",
        what="an autograd.Function that gives its input loses its backward if a compiled program returns both",
        why="AOTAutograd makes one of two outputs that share memory from the other, outside the graph; no autocast needed",
        torch=">=2.7",
        seen="2.15.0",
        backends=("compile*", "!compile[eager]"),
        ops=("same_function",),
        imitation=Imitation(wrap=_regenerating, applies=_has_function),
        examples=(
            Example(
                "compile[aot_eager]",
                case(
                    [x("w0", 2)],
                    call("mul", "w0", "w0"),
                    call("same_function", "v0", to="v1"),
                    contexts=(),
                ),
                wrong="mul",
            ),
        ),
    ),
    Bug(
        id="compile-function-double",
        what="second derivatives through an autograd.Function are missing when dynamo alone compiles it",
        why="what its backward computes has no graph; no autocast needed",
        torch=">=2.7",
        seen="2.15.0",
        backends=("compile[eager]",),
        imitation=Imitation(
            around=_backward_once,
            applies=lambda case: case.plan.second == "double" and _has_function(case),
        ),
        examples=(
            Example(
                "compile[eager]",
                case(
                    [x("w0", 2)],
                    call("exp_function", "w0"),
                    contexts=(),
                    second="double",
                ),
                wrong="",
            ),
        ),
    ),
    Bug(
        id="compile-freed-state",
        what="a second backward pass of an autograd.Function that frees its state raises in eager, not when compiled",
        why="the backward is traced once, and what it assigns to ctx is no part of the graph; no autocast needed",
        torch=">=2.7",
        seen="2.15.0",
        backends=("compile*",),
        ops=("freed_function",),
        kinds=("raise",),
        expected="AttributeError: 'NoneType' object has no attribute 'gain'",
        observed="no error",
        examples=(
            Example(
                "compile[aot_eager]",
                case(
                    [x("x0", 2, 2), x("w1", 2, 2)],
                    call("freed_function", "x0", "w1", None, 1.0),
                    contexts=(),
                    second="retain",
                ),
                wrong="",
            ),
        ),
    ),
)
