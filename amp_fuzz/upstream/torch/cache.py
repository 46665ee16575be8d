"""What torch does with the cache for casts of weights.

## cache-ignores-dtype: the weight cache ignores the dtype it cast to

```python
import torch

w = torch.randn(4, 4, requires_grad=True)
x = torch.randn(4, 4)
with torch.autocast("cpu", dtype=torch.bfloat16):
    torch.mm(x, w)
    with torch.autocast("cpu", dtype=torch.float16):
        torch.mm(x, w)
# RuntimeError: expected m1 and m2 to have the same dtype, but got: c10::Half != c10::BFloat16
```

**What torch does** (2.13.0). Autocast caches the low-precision cast of a float32 leaf that
requires grad until the outermost context ends. The cache is keyed by the tensor alone
(`cached_cast` in `aten/src/ATen/autocast_mode.cpp`), so under nested contexts of two dtypes the
inner one gets the cast that the outer one made. Most ops then raise; an op whose kernel takes
operands of two dtypes computes with the wrong one without a word. The cache is also one for all
threads, so a thread under `float16` gets the cast that another one made under `bfloat16`.

**What the documentation says.** ["In these regions, ops run in an op-specific dtype chosen by
autocast"](https://docs.pytorch.org/docs/stable/amp.html); the dtype is an argument of each
context, and "Type mismatch errors *in* an autocast-enabled region are a bug".

**What the reference does.** It keys the cache by tensor and dtype.

**Upstream.** No issue that we know of. AOTAutograd's cache had a relative, fixed in
[#181564](https://github.com/pytorch/pytorch/pull/181564). A workaround is `cache_enabled=False`
on the outer context.

## cache-ignores-grad-mode: A weight first used under no_grad trains no longer

```python
import torch

w, x = torch.ones(2, 2, requires_grad=True), torch.ones(2, 2)
with torch.autocast("cpu", dtype=torch.bfloat16):
    with torch.no_grad():
        x @ w
    y = x @ w
print(y.requires_grad)  # False
```

**What torch does** (2.7.1 and 2.10.0; mended in 2.11.0). The weight cache keeps the cast as its
first use made it. Under `no_grad` it has no history, and every later use of the weight in the
outermost context gets it: the weight has no gradient, without an error. Under `inference_mode`
the cast is an inference tensor, and a later use may raise "Inference tensors cannot be saved for
backward".

**What the documentation says.** The weight cache is an optimisation ("whether the weight cache
inside autocast should be enabled").

**What the reference does.** It makes a cast that it caches with grad enabled, and caches none in
inference mode, as torch 2.11 does.

**Upstream.** [#112583](https://github.com/pytorch/pytorch/issues/112583),
[#158232](https://github.com/pytorch/pytorch/issues/158232), mended by
[#165068](https://github.com/pytorch/pytorch/pull/165068). A workaround is `cache_enabled=False`.

## backward-thread-cache: A backward pass empties an accelerator's weight cache

```python
import torch
from torch.utils.checkpoint import checkpoint
from amp_fuzz import privateuse1

device = privateuse1.install("cpu")  # an accelerator on a machine without one; any other will do

x = torch.ones(1, 1, device=device)
w = torch.ones(1, 1, device=device, requires_grad=True)
v = torch.ones(1, device=device, requires_grad=True)
with torch.autocast(device, dtype=torch.bfloat16):
    y = x @ w  # the cast of w is in the weight cache
    checkpoint(torch.sin, v, use_reentrant=False).sum().backward()
    with torch.no_grad():
        w.mul_(0.5)
    print((x @ w).item())  # 0.5: cast anew. With device = "cpu": 1.0, the cast from before
```

**What torch does** (2.13.0). The backward pass of an accelerator's tensors runs in a thread of
autograd's own; that of CPU tensors in the thread that calls it. autograd takes along there
whether autocast is on, and its dtype. It does not take along the nesting depth, which is 0 in
that thread, and `cache_enabled`, which is True. So a context that is entered during the backward
pass (a checkpoint enters one to compute its forward again, `custom_bwd` another) is an outermost
one there: leaving it clears the weight cache, which is one for all threads, in the middle of the
context that surrounds the backward pass. And under `cache_enabled=False` whatever is computed
again has a cache all the same.

```python
def note(grad):
    print(torch.is_autocast_cache_enabled(), torch.autocast_increment_nesting())
    torch.autocast_decrement_nesting()


v.register_hook(note)
with torch.autocast(device, dtype=torch.bfloat16, cache_enabled=False):
    v.sum().backward()  # True 1; on the CPU: False 2
```

It shows where weights are used again after a backward pass inside of the context, or in what it
computes again: values of a later training step, and bits of gradients, since a weight that is
cast twice has its gradient summed in float32 instead of 16 bits.

**What the documentation says.**
[`torch.autocast`](https://docs.pytorch.org/docs/stable/amp.html): `cache_enabled`, "whether the
weight cache inside autocast should be enabled"; the state is "thread-local", which is about
threads of the user's. The same program means one thing on the CPU and another on an accelerator.

**What the reference does.** A thread of autograd's works under the state of the thread that
called it.

**Upstream.** Not reported that we know of.
[#71169](https://github.com/pytorch/pytorch/pull/71169) explains the threads for checkpoints.

## custom-op-weight-cache: A weight used in the body of a custom op loses its gradient outside

```python
import torch


@torch.library.custom_op("mine::product", mutates_args=())
def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ w


def setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def backward(ctx, grad):
    x, w = ctx.saved_tensors
    return grad.float() @ w.T, x.T @ grad.float()


product.register_autograd(backward, setup_context=setup_context)

x, w = torch.ones(2, 2), torch.ones(2, 2, requires_grad=True)
with torch.autocast("cpu"):
    product(x, w)
    y = x @ w
print(y.requires_grad)  # False
```

**What torch does** (2.13.0). The body of a custom op runs below autograd, in the region where the
op is called: autocast is on in it. The cast of a weight that it makes goes into the weight cache,
and has no history, since grad mode means nothing below autograd. Every later use of the weight in
the region gets that cast: it trains no longer, without an error. Under `no_grad` the same was
mended (#112583, #165068: "always creates cached tensors with grad enabled"); here enabling grad
does not help.

**What the documentation says.** The weight cache is an optimisation ("whether the weight cache
inside autocast should be enabled"); `custom_op` "wraps a function into custom operator", and says
nothing of what its body does to a caller's weights.

**What the reference does.** Casts that are made in the body are not kept.

**Upstream.** Not reported that we know of; related:
[#112583](https://github.com/pytorch/pytorch/issues/112583),
[#165068](https://github.com/pytorch/pytorch/pull/165068). Ways around: `register_autocast`, which
turns autocast off in the body, or `cache_enabled=False`.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import torch

from amp_fuzz.backends.imitation import Imitation
from amp_fuzz.cases.build import F16, call, case, under, x
from amp_fuzz.cases.program import Checkpoint
from amp_fuzz.reference.casts import cache_key, cacheable, device_of
from amp_fuzz.reference.semantics import Semantics
from amp_fuzz.reference.state import State, is_elsewhere
from amp_fuzz.upstream.bug import Bug, Example

__all__ = ["BUGS"]


class _Own(threading.local):
    cache_enabled = True
    nesting = 0


_own = _Own()


class _Behind(State):
    """A state in a thread of autograd's, where torch has another cache flag and nesting depth."""

    def __init__(self, state: State) -> None:
        object.__setattr__(self, "_whole", state)

    def __getattr__(self, name: str) -> Any:
        return getattr(_own if hasattr(_Own, name) else self._whole, name)

    def __setattr__(self, name: str, value: object) -> None:
        target = _own if hasattr(_Own, name) else self._whole
        setattr(target, name, value)


def _cast_as_is(tensor: torch.Tensor, to: torch.dtype) -> torch.Tensor:
    return tensor.to(to)


def _by_weight(semantics: Semantics) -> Semantics:
    return replace(semantics, cache_key=_key_of_weight)


def _key_of_weight(weight: torch.Tensor, to: torch.dtype) -> Hashable:
    """Return the weight's identity alone, unless its device has a cache of its own."""
    return cache_key(weight, to) if is_elsewhere(device_of(weight)) else id(weight)


def _in_any_mode(semantics: Semantics) -> Semantics:
    """Return rules that cache whatever the mode; inference mode is below autograd."""

    def keeps_below() -> bool:
        return torch.is_inference_mode_enabled() or semantics.keeps_below()

    return replace(semantics, caches=cacheable, cached_cast=_cast_as_is, keeps_below=keeps_below)


def _of_bodies(semantics: Semantics) -> Semantics:
    return replace(semantics, keeps_below=lambda: True)


def _of_thread(semantics: Semantics) -> Semantics:
    return replace(semantics, in_autograd_thread=_Behind)


BUGS = (
    Bug(
        id="cache-ignores-dtype",
        what="autocast contexts of two dtypes, nested or in two threads: one gets the other's cast of a weight",
        why="the weight cache is keyed by the weight alone, not by the dtype it was cast to",
        torch=">=2.7",
        seen="2.15.0",
        harm="silent dtype",
        backends=("!torchax*",),
        imitation=Imitation(semantics=_by_weight),
        examples=(
            Example(
                "eager-cpu",
                case(
                    [x("x0", 2, 2), x("w1", 2, 2)],
                    call("mm", "w1", "w1"),
                    under(F16, call("mm", "w1", "w1", to="v1")),
                ),
            ),
            Example(  # the first pass makes the cast in one thread, another one gets it
                "eager-cpu",
                case(
                    [x("x0", 2, 2), x("w1", 2, 2)],
                    call("mm", "w1", "w1"),
                    under(F16, call("mm", "w1", "w1", to="v1")),
                    first_pass="no_grad",
                    thread="inside",
                ),
                torch=">=2.11",
            ),
        ),
    ),
    Bug(
        id="cache-ignores-grad-mode",
        what="a weight first used under no_grad or inference_mode trains no longer, or raises, in the same autocast context",
        why="the cast is made and cached in the grad mode of its first use",
        link="https://github.com/pytorch/pytorch/issues/112583",
        torch="<2.11",
        seen="2.10.0",
        harm="silent gradient",
        backends=(
            "!privateuse1*",
            "!torchax*",
        ),
        imitation=Imitation(semantics=_in_any_mode),
        unshown="the pinned torch is mended: tests/reference/test_autocast.py holds the imitation",
    ),
    Bug(
        id="backward-thread-cache",
        what="a checkpoint, or a context inside a backward pass, empties an accelerator's weight cache",
        why="nesting depth and cache_enabled are of a thread, and the backward pass runs in another",
        torch=">=2.7",
        seen="2.15.0",
        harm="silent value",
        backends=(
            "privateuse1*",
            "eager-*",
            "!eager-cpu",
        ),
        imitation=Imitation(semantics=_of_thread),
        examples=(
            Example(
                "privateuse1",
                case(
                    [x("x0", 2, 2), x("w1", 2, 2), x("w2", 2)],
                    under(Checkpoint(), call("mul", "w2", "w2", to="v1")),
                    call("mm", "x0", "w1", to="v0"),
                    steps=2,
                    loop="inside",
                ),
            ),
        ),
    ),
    Bug(
        id="custom-op-weight-cache",
        what="a weight that is used in a custom op's body loses its gradient where it is used after it",
        why="the body runs below autograd, and the cast of the weight that it makes there is cached",
        torch=">=2.7",
        seen="2.15.0",
        harm="silent gradient",
        backends=(
            "!privateuse1*",
            "!torchax*",
        ),
        imitation=Imitation(semantics=_of_bodies),
        examples=(
            Example(
                "eager-cpu",
                case(
                    [x("x0", 2, 2), x("w1", 2, 2)],
                    call("mm", "x0", "w1"),
                    entry="custom_op",
                    calls=2,
                ),
            ),
        ),
    ),
)
