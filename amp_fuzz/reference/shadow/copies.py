"""The copies of a tensor's memory, and what is done to them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from amp_fuzz.reference.shadow.band import REAL, THRESHOLD, UNIT_ROUNDOFF

__all__ = [
    "WIDE",
    "Memory",
    "bits_of",
    "ended_at",
    "equals",
    "is_far",
    "is_plain",
    "is_short",
    "no_modes",
    "resolved",
    "rounded_to",
    "seen_as",
    "tensors_in",
    "window_of",
    "with_numbers",
    "with_tensors",
]

WIDE: dict[torch.dtype, torch.dtype] = {
    torch.bfloat16: torch.float64,
    torch.float16: torch.float64,
    torch.float32: torch.float64,
    torch.float64: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
    torch.complex128: torch.complex128,
}


@dataclass(slots=True)
class Memory:
    """The copies of one storage: ``[K + 1, elements]``, the clean one first."""

    keep: torch.UntypedStorage
    copies: torch.Tensor
    dtype: torch.dtype
    known: bool = True
    left: tuple[str, ...] = ()
    count: int = 0


def is_far(tensor: torch.Tensor) -> bool:
    """Return whether a number, or its reciprocal, is below the smallest normal one."""
    if tensor.dtype not in UNIT_ROUNDOFF:
        return False
    tiny = torch.finfo(REAL.get(tensor.dtype, tensor.dtype)).tiny
    size = tensor.detach().abs()
    return bool((((size < tiny) & (size > 0)) | (size > 1 / (4 * tiny))).any())


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is dense, on the CPU and not quantised."""
    return (
        tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor.is_quantized
    )


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in what a dispatcher passes or returns, in order."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, (tuple, list)):
        return [t for part in tree for t in tensors_in(part)]
    if isinstance(tree, dict):
        return [t for part in tree.values() for t in tensors_in(part)]
    return []


def with_tensors(
    tree: Any, turn: Iterator[torch.Tensor], dtypes: Mapping[torch.dtype, torch.dtype] = WIDE
) -> Any:
    """Return an argument with other tensors, and with other dtypes: wide ones by default."""
    if isinstance(tree, torch.Tensor):
        return next(turn)
    if isinstance(tree, (tuple, list)):
        return [with_tensors(part, turn, dtypes) for part in tree]
    if isinstance(tree, torch.dtype):
        return dtypes.get(tree, tree)
    return tree


def window_of(copies: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of ``[n, elements]`` copies that a tensor of that memory covers."""
    offset = copies.storage_offset() + tensor.storage_offset()
    size, stride = (len(copies), *tensor.shape), (copies.stride(0), *tensor.stride())
    return copies.as_strided(size, stride, offset)


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return what the memory of a tensor holds, without its lazy negation and conjugation."""
    storage, plain = tensor.untyped_storage(), torch.empty(0, dtype=tensor.dtype)
    return plain.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without lazy negation and conjugation, which `seen_as` tells of."""
    return seen_as(bits_of(tensor), tensor) if tensor.is_conj() or tensor.is_neg() else tensor


def seen_as(held: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return what a tensor makes of what its memory holds, or the other way: both are involutions.

    Computed at once: a lazy conjugate loses its bit where a dispatch key is excluded, as it is for
    composite ops that inference_mode brings here whole.
    """
    if tensor.is_conj():
        held = held.conj_physical()
    return held.neg() if tensor.is_neg() else held


def equals(wide: torch.Tensor, nominal: torch.Tensor) -> bool:
    """Return whether wide copies are what a tensor holds, NaN included."""
    if wide.shape != nominal.shape:
        return False
    value = nominal.detach().to(wide.dtype)
    return bool(((wide == value) | (wide != wide) & (value != value)).all())


def is_short(tensor: torch.Tensor) -> bool:
    """Return whether float64 shows what an op rounds: not if it rounds to float64 itself.

    What has no more digits than float32, and came of such numbers, was hardly rounded to it.
    """
    if tensor.dtype not in (torch.float64, torch.complex128):
        return True
    shorter = tensor.to(torch.complex64 if tensor.is_complex() else torch.float32)
    return equals(shorter.to(tensor.dtype), tensor)


def ended_at(copies: torch.Tensor, end: float) -> torch.Tensor:
    """Return the copies with infinities in place of what is beyond an end."""
    if copies.is_complex():
        return torch.view_as_complex(ended_at(torch.view_as_real(copies), end))
    return torch.where(copies.abs() > end, torch.inf * copies.sign(), copies)


def rounded_to(copies: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return copies that are rounded to a dtype, all that it has numbers for.

    Where they differ, every second one is rounded from as far out as the oracle lets a value be,
    but no further than to the next number: what may be there before a rounding may be there after.
    """
    off = copies - copies[:1]
    far = torch.minimum(off.abs() * THRESHOLD, copies.abs() * UNIT_ROUNDOFF[dtype])
    out = copies.clone(memory_format=torch.contiguous_format)
    out[1::2] += (torch.maximum(far, off.abs()) * off.sign() - off)[1::2]
    made = out.to(dtype).to(copies.dtype)
    return torch.where(torch.isfinite(made), made, copies)


def with_numbers(
    copies: torch.Tensor | None, inputs: Sequence[torch.Tensor]
) -> torch.Tensor | None:
    """Return copies with numbers in place of what is none, if all that it was made of are."""
    if copies is None or not all(i.numel() and bool(torch.isfinite(i).all()) for i in inputs):
        return copies
    if copies.is_complex():
        parts = with_numbers(torch.view_as_real(copies), ())
        assert parts is not None
        return torch.view_as_complex(parts)
    high = torch.finfo(torch.float64).max / 2  # it is rounded up later
    return copies.nan_to_num(high, high, -high) if copies.is_floating_point() else copies


def no_modes() -> Any:
    """Return a block in which no dispatch mode is on."""
    return torch.utils._python_dispatch._disable_current_modes()
