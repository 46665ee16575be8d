"""TorchScript's gradients of `clamp` with tensors as bounds.

The formulas stand in `torch/csrc/jit/runtime/symbolic_script.cpp`; no autocast is needed.

## torchscript-clamp-bounds: no gradient for the bounds of clamp

```python
@torch.jit.script
def program(x, w):
    return torch.clamp(x * x, None, w)


x, w = torch.ones(3), torch.zeros(3, requires_grad=True)
for _ in range(2):
    w.grad = None
    program(x, w).sum().backward()
    print(w.grad)  # tensor([1., 1., 1.]), then None
```

## torchscript-clamp-broadcast: the gradient of what clamp broadcast

The formula does not add the gradient up to the size of the clamped value. Any other gradient of
that value is then added to each of its elements. Or a formula before it cannot expand it, and
raises `expand(torch.FloatTensor{[1, 1]}, size=[1]): ...`.

```python
@torch.jit.script
def program(w, x):
    return w / torch.clamp(w, x)


w, x = torch.tensor(0.0, requires_grad=True), torch.ones(2)
for _ in range(2):
    w.grad = None
    program(w, x).sum().backward()
    print(w.grad)  # 2, then 4
```

## torchscript-clamp-raises: eager cannot, TorchScript can

Here eager is wrong. `clamp` has two tensors as bounds, one of them needs a gradient, and the
clamped value is broadcast to their size. Then autograd's formula for the bound's gradient writes
a mask of the larger size into one of the smaller. TorchScript's formula gives bounds no gradient
([torchscript-clamp-bounds]) and goes through.

```python
w = torch.zeros(1, requires_grad=True)
low, high = torch.full((2,), -1.0), torch.tensor(1.0, requires_grad=True)
torch.clamp(w, low, high).sum().backward()
# output with shape [1] doesn't match the broadcast shape [2]
```
"""

from __future__ import annotations

from amp_fuzz.cases.build import call, case, x
from amp_fuzz.upstream.bug import Bug, Example

__all__ = ["BUGS"]

BUGS = (
    Bug(
        id="torchscript-clamp-bounds",
        what="the bounds of clamp get no gradient in a scripted program, from its second call on",
        why="TorchScript's formula for clamp returns None for min and max",
        torch=">=2.7",
        seen="2.15.0",
        backends=("script*", "trace*"),
        ops=("clamp.Tensor",),
        kinds=("grad-missing", "grad-value"),
        observed="^(None|0: excess)",
        bare="diverges",
        examples=(
            # TorchScript takes its formula for a clamp in a group of ops alone: w2 has its gradient.
            Example(
                "script",
                case(
                    [x("x0", 4), x("w1", 4), x("w2", 4)],
                    call("mul", "x0", "x0"),
                    call("clamp.Tensor", "v0", None, "w1", to="v1"),
                    call("sort", "v1", to="v2 v3"),
                    call("clamp.Tensor", "v2", None, "w2", to="v4"),
                    contexts=(),
                ),
            ),
        ),
    ),
    Bug(
        id="torchscript-clamp-broadcast",
        what="clamp hands on the gradient of a tensor that it broadcast as it is: it is added too often, or cannot be expanded",
        why="TorchScript's formula for clamp does not add the gradient up to the size of what was clamped",
        torch=">=2.7",
        seen="2.15.0",
        backends=("script*", "trace*"),
        ops=("clamp.Tensor",),
        kinds=("grad-value", "grad-shape", "raise"),
        observed="excess|^RuntimeError: expand\\(torch\\.",
        without="optimised-graphs",
        bare="diverges",
        examples=tuple(
            Example(
                "script",
                case(
                    [x("w0", domain="zeros"), x("x1", 2, values="3f800000" * 2)],
                    call("clamp.Tensor", "w0", "x1"),
                    call("div", "w0", "v0", to="v1"),
                    contexts=(),
                    thread=thread,
                ),
            )
            for thread in ("none", "inside", "whole")
        ),
    ),
    Bug(
        id="torchscript-clamp-raises",
        what="eager's backward pass of clamp between two tensors raises where one needs a gradient and what is clamped was broadcast; TorchScript's does not",
        why="autograd's formula combines masks of two shapes in place; TorchScript's gives bounds no gradient",
        torch=">=2.7",
        seen="2.13.0",
        backends=("script*", "trace*"),
        ops=("clamp.Tensor",),
        kinds=("raise",),
        where="*torch.autograd.*",
        expected="^RuntimeError: output with shape \\[.*\\] doesn't match the broadcast shape",
        observed="^no error$",
        without="optimised-graphs",
        bare="diverges",
        examples=(
            Example(
                "script",
                case(
                    [x("w0", 1), x("x1", 2), x("w2")],
                    call("mul", "w0", "w0"),
                    call("clamp.Tensor", "v0", "x1", "w2", to="v1"),
                    call("mul", "v1", "v1", to="v2"),
                    contexts=(),
                ),
                torch="<2.15",
            ),
        ),
    ),
)
