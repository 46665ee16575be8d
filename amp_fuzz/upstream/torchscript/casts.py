"""TorchScript's own autocast, which is documented, and what is wrong with it.

`torch.jit.script` and `torch.jit.trace` do not run `torch.autocast` inside a program. Before a
graph is optimised, a pass writes casts into it (`torch/csrc/jit/passes/autocast.cpp`).
`amp_fuzz.backends.torchscript_autocast` is that pass, written again from its list and its
documents; `tests/backends/test_torchscript_autocast.py` compares the two op by op. Where the two
sides differ, the reference of these backends runs the program's own graph with the casts that *our*
pass writes. What the pass does by its documents is no divergence.
A divergence is one of the bugs below only if that graph agrees with TorchScript in every dtype,
value and gradient, and raises the same errors. [TorchScript: what random programs meet](../torchscript.md) says how often
random programs meet them, and what else TorchScript does.

## The documented pass: TorchScript casts after a list of its own

The limits of the pass are documented in `torch/csrc/jit/JIT-AUTOCAST.md` and in
[#75956](https://github.com/pytorch/pytorch/issues/75956):

- One list serves all devices. It is close to CUDA's of 2021. On the CPU `exp`, `layer_norm`,
  `sum`, `gelu`, `pow` and 40 more are cast to float32, which eager leaves alone. `softmax`,
  `conv_transpose2d`, `scaled_dot_product_attention` and others are not cast at all.
- Promotion goes by static types. If the pass does not know a dtype, it casts to float32:
  `torch.mul(a, b)` of two bfloat16 arguments of a scripted function is float32.
- The pass does not look into lists of tensors: it lists `cat` and `stack` in vain.
- It lists `add`, `sub`, `mul` and `div`, which eager autocast does not.
- The autocast around a scripted function goes on inside it. A region with `enabled=False` or
  another dtype adds casts and takes none away. A custom op with `register_autocast` that stands
  where autocast is off casts its inputs by the autocast around the graph.
- The dtype of a region is not checked. `torch.autocast("cpu", dtype=torch.float64)` warns and
  disables in eager, and casts to float64 in a scripted function.
- A function that the program calls gets its casts before it is inlined, from the autocast around
  the program: `torch.nn.functional.softsign(x)` in a region with `enabled=False` is float32. Its
  optional arguments are not cast, and a value that is given twice is cast twice.

```python
import torch


@torch.jit.script
def program(x):
    return torch.exp(x)


x = torch.ones(2, dtype=torch.bfloat16)
with torch.autocast("cpu", dtype=torch.bfloat16):
    print(torch.exp(x).dtype, program(x).dtype)  # torch.bfloat16 torch.float32
```

## torchscript-autodiff: gradients from TorchScript's own formulas

From the third call on, the gradients of a scripted or traced program come from formulas that
TorchScript has for some fifty ops (`torch/csrc/jit/runtime/symbolic_script.cpp`), not from
autograd. The formulas know nothing of the casts inside an op's autocast kernel.

**They raise for two dtypes.** With bfloat16 around the scripted program and float16 in it, the
pass casts the inputs of `mm` to float16. Eager autocast goes on inside and casts those to
bfloat16. The formula saved the float16 inputs and multiplies them with a bfloat16 gradient:
"expected m1 and m2 to have the same dtype". The first two calls train.
[#72760](https://github.com/pytorch/pytorch/pull/72760) mended another instance of it.

```python
import torch


@torch.jit.script
def program(x, w):
    with torch.autocast("cpu", dtype=torch.float16):
        return torch.mm(x, w)


x, w = torch.ones(2, 2), torch.ones(2, 2, requires_grad=True)
for _ in range(3):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = program(x, w)
    y.sum().backward()  # RuntimeError at the third
```

**They round elsewhere.** The formula for `matmul` rounds the product of each batch to 16 bits
before it sums them; autograd sums first.

The reference runs the program's graph, optimised as TorchScript optimises it, and must agree bit
for bit. Some formulas are wrong in any program: [torchscript-formulas] and the bugs of
[gradients](gradients.md). If a case shows autocast's part as well, both are named, and the case
without autocast must be explained by the formulas alone.

## torchscript-fallback: the casts of a fallback function come twice

Under autocast `addmm` answers in the autocast dtype. A scripted program that uses a weight in a
`no_grad` region, and trains beside it, answers so at its first call, and in float32 from the
second on:

```python
import torch


@torch.jit.script
def program(x, w, b, scale):
    with torch.no_grad():
        y = torch.addmm(b, x, w)
    return y, x * scale


x, b = torch.ones(1, 2), torch.ones(1, 1)
w, scale = torch.ones(2, 1, requires_grad=True), torch.ones(2, requires_grad=True)
for _ in range(3):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        print(program(x, w, b, scale)[0].dtype)  # bfloat16, then float32
```

The optimised graph holds `addmm` as `mm` and `add` in a differentiable graph of its own, behind a
`prim::RequiresGradCheck`. Profiled in the region, `w` needs no grad, and the check refuses a `w`
that does. A fallback function runs instead. Its result is, bit for bit,
`b.bfloat16().float() + torch.mm(x, w).float()`: the pass came a second time, over a graph that it
had cast and whose `addmm` was now `mm` and `add`, and cast the `add` to float32. Without the
region, without `x * scale`, or with a `w` that needs no grad, the result is bfloat16.

It is so for every op that the pass promotes. The second time the pass knows neither dtypes nor
regions: with `y = torch.mm(x, w)` and `z = y / -1.5` in the `no_grad` region, `z` is float32, with
`autocast("cpu", enabled=False)` inside too. An input of the fallback has the dtype that it was
profiled with, and is cast only if that is float32. No region is needed: whatever a differentiable
graph makes requires grad ([torchscript-requires-grad]), so the next such graph is refused. A
program that was traced or profiled under `no_grad` (the first pass of a reentrant checkpoint) and
trains later falls back as a whole, and so does one that trained and whose weights are frozen since.

The bug shows only beside the casts of the documented pass. The reference runs the optimised graph of its own
casts, asks torch's profiler which parts fell back, and casts those a second time.

## trace-saved-dtypes: a saved trace has lost the dtypes that its casts go by

A trace knows the dtype of each of its values. Under autocast, an op that promotes is cast to float32
unless all its operands are known to have 16 bits. What `torch.jit.load` returns knows no dtypes:

```python
import io

import torch


def program(x):
    return torch.mul(x, x)


x, buffer = torch.ones(2, dtype=torch.bfloat16), io.BytesIO()
traced = torch.jit.trace(program, x)
torch.jit.save(traced, buffer)
buffer.seek(0)
loaded = torch.jit.load(buffer)
with torch.autocast("cpu", dtype=torch.bfloat16):
    print(traced(x).dtype, loaded(x).dtype)  # torch.bfloat16 torch.float32
```

Eager is bfloat16 too. A number counts as a tensor of unknown dtype as well: `torch.div(x, 0.001)` of
integers is float64 in what is loaded, and float32 before. `torch/csrc/jit/JIT-AUTOCAST.md` says
nothing of saved programs. A scripted program knows no dtypes before it is saved either. The
reference runs the graph that is loaded.

## trace-weight-cache: a cast weight is a constant of the trace

Autocast keeps the cast of a leaf weight until its outermost context ends. If the cast stands in
that cache when a trace begins, the trace takes it as a constant: "Cannot insert a Tensor that
requires grad as a constant" ([#84092](https://github.com/pytorch/pytorch/issues/84092)). Or the
check of the trace, a second trace in the same context, finds another graph
([#63552](https://github.com/pytorch/pytorch/pull/63552)).

```python
import torch


class Module(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(2, 2))

    def forward(self, x):
        return torch.mm(x, self.w)


with torch.autocast("cpu", dtype=torch.bfloat16):
    torch.jit.trace(Module(), torch.ones(2, 2))  # TracingCheckError
```

The documentation of `torch.autocast` traces with `cache_enabled=False`. The backend `trace` goes
without the check, and has something to compare afterwards; `trace[check]` is `torch.jit.trace` as
it is by default. The reference traces under its own autocast, with its own weight cache, and must
raise the same.

## torchscript-backward-pass: the pass casts the graph of the formulas too

Under autocast the pass goes over a backward graph as well, at its second run, when it is
optimised or falls back. Then the formula of `sigmoid` multiplies in float32, and the norm before
it raises. Without autocast around the backward pass it does not.

```python
import torch


@torch.jit.script
def program(w, a, b):
    return torch.sigmoid(torch.batch_norm(w, None, None, a, b, True, 0.1, 0.5, False))


w = torch.ones(2, 2, dtype=torch.bfloat16, requires_grad=True)
for _ in range(2):
    y = program(w, torch.ones(2), torch.ones(2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (g,) = torch.autograd.grad(y, w, torch.ones_like(y), create_graph=True)
        torch.autograd.grad(g, w, torch.ones_like(g))
        # the second: expected scalar type BFloat16 but found Float
```

The entry explains that error in the second backward pass of a plan, in a program with a norm that
agrees without autocast.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from amp_fuzz.backends.imitation import Imitation
from amp_fuzz.cases.build import BF16, F16, call, case, under, x
from amp_fuzz.cases.case import Case
from amp_fuzz.cases.program import Autocast, NoGrad
from amp_fuzz.upstream.bug import Bug, Example

__all__ = ["BUGS"]

OFF = Autocast(enabled=False)


def _lowered(**parts: bool) -> Callable[[Any, Case], Any]:
    """Run TorchScript's graph, and do more to it: see `amp_fuzz.backends.torchscript.Lowering`."""
    return lambda program, case: program.lowered(**parts)


BUGS = (
    Bug(
        id="torchscript-autodiff",
        what="gradients of a scripted program round elsewhere, or raise for two dtypes, from the third call on",
        why="TorchScript has gradient formulas of its own, which know nothing of the casts inside kernels",
        link="https://github.com/pytorch/pytorch/pull/72760",
        torch=">=2.7",
        seen="2.15.0",
        harm="raises",
        backends=("script*", "trace*"),
        imitation=Imitation(wrap=_lowered(formulas=True), follows=False),
        examples=(
            Example(
                "script",
                case(
                    [x("x0", 2, 2, domain="integers"), x("w1", 2, 2)],
                    under(F16, call("mm", "x0", "w1")),
                    contexts=(BF16,),
                ),
            ),
        ),
        rank=60,
    ),
    Bug(
        id="torchscript-fallback",
        what="ops that promote are float32 where a part of a scripted program falls back: of a weight in a no_grad region, or after another part",
        why="profiled as needing no grad, the optimised graph refuses what requires it, and the fallback is cast twice",
        torch=">=2.7",
        seen="2.15.0",
        harm="silent dtype",
        backends=("script*", "trace*"),
        imitation=Imitation(wrap=_lowered(again=True)),
        examples=(
            Example(
                "script",
                case(
                    [x("x0", 1, 2), x("w1", 2, 1), x("x2", 1, 1), x("w3", 2)],
                    call("mul", "x0", "w3", to="v1"),
                    under(NoGrad(), call("addmm", "x2", "x0", "w1")),
                ),
            ),
            *(
                Example(
                    "script",
                    case(
                        [x("x0", 2, 2), x("w1", 2, 2), x("w2", 2)],
                        call("atan2", "w2", "w2", to="v2"),
                        under(NoGrad(), under(OFF, call("mm", "x0", "w1"), second)),
                    ),
                )
                for second in (
                    call("div.scalar", "v0", -1.5, form="operator", to="v1"),
                    # layer_norm is taken apart where it is optimised
                    call("layer_norm", "v0", [2], form="module", to="v1"),
                )
            ),
            Example(  # a product of two of bfloat16 is not cast to float32; what is made of one is
                "script",
                case(
                    [
                        *(x(name, 2, 2, dtype="bfloat16") for name in ("x0", "w1")),
                        x("w2", 2),
                    ],
                    call("atan2", "w2", "w2", to="v2"),
                    under(
                        NoGrad(),
                        under(
                            OFF,
                            call("mul", "x0", "w1"),
                            call("mm", "v0", "w1", to="v1"),
                            call("div.scalar", "v1", -1.5, form="operator", to="v3"),
                        ),
                    ),
                ),
            ),
            Example(  # a differentiable graph takes the results of the one before it for weights
                "script",
                case(
                    [x("x0"), x("w1"), x("x2", 1)],
                    under(BF16, call("prelu", "x0", "w1"), call("add", "x2", "x0", to="v1")),
                    call("prelu", "v1", "x0", to="v2"),
                    under(OFF, call("add", "x0", "v2", to="v3"), call("mean", "v3", to="v4")),
                    backward="none",
                    returns=["v0", "v4"],
                ),
            ),
            Example(  # a trace that was profiled with a weight that is frozen since
                "trace",
                case(
                    [x("w0", 2, 2, dtype="float16")],
                    call("div.scalar", "w0", 2),
                    call("mul", "w0", "v0", to="v1"),
                    contexts=(F16,),
                    steps=2,
                    update="frozen",
                ),
            ),
        ),
        rank=60,
    ),
    Bug(
        id="trace-saved-dtypes",
        what="ops that promote are float32 in a trace that was saved and loaded, and in 16 bits before",
        why="the dtypes that tracing saw are not saved, and without them the pass casts to float32",
        torch=">=2.7",
        seen="2.15.0",
        harm="silent dtype",
        backends=("trace*",),
        imitation=Imitation(wrap=_lowered(loaded=True)),
        examples=(
            Example(
                "trace",
                case([x("x0", 2, dtype="bfloat16")], call("mul", "x0", "x0"), saved=True),
            ),
        ),
        rank=60,
    ),
    Bug(
        id="trace-weight-cache",
        what="tracing raises, or its check does, where a weight's cast stands in autocast's cache already",
        why="the cached cast is no input of the trace and no constant may require grad; documented: trace with cache_enabled=False",
        link="https://github.com/pytorch/pytorch/issues/84092",
        torch=">=2.7",
        seen="2.15.0",
        harm="raises",
        backends=("trace[check]",),
        imitation=Imitation(wrap=_lowered(cached=True), follows=False),
        examples=(
            Example("trace[check]", case([x("x0", 2, 2), x("w1", 2, 2)], call("mm", "x0", "w1"))),
        ),
        rank=60,
    ),
    Bug(
        id="torchscript-backward-pass",
        what="the second backward pass of a scripted norm raises for two dtypes under autocast",
        why="the pass casts the graph of the formulas too, and the fallback function that runs there",
        torch=">=2.7",
        seen="2.15.0",
        harm="raises",
        backends=("script*", "trace*"),
        ops=("*batch_norm*", "instance_norm*", "layer_norm*"),
        kinds=("raise",),
        where="if seconds: torch.autograd.backward(*",
        expected="^no error$",
        observed="^RuntimeError: expected scalar type (BFloat16|Half) but found Float$",
        examples=(
            Example(
                "script",
                case(
                    [
                        x("w1", 3, 4, dtype="bfloat16"),
                        x("x2", 4),
                        x("x3", 4, domain="positive"),
                    ],
                    call("batch_norm.batch_statistics", "w1", None, None, "x2", "x3", True),
                    call("sigmoid", "v0", to="v1"),
                    contexts=(),
                    backward="under",
                    backward_context=BF16,
                    second="double",
                ),
            ),
        ),
        rank=60,
    ),
)
