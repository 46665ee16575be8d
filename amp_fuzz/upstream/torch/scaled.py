"""Products of FP8 matrices under autocast.

## scaled-mm-autocast: torch._scaled_mm of two formats multiplies in bfloat16 under autocast

```python
import torch

a = torch.randn(16, 32).to(torch.float8_e5m2)
b = torch.randn(16, 32).to(torch.float8_e4m3fn).t()
one = torch.ones(())
y = torch._scaled_mm(a, b, one, one, out_dtype=torch.float32)
with torch.autocast("cpu", torch.bfloat16):
    print((torch._scaled_mm(a, b, one, one, out_dtype=torch.float32) - y).abs().max())  # 0.1, not 0
```

**What torch does.** On the CPU the product of E5M2 and E4M3 has no kernel of its own. It is emulated:
the matrices are converted to float32, scaled, and multiplied by `at::mm`. That call enters the
dispatcher from the top, where autocast casts both to its 16-bit dtype. `torch._scaled_mm` itself has
no policy. Products of one format are not affected. Gradients of FP8 layers are of two formats
(HYBRID), so a backward pass inside autocast has errors of 0.3 % instead of 2e-7.

**What the documentation says.** `_scaled_mm` is in no list of ops that autocast casts
([Autocast Op Reference](https://docs.pytorch.org/docs/stable/amp.html#autocast-op-reference)), and
``out_dtype=torch.float32`` asks for a product accumulated in float32.

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
        low = which.autocast
        with torch_answers(), torch.autocast(device, low) if low else nullcontext():
            return product(a, b, dtype, which, bias)

    return multiplied


BUGS = (
    Bug(
        id="scaled-mm-autocast",
        what="torch._scaled_mm of E5M2 and E4M3 multiplies in the autocast dtype, on the CPU",
        why="it is emulated by at::mm, which autocast casts",
        torch=">=2.13",
        seen="2.13.0",
        backends=("te-python", "scaled_mm"),
        ops=("fp8_linear",),
        imitation=Imitation(semantics=_casts),
        examples=(
            Example(
                "te-python",
                case(
                    [x("x0", 16, 16), x("w1", 16, 16)],
                    under(FP8("current"), call("fp8_linear", "x0", "w1")),
                    backward="inside",
                ),
            ),
        ),
    ),
)
