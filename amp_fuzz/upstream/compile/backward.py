"""Backward passes of compiled programs: their autocast, and their checkpoints.

## compile-backward-autocast: the backward pass takes the forward's autocast

AOTAutograd traces the backward pass while the forward is compiled, under the autocast around the
forward. In eager a backward pass runs under the autocast around its own call: outside the context,
as the documentation of `torch.autocast` recommends, under none. A compiled gradient is computed in
16 bits where eager computes it in float32. That happens to a float32 island in the program
([#179804](https://github.com/pytorch/pytorch/issues/179804),
[#153044](https://github.com/pytorch/pytorch/issues/153044)), and to the gradients of a matrix
product of float32 tensors ([#157104](https://github.com/pytorch/pytorch/issues/157104)).

```python
import torch


def program(x, w):
    with torch.autocast("cpu", enabled=False):
        return torch.mm(x, w)


x, w = torch.full((2, 2), 1.001), torch.ones(2, 2, requires_grad=True)
for function in (program, torch.compile(program, backend="aot_eager")):
    w.grad = None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = function(x, w)
    y.sum().backward()
    print(w.grad[0, 0])  # 2.0020, then 2.0000
```

Since [#156780](https://github.com/pytorch/pytorch/pull/156780) it can be configured.
`torch._functorch.config.backward_pass_autocast` is `"same_as_forward"` by default, `"off"`, or a
list of keyword arguments for contexts. The backends `compile[...]` set it to what the plan does:
then eager means the same, and must agree. `compile[aot_eager+default]` and
`compile[inductor+default]` keep the default. The reference that imitates it runs each backward pass
where the forward stood, and must agree on the whole case.

## compile-backward-untold: before torch 2.9, no backward pass can have another autocast

The same on every rung from aot_eager on: torch 2.7.1 has no `backward_pass_autocast`, so each
compiled backward pass takes the forward's autocast, wherever it runs. The script above prints
2.0020, then 2.0000, on 2.7.1 too. With `torch._functorch.config.backward_pass_autocast = "off"`,
2.9.1 and later print 2.0020 twice.

## compile-backward-again: a backward graph is cast once more when it runs

```python
import torch


class Product(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w.t(), x.t() @ g


x, w = torch.full((2, 2), 1.001), torch.ones(2, 2, requires_grad=True)
for function in Product.apply, torch.compile(Product.apply, backend="aot_eager"):
    y = function(x, w)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        print(torch.autograd.grad(y, w, torch.ones_like(y))[0][0, 0])  # 2.0020, then 2.0000
```

**What torch does** (2.7.1 to 2.15.0, CPU), from stage `aot_eager` on. What AOTAutograd compiled runs
without autocast only if some was on while it was compiled (`disable_amp`); else a backward pass under
autocast casts the ops of the graph by the autocast around it, whatever
``backward_pass_autocast`` says. `custom_bwd` has done its part when the graph is traced: the product
there is of float32, and is cast. So is a backward in ``torch.autocast(enabled=False)``, and what a
checkpoint computes again, whose recomputation restores the forward's state in eager.

**What the documentation says.** `custom_bwd` "ensures that `backward` executes with the same autocast
state as `forward`" (https://docs.pytorch.org/docs/stable/amp.html).

**What the reference does.** Below autograd, it casts each op of a backward pass once more, by the
autocast around that pass, if no autocast was on at the last call of the program.

**Upstream.** [#97864](https://github.com/pytorch/pytorch/pull/97864) made it depend on the
compilation, to save time.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from amp_fuzz.backends.imitation import Imitation
from amp_fuzz.cases.build import BF16, call, case, under, x
from amp_fuzz.cases.case import Case
from amp_fuzz.cases.program import Autocast, Checkpoint
from amp_fuzz.patching import patched
from amp_fuzz.reference import Call, dispatch
from amp_fuzz.reference.casts import tensors_of
from amp_fuzz.reference.semantics import Semantics
from amp_fuzz.reference.state import enabled_devices, here
from amp_fuzz.upstream.bug import Bug, Example

__all__ = ["BUGS"]


def _inside(case: Case) -> Case:
    """Return the case with its backward pass where its forward stands."""
    if case.plan.backward == "none":
        return case
    return case.with_plan(backward="inside", backward_context=None)


class _Compiled:
    """What is known of the program that ran last. It may have run in another thread.

    plain: no autocast was on around it. running: it is.
    """

    plain = False
    running = False


def _noting(program: Any, case: Case) -> Any:
    """Return a program that notes whether autocast is on around it."""

    def run(*inputs: Any) -> Any:
        _Compiled.plain, _Compiled.running = not enabled_devices(), True
        try:
            return program(*inputs)
        finally:
            _Compiled.running = False

    return run


def _cast_again() -> AbstractContextManager[None]:
    """Let ops of a backward pass be cast by the autocast around it."""
    honest = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    def backward(*args: Any, **kwargs: Any) -> Any:
        if not (_Compiled.plain and enabled_devices()):
            return honest(*args, **kwargs)
        with _Again():
            return honest(*args, **kwargs)

    return patched(torch.autograd, "_engine_run_backward", backward)


class _Again(TorchDispatchMode):
    """Casts ops below autograd by the autocast that is on where the mode is made.

    Not those of the program itself, which a checkpoint of the plan may call in a backward pass.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        state = here()
        around = {name: dict(getattr(state, name)) for name in ("enabled", "dtypes", "tables")}
        self.around = {**around, "cache_enabled": False, "log": None}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, state = kwargs or {}, here()
        if not _Compiled.running:
            name = func.name().removeprefix("aten::")
            tensors = tensors_of((*args, *kwargs.values()))
            call = Call(name, func, func, args, kwargs, tensors, state, _onward, None)
            with state.having(**self.around):
                found = state.semantics.rule(call)
                if found is not None:
                    return state.semantics.call(call, found)
        with dispatch.kept():
            return func(*args, **kwargs)


def _onward(call: Call) -> Any:
    return call.function(*call.args, **call.kwargs)


def _without_checks(semantics: Semantics) -> Semantics:
    """Let a checkpoint compute again in other dtypes than those of its forward."""

    def checkpoint(function: Any, *args: Any, **how: Any) -> Any:
        return semantics.checkpoint(function, *args, determinism_check="none", **how)

    return replace(semantics, checkpoint=checkpoint)


_ISLAND = case(
    [x("x0", 8, 8, domain="uniform"), x("w1", 8, 8)],
    under(
        Autocast(enabled=False),
        call("mm", "x0", "w1"),
        call("mm", "v0", "w1", to="v1"),
    ),
)

BUGS = (
    Bug(
        id="compile-backward-autocast",
        what="the backward pass of a compiled program is traced under the autocast around its forward",
        why="documented: torch._functorch.config.backward_pass_autocast is 'same_as_forward' by default",
        link="https://github.com/pytorch/pytorch/issues/157104",
        torch=">=2.7",
        seen="2.15.0",
        harm="silent gradient",
        backends=("compile[*+default]",),
        imitation=Imitation(rewrite=_inside),
        examples=(Example("compile[aot_eager+default]", _ISLAND, torch=">=2.9"),),
    ),
    Bug(
        id="compile-backward-untold",
        what="the backward pass of a compiled program is traced under the autocast around its forward, and nothing changes this",
        why="there is no torch._functorch.config.backward_pass_autocast before torch 2.9",
        link="https://github.com/pytorch/pytorch/issues/157104",
        torch=">=2.7,<2.9",
        seen="2.7.1",
        harm="silent gradient",
        backends=("compile[aot_eager*", "compile[inductor*"),
        imitation=Imitation(rewrite=_inside),
        examples=(Example("compile[aot_eager]", _ISLAND),),
    ),
    Bug(
        id="compile-backward-again",
        what="a compiled backward pass under autocast casts what custom_bwd, a disabled region or a checkpoint does without",
        why="AOTAutograd runs its graphs without autocast only if some was on while it compiled",
        link="https://github.com/pytorch/pytorch/pull/97864",
        torch=">=2.7",
        seen="2.15.0",
        harm="silent gradient",
        backends=("compile[aot_*", "compile[inductor*"),
        imitation=Imitation(
            semantics=_without_checks,
            around=_cast_again,
            wrap=_noting,
            applies=lambda case: case.plan.backward in ("inside", "under"),
        ),
        examples=(
            Example(
                "compile[aot_eager]",
                case(
                    [x("x0", 3, 3), x("w1", 3, 3)],
                    call("matmul_function", "x0", "w1"),
                    contexts=(),
                    backward="under",
                    backward_context=BF16,
                ),
            ),
            Example(
                "compile[aot_eager]",
                case(
                    [x("x0", 3, 3), x("w1", 3, 3)],
                    call("linear_op", "x0", "w1", None, 1.0),
                    backward="inside",
                    thread="inside",
                ),
            ),
            *(
                Example(
                    "compile[aot_eager]",
                    case(
                        [x("x0", 3, 3), x("x1", 3, 3), x("w2", 3, 3)],
                        under(
                            Checkpoint(use_reentrant=reentrant),
                            call("mm", "x0", "x1"),
                            call("mul", "v0", "w2", to="v1"),
                        ),
                        contexts=(),
                        backward="under",
                        backward_context=BF16,
                    ),
                )
                for reentrant in (False, True)
            ),
        ),
    ),
)
