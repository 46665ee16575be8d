"""What fake kernels promise, and the ops do not keep.

A compiler plans casts, memory and gradients by what fake kernels answer.

## compile-custom-op-promise: a cotangent is read beyond its memory

```python
import torch


def multiply(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return torch.tensordot(x, w, 1)


def backward(ctx, grad):
    return None, ctx.saved_tensors[0].t() @ (grad.float() * 2)


product = torch.library.custom_op("mine::product", multiply, mutates_args=())
product.register_fake(multiply)
product.register_autograd(
    backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0])
)
for f in product, torch.compile(product):
    w = torch.ones(64, 64, requires_grad=True)
    y = f(torch.ones(64, 64), w)
    y.backward(torch.ones_like(y))
    print(y.dtype, w.grad[0, 0])  # bfloat16 and 128; bfloat16 and 64, or anything
```

**What torch does** (2.13.0), on stage `inductor`; on `aot_eager` two dtypes may meet, and raise.
The fake kernel opens an autocast region and calls the same function, as the op itself does. But
it runs below autograd, where a composite op reaches `FakeTensorMode` whole, and nothing in it is
cast. So `tensordot` of float32 promises float32 and returns bfloat16. The compiled backward pass
takes the cotangent for float32: it reads pairs of bfloat16 numbers as one, and twice as far as
the memory goes. The gradient changes from run to run. 2.15.0 raises instead, in the forward pass:
"expected dtype torch.float32 but got torch.bfloat16".

Of 448 ops of the catalogue (632 calls in a custom op, each in a bfloat16 region) 14 promise
another dtype than they return: `einsum`, `gru`, `linalg.pinv` of two kinds,
`linear_cross_entropy.chunked`, `matrix_power` of two kinds, `native_layer_norm`, `rnn_relu`,
`rnn_tanh` and their cells, `tensordot` and `TransformerEncoderLayer`.

**What the entry explains.** A program with one of these ops that agrees, again and again, if the
fake kernel of a custom op returns what the op returns for zeros.

**Upstream.** Not reported that we know of.
"""

from __future__ import annotations

from amp_fuzz.cases.build import BF16, call, case, under, x
from amp_fuzz.upstream.bug import Bug, Example

__all__ = ["BUGS"]

BUGS = (
    Bug(
        id="compile-custom-op-promise",
        what="gradients of a custom op are read beyond the memory of a cotangent, where its fake kernel has another dtype than the op",
        why="below autograd a composite op of the fake kernel reaches the mode whole, and what it is made of is not cast",
        torch=">=2.7",
        seen="2.15.0",
        harm="silent gradient",
        backends=("compile[*",),
        kinds=("nondeterminism", "grad-nonfinite", "grad-value", "raise"),
        ops=(
            *("TransformerEncoderLayer", "einsum", "gru", "linalg.pinv*", "linear_cross_entropy*"),
            *("matrix_power*", "native_layer_norm", "rnn_relu*", "rnn_tanh*", "tensordot"),
        ),
        without="promised-dtypes",
        examples=(
            Example(
                "compile[inductor]",
                case(
                    [x("x0", 17, 4), x("w1", 4, 9)],
                    under(BF16, call("tensordot", "x0", "w1", dims=[[1], [0]])),
                    entry="register_autocast",
                    backward="outside",
                ),
                wrong="",
            ),
        ),
    ),
)
