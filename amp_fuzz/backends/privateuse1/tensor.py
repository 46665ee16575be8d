"""Tensors of the device: memory and kernels are the CPU's, everything else is the device's.

A tensor is a wrapper subclass that claims to be on the device and holds a CPU tensor. It carries
the same dispatch keys as tensors of a C++ device (autograd, autocast, ...), so everything in torch
above the kernels treats it as one. The dispatcher calls `__torch_dispatch__` instead of a device
kernel; the op then runs on the held tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import cache, reduce
from typing import Any

import torch

__all__ = ["DeviceTensor", "empty", "empty_strided", "placed"]


class DeviceTensor(torch.Tensor):
    """A tensor of the device. held: the CPU tensor that has its elements."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor, device: torch.device) -> DeviceTensor:
        """Return a tensor of the device over the memory of a CPU tensor."""
        made: DeviceTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            layout=held.layout,
            device=device,
        )
        made.held = held
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"DeviceTensor({self.held}, device='{self.device}')"

    def tolist(self) -> Any:
        """Return the elements as Python numbers, as `torch.Tensor.tolist` does."""
        return self.held.tolist()

    # Plain functions of torch see a tensor of the device, not a subclass with its own functions.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a kernel of the device: the CPU's, on the memory of its tensors."""
        try:
            return call(func, args, kwargs or {})
        except Exception as error:
            if torch._C._current_graph_task_id() == _NO_BACKWARD:
                raise
            return _failed(func, error)


_NO_BACKWARD = -1


class _Failure:
    """The result of a kernel that failed in a backward pass: not a tensor, so C++ raises.

    A Python error would end the process there, because torch 2.13 asks a Python device guard for
    its type while the error propagates (docs/findings/python-guard-abort.md). For a result that it
    cannot cast, C++ raises a RuntimeError with the text of that result.
    """

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __str__(self) -> str:
        return f"{type(self.error).__name__}: {self.error}"


def _failed(func: Any, error: Exception) -> Any:
    """Return failures in the form of an op's results, which C++ checks before it casts them.

    For a list that it cannot cast, it reports only the type, not the contents.
    """
    failure = _Failure(error)
    made: list[Any] = []
    for returned in func._schema.returns:
        many = isinstance(returned.type, torch.ListType)
        made.append(type(str(failure), (list,), {})([failure]) if many else failure)
    return made[0] if len(made) == 1 else tuple(made)


_CPU = torch.device("cpu")


def call(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an op on the held tensors, and return its results as tensors of the device."""
    if (key := _made_of_others(func)) is not None:
        return _body(func, key, args, kwargs)
    device = _device(args) or _device(tuple(kwargs.values()))
    asked = kwargs.get("device")
    if asked is not None:  # to another device, or back
        asked = torch.device(asked)
        device = None if asked == _CPU else _placed(asked)
        kwargs = {**kwargs, "device": _CPU}
    out = kernel(func, _held(args), {name: _held(value) for name, value in kwargs.items()})
    written = _written(func)
    if not written:
        if device is None:
            return out
        # A view of a tensor from outside inference mode is no inference tensor either.
        with torch.inference_mode(False) if _is_ordinary_view(func, args) else nullcontext():
            return _wrapped(out, device)
    given = {**dict(zip(_names(func), args, strict=False)), **kwargs}
    for name in written:
        _follow(given[name])
    own = [given[name] if name else None for name in _returned(func)]
    if not own:
        return None
    if len(own) == 1:
        return own[0] if own[0] is not None else _wrapped(out, device)
    return tuple(
        _wrapped(o, device) if o_own is None else o_own for o, o_own in zip(out, own, strict=True)
    )


def kernel(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run a kernel of the device on the held tensors: the CPU's.

    A device with kernels of its own replaces this function.
    """
    return func(*args, **kwargs)


def _body(func: Any, key: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call an op's body as a C++ device would: with tensors of the device.

    It runs below autograd but under the surrounding autocast, unless autocast has cast for the op
    itself. `__torch_dispatch__` is called without all this.
    """
    with ExitStack() as stack:
        stack.enter_context(getattr(torch._C, "_RestorePythonTLSSnapshot")())  # noqa: B009
        stack.enter_context(torch._C._AutoDispatchBelowAutograd())
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _KEY):
            stack.enter_context(torch._C._ExcludeDispatchKeyGuard(_AUTOCAST))
        out = func._op_dk(key, *args, **kwargs)
    return _fresh(out, args)  # a view created in the body has its own history


def _fresh(out: Any, args: Sequence[Any]) -> Any:
    if isinstance(out, (list, tuple)):
        return type(out)(_fresh(o, args) for o in out)
    if not isinstance(out, DeviceTensor) or any(out is a for a in args):
        return out
    with torch.inference_mode(out.is_inference()):
        return DeviceTensor(out.held, out.device)


_KEY = "AutocastPrivateUse1"
# The CPU's stays on: it is for CPU tensors, whatever happened to those of the device.
_AUTOCAST = reduce(
    torch._C.DispatchKeySet.__or__,
    (
        torch._C.DispatchKeySet(key)
        for name, key in torch._C.DispatchKey.__members__.items()
        if name.startswith("Autocast") and name != "AutocastCPU"
    ),
)


def _device(values: Sequence[Any]) -> torch.device | None:
    for value in values:
        if isinstance(value, DeviceTensor):
            return value.device
        if isinstance(value, (list, tuple)) and (found := _device(value)) is not None:
            return found
    return None


def _held(value: Any) -> Any:
    if isinstance(value, DeviceTensor):
        return value.held
    if isinstance(value, (list, tuple)):
        return type(value)(_held(v) for v in value)
    return value


def _wrapped(value: Any, device: torch.device | None) -> Any:
    if isinstance(value, torch.Tensor) and device is not None:
        return DeviceTensor(value, device)
    if isinstance(value, (list, tuple)):
        return type(value)(_wrapped(v, device) for v in value)
    return value


def _follow(value: Any) -> None:
    """Update the shape of a written tensor from its memory: an ``out=`` may grow."""
    for tensor in value if isinstance(value, (list, tuple)) else (value,):
        if isinstance(tensor, DeviceTensor):
            held = tensor.held
            if tensor.shape != held.shape or tensor.stride() != held.stride():
                fresh = DeviceTensor(held, tensor.device)
                tensor.data = fresh


def _placed(device: torch.device | None) -> torch.device:
    """Return the device with its number: a tensor on ``ampdev`` reports ``ampdev:0``."""
    name = torch._C._get_privateuse1_backend_name() if device is None else device.type
    return torch.device(name, (device.index if device else None) or 0)


@cache
def _made_of_others(func: Any) -> Any | None:
    """Return the key of an op's composite kernel, or None.

    Composite ops arrive here only below autograd (``inference_mode``, a custom op's body); a user's
    op has one body for all devices.
    """
    implicit, explicit = "CompositeImplicitAutograd", "CompositeExplicitAutograd"
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), implicit):
        return getattr(torch._C.DispatchKey, implicit)
    own = func.namespace in ("aten", "prims", "quantized")
    if not own and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), explicit):
        return getattr(torch._C.DispatchKey, explicit)
    return None


@cache
def _names(func: Any) -> tuple[str, ...]:
    return tuple(a.name for a in func._schema.arguments)


def _is_ordinary_view(func: Any, args: Sequence[Any]) -> bool:
    return (
        torch.is_inference_mode_enabled()
        and _is_view(func)
        and isinstance(args[0], torch.Tensor)
        and not args[0].is_inference()
    )


@cache
def _is_view(func: Any) -> bool:
    returned = func._schema.returns
    return any(r.alias_info is not None and not r.alias_info.is_write for r in returned)


@cache
def _written(func: Any) -> tuple[str, ...]:
    """Return the arguments that an op writes."""
    return tuple(
        a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write
    )


@cache
def _returned(func: Any) -> tuple[str, ...]:
    """Return for each result the argument that it aliases, or ""."""
    found = []
    for result in func._schema.returns:
        alias = result.alias_info
        same = [
            a.name
            for a in func._schema.arguments
            if alias is not None
            and alias.is_write
            and a.alias_info is not None
            and a.alias_info.before_set == alias.before_set
        ]
        found.append(same[0] if same else "")
    return tuple(found)


def placed(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the device in the memory of a CPU tensor, with any strides.

    ``tensor.to(device)`` makes a copy instead, which is dense and starts at offset 0.
    """
    return DeviceTensor(tensor, _placed(None))


def empty(
    size: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    """Allocate memory: the kernel of ``aten::empty.memory_format``."""
    made = torch.empty(size, dtype=dtype, memory_format=memory_format or torch.contiguous_format)
    return DeviceTensor(made, _placed(device))


def empty_strided(
    size: Sequence[int],
    stride: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> torch.Tensor:
    """Allocate memory: the kernel of ``aten::empty_strided``."""
    made = torch.empty_strided(size, stride, dtype=dtype)
    return DeviceTensor(made, _placed(device))
