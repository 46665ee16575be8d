"""What generated source leans on: plain torch, so that a repro can carry it word for word.

Each function here is used by the harness as it is and printed into repros by `inspect.getsource`;
none may use anything but torch, the standard library, and its neighbours here.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

__all__ = ["Interrupted", "as_function", "cotangent", "in_thread", "nudge", "trains"]


class Interrupted(Exception):
    """Raised inside a context on purpose."""


def trains(outputs):  # type: ignore[no-untyped-def]
    """Return the outputs that a backward pass can start from."""
    return [o for o in outputs if o.requires_grad]


def cotangent(output):  # type: ignore[no-untyped-def]
    """Return small values, exact in every dtype, to start a backward pass from."""
    steps = torch.arange(output.numel(), device=output.device) % 4
    return (steps.to(output.dtype) - 1.5).reshape(output.shape)


def nudge(weights):  # type: ignore[no-untyped-def]
    """Change each weight in place, so that a stale copy of it shows."""
    with torch.no_grad():
        for weight in weights:
            weight.mul_(0.5)


def in_thread(function: Any, *args: Any) -> Any:
    """Call a function in a new thread and return, or raise, what it returns or raises."""
    box: list[Any] = []

    def call():  # type: ignore[no-untyped-def]
        try:
            box.append((function(*args), None))
        except BaseException as error:
            box.append((None, error))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    result, error = box[0]
    if error is not None:
        raise error
    return result


def as_function(program, device, custom_fwd, custom_bwd):  # type: ignore[no-untyped-def]
    """Return a program as an autograd.Function whose backward recomputes it."""

    class Recompute(torch.autograd.Function):
        @staticmethod
        @custom_fwd(device_type=device)
        def forward(ctx, *inputs):  # type: ignore[no-untyped-def]
            ctx.inputs = inputs
            return tuple(program(*inputs))

        @staticmethod
        @custom_bwd(device_type=device)
        def backward(ctx, *cotangents):  # type: ignore[no-untyped-def]
            leaves = [x.detach().requires_grad_(x.requires_grad) for x in ctx.inputs]
            with torch.enable_grad():
                outputs = program(*leaves)
            pairs = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if o.requires_grad]
            wanted = [x for x in leaves if x.requires_grad]
            if pairs and wanted:
                torch.autograd.backward([o for o, _ in pairs], [c for _, c in pairs])
            return tuple(x.grad for x in leaves)

    return Recompute.apply
