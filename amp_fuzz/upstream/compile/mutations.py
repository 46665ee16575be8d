"""Inputs that a compiled program writes to in place.

All of it shows from stage `aot_eager` on, without autocast too.

## compile-mixed-mutations: results change places

```python
import torch


def program(a, b, w):
    return a.mul_(2), b.add_(w)


w = torch.full((2,), 5.0, requires_grad=True)
for function in (program, torch.compile(program, backend="aot_eager")):
    print(function(torch.ones(3), torch.zeros(2), w))
# RuntimeError: The size of tensor a (2) must match the size of tensor b (3)
```

**What torch does** (2.13.0). The program writes to one input that gets a `grad_fn` by it, and to
one that does not. AOTAutograd keeps the second write in the graph, does the first one after it,
and miscounts the results of the graph. If the shapes are alike, the results are wrong without an
error.

**What the entry explains.** A case that agrees if torch keeps no write in a graph
(`keep_inference_input_mutations=False`), and that diverges on `compile[aot_eager]` already. The
second condition is needed because Inductor fuses differently without the writes.

**Upstream.** Not reported that we know of.

## compile-mutated-saved: an input is saved for the backward pass, and written to

**What torch does** (2.13.0). In `b.mul_(w)` of an input and a weight, the compiled program saves
the input itself and writes to it afterwards. The backward pass raises "one of the variables
needed for gradient computation has been modified by an inplace operation".

**Upstream.** [#185876](https://github.com/pytorch/pytorch/pull/185876).
"""

from __future__ import annotations

from amp_fuzz.cases.build import call, case, x
from amp_fuzz.upstream.bug import Bug, Example

__all__ = ["BUGS"]

BUGS = (
    Bug(
        id="compile-mixed-mutations",
        what="results change places in a compiled program that writes to one input with grad and to one without",
        why="AOTAutograd writes one inside the graph and one after it, and miscounts what the graph returns",
        torch=">=2.7,<2.15",
        seen="2.13.0",
        backends=("compile[aot_*", "compile[inductor*"),
        kinds=(
            *("raise", "dtype", "shape", "value", "nonfinite", "range"),
            *("grad-missing", "grad-dtype", "grad-shape", "grad-value", "grad-nonfinite"),
        ),
        ops=("*",),
        without="mutations-in-graphs",
        stage="compile[aot_eager]",
        examples=(
            Example(
                "compile[aot_eager]",
                case(
                    [x("b0", 3), x("b1", 2), x("w2", 2)],
                    call("sqrt", "b0", form="inplace"),
                    call("add", "b1", "w2", form="inplace", to="v1"),
                ),
            ),
        ),
    ),
    Bug(
        id="compile-mutated-saved",
        what="an input that is written in place, and needed for a gradient, fails the check of the backward pass",
        why="the graph saves the input itself, which is written after it",
        link="https://github.com/pytorch/pytorch/pull/185876",
        torch=">=2.7,<2.15",
        seen="2.13.0",
        backends=("compile[aot_*", "compile[inductor*"),
        kinds=("raise",),
        ops=("*",),
        expected="^no error$",
        observed="^RuntimeError: one of the variables needed for gradient computation has been modified by an inplace operation: .*CopyBackwards",
        bare="diverges",
        examples=(
            Example(
                "compile[aot_eager]",
                case([x("b0", 2), x("w1", 2)], call("mul", "b0", "w1", form="inplace")),
            ),
            # Without autocast the product raises for its two dtypes, before the bug can show.
            Example(
                "compile[aot_eager]",
                case(
                    [x("b0", 2), x("w1", 2), x("x2", 2, 2), x("x3", 2, 2, dtype="bfloat16")],
                    call("mm", "x2", "x3"),
                    call("mul", "b0", "w1", form="inplace", to="v1"),
                ),
            ),
        ),
    ),
)
