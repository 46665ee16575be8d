"""The arguments of `amp_fuzz.check` and `amp_fuzz.check_op`: validated, and read."""

from __future__ import annotations

import importlib
import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from amp_fuzz.backends import Backend, BackendError, facts_of
from amp_fuzz.backends.harness import quiet
from amp_fuzz.backends.registry import MissingBackend, choose_backends
from amp_fuzz.cases.program import FLOAT_DTYPES, Autocast
from amp_fuzz.findings.supervision.processes import unforkable
from amp_fuzz.interfaces.check.fork import Apart
from amp_fuzz.interfaces.check.steps import Call
from amp_fuzz.interfaces.check.subject import CheckError
from amp_fuzz.reference import load_table, tabled_devices

__all__ = [
    "Context",
    "caller_of",
    "check_arguments",
    "check_surroundings",
    "chosen_backends",
    "context_list",
]

Context: TypeAlias = torch.dtype | str | Mapping[str, Any] | None


def caller_of(isolate: bool | None, backends: Iterable[Backend]) -> tuple[Call, tuple[str, ...]]:
    """Return a function that runs a generator, in a fork or here, and a remark on this.

    backends: those that it will call. Raises `CheckError`.
    """
    reason = unforkable()
    if not reason and multiprocessing.current_process().daemon:
        reason = "a daemonic process cannot start another"
    if isolate and reason:
        raise CheckError(f"isolate=True: {reason}")
    if reason or isolate is False:
        said = f"It was called in this process, which a crash would have killed: {reason}."
        return _here, ((said,) if isolate is None else ())
    # Once for all forks. torch imports dynamo at the first checkpoint, custom op or compiler. The
    # modules of a compiler take 0.7 to 2.3 CPU seconds in each fork that has to import them.
    modules = ["torch._dynamo", *(name for b in backends for name in facts_of(b).imports)]
    with quiet():
        for name in modules:
            importlib.import_module(name)
    for device in tabled_devices():
        load_table(device)
    return Apart(), ()


def _here(function: Callable[..., Iterator[Any]], *args: object) -> Iterator[Any]:
    return function(*args)


def check_arguments(*, kwargs: Any, backward: Any, seed: Any) -> None:
    """Raise `CheckError` for an argument of a wrong type."""
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise CheckError(f"kwargs={kwargs!r}: use a mapping from names to arguments")
    if not isinstance(backward, bool):
        raise CheckError(f"backward={backward!r}: use True or False")
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise CheckError(f"seed={seed!r}: use a whole number from 0 to 2**32 - 1, as NumPy takes")


def check_surroundings(*, backward: bool) -> None:
    """Raise `CheckError` where autocast is on, or gradients are off and a backward is asked for."""
    devices = ("cpu", "cuda", "xpu", "mps", "mtia", "maia")
    if any(torch.is_autocast_enabled(d) for d in devices if torch.amp.is_autocast_available(d)):
        raise CheckError("autocast is on around check: call it outside, and pass autocast=")
    if backward and (not torch.is_grad_enabled() or torch.is_inference_mode_enabled()):
        raise CheckError("gradients are off around check: call it outside, or pass backward=False")


def chosen_backends(backends: Iterable[str | Backend] | str | Backend) -> list[Backend]:
    """Return the backends. Raises `BackendError`, or `MissingBackend` for one not ready here."""
    if isinstance(backends, str) or not isinstance(backends, Iterable):
        backends = [backends]
    found: dict[str, Backend] = {}
    for one in backends:
        for backend in choose_backends([one]) if isinstance(one, str) else [one]:
            state = backend.availability()
            if state.status != "ready":
                raise MissingBackend(
                    f"backend {backend.name} is {state.status} here: {state.detail}"
                )
            found[backend.name] = backend
    if not found:
        raise BackendError(f"backends={backends!r}: none is ready here")
    return list(found.values())


def context_list(autocast: Context | Sequence[Context]) -> list[tuple[Autocast, ...]]:
    """Return the contexts of each item of ``autocast=``. Raises `CheckError`."""
    several = autocast if isinstance(autocast, (list, tuple)) else [autocast]
    if not several:
        raise CheckError("autocast=[] has nothing to check: give a dtype, or None for no context")
    return [_context(one) for one in several]


def _context(one: Any) -> tuple[Autocast, ...]:
    if one is None:
        return ()
    options = dict(one) if isinstance(one, Mapping) else {"dtype": one}
    dtype = options.pop("dtype", None)
    name = None if dtype is None else str(dtype).removeprefix("torch.")
    if name not in (None, *FLOAT_DTYPES):
        raise CheckError(f"autocast={one!r} is not a floating dtype: use torch.bfloat16 or float16")
    unknown = set(options) - {"enabled", "cache_enabled"}
    if unknown:
        raise CheckError(
            f"autocast has {sorted(unknown)}: it takes dtype, enabled and cache_enabled; each "
            "backend has its own device"
        )
    for option, value in options.items():
        if not isinstance(value, bool) and (option, value) != ("cache_enabled", None):
            raise CheckError(f"autocast has {option}={value!r}: use True or False")
    return (Autocast(dtype=name, **options),)
