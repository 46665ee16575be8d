"""Which ops torchax's autocast casts, and which modules do not notice it.

The scripts start with the lines that [torchax](../torchax.md) shows. Seen with torchax 0.0.13 and
jax 0.10.2 on the CPU.

## torchax-composites: composite ops, and torch functions known by name, are not cast

torchax looks up a policy by the op that reaches it. C++ decomposes composite ops (76 of the 127 in
the list) before that. torchax also knows some torch functions by name (`F.linear`,
`torch.einsum`, `torch.linalg.solve`, ...) and calls them before that. So it does with an op that is
called without its overload (`torch.ops.aten.mm`, not `torch.ops.aten.mm.default`). In all three
cases the lookup finds no policy, and nothing is cast. Convolutions, `linear`, `prelu`,
`linalg.vecdot`, and `matmul` of two vectors stay in float32. `l1_loss`, `nll_loss`,
`cross_entropy`, `kl_div` and eight other losses, `max_pool3d`, `adaptive_avg_pool3d` and the
padding ops stay in 16 bits.

```python
with env, torchax.amp.autocast("jax", torch.bfloat16):
    print(torch.nn.functional.linear(x.to("jax"), x.to("jax")).dtype)  # float32
    print(torch.nn.functional.conv1d(x[None].to("jax"), x[None].to("jax")).dtype)  # float32
    print(
        torch.nn.functional.l1_loss(x.bfloat16().to("jax"), x.bfloat16().to("jax")).dtype
    )  # bfloat16
    print(torch.ops.aten.mm(x.to("jax"), x.to("jax")).dtype)  # float32
    print(torch.mm(x.to("jax"), x.to("jax")).dtype)  # bfloat16
```

The reference imitates this bug, so any other bug in the same program still shows.

## torchax-float64: float64 is cast

torch's autocast never casts float64. torchax only checks `is_floating_point()`: `mm` of float64
gives bfloat16, and `prod` of float64 gives float32. (This shows in accuracy mode. In the default
mode, float64 is float32 from the start.)

## torchax-torch-autocast: `torch.autocast("jax")` casts nothing

torch accepts `torch.autocast("jax")`, with the dtypes that torchax's device module names, but the
context casts nothing. pytorch/xla#9361 registered policies for it, but was not merged. The merged
change (#9364) added `torchax.amp.autocast` instead. `--backends='torchax[torch.autocast]'` runs
programs under `torch.autocast("jax")`.

## torchax-promote: cat, stack and index_copy raise

`cat`, `stack` and `index_copy` raise under `torchax.amp.autocast`. So does everything that calls
them (`hstack`, `diag_embed`, `gradient`, all recurrent layers). The promote policy reads `a.dtype`
of every argument, and lists and integers have no dtype.

```python
with env, torchax.amp.autocast("jax", torch.bfloat16):
    torch.stack([x.to("jax")])  # AttributeError: 'list' object has no attribute 'dtype'
```

## torchax-linear-inside: `linear` inside `linear_cross_entropy` is cast

Inside `linear_cross_entropy`, torch's C++ calls `linear` and decomposes it into `mm` and `addmm`,
which have policies. Called from Python, `linear` is one torch function without a policy
([torchax-composites]).

## torchax-rnn-dtypes: recurrent modules ignore torchax's autocast

`torch.nn.GRU`, `LSTM` and `RNN` reject an input and weights of two dtypes unless autocast is on.
They ask torch, whose own autocast is off.

```python
with env, torchax.amp.autocast("jax", torch.bfloat16):
    gru = torch.nn.GRU(3, 2).to("jax")
    gru(torch.ones(5, 1, 3, dtype=torch.bfloat16).to("jax"))  # ValueError: RNN input dtype ...
```
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from amp_fuzz import reference
from amp_fuzz.backends.imitation import Imitation, inside
from amp_fuzz.cases.build import BF16, call, case, x
from amp_fuzz.reference import dispatch
from amp_fuzz.reference.calls import Call, Treatment
from amp_fuzz.reference.casts import device_of
from amp_fuzz.reference.semantics import Semantics
from amp_fuzz.upstream.bug import Bug, Example

__all__ = ["BUGS"]

_OPAQUE = (
    "cdist",
    "corrcoef",
    "einsum",
    "linalg_matrix_power",
    "linalg_pinv.atol_rtol_tensor",
    "linalg_solve",
    "linalg_svd",
    "linalg_tensorsolve",
    "linear",
    "lu_solve",
    "pad",
    "svd",
)
"""Ops that torchax 0.0.13 implements as torch functions, without decomposing them.

Source: torchax/ops/jtorch.py.
"""

_PACKETS = frozenset(
    getattr(torch.ops.aten, name)
    for name in ("grid_sampler_2d", "grid_sampler_3d", "max_unpool2d", "max_unpool3d")
)
"""Ops with a policy that programs call without an overload, and that torchax 0.0.13 finds so."""


class _Packets(TorchFunctionMode):
    """Calls these ops without autocast."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with dispatch.exclude() if func in _PACKETS else nullcontext():
            return func(*args, **(kwargs or {}))


@contextmanager
def _by_name() -> Iterator[None]:
    """Call torch functions, and ops without their overload, as torchax does."""
    with reference.intercepting(), _Packets():
        yield


def _decomposing(semantics: Semantics) -> Semantics:
    """Look up no policy of an op that is made of others."""

    def rule(call: Call) -> Treatment | None:
        return None if dispatch.is_composite(call.overload) else semantics.rule(call)

    def call(one: Call, found: Treatment | None) -> Any:
        if one.name in _OPAQUE:
            with dispatch.exclude():
                return one.function(*one.args, **one.kwargs)
        return semantics.call(one, found)

    def extra() -> tuple[str, ...]:
        return (*semantics.extra(), *_OPAQUE)

    return replace(semantics, rule=rule, call=call, extra=extra)


def _casting_float64(semantics: Semantics) -> Semantics:
    def eligible(tensor: torch.Tensor, device: str) -> bool:
        wide = tensor.dtype is torch.float64 and device_of(tensor) == device
        return wide or semantics.eligible(tensor, device)

    return replace(semantics, eligible=eligible)


def _without_policies(semantics: Semantics) -> Semantics:
    return replace(semantics, rule=lambda call: None)


def _imitated(semantics: Callable[[Semantics], Semantics]) -> Imitation:
    """Return an imitation, in which the reference intercepts ops outside autocast contexts, too."""
    return Imitation(semantics=semantics, wrap=inside(reference.intercepting))


BUGS = (
    Bug(
        id="torchax-composites",
        what="torchax's autocast does not cast convolutions, linear, einsum, prelu and most losses",
        why="torchax looks up policies by overload: composite ops are decomposed, or called as torch functions or without an overload, before that",
        torch=">=2.7",
        seen="2.13.0",
        harm="silent dtype",
        backends=("torchax*", "!torchax[torch.autocast]"),
        imitation=replace(_imitated(_decomposing), around=_by_name),
        examples=(
            Example("torchax", case([x("x0", 2, 3), x("w1", 2, 3)], call("linear", "x0", "w1"))),
            Example(
                "torchax",
                case(
                    [x("x0", 1, 1, 2, 2, 2, dtype="float16")],
                    call("max_unpool3d", "x0", [1, 1, 1], [2, 2, 2], form="overload"),
                ),
            ),
        ),
    ),
    Bug(
        id="torchax-float64",
        what="torchax's autocast casts float64 tensors",
        why="it only checks whether a tensor is floating point",
        torch=">=2.7",
        seen="2.13.0",
        harm="silent dtype",
        backends=("torchax*", "!torchax[torch.autocast]"),
        imitation=_imitated(_casting_float64),
        examples=(
            Example(
                "torchax",
                case(
                    [x("x0", 2, 2, dtype="float64"), x("x1", 2, 2, dtype="float64")],
                    call("mm", "x0", "x1"),
                ),
            ),
        ),
    ),
    Bug(
        id="torchax-torch-autocast",
        what="torch.autocast('jax') is accepted and casts nothing",
        why="torchax registers no kernels for AutocastPrivateUse1; its own autocast is torchax.amp.autocast",
        link="https://github.com/pytorch/xla/pull/9361",
        torch=">=2.7",
        seen="2.13.0",
        harm="silent dtype",
        backends=("torchax[torch.autocast]",),
        imitation=_imitated(_without_policies),
        examples=(
            Example(
                "torchax[torch.autocast]",
                case([x("x0", 2, 3), x("w1", 3, 2)], call("mm", "x0", "w1")),
            ),
        ),
    ),
    Bug(
        id="torchax-promote",
        what="cat, stack, index_copy and every op that calls them raise under torchax's autocast",
        why="its promote policy reads the dtype of every argument, including lists and integers",
        torch=">=2.7",
        seen="2.13.0",
        harm="raises",
        backends=("torchax*",),
        ops=("*",),
        kinds=("raise",),
        expected="^no error$",
        observed="^AttributeError: '(list|tuple|int|NoneType)' object has no attribute 'dtype'$",
        examples=(
            Example("torchax", case([x("x0", 2), x("x1", 2)], call("cat", ["x0", "x1"])), wrong=""),
        ),
    ),
    Bug(
        id="torchax-linear-inside",
        what="linear is cast inside linear_cross_entropy, but not when called from Python",
        why="torch's C++ decomposes it into mm and addmm, which have policies; a call from Python is one torch function without one",
        torch=">=2.7",
        seen="2.13.0",
        harm="silent dtype",
        backends=("torchax*",),
        ops=("linear_cross_entropy*",),
        kinds=("dtype", "value", "grad-value"),
        examples=(
            Example(
                "torchax",
                case(
                    [
                        x("x0", 2, 3),
                        x("x1", 4, 3),
                        x("x2", 2, dtype="int64", domain="index", bound=4),
                    ],
                    call("linear_cross_entropy", "x0", "x1", "x2"),
                    backward="none",
                ),
                wrong="",  # a wrong value behind a wrong dtype cannot be told
            ),
        ),
    ),
    Bug(
        id="torchax-rnn-dtypes",
        what="RNN, GRU and LSTM modules reject an input and weights of two dtypes under torchax's autocast",
        why="they ask whether torch's own autocast is on, and torchax's autocast does not turn it on",
        torch=">=2.7",
        seen="2.13.0",
        harm="raises",
        backends=("torchax*",),
        ops=("rnn_tanh", "rnn_relu", "gru", "lstm"),
        kinds=("raise",),
        expected="^no error$",
        observed="^ValueError: RNN input dtype \\(torch.\\w+\\) does not match weight dtype \\(torch.\\w+\\)",
        examples=(
            Example(
                "torchax",
                case(
                    [x("x0", 8, 2, 3, dtype="bfloat16"), x("w1", 9, 3), x("w2", 9, 3)],
                    call(
                        "gru",
                        "x0",
                        form="module",
                        inputs=3,
                        hidden=3,
                        layers=1,
                        bias=False,
                        first=False,
                        bidirectional=False,
                        names=["weight_ih_l0", "weight_hh_l0"],
                        weights=["w1", "w2"],
                        state=None,
                        to="v0 v1",
                    ),
                    contexts=(BF16,),
                ),
                wrong="",
            ),
        ),
    ),
)
