"""PyTorch eager, on every device type that this torch can run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.utils.checkpoint

from amp_fuzz import harness
from amp_fuzz.backends.base import Availability, Backend
from amp_fuzz.backends.reference import ReferenceRuntime, reference_runtime
from amp_fuzz.backends.torchstate import reset_state, torch_state
from amp_fuzz.case import Case
from amp_fuzz.harness import Observation, Runtime

__all__ = ["EagerBackend", "backends"]


@dataclass(frozen=True, slots=True)
class EagerBackend:
    """``torch.autocast(device)`` on real tensors of that device."""

    device: str
    trains: bool = True
    values: bool = True
    exact: bool = True

    @property
    def name(self) -> str:
        """``eager-cpu``, ``eager-cuda``, ..."""
        return f"eager-{self.device}"

    def availability(self) -> Availability:
        """Say whether torch has the device here."""
        if self.device == "cpu" or _is_available(self.device):
            return Availability("ready", f"torch {torch.__version__}")
        return Availability("missing", f"no {self.device} device is visible to torch here")

    def fit(self, case: Case) -> Case:
        """Return the case as it is."""
        return case

    def run(self, cases: Sequence[Case]) -> list[Observation]:
        """Run cases one by one."""
        runtime = Runtime(
            device=self.device,
            autocast=torch.autocast,
            checkpoint=torch.utils.checkpoint.checkpoint,
            custom_fwd=torch.amp.custom_fwd,
            custom_bwd=torch.amp.custom_bwd,
            state=lambda: torch_state(self.device),
            reset=lambda: reset_state(self.device),
        )
        return [harness.run(case, runtime) for case in cases]

    def ladder(self) -> Sequence[Backend]:
        """Return nothing: there are no stages."""
        return ()

    def reference(self) -> ReferenceRuntime:
        """Return the reference on the same device."""
        return reference_runtime(self.device)


def _is_available(device: str) -> bool:
    module = getattr(torch, device, None)
    if device == "mps":
        module = getattr(torch.backends, "mps", None)
    return module is not None and bool(module.is_available())


def backends() -> list[Backend]:
    """Return one backend for each device type that has a policy table and real kernels."""
    return [EagerBackend(device) for device in ("cpu", "cuda", "xpu", "mps")]
