"""Read and restore torch's own state of a thread: for the check that a case leaves none behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from amp_fuzz.backends import prelude

__all__ = ["chosen_dtypes", "in_thread_alike", "reset_state", "restoring", "torch_state"]

_DEVICES = ("cpu", "cuda", "xpu", "mps", "mtia", "maia")


def _dtypes() -> dict[str, torch.dtype]:
    """Return autocast's dtype of each device, for this thread."""
    found = [d for d in _DEVICES if torch.amp.is_autocast_available(d)]
    return {device: torch.get_autocast_dtype(device) for device in found}


# The defaults: this thread's may have been set, a new thread's have not.
_INITIAL: dict[str, torch.dtype] = prelude.in_thread(_dtypes)


def chosen_dtypes() -> dict[str, torch.dtype]:
    """Return autocast's dtypes that `torch.set_autocast_dtype` chose for this thread, by device."""
    return {device: dtype for device, dtype in _dtypes().items() if dtype != _INITIAL[device]}


def in_thread_alike(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function in a new thread, in which autocast's dtypes are those of this one."""
    dtypes = chosen_dtypes()

    def run() -> Any:
        for device, dtype in dtypes.items():
            torch.set_autocast_dtype(device, dtype)
        return function(*args)

    return prelude.in_thread(run)


def torch_state(device: str) -> dict[str, object]:
    """Return this thread's state by name: autocast's, the grad modes, the dispatcher's.

    The dispatcher has keys and modes of its own in a thread, which a compilation that fails can
    leave behind. There is no way to read them but by private names of torch.
    """
    # There is no way to read the nesting depth but to step in and out.
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
    """Put autocast's state of this thread back to that of a fresh one."""
    for name in {"cpu", device}:
        torch.set_autocast_enabled(name, False)
        # A device that has come since is one of PrivateUse1.
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
    """Return what puts autocast's state of this thread back, the grad mode and the default dtype.

    Whoever runs code of which nothing is known calls it afterwards: what that leaves on would be
    on in whatever runs next.
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
