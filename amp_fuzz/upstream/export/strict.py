"""Autocast regions in a strict export.

## export-strict-regions: a strict export traces a region under the autocast around it

```python
import torch


class Module(torch.nn.Module):
    def forward(self, x, w):
        with torch.autocast("cpu", enabled=False):
            y = torch.mm(x, w)
        return torch.lerp(y, w, 0.5)


x, w = torch.randn(2, 2), torch.randn(2, 2)
with torch.autocast("cpu", dtype=torch.bfloat16):
    torch.export.export(Module(), (x, w))
    torch.export.export(Module(), (x, w), strict=True)
# RuntimeError: expected dtype torch.bfloat16 for `end`, but got dtype torch.float32
```

**What torch does** (2.7.1 to 2.15.0, CPU). With ``strict=True`` dynamo makes a graph, in which
`_enter_autocast` and `_exit_autocast` are calls, and the export traces that graph. Its mode of torch
functions (`PreDispatchTorchFunctionMode`) writes them down and does not run them: "For autocast, the
python APIs run so we don't have to run them again". That is so without ``strict=True`` alone. While it
is traced, all is under the autocast around the export. The regions are in the exported program, but
what was decided by a dtype is wrong: an op raises, a cast is left out or goes to another dtype, and an
assertion of a dtype fails when the program runs.

**What the documentation says.** An exported program "is a sound representation of the original
program" (https://docs.pytorch.org/docs/stable/export.html).

**What the reference does.** Each region holds for what is in it.

**Upstream.** No issue that we know of.
"""

from __future__ import annotations

from amp_fuzz.cases.build import call, case, under, x
from amp_fuzz.cases.program import Autocast
from amp_fuzz.upstream.bug import Bug, Example

__all__ = ["BUGS"]


BUGS = (
    Bug(
        id="export-strict-regions",
        what="a strict export traces autocast regions as if they were not there",
        why="the mode that traces dynamo's graph writes down that a region is entered, and does not enter it",
        torch=">=2.7",
        seen="2.15.0",
        harm="raises",
        backends=("export[strict]",),
        kinds=("raise", "dtype", "value", "grad-dtype", "grad-value"),
        ops=("*",),
        without="unentered-regions",
        examples=(
            Example(
                "export[strict]",
                case(
                    [x("x0", 1, 1), x("x1", 1, 1)],
                    under(Autocast(enabled=False), call("mm", "x0", "x0")),
                    call("lerp", "v0", "x1", 0.5, to="v1"),
                    backward="none",
                ),
            ),
        ),
    ),
)
