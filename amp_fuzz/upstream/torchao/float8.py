"""FP8 linear layers of torchao.

Seen with torchao 0.18.0 on the CPU. `Float8Linear` is what ``convert_to_float8_training`` makes of a
`torch.nn.Linear`.

## torchao-autocast-cpu: autocast of the CPU does not cast the input

```python
import torch
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

layer = torch.nn.Linear(16, 16, bias=False)
layer = convert_to_float8_training(layer, config=Float8LinearConfig(emulate=True))
x = torch.full((16, 16), 1.001)
x[0, 0] = 448
with torch.autocast("cpu", torch.bfloat16):
    print(torch.equal(layer(x), layer(x.bfloat16())))  # False
```

**What torchao does.** `Float8Linear.forward` asks `torch.is_autocast_enabled()`, which is about CUDA
alone, and casts its input to CUDA's autocast dtype. Under autocast of the CPU it quantises the
input in the dtype that it has. The result has the autocast dtype all the same, because autocast
casts the operands of the product, which are tensors of a subclass.

**What the documentation says.** The comment there: "Duplicate the autocast logic for F.linear, so
that the output of our module has the right original precision", and "if we need CPU support in the
future, we can add it". `torch.nn.functional.linear` casts its inputs on both devices.

**What the reference does.** It casts the input to the autocast dtype of its device.

**Upstream.** Not reported.

## torchao-inference-mode: layers raise in inference mode and in custom ops

```python
import torch
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

config = Float8LinearConfig.from_recipe_name("rowwise")
layer = convert_to_float8_training(torch.nn.Linear(16, 16, bias=False), config=config)
with torch.inference_mode():
    layer(torch.randn(16, 16))  # AssertionError: aten.reshape.default with axiswise scaling ...
```

**What torchao does.** In inference mode, and in the body of a `torch.library.custom_op`, ops that are
made of other ops are not taken apart above the tensor subclass. `Float8TrainingTensor` refuses `reshape` of a tensor with rowwise scales, and
has no rule for the cast by which autocast of the CPU changes the dtype of an operand: "attempting to
run aten.to.dtype, this is not supported". Under `torch.no_grad()` both work.

**What the documentation says.** Inference mode is "analogous to `torch.no_grad`".

**What the reference does.** The same as under `torch.no_grad()`.

**Upstream.** Not reported.

## torchao-rowwise-bfloat16: rowwise products of float32 and float16 are rounded to bfloat16

```python
import torch
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

config = Float8LinearConfig.from_recipe_name("rowwise")
layer = convert_to_float8_training(torch.nn.Linear(16, 16, bias=False), config=config)
y = layer(torch.randn(16, 16))
print(torch.equal(y, y.bfloat16().float()))  # True: a float32 with the precision of bfloat16
```

**What torchao does.** `addmm_float8_unwrapped` asks `torch._scaled_mm` for bfloat16 if the scales
are rowwise, and casts the result. In the backward pass it multiplies without scales, in bfloat16,
and then by the product of both scales, which leaves the range of float32 for large inputs. With
``emulate=True`` neither happens.

**What the documentation says.** ``emulate``: "emulation is used instead of hardware accelerated
gemm". A comment blames a missing output type of `torch._scaled_mm`
([pytorch#156771](https://github.com/pytorch/pytorch/issues/156771)); torch 2.13 has it on the CPU.

**What the reference does.** It rounds once, to the dtype of the result.

**Upstream.** Not reported.

## torchao-rowwise-strides: a rowwise layer takes no strided batches

```python
import torch
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

config = Float8LinearConfig.from_recipe_name("rowwise")
layer = convert_to_float8_training(torch.nn.Linear(16, 16, bias=False), config=config)
x = torch.randn(16, 2, 16).transpose(0, 1)
layer(x)  # AssertionError: aten.clone.default with axiswise scaling is not supported yet
```

**What torchao does.** It quantises the input in its shape, and reshapes the quantised tensor to two
dimensions. Where that has to copy, the tensor subclass refuses.

**What the documentation says.** A converted layer takes what `torch.nn.Linear` takes. `[sequence,
batch, features]`, transposed, is an ordinary input.

**What the reference does.** It reshapes first.

**Upstream.** Not reported.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from amp_fuzz.backends.imitation import Imitation
from amp_fuzz.cases.build import call, case, under, x
from amp_fuzz.cases.program import FP8, InferenceMode
from amp_fuzz.reference.fp8 import Convention, Pass, Product, Quantised
from amp_fuzz.reference.semantics import Semantics
from amp_fuzz.upstream.bug import Bug, Example

_ROWS = FP8("rowwise", format="E4M3")


def _autocast(semantics: Semantics) -> Semantics:
    return replace(semantics, fp8=lambda made: replace(semantics.fp8(made), casts=False))


def _rowwise(semantics: Semantics) -> Semantics:
    def narrow(made: Convention) -> Convention:
        made = semantics.fp8(made)
        return replace(made, product=_in_bfloat16(made.product))

    return replace(semantics, fp8=narrow)


def _in_bfloat16(product: Product) -> Product:
    def rounded(
        a: Quantised, b: Quantised, dtype: torch.dtype, which: Pass, bias: None
    ) -> torch.Tensor:
        if a.scale.dim() < 2:
            return product(a, b, dtype, which, bias)
        if which.name == "forward":
            return product(a, b, torch.bfloat16, which, bias).to(dtype)
        one = torch.ones((), device=a.scale.device)
        left, right = (replace(m, scale=one, inverse=one) for m in (a, b))
        found = product(left, right, torch.bfloat16, which, bias)
        found *= a.inverse * b.inverse
        return found.to(dtype)

    return rounded


BUGS = (
    Bug(
        id="torchao-autocast-cpu",
        what="a float8 layer under autocast of the CPU quantises its input without casting it first",
        why="Float8Linear asks whether autocast of CUDA is on, and no other",
        torch=">=2.13",
        seen="2.13.0",
        harm="silent value",
        backends=("torchao", "torchao[emulate]"),
        ops=("fp8_linear",),
        imitation=Imitation(semantics=_autocast),
        examples=(
            Example(
                "torchao[emulate]",
                case(
                    [x("x0", 16, 16), x("w1", 16, 16)],
                    under(FP8(), call("fp8_linear", "x0", "w1")),
                    backward="none",
                ),
            ),
        ),
    ),
    Bug(
        id="torchao-inference-mode",
        what="a float8 layer raises in inference mode and in a custom op: a rowwise one, and any under autocast",
        why="ops that are made of others reach the tensor subclass whole, and it has no rule for them",
        torch=">=2.13",
        seen="2.13.0",
        harm="raises",
        backends=("torchao*",),
        ops=("fp8_linear",),
        kinds=("raise",),
        observed=r"AssertionError: aten.reshape.default with axiswise scaling|NotImplementedError: attempting to run aten.to.dtype",
        examples=(
            Example(
                "torchao[emulate]",
                case(
                    [x("x0", 16, 16), x("x1", 16, 16)],
                    under(_ROWS, under(InferenceMode(), call("fp8_linear", "x0", "x1"))),
                    contexts=(),
                    backward="none",
                ),
                wrong="",
            ),
        ),
    ),
    Bug(
        id="torchao-rowwise-strides",
        what="a rowwise float8 layer raises for an input of three dimensions that is not contiguous",
        why="its reshape copies, and the tensor subclass has no rule for clone with rowwise scales",
        torch=">=2.13",
        seen="2.13.0",
        harm="raises",
        backends=("torchao*",),
        ops=("fp8_linear",),
        kinds=("raise",),
        observed="AssertionError: aten.clone.default with axiswise scaling",
        examples=(
            Example(
                "torchao[emulate]",
                case(
                    [x("x0", 2, 16, 16, layout="transposed"), x("x1", 16, 16)],
                    under(_ROWS, call("fp8_linear", "x0", "x1")),
                    contexts=(),
                    backward="none",
                ),
                wrong="",
            ),
        ),
    ),
    Bug(
        id="torchao-rowwise-bfloat16",
        what="a rowwise float8 layer rounds its products to bfloat16, whatever their dtype",
        why="addmm_float8_unwrapped asks torch._scaled_mm for bfloat16, and scales after it in bfloat16",
        link="https://github.com/pytorch/pytorch/issues/156771",
        torch=">=2.13",
        seen="2.13.0",
        harm="silent value",
        backends=("torchao", "torchao@*"),
        ops=("fp8_linear",),
        imitation=Imitation(semantics=_rowwise),
        examples=(
            Example(
                "torchao",
                case(
                    [x("x0", 16, 16), x("w1", 16, 16)],
                    under(_ROWS, call("fp8_linear", "x0", "w1")),
                    contexts=(),
                    backward="none",
                ),
            ),
        ),
    ),
)
