"""The rules of autocast as pure functions: who is eligible, what is cast to what.

Written from the documented semantics (https://docs.pytorch.org/docs/stable/amp.html, "Autocast Op
Reference"), not by asking torch. `amp_fuzz.reference.semantics` says where each of them decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = [
    "aliased",
    "cache_key",
    "cacheable",
    "cached_cast",
    "caches",
    "cast_eligible",
    "device_of",
    "eligible",
    "is_aliased",
    "keeps_below",
    "promoted",
    "serves",
    "tensors_of",
    "unaliased",
]

# Device type of tensors -> the device type that they are taken for, in every thread.
_aliases: dict[str, str] = {}
_exempt: list[Callable[[torch.Tensor], bool]] = []


@contextmanager
def aliased(tensors: str, device: str) -> Iterator[None]:
    """Take the tensors of one device type for those of another for a block, in every thread."""
    before = dict(_aliases)
    _aliases[tensors] = device
    try:
        yield
    finally:
        _aliases.clear()
        _aliases.update(before)


@contextmanager
def unaliased(own: Callable[[torch.Tensor], bool]) -> Iterator[None]:
    """Take some tensors for what they are, for a block. own: whether a tensor is one of them."""
    _exempt.append(own)
    try:
        yield
    finally:
        _exempt.remove(own)


def is_aliased(tensors: str) -> bool:
    """Return whether the tensors of a device type are taken for those of another."""
    return _aliases.get(tensors, tensors) != tensors


def device_of(tensor: torch.Tensor) -> str:
    """Return the device type that a tensor is of, or is taken for."""
    name = tensor.device.type
    found = _aliases.get(name, name)
    if found != name and any(own(tensor) for own in _exempt):
        return name
    return found


def eligible(tensor: torch.Tensor, device: str) -> bool:
    """Return whether autocast for `device` may cast a tensor.

    It must be floating point (complex is not), on that device, and not float64: "Only CUDA ops
    [of the device] and only out-of-place ops are eligible ... float64 or non-floating-point dtypes
    are not eligible, and will run in these types whether or not autocast is enabled."
    """
    return (
        tensor.is_floating_point()
        and tensor.dtype is not torch.float64
        and device_of(tensor) == device
    )


def promoted(tensors: Iterable[torch.Tensor], device: str, low: torch.dtype) -> torch.dtype:
    """Return the dtype in which an op of the ``promote`` policy runs.

    "These ops don't require a particular dtype for stability, but take multiple inputs and require
    that the inputs' dtypes match": the widest of the eligible inputs' dtypes, `low` (the autocast
    dtype) if there are none. Two different 16-bit dtypes meet in float32, as torch's own type
    promotion has it; float64 inputs are ignored.
    """
    dtypes = {t.dtype for t in tensors if eligible(t, device)}
    if not dtypes or dtypes == {low}:
        return low
    return dtypes.pop() if len(dtypes) == 1 else torch.float32


def cast_eligible(value: Any, device: str, to: torch.dtype) -> Any:
    """Cast an argument, or what stands in a list, if it is eligible."""
    if isinstance(value, torch.Tensor):
        return value.to(to) if eligible(value, device) else value
    if isinstance(value, (list, tuple)):
        return type(value)(cast_eligible(v, device, to) for v in value)
    return value


def cacheable(tensor: torch.Tensor, to: torch.dtype, low: torch.dtype) -> bool:
    """Return whether the weight cache holds casts of a tensor to `to` at all.

    It does for a float32 leaf that requires grad and is no view, cast to the autocast dtype.
    """
    return (
        to is low
        and tensor.dtype is torch.float32
        and tensor.requires_grad
        and not tensor._is_view()  # of a view, is_leaf makes a new grad_fn, and may fail
        and tensor.is_leaf
    )


def caches(tensor: torch.Tensor, to: torch.dtype, low: torch.dtype) -> bool:
    """Return whether the weight cache may hold a cast that is made now.

    A cast in inference mode may serve no pass that trains.
    """
    return cacheable(tensor, to, low) and not torch.is_inference_mode_enabled()


def cache_key(tensor: torch.Tensor, to: torch.dtype) -> tuple[int, torch.dtype]:
    """Return under what the weight cache keeps a cast: contexts of two dtypes may nest."""
    return id(tensor), to


def cached_cast(tensor: torch.Tensor, to: torch.dtype) -> torch.Tensor:
    """Cast a weight with grad enabled, whatever the mode.

    A first pass under ``no_grad`` leaves no cast behind through which no gradient flows.
    """
    with torch.enable_grad():
        return tensor.to(to)


def keeps_below() -> bool:
    """Return whether the weight cache keeps a cast that is made below autograd.

    It does not: through such a cast no gradient flows.
    """
    return False


def serves(tensor: torch.Tensor, cast: torch.Tensor) -> bool:
    """Return whether a kept cast is used again.

    It is until the outermost context ends, even if the weight was written since.
    """
    return True


def tensors_of(args: Iterable[object]) -> list[torch.Tensor]:
    """Return the tensors among arguments, and inside lists among them, in order."""
    found: list[torch.Tensor] = []
    for arg in args:
        if isinstance(arg, torch.Tensor):
            found.append(arg)
        elif isinstance(arg, (list, tuple)):
            found += [a for a in arg if isinstance(a, torch.Tensor)]
    return found
