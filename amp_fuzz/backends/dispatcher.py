"""List the autocast kernels of torch's dispatcher for a device, and which are reachable.

This asks torch what it has registered. Coverage is measured against it. It knows no policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch

from amp_fuzz.catalogue.unreachable import UNREACHABLE

__all__ = ["Kernels", "has_autocast", "in_python", "kernels"]


@dataclass(frozen=True, slots=True)
class Kernels:
    """The autocast kernels of a device: the reachable ones, and the others with the reason."""

    reachable: tuple[str, ...]
    unreachable: Mapping[str, str]


def has_autocast(device: str) -> bool:
    """Return whether this torch has autocast for a device type; it need not know the name."""
    try:
        return torch.amp.is_autocast_available(device)
    except RuntimeError:  # "Invalid device string"
        return False


@lru_cache(maxsize=16)
def kernels(device: str) -> Kernels:
    """Return torch's kernels for a device type, by overload name without ``aten::``.

    Ops of other libraries may also have autocast kernels, once they are imported.
    """
    key = _key(device)
    if not has_autocast(device):  # maia has no key before torch 2.8
        return Kernels((), {})
    listed = sorted(
        name.removeprefix("aten::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::") and torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
    )
    why = {n: UNREACHABLE[n] for n in listed if n in UNREACHABLE}
    return Kernels(tuple(n for n in listed if n not in why), why)


def in_python(device: str) -> bool:
    """Return whether a device's autocast kernels are written in Python.

    Then they are not torch's own, which a device can take over only in C++.
    """
    key = _key(device)
    lines = (
        line
        for name in kernels(device).reachable[:1]
        for line in torch._C._dispatch_dump_table(f"aten::{name}").splitlines()
    )
    return any(line.startswith(f"{key}: ") and ".py:" in line for line in lines)


def _key(device: str) -> str:
    outside = device == torch._C._get_privateuse1_backend_name()
    return "AutocastPrivateUse1" if outside else f"Autocast{device.upper()}"
