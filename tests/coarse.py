"""A device that multiplies and adds as narrowly as torch's settings allow on CUDA.

It is the device in Python under the name ``coarse``, with CUDA's policies. Under the current
settings, its products of float32 round their inputs to TensorFloat-32, and its products of 16-bit
numbers add two halves of the terms that are rounded before, or add one after the other in float16.
All other kernels are the CPU's. Import it as a plugin: ``--device=coarse --plugins=tests.coarse``.

Within `faulty`, it is narrower than the settings allow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from amp_fuzz.reference.shadow.products import convolves, factors, multiplies
from amp_fuzz.reference.shadow.schemas import bound
from tests.devices import install

__all__ = ["DEVICE", "FAULTS", "faulty"]

DEVICE = "coarse"


def _allowed(name: str) -> bool:
    """Return whether a setting of torch allows something."""
    owner = torch.backends.cudnn if name == "cudnn.allow_tf32" else torch.backends.cuda.matmul
    return bool(getattr(owner, name.rpartition(".")[2]))


# By name: what the device does although no setting allows it, or more narrowly than it allows.
FAULTS: Mapping[str, str] = {
    "tf32 in products": "matmul.allow_tf32",
    "tf32 in convolutions": "cudnn.allow_tf32",
    "halves of float16": "matmul.allow_fp16_reduced_precision_reduction",
    "halves of bfloat16": "matmul.allow_bf16_reduced_precision_reduction",
    "float16 one by one": "matmul.allow_fp16_accumulation",
    "bfloat16 instead of tf32": "",
}

_wrong: list[str] = []


@contextmanager
def faulty(name: str) -> Iterator[None]:
    """Make the device wrong in one of the ways, for a block."""
    _wrong.append(name)
    try:
        yield
    finally:
        _wrong.pop()


def _does(setting: str) -> bool:
    return _allowed(setting) or any(FAULTS[name] == setting for name in _wrong)


def _tf32(x: torch.Tensor) -> torch.Tensor:
    """Return float32 numbers cut to the 11 digits of TensorFloat-32, or to 8 of bfloat16."""
    cut = 0xFFFF if "bfloat16 instead of tf32" in _wrong else 0x1FFF
    return (x.contiguous().view(torch.int32) & ~cut).view(torch.float32).view_as(x)


def _rounded(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a product with inputs in TensorFloat-32."""
    multiplied = iter(factors(func, tuple(args), kwargs) or ())

    def taken(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return _tf32(value) if next(multiplied) and value.dtype is torch.float32 else value

    made = [taken(value) for value in args]
    return func(*made, **{name: taken(value) for name, value in kwargs.items()})


def _matrices(func: Any, given: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the factors of a product of matrices with nothing added, or None."""
    if func in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
        return given["self"], given["mat2"]
    return None


def _in_halves(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a product as the sum of two that are rounded first, as of a split dimension."""
    half = a.shape[-1] // 2
    return a[..., :half] @ b[..., :half, :] + a[..., half:] @ b[..., half:, :]


def _one_by_one(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a product whose sums are rounded to float16 after each four terms."""
    found = torch.zeros(*a.shape[:-1], b.shape[-1], dtype=a.dtype)
    for i in range(0, a.shape[-1], 4):
        found = found + a[..., i : i + 4] @ b[..., i : i + 4, :]
    return found


def call(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run a kernel of the device on CPU tensors."""
    if convolves(func):
        narrow = _does("cudnn.allow_tf32")
        return _rounded(func, args, kwargs) if narrow else func(*args, **kwargs)
    if not multiplies(func):
        return func(*args, **kwargs)
    given = bound(func, args, kwargs)
    both = _matrices(func, given)
    if both is not None and both[0].dtype is both[1].dtype:
        a, b = both
        if a.dtype is torch.float16 and _does("matmul.allow_fp16_accumulation"):
            return _one_by_one(a, b)
        name = {torch.float16: "fp16", torch.bfloat16: "bf16"}.get(a.dtype)
        if name and _does(f"matmul.allow_{name}_reduced_precision_reduction"):
            return _in_halves(a, b)
    return _rounded(func, args, kwargs) if _does("matmul.allow_tf32") else func(*args, **kwargs)


install(DEVICE, call)
