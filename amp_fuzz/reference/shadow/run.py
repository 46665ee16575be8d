"""Call any function with shadows, and tell shadows of what they cannot see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from amp_fuzz.reference.shadow.band import Band
from amp_fuzz.reference.shadow.mode import Shadow

__all__ = ["Shadowed", "either", "forget", "shadow"]


def forget(tensor: torch.Tensor) -> None:
    """Tell the shadows around, if there are any, that nothing is known of a tensor."""
    for mode in torch.utils._python_dispatch._get_current_dispatch_mode_stack():
        if isinstance(mode, Shadow):
            mode.forget(tensor)


def either(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Tell the shadows around that elements may also be another tensor's; return the first."""
    for mode in torch.utils._python_dispatch._get_current_dispatch_mode_stack():
        if isinstance(mode, Shadow):
            mode.either(tensor, other)
    return tensor


@dataclass(frozen=True, slots=True)
class Shadowed:
    """What `shadow` returns: the result of the call, and the mode that followed it."""

    result: Any
    mode: Shadow

    def band(self, tensor: torch.Tensor) -> Band:
        """Return the band of a tensor of the call: a result, an input, a gradient."""
        return self.mode.band(tensor)


def shadow(
    function: Callable[..., Any], *args: Any, samples: int = 8, seed: int = 0, **kwargs: Any
) -> Shadowed:
    """Call any function with shadows: ``shadow(module, x).band(result)``.

    The call may hold contexts of autocast (`reference.autocast`, or torch's) and backward passes.

    Args:
        function: what to call with the other arguments.
        samples: how many perturbed copies, at least 2.
        seed: of the perturbations.

    Raises:
        ValueError: fewer than 2 samples.
    """
    if samples < 2:
        raise ValueError(f"samples={samples!r} must be at least 2: a spread needs them")
    mode = Shadow(samples, seed)
    with mode:
        result = function(*args, **kwargs)
    return Shadowed(result, mode)
