"""What torch does in function transforms.

## transform-before-autocast: function transforms come before autocast

```python
import torch
import torch.nn.functional as F

x, w, b = torch.randn(2, 3, 4), torch.randn(5, 4), torch.randn(5)
with torch.autocast("cpu", dtype=torch.bfloat16):
    print(F.linear(x[0], w, b).dtype)  # torch.bfloat16
    print(torch.func.vmap(lambda x: F.linear(x, w, b))(x).dtype)  # torch.float32

q = torch.randn(1, 3, 4)


def loss(q):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.scaled_dot_product_attention(q, q, q).float().sum()


torch.func.grad(loss)(q)
# RuntimeError: expected scalar type BFloat16 but found Float

tangent = torch.randn(4, 4)
with torch.autocast("cpu", dtype=torch.bfloat16):
    inverse, pushed = torch.func.jvp(torch.linalg.inv, (torch.eye(4),), (tangent,))
    print(pushed + tangent)  # zeros in float32; the products of the tangent ran in bfloat16
```

**What torch does** (2.13.0). The transforms of `torch.func` come before autocast in the
dispatcher. Under `vmap` a batching rule makes other ops of the one that was called, and autocast
decides about those: of `linear` with a bias the product is cast and the sum is not; an op with
the policy `fp32` may run in 16 bits, for which it has no kernel. Where a policy casts at one
level of a transform and calls the op with autocast excluded, the exclusion is lost at the next
level, which casts what is inside the op again. Under `jvp` and `jacfwd` this is also the formula of
its tangent: that of a matrix inverse or factorisation runs in 16 bits. `functionalize` loses the
exclusion too, forward-mode AD without a transform (`torch.autograd.forward_ad`) does not. Within
`autocast("cpu")` inside a device's autocast, the device's own exclusion is lost so.

**What the documentation says.** [Policies](https://docs.pytorch.org/docs/stable/amp.html) are for
the ops that are called; `vmap` "returns a function that maps func over dimensions of the inputs",
`grad` one that computes gradients: neither changes what dtype the function computes in.

**What the reference does.** Inside a transform of `torch.func` its kernels stand before the
transforms as well as behind them.

**Upstream.** [#192617](https://github.com/pytorch/pytorch/issues/192617) for `linear` with a
bias. No issue that we know of for `grad` through `scaled_dot_product_attention`.

## func-grad-ambient-backward: torch.func.grad runs its backward ops under autocast

```python
import torch

a = torch.randn(4, 4)
w = torch.randn(4, 4)


def loss(w):
    with torch.autocast("cpu", enabled=False):
        return torch.mm(a, w).square().sum()


expected = torch.func.grad(loss)(w)
with torch.autocast("cpu", dtype=torch.bfloat16):
    print(torch.func.grad(loss)(w) - expected)  # the product of the backward ran in bfloat16
```

**What torch does** (2.13.0). The transform runs its backward pass where it is called. Inside an
autocast context the backward ops are autocast by their own policies, whatever the forward op ran
in; where autocast stands inside the function that is differentiated they are not. `torch.func.jacrev`
does the same.

**What the documentation says.** ["Backward passes under autocast are not recommended. Backward
ops run in the same type that autocast used for corresponding forward
ops."](https://docs.pytorch.org/docs/stable/amp.html) `torch.func.grad` gives the caller no place
for the backward pass but the call itself.

**What the reference does.** Autocast is for the function: its state at the call holds inside the
function and not for the backward ops of the transform. (A `backward()` that a plan puts inside a
context is autocast, as it is in torch.)

**Upstream.** [functorch#305](https://github.com/pytorch/functorch/issues/305), open. A workaround
is to enter the context inside the function.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import nullcontext
from dataclasses import replace

from amp_fuzz.backends.imitation import Imitation
from amp_fuzz.cases.build import call, case, under, x
from amp_fuzz.cases.program import Autocast
from amp_fuzz.reference import dispatch
from amp_fuzz.reference.semantics import Semantics
from amp_fuzz.upstream.bug import Bug, Example

__all__ = ["BUGS"]


def _ambient_backward(semantics: Semantics) -> Semantics:
    return replace(semantics, around_grad=lambda ambient: nullcontext())


def _transform_first(semantics: Semantics) -> Semantics:
    return replace(semantics, ahead=nullcontext, excluded=_excluded_here)


def _excluded_here() -> Collection[str]:
    """Return the devices that are excluded, without those of which the next level lost it."""
    depth = dispatch.transform_depth()
    return {device for device, level in dispatch.excluded().items() if level == depth}


BUGS = (
    Bug(
        id="transform-before-autocast",
        what="inside torch.func.vmap and grad, ops run in another dtype than autocast says, or raise",
        why="autocast is asked about what the transform makes of an op, and at each level again",
        link="https://github.com/pytorch/pytorch/issues/192617",
        torch=">=2.7",
        seen="2.15.0",
        harm="silent dtype",
        backends=("!torchax*",),
        imitation=Imitation(semantics=_transform_first),
        examples=(
            Example(
                "eager-cpu",
                case(
                    [x("x0", 3, 4), x("x1", 2, 4), x("x2", 2)],
                    call("linear", "x0", "x1", "x2"),
                    backward="none",
                    transform="vmap",
                ),
            ),
            Example(
                "privateuse1",
                case(
                    [x("x0", 1, 1, 1), x("w1", 1, 1, 1), x("x2")],
                    under(Autocast(device="cpu"), call("addbmm", "x2", "x0", "w1")),
                    backward="none",
                    transform="vmap_grad",
                ),
            ),
        ),
    ),
    Bug(
        id="func-grad-ambient-backward",
        what="torch.func.grad under autocast runs the backward ops under autocast too",
        why="the transform runs its backward pass where it is called, inside the context",
        link="https://github.com/pytorch/functorch/issues/305",
        torch=">=2.7",
        seen="2.15.0",
        harm="silent gradient",
        backends=("!torchax*",),
        imitation=Imitation(semantics=_ambient_backward),
        examples=(
            Example(
                "eager-cpu",
                case(
                    [x("x0", 2, 2), x("w1", 2, 2)],
                    under(Autocast(enabled=False), call("mm", "x0", "w1")),
                    backward="inside",
                    transform="grad",
                ),
            ),
        ),
    ),
)
