"""Calls for which TorchScript picks another overload than Python, or another default.

## torchscript-addmm: a product and a sum

From the first call on, an `addmm` without factors is `mm` and `add`. The product is rounded, and
may leave the range. Two dtypes, and shapes that make the result larger, are no error. (Under
autocast, a fallback function computes the sum in float32: [torchscript-fallback].) The reference
takes it apart too.

```python
@torch.jit.script
def program(b, x, w):
    return torch.addmm(b, x, w)


def half(*rows):
    return torch.tensor(rows, dtype=torch.float16)


high = half([-256.0]), half([32768.0]), half([2.0])
print(torch.addmm(*high), program(*high))  # 65280, inf
near = half([-2048.0]), half([2048.0, 1.0]), half([1.0], [1.0])
print(torch.addmm(*near), program(*near))  # 1, 0
program(torch.ones(1, 1), *near[1:])  # float32; in eager "self and mat2 must have the same dtype"
```

## torchscript-mul-scalar: a number beyond the range of float16

In place, TorchScript multiplies by `mul_.Scalar`, whose kernel for the CPU rounds the number to
float16 first. Eager calls `mul_.Tensor`, whose kernel does not. Nor does `mul.Scalar`, nor `div_`.
The reference calls `mul_.Scalar` too.

```python
x = torch.full((2,), -0.5, dtype=torch.float16)
print(x.clone().mul_(65536.0))  # -32768
print(torch.ops.aten.mul_.Scalar(x.clone(), 65536.0))  # -inf, and so a scripted x.mul_(65536.0)
```

## torchscript-reduction: a default that Python reads as none

The schemas of seven losses have the mean as the default of `reduction`. TorchScript and
`torch.ops` follow them. Python's own bindings, `torch.kl_div` and the like, reduce nothing: their
argument parser reads the default, `at::Reduction::Mean` in `native_functions.yaml`, as the number
0. `torch.nn.functional` always passes a reduction. The losses are `kl_div`, `ctc_loss`,
`hinge_embedding_loss`, `margin_ranking_loss`, `cosine_embedding_loss`, `triplet_margin_loss` and
`binary_cross_entropy_with_logits`. The reference passes `reduction=1` there.

```python
x, y = torch.rand(3), torch.rand(3)
print(torch.kl_div(x, y).shape)  # torch.Size([3])
print(torch.ops.aten.kl_div(x, y).shape)  # torch.Size([]), and so a scripted torch.kl_div(x, y)
```

## torchscript-scalar-out: out= of another dtype

TorchScript calls the overload for numbers, `mul.Scalar_out`, which wants exactly the dtype of the
result. Eager makes a tensor of the number, and casts to the dtype of `out=`.

```python
@torch.jit.script
def program(x, out):
    return torch.mul(x, 2.0, out=out)


program(torch.ones(2), torch.ones(2, dtype=torch.bfloat16))
# Expected out tensor to have dtype float, ...
```
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch import Tensor

from amp_fuzz.backends.imitation import Imitation
from amp_fuzz.cases.build import BF16, F16, call, case, under, x
from amp_fuzz.cases.case import Case
from amp_fuzz.cases.literals import bits_of
from amp_fuzz.cases.program import Autocast, Node, NoGrad, Program, Statement, transform
from amp_fuzz.reference.state import enabled_devices
from amp_fuzz.upstream.bug import Bug, Example
from amp_fuzz.upstream.torchscript.programs import Replaced, replaced, within

__all__ = ["BUGS", "REDUCTIONS", "reduced"]


def _apart(honest: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make a product, which is rounded, and a sum, which takes what addmm refuses.

    Under autocast the bias has the dtype of the product: the pass has cast it before.
    """

    def addmm(b: Tensor, x: Tensor, w: Tensor, /, **named: Any) -> Tensor:
        if "out" in named or (named.get("beta", 1), named.get("alpha", 1)) != (1, 1):
            return honest(b, x, w, **named)
        product = torch.mm(x, w)
        cast = enabled_devices() and b.is_floating_point() and b.dtype is not torch.float64
        return torch.add(b.to(product.dtype) if cast else b, product)

    return addmm


SUMS: Replaced = ((torch, "addmm", _apart), (Tensor, "addmm", _apart))


def _by_number(honest: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Call the overload for numbers in place, which eager does not: it makes a tensor of them."""

    def times(x: Tensor, other: Any, /) -> Tensor:
        if not isinstance(other, (int, float)):
            return honest(x, other)
        result: Tensor = torch.ops.aten.mul_.Scalar(x, other)
        return result

    return times


NUMBERS: Replaced = ((Tensor, "mul_", _by_number), (Tensor, "__imul__", _by_number))

REDUCTIONS = {
    "binary_cross_entropy_with_logits": 4,
    "cosine_embedding_loss": 4,
    "ctc_loss": 5,
    "ctc_loss.lists": 5,
    "hinge_embedding_loss": 3,
    "kl_div": 2,
    "margin_ranking_loss": 4,
    "triplet_margin_loss": 7,
}
"""The number of the argument `reduction` of losses that Python calls by their overload."""


def reduced(program: Program) -> Program:
    """Return a program whose losses, where they say no `reduction`, take the schema's: the mean."""

    def said(call: Statement) -> tuple[Statement]:
        number = REDUCTIONS.get(call.op) if call.form == "overload" else None
        if number is None or len(call.args) > number or "reduction" in dict(call.kwargs):
            return (call,)
        return (msgspec.structs.replace(call, kwargs=(*call.kwargs, ("reduction", 1))),)

    return msgspec.structs.replace(program, body=transform(program.body, statement=said))


def _reduced(case: Case) -> Case:
    return msgspec.structs.replace(case, program=reduced(case.program))


def _sum(bias: str, *shape: int) -> Case:
    """Return a sum that eager refuses."""
    inputs = [x("x0", *shape, dtype=bias), *(x(f"x{i}", 2, 2, dtype="float16") for i in (1, 2))]
    return case(inputs, call("addmm", "x0", "x1", "x2"), contexts=(), backward="none")


ADDMM = call("addmm", "x0", "x1", "w2")


def _near(body: Node, contexts: tuple[Autocast, ...]) -> Case:
    """Return a sum near 0 of a product that is rounded, beside what trains."""
    values = {"x0": [-2048.0], "x1": [2048.0, 1.0], "w2": [1.0, 1.0]}
    shapes = {"x0": (1, 1), "x1": (1, 2), "w2": (2, 1)}
    inputs = [
        x(name, *shapes[name], dtype="float16", values=bits_of(given, "float16"))
        for name, given in values.items()
    ]
    after = call("mul", "x3", "w4", to="v1")
    return case([*inputs, x("x3", 1), x("w4", 1)], body, after, contexts=contexts)


BUGS = (
    Bug(
        id="torchscript-addmm",
        what="the product in addmm is rounded in a scripted program, or leaves the range, and any dtypes and shapes are added",
        why="TorchScript takes addmm apart into mm and add",
        torch=">=2.7",
        seen="2.15.0",
        backends=("script*", "trace*"),
        ops=("addmm",),
        imitation=Imitation(wrap=within(lambda: replaced(SUMS))),
        examples=(
            Example(
                "script",
                case(
                    [
                        x("x0", 2, 1, dtype="float16", values=bits_of([2.0, -2048.0], "float16")),
                        x(
                            "x1",
                            2,
                            2,
                            dtype="float16",
                            values=bits_of([1.0, 1.0, 2048.0, 1.0], "float16"),
                        ),
                        x("x2", 2, 1, dtype="float16", values=bits_of([1.0, 1.0], "float16")),
                    ],
                    call("addmm", "x0", "x1", "x2"),
                    contexts=(),
                ),
            ),
            Example(  # 32768 * 2 - 256
                "script",
                case(
                    [
                        x("x0", 1, 1, dtype="float16", values="7800"),
                        x("x1", 1, 1, dtype="float16", values="4000"),
                        x("x2", 1, dtype="float16", values="dc00"),
                    ],
                    call("addmm", "x2", "x0", "x1"),
                    backward="none",
                    contexts=(),
                ),
                wrong="",  # it is infinite
            ),
            Example("script", _sum("float32", 2, 2), wrong=""),
            Example("script", _sum("int64", 2, 2), wrong=""),
            Example("script", _sum("float16", 3, 2, 2), wrong=""),
            *(
                # Under no_grad it falls back, since a weight requires grad.
                Example("script", _near(body, contexts))
                for contexts in ((), (F16,), (BF16,))
                for body in (ADDMM, under(NoGrad(), ADDMM))
            ),
        ),
    ),
    Bug(
        id="torchscript-mul-scalar",
        what="float16 times a number beyond its range, in place, is infinite in a scripted program",
        why="TorchScript calls mul_.Scalar, whose kernel rounds the number to float16 first; eager calls mul_.Tensor",
        torch=">=2.7",
        seen="2.15.0",
        backends=("script*", "trace*"),
        ops=("mul.scalar",),
        imitation=Imitation(wrap=within(lambda: replaced(NUMBERS))),
        examples=(
            Example(
                "script",
                case(
                    [x("x0", 2), x("b1", 2, dtype="float16", values="b800" * 2)],
                    call("mul.scalar", "b1", 65536.0, form="inplace", to="v1"),
                    call("exp", "x0", to="v2"),
                    contexts=(),
                ),
            ),
        ),
    ),
    Bug(
        id="torchscript-reduction",
        what="torch.kl_div and six other losses that are called without `reduction` are means in a scripted program, and not in Python",
        why="Python's argument parser reads the default at::Reduction::Mean as 0, which is none; TorchScript takes the schema's; no autocast needed",
        torch=">=2.7",
        seen="2.15.0",
        backends=("script*",),
        ops=(
            "binary_cross_entropy_with_logits",
            "cosine_embedding_loss",
            "ctc_loss*",
            "hinge_embedding_loss",
            "kl_div",
            "margin_ranking_loss",
            "triplet_margin_loss",
        ),
        imitation=Imitation(rewrite=_reduced),
        examples=(
            Example(
                "script",
                case(
                    [x("x0", 3, domain="uniform"), x("x1", 3, domain="uniform")],
                    call("kl_div", "x0", "x1", form="overload", log_target=True),
                    contexts=(),
                ),
            ),
        ),
    ),
    Bug(
        id="torchscript-scalar-out",
        what="a sum, product or quotient with a number raises in a scripted program where its out= has another dtype",
        why="TorchScript calls the overload for numbers, whose out= must have the dtype of the result",
        torch=">=2.7",
        seen="2.15.0",
        backends=("script*", "trace*"),
        ops=("*.scalar",),
        kinds=("raise",),
        expected="^no error$",
        observed="^RuntimeError: Expected out tensor to have dtype \\S+( int)?, but got \\S+( int)? instead",
        bare="diverges",
        examples=(
            Example(
                "script",
                case(
                    [x("x0", 2), x("b1", 2, dtype="bfloat16")],
                    call("mul.scalar", "x0", 2.0, form="out", out="b1"),
                    backward="none",
                    contexts=(),
                ),
                wrong="",
            ),
        ),
    ),
)
