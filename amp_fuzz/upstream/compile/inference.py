"""What AOTAutograd makes of ``inference_mode`` regions.

All of it shows from stage `aot_eager` on, without autocast too.

## compile-inference-tensors: views and in-place ops in an inference_mode region raise

```python
import torch


def f(x):
    with torch.inference_mode():
        return x[1:]


torch.compile(f, backend="aot_eager")(torch.ones(4))
# RuntimeError: Cannot set version_counter for inference tensor
```

**What torch does** (2.13.0). Inference tensors have no version counter. AOTAutograd traces with
such tensors, and asks for the counter of each view and of each tensor that an op writes to. The
error may also be "Inference tensors do not track version counter".

A view of a weight that the region makes is no inference tensor in eager, so a later op may save
it. A compiled program raises "Inference tensors cannot be saved for backward":

```python
def f(w):
    with torch.inference_mode():
        v = torch.broadcast_to(w, [2, 3])
    return v.fmax(w)
```

**Upstream.** [#180823](https://github.com/pytorch/pytorch/issues/180823),
[#181106](https://github.com/pytorch/pytorch/pull/181106).

## compile-inference-storage: a composite op raises a weak reference

```python
import torch


@torch.compile(backend="aot_eager")
def f(x):
    with torch.inference_mode():
        return torch.dstack([x])


f(torch.ones(2))
# RuntimeError: <weakref at 0x7f...; to 'torch.storage.UntypedStorage' at 0x7f...>
```

**What torch does** (2.7.1, 2.9.1, 2.11.0). In inference mode, a `FunctionalTensor` looks up the
base of its storage (`_storage_to_base`). `dstack`, and `_weight_norm` of float32 and float16, make
a storage that is not there; the text of the error is the missing key. Eager computes the result.

**Upstream.** Not reported that we know of. torch 2.13.0 computes it.

## compile-inference-index: an index that is a tensor of one integer

```python
import torch


@torch.compile(backend="aot_eager")
def f(x, i):
    with torch.inference_mode():
        return x[i]


f(torch.ones(1), torch.tensor(0))
# RuntimeError: state INTERNAL ASSERT FAILED ... Hit PythonDispatcher dispatch key but
# PythonDispatcherTLS was not set
```

**What torch does** (2.13.0). It raises if the index has no dimensions.

**Upstream.** Not reported that we know of.

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

## compile-inference-saved: inference tensors are saved for a backward pass

**What torch does** (2.13.0). The gradient of a weight's `conv1d` of an inference tensor needs
that tensor. Eager raises "Inference tensors cannot be saved for backward". A graph has no
inference tensors, so the compiled program computes.

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
