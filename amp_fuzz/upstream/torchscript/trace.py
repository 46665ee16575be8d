"""`torch.jit.trace`: calls and modes that a trace does not keep.

No autocast is needed for any of them, and none was reported that we know of.

## trace-grad-modes: a trace has no `no_grad`, not even torch's own

```python
import torch


def loss(x, variance):
    return torch.nn.functional.gaussian_nll_loss(x, x, variance, eps=0.5)


x, variance = torch.ones(1), torch.tensor([0.1], requires_grad=True)
traced = torch.jit.trace(loss, (x, variance))
print(torch.autograd.grad(loss(x, variance), variance)[0])  # tensor([1.])
print(torch.autograd.grad(traced(x, variance), variance)[0])  # tensor([0.])
```

**What torch does.** `gaussian_nll_loss` clamps a copy of the variance in place, under
`torch.no_grad()`, to let the gradient pass. A trace keeps the `clamp_` and forgets the mode: below
`eps` the gradient is 0. Traced programs here have no such regions of their own
(`ScriptBackend.fit`).

**What the reference does.** Its functions of `torch.nn.functional` know no `no_grad`.

## trace-max-out: `torch.jit.trace` and `max(x, out=b)`

```python
import torch


def largest(x, b):
    return torch.max(x, out=b)


x, b = torch.tensor([[1.0, 5.0], [2.0, 3.0]]), torch.tensor(4.0)
print(largest(x, b.clone()))  # tensor(5.)
print(torch.jit.trace(largest, (x, b.clone()), check_trace=False)(x, b.clone()))
# tensor([[4., 5.],
#         [4., 4.]])
```

**What torch does.** The tracer writes the call down as `aten::max(%x, %b)`, which is the overload
of two tensors: the element-wise maximum. `min` too. For one value the shape is the same, and the
wrong number silent. `b` stays as it was, but where it is read after the call the trace reads the
result.

**What the documentation says.** That tracing does not record control flow that depends on data,
and untracked external dependencies; nothing of `out=`.

**What the reference does.** Its `max` and `min` with `out=` are those of two tensors, and what is
read from `b` after them is the result. The whole case must agree with that: the shape, the values,
and the error that a later call raises for such a shape.

## trace-bool-scalar: `torch.jit.trace` and `full_like` of a bool

```python
import torch

x = torch.zeros(3, dtype=torch.int64)
torch.jit.trace(lambda x: torch.full_like(x, True), (x,))
# RuntimeError: 0 INTERNAL ASSERT FAILED at ".../alias_analysis.cpp", please report a bug to PyTorch.
# We don't have an op for aten::full_like but it isn't a special case. Argument types: Tensor, bool, ...
```

The tracer records the fill value as a bool, and TorchScript has no overload of `full_like` for
one. The entry explains that error where it comes without autocast too.

## trace-inference-constants: a program traced in inference mode

```python
import torch


def program(w):
    return torch.mm(w, w).mul_(2.0)


w = torch.ones(2, 2, requires_grad=True)
with torch.inference_mode():
    traced = torch.jit.trace(program, w)
traced(w)  # RuntimeError: Inference tensors cannot be saved for backward.
```

A trace keeps the number as a tensor, made while it is traced: an inference tensor. Outside of
inference mode autograd refuses to save it. The documentation says that inference tensors cannot be
saved for backward; it says nothing of traces. The entry explains that error, of a traced program
that agrees when it is traced outside of inference mode.

## trace-loss-weight: binary_cross_entropy with a weight

```python
import torch

x = torch.zeros(1)
loss = torch.nn.functional.binary_cross_entropy
torch.jit.trace(lambda x: loss(x, x, weight=x), (x,))
# RuntimeError: expected int at position 0, but got: Tensor
```

**What torch does** (2.7.1, 2.9.1, 2.11.0). The function asks `torch._C._infer_size` for the shape of
the weight, and while it is traced sizes are tensors. 2.13.0 traces it.

**Upstream.** Not reported that we know of.

## trace-check-names: the check of `torch.jit.trace` compares names

```
ERROR: Graphs differed across invocations!
-   %v4 : Tensor = aten::view(%x9, %36)
+   %v4.1 : Tensor = aten::view(%x9, %36)
-   %39 : Tensor = aten::contiguous(%v4, %38)
+   %v4 : Tensor = aten::contiguous(%v4.1, %38)
```

`torch.jit.trace` traces a module a second time and compares the two graphs as text. Where a
traced `contiguous()` returns its own input, another node has the name in the second trace. Both
graphs compute the same. The documentation says of `check_trace`: "Check if the same inputs run
through traced code produce the same outputs." The entry explains a `TracingCheckError` that comes
without autocast too. With autocast the check fails for another reason as well:
[trace-weight-cache].
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import msgspec
import torch

from amp_fuzz.backends.imitation import Imitation
from amp_fuzz.cases.build import call, case, x
from amp_fuzz.cases.case import Case
from amp_fuzz.cases.program import Node, Program, Ref, Statement, TensorSpec, substituted, transform
from amp_fuzz.patching import patched
from amp_fuzz.upstream.bug import Bug, Example
from amp_fuzz.upstream.torchscript.programs import changed, within

__all__ = ["BUGS"]


class _Modeless:
    """What the functions of `torch.nn.functional` know as ``torch``, without ``no_grad``."""

    no_grad = staticmethod(nullcontext)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


_OF_TWO = {"max": "maximum", "min": "minimum"}


def _of_two(program: Program) -> Program:
    """Return a program in which max(x, out=b) is max(x, b), and b from there on what that returns.

    It returns as many values, of other names: what is b in Python is one value, the last.
    """
    names: dict[str, str] = {}

    def two(call: Statement) -> tuple[Statement]:
        call = substituted(call, names)
        out = dict(call.kwargs).get("out")
        if call.op not in _OF_TWO or not isinstance(out, Ref):
            return (call,)
        made = f"{out.name}_" if call.outputs == ("_",) else call.outputs[0]
        older = [name for name, now in names.items() if now == out.name]
        names.update(dict.fromkeys([out.name, *older], made))
        return (Statement(_OF_TWO[call.op], "function", (*call.args, out), outputs=(made,)),)

    body = transform(program.body, statement=two)
    outputs = tuple(names.get(name, name) for name in program.outputs)
    return msgspec.structs.replace(program, body=body, outputs=outputs)


INFERENCE: dict[str, Any] = {"contexts": (), "backward": "none"}
MAX = call("max", "x0", form="out", out="b1")
LOST = msgspec.structs.replace(MAX, outputs=("_",))


def _of(*body: Node, more: Sequence[TensorSpec] = (), wide: int = 3) -> Case:
    """Return a case in which the maximum of x0 is to be written to b1."""
    inputs = [x("x0", 2, wide), x("b1"), x("x2", 3, 3), *more]
    return case(inputs, *body, **INFERENCE)


BUGS = (
    Bug(
        id="trace-grad-modes",
        what="the gradient of gaussian_nll_loss is masked in a trace where the variance is below eps",
        why="a trace keeps no grad modes: the clamp_ that the function does under no_grad has a gradient; no autocast needed",
        torch=">=2.7",
        seen="2.15.0",
        backends=("trace*",),
        ops=("gaussian_nll_loss",),
        imitation=Imitation(
            wrap=within(lambda: patched(torch.nn.functional, "torch", _Modeless()))
        ),
        examples=(
            Example(
                "trace",
                case(
                    [x("x0", 2), x("x1", 1, 8), x("w2", 1, 1, domain="positive")],
                    call("gaussian_nll_loss", "x1", "x1", "w2", eps=100.0, reduction="sum"),
                    contexts=(),
                ),
            ),
        ),
    ),
    Bug(
        id="trace-bool-scalar",
        what="torch.jit.trace ends in an internal assertion for full_like of a bool",
        why="the tracer writes the number down as a bool, for which TorchScript has no overload; no autocast needed",
        torch=">=2.7",
        seen="2.15.0",
        backends=("trace*",),
        ops=("*",),
        kinds=("raise",),
        expected="^no error$",
        observed="INTERNAL ASSERT FAILED.*We don't have an op for aten::full_like but it isn't a special case",
        bare="diverges",
        examples=(
            Example(
                "trace",
                case([x("x0", 3, dtype="int64")], call("full_like", "x0", True)),
                wrong="",
            ),
        ),
    ),
    Bug(
        id="trace-max-out",
        what="torch.jit.trace of max(x, out=b) and min(x, out=b) is max(x, b): another shape, other values",
        why="the tracer leaves `out` without a name, and the overload of two tensors takes it; no autocast needed",
        torch=">=2.7",
        seen="2.15.0",
        backends=("trace*",),
        ops=("max", "min"),
        imitation=Imitation(wrap=changed(_of_two)),
        examples=(
            Example("trace", _of(MAX, call("neg", "b1", to="v1"))),
            Example("trace", _of(MAX, wide=1)),  # the shape is right, the number is not
            Example("trace", _of(MAX, call("mul", "v0", "x2", to="v1")), wrong=""),  # raises
            Example(
                "trace",
                _of(
                    MAX,
                    call("min", "x0", form="out", out="b1", to="v1"),
                    call("neg", "b1", to="v2"),
                    call("abs", "v0", to="v3"),
                ),
            ),
            Example("trace", _of(LOST, call("neg", "b1"))),
            Example(  # another op with out=, and max without, are what they are
                "trace",
                _of(
                    MAX,
                    call("neg", "x0", form="out", out="b4", to="v1"),
                    call("max", "x0", to="v2"),
                    more=[x("b4", 2, 3)],
                ),
            ),
            Example("trace", _of(LOST, LOST, call("abs", "x0", to="_"), call("neg", "b1"))),
            Example(
                "trace",
                _of(
                    LOST,
                    call("min", "x0", form="out", out="b3", to="_"),
                    call("neg", "b1"),
                    call("abs", "b3", to="v1"),
                    more=[x("b3")],
                ),
            ),
        ),
    ),
    Bug(
        id="trace-inference-constants",
        what="a program traced in inference mode raises where its numbers are saved for a backward pass",
        why="the trace keeps numbers as tensors, which are inference tensors then; no autocast needed",
        torch=">=2.7",
        seen="2.15.0",
        backends=("trace*",),
        ops=("*",),
        kinds=("raise",),
        expected="^no error$",
        observed="^RuntimeError: Inference tensors cannot be saved for backward",
        without="inference-traces",
        examples=tuple(
            Example(
                "trace",
                case(
                    [x("w0", 2, 2), x("x1", 2, 2), x("b2", 2, 2)],
                    call("mm", "w0", "w0"),
                    call("mul.scalar", "v0", 2.0, form="inplace", to="v1"),
                    *written,
                    first_pass="inference_mode",
                    contexts=(),
                ),
                wrong="",
            )
            for written in ((), (call("mm", "x1", "x1", form="out", out="b2", to="v2"),))
        ),
    ),
    Bug(
        id="trace-loss-weight",
        what="tracing binary_cross_entropy with a weight raises",
        why="it calls torch._C._infer_size, which takes integers; while tracing, sizes are tensors",
        torch=">=2.7,<2.13",
        seen="2.11.0",
        backends=("trace*",),
        kinds=("raise",),
        ops=("*",),
        expected="^no error$",
        observed="^RuntimeError: expected int at position 0, but got: Tensor",
        examples=(
            Example(
                "trace",
                case(
                    [x("x0", 1, domain="zeros")],
                    call("binary_cross_entropy", "x0", "x0", weight="x0"),
                    contexts=(),
                    backward="none",
                ),
            ),
        ),
    ),
    Bug(
        id="trace-check-names",
        what="the check of torch.jit.trace finds two traces of one program to differ, without autocast too",
        why="it compares graphs as text, and names of values can move from one node to another",
        torch=">=2.7",
        seen="2.15.0",
        backends=("trace[check]",),
        ops=("*",),
        kinds=("raise",),
        expected="^no error$",
        observed="^TracingCheckError: Tracing failed sanity checks",
        bare="diverges",
        examples=(
            Example(
                "trace[check]",
                case(
                    [x("x0", 3, 2, layout="strided")],
                    call("view", "x0", [1, 3, 2], form="module"),  # x0.contiguous().view(...)
                    contexts=(),
                    backward="none",
                ),
                wrong="",
            ),
        ),
    ),
)
