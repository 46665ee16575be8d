"""Autograd Functions without the decorators of torch.amp."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["Mixing", "Right", "Undecorated"]


class Undecorated(torch.autograd.Function):
    """A product whose backward, where autocast is off, meets a 16-bit gradient and float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return grad @ w.t(), x.t() @ grad


class Right(Undecorated):
    """A product whose backward casts by itself: it runs."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return grad.float() @ w.t(), x.float().t() @ grad.float()


class Mixing(torch.autograd.Function):
    """Its forward brings two dtypes together under autocast: only float32 inputs help."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        made: Tensor = torch.tensordot(x @ w, w, dims=1)
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        _, w = ctx.saved_tensors
        return grad @ w.t() @ w.t(), None
