"""``te-python``: the Python code of Transformer Engine on the CPU.

Its values are those of its own reference quantisers and of `torch._scaled_mm`. It shows the control
flow of `te.Linear`: what it saves and frees, its dataclasses of arguments, the global state of its
regions. It does not show NVIDIA's kernels. See `amp_fuzz.backends.te.stub`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch

from amp_fuzz.backends import harness
from amp_fuzz.backends.base import Availability, Backend, Facts
from amp_fuzz.backends.harness import Observation
from amp_fuzz.backends.process import REFUSES, Apart
from amp_fuzz.backends.quantising import QuantisingBackend
from amp_fuzz.backends.reproducing import TorchRepros, source_of
from amp_fuzz.backends.te.layers import python_recipe, te_layers
from amp_fuzz.backends.te.stub import VERSION, install
from amp_fuzz.cases.case import Case
from amp_fuzz.cases.program import FP8, Checkpoint, unwrapped
from amp_fuzz.reference import fp8 as reference

__all__ = ["Python", "PythonBackend", "backends"]

_NEEDS = "pip install 'amp-fuzz[fp8]'"


@dataclass(frozen=True, slots=True)
class PythonBackend(QuantisingBackend):
    """`te.Linear` without the kernels of Transformer Engine, in a process of its own."""

    process: Apart = field(compare=False, kw_only=True)
    name: str = "te-python"

    @property
    def recipes(self) -> Sequence[FP8]:
        """Current scaling, which is the one that Transformer Engine has in Python."""
        return FP8("current"), FP8("current"), FP8("current", format="E4M3")

    def availability(self) -> Availability:
        """Return whether the wheel is here, in the version that the stub fits."""
        try:
            found = version("transformer-engine")
        except PackageNotFoundError:
            return Availability("missing", _NEEDS)
        if found != VERSION:
            return Availability("missing", f"needs transformer-engine {VERSION}, not {found}")
        if find_spec("pydantic") is None:
            return Availability("missing", _NEEDS)
        return Availability("ready", f"transformer-engine {found} without its kernels")

    def fit(self, case: Case) -> Case:
        """Return the case without checkpoints in FP8 regions.

        Their recomputation is outside of the region, unless it is that of ``te.checkpoint``, which
        moves the state of CUDA's generators.
        """
        case = QuantisingBackend.fit(self, case)
        return case.with_program(body=unwrapped(case.program.body, (Checkpoint,)))

    def run(self, cases: Sequence[Case]) -> list[Observation]:
        """Run cases in a process where Transformer Engine takes the CPU for CUDA."""
        return [self.process.run(case) for case in cases]

    def refuses(self, modules: Mapping[str, torch.nn.Module]) -> str:
        """Return the reason: callables stay in their process."""
        return REFUSES

    def convention(self) -> reference.Convention:
        """Return what Transformer Engine documents."""
        return reference.TRANSFORMER_ENGINE

    def facts(self) -> Facts:
        """Return facts for issues."""
        return Facts(area="Transformer Engine", made="with `te.Linear`", installs="amp-fuzz[fp8]")

    def setup(self, names: Set[str]) -> list[str]:
        """Return the name of the device, and the source that installs Transformer Engine."""
        lines = TorchRepros.setup(self, names)
        if not names & {"fp8", "fp8_linear"}:
            return lines
        regions = "fp8, fp8_linear = te_layers(install(), python_recipe, device)"
        imported = "from amp_fuzz.backends.te.stub import install"
        return [*lines, imported, source_of(te_layers), source_of(python_recipe), regions]


class Python:
    """Both sides in a process where Transformer Engine takes the CPU for CUDA."""

    def __init__(self) -> None:
        te = install()
        self._backend = PythonBackend(process=Apart(""))

        def layers(checkpoint: Callable[..., Any]) -> Mapping[str, Any]:
            return dict(
                zip(("fp8", "fp8_linear"), te_layers(te, python_recipe, "cpu"), strict=True)
            )

        self._runtime = self._backend.runtime(fp8=layers)

    def observe(self, case: Case) -> Observation:
        """Run a case with `te.Linear`."""
        return harness.run(case, self._runtime)

    def expect(self, case: Case) -> Observation:
        """Run a case under the reference."""
        return self._backend.reference().run(case)


def backends() -> list[Backend]:
    """Return Transformer Engine's Python code."""
    return [PythonBackend(process=Apart(f"{__name__}:Python"))]
