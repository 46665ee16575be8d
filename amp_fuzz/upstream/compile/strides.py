"""Strides that a compiler expects, and that tensors do not have.

All of it shows without autocast too.

## compile-out-strides: out= keeps its strides

```python
import torch


def f(x, q):
    torch.linalg.cholesky(x, out=q)
    return q.view(-1)


args = torch.eye(2), torch.empty(2, 2)
f(*args)
torch.compile(f, backend="aot_eager")(*args)  # ValueError: Cannot view a tensor
```

**What torch does** (2.13.0), from stage `aot_eager` on. Eager writes the result into `out=`,
which keeps its strides. The functionalised program has the strides of the result, so it cannot
make a view that eager makes.

**What the entry explains.** This error, if the program raises it without autocast too. A view of
what a fake kernel promises with wrong strides would raise it as well.

**Upstream.** Not reported that we know of.

## compile-conv-strides: a convolution of a padded input

**What torch does** (2.13.0), on stage `inductor`. The gradient of `conv2d(pad(x, (0, 0, 2, 2),
mode="replicate"), k, dilation=(1, 2))`, with `x` of shape `[2, 2, 2, 9]`, raises "AssertionError:
expected size 2==2, stride 1==18 at dim=1", in float32 as in bfloat16. Zeros as padding do not
raise.

**What the entry explains.** Convolution modules, which pad so.

**Upstream.** [#171622](https://github.com/pytorch/pytorch/issues/171622), for other shapes and
devices.

## compile-custom-op-strides: logsigmoid in a custom op

```python
import torch
from torch._subclasses import FakeTensorMode

x = torch.ones(3, 4).T
print(torch.nn.functional.logsigmoid(x).stride())  # (3, 1)
with FakeTensorMode() as mode:
    print(torch.nn.functional.logsigmoid(mode.from_tensor(x)).stride())  # (1, 4)
```

**What torch does** (2.13.0), on stage `inductor`. The result of `logsigmoid` of a transposed
tensor is contiguous; of a fake tensor it has the strides of the input. A custom op whose fake
kernel calls the same function as the op promises these strides, and Inductor's check of them
raises "AssertionError: expected size 2==2, stride 2==1 at dim=0". Compiled by itself `logsigmoid`
is decomposed.

**Upstream.** Not reported that we know of.
"""

from __future__ import annotations

from amp_fuzz.cases.build import call, case, x
from amp_fuzz.cases.literals import bits_of
from amp_fuzz.upstream.bug import Bug, Example

__all__ = ["BUGS"]

BUGS = (
    Bug(
        id="compile-out-strides",
        what="view of an out= whose op has other strides does not compile",
        why="functionalisation takes the result's strides for those of out=, which keeps its own",
        torch=">=2.7",
        seen="2.15.0",
        backends=("compile[aot_*", "compile[inductor*", "export[decomposed]"),
        kinds=("raise",),
        ops=("*",),
        expected="^no error$",
        observed=r"^(BackendCompilerFailed: backend='\w+' raised: )?ValueError: Cannot view a tensor with shape torch.Size\(.*\) and strides \(.*\) as a tensor with shape",
        bare="diverges",
        examples=(
            Example(
                "compile[aot_eager]",
                case(
                    [x("x0", 2, 2, values=bits_of([1.0, 0.0, 0.0, 1.0], "float32")), x("b1", 2, 2)],
                    call("linalg.cholesky", "x0", form="out", out="b1"),
                    call("view", "v0", [4], form="method", to="v1"),
                    contexts=(),
                    backward="none",
                ),
            ),
        ),
    ),
    Bug(
        id="compile-conv-strides",
        what="the backward pass of a convolution of a padded input fails Inductor's check of strides",
        why="the fake kernel of convolution_backward promises other strides than the kernel's",
        link="https://github.com/pytorch/pytorch/issues/171622",
        torch=">=2.7",
        seen="2.15.0",
        backends=("compile[inductor*",),
        kinds=("raise",),
        ops=("Conv*",),
        expected="^no error$",
        observed=r"^AssertionError: expected size \d+==\d+, stride \d+==\d+ at dim=\d",
        bare="diverges",
        examples=(
            Example(
                "compile[inductor]",
                case(
                    [x("w0", 2, 2, 2, 9), x("x1", 2, 2, 3, 3)],
                    call(
                        "Conv2d",
                        *("w0", "x1", None),
                        form="module",
                        stride=[1, 1],
                        padding=[2, 0],
                        dilation=[1, 2],
                        inner=2,
                        made=2,
                        groups=1,
                        mode="replicate",
                    ),
                    contexts=(),
                ),
            ),
        ),
    ),
    Bug(
        id="compile-custom-op-strides",
        what="a custom op that calls logsigmoid of a transposed tensor raises when Inductor compiles it",
        why="the fake kernel runs the body on fake tensors, where the result has the strides of what it was given; it is contiguous",
        torch=">=2.7",
        seen="2.15.0",
        backends=("compile[inductor*",),
        kinds=("raise",),
        ops=("logsigmoid",),
        expected="^no error$",
        observed=r"^AssertionError: expected size \d+==\d+, stride \d+==\d+ at dim=\d",
        examples=(
            Example(
                "compile[inductor]",
                case(
                    [x("x0", 3, 4, layout="transposed")],
                    call("logsigmoid", "x0"),
                    entry="custom_op",
                    backward="none",
                ),
            ),
        ),
    ),
)
