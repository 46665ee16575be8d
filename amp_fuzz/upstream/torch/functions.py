"""What torch does in functions and custom ops that know about autocast.

## custom-fwd-setup-context: custom_fwd in a function that has a setup_context

```python
import torch


class Double(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(x):
        return x * 2

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, grad):
        return grad * 2


Double.apply(torch.ones(3, requires_grad=True)).sum().backward()
# AttributeError: 'DoubleBackward' object has no attribute '_fwd_used_autocast'
```

**What torch does** (2.13.0). `custom_fwd` writes the autocast state to the first argument of
`forward`, which it takes for `ctx`. Where the function has a `setup_context`, `forward` is given
no `ctx`: the state lands on the first input tensor, and `custom_bwd` does not find it. It raises
with and without autocast.

**What the documentation says.** `custom_fwd` is "a helper decorator for `forward` methods of
custom autograd functions", and [extending
torch.autograd](https://docs.pytorch.org/docs/stable/notes/extending.html) recommends the style
with `setup_context`; `custom_bwd` "ensures that `backward` executes with the same autocast state
as `forward`".

**What the reference does.** The backward runs under the state of the forward, in both styles.

**Upstream.** [#132388](https://github.com/pytorch/pytorch/issues/132388). A workaround is to
leave `_fwd_used_autocast` and `_dtype` on the `ctx` in `setup_context`.

## custom-op-body-off: the body of a custom op sees autocast in eager, not when compiled, exported or fake

```python
import torch
import torch._functorch.config


@torch.library.custom_op("mine::product", mutates_args=())
def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x @ y


@product.register_fake
def _(x, y):
    return x @ y


x = torch.ones(2, 2)
with torch.autocast("cpu"):
    print(product(x, x).dtype)  # torch.bfloat16
    print(torch.compile(lambda a: product(a, a), backend="aot_eager")(x).dtype)  # torch.float32
```

**What torch does** (2.13.0). A custom op without `register_autocast` runs its body in the
autocast region where it is called. Its fake kernel never does: it is called below the autocast
keys, whatever surrounds it. What AOTAutograd compiled runs with autocast off, and so does what
`run_decompositions()` returns when it runs outside the region. So the dtypes of a compiled call
are those without autocast, `torch.export` may refuse what eager runs, and fake tensors have other
dtypes than real ones.

**What the documentation says.** Nothing, for an op that has no `register_autocast`. The fake
kernel "specifies what the properties of the output Tensors are", so one that cannot see autocast
cannot be right for a body that can. A maintainer calls running the inside of a custom op in the
autocast context "a layering violation"
([#145588](https://github.com/pytorch/pytorch/pull/145588)).

**What the reference does.** What eager does: the body runs in the region of the call. Imitating
this finding, it runs the body as a fake kernel first, which may raise, and then with autocast
off. With `register_autocast` all agree: autocast is off in the body everywhere.

**Upstream.** Not reported that we know of. Register an autocast rule for each op whose body calls
others.

## register-autocast-key: register_autocast of a custom op raises for mtia and maia

```python
import torch


@torch.library.custom_op("mine::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


print(torch.amp.is_autocast_available("mtia"))  # True
double.register_autocast("mtia", torch.float16)
# AttributeError: type object 'torch._C.DispatchKey' has no attribute 'AutocastMTIA'
```

**What torch does** (2.13.0). The autocast key of the device is looked up by its Python name, and
`torch._C.DispatchKey` has no `AutocastMTIA` and no `AutocastMAIA`.

**What the documentation says.** "Valid `device_type` values include any device type that supports
autocast. See `torch.amp.is_autocast_available` for details."

**What the reference does.** It casts on every device that has a policy table.

**Upstream.** [#183689](https://github.com/pytorch/pytorch/pull/183689) opened `register_autocast`
to all devices and added the name for xpu.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from amp_fuzz.backends.imitation import Imitation
from amp_fuzz.cases.build import call, case, x
from amp_fuzz.reference import dispatch
from amp_fuzz.reference.autocast import autocast
from amp_fuzz.reference.calls import Call, Treatment
from amp_fuzz.reference.kernels import declared_bodies
from amp_fuzz.reference.semantics import Semantics
from amp_fuzz.reference.state import ForwardState, enabled_devices
from amp_fuzz.upstream.bug import Bug, Example

__all__ = ["BUGS"]

_LOGGER = logging.getLogger("torch._subclasses.fake_tensor")


def _first_argument(forward: Any, args: Sequence[Any]) -> Any:
    return args[0]


def _left_by_forward(ctx: Any) -> ForwardState:
    kept: ForwardState | None = getattr(ctx, "_reference_state", None)
    if kept is None:
        name = type(ctx).__name__
        raise AttributeError(f"'{name}' object has no attribute '_fwd_used_autocast'")
    return kept


def _setup_context(semantics: Semantics) -> Semantics:
    return replace(semantics, keeper=_first_argument, forward_state=_left_by_forward)


def _body_off(semantics: Semantics) -> Semantics:
    def body(function: Callable[..., Any], args: Sequence[Any]) -> Any:
        with ExitStack() as stack:
            for device in enabled_devices():
                stack.enter_context(autocast(device, enabled=False))
            _traced(function, args)
            return semantics.body(function, args)

    def call(one: Call, found: Treatment | None) -> Any:
        if one.name not in declared_bodies():
            return semantics.call(one, found)
        with dispatch.exclude():
            return one.function(*one.args, **one.kwargs)

    def extra() -> tuple[str, ...]:
        return (*semantics.extra(), *declared_bodies())

    return replace(semantics, body=body, call=call, extra=extra)


def _traced(body: Callable[..., Any], args: Sequence[Any]) -> None:
    """Run a body as a fake kernel, before anything runs: it may raise, in its own words."""
    leaves, spec = pytree.tree_flatten(tuple(args))
    if any(isinstance(x, FakeTensor) for x in leaves):
        return
    before, _LOGGER.disabled = _LOGGER.disabled, True  # it logs what a fake kernel raises
    try:
        with _disable_current_modes():  # shadows are not to follow
            mode = FakeTensorMode()
            fakes = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in leaves]
            with mode, enable_python_dispatcher():
                body(*pytree.tree_unflatten(fakes, spec))
    finally:
        _LOGGER.disabled = before


BUGS = (
    Bug(
        id="custom-fwd-setup-context",
        what="custom_bwd raises AttributeError in a function that has a setup_context",
        why="custom_fwd leaves the state on the forward's first argument, which is no ctx there",
        link="https://github.com/pytorch/pytorch/issues/132388",
        torch=">=2.7",
        seen="2.15.0",
        harm="raises",
        backends=("!torchax*",),
        imitation=Imitation(semantics=_setup_context),
        examples=(
            Example(
                "eager-cpu",
                case([x("x0", 2, 2), x("w1", 2, 2)], call("mm", "x0", "w1"), entry="setup_context"),
            ),
        ),
    ),
    Bug(
        id="custom-op-body-off",
        what="a custom op without register_autocast runs in other dtypes when it is compiled, exported or fake",
        why="its body sees the autocast around it in eager only; fake kernels and AOTAutograd's graphs run with autocast off",
        link="https://github.com/pytorch/pytorch/pull/145588",
        rank=40,  # before what compilers do to kernels
        torch=">=2.7",
        seen="2.15.0",
        harm="silent dtype",
        backends=(
            "compile[*",
            "export*",
            "fake-*",
        ),
        imitation=Imitation(semantics=_body_off),
        examples=(
            Example(
                "fake-cuda",
                case(
                    [x("x0", 2, 2), x("w1", 2, 2)],
                    call("mm", "x0", "w1"),
                    entry="custom_op",
                    backward="none",
                ),
            ),
        ),
    ),
    Bug(
        id="register-autocast-key",
        what="register_autocast of a custom op raises AttributeError for mtia and maia",
        why="torch._C.DispatchKey lacks AutocastMTIA and AutocastMAIA",
        link="https://github.com/pytorch/pytorch/pull/183689",
        torch=">=2.7",
        seen="2.15.0",
        harm="raises",
        backends=(
            "fake-mtia",
            "fake-maia",
        ),
        ops=("*",),
        kinds=("raise",),
        where="entered = as_custom_op(*, torch.float32)",
        observed="^AttributeError: .*DispatchKey.*Autocast",
        examples=(
            Example(
                "fake-maia",
                case(
                    [x("x0", 2, 2), x("w1", 2, 2)],
                    call("mm", "x0", "w1"),
                    entry="register_autocast",
                    backward="none",
                ),
                wrong="",
                torch=">=2.13",
            ),
        ),
    ),
)
