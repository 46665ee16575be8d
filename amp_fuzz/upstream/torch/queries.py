"""What torch answers to questions about autocast.

## query-asks-cuda: fast paths of attention and transformer layers under the CPU's autocast

```python
import torch

layer = torch.nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True).eval()
x = torch.randn(1, 3, 4)
with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
    print(layer(x).dtype)  # torch.bfloat16: the fused fast path
with torch.autocast("cpu", dtype=torch.bfloat16):
    print(layer(x).dtype)  # torch.float32: layer by layer, the last one a norm
```

**What torch does** (2.13.0). `MultiheadAttention`, `TransformerEncoderLayer` and
`TransformerEncoder` take a fused path in inference unless "autocast is enabled", and ask
`torch.is_autocast_enabled()` without a device. That question is about CUDA. Under autocast of the
CPU (and of xpu, mps, ...) the fast path runs, with other dtypes and other rounding than the same
layer in training or with grad enabled.

**What the documentation says.** `torch.nn.MultiheadAttention`: the fast path is used "if all of
the following conditions are met: [...] autocast is disabled".

**What the reference does.** Asked without a device, it answers whether any autocast is on.

**Upstream.** [#191796](https://github.com/pytorch/pytorch/issues/191796), and
[#191916](https://github.com/pytorch/pytorch/pull/191916), which makes the question about the
current accelerator: that leaves the CPU as it is.

## any-query-misses-devices: recurrent modules raise for mixed dtypes under autocast on mps and maia

```python
import torch

for device in ("cuda", "xpu", "mps", "mtia", "maia"):
    torch.set_autocast_enabled(device, True)
    print(device, torch._C._is_any_autocast_enabled())
    torch.set_autocast_enabled(device, False)
# cuda True, xpu True, mps False, mtia True, maia False
```

**What torch does** (2.13.0). `torch.nn.RNN`, `GRU` and `LSTM` compare the dtype of their input
with that of their weights and raise `ValueError: RNN input dtype (...) does not match weight
dtype (...)`, unless some autocast is on. They ask `torch._C._is_any_autocast_enabled()`, which
leaves out mps and maia. Under `torch.autocast("mps")` a float32 LSTM fed by a convolution's
float16 output raises, and runs under every other device's.

**What the documentation says.** "When entering an autocast-enabled region, Tensors may be any
type", and type mismatch errors in a region "are a bug".

**What the reference does.** Any enabled device counts.

**Upstream.** No issue that we know of. [#100621](https://github.com/pytorch/pytorch/pull/100621)
mended the same check for the CPU in 2023.

## any-query-misses-mtia: recurrent modules raise for mixed dtypes under autocast on mtia

```python
import torch

torch.set_autocast_enabled("mtia", True)
print(torch._C._is_any_autocast_enabled())  # torch 2.7 to 2.11: False; 2.13: True
```

**What torch does** (2.7.1 to 2.11.0). The same as on mps and maia: the question whether any
autocast is on leaves out mtia. 2.13.0 counts it.

**What the documentation says.** "When entering an autocast-enabled region, Tensors may be any
type", and type mismatch errors in a region "are a bug".

**What the reference does.** Any enabled device counts.

**Upstream.** No issue that we know of.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import replace

from amp_fuzz.backends.imitation import Imitation
from amp_fuzz.cases.build import F16, call, case, x
from amp_fuzz.reference.semantics import Semantics
from amp_fuzz.reference.state import State
from amp_fuzz.upstream.bug import Bug, Example

__all__ = ["BUGS"]


def _asks_cuda(semantics: Semantics) -> Semantics:
    return replace(
        semantics, enabled=lambda state, device: semantics.enabled(state, device or "cuda")
    )


def _missing(*devices: str) -> Callable[[Semantics], Semantics]:
    """Return a change after which these devices do not count where any device does."""

    def change(semantics: Semantics) -> Semantics:
        def any_enabled(state: State) -> bool:
            seen = copy(state)
            seen.enabled = {d: on for d, on in state.enabled.items() if d not in devices}
            return semantics.any_enabled(seen)

        return replace(semantics, any_enabled=any_enabled)

    return change


_GRU = case(
    [x("x0", 3, 1, 6, dtype="bfloat16"), x("x1", 15, 6), x("x2", 15, 5)],
    call(
        "gru",
        "x0",
        form="module",
        to="v0 v1",
        inputs=6,
        hidden=5,
        layers=1,
        bias=False,
        first=False,
        bidirectional=False,
        names=["weight_ih_l0", "weight_hh_l0"],
        weights=["x1", "x2"],
        state=None,
    ),
    backward="none",
)
_LAYER = {
    "self_attn.in_proj_weight": x("x1", 12, 4, dtype="float16", domain="integers"),
    "self_attn.in_proj_bias": x("x2", 12, dtype="float16", domain="integers"),
    "self_attn.out_proj.weight": x("x3", 4, 4, dtype="float16"),
    "self_attn.out_proj.bias": x("x4", 4, dtype="float16"),
    "linear1.weight": x("x5", 3, 4, dtype="float16"),
    "linear1.bias": x("x6", 3, dtype="float16", domain="integers"),
    "linear2.weight": x("x7", 4, 3, dtype="float16"),
    "linear2.bias": x("x8", 4, dtype="float16"),
    "norm1.weight": x("x10", 4, dtype="float16"),
    "norm1.bias": x("x11", 4, dtype="float16"),
    "norm2.weight": x("x12", 4, dtype="float16"),
    "norm2.bias": x("x13", 4, dtype="float16"),
}

BUGS = (
    Bug(
        id="query-asks-cuda",
        what="attention and transformer layers take their inference fast path under the CPU's autocast",
        why="they ask torch.is_autocast_enabled() without a device, which is about CUDA only",
        link="https://github.com/pytorch/pytorch/issues/191796",
        torch=">=2.7",
        seen="2.15.0",
        harm="silent value",
        imitation=Imitation(semantics=_asks_cuda),
        examples=(
            Example(
                "eager-cpu",
                case(
                    [x("x0", 2, 5, 4, dtype="float16", domain="integers"), *_LAYER.values()],
                    call(
                        "TransformerEncoderLayer",
                        "x0",
                        form="module",
                        embedding=4,
                        heads=2,
                        wide=3,
                        activation="gelu",
                        first=True,
                        training=False,
                        names=list(_LAYER),
                        weights=[s.name for s in _LAYER.values()],
                        mask=None,
                    ),
                    contexts=(F16,),
                    backward="none",
                ),
            ),
        ),
    ),
    Bug(
        id="any-query-misses-devices",
        what="RNN, GRU and LSTM raise for inputs and weights of two dtypes under autocast on mps and maia",
        why="torch._C._is_any_autocast_enabled() leaves out mps and maia",
        torch=">=2.7",
        seen="2.15.0",
        harm="raises",
        backends=("!torchax*",),
        imitation=Imitation(semantics=_missing("mps", "maia")),
        examples=(Example("fake-mps", _GRU),),
    ),
    Bug(
        id="any-query-misses-mtia",
        what="RNN, GRU and LSTM raise for inputs and weights of two dtypes under autocast on mtia",
        why="torch._C._is_any_autocast_enabled() leaves out mtia",
        torch=">=2.7,<2.13",
        seen="2.11.0",
        harm="raises",
        backends=("!torchax*",),
        imitation=Imitation(semantics=_missing("mtia")),
        examples=(Example("fake-mtia", _GRU),),
    ),
)
