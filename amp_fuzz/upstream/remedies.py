"""Run torch without a part of it: what goes away then is that part's fault."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import cache, partial, wraps
from typing import Any

from amp_fuzz.backends import control_flow
from amp_fuzz.cases.case import Case
from amp_fuzz.cases.program import statements
from amp_fuzz.catalogue import CATALOGUE
from amp_fuzz.patching import patched
from amp_fuzz.reference import autocast

__all__ = ["WITHOUT", "has"]


def _compiled_with(name: str, value: Any) -> AbstractContextManager[None]:
    """Set an option of Inductor in whichever thread compiles: its configuration is per thread."""
    import torch._inductor.compile_fx

    module: Any = torch._inductor.compile_fx
    honest = module.compile_fx

    def compile_fx(*args: Any, config_patches: Any = None, **options: Any) -> Any:
        if getattr(torch._inductor.config, name) != value:  # it calls itself, patched
            config_patches = {**(config_patches or {}), name: value}
        return honest(*args, config_patches=config_patches, **options)

    return patched(module, "compile_fx", compile_fx)


def _zeros(x: Any) -> Any:
    import torch

    if isinstance(x, (list, tuple)):
        return [_zeros(part) for part in x]
    if not isinstance(x, torch.Tensor):
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).zero_()


def _alike(made: Any) -> Any:
    import torch

    if isinstance(made, (list, tuple)):
        return [_alike(part) for part in made]
    return torch.empty_strided(made.shape, made.stride(), dtype=made.dtype, device=made.device)


def _truthful(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return tensors as a function makes them of zeros."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        made = function(*_zeros(args), **{k: _zeros(v) for k, v in kwargs.items()})
    return _alike(made)


def _without_promised_dtypes() -> AbstractContextManager[None]:
    """Let the fake kernels of custom ops return what the ops do: those run, on zeros."""
    from torch._library.custom_ops import CustomOpDef

    honest = CustomOpDef.register_fake

    def register_fake(op: CustomOpDef, function: Callable[..., Any], /) -> Any:
        return honest(op, partial(_truthful, function))

    return patched(CustomOpDef, "register_fake", register_fake)


def _without_stopped_checkpoints() -> AbstractContextManager[None]:
    """Let a checkpoint that is not reentrant compute all of its function again."""
    from torch.utils.checkpoint import set_checkpoint_early_stop

    whole: AbstractContextManager[None] = set_checkpoint_early_stop(False)
    return whole


def _without_nested_regions() -> AbstractContextManager[None]:
    """Let dynamo inline what is a nested region of a program."""
    import torch

    return patched(torch.compiler, "nested_compile_region", lambda function: function)


def _without_weight_cache() -> AbstractContextManager[None]:
    """Let contexts that do not say otherwise keep no cast of a weight."""
    from torch.amp.autocast_mode import autocast

    honest = autocast.__init__

    @wraps(honest)
    def init(
        self: Any, device: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None
    ) -> None:
        honest(self, device, dtype, enabled, bool(cache_enabled))

    return patched(autocast, "__init__", init)


def _without_unentered_regions() -> AbstractContextManager[None]:
    """Let an export enter the autocast regions of a graph that it traces again."""
    import torch
    from torch.fx.experimental.proxy_tensor import PreDispatchTorchFunctionMode

    honest = PreDispatchTorchFunctionMode.__torch_function__
    entered: list[Any] = []

    def handle(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        node = honest(self, func, types, args, kwargs)
        if func is torch.amp.autocast_mode._enter_autocast:
            entered.append(torch.autocast(*args))
            entered[-1].__enter__()
        elif func is torch.amp.autocast_mode._exit_autocast:
            entered.pop().__exit__(None, None, None)
        return node

    return patched(PreDispatchTorchFunctionMode, "__torch_function__", handle)


def _without_islands() -> AbstractContextManager[None]:
    """Let the product of an island be an op that autocast does not know, in no region.

    That is in the bodies of higher-order ops; the reference keeps its regions.
    """
    honest = control_flow.product_in

    def product_in(around: Any, device: Any) -> Any:
        if around is autocast:
            return honest(around, device)
        import torch

        apart = _uncast()
        return lambda x, y, island, dtype: apart(x, y) if island else torch.mm(x, y)

    return patched(control_flow, "product_in", product_in)


@cache
def _uncast() -> Any:
    """Return `torch.mm` as a custom op, whose backward pass is made of the same op."""
    import torch

    def product(x: Any, y: Any) -> Any:
        with torch.autocast(x.device.type, enabled=False):
            return torch.mm(x, y)

    def backward(ctx: Any, gradient: Any) -> Any:
        x, y = ctx.saved_tensors
        return op(gradient, y.t()), op(x.t(), gradient)

    def save(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    schema = "(Tensor x, Tensor y) -> Tensor"
    op: Any = torch.library.custom_op(
        "amp_fuzz::uncast_mm", product, mutates_args=(), schema=schema
    )
    op.register_fake(product)
    op.register_autograd(backward, setup_context=save)
    return op


WITHOUT: Mapping[str, Callable[[], AbstractContextManager[Any]]] = {
    "elided-casts": lambda: _compiled_with("emulate_precision_casts", True),
    "islands": _without_islands,
    "nested-regions": _without_nested_regions,
    "promised-dtypes": _without_promised_dtypes,
    "stopped-checkpoints": _without_stopped_checkpoints,
    "unentered-regions": _without_unentered_regions,
    "weight-cache": _without_weight_cache,
}
"""How to run torch without what a known entry blames."""


def has(case: Case, part: str) -> bool:
    """Return whether a case may have a part: without one that it has not, it is only run again."""
    match part:
        case "islands":
            calls = statements(case.program.body)
            return any(CATALOGUE[c.op].family == "control_flow" and True in c.args for c in calls)
        case "nested-regions":
            return case.plan.reuse == "region"
    return True
