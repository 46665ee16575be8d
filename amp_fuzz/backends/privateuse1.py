"""A device of the dispatch key PrivateUse1, in Python, with the policies of any other device.

Its tensors lie in CPU memory and its kernels are the CPU's, so it is the autocast of CUDA, say,
with the numerics of the CPU: forward and backward on a machine without a GPU. The device itself is
`amp_fuzz.privateuse1`. The reference runs the same kernels on plain CPU tensors, which it takes for
those of the device: it shares neither the device's tensors nor its casts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

import torch

from amp_fuzz import harness, privateuse1, reference
from amp_fuzz.backends.apart import Apart
from amp_fuzz.backends.base import Availability, Backend
from amp_fuzz.backends.reference import ReferenceRuntime, reference_runtime
from amp_fuzz.backends.torchbackend import TorchBackend
from amp_fuzz.case import Case
from amp_fuzz.harness import Observation
from amp_fuzz.reference.tables import DEVICES, PolicyTable, load_table

__all__ = ["PrivateUse1Backend", "backends", "observing"]

_DEFAULT = "cuda"


@dataclass(frozen=True, slots=True)
class PrivateUse1Backend(TorchBackend):
    """``torch.autocast`` on a PrivateUse1 device that follows the policy table of `device`.

    process: where the device is.
    """

    device: str
    process: Apart = field(compare=False)

    @property
    def name(self) -> str:
        """``privateuse1``, which follows CUDA's table, ``privateuse1[cpu]``, ..."""
        return "privateuse1" if self.device == _DEFAULT else f"privateuse1[{self.device}]"

    def availability(self) -> Availability:
        """Say whether this torch can have a device in Python."""
        if not privateuse1.supported():
            return Availability("missing", "needs torch 2.10: pip install 'torch>=2.10'")
        detail = f"torch {torch.__version__}, the policies of {self.device} with CPU kernels"
        return Availability("ready", detail)

    def run(self, cases: Sequence[Case]) -> list[Observation]:
        """Run cases where the device is."""
        return self.process.run(cases)

    def reference(self) -> ReferenceRuntime:
        """Return the reference on CPU tensors that it takes for the device's."""
        runtime = reference_runtime(privateuse1.DEVICE, scope=self.scope).runtime
        return ReferenceRuntime(replace(runtime, place=lambda tensor: tensor))

    def scope(self) -> AbstractContextManager[None]:
        """Return the context in which the reference takes CPU tensors for the device's."""
        return reference.as_device(privateuse1.DEVICE, self.table(), tensors="cpu")

    def table(self) -> PolicyTable:
        """Return the policies; the default dtype of a PrivateUse1 device is always float16."""
        return replace(load_table(self.device), default_dtype="float16")


def observing(policies: str) -> Callable[[Case], Observation]:
    """Make PrivateUse1 a device of this process, and return what runs a case on it."""
    device = privateuse1.install(policies)
    place = torch.device(device, 0)
    runtime = TorchBackend(device=device).runtime(
        place=lambda tensor: privateuse1.DeviceTensor(tensor, place)
    )
    return lambda case: harness.run(case, runtime)


def backends() -> list[Backend]:
    """Return one backend for each policy table, CUDA's first."""
    tables = (_DEFAULT, *(name for name in DEVICES if name != _DEFAULT))
    return [PrivateUse1Backend(name, Apart(f"{__name__}:observing", name)) for name in tables]
