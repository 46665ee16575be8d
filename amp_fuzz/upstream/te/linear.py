"""The linear layer of Transformer Engine.

Seen with the Python code of Transformer Engine 2.20.2 on the CPU, over a stub of its extension:
[docs/fp8.md](../../fp8.md). It depends on no kernel; the script below was not run on a GPU.

## te-retained-graph: a second backward pass over a retained graph raises

```python
import torch
import transformer_engine.pytorch as te

layer = te.Linear(16, 16)
with te.autocast(enabled=True):
    y = layer(torch.randn(16, 16, device="cuda"))
y.sum().backward(retain_graph=True)
y.sum().backward()  # AttributeError: 'NoneType' object has no attribute 'grad_output'
```

**What Transformer Engine does.** `_Linear.backward` sets ``ctx.backward_objects = None`` and
`restore_from_func_ctx` sets ``ctx.tensor_objects = None``, which frees memory before the graph dies.
It came with [#2967](https://github.com/NVIDIA/TransformerEngine/pull/2967), "Prepare linear for torch
compile". The second backward pass finds nothing.

**What the documentation says.** torch's: with ``retain_graph=True`` "the graph used to compute the
grads" is not freed. Transformer Engine's names no such limit.

**What the reference does.** The second backward pass gives what the first gave.

**Upstream.** [#990](https://github.com/NVIDIA/TransformerEngine/issues/990) reports it for an older
version.
"""

from __future__ import annotations

from amp_fuzz.cases.build import call, case, under, x
from amp_fuzz.cases.program import FP8
from amp_fuzz.upstream.bug import Bug, Example

BUGS = (
    Bug(
        id="te-retained-graph",
        what="a second backward pass over a retained graph through te.Linear raises",
        why="its backward sets the objects that it saved on ctx to None",
        link="https://github.com/NVIDIA/TransformerEngine/issues/990",
        torch=">=2.13",
        seen="2.13.0",
        backends=("te", "te-python"),
        ops=("fp8_linear",),
        kinds=("raise",),
        observed="AttributeError: 'NoneType' object has no attribute 'grad_output'",
        examples=(
            Example(
                "te-python",
                case(
                    [x("x0", 16, 16), x("w1", 16, 16)],
                    under(FP8("current"), call("fp8_linear", "x0", "w1")),
                    contexts=(),
                    second="retain",
                ),
            ),
        ),
    ),
)
