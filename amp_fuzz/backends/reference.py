"""The reference as a runtime: what every backend is compared with."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from amp_fuzz import harness, reference
from amp_fuzz.case import Case
from amp_fuzz.harness import Observation, Runtime
from amp_fuzz.reference.autocast import reset, state

__all__ = ["ReferenceRuntime", "reference_runtime"]


@dataclass(frozen=True, slots=True)
class ReferenceRuntime:
    """Runs cases under `amp_fuzz.reference.autocast` and logs the kernels that they reach."""

    runtime: Runtime

    def run(self, case: Case) -> Observation:
        """Run one case."""
        with reference.log_kernels() as kernels:
            seen = harness.run(case, self.runtime)
        seen.kernels = kernels
        return seen


def reference_runtime(
    device: str,
    *,
    scope: Callable[[], AbstractContextManager[Any]] = nullcontext,
    fake: bool = False,
) -> ReferenceRuntime:
    """Return the reference for one device type's tensors."""
    return ReferenceRuntime(
        Runtime(
            device=device,
            autocast=reference.autocast,
            checkpoint=reference.checkpoint(device),
            custom_fwd=reference.custom_fwd,
            custom_bwd=reference.custom_bwd,
            state=lambda: (*state(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
            reset=reset,
            scope=scope,
            fake=fake,
        )
    )
