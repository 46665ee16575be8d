"""Grad modes that an optimised graph does not keep.

The results of a differentiable graph require grad, though none of its inputs does, and under
`no_grad`. No autocast is needed. (Under autocast, the fallback functions that run for it are
[torchscript-fallback].)

## torchscript-requires-grad: a value that nothing trains requires grad

If such a value is a result, the backward pass raises "derivative for aten::mul is not
implemented". If it is given to an op with `out=`, the op raises, from the second call on:
"functions with out=... arguments don't support automatic differentiation".

## torchscript-no-grad: a gradient in spite of no_grad

A value that a differentiable graph makes of a weight under `no_grad` hands a gradient on to it
([#128261](https://github.com/pytorch/pytorch/issues/128261)). The entry explains a gradient where
eager has none, in a program that has it without autocast too, and loses it where graphs are not
optimised.

```python
@torch.jit.script
def program(x, c, v, w):
    y = torch.addmm(x, v, v)
    with torch.no_grad():
        z = torch.where(c, x, torch.cat([w]))
    return y, z


x, c = torch.zeros([]), torch.tensor(False)
v, w = torch.ones(1, 1, requires_grad=True), torch.ones(1, requires_grad=True)
for _ in range(3):
    y, z = program(x, c, v, w)
    print(z.requires_grad)  # False, then True
```

## torchscript-inference-saved: a trained program cannot run in inference mode

```python
import torch


@torch.jit.script
def program(x, w):
    return torch.exp(torch.mm(x, w))


x, w = torch.zeros(1, 1), torch.zeros(1, 1, requires_grad=True)
for _ in range(2):
    program(x, w)  # profiled, then optimised with gradients
with torch.no_grad():
    program(x, w)
with torch.inference_mode():
    program(x, w)  # RuntimeError: Inference tensors cannot be saved for backward.
```

**What torch does.** The optimised graph has a part that saves what its gradient needs, whether or
not gradients are on. In inference mode that is an inference tensor, which autograd refuses to
save. Called in inference mode from the start, or under `no_grad`, the program runs.

**What the documentation says.** That inference mode is a faster `no_grad`; nothing of
TorchScript.

**What the entry explains.** That error, of a program that raises it without autocast too, and not
where graphs are not optimised (`torch.jit.optimized_execution(False)`): [trace-inference-constants]
raises there too. A cast that autocast's cache had kept from inference mode would raise the same,
and is not explained.
"""

from __future__ import annotations

from typing import Any

from amp_fuzz.cases.build import call, case, under, x
from amp_fuzz.cases.program import NoGrad
from amp_fuzz.upstream.bug import Bug, Example

__all__ = ["BUGS"]

TRAINED: tuple[Any, ...] = (
    [x("x0", 1, 1), x("w1", 1, 1)],
    call("mm", "x0", "w1"),
    call("exp", "v0", to="v1"),
)
INTERRUPTED: dict[str, Any] = {
    "backward": "none",
    "first_pass": "inference_mode",
    "interrupted": True,
}

BUGS = (
    Bug(
        id="torchscript-requires-grad",
        what="a backward pass, or an op with out=, raises for what requires grad in an optimised scripted program though nothing that it was made of does",
        why="what a differentiable graph makes requires grad, whatever it takes and whatever the grad mode",
        torch=">=2.7",
        seen="2.15.0",
        backends=("script*", "trace*"),
        ops=("*",),
        kinds=("raise",),
        expected="^no error$",
        observed="^RuntimeError: (derivative for aten::\\w+ is not implemented|\\w+\\(\\): functions with out=\\.\\.\\. arguments don't support automatic differentiation)",
        without="optimised-graphs",
        bare="diverges",
        examples=(
            Example(
                "script",
                case(
                    [x("x0", 1, 1), x("w1"), x("b2", 1, 1)],
                    call("mm", "x0", "x0"),
                    call("div", "v0", "w1", to="v1"),
                    call("sub", "v0", "x0", form="out", out="b2", to="v2"),
                    backward="none",
                    contexts=(),
                    returns=["v1"],
                ),
                wrong="",
            ),
        ),
    ),
    Bug(
        id="torchscript-no-grad",
        what="a weight that is used under no_grad alone has a gradient in an optimised scripted program",
        why="what a differentiable graph makes requires grad, whatever it takes and whatever the grad mode",
        link="https://github.com/pytorch/pytorch/issues/128261",
        torch=">=2.7",
        seen="2.15.0",
        backends=("script*", "trace*"),
        ops=("*",),
        kinds=("grad-missing",),
        where="*.grad",
        expected="^None$",
        observed="^\\w+\\[",
        without="optimised-graphs",
        bare="diverges",
        examples=(
            Example(
                "script",
                case(
                    [
                        x("w0", 1, 1),
                        x("x1"),
                        x("w2", 1),
                        x("x3", dtype="bool", domain="zeros"),
                    ],
                    call("addmm", "x1", "w0", "w0"),
                    under(
                        NoGrad(),
                        call("cat", ["w2"], to="v1"),
                        call("where", "x1", "x3", "v1", to="v2"),
                    ),
                    contexts=(),
                ),
            ),
        ),
    ),
    Bug(
        id="torchscript-inference-saved",
        what="a scripted program that was optimised while it trained raises in inference mode",
        why="its differentiable graph saves what autograd refuses to save; no autocast needed",
        link="https://github.com/pytorch/pytorch/issues/82550",
        torch=">=2.7",
        seen="2.15.0",
        backends=("script*", "trace*"),
        ops=("*",),
        kinds=("raise",),
        expected="^no error$",
        observed="^RuntimeError: Inference tensors cannot be saved for backward",
        without="optimised-graphs",
        bare="diverges",
        examples=(
            Example("trace", case(*TRAINED, contexts=(), **INTERRUPTED), wrong=""),
            Example("trace", case(*TRAINED, **INTERRUPTED), wrong=""),  # beside torchscript-pass
        ),
    ),
)
