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

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from amp_fuzz.backends.imitation import Imitation
from amp_fuzz.cases.build import call, case, under, x
from amp_fuzz.cases.case import Case
from amp_fuzz.cases.program import Checkpoint, NoGrad, statements
from amp_fuzz.catalogue import CATALOGUE
from amp_fuzz.patching import patched
from amp_fuzz.upstream.bug import Bug, Example
from amp_fuzz.upstream.inlining import applied_by, inlined, of_a_program
from amp_fuzz.versions import holds

__all__ = ["BUGS"]


def _regenerating(program: Any, case: Case) -> Any:
    """Return a program whose outputs AOTAutograd makes outside of its graphs, if it does so."""

    def run(*inputs: Any) -> Any:
        graphs = _Graphs()
        token = _graphs.set(graphs)
        try:
            outputs = program(*inputs)
        finally:
            _graphs.reset(token)
        one = isinstance(outputs, torch.Tensor)
        given = (outputs,) if one else outputs
        tensors = isinstance(given, tuple) and all(isinstance(o, torch.Tensor) for o in given)
        if not (tensors and torch.is_grad_enabled()):
            return outputs
        made = tuple(_regenerated(o, given, inputs, graphs) for o in given)
        return made[0] if one else made

    return run


class _Graphs:
    """Knows which values dynamo makes in one graph.

    Since 2.13 it leaves a function that is given a tensor twice to eager: a graph ends before it,
    and another begins after it.
    """

    def __init__(self) -> None:
        self.ends: list[int] = []

    def call(self, own: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function."""
        given = [a for a in args if isinstance(a, torch.Tensor)]
        twice = len({id(a) for a in given}) < len(given)
        needed = torch.is_grad_enabled() and any(a.requires_grad for a in given)
        if not (twice and needed and holds(">=2.13")):
            return own(*args, **kwargs)
        self.ends.append(torch._C._autograd._get_sequence_nr())
        made = own(*args, **kwargs)
        self.ends.append(torch._C._autograd._get_sequence_nr())
        return made

    def number(self, value: torch.Tensor) -> int:
        """Return the number of the graph that makes a value."""
        node: Any = value.grad_fn
        return bisect_right(self.ends, -1 if node is None else node._sequence_nr())


_graphs: ContextVar[_Graphs | None] = ContextVar("the graphs of a program that runs", default=None)


def _in_graphs() -> AbstractContextManager[None]:
    """Let a program's functions end graphs."""

    def apply(own: Any, _: Any, *args: Any, **kwargs: Any) -> Any:
        graphs = _graphs.get()
        return own(*args, **kwargs) if graphs is None else graphs.call(own, *args, **kwargs)

    return applied_by(apply)


def _regenerated(
    output: torch.Tensor, outputs: Sequence[torch.Tensor], inputs: Sequence[Any], graphs: _Graphs
) -> torch.Tensor:
    """Return an output as a view of what it is made of again, or as it is.

    That is an input of the program of which it is a view, unless a function gives it, or, of
    several outputs of one graph that share memory, their base.
    """
    if any(output is x for x in inputs) or not output.requires_grad:
        return output
    base = next((x for x in inputs if _shares(x, output)), None)
    if base is not None:
        given = isinstance(output.grad_fn, torch.autograd.function.BackwardCFunction)
        base = None if given else base
    else:
        base, graph = output._base, graphs.number(output)
        alike = [o for o in outputs if _shares(o, output) and graphs.number(o) == graph]
        if base is not None and (len(alike) == 1 or graphs.number(base) != graph):
            base = None
    if base is None or not base.requires_grad:
        return output
    return base.as_strided(output.size(), output.stride(), output.storage_offset())


def _shares(one: Any, other: torch.Tensor) -> bool:
    """Return whether something is a tensor with the memory of another one."""
    if not isinstance(one, torch.Tensor):
        return False
    same: bool = one.untyped_storage()._cdata == other.untyped_storage()._cdata
    return same


@contextmanager
def _inlined_in_no_grad() -> Iterator[None]:
    """Call a function's forward alone where gradients are off."""

    def apply(own: Any, cls: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            return own(*args, **kwargs)
        return inlined(cls, *args, **kwargs)

    with applied_by(apply):
        yield


def _differentiated_once() -> AbstractContextManager[None]:
    """Let a tensor that a function is given several times have the gradient of the last alone."""

    def apply(own: Any, _: Any, *args: Any, **kwargs: Any) -> Any:
        last = {id(given): place for place, given in enumerate(args)}

        def once(place: int, given: Any) -> Any:
            again = isinstance(given, torch.Tensor) and last[id(given)] != place
            return given.detach() if again else given

        return own(*(once(*placed) for placed in enumerate(args)), **kwargs)

    return applied_by(apply)


def _backward_once() -> AbstractContextManager[None]:
    """Let what a function's backward computes have no graph."""
    kind: Any = torch.autograd.function.BackwardCFunction
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
    Bug(
        id="compile-alias-backward",
        what="an autograd.Function that gives its input loses its backward if a compiled program returns both",
        why="AOTAutograd makes one of two outputs that share memory from the other, outside the graph; no autocast needed",
        torch=">=2.7",
        seen="2.15.0",
        backends=("compile*", "!compile[eager]"),
        ops=("same_function",),
        imitation=Imitation(around=_in_graphs, wrap=_regenerating, applies=_has_function),
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
            Example(  # a function that is given one tensor twice is between two graphs
                "compile[aot_eager]",
                case(
                    [x("w0", 2)],
                    call("mul", "w0", "w0"),
                    call("same_function", "v0", to="v1"),
                    call("mul_function", "v0", "v0", to="v2"),
                    call("same_function", "v2", to="v3"),
                    contexts=(),
                ),
                wrong="mul",
                torch=">=2.13",
            ),
            Example(  # their base is no output, and the graph uses one of them
                "compile[aot_eager]",
                case(
                    [x("w0", 2)],
                    call("mul", "w0", "w0"),
                    call("same_function", "v0", to="v1"),
                    call("same_function", "v1", to="v2"),
                    call("exp", "v1", to="v3"),
                    contexts=(),
                    returns=("v1", "v2", "v3"),
                ),
                wrong="exp",
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
            ),
            Example(  # beside compile-checkpoint-zeros
                "compile[eager]",
                case(
                    [x("w0", 2)],
                    call("exp_function", "w0"),
                    under(Checkpoint(use_reentrant=True), call("sin", "w0", to="v1")),
                    contexts=(),
                    second="double",
                ),
            ),
        ),
    ),
    Bug(
        id="compile-function-twice",
        what="an autograd.Function that is given one tensor twice loses a part of its gradient",
        why="dynamo gives it each tensor once, with the gradient of the last place; no autocast needed",
        link="https://github.com/pytorch/pytorch/issues/181146",
        torch=">=2.11,<2.13",
        seen="2.11.0",
        backends=("compile*",),
        imitation=Imitation(around=_differentiated_once, applies=_has_function),
        examples=(
            Example(
                "compile[aot_eager]",
                case(
                    [x("w0", 2)],
                    call("mul", "w0", "w0"),
                    call("mul_function", "v0", "v0", to="v1"),
                    contexts=(),
                ),
            ),
            Example(  # the gradients of the two places differ
                "compile[aot_eager]",
                case(
                    [x("w0", 2, 2)],
                    call("mul", "w0", "w0"),
                    call("matmul_function", "v0", "v0", to="v1"),
                    contexts=(),
                ),
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
