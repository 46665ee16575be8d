"""Faults in the Python of torch.amp and around it: contexts, threads, checkpoints, backward."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.utils.checkpoint

from tests.faults.fault import Fault, patched
from tests.faults.wrapper import DEVICE

__all__ = ["FAULTS"]

_FOUND: list[Fault] = []

_VALUE = ("bitwise", "nonfinite")
_GRAD = ("grad-bitwise", "grad-nonfinite", "grad-missing", "grad-dtype")
_ANY = ("dtype", "raise", *_VALUE, *_GRAD, "relation")

_Autocast: Any = torch.amp.autocast_mode.autocast
# Bound here: while the reference is in force the public queries answer for it, and a fault must
# neither see the reference's state nor disturb it.
_is_enabled: Any = torch.is_autocast_enabled
_dtype_of: Any = torch.get_autocast_dtype
_init, _enter, _exit, _call = (
    getattr(_Autocast, name) for name in ("__init__", "__enter__", "__exit__", "__call__")
)


def _fault(name: str, what: str, *kinds: str) -> Callable[[Any], Any]:
    """Make a fault of a function that returns the context in which torch is wrong."""

    def register(corrupt: Callable[[], AbstractContextManager[None]]) -> Any:
        _FOUND.append(Fault(name, what, kinds, corrupt))
        return corrupt

    return register


def _after_enter(name: str, what: str, change: Callable[[Any], object], *kinds: str) -> None:
    """Make a fault of what happens right after a context is entered."""

    def enter(self: Any) -> Any:
        entered = _enter(self)
        change(self)
        return entered

    _fault(name, what, *kinds)(lambda: patched(_Autocast, __enter__=enter))


def _after_exit(name: str, what: str, change: Callable[[Any], object], *kinds: str) -> None:
    """Make a fault of what happens right after a context is left."""

    def leave(self: Any, *error: Any) -> Any:
        left = _exit(self, *error)
        change(self)
        return left

    _fault(name, what, *kinds)(lambda: patched(_Autocast, __exit__=leave))


# -- entering -------------------------------------------------------------------------------------


def _keep_enabled(context: Any) -> None:
    if context.prev:
        torch.set_autocast_enabled(context.device, True)


def _keep_dtype(context: Any) -> None:
    if context.prev:
        torch.set_autocast_dtype(context.device, context.prev_fastdtype)


def _keep_cache(context: Any) -> None:
    if context.prev_cache_enabled:
        torch.set_autocast_cache_enabled(True)


_after_enter(
    "disabled-ignored", "enabled=False inside an enabled context is ignored", _keep_enabled, *_ANY
)
_after_enter("inner-dtype-ignored", "the dtype of an inner context is ignored", _keep_dtype, *_ANY)
# A value shows it where the cached cast has the dtype of another context.
_after_enter(
    "cache-flag-ignored",
    "the context drops cache_enabled=False",
    _keep_cache,
    *_GRAD,
    *_VALUE,
)
_after_enter(
    "cache-cleared-on-enter",
    "entering a nested context clears the cache",
    lambda c: torch.clear_autocast_cache(),
    *_GRAD,
    *_VALUE,
)
_after_enter(
    "grad-mode-lost",
    "entering a context turns gradients on",
    lambda c: torch.set_grad_enabled(True),
    *_ANY,
    "state",
)


@_fault("default-dtype", "the default dtype of the CPU is float16", *_ANY)
def _default_dtype() -> AbstractContextManager[None]:
    def init(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        if dtype is None and not _is_enabled(device_type):
            dtype = torch.float16
        _init(self, device_type, dtype, *args, **kwargs)

    return patched(_Autocast, __init__=init)


@_fault("unsupported-dtype", "a dtype that is not supported does not disable the context", *_ANY)
def _unsupported() -> AbstractContextManager[None]:
    def init(
        self: Any, device_type: str, dtype: Any = None, enabled: bool = True, **kwargs: Any
    ) -> None:
        _init(self, device_type, dtype, enabled, **kwargs)
        self._enabled = enabled

    return patched(_Autocast, __init__=init)


# -- leaving --------------------------------------------------------------------------------------

_after_exit(
    "enabled-not-restored",
    "leaving a context leaves autocast enabled",
    lambda c: torch.set_autocast_enabled(c.device, c._enabled),
    "state",
    *_ANY,
)
_after_exit(
    "dtype-not-restored",
    "leaving a context does not restore the dtype",
    lambda c: torch.set_autocast_dtype(c.device, c.fast_dtype),
    "state",
    *_ANY,
)
_after_exit(
    "cache-flag-not-restored",
    "leaving a context does not restore cache_enabled",
    lambda c: torch.set_autocast_cache_enabled(c._cache_enabled),
    "state",
    *_GRAD,
)
_after_exit(
    "nesting-not-restored",
    "leaving a context does not decrement the nesting depth",
    lambda c: torch.autocast_increment_nesting(),
    "state",
    *_ANY,
)
_after_exit(
    "restored-to-off",
    "leaving a context always turns autocast off",
    lambda c: torch.set_autocast_enabled(c.device, False),
    "state",
    *_ANY,
)
_after_exit(
    "cache-cleared-on-exit",
    "leaving a nested context clears the cache",
    lambda c: torch.clear_autocast_cache(),
    *_GRAD,
    *_VALUE,
)


@_fault(
    "exception-not-restored", "an exception that leaves a context restores nothing", "state", *_ANY
)
def _exception() -> AbstractContextManager[None]:
    def leave(self: Any, kind: Any, value: Any, traceback: Any) -> Any:
        return False if kind is not None else _exit(self, kind, value, traceback)

    return patched(_Autocast, __exit__=leave)


@_fault("cache-not-cleared", "leaving the outermost context does not clear the cache", *_ANY)
@contextmanager
def _not_cleared() -> Iterator[None]:
    with patched(torch, clear_autocast_cache=lambda: None):
        yield
    torch.clear_autocast_cache()


# -- other ways in --------------------------------------------------------------------------------


@_fault("decorator-does-nothing", "autocast as a decorator does not enter", *_ANY)
def _undecorated() -> AbstractContextManager[None]:
    return patched(_Autocast, __call__=lambda self, function: function)


@_fault("decorator-dtype", "autocast as a decorator enters with the default dtype", *_ANY)
def _decorated() -> AbstractContextManager[None]:
    def call(self: Any, function: Any) -> Any:
        return _call(_Autocast(self.device, enabled=self._enabled), function)

    return patched(_Autocast, __call__=call)


@_fault("decorator-stays", "a decorated function never leaves the context", "state", *_ANY)
def _stays() -> AbstractContextManager[None]:
    def call(self: Any, function: Any) -> Any:
        def decorated(*args: Any, **kwargs: Any) -> Any:
            self.__enter__()
            return function(*args, **kwargs)

        return decorated

    return patched(_Autocast, __call__=call)


@_fault("thread-inherits", "a new thread inherits the autocast state", *_ANY)
def _inherits() -> AbstractContextManager[None]:
    start = threading.Thread.start

    def inheriting(self: Any) -> None:
        enabled, dtype = _is_enabled(DEVICE), _dtype_of(DEVICE)
        run = self.run

        def wrapped() -> None:
            with _Autocast(DEVICE, dtype, enabled):
                run()

        if enabled:
            self.run = wrapped
        start(self)

    return patched(threading.Thread, start=inheriting)


def _custom(name: str, what: str, change: Callable[[Any], object]) -> None:
    """Make a fault of what custom_fwd leaves for custom_bwd."""

    def custom_fwd(*, device_type: str, **options: Any) -> Any:
        def decorate(forward: Any) -> Any:
            honest = torch.amp.autocast_mode.custom_fwd(forward, device_type=device_type, **options)

            @functools.wraps(forward)
            def run(ctx: Any, *args: Any) -> Any:
                result = honest(ctx, *args)
                change(ctx)
                return result

            return run

        return decorate

    _fault(name, what, *_GRAD, "raise", "relation")(
        lambda: patched(torch.amp, custom_fwd=custom_fwd)
    )


def _set_off(ctx: Any) -> None:
    ctx._fwd_used_autocast = False


def _set_dtype(ctx: Any) -> None:
    ctx._dtype = torch.bfloat16


_custom("custom-fwd-forgets", "custom_fwd does not remember that autocast was on", _set_off)
_custom("custom-fwd-dtype", "custom_fwd remembers the default dtype", _set_dtype)


@_fault("custom-fwd-off", "custom_fwd runs the forward pass without autocast", *_ANY)
def _forward_off() -> AbstractContextManager[None]:
    def custom_fwd(*, device_type: str, **options: Any) -> Any:
        def decorate(forward: Any) -> Any:
            def run(ctx: Any, *args: Any) -> Any:
                with _Autocast(device_type, enabled=False):
                    return forward(ctx, *args)

            return torch.amp.autocast_mode.custom_fwd(run, device_type=device_type, **options)

        return decorate

    return patched(torch.amp, custom_fwd=custom_fwd)


@_fault(
    "custom-bwd-ambient",
    "custom_bwd keeps the state around the backward pass",
    *_GRAD,
    "raise",
    "relation",
)
def _ambient_backward() -> AbstractContextManager[None]:
    return patched(torch.amp, custom_bwd=lambda *, device_type: lambda backward: backward)


# -- checkpoints and backward passes --------------------------------------------------------------

_kwargs: Any = torch.utils.checkpoint._get_autocast_kwargs


def _recomputes(name: str, what: str, state: Callable[[], Any]) -> None:
    """Make a fault of the autocast state that a checkpoint is recomputed under."""

    def kwargs(device_type: str = "cuda") -> Any:
        # Two contexts are entered: of the device, and of the CPU.
        device, cpu = _kwargs(device_type)
        own = state() if device_type == DEVICE else device
        return own, state() if DEVICE == "cpu" else cpu

    _fault(name, what, *_GRAD, "raise", "relation")(
        lambda: patched(torch.utils.checkpoint, _get_autocast_kwargs=kwargs)
    )


def _current() -> dict[str, Any]:
    return {
        "enabled": _is_enabled(DEVICE),
        "dtype": _dtype_of(DEVICE),
        "cache_enabled": torch.is_autocast_cache_enabled(),
    }


class _Later:
    """Keyword arguments that are looked up only when they are unpacked."""

    def keys(self) -> Sequence[str]:
        return ("enabled", "dtype", "cache_enabled")

    def __getitem__(self, name: str) -> Any:
        return _current()[name]


def _default_state() -> dict[str, Any]:
    return _current() | {"dtype": torch.bfloat16}


_recomputes(
    "checkpoint-off", "a checkpoint is recomputed without autocast", lambda: {"enabled": False}
)
_recomputes(
    "checkpoint-ambient",
    "a checkpoint is recomputed under the state around the backward pass",
    _Later,
)
_recomputes(
    "checkpoint-dtype", "a checkpoint is recomputed under the default dtype", _default_state
)


def _backward_under(name: str, what: str, **state: Any) -> None:
    """Make a fault of the autocast state that a backward pass runs under."""
    honest: Any = torch.autograd.backward

    def backward(*args: Any, **kwargs: Any) -> Any:
        # The reference calls it too, from the same source: only torch's own side is corrupted.
        caller = sys._getframe(1).f_globals
        if caller.get("autocast") is not torch.autocast:
            return honest(*args, **kwargs)
        with _Autocast(DEVICE, **state):
            return honest(*args, **kwargs)

    _fault(name, what, *_GRAD, "raise", "relation")(
        lambda: patched(torch.autograd, backward=backward)
    )


_backward_under(
    "backward-off", "a backward pass inside a context runs without autocast", enabled=False
)
_backward_under(
    "backward-on", "a backward pass outside any context runs under autocast", dtype=torch.bfloat16
)


FAULTS: Sequence[Fault] = tuple(_FOUND)
