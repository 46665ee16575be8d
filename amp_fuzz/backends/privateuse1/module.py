"""Register the device: its name, its module ``torch.<name>``, its allocators and its autocast."""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.utils import backend_registration

from amp_fuzz.backends.devices import check_ops
from amp_fuzz.backends.privateuse1 import tensor
from amp_fuzz.backends.privateuse1.autocast import Autocast
from amp_fuzz.policies.tables import DEVICES, PolicyTable, load_table, load_table_file

__all__ = ["DEVICE", "DeviceError", "DeviceModule", "install", "supported"]

DEVICE = "ampdev"
_FREE = "privateuseone"  # the key's name until a device takes it


class DeviceError(RuntimeError):
    """The device cannot be installed here. The message says why."""


class DeviceModule:
    """The device module ``torch.<name of the device>`` with the functions that torch calls."""

    def __init__(self, dtypes: list[torch.dtype]) -> None:
        self._dtypes = dtypes

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """Return the dtypes that ``torch.autocast`` supports; with another it disables itself."""
        return self._dtypes

    def is_available(self) -> bool:
        """Return that the device is here."""
        return True

    def is_initialized(self) -> bool:
        """Return that it needs no initialisation."""
        return True

    def synchronize(self, device: object = None) -> None:
        """Do nothing: a kernel has ended when its call returns."""

    def device_count(self) -> int:
        """Return the number of devices."""
        return 1

    def current_device(self) -> int:
        """Return the number of the current device."""
        return 0

    def manual_seed_all(self, seed: int) -> None:
        """Do nothing: random numbers come from the CPU, which torch has seeded."""

    def _is_in_bad_fork(self) -> bool:
        return False


def supported() -> bool:
    """Return whether this torch supports a device in Python."""
    setup = hasattr(backend_registration, "_setup_privateuseone_for_python_backend")
    return setup and hasattr(torch._C, "_acc")


_installed: tuple[str, str] | None = None
# Dropping a library would unregister its kernels.
_kept: list[object] = []


def install(
    policies: str | Path = "cuda",
    *,
    device: str = DEVICE,
    autocast: Callable[[str, PolicyTable], Autocast] = Autocast,
) -> str:
    """Make PrivateUse1 a device of this process and return its name, for ``device=``.

    policies: a device type whose policy table the device follows (``cpu``, ``cuda``, ...), or the
    path of a TOML file with a table. device: its name. autocast: makes its autocast: a subclass of
    `Autocast`.

    A process can do this only once, and not undo it; installing the same device again does nothing.
    Raises `DeviceError` if another device has the key, or this torch is too old, and
    `PolicyTableError` if the table cannot be read or names an op that torch does not have.
    """
    global _installed
    wanted = (device, str(policies))
    if _installed == wanted:
        return device
    if not supported():
        raise DeviceError(f"torch {torch.__version__} cannot have a device in Python: use 2.10")
    taken = torch._C._get_privateuse1_backend_name()
    if taken != _FREE:
        raise DeviceError(
            f"PrivateUse1 is the device {taken!r} in this process already"
            + (f", with the policies of {_installed[1]}" if _installed else "")
            + ": a process can rename it only once, so use another process"
        )
    if policies in DEVICES:
        table = load_table(str(policies))
    else:
        table = load_table_file(policies)
        check_ops(table, str(policies))
    dtypes = [getattr(torch, name) for name in table.supported_dtypes]
    # The thread of a backward pass takes the interpreter's lock once more after the pass. An
    # interpreter that has ended by then ends the thread inside C++: std::terminate.
    atexit.register(time.sleep, 0.1)
    backend_registration._setup_privateuseone_for_python_backend(
        device, backend_module=DeviceModule(dtypes)
    )
    library = torch.library.Library("aten", "IMPL")
    library.impl("empty.memory_format", tensor.empty, "PrivateUse1")
    library.impl("empty_strided", tensor.empty_strided, "PrivateUse1")
    kernels = autocast(device, table)
    kernels.register()
    _kept.extend((library, kernels))
    _installed = wanted
    return device
