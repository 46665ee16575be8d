"""What AOTAutograd makes of ``inference_mode`` regions.

All of it shows from stage `aot_eager` on, without autocast too.

## compile-inference-guard: a failed compilation breaks a thread later

```python
import gc, torch


def f(x):
    y = x.sin()
    with torch.inference_mode():
        return y[1:]


try:
    torch.compile(f, backend="aot_eager")(torch.ones(4))  # raises
except RuntimeError:
    pass
gc.collect()
torch.ones(2) + 1
# RuntimeError: INTERNAL ASSERT FAILED ... Hit PythonDispatcher dispatch key but
# PythonDispatcherTLS was not set
```

**What torch does** (2.13.0). A compilation fails, here by [compile-inference-tensors]. The error
keeps its frames, which keep the region's guard: a reference cycle. The garbage collector deletes
the guard some time later, in whichever thread it runs. The guard then "restores" the grad mode
and the dispatch keys of the tracing that failed, and every op of that thread raises from then on.

If one `inference_mode` region stands in another, the collector may delete the inner guard. That
turns inference mode on for the rest of the thread.

**What amp-fuzz does.** It collects garbage in the thread of the case, and reports how that
changes the state. Otherwise another case would raise, at a time that no replay could meet.

**Upstream.** Not reported that we know of.
"""

from __future__ import annotations

from amp_fuzz.cases.build import call, case, under, x
from amp_fuzz.cases.program import InferenceMode
from amp_fuzz.upstream.bug import Bug, Example

__all__ = ["BUGS"]

BUGS = (
    Bug(
        id="compile-inference-guard",
        what="a compilation that fails in an inference_mode region breaks the thread that collects its garbage",
        why="the region's guard is an object in the frames of the error; deleted, it puts tracing's dispatch keys back",
        torch=">=2.7",
        seen="2.15.0",
        harm="state",
        backends=("compile[aot_*", "compile[inductor*"),
        kinds=("state",),
        ops=("*",),
        where="after an error",
        observed=r"^dispatch keys: .* became DispatchKeySet\(.*\bPythonDispatcher\)|^(autocast on \w+|grad mode): .* by a garbage collection$|^inference mode: False became True( by a garbage collection)?$",
        examples=(
            Example(
                "compile[aot_eager]",
                case(
                    [x("x0", 2, 2)],
                    under(InferenceMode(), call("unsqueeze", "x0", -1, form="method")),
                    contexts=(),
                    backward="none",
                ),
            ),
            Example(
                "compile[aot_eager]",
                case(
                    [x("x0")],
                    under(
                        InferenceMode(),
                        under(
                            InferenceMode(), call("binary_cross_entropy", "x0", "x0", weight="x0")
                        ),
                    ),
                    contexts=(),
                    backward="none",
                ),
            ),
        ),
    ),
)
