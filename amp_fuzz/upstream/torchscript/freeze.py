"""`torch.jit.freeze`: constants that are written to, and weights that become numbers.

No autocast is needed for either.

## freeze-kept-constants: a frozen module that counts its calls

```python
import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(2), requires_grad=False)

    def forward(self, x):
        y = self.w + 1
        return y.type_as(x).add_(1)


x, model = torch.ones(2), Model().eval()
frozen = torch.jit.freeze(torch.jit.script(model))
for _ in range(3):
    print(model(x), frozen(x))  # [2, 2] and [2, 2]; [2, 2] and [3, 3]; [2, 2] and [4, 4]
```

**What torch does.** Freezing computes `self.w + 1` once, since nothing seems to write to it, and
keeps it in the graph. `type_as` returns its very input where the dtype is right, but its schema,
`type_as(Tensor self, Tensor other) -> Tensor`, names no alias. Nobody sees that `add_` writes to
the constant, and every call adds to what the last one left. A traced module does the same, and so
do `dropout` in evaluation mode (an `nn.Dropout`, too), `einsum("i->i")`, `sum_to_size`,
`atleast_1d` and `broadcast_tensors`. `to`, `contiguous`, `reshape` and `float` are right: their
schemas say that they may return their input.

**What the documentation says.** That modules are frozen in evaluation mode, and that attributes
which are modified in `forward` are kept. Nothing of this.

**What the entry explains.** A wrong value of a frozen program, where the whole program agrees, or
is known, if the module's constants get their values back after each call.

**Upstream.** Not reported that we know of;
[#195422](https://github.com/pytorch/pytorch/issues/195422) is the alias of `dropout` under
`torch.compile`.

## freeze-scalar-weight: a frozen weight of no dimensions forgets its dtype

```python
import torch


class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones((), dtype=torch.bfloat16))

    def forward(self, x):
        return torch.mul(x, self.w)


x, model = torch.ones(3, dtype=torch.int64), Scaled().eval()
print(model(x).dtype)  # torch.bfloat16
frozen = torch.jit.freeze(torch.jit.script(model))
print(frozen(x).dtype)  # torch.float32
```

**What torch does.** The frozen graph holds the weight as a constant of bfloat16. The graph that
runs, `torch.jit.last_executed_optimized_graph()`, holds `float = prim::Constant[value=1.]()` in
its place: for `add`, `sub`, `mul` and `div` a constant without dimensions becomes one of Python's
numbers. Beside floats that changes nothing; integers and bools get the default dtype instead of
the weight's. A traced module does the same, and so does float16. Only the second operand is
replaced: `w - x` keeps the dtype, and `rsub(w, x)` does not. `pow`, `maximum`, `where`, `cat`,
`addcmul` and `div` with a rounding mode keep it.

**What the documentation says.** That passes which do not "strictly preserve numerics" run with
`optimize_numerics=True`. The bug shows with `optimize_numerics=False` too.

**What the entry explains.** A float32 result of one of these ops where the reference has one of 16
bits, if it is there without autocast too, in the same value or in one that it is computed from.
"""

from __future__ import annotations

from amp_fuzz.cases.build import call, case, under, x
from amp_fuzz.cases.program import Autocast, NoGrad
from amp_fuzz.upstream.bug import Bug, Example

__all__ = ["BUGS"]

BUGS = (
    Bug(
        id="freeze-kept-constants",
        what="a frozen module writes to a constant of its own: each call starts from what the last one left",
        why="type_as, dropout and others may return what they are given, and their schemas do not say so: that is folded",
        link="https://github.com/pytorch/pytorch/issues/195422",
        torch=">=2.7",
        seen="2.15.0",
        backends=(
            "script[freeze]",
            "trace[freeze]",
        ),
        ops=("*",),
        kinds=(
            "value",
            "bitwise",
            "nonfinite",
            "range",
            "dtype",
        ),
        without="kept-constants",
        examples=tuple(
            Example(
                backend,
                case(
                    [x("w0", 2), x("x1", 2), x("w2", 2)],
                    call("add", "w0", "w0"),
                    call("type_as", "v0", "x1", form="method", to="v1"),
                    call("cumsum", "v1", -1, form="inplace", to="v2"),
                    call("neg", "x1", to="v3"),
                    call("add", "w2", "w2", to="v4"),
                    call("type_as", "v4", "x1", form="method", to="v5"),
                    call("cumsum", "v5", -1, form="inplace", to="v6"),
                    contexts=(),
                    backward="none",
                ),
            )
            for backend in ("script[freeze]", "trace[freeze]")
        ),
    ),
    Bug(
        id="freeze-scalar-weight",
        what="integers and a frozen weight of no dimensions, of 16 bits, make float32",
        why="the optimised graph holds the weight as Python's number, and forgets its dtype; no autocast needed",
        torch=">=2.7",
        seen="2.15.0",
        backends=(
            "script[freeze]",
            "trace[freeze]",
        ),
        ops=(
            "add",
            "add.mixed",
            "sub",
            "rsub",
            "mul",
            "mul.mixed",
            "div",
            "div.mode",
        ),
        kinds=("dtype",),
        expected="^(bfloat16|float16)$",
        observed="^float32$",
        bare="diverges",
        examples=tuple(
            Example(
                "trace[freeze]",
                case(
                    [x("x0", 3, dtype="int64"), x("w1", dtype="float16")],
                    under(NoGrad(), call(op, "x0", "w1")),
                    backward="none",
                    contexts=contexts,
                ),
                wrong="",
            )
            for op in ("add", "sub", "mul", "div")
            for contexts in ((), (Autocast(),))
        ),
    ),
)
