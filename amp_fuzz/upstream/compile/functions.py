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
outputs share memory. AOTAutograd returns their base from the graph and makes them from it outside, as
views. The gradient of a view goes to the base, around the function's own backward; inside the graph
that is used. The base need not be an output: `Scaled.apply(v)` and `Scaled.apply(Scaled.apply(v))`
lose both. It is right where one output alone has that memory, and where the function gives an input of
the program. A gradient reversal or a scaled gradient is silently plain.

**What the documentation says.** A compiled program computes what eager computes
(https://docs.pytorch.org/docs/stable/generated/torch.compile.html).

**What the reference does.** It makes such outputs from their base, too. A function that is given one
tensor twice ends a graph since 2.13 ("duplicate tensor input"); what two graphs make is not told apart
from inputs.

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
comes back is the input itself, with its gradient. Two outputs can be one tensor then: as the forward of
another `autograd.Function`, which runs without grad, the program gives both the gradient of the last.

**What the documentation says.** In `no_grad`, "the result of every computation will have
requires_grad=False" (https://docs.pytorch.org/docs/stable/generated/torch.no_grad.html).

**What the reference does.** It calls the forward without the function where gradients are off.

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

**What the reference does.** It calls the backward of a function under `no_grad`.

**Upstream.** Not reported that we know of.

## compile-function-twice: a function that is given one tensor twice loses a gradient

```python
class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx, g):
        x, y = ctx.saved_tensors
        return g * y, g * x


w = torch.ones(3, requires_grad=True)
for f in Product.apply, torch.compile(lambda x, y: Product.apply(x, y), backend="eager"):
    print(torch.autograd.grad(f(w, w).sum(), w)[0])  # 2, then 1
```

**What torch does** (2.11.0, CPU, without autocast too; not 2.7.1, 2.9.1, 2.13.0 or 2.15.0), from dynamo
on. It gives the function each tensor once, and the gradient of the tensor is that of its last place.
Attention with itself, or a function that squares, trains with a wrong gradient, without an error.

**What the documentation says.** A compiled program computes what eager computes
(https://docs.pytorch.org/docs/stable/generated/torch.compile.html).

**What the reference does.** It detaches such a tensor in all places but the last.

**Upstream.** [#181146](https://github.com/pytorch/pytorch/issues/181146), mended by
[#184281](https://github.com/pytorch/pytorch/pull/184281): such a call ends the graph.

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

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from amp_fuzz.backends.imitation import Imitation
from amp_fuzz.cases.build import call, case, under, x
from amp_fuzz.cases.case import Case
from amp_fuzz.cases.program import NoGrad, statements
from amp_fuzz.catalogue import CATALOGUE
from amp_fuzz.upstream.bug import Bug, Example
from amp_fuzz.upstream.inlining import applied_by, inlined

__all__ = ["BUGS"]


@contextmanager
def _inlined_in_no_grad() -> Iterator[None]:
    """Call a function's forward alone where gradients are off."""

    def apply(own: Any, cls: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            return own(*args, **kwargs)
        return inlined(cls, *args, **kwargs)

    with applied_by(apply):
        yield


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
            Example(  # two outputs are one tensor in the forward of a function, which is without grad
                "compile[eager]",
                case(
                    [x("w0", 2)],
                    call("mul", "w0", "w0"),
                    call("same_function", "v0", to="v1"),
                    call("same_function", "v1", to="v2"),
                    call("exp", "w0", to="v3"),
                    returns=("v1", "v2", "v3"),
                    entry="cast_inputs",
                ),
            ),
        ),
    ),
)
