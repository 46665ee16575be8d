"""Stand-in device guards, so a CPU-only torch can work with fake accelerator tensors.

Autograd and in-place ops need the *device guard* of a tensor's device. A torch built without the
device has none: an in-place op on a fake tensor raises, and a leaf that requires grad aborts the
process. A torch built with the device has a guard, which raises if the machine lacks the device.
libc10 has a guard that does nothing (`NoOpDeviceGuardImpl`, registered for the meta device) and an
exported constructor with which out-of-tree devices register theirs (`DeviceGuardImplRegistrar`).
Here the former is registered through the latter, for devices without a working guard. Forward
passes then work, with weights that require grad. Backward passes still need a device thread of the
autograd engine, and raise.

This is the one place that does so. It checks what it finds before it writes anything, and
`tests/backends/test_guards.py` would notice a change.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import torch

__all__ = ["has_guard", "known", "register_guard", "source", "stand_in"]

# c10/core/DeviceType.h: serialised models rely on these numbers, so they never change.
_TYPES = {"cpu": 0, "cuda": 1, "maia": 8, "xpu": 12, "mps": 13, "meta": 14, "mtia": 19}
_REGISTRY = "_ZN3c104impl26device_guard_impl_registryE"
_REGISTRAR = (
    "_ZN3c104impl24DeviceGuardImplRegistrarC1ENS_10DeviceTypeEPKNS0_24DeviceGuardImplInterfaceE"
)


@lru_cache(maxsize=1)
def _c10() -> tuple[ctypes.CDLL, ctypes.Array[ctypes.c_void_p]] | None:
    """Return libc10 and its registry of guards, or None if they are not as expected."""
    suffix = {"linux": "so", "darwin": "dylib"}.get(sys.platform)
    path = Path(torch.__file__).parent / "lib" / f"libc10.{suffix}"
    if suffix is None or not path.exists():
        return None
    try:
        library = ctypes.CDLL(str(path))
        registry = (ctypes.c_void_p * 20).in_dll(library, _REGISTRY)
        library[_REGISTRAR]
    except (OSError, ValueError, AttributeError):
        return None
    # The CPU and the meta device always have a guard: if these slots are empty, the layout is
    # unknown.
    known = registry[_TYPES["cpu"]] and registry[_TYPES["meta"]]
    return (library, registry) if known else None


def has_guard(device: str) -> bool:
    """Return whether a device type has a guard, real or stand-in."""
    found = _c10()
    return found is not None and bool(found[1][_TYPES[device]])


def register_guard(device: str) -> bool:
    """Give a device type the no-op guard if it has none; return whether it has one now."""
    found = _c10()
    if found is None:
        return False
    library, registry = found
    if not registry[_TYPES[device]]:
        register = library[_REGISTRAR]
        register.argtypes = [ctypes.c_void_p, ctypes.c_int8, ctypes.c_void_p]
        register.restype = None
        this = ctypes.create_string_buffer(16)  # the registrar object itself has no members
        register(this, _TYPES[device], registry[_TYPES["meta"]])
    return bool(registry[_TYPES[device]])


@lru_cache(maxsize=8)
def _is_here(device: str) -> bool:
    """Return whether the machine has a device that torch was built for."""
    here = torch.accelerator.current_accelerator(check_available=True)
    return here is not None and here.type == device


def source(device: str) -> str:
    """Return script source that does the same as `stand_in`, permanently and without checks."""
    numbers = {"number": _TYPES[device], "meta": _TYPES["meta"]}
    return _SOURCE.format(device=device, registry=_REGISTRY, **numbers)


_SOURCE = """\
# Without {device}, torch has no guard for its tensors, or one that raises: lend it that of the meta
# device, which does nothing (c10/core/impl/DeviceGuardImplInterface.h).
c10 = ctypes.CDLL(str(next((Path(torch.__file__).parent / "lib").glob("libc10.*"))))
guards = (ctypes.c_void_p * 20).in_dll(c10, "{registry}")
if torch.accelerator.current_accelerator(check_available=True) is None or not guards[{number}]:
    guards[{number}] = guards[{meta}]
"""


def known() -> bool:
    """Return whether a stand-in can be registered with libc10."""
    return _c10() is not None


@contextmanager
def stand_in(device: str) -> Iterator[None]:
    """Give a device type the no-op guard for a block, if it has no working guard.

    The guard is removed afterwards, because torch assumes that a device with a guard exists (with
    one for maia, ``torch.__config__.show()`` raises).
    """
    found = _c10()
    if found is None or (found[1][_TYPES[device]] and _is_here(device)):
        yield
        return
    registry, number = found[1], _TYPES[device]
    before = registry[number]
    registry[number] = None
    try:
        register_guard(device)
        yield
    finally:
        registry[number] = before
