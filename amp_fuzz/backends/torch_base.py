"""The common base of torch's own backends: names, state, kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils.checkpoint

from amp_fuzz.backends import harness
from amp_fuzz.backends.base import Availability, Backend, Call
from amp_fuzz.backends.harness import Observation, Runtime
from amp_fuzz.backends.reference import ReferenceRuntime, reference_runtime
from amp_fuzz.backends.torch_state import reset_state, torch_state
from amp_fuzz.cases.case import Case, Plan
from amp_fuzz.cases.program import Context, NoGrad, Region, Role
from amp_fuzz.cases.settings import drawn_on
from amp_fuzz.catalogue import CATALOGUE
from amp_fuzz.versions import holds

__all__ = ["TorchBackend", "as_elsewhere", "numbers", "under"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchBackend:
    """A backend that supports every op but higher-order ones, and runs cases in this process.

    watched: wraps the implementation's ``autocast`` before a case gets it.
    """

    device: str = "cpu"
    trains: bool = True
    values: bool = True
    exact: bool = True
    repeats: bool = True
    watched: Callable[[Any], Any] | None = field(default=None, compare=False)

    def availability(self) -> Availability:
        """Return that torch is here."""
        return Availability("ready", f"torch {torch.__version__}")

    @property
    def settings(self) -> Sequence[str]:
        """The settings of torch that change its numbers."""
        return drawn_on(self.device) if self.values else ()

    @property
    def mixes(self) -> bool:
        """Whether programs may have CPU tensors beside the device's."""
        return False

    def supports(self, op: str, form: str) -> bool:
        """Return whether a call can be made: higher-order ops are for backends that compile."""
        return CATALOGUE[op].family != "control_flow"

    def fit(self, case: Case) -> Case:
        """Return the case without what torch documents as unsupported on the device."""
        return case if self.device in ("cpu", "cuda") else as_elsewhere(case)

    def run(self, cases: Sequence[Case]) -> list[Observation]:
        """Run cases one by one."""
        return [self.observe(case) for case in cases]

    def observe(self, case: Case) -> Observation:
        """Run one case."""
        return harness.run(case, self.runtime())

    def runtime(self, **more: Any) -> Runtime:
        """Return torch's autocast on the device, and whatever else a case needs."""
        names: dict[str, Any] = {
            "autocast": torch.autocast,
            "checkpoint": torch.utils.checkpoint.checkpoint,
            "custom_fwd": torch.amp.custom_fwd,
            "custom_bwd": torch.amp.custom_bwd,
            "state": lambda: torch_state(self.device),
            "reset": lambda: reset_state(self.device),
        }
        names |= more
        if self.watched is not None:
            names["autocast"] = self.watched(names["autocast"])
        return Runtime(device=self.device, **names)

    def ladder(self) -> Sequence[Backend]:
        """Return nothing: there are no stages."""
        return ()

    def reference(self) -> ReferenceRuntime:
        """Return the reference on the same device."""
        return reference_runtime(self.device)

    # -- for `amp_fuzz.check`: see `base.Calls` ---------------------------------------------------

    def refuses(self, modules: Mapping[str, torch.nn.Module]) -> str:
        """Return nothing: any callable can be called."""
        return ""

    def infers(self, function: Callable[..., Any]) -> bool:
        """Return whether no backward pass runs."""
        return not self.trains

    def called(self, function: Callable[..., Any], plan: Plan, call: Call) -> Observation:
        """Call a callable unchanged."""
        return call(self.runtime(), None)


def as_elsewhere(case: Case) -> Case:
    """Return the case as devices other than cpu and cuda take it.

    Until 2.11, `torch.library.register_autocast` takes these two alone.
    """
    registered = case.plan.entry == "register_autocast" and holds("<2.12")
    return case.with_plan(entry="custom_op") if registered else case


def under(case: Case, context: Context) -> Case:
    """Return a case with its program's whole body under a context."""
    body = case.program.body
    if len(body) == 1 and isinstance(body[0], Region) and body[0].context == context == NoGrad():
        return case
    return case.with_program(body=(Region(context, body),))


def numbers(case: Case, role: Role) -> list[int]:
    """Return the numbers of the inputs with a role."""
    return [i for i, spec in enumerate(case.program.inputs) if spec.role == role]
