"""Read and restore torch's thread state, to check that a case does not change it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from amp_fuzz.backends import prelude

__all__ = [
    "chosen_dtypes",
    "in_compiling_thread",
    "in_thread_alike",
    "reset_state",
    "restoring",
    "torch_state",
]

_DEVICES = ("cpu", "cuda", "xpu", "mps", "mtia", "maia")


def _dtypes() -> dict[str, torch.dtype]:
    """Return autocast's dtype of each device, for this thread."""
    found = [d for d in _DEVICES if torch.amp.is_autocast_available(d)]
    return {device: torch.get_autocast_dtype(device) for device in found}


# A new thread has the defaults; this thread's dtypes may have been set.
_INITIAL: dict[str, torch.dtype] = prelude.in_thread(_dtypes)


def chosen_dtypes() -> dict[str, torch.dtype]:
    """Return the dtypes that `torch.set_autocast_dtype` set in this thread, by device."""
    return {device: dtype for device, dtype in _dtypes().items() if dtype != _INITIAL[device]}


def in_compiling_thread(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function that compiles or exports in a new thread, as `prelude.in_thread`.

    This thread enters a fake tensor mode first. If CUDA is missing, torch 2.11 then makes a device
    guard, which belongs to the first thread that enters a mode. The next mode after that thread's
    end reads freed memory (docs/findings/fake-mode-in-threads.md).
    """
    with FakeTensorMode():
        pass
    return prelude.in_thread(function, *args)


def in_thread_alike(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function as `in_compiling_thread`, with this thread's autocast dtypes."""
    dtypes = chosen_dtypes()

    def run() -> Any:
        for device, dtype in dtypes.items():
            torch.set_autocast_dtype(device, dtype)
        return function(*args)

    return in_compiling_thread(run)


def torch_state(device: str) -> dict[str, object]:
    """Return this thread's state by name: autocast's, the grad modes, the dispatcher's.

    A failed compilation can leave dispatch keys and modes behind in a thread. Only private names of
    torch can read them.
    """
    # The only way to read the nesting depth is to step in and out.
    torch.autocast_increment_nesting()
    nesting = torch.autocast_decrement_nesting()
    return {
        "autocast on cpu": torch.is_autocast_enabled("cpu"),
        "its dtype on cpu": torch.get_autocast_dtype("cpu"),
        f"autocast on {device}": torch.is_autocast_enabled(device),
        f"its dtype on {device}": torch.get_autocast_dtype(device),
        "weight cache": torch.is_autocast_cache_enabled(),
        "nesting": nesting,
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "dispatch keys": str(torch._C._dispatch_tls_local_include_set()),
    }


def reset_state(device: str) -> None:
    """Reset this thread's autocast state to that of a fresh thread."""
    for name in {"cpu", device}:
        torch.set_autocast_enabled(name, False)
        # A device that was added since is PrivateUse1's.
        torch.set_autocast_dtype(name, _INITIAL.get(name, torch.float16))
    torch.set_autocast_cache_enabled(True)
    depth = torch.autocast_increment_nesting()
    while depth > 0:
        depth = torch.autocast_decrement_nesting()
    while depth < 0:
        depth = torch.autocast_increment_nesting()
    torch.clear_autocast_cache()
    torch.set_grad_enabled(True)


def restoring() -> Callable[[], None]:
    """Return a function that restores this thread's autocast state, grad mode and default dtype.

    Call it after running unknown code, which may leave something on for later code.
    """
    devices = {d: (torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _INITIAL}
    cache, grad = torch.is_autocast_cache_enabled(), torch.is_grad_enabled()
    default = torch.get_default_dtype()
    torch.autocast_increment_nesting()
    nesting = torch.autocast_decrement_nesting()

    def restore() -> None:
        for device, (enabled, dtype) in devices.items():
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(cache)
        depth = torch.autocast_increment_nesting()
        while depth > nesting:
            depth = torch.autocast_decrement_nesting()
        while depth < nesting:
            depth = torch.autocast_increment_nesting()
        torch.set_grad_enabled(grad)
        torch.set_default_dtype(default)

    return restore
