"""PyTorch eager, on every device type that this torch can run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from amp_fuzz.backends import vendor
from amp_fuzz.backends.base import Availability, Backend
from amp_fuzz.backends.determinism import Kernels, prepare_cuda
from amp_fuzz.backends.numerics import numerics
from amp_fuzz.backends.reference import ReferenceRuntime, reference_on_cpu
from amp_fuzz.backends.reproducing import TorchRepros
from amp_fuzz.backends.torch_base import TorchBackend
from amp_fuzz.policies.tables import load_table

__all__ = ["EagerBackend", "backends", "has_device"]


@dataclass(frozen=True, slots=True)
class EagerBackend(TorchRepros, TorchBackend):
    """``torch.autocast(device)`` on real tensors of that device."""

    device: str

    @property
    def name(self) -> str:
        """``eager-cpu``, ``eager-cuda``, ..."""
        return f"eager-{self.device}"

    def availability(self) -> Availability:
        """Return whether torch has the device here."""
        if has_device(self.device):
            if self.device == "cuda":
                prepare_cuda()
            return TorchBackend.availability(self)
        return Availability("missing", f"no {self.device} device is visible to torch here")

    @property
    def mixes(self) -> bool:
        """Whether programs may have CPU tensors beside the device's."""
        return self.device != "cpu"

    def kernels(self) -> Kernels:
        """Return the documented kernels; none of the CPU, where none has been seen to vary."""
        return numerics(self.device).kernels

    def shadows(self) -> ReferenceRuntime:
        """Return the reference on CPU tensors."""
        if self.device == "cpu":
            return self.reference()
        return reference_on_cpu(self.device, load_table(self.device), numerics(self.device))

    def watching(self, watched: Callable[[Any], Any]) -> Backend:
        """Return the backend with another autocast, built from its own."""
        return replace(self, watched=watched)


def has_device(device: str) -> bool:
    """Return whether torch has the CPU, or a device of its own, here."""
    if device == "cpu":
        return True
    module = getattr(torch, device, None)
    if device == "mps":
        module = getattr(torch.backends, "mps", None)
    return module is not None and bool(module.is_available())


def backends() -> list[Backend]:
    """Return one backend for each device type that has a policy table and real kernels.

    The user's own device is among them, if the options name one.
    """
    own = [EagerBackend(device) for device in ("cpu", "cuda", "xpu", "mps")]
    return [*own, *vendor.named()]
