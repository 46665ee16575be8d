"""What torchax makes of single ops, written again from what it does, for `quirks`.

Shadows follow these, so that their own roundings are theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

__all__ = ["OPAQUE", "SPLIT"]

OPAQUE = (
    "cdist",
    "einsum",
    "linalg_matrix_power",
    "linalg_solve",
    "linalg_svd",
    "linalg_tensorsolve",
    "linear",
    "lu_solve",
    "pad",
    "svd",
)
"""What torchax 0.0.13 computes where it is called, as torch functions (torchax/ops/jtorch.py)."""


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
    product = torch.einsum("...a,ba->...b", x, weight)
    return product if bias is None else product + bias


def _split(product: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    def added(
        x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: Any = 1, alpha: Any = 1
    ) -> Any:
        made = alpha * product(a, b)
        return made if beta == 0 else beta * x + made

    return added


def _convolution(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *others: Any
) -> Any:
    made = torch.ops.aten.convolution(x, weight, None, *others)
    return made if bias is None else made + bias.reshape(-1, *[1] * (made.dim() - 2))


SPLIT: Mapping[str, Callable[..., Any]] = {
    "addbmm": _split(lambda a, b: torch.einsum("bxy, byz -> xz", a, b)),
    "addmm": _split(torch.mm),
    "addmv": _split(torch.mv),
    "baddbmm": _split(torch.bmm),
    "convolution": _convolution,
    "linear": _linear,
}
"""What torchax makes of ops that add to a product: the product is rounded before."""
