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

from amp_fuzz.backends.imitation import Imitation
from amp_fuzz.cases.build import call, case, under, x
from amp_fuzz.cases.case import Case
from amp_fuzz.cases.program import Node, NoGrad, Ref, Region, Statement, statements, transform
from amp_fuzz.upstream.bug import Bug, Example

__all__ = ["BUGS"]


def _aliases(node: Statement, returned: tuple[str, ...]) -> bool:
    """Return whether a call gives a value that the program made and returns, and is returned."""
    (given,) = node.args if node.op == "same_function" else (None,)
    if not isinstance(given, Ref) or given.name[0] != "v":
        return False
    return given.name in returned and node.outputs[0] in returned


def _view(case: Case) -> Case:
    def statement(node: Statement) -> tuple[Statement, ...]:
        if not _aliases(node, case.program.outputs):
            return (node,)
        (given,) = node.args
        return (Statement("expand_as", "method", (given, given), (), node.outputs),)

    return case.with_program(body=transform(case.program.body, statement=statement))


def _applies(case: Case) -> bool:
    return any(_aliases(s, case.program.outputs) for s in statements(case.program.body))


def _given(case: Case) -> Case:
    def same(node: Statement) -> tuple[Statement, ...]:
        if node.op != "same_function":
            return (node,)
        return (Statement("contiguous", "method", node.args, (), node.outputs),)

    def region(node: Region, inner: tuple[Node, ...]) -> tuple[Node, ...]:
        inner = transform(inner, statement=same) if node.context == NoGrad() else inner
        return (Region(node.context, inner),)

    return case.with_program(body=transform(case.program.body, region=region))


BUGS = (
    Bug(
        id="compile-given-in-no-grad",
        what="an autograd.Function that gives its input requires grad under no_grad, when it is compiled",
        why="dynamo inlines the forward, and the input itself comes back; no autocast needed",
        torch=">=2.7",
        seen="2.15.0",
        backends=("compile*",),
        ops=("same_function",),
        imitation=Imitation(rewrite=_given, applies=lambda case: _given(case) != case),
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
        imitation=Imitation(rewrite=_view, applies=_applies),
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
        ops=("*_function",),
        kinds=("grad-missing", "grad-value"),
        where="second.*",
        bare="diverges",
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
