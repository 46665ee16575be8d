"""Ops that an export computes otherwise; the page is docs/findings/export.md.

export-embedding-bag, export-take: a call raises as it does where the export is decomposed.
export-promotion: select_scatter of two dtypes promotes.
"""

from __future__ import annotations

from typing import Any

import torch

from amp_fuzz.backends.imitation import Imitation
from amp_fuzz.upstream.lowering import kernels, promoted

__all__ = ["IMITATIONS"]

_aten = torch.ops.aten
_DataDependent = type("GuardOnDataDependentSymNode", (RuntimeError,), {})


def _take(x: torch.Tensor, index: torch.Tensor) -> None:
    if not index.dim():
        said = "Could not extract specialized integer from data-dependent expression u0"
        raise _DataDependent(f"{said} (unhinted: u0).  (Size-like symbols: none)")


def _embedding_bag(weight: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    if weight.requires_grad and not weight.is_leaf:
        raise RuntimeError("Autograd not support dtype: Long")


_SCATTERS = {_aten.select_scatter.default: promoted(_aten.select_scatter.default)}
IMITATIONS = {
    "export-embedding-bag": Imitation(
        kernels=kernels({_aten._embedding_bag.default: _embedding_bag})
    ),
    "export-promotion": Imitation(kernels=kernels(_SCATTERS)),
    "export-take": Imitation(kernels=kernels({_aten.take.default: _take})),
}
"""The imitations, by name. The records are in known.toml."""
