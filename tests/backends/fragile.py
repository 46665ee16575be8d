"""A device that fails as accelerators do: ``--device=fragile --plugins=tests.backends.fragile``.

It is a device on PrivateUse1 with the kernels of the CPU, and these failures:

- ``sin`` of three elements fails an assertion. That is raised by the next call of a kernel, or when
  the device is synchronised; if CUDA_LAUNCH_BLOCKING is 1, by ``sin`` itself. Every later call of
  the process raises it again.
- It has 16 GiB of memory, of which each element takes some MiB, and keeps what it allocated until
  it is told to empty its cache. A process may have a share.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from amp_fuzz.backends import privateuse1
from amp_fuzz.backends.privateuse1 import module, tensor

TOTAL = 16 * 2**30
_BYTE = 2**20  # that a byte of the CPU stands for
_kernel = tensor.call
failed = False
share, kept = 1.0, 0


class Module(module.DeviceModule):
    """The functions that torch and amp-fuzz ask of it."""

    def synchronize(self, device: object = None) -> None:
        """Raise the error of a kernel that has failed."""
        if failed:
            raise RuntimeError("fragile error: assertion failed, perhaps in an earlier call")

    def mem_get_info(self, device: object = None) -> tuple[int, int]:
        """Return the free memory and all of it."""
        return TOTAL - kept, TOTAL

    def set_per_process_memory_fraction(self, fraction: float, device: object = None) -> None:
        """Limit this process."""
        global share
        share = fraction

    def empty_cache(self) -> None:
        """Give back what is kept."""
        global kept
        kept = 0


def call(func: Any, args: Any, kwargs: Any) -> Any:
    """Run a kernel."""
    global failed, kept
    _module.synchronize()
    out = _kernel(func, args, kwargs)
    if isinstance(out, torch.Tensor):
        kept += out.numel() * out.element_size() * _BYTE
        if kept > share * TOTAL:
            limit = share * TOTAL / 2**30
            raise torch.OutOfMemoryError(f"fragile out of memory: its limit is {limit:.1f} GiB")
    if func is torch.ops.aten.sin.default and args[0].numel() == 3:
        failed = True
        if os.environ.get("CUDA_LAUNCH_BLOCKING") == "1":
            _module.synchronize()
    return out


module.DeviceModule = Module  # type: ignore[misc]
tensor.call = call
privateuse1.install("cuda", device="fragile")
_module: Any = torch.get_device_module("fragile")
