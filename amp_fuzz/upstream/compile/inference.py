"""What compilers make of ``inference_mode`` regions.

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

**What torch does** (2.13.0), from stage `aot_eager` on, without autocast too. A compilation fails,
here by [compile-inference-tensors]. The error keeps its frames, which keep the region's guard: a
reference cycle. The garbage collector deletes the guard some time later, in whichever thread it
runs. The guard then "restores" the grad mode and the dispatch keys of the tracing that failed, and
every op of that thread raises from then on.

If one `inference_mode` region stands in another, the collector may delete the inner guard. That
turns inference mode on for the rest of the thread.

**What amp-fuzz does.** It collects garbage in the thread of the case, and reports how that
changes the state. Otherwise another case would raise, at a time that no replay could meet.

**Upstream.** Not reported that we know of.

## compile-inference-cast: a weight has the cast of another dtype in an inference_mode region

```python
import torch


def f(w):
    with torch.inference_mode():
        y = torch.bmm(w, w)
        with torch.autocast("cpu", dtype=torch.float16):
            return y, torch.bmm(w, torch.ones(1, 2, 2))


w = torch.ones(1, 2, 2, requires_grad=True)
with torch.autocast("cpu", dtype=torch.bfloat16):
    f(w)
    torch.compile(f, backend="eager")(w)
# TorchRuntimeError: ... RuntimeError('expected scalar type torch.bfloat16 but found torch.float16')
```

**What torch does** (2.12.1 and 2.13.0), from stage `eager` on; torch 2.14 makes no graph of it. The
key of autocast's cache has no dtype ([cache-ignores-dtype]). In `inference_mode` eager keeps no casts.
dynamo makes its fake tensors outside of that mode, where casts are kept, and takes the cast of the
outer context for the inner one.

**What the entry explains.** A program that raises while dynamo makes its fake tensors, and agrees when
its contexts keep no casts.

**Upstream.** Not reported that we know of.
"""

from __future__ import annotations

from amp_fuzz.cases.build import F16, call, case, under, x
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
    Bug(
        id="compile-inference-cast",
        what="in an inference_mode region of a compiled program a weight has the cast of another dtype",
        why="dynamo makes its fake tensors outside of inference_mode, where autocast keeps casts under a key without a dtype",
        torch=">=2.12,<2.14",
        seen="2.13.0",
        harm="raises",
        backends=("compile[*",),
        kinds=("raise",),
        ops=("*",),
        expected="^no error$",
        observed="^TorchRuntimeError: RuntimeError when making fake tensor call",
        without="weight-cache",
        examples=(
            Example(
                "compile[eager]",
                case(
                    [x("w0", 1, 2, 2), x("x1", 1, 2, 2)],
                    under(
                        InferenceMode(),
                        call("bmm", "w0", "w0"),
                        under(F16, call("bmm", "w0", "x1", to="v1")),
                    ),
                    backward="none",
                ),
                wrong="",
            ),
        ),
    ),
)
