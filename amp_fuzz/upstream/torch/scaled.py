"""Products of FP8 matrices under autocast.

## scaled-mm-autocast: scaled_mm multiplies in bfloat16 under autocast of the CPU

```python
import torch
from torch.nn.functional import ScalingType, scaled_mm

a = torch.randn(16, 32).to(torch.float8_e4m3fn)
b = torch.randn(16, 32).to(torch.float8_e4m3fn).t()
scale = torch.tensor(0.3), ScalingType.TensorWise
y = scaled_mm(a, b, *scale, *scale, output_dtype=torch.float32)
with torch.autocast("cpu", torch.bfloat16):
    print((scaled_mm(a, b, *scale, *scale, output_dtype=torch.float32) - y).abs().max())  # not 0
```

**What torch does.** On the CPU, `torch.nn.functional.scaled_mm` with tensorwise scales is emulated: the
matrices are converted to float32, scaled, and multiplied by `at::mm`. That call enters the dispatcher
from the top, where autocast casts both to its 16-bit dtype. `torch._scaled_mm` does the same for
E5M2 with E4M3, and has a kernel for two matrices of one format. Neither has a policy. The error is
0.3 % instead of 2e-7. A layer that calls `scaled_mm` has it in its forward pass, one that calls
`torch._scaled_mm` in a backward pass inside autocast, since gradients are E5M2.

**What the documentation says.** Neither is in the list of ops that autocast casts
([Autocast Op Reference](https://docs.pytorch.org/docs/stable/amp.html#autocast-op-reference)), and
``output_dtype=torch.float32`` asks for a product in float32.

**What the reference does.** It multiplies as without autocast.

**Upstream.** Not reported.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from amp_fuzz.backends.imitation import Imitation
from amp_fuzz.cases.build import call, case, under, x
from amp_fuzz.cases.program import FP8
from amp_fuzz.reference.autocast import torch_answers
from amp_fuzz.reference.fp8 import Convention, Pass, Product, Quantised
from amp_fuzz.reference.fp8.formats import E2M1
from amp_fuzz.reference.semantics import Semantics
from amp_fuzz.upstream.bug import Bug, Example


def _casts(semantics: Semantics) -> Semantics:
    def cast(made: Convention) -> Convention:
        made = semantics.fp8(made)
        return replace(made, product=_under_autocast(made.product))

    return replace(semantics, fp8=cast)


def _under_autocast(product: Product) -> Product:
    def multiplied(
        a: Quantised, b: Quantised, dtype: torch.dtype, which: Pass, bias: Any
    ) -> torch.Tensor:
        device = a.values.device.type
        low = None if a.format is E2M1 else which.autocast  # NVFP4 is not multiplied by scaled_mm
        with torch_answers(), torch.autocast(device, low) if low else nullcontext():
            return product(a, b, dtype, which, bias)

    return multiplied


BUGS = (
    Bug(
        id="scaled-mm-autocast",
        what="scaled_mm of float8 matrices multiplies in the autocast dtype, on the CPU",
        why="it is emulated by at::mm, which autocast casts",
        torch=">=2.13",
        seen="2.15.0",
        harm="silent value",
        backends=("te-python", "scaled_mm"),
        ops=("fp8_linear",),
        imitation=Imitation(semantics=_casts),
        examples=(
            Example(
                "scaled_mm",
                case(
                    [x("x0", 16, 16), x("w1", 16, 16)],
                    under(FP8(), call("fp8_linear", "x0", "w1")),
                    backward="none",
                ),
            ),
            Example(
                "te-python",
                case(
                    [x("x0", 16, 16), x("w1", 16, 16)],
                    under(FP8("current"), call("fp8_linear", "x0", "w1")),
                    backward="inside",
                ),
            ),
            Example(
                "te-python",
                case(
                    [x("x0", 32, 32), x("w1", 32, 32)],
                    under(FP8("nvfp4"), call("fp8_linear", "x0", "w1")),
                    under(FP8("current"), call("fp8_linear", "x0", "w1", to="v1")),
                    backward="inside",
                ),
            ),
        ),
    ),
)
