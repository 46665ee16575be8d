"""Run torch without a part of it: what goes away then is that part's fault."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

from amp_fuzz.patching import patched

__all__ = ["WITHOUT"]


def _without_mkldnn() -> AbstractContextManager[None]:
    import torch

    flags: AbstractContextManager[None] = torch.backends.mkldnn.flags(enabled=False)
    return flags


def _without_mutations_in_graphs() -> AbstractContextManager[None]:
    import torch._dynamo.backends.common

    common: Any = torch._dynamo.backends.common
    honest = common.aot_module_simplified

    def without(*args: Any, **options: Any) -> Any:
        return honest(*args, **{**options, "keep_inference_input_mutations": False})

    return patched(common, "aot_module_simplified", without)


def _without_common_subexpressions() -> AbstractContextManager[None]:
    import torch._functorch.partitioners

    return patched(torch._functorch.partitioners, "fx_graph_cse", lambda graph: graph)


@contextmanager
def _without_reused_inputs() -> Iterator[None]:
    """Let Inductor write no result of index_put into its input."""
    import torch
    from torch._inductor.fx_passes import reinplace

    ops: Any = reinplace.inplaceable_ops
    aten = torch.ops.aten
    blamed = (aten.index_put.default, aten._unsafe_index_put.default)
    honest = {op: ops.pop(op) for op in blamed if op in ops}
    try:
        yield
    finally:
        ops.update(honest)


def _without_counted_constants() -> AbstractContextManager[Any]:
    import torch
    from torch._inductor.fx_passes import post_grad

    patterns: Any = post_grad.pass_patterns[1].patterns
    key = ("call_function", torch.ops.aten.cumsum.default)
    blamed = post_grad.pointless_cumsum_replacement
    left = [p for p in patterns[key] if getattr(p, "handler", None) is not blamed]
    return patch.dict(patterns, {key: left})


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


def _without_inference_traces() -> AbstractContextManager[None]:
    import torch

    honest: Any = torch.jit.trace

    def trace(function: Any, inputs: tuple[Any, ...], **options: Any) -> Any:
        with torch.inference_mode(False):
            # What is written to may not be an inference tensor either.
            plain = tuple(x.clone() if x.is_inference() else x for x in inputs)
            return honest(function, plain, **options)

    return patched(torch.jit, "trace", trace)


def _without_kept_constants() -> AbstractContextManager[None]:
    """Give the constants of a frozen module back their values after each call."""
    import torch
    from torch.utils._pytree import tree_map_only

    honest: Any = torch.jit.freeze

    def freeze(*how: Any, **options: Any) -> Callable[..., Any]:
        module = honest(*how, **options)
        held = (node.output().toIValue() for node in module.graph.findAllNodes("prim::Constant"))
        constants = [value for value in held if isinstance(value, torch.Tensor)]

        def call(*args: Any) -> Any:
            before = [value.clone() for value in constants]
            made = tree_map_only(torch.Tensor, torch.clone, module(*args))  # it may be one of them
            for value, was in zip(constants, before, strict=True):
                value.copy_(was)
            return made

        return call

    return patched(torch.jit, "freeze", freeze)


@contextmanager
def _without_optimised_graphs() -> Iterator[None]:
    """Whether graphs are optimised is a matter of each thread, of those that start here too."""
    import torch

    before, run = torch._C._get_graph_executor_optimize(), threading.Thread.run

    def without(thread: threading.Thread) -> None:
        own = torch._C._get_graph_executor_optimize()
        torch._C._set_graph_executor_optimize(False)
        try:
            run(thread)
        finally:
            torch._C._set_graph_executor_optimize(own)

    torch._C._set_graph_executor_optimize(False)
    try:
        with patched(threading.Thread, "run", without):
            yield
    finally:
        torch._C._set_graph_executor_optimize(before)


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


@contextmanager
def _without_promised_results() -> Iterator[None]:
    """Let four ops promise what they return: they run, on zeros.

    Fake kernels of the first two are asked before their meta functions; those of the others are
    their decompositions, which nothing else asks for on ``aot_eager``.
    """
    import torch
    from torch._decomp import decomposition_table
    from torch._subclasses import FakeTensorMode
    from torch._subclasses.fake_impls import op_implementations_dict

    aten = torch.ops.aten
    asked: list[Any] = [aten.addr.default, aten.native_layer_norm.default]
    decomposed: list[Any] = [
        aten._native_batch_norm_legit_functional.default,
        aten.soft_margin_loss.default,
    ]

    def truthful(mode: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
        with mode:
            return _truthful(func, *args, **kwargs)

    FakeTensorMode.cache_clear()  # it remembers what fake kernels return
    try:
        with (
            patch.dict(op_implementations_dict, dict.fromkeys(asked, truthful)),
            patch.dict(decomposition_table, {op: partial(_truthful, op) for op in decomposed}),
        ):
            yield
    finally:
        FakeTensorMode.cache_clear()


def _without_promised_dtypes() -> AbstractContextManager[None]:
    """Let the fake kernels of custom ops return what the ops do: those run, on zeros."""
    from torch._library.custom_ops import CustomOpDef

    honest = CustomOpDef.register_fake

    def register_fake(op: CustomOpDef, function: Callable[..., Any], /) -> Any:
        return honest(op, partial(_truthful, function))

    return patched(CustomOpDef, "register_fake", register_fake)


@contextmanager
def _without_promised_statistics() -> Iterator[None]:
    """Let the fake kernel of native_layer_norm return statistics of the dtype that they have."""
    import torch
    from torch._subclasses import FakeTensorMode
    from torch._subclasses.fake_impls import op_implementations_dict as kernels

    op = torch.ops.aten.native_layer_norm.default
    honest = kernels[op]

    def truthful(mode: Any, func: Any, x: Any, shape: Any, w: Any, b: Any, eps: float) -> Any:
        out, mean, rstd = honest(mode, func, x, shape, w, b, eps)
        if all(p is None or p.dtype == x.dtype for p in (w, b)):
            return out, mean, rstd
        return out, mean.float(), rstd.float()

    FakeTensorMode.cache_clear()  # it remembers what fake kernels return
    try:
        with patch.dict(kernels, {op: truthful}):
            yield
    finally:
        FakeTensorMode.cache_clear()


def _without_stopped_checkpoints() -> AbstractContextManager[None]:
    """Let a checkpoint that is not reentrant compute all of its function again."""
    from torch.utils.checkpoint import set_checkpoint_early_stop

    whole: AbstractContextManager[None] = set_checkpoint_early_stop(False)
    return whole


WITHOUT: Mapping[str, Callable[[], AbstractContextManager[Any]]] = {
    "mkldnn": _without_mkldnn,
    "mutations-in-graphs": _without_mutations_in_graphs,
    "common-subexpressions": _without_common_subexpressions,
    "counted-constants": _without_counted_constants,
    "elided-casts": lambda: _compiled_with("emulate_precision_casts", True),
    "inference-traces": _without_inference_traces,
    "kept-constants": _without_kept_constants,
    "optimised-graphs": _without_optimised_graphs,
    "promised-dtypes": _without_promised_dtypes,
    "promised-results": _without_promised_results,
    "promised-statistics": _without_promised_statistics,
    "reused-inputs": _without_reused_inputs,
    "separate-roundings": lambda: _compiled_with("cpp.enable_floating_point_contract_flag", "fast"),
    "stopped-checkpoints": _without_stopped_checkpoints,
}
"""How to run torch without what a known entry blames."""
