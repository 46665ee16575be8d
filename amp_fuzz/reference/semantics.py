"""What autocast means: one value, each field of which is one rule. Open this file first.

`DOCUMENTED` is autocast as its documentation has it. The dispatcher is only how the rules come to
be called: `amp_fuzz.reference.kernels` asks `Semantics.rule` for the policy of a call and hands
both to `Semantics.call`. `under` makes the reference follow other rules for a block. Such rules
are `DOCUMENTED` with a field or two replaced; the reference knows none of them.

Source: https://docs.pytorch.org/docs/stable/amp.html, unless a field names another.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from operator import attrgetter, methodcaller
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.utils.checkpoint

from amp_fuzz.patching import patched
from amp_fuzz.reference import casts, dispatch, queries, treatments

if TYPE_CHECKING:
    from amp_fuzz.reference.autocast import Snapshot
    from amp_fuzz.reference.calls import Call, Treatment
    from amp_fuzz.reference.fp8.layers import Layers
    from amp_fuzz.reference.fp8.linear import Convention
    from amp_fuzz.reference.state import ForwardState, State

__all__ = ["DOCUMENTED", "PROMISED", "Semantics"]

_T = TypeVar("_T")


def _called(body: Callable[..., Any], args: Sequence[Any]) -> Any:
    return body(*args)


def _itself(given: _T) -> _T:
    return given


def _checkpoint(function: Callable[..., Any], *args: Any, **how: Any) -> Any:
    """Call torch's checkpoint; a selective one may cast again what its forward found cached."""
    if "context_fn" in how:
        how["context_fn"] = partial(_casting, how["context_fn"])
    return torch.utils.checkpoint.checkpoint(function, *args, **how)


def _casting(contexts: Callable[[], Sequence[Any]]) -> list[_Uncounted]:
    return [_Uncounted(context) for context in contexts()]


class _Uncounted:
    """A context of a selective checkpoint that counts no casts. It may be entered again."""

    def __init__(self, context: AbstractContextManager[Any]) -> None:
        self.context = context

    def __enter__(self) -> None:
        module, self.stack = torch.utils.checkpoint, ExitStack()
        ignored = {*module.SAC_IGNORED_OPS, torch.ops.aten._to_copy.default}
        self.stack.enter_context(patched(module, "SAC_IGNORED_OPS", ignored))
        self.stack.enter_context(self.context)

    def __exit__(self, *error: Any) -> None:
        self.stack.__exit__(*error)


def _keeper(forward: Any, args: Sequence[Any]) -> Any:
    """Return what keeps the state of a forward: its ``ctx``, or else the forward itself."""
    ctx = bool(args) and isinstance(args[0], torch.autograd.function.FunctionCtx)
    return args[0] if ctx else forward


def _forward_state(ctx: Any) -> ForwardState:
    """Return what a forward left for its backward."""
    kept: ForwardState | None = getattr(ctx, "_reference_state", None)
    return kept or ctx._forward_cls.forward._reference_state


@dataclass(frozen=True, slots=True, kw_only=True)
class Semantics:
    """The rules of autocast. A field is called where its rule decides.

    Of an op that is called:

    rule: the device whose autocast handles the call, and its policy there; None: neither.
    call: makes the call, treated by the policy that it has.
    eligible: whether a tensor may be cast, by device type.
    promoting: the tensors that decide the dtype of a call of the ``promote`` policy.
    promoted: that dtype, by device type and autocast dtype.
    extra: overloads without a policy whose calls come to `rule` and `call` as well.
    excluded: device types whose autocast is off in the kernels under way.

    Of the cache for casts of weights:

    caches: whether the cache may hold a cast, by the tensor, its new dtype and the autocast dtype.
    cache_key: the key of a cast, by the tensor and its new dtype.
    cached_cast: makes the cast that is kept.
    keeps_below: whether a cast is kept that is made below autograd, as in the body of a custom op.
    serves: whether a kept cast is used again, by the tensor and the cast.

    Of what torch's own modules ask:

    enabled: whether autocast is on for a device type; None: for any.
    any_enabled: whether any autocast is on.

    Of functions that know about autocast:

    checkpoint: what computes again in the backward pass, in the state of the forward pass.
    keeper: what keeps the state of a forward with ``custom_fwd`` for its backward.
    forward_state: what a backward with ``custom_bwd`` finds there, by its ``ctx``.
    ahead: the block in which a function transform runs.
    around_grad: the state around the backward ops of a function transform, from that of the caller.
    body: calls the body of a custom op (https://docs.pytorch.org/docs/stable/library.html).

    fp8: what an FP8 linear layer does, from what its implementation documents.
    layers: what the FP8 layers of a program remember, from the class that is documented.

    in_autograd_thread: the state that a thread of autograd's sees, from that of the thread that
    called it.
    """

    rule: Callable[[Call], Treatment | None] = treatments.of_table
    call: Callable[[Call, Treatment | None], Any] = treatments.treated
    eligible: Callable[[torch.Tensor, str], bool] = casts.eligible
    promoting: Callable[[Call], Collection[torch.Tensor]] = attrgetter("tensors")
    promoted: Callable[[Collection[torch.Tensor], str, torch.dtype], torch.dtype] = casts.promoted
    extra: Callable[[], Collection[str]] = tuple
    excluded: Callable[[], Collection[str]] = dispatch.excluded

    caches: Callable[[torch.Tensor, torch.dtype, torch.dtype], bool] = casts.caches
    cache_key: Callable[[torch.Tensor, torch.dtype], Hashable] = casts.cache_key
    cached_cast: Callable[[torch.Tensor, torch.dtype], torch.Tensor] = casts.cached_cast
    keeps_below: Callable[[], bool] = casts.keeps_below
    serves: Callable[[torch.Tensor, torch.Tensor], bool] = casts.serves

    enabled: Callable[[State, str | None], bool] = queries.enabled
    any_enabled: Callable[[State], bool] = queries.any_enabled

    checkpoint: Callable[..., Any] = _checkpoint
    keeper: Callable[[Any, Sequence[Any]], Any] = _keeper
    forward_state: Callable[[Any], ForwardState] = _forward_state
    ahead: Callable[[], AbstractContextManager[Any]] = dispatch.first
    around_grad: Callable[[Snapshot], AbstractContextManager[Any]] = methodcaller("disabled")
    body: Callable[[Callable[..., Any], Sequence[Any]], Any] = _called

    fp8: Callable[[Convention], Convention] = _itself
    layers: Callable[[type[Layers]], type[Layers]] = _itself

    in_autograd_thread: Callable[[State], State] = _itself


DOCUMENTED = Semantics()
"""Autocast as its documentation has it."""

PROMISED: Mapping[str, tuple[str, ...]] = {
    "rule": (
        "amp.two-kinds",
        "amp.cuda-unlisted",
        "amp.xpu-unlisted",
        "amp.cpu-unlisted",
        "autocast.device-type",
        "aten.fallthrough",
    ),
    "call": (
        "autocast.op-dtype",
        "amp.banned",
        "aten.lower",
        "aten.fp32",
        "aten.set-dtype",
        "aten.append-dtype",
        "aten.promote",
        "aten.others",
    ),
    "eligible": ("amp.float64", "amp.not-floating", "autocast.device-type"),
    "promoting": ("amp.promoted", "aten.optional"),
    "promoted": ("amp.promoted", "aten.promote"),
    "extra": ("aten.fallthrough",),
    "excluded": ("aten.inside",),
    "caches": ("aten.cached-weights", "aten.cached-only", "autocast.cache-off"),
    "cache_key": ("aten.cache-key",),
    "cached_cast": ("autocast.cache", "autocast.backward-dtype"),
    "keeps_below": ("aten.cached-weights",),
    "serves": ("autocast.cache", "aten.cleared"),
    "enabled": ("modules.fast-path",),
    "any_enabled": ("modules.fast-path",),
    "checkpoint": ("checkpoint.same", "checkpoint.autocast", "checkpoint.context-fn"),
    "keeper": ("custom.backward",),
    "forward_state": ("custom.backward", "examples.bwd-state"),
    "ahead": ("autocast.op-dtype",),
    "around_grad": ("autocast.backward-dtype",),
    "body": ("library.body",),
    "fp8": ("fp8.current", "fp8.rowwise", "fp8.blockwise", "fp8.mxfp8", "fp8.nvfp4", "fp8.format"),
    "layers": ("fp8.delayed", "fp8.delayed-algorithm"),
    "in_autograd_thread": ("aten.thread-local",),
}
"""The promises of documents that each rule follows: see `amp_fuzz/reference/promises.toml`."""
