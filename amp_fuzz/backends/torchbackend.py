"""What the backends of torch itself have in common: its names, its state, its kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.checkpoint

from amp_fuzz import harness
from amp_fuzz.backends.base import Availability, Backend
from amp_fuzz.backends.reference import ReferenceRuntime, reference_runtime
from amp_fuzz.backends.torchstate import reset_state, torch_state
from amp_fuzz.case import Case
from amp_fuzz.harness import Observation, Runtime

__all__ = ["TorchBackend"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchBackend:
    """A backend that says every op, takes every case as it is and runs it in this process."""

    device: str = "cpu"
    trains: bool = True
    values: bool = True
    exact: bool = True

    def availability(self) -> Availability:
        """Say that torch is here."""
        return Availability("ready", f"torch {torch.__version__}")

    def supports(self, op: str, form: str) -> bool:
        """Return that every call can be made."""
        return True

    def fit(self, case: Case) -> Case:
        """Return the case as it is."""
        return case

    def run(self, cases: Sequence[Case]) -> list[Observation]:
        """Run cases one by one."""
        return [self.observe(case) for case in cases]

    def observe(self, case: Case) -> Observation:
        """Run one case."""
        return harness.run(case, self.runtime())

    def runtime(self, **more: Any) -> Runtime:
        """Return torch's implementation of autocast on the device, and what else a case needs."""
        names: dict[str, Any] = {
            "autocast": torch.autocast,
            "checkpoint": torch.utils.checkpoint.checkpoint,
            "custom_fwd": torch.amp.custom_fwd,
            "custom_bwd": torch.amp.custom_bwd,
            "state": lambda: torch_state(self.device),
            "reset": lambda: reset_state(self.device),
        }
        return Runtime(device=self.device, **{**names, **more})

    def ladder(self) -> Sequence[Backend]:
        """Return nothing: there are no stages."""
        return ()

    def reference(self) -> ReferenceRuntime:
        """Return the reference on the same device."""
        return reference_runtime(self.device)
