"""What torch makes of the ``promote`` policy.

## promote-foreign-half: the promote policy raises for the other 16-bit dtype

```python
import torch

h = torch.ones(2, dtype=torch.float16)
with torch.autocast("cpu", dtype=torch.bfloat16):
    torch.cat([h, h])
# RuntimeError: Unexpected floating ScalarType in at::autocast::prioritize
```

**What torch does** (2.13.0). Ops that "promote to the widest input type" (`cat`, `stack`,
`index_copy` on CPU; `addcmul`, `addcdiv`, `atan2`, `bilinear`, `cross`, `dot`, `vdot`,
`grid_sampler`, `index_put`, `scatter_add`, `tensordot` on accelerators) fold over their arguments
with a function that knows float32 and the autocast dtype, and raises for any other floating dtype
unless a float32 argument came before it. The order of the arguments decides: `cat([float32,
float16])` runs, `cat([float16, float32])` raises.

It reaches further than the lists: `torch.roll`, `torch.fft.fftshift`, `torch.gradient`,
`torch.cartesian_prod`, `torch.linalg.matrix_exp`, and `torch.isin` on larger inputs call `cat` or
`stack` inside, and so raise for a single float16 tensor that they would only move about.

`torch.autocast("cuda", dtype=torch.float64)` is taken without a warning. Under it the function
raises for tensors of any dtype: `promote type is double in at::autocast::prioritize`.

**What the documentation says.** "These ops don't require a particular dtype for stability, but
take multiple inputs and require that the inputs' dtypes match. If all of the inputs are bfloat16,
the op runs in bfloat16. If any of the inputs is float32, autocast casts all inputs to float32."
No error is promised for float16, and type mismatch errors in a region "are a bug".

**What the reference does.** The widest of the inputs' dtypes; two different 16-bit dtypes meet in
float32, as in torch's own type promotion.

**Upstream.** [#132715](https://github.com/pytorch/pytorch/issues/132715) (closed by making
autograd pass on the autocast dtype, which leaves this branch as it was);
[#191125](https://github.com/pytorch/pytorch/pull/191125), closed.

## promote-skips-optional: the promote policy does not ask optional tensors

On an accelerator (here with CUDA):

```python
import torch

x, y = torch.ones(1, 2, device="cuda").bfloat16(), torch.ones(1, 3, device="cuda").bfloat16()
w = torch.ones(4, 2, 3, device="cuda").bfloat16()
bias = torch.ones(4, device="cuda")  # float32
with torch.autocast("cuda", dtype=torch.bfloat16):
    print(torch.nn.functional.bilinear(x, y, w, bias).dtype)
# torch.bfloat16, where the widest input is float32
```

**What torch does** (2.13.0). The function that finds the widest dtype has overloads for `Tensor`
and `Tensor[]`, none for `Tensor?`. `bilinear`'s bias is the only optional tensor among the ops of
this policy: its dtype is not asked, and it is then cast to what the others decided.

**What the documentation says.** "If any of the inputs is float32, autocast casts all inputs to
float32 and runs the op in float32."

**What the reference does.** It asks every floating-point argument.

**Upstream.** [#191125](https://github.com/pytorch/pytorch/pull/191125), closed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from amp_fuzz.backends.imitation import Imitation
from amp_fuzz.cases.build import call, case, x
from amp_fuzz.reference.calls import Call
from amp_fuzz.reference.casts import eligible, promoted, tensors_of
from amp_fuzz.reference.semantics import Semantics
from amp_fuzz.reference.state import is_elsewhere
from amp_fuzz.upstream.bug import Bug, Example

__all__ = ["BUGS"]


def _in_order(tensors: Iterable[torch.Tensor], device: str, low: torch.dtype) -> torch.dtype:
    """Return what a fold over the arguments comes to, which starts from `low`."""
    if is_elsewhere(device):
        return promoted(tensors, device, low)
    current = low
    for tensor in tensors:
        if current is torch.float64:
            raise RuntimeError("promote type is double in at::autocast::prioritize")
        if not eligible(tensor, device):
            continue
        if torch.float32 in (current, tensor.dtype):
            current = torch.float32
        elif not (current is low and tensor.dtype is low):
            raise RuntimeError("Unexpected floating ScalarType in at::autocast::prioritize")
    return current


def _required(call: Call) -> list[torch.Tensor]:
    """Return the tensors among the arguments of a call that are not optional."""
    parameters = {p.name: p for p in call.overload._schema.arguments}
    given = {**dict(zip(parameters, call.args, strict=False)), **call.kwargs}
    optional = torch.OptionalType.ofTensor()
    return tensors_of(v for name, v in given.items() if parameters[name].type != optional)


def _foreign_half(semantics: Semantics) -> Semantics:
    return replace(semantics, promoted=_in_order)


def _skips_optional(semantics: Semantics) -> Semantics:
    return replace(semantics, promoting=_required)


BUGS = (
    Bug(
        id="promote-foreign-half",
        what="an op of the promote policy raises for a 16-bit input that is not of the autocast dtype, or if that is float64",
        why="upstream's fold over the arguments knows the autocast dtype and float32 only",
        link="https://github.com/pytorch/pytorch/issues/132715",
        torch=">=2.7",
        seen="2.15.0",
        harm="raises",
        backends=("!torchax*",),
        imitation=Imitation(semantics=_foreign_half),
        examples=(
            Example("eager-cpu", case([x("x0", 5, dtype="float16")], call("cat", ["x0"], 0))),
        ),
    ),
    Bug(
        id="promote-skips-optional",
        what="bilinear's bias is cast to what the other arguments decide, though it is wider",
        why="the promote policy does not ask optional tensors",
        link="https://github.com/pytorch/pytorch/pull/191125",
        torch=">=2.7",
        seen="2.15.0",
        harm="silent dtype",
        backends=(
            "!privateuse1*",
            "!torchax*",
        ),
        imitation=Imitation(semantics=_skips_optional),
        examples=(
            Example(
                "fake-cuda",
                case(
                    [
                        x("x0", 3, 2, dtype="bfloat16"),
                        x("x1", 3, 2, dtype="bfloat16"),
                        x("x2", 4, 2, 2, dtype="bfloat16"),
                        x("x3", 4),
                    ],
                    call("bilinear", "x0", "x1", "x2", "x3"),
                    backward="none",
                ),
            ),
        ),
    ),
)
