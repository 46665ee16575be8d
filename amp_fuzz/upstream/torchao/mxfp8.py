"""MXFP8 linear layers of torchao.

Seen with torchao 0.18.0 on the CPU, where ``MXFP8Linear`` is emulated.

## torchao-mxfp8-autocast: MXFP8Linear ignores autocast

```python
import torch
from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

layer = MXFP8Linear(32, 32, kernel_preference=KernelPreference.EMULATED)
with torch.autocast("cpu", torch.bfloat16):
    print(layer(torch.randn(32, 32)).dtype)  # torch.float32
    layer(torch.randn(32, 32).bfloat16())  # RuntimeError: expected m1 and m2 to have the same dtype
```

**What torchao does.** `MXTensor` is a subclass that drops the cast of `torch.mm` under autocast.
The input and the weight are quantised in the dtypes that they have, the product has that dtype,
and two dtypes raise. So an input that an op under autocast made does not fit to a float32 weight.

**What the documentation says.** ``MXFP8Linear`` is "a linear layer", a `torch.nn.Linear`, which
autocast runs in its dtype. Of autocast nothing is said. ``Float8Linear`` of the same package
duplicates "the autocast logic for F.linear".

**What the reference does.** It casts the input to autocast's dtype, which the result has too, as
``Float8Linear`` does.

**Upstream.** Not reported. [ao#568](https://github.com/pytorch/ao/issues/568) was the same for
``Float8Linear``.

## torchao-mxfp8-composite: MXFP8Linear raises under autocast in inference mode and in custom ops

```python
import torch
from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

layer = MXFP8Linear(32, 32, kernel_preference=KernelPreference.EMULATED)
with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
    layer(torch.randn(32, 32))  # NotImplementedError: ... attempting to run ... aten.to
```

**What torchao does.** In inference mode, and in the body of a `torch.library.custom_op`, ops that
are made of other ops reach the tensor subclass whole. `MXTensor` has no rule for the cast by which
autocast changes the dtype of an operand.

**What the documentation says.** Inference mode is "analogous to `torch.no_grad`", under which the
same call works.

**What the reference does.** The same as under `torch.no_grad()`.

**Upstream.** Not reported.

## torchao-mxfp8-strides: MXFP8Linear takes no strided input or weight

```python
import torch
from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

layer = MXFP8Linear(32, 32, kernel_preference=KernelPreference.EMULATED)
layer(torch.randn(32, 32).t())  # AssertionError: unsupported
```

**What torchao does.** `to_mx` asserts that its argument is contiguous. The layer makes the gradient
contiguous, "a no-op when grad_output is already contiguous", but neither the input nor the weight.

**What the documentation says.** The layer is a `torch.nn.Linear`, which takes a transposed matrix.

**What the reference does.** It quantises whatever the strides are.

**Upstream.** Not reported.
"""

from __future__ import annotations

from dataclasses import replace

from amp_fuzz.backends.imitation import Imitation
from amp_fuzz.cases.build import call, case, under, x
from amp_fuzz.cases.program import FP8, InferenceMode
from amp_fuzz.reference.semantics import Semantics
from amp_fuzz.upstream.bug import Bug, Example

_MXFP8 = FP8("mxfp8", format="E4M3")
_BACKENDS = ("torchao[mxfp8]*",)


def _deaf(semantics: Semantics) -> Semantics:
    return replace(
        semantics, fp8=lambda made: replace(semantics.fp8(made), casts=False, follows=False)
    )


BUGS = (
    Bug(
        id="torchao-mxfp8-autocast",
        what="an MXFP8 layer ignores autocast: its result has the dtype of its input",
        why="MXTensor drops autocast's cast, and MXFP8Linear does not cast its input itself",
        link="https://github.com/pytorch/ao/issues/568",
        torch=">=2.13",
        seen="2.13.0",
        harm="silent dtype",
        backends=_BACKENDS,
        ops=("fp8_linear",),
        imitation=Imitation(semantics=_deaf),
        examples=(
            Example(
                "torchao[mxfp8]",
                case(
                    [x("x0", 32, 32), x("w1", 32, 32)],
                    under(_MXFP8, call("fp8_linear", "x0", "w1")),
                    backward="none",
                ),
            ),
        ),
    ),
    Bug(
        id="torchao-mxfp8-composite",
        what="an MXFP8 layer raises under autocast in inference mode and in a custom op",
        why="the cast reaches MXTensor whole, as aten.to, and it has no rule for it",
        torch=">=2.13",
        seen="2.13.0",
        harm="raises",
        backends=_BACKENDS,
        ops=("fp8_linear",),
        kinds=("raise",),
        observed="NotImplementedError: MXTensor dispatch: attempting to run unimplemented operator",
        examples=(
            Example(
                "torchao[mxfp8]",
                case(
                    [x("x0", 32, 32), x("x1", 32, 32)],
                    under(_MXFP8, under(InferenceMode(), call("fp8_linear", "x0", "x1"))),
                    backward="none",
                ),
                wrong="",
            ),
        ),
    ),
    Bug(
        id="torchao-mxfp8-strides",
        what="an MXFP8 layer raises for an input or a weight that is not contiguous",
        why="to_mx asserts that its argument is contiguous, and the layer does not make it so",
        torch=">=2.13",
        seen="2.13.0",
        harm="raises",
        backends=_BACKENDS,
        ops=("fp8_linear",),
        kinds=("raise",),
        observed="AssertionError: unsupported",
        examples=(
            Example(
                "torchao[mxfp8]",
                case(
                    [x("x0", 32, 64, layout="transposed"), x("x1", 32, 64)],
                    under(_MXFP8, call("fp8_linear", "x0", "x1")),
                    contexts=(),
                    backward="none",
                ),
                wrong="",
            ),
        ),
    ),
)
