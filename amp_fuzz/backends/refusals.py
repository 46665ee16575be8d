"""Checks of real kernels that fake kernels lack.

A fake tensor has a dtype and a shape, but its kernels skip some checks of dtypes, numbers and
shapes. `refused.toml` lists the calls that they accept wrongly, and `Refusing` raises there what a
real kernel raises.
"""

from __future__ import annotations

import threading
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import msgspec
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from amp_fuzz.reference.dispatch import is_composite

__all__ = ["ORIGIN", "Refusal", "Refusing", "listed", "refusal"]

ORIGIN = "real kernels check this, fake ones do not"
"""How the error of a real kernel ends where a fake one accepts the call."""

_NAMES = {  # in messages, and in C++
    torch.bfloat16: ("BFloat16", "c10::BFloat16"),
    torch.float16: ("Half", "c10::Half"),
    torch.float32: ("Float", "float"),
    torch.float64: ("Double", "double"),
}


class Refusal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One record of `refused.toml`, which says what its fields mean."""

    ops: tuple[str, ...]
    says: str
    differ: tuple[str, ...] = ()
    overflows: tuple[str, ...] = ()
    broadcasts: tuple[str, ...] = ()
    first: tuple[str, ...] = ()

    def of(self, given: Mapping[str, Any]) -> str:
        """Return the error of a call with these arguments, by name, or ""."""
        tensors = {n: x for n, x in given.items() if isinstance(x, torch.Tensor)}
        named = [x for n, x in tensors.items() if n in self.differ or n in self.broadcasts]
        lead = next(iter(named or tensors.values()), None)
        if lead is not None and lead.dim() and lead.device.type != "cpu":  # a number has any dtype
            named = [x for x in named if x.dim() or x.device.type != "cpu"]
        if lead is not None and not lead.numel():  # a kernel that has nothing to do checks less
            return ""
        dtype: Any = given.get("dtype") or (None if lead is None else lead.dtype)
        if self.first and str(dtype).removeprefix("torch.") not in self.first:
            return ""
        shapes = [list(x.shape) for x in named]
        if self.broadcasts:
            shapes.append(list(torch.broadcast_shapes(*shapes)))
            refused = shapes[0] != shapes[-1]
        elif self.differ:
            refused = len({x.dtype for x in named} & _NAMES.keys()) > 1
        else:
            refused = not self.overflows or any(
                _overflows(given.get(name), dtype) for name in self.overflows
            )
        if not refused:
            return ""
        words: dict[str, Any] = {"shapes": shapes}
        for name, of in ({n: x.dtype for n, x in tensors.items()} | {"dtype": dtype}).items():
            words[name], words[f"{name}_c"] = _NAMES.get(of, ("", ""))
        return self.says.format(**words)


def _overflows(value: object, dtype: torch.dtype | None) -> bool:
    """Return whether a number is beyond a floating dtype; infinities and NaN are in it."""
    if dtype not in _NAMES or not isinstance(value, int | float):
        return False
    return torch.finfo(dtype).max < abs(value) < float("inf")


@cache
def listed() -> tuple[Refusal, ...]:
    """Return all records."""
    text = files(__package__).joinpath("refused.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text)["refused"], tuple[Refusal, ...])


@cache
def _about(func: Any) -> tuple[tuple[Refusal, ...], tuple[str, ...], bool]:
    """Return the records about an overload, its arguments' names, and whether torch has a kernel.

    A custom op counts as the ops of its body.
    """
    if not isinstance(func, torch._ops.OpOverload) or func.namespace != "aten":
        return (), (), False
    op = func.overloadpacket.__name__
    known = {op, op.removesuffix("_"), func.__name__}
    found = tuple(one for one in listed() if known.intersection(one.ops))
    names = tuple(argument.name for argument in func._schema.arguments)
    return found, names, not is_composite(func)


def refusal(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return the error with which a real kernel refuses a call that a fake one accepts, or ""."""
    records, names, _ = _about(func)
    if not records:
        return ""
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return next(filter(None, (one.of(given) for one in records)), "")


class _Inside(threading.local):
    depth = 0


_inside = _Inside()


class Refusing(FakeTensorMode):
    """A fake mode that raises what a real kernel raises where a fake one skips its check.

    Calls inside a fake kernel are not checked: a real kernel does not make them.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        if not _inside.depth and (said := refusal(func, args, kwargs)):
            raise RuntimeError(f"{said} ({ORIGIN})")
        kernel = _about(func)[2]
        _inside.depth += kernel
        try:
            return FakeTensorMode.__torch_dispatch__(self, func, types, args, kwargs)
        finally:
            _inside.depth -= kernel
