"""An accelerator as a process sees it: its late errors, its memory.

Kernels of an accelerator run later than they are called. The error of one is raised at some later
call, or when the device is synchronised. With CUDA, every later call of the process raises too. So
a case ends with a synchronisation, and after an error the device is asked whether it still works.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

__all__ = [
    "BLOCKING",
    "DeviceFailure",
    "bounded",
    "check",
    "checked",
    "computes",
    "emptied",
    "fetched",
    "or_ends",
]

BLOCKING = {"CUDA_LAUNCH_BLOCKING": "1", "AMD_SERIALIZE_KERNEL": "3"}
"""Environment of a process in which a call of a kernel returns when the kernel has ended."""


class DeviceFailure(RuntimeError):
    """A case failed, and not because of autocast. This is neither agreement nor divergence.

    kind: ``lost`` if the device no longer works in this process; ``memory`` if it has too little.
    frames: where the error was raised, as `faulthandler` writes it: the innermost call first. Only
    in a process with `BLOCKING` this is where it happened.
    """

    def __init__(self, kind: Literal["lost", "memory"], message: str, frames: str = "") -> None:
        super().__init__(kind, message, frames)
        self.kind, self.message, self.frames = kind, message, frames

    def __str__(self) -> str:
        return self.message


def computes(device: str) -> bool:
    """Return whether tensors of a device type are on this machine's accelerator."""
    if device == "cpu":
        return False
    here = torch.accelerator.current_accelerator(check_available=True)
    return here is not None and here.type == device


def fetched(device: str, values: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
    """Synchronise the device and return values on the CPU. Raises the error of any kernel."""
    _call(device, "synchronize")
    return {n: v if v is None else v.cpu() for n, v in values.items()}


@contextmanager
def checked(device: str) -> Iterator[None]:
    """Raise `DeviceFailure` for an error in the block that means one."""
    try:
        yield
    except Exception as error:
        check(device, error)
        raise


def check(device: str, error: BaseException) -> None:
    """Raise `DeviceFailure` if an error means that memory ran out, or that the device is lost."""
    said = f"{type(error).__name__}: {error}".partition("\n")[0]
    if isinstance(error, torch.OutOfMemoryError) or _MEMORY.search(said):
        emptied(device)
        raise DeviceFailure("memory", f"{device} is out of memory: {said}") from error
    frames = traceback.extract_tb(error.__traceback__)[::-1]
    lines = [f'  File "{f.filename}", line {f.lineno} in {f.name}' for f in frames]
    try:
        torch.ones(2, device=device).add_(1).cpu()
    except Exception:
        what = f"{device} no longer works: {said}"
        raise DeviceFailure("lost", what, "\n".join(lines)) from error


# What devices say that have no `torch.OutOfMemoryError` of their own.
_MEMORY = re.compile(r"\bout of memory\b|\bOOM\b|not enough memory|RESOURCE_EXHAUSTED", re.I)


@contextmanager
def or_ends() -> Iterator[None]:
    """End this process, which its parent replaces, if its device is lost in the block."""
    try:
        yield
    except DeviceFailure as failure:
        if failure.kind != "lost":
            raise
        print(f"{failure}\n{failure.frames}", file=sys.stderr, flush=True)  # noqa: T201
        os._exit(1)  # an ordinary end would wait for the device


def bounded(device: str, gib: float) -> None:
    """Limit the memory of a device that this process may hold, if the device can do this."""
    if not computes(device):
        return
    total = _call(device, "mem_get_info", default=(0, 0))[1]
    if total:
        _call(device, "set_per_process_memory_fraction", min(gib * 2**30 / total, 1.0))


def emptied(device: str) -> None:
    """Return the memory that the device's allocator keeps, so that other processes have it."""
    if computes(device):
        _call(device, "empty_cache")


def _call(device: str, name: str, *args: Any, default: Any = None) -> Any:
    """Call a function of the device's module. Returns the default if the module lacks it."""
    function = getattr(torch.get_device_module(device), name, None)
    return default if function is None else function(*args)
