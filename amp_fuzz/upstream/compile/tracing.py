"""A program as AOTAutograd traces it: what autocast decides about, and what the graph returns.

AOTAutograd runs a program once under modes of its own and keeps a graph of the ops that reach them.
The reference can do so, too.

## compile-functions, compile-chain-matmul: l1_loss forgets its weight, chain_matmul its out=

Stage aot_eager, without autocast too. `torch.nn.functional.l1_loss` does not hand its `weight` on
to `handle_torch_function`, through which AOTAutograd calls it
([#193003](https://github.com/pytorch/pytorch/pull/193003)):

```python
x, y, w = torch.tensor([1.0, 2.0]), torch.zeros(2), torch.tensor([3.0, 5.0])
torch.nn.functional.l1_loss(x, y, weight=w, reduction="sum")  # 13; 3 when compiled
```

The same happens in an export and on torchax. `torch.chain_matmul(x, y, out=b)` loses its `out=` in
the same way. Dynamo returns `b` all the same, as it was. A value computed from the result is right.

## compile-traced-backward: the backward pass is traced with the forward

Stage aot_eager, without autocast too. `torch.linalg.ldl_factor(w)` of a weight raises "derivative
for aten::linalg_ldl_factor_ex is not implemented" when it is compiled, and
`torch.linalg.cond(w, p="fro")` "one of the variables needed for gradient computation has been
modified". In eager only `backward()` would raise
([linalg-cond-backward](../torch/kernels.md#linalg-cond-backward)). So does
`low, high = torch.aminmax(w); low.mul_(2)`. If a program runs no backward pass, the reference runs
one, and must come to the same error. Of a custom op it runs the op's own backward: that of `t` of a
weight under `no_grad` gives `torch.autograd.backward` a tensor without history.

## compile-kernels: what a kernel calls is not cast

Stage aot_eager. AOTAutograd asks autocast about each op that it traces, and runs the graph with
autocast off. `torch.linalg.pinv` is one op of a graph. Its kernel calls `matmul`, which eager's
autocast casts:

```python
with torch.autocast("cpu", dtype=torch.bfloat16):
    torch.linalg.pinv(x).dtype  # bfloat16; float32 when compiled
```

In an `inference_mode` region composite ops reach AOTAutograd whole, too, and autocast is off in the
ops that they call. `ReplicationPad3d(0)(x)` of bfloat16 stays bfloat16 where eager casts to
float32, and `nll_loss(x, t, weight=w)` with a float16 weight raises "expected scalar type Float but
found Half".

## compile-dropout: a dropout that drops nothing returns a copy

Stage aot_eager, without autocast too. Eager's `dropout` that drops nothing returns the tensor that
it was given. Its decomposition (`torch/_decomp/decompositions.py`) clones it. A write to the result
changes the input in eager only:

```python
def f(x):
    y = x + 0
    torch.nn.functional.dropout(y, training=False).add_(1)
    return y


f(torch.zeros(1)), torch.compile(f, backend="aot_eager")(torch.zeros(1))  # 1, 0
```

`with torch.no_grad(): v = dropout(w, p=0.0)` of a weight is `w` in eager, and a copy without grad
when compiled. We found no report.

## compile-weight-cache: the weight cache is kept in eager only

Stage aot_eager. In one context eager uses the cast of a weight again, even after the weight was
updated in place, until the outermost context ends (documented for `cache_enabled`). AOTAutograd
traces with the cache disabled and has the casts in its graphs: a second step sees the new weight.
A program that itself changes a weight inside a context depends on the cache: `amp_fuzz.check` says
so, with the verdict ``stale``.

## compile-views: a view made under no_grad has a grad_fn

Stage aot_eager, without autocast too. `with torch.no_grad(): v = w.unsqueeze(-1)` of a weight
requires grad and has no `grad_fn` in eager, and `torch.autograd.backward` refuses it. A compiled
program makes the view again from `w`, with grad enabled: a gradient flows. The same holds for a
view of any tensor that requires grad. A `GradScaler` hides the refusal, since the product with the
scale has a history. Then the gradient through the view is missing in eager, and is added when
compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from amp_fuzz.backends.imitation import Imitation, Program, inside
from amp_fuzz.cases.build import call, case, under, x
from amp_fuzz.cases.case import CUSTOM_OPS, Case
from amp_fuzz.cases.program import NoGrad
from amp_fuzz.patching import patched
from amp_fuzz.reference import dispatch
from amp_fuzz.reference.cache import own_cache
from amp_fuzz.upstream.bug import Bug, Example
from amp_fuzz.upstream.compile.handed_on import handed_on

__all__ = ["BUGS"]

AOT = "compile[aot_eager]"


def _forgetting(program: Program, case: Case) -> Program:
    """Return a program that returns the ``out=`` of ``chain_matmul``, to which nothing is written."""

    def run(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        honest: Callable[..., torch.Tensor] = torch.chain_matmul
        forgotten: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def chain_matmul(*matrices: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
            product = honest(*matrices)
            if out is not None:
                forgotten[id(product)] = out, product
            return product

        with patched(torch, "chain_matmul", chain_matmul):
            outputs = program(*inputs)
        return tuple(forgotten.get(id(o), (o,))[0] for o in outputs)

    return run


# -- the backward pass ---------------------------------------------------------------------------


def _traced(program: Program, case: Case) -> Program:
    own = case.plan.backward == "none" and case.plan.entry not in CUSTOM_OPS
    return _differentiated(program) if own else program


def _traced_op(op: Program, case: Case) -> Program:
    return _differentiated(op) if case.plan.backward == "none" else op


def _differentiated(function: Program) -> Program:
    """Return a function that runs its backward pass for the error that this may raise."""

    def run(*inputs: torch.Tensor) -> Sequence[torch.Tensor]:
        outputs: Sequence[torch.Tensor] = function(*inputs)
        made = [output for output in outputs if output.requires_grad]
        weights = [x for x in inputs if x.requires_grad]
        if made and weights and torch.is_grad_enabled():
            ones = [torch.ones_like(output) for output in made]
            torch.autograd.grad(made, weights, ones, retain_graph=True, allow_unused=True)
        return outputs

    return run


# -- the ops of a graph --------------------------------------------------------------------------


class _Uncast(TorchDispatchMode):
    """Run the kernel of every op that is dispatched without autocast.

    Autocast has decided about the op before a mode sees it.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with dispatch.exclude():
            return func(*args, **(kwargs or {}))


@contextmanager
def _dropouts() -> Iterator[None]:
    """Copy the tensor that eager's dropout returns as it is."""
    honest: Callable[..., torch.Tensor] = torch.dropout

    def dropout(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        made = honest(x, *args, **kwargs)
        return made.clone() if made is x else made

    with (
        patched(torch, "dropout", dropout),
        patched(torch._VF, "dropout", dropout),  # what torch.nn.functional calls
    ):
        yield


# -- views ---------------------------------------------------------------------------------------


def _with_views(program: Program, case: Case) -> Program:
    """Return a program that makes the views that it returns again, with grad."""

    def run(*inputs: torch.Tensor) -> Sequence[torch.Tensor]:
        outputs: Sequence[torch.Tensor] = program(*inputs)
        return tuple(map(_again, outputs)) if torch.is_grad_enabled() else outputs

    return run


def _again(output: torch.Tensor) -> torch.Tensor:
    """Return a view made under ``no_grad`` as one made with grad."""
    base = output._base
    if base is None or not (output.requires_grad and output.grad_fn is None):
        return output
    return base.as_strided(output.shape, output.stride(), output.storage_offset())


def _viewed(scaler: bool) -> Case:
    """Return a view of a result, whose gradient eager refuses or, scaled, leaves out."""
    return case(
        [x("x0", 2, 2), x("w1", 2, 2)],
        call("mm", "x0", "w1"),
        under(NoGrad(), call("unsqueeze", "v0", -1, form="method", to="v1")),
        contexts=(),
        scaler=scaler,
    )


# Each wraps the program that the one before it has wrapped.
BUGS = (
    Bug(
        id="compile-functions",
        what="l1_loss forgets its weight, chain_matmul its out=, where modes of torch functions are on: in a compiled program, on torchax",
        why="these Python functions do not hand them on to handle_torch_function",
        link="https://github.com/pytorch/pytorch/pull/193003",
        torch=">=2.7",
        seen="2.15.0",
        backends=(
            "compile[aot_*",
            "compile[inductor*",
            "export*",
            "torchax*",
        ),
        imitation=Imitation(wrap=inside(handed_on)),
        examples=(
            Example(
                AOT,
                case(
                    [x("x0", 3), x("x1", 3), x("x2", 3, domain="positive")],
                    call("l1_loss.weight", "x0", "x1", weight="x2", reduction="sum"),
                    backward="none",
                ),
            ),
        ),
    ),
    Bug(
        id="compile-chain-matmul",
        what="chain_matmul returns its out= as it was in a compiled program",
        why="the Python function does not hand its out= on to handle_torch_function; dynamo returns it all the same",
        link="https://github.com/pytorch/pytorch/pull/193003",
        torch=">=2.7",
        seen="2.15.0",
        backends=("compile[aot_*", "compile[inductor*"),
        ops=("chain_matmul",),
        imitation=Imitation(wrap=_forgetting),
        examples=(
            Example(
                AOT,
                case(
                    [x("x0", 2, 2), x("x1", 2, 2), x("b2", 2, 2)],
                    call("chain_matmul", "x0", "x1", form="out", out="b2"),
                    contexts=(),
                    backward="none",
                ),
            ),
        ),
    ),
    Bug(
        id="compile-traced-backward",
        what="a compiled program raises the error of a backward pass that is not run",
        why="AOTAutograd traces the backward pass with the forward",
        torch=">=2.7",
        seen="2.15.0",
        backends=(
            "compile[aot_*",
            "compile[inductor*",
        ),
        imitation=Imitation(wrap=_traced, wrap_op=_traced_op),
        examples=(
            Example(
                "compile[aot_eager]",
                case(
                    [x("x0"), x("w1", 1, 1)],
                    call("linalg.ldl_factor", "w1", to="v0 v1"),
                    contexts=(),
                    backward="none",
                ),
            ),
            Example(
                AOT,
                case(
                    [x("w0", 2, 2)],
                    call("linalg.cond.p_str", "w0", p="fro"),
                    contexts=(),
                    backward="none",
                ),
            ),
            Example(
                AOT,
                case(
                    [x("w0", 3), x("x1", 1)],
                    call("aminmax", "w0", dim=0, keepdim=True, to="v0 v1"),
                    call("mul", "v0", "x1", form="inplace", to="v2"),
                    contexts=(),
                    backward="none",
                ),
            ),
        ),
    ),
    Bug(
        id="compile-kernels",
        what="what the kernel of an op calls is not cast in a compiled program, nor a composite op in inference_mode",
        why="autocast decides while AOTAutograd traces; the graph's ops then run with it disabled",
        torch=">=2.7",
        seen="2.15.0",
        backends=(
            "compile[aot_*",
            "compile[inductor*",
            "export[decomposed]",
        ),
        imitation=Imitation(wrap=inside(_Uncast)),
        examples=(Example(AOT, case([x("x0", 4, 4)], call("linalg.pinv", "x0"), backward="none")),),
    ),
    Bug(
        id="compile-dropout",
        what="a dropout that drops nothing returns a copy in a compiled program, its input in eager: what is written is another tensor",
        why="the decomposition clones",
        torch=">=2.7,<2.15",
        seen="2.13.0",
        backends=(
            "compile[aot_*",
            "compile[inductor*",
        ),
        imitation=Imitation(wrap=inside(_dropouts)),
        examples=(
            Example(
                AOT,
                case(
                    [x("x0", 3), x("w1", 3)],
                    under(NoGrad(), call("dropout", "w1", p=0.0, training=True)),
                    contexts=(),
                ),
            ),
            Example(
                AOT,
                case(
                    [x("x0", 3)],
                    call("neg", "x0"),
                    call("dropout", "v0", p=0.5, training=False, to="v1"),
                    call("exp2", "v1", form="inplace", to="v2"),
                    returns=("v0", "v2"),
                    contexts=(),
                    backward="none",
                ),
            ),
        ),
    ),
    Bug(
        id="compile-weight-cache",
        what="a weight's cast is kept between calls in one context in eager only: two steps see the new weight",
        why="AOTAutograd traces with the cache disabled; the casts are in the graph",
        torch=">=2.7",
        seen="2.15.0",
        backends=(
            "compile[aot_*",
            "compile[inductor*",
        ),
        imitation=Imitation(wrap=inside(own_cache)),
        examples=(
            Example(
                AOT,
                case(
                    [x("x0", 2, 2), x("w1", 2, 2)], call("mm", "x0", "w1"), steps=2, loop="inside"
                ),
            ),
        ),
    ),
    Bug(
        id="compile-views",
        what="a view made under no_grad, of what requires grad, has a grad_fn when a compiled program returns it",
        why="AOTAutograd makes the views that a graph returns again from their base, with grad enabled",
        torch=">=2.7",
        seen="2.15.0",
        backends=(
            "compile[aot_*",
            "compile[inductor*",
        ),
        imitation=Imitation(wrap=_with_views),
        examples=(
            Example(
                AOT,
                case(
                    [x("x0", 2, 2), x("w1", 2, 2)],
                    call("mm", "x0", "w1"),
                    under(NoGrad(), call("unsqueeze", "w1", -1, form="method", to="v1")),
                ),
            ),
            *(Example(AOT, _viewed(scaler), wrong="mm") for scaler in (False, True)),
        ),
    ),
)
