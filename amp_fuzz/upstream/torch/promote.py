"""What torch makes of the ``promote`` policy.

Each bug has a page of its own name in docs/findings/.

promote-foreign-half: a 16-bit input that is not of the autocast dtype raises, unless an argument
    before it is float32. Upstream's fold over the arguments knows the autocast dtype and float32
    only (https://github.com/pytorch/pytorch/issues/132715).
promote-skips-optional: an optional tensor, as the bias of ``bilinear``, has no say in the dtype.
    The fold has no overload for optional tensors (https://github.com/pytorch/pytorch/pull/191125).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from amp_fuzz.backends.imitation import Imitation
from amp_fuzz.reference.calls import Call
from amp_fuzz.reference.casts import eligible, tensors_of
from amp_fuzz.reference.semantics import Semantics

__all__ = ["IMITATIONS"]


def _in_order(tensors: Iterable[torch.Tensor], device: str, low: torch.dtype) -> torch.dtype:
    """Return what a fold over the arguments comes to, which starts from `low`."""
    current = low
    for tensor in tensors:
        if not eligible(tensor, device):
            continue
        if torch.float32 in (current, tensor.dtype):
            current = torch.float32
        elif not (current is low and tensor.dtype is low):
            raise RuntimeError("Unexpected floating ScalarType in at::autocast::prioritize")
    return current


def _required(call: Call) -> list[torch.Tensor]:
    """Return the tensors among the arguments of a call that are not optional."""
    parameters = {p.name: p for p in call.overload._schema.arguments}
    given = {**dict(zip(parameters, call.args, strict=False)), **call.kwargs}
    optional = torch.OptionalType.ofTensor()
    return tensors_of(v for name, v in given.items() if parameters[name].type != optional)


def _foreign_half(semantics: Semantics) -> Semantics:
    return replace(semantics, promoted=_in_order)


def _skips_optional(semantics: Semantics) -> Semantics:
    return replace(semantics, promoting=_required)


IMITATIONS = {
    "promote-foreign-half": Imitation(semantics=_foreign_half),
    "promote-skips-optional": Imitation(semantics=_skips_optional),
}
