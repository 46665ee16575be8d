"""Faults of a device that show only where a program has CPU tensors beside those of the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from amp_fuzz.backends import privateuse1
from amp_fuzz.backends.privateuse1 import Autocast, DeviceTensor, tensor
from tests.faults.device import DeviceFault, Faulty
from tests.faults.fault import patched

__all__ = ["FAULTS", "FaultyOfTwo"]


class _OthersCast(Autocast):
    def eligible(self, value: object) -> bool:
        here = isinstance(value, torch.Tensor) and value.device.type == "cpu"
        floats = here and value.is_floating_point() and value.dtype is not torch.float64
        return super().eligible(value) or floats


class _OthersPromote(Autocast):
    def promoted(self, tensors: Iterable[torch.Tensor]) -> torch.dtype:
        wide = (t.dtype for t in tensors if t.is_floating_point() and t.dtype is not torch.float64)
        dtypes = set(wide) or {self.low()}
        return dtypes.pop() if len(dtypes) == 1 else torch.float32


_Context: Any = torch.amp.autocast_mode.autocast
_enter, _exit = _Context.__enter__, _Context.__exit__


def _entered_for_both(self: Any) -> Any:
    self.others = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    entered = _enter(self)
    if self.device == privateuse1.DEVICE and self._enabled:
        torch.set_autocast_enabled("cpu", True)
        torch.set_autocast_dtype("cpu", self.fast_dtype)
    return entered


def _left_for_both(self: Any, *error: Any) -> Any:
    left = _exit(self, *error)
    if self.device == privateuse1.DEVICE:
        torch.set_autocast_enabled("cpu", self.others[0])
        torch.set_autocast_dtype("cpu", self.others[1])
    return left


def _entered_for_one(self: Any) -> Any:
    entered = _enter(self)
    if self.device == "cpu" and torch.is_autocast_enabled(privateuse1.DEVICE):
        torch.set_autocast_enabled("cpu", False)
    return entered


_call = tensor.call


def _on_the_cpu(func: Any, args: Any, kwargs: Any) -> Any:
    made = _call(func, args, kwargs)
    both = any(type(a) is torch.Tensor for a in args) and isinstance(made, DeviceTensor)
    return made.held if both and not any(made is a for a in args) else made


def _around(**methods: Callable[..., Any]) -> Any:
    return lambda: patched(_Context, **methods)


FAULTS: Mapping[str, DeviceFault] = {
    fault.name: fault
    for fault in (
        DeviceFault("cpu-operand-cast", "the device's kernel casts CPU tensors too", _OthersCast),
        DeviceFault(
            "cpu-cast-with-device",
            "the device's context turns the CPU's autocast on",
            around=_around(__enter__=_entered_for_both, __exit__=_left_for_both),
        ),
        DeviceFault(
            "cpu-context-ignored",
            "the CPU's context does nothing inside the device's",
            around=_around(__enter__=_entered_for_one),
        ),
        DeviceFault("cpu-operand-promotes", "promotion asks CPU tensors too", _OthersPromote),
        DeviceFault(
            "result-on-the-cpu",
            "a call with tensors of both devices leaves its result on the CPU",
            around=lambda: patched(tensor, call=_on_the_cpu),
        ),
    )
}


class FaultyOfTwo(Faulty):
    """A device with one of these faults."""

    faults = FAULTS
