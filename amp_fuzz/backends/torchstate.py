"""Read and restore torch's own autocast state: for the check that a case leaves none behind."""

from __future__ import annotations

import torch

__all__ = ["reset_state", "torch_state"]

_DEVICES = ("cpu", "cuda", "xpu", "mps", "mtia", "maia")
# The defaults of a fresh process, read before any case has run.
_INITIAL = {d: torch.get_autocast_dtype(d) for d in _DEVICES if torch.amp.is_autocast_available(d)}


def torch_state(device: str) -> tuple[object, ...]:
    """Return autocast's state of this thread for the CPU and `device`, and the grad modes."""
    # There is no way to read the nesting depth but to step in and out.
    torch.autocast_increment_nesting()
    nesting = torch.autocast_decrement_nesting()
    return (
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_enabled(device),
        torch.get_autocast_dtype(device),
        torch.is_autocast_cache_enabled(),
        nesting,
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
    )


def reset_state(device: str) -> None:
    """Put autocast's state of this thread back to that of a fresh one."""
    for name in {"cpu", device}:
        torch.set_autocast_enabled(name, False)
        torch.set_autocast_dtype(name, _INITIAL[name])
    torch.set_autocast_cache_enabled(True)
    depth = torch.autocast_increment_nesting()
    while depth > 0:
        depth = torch.autocast_decrement_nesting()
    while depth < 0:
        depth = torch.autocast_increment_nesting()
    torch.clear_autocast_cache()
    torch.set_grad_enabled(True)
