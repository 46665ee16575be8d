"""What torchax's autocast decides about ops, and what of it shows elsewhere.

The scripts begin as [torchax](../torchax.md) says. torchax 0.0.13, jax 0.10.2 on the CPU.

## torchax-composites: what is composite, or called by name, has no policy

The policy is looked up by the op that reaches torchax. Composite ops (76 of the 127 in the list)
are taken apart by C++ before, and torch functions that torchax knows by name (`F.linear`,
`torch.einsum`, `torch.linalg.solve`, ...) are called before: neither is in the table, so neither
is cast. Convolutions, `linear`, `prelu`, `linalg.vecdot`, and `matmul` of two vectors stay in
float32; `l1_loss`, `nll_loss`, `cross_entropy`, `kl_div` and eight other losses, `max_pool3d`,
`adaptive_avg_pool3d` and the padding ops stay in 16 bits.

```python
with env, torchax.amp.autocast("jax", torch.bfloat16):
    print(torch.nn.functional.linear(x.to("jax"), x.to("jax")).dtype)  # float32
    print(torch.nn.functional.conv1d(x[None].to("jax"), x[None].to("jax")).dtype)  # float32
    print(
        torch.nn.functional.l1_loss(x.bfloat16().to("jax"), x.bfloat16().to("jax")).dtype
    )  # bfloat16
    print(torch.mm(x.to("jax"), x.to("jax")).dtype)  # bfloat16
```

The reference imitates it (the quirk `torchax-composites`), so that anything else in the same
program is still seen.

## torchax-float64: float64 is cast

float64 is not eligible for autocast in torch. torchax asks `is_floating_point()` only: `mm` of
float64 is bfloat16, `prod` of float64 is float32. (It shows in accuracy mode; otherwise float64
is float32 from the start.)

## torchax-torch-autocast: `torch.autocast("jax")` casts nothing

`torch.autocast("jax")` is accepted, with the dtypes that torchax's device module names, and casts
nothing: pytorch/xla#9361, which registered policies for it, was not merged; what was (#9364) is
`torchax.amp.autocast`. `--backends='torchax[torch.autocast]'` runs contexts in this way.

## torchax-promote: cat, stack and index_copy raise

`cat`, `stack` and `index_copy`, and whatever is made of them (`hstack`, `diag_embed`, `gradient`,
all recurrent layers), raise under `torchax.amp.autocast`: the promote policy reads `a.dtype` of
each argument, and the first is a list.

```python
with env, torchax.amp.autocast("jax", torch.bfloat16):
    torch.stack([x.to("jax")])  # AttributeError: 'list' object has no attribute 'dtype'
```

## torchax-linear-inside: linear inside of linear_cross_entropy is cast

torch's C++ calls `linear` there, takes it apart into `mm` and `addmm`, and these have their
policy. A call from Python is one torch function, which has none: `torchax-composites`.

## torchax-rnn-dtypes: recurrent modules do not know of torchax's autocast

`torch.nn.GRU`, `LSTM` and `RNN` refuse an input and weights of two dtypes, unless autocast is on.
They ask torch, whose autocast is off.

```python
with env, torchax.amp.autocast("jax", torch.bfloat16):
    gru = torch.nn.GRU(3, 2).to("jax")
    gru(torch.ones(5, 1, 3, dtype=torch.bfloat16).to("jax"))  # ValueError: RNN input dtype ...
```
"""

from __future__ import annotations

from amp_fuzz.cases.build import BF16, call, case, x
from amp_fuzz.upstream.bug import Bug, Example
from amp_fuzz.upstream.torchax.examples import GRU_INPUTS, gru
from amp_fuzz.upstream.torchax.rules import imitation

__all__ = ["BUGS"]

BUGS = (
    Bug(
        id="torchax-composites",
        what="convolutions, linear, einsum, prelu and most losses keep their dtypes under torchax's autocast",
        why="composite ops are taken apart, or called as torch functions, before their policies are looked up",
        torch=">=2.7",
        seen="2.13.0",
        backends=("torchax*", "!torchax[torch.autocast]"),
        imitation=imitation(frozenset({"torchax-composites"})),
        examples=(
            Example("torchax", case([x("x0", 2, 3), x("w1", 2, 3)], call("linear", "x0", "w1"))),
        ),
    ),
    Bug(
        id="torchax-float64",
        what="float64 tensors are cast by torchax's autocast",
        why="it asks whether a tensor is floating point, and nothing else",
        torch=">=2.7",
        seen="2.13.0",
        backends=("torchax*", "!torchax[torch.autocast]"),
        imitation=imitation(frozenset({"torchax-float64"})),
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
        why="torchax registers no kernels for AutocastPrivateUse1; what casts is torchax.amp.autocast",
        link="https://github.com/pytorch/xla/pull/9361",
        torch=">=2.7",
        seen="2.13.0",
        backends=("torchax[torch.autocast]",),
        imitation=imitation(frozenset({"torchax-torch-autocast"})),
        examples=(
            Example(
                "torchax[torch.autocast]",
                case([x("x0", 2, 3), x("w1", 3, 2)], call("mm", "x0", "w1")),
            ),
        ),
    ),
    Bug(
        id="torchax-promote",
        what="cat, stack and index_copy, and what is made of them, raise under torchax's autocast",
        why="its promote policy reads a dtype of every argument, of lists and integers too",
        torch=">=2.7",
        seen="2.13.0",
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
        what="linear inside of linear_cross_entropy is cast, though linear itself is not",
        why="torch's C++ takes it apart into mm and addmm, which have their policy; a call from Python is one torch function",
        torch=">=2.7",
        seen="2.13.0",
        backends=("torchax*",),
        ops=("linear_cross_entropy*",),
        kinds=("dtype", "value", "grad-value"),
        bare="agrees",
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
            ),
        ),
    ),
    Bug(
        id="torchax-rnn-dtypes",
        what="the modules RNN, GRU and LSTM raise for an input and weights of two dtypes under torchax's autocast",
        why="they ask torch whether autocast is on, and torchax's autocast is not torch's",
        torch=">=2.7",
        seen="2.13.0",
        backends=("torchax*",),
        ops=("rnn_tanh", "rnn_relu", "gru", "lstm"),
        kinds=("raise",),
        expected="^no error$",
        observed="^ValueError: RNN input dtype \\(torch.\\w+\\) does not match weight dtype \\(torch.\\w+\\)",
        examples=(
            Example(
                "torchax",
                case(
                    [x("x0", 8, 2, 3, dtype="bfloat16"), *GRU_INPUTS[1:]], gru(), contexts=(BF16,)
                ),
                wrong="",
            ),
        ),
    ),
)
