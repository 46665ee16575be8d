"""The user's installed device: an out-of-tree device module, judged like torch's own devices.

The options ``device`` and ``policies`` name it (`amp_fuzz.backends.devices`). It has two backends.
``eager-NAME`` compares with the reference on the device's own tensors and kernels, dtype for dtype
and bit for bit: this tests its autocast. ``eager-NAME[shadow]`` compares with the reference on the
CPU, by shadow arithmetic: this tests its kernels too.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch

from amp_fuzz.backends.base import Availability, Backend, Call
from amp_fuzz.backends.determinism import Kernels
from amp_fuzz.backends.devices import policies_of
from amp_fuzz.backends.dispatcher import in_python
from amp_fuzz.backends.harness import Observation
from amp_fuzz.backends.numerics import numerics
from amp_fuzz.backends.reference import (
    Numerics,
    ReferenceRuntime,
    reference_on_cpu,
    reference_runtime,
)
from amp_fuzz.backends.reproducing import TorchRepros
from amp_fuzz.backends.torch_base import TorchBackend
from amp_fuzz.cases.case import Case, Plan
from amp_fuzz.cases.settings import drawn_on
from amp_fuzz.config import OPTIONS
from amp_fuzz.policies.tables import PolicyTable, adopt
from amp_fuzz.reference import as_device

__all__ = ["VendorBackend", "named"]


@dataclass(frozen=True, slots=True)
class VendorBackend(TorchRepros, TorchBackend):
    """``torch.autocast(device)`` on an out-of-tree device.

    table: its policies. exact: whether the reference runs on the device itself.
    """

    device: str
    table: PolicyTable

    @property
    def name(self) -> str:
        """``eager-npu``, ``eager-npu[shadow]``."""
        return f"eager-{self.device}" + ("" if self.exact else "[shadow]")

    def availability(self) -> Availability:
        """Return whether torch has the device here, and what it lacks."""
        status, detail = _state(self.device)
        if status == "ready":
            against = "the CPU, by shadow arithmetic" if not self.exact else "its own kernels"
            detail = f"{detail}, policies of {self.table.source}, against {against}"
        return Availability(status, detail)

    def modules(self) -> list[str]:
        """Return the modules to import for the device: the plugins, or ``torch_NAME``."""
        plugins = os.environ.get(OPTIONS["plugins"].variable, "")
        found = [name for name in plugins.split(",") if name]
        guess = f"torch_{self.device}"
        return found or [guess] * (guess in sys.modules)

    def run(self, cases: Sequence[Case]) -> list[Observation]:
        """Run cases one by one."""
        _state(self.device)
        return TorchBackend.run(self, cases)

    def called(self, function: Callable[..., Any], plan: Plan, call: Call) -> Observation:
        """Call a callable unchanged."""
        return TorchBackend.called(self, function, plan, call)

    def setup(self, names: Set[str]) -> list[str]:
        """Return the imports of the device's modules, and its name."""
        lines = [f"import {module}  # registers the device" for module in self.modules()]
        return [*lines, f'device = "{self.device}"']

    def reference(self) -> ReferenceRuntime:
        """Return the reference, on tensors of the device or on CPU tensors instead."""
        _state(self.device)
        if not self.exact:
            return self.shadows()
        scope = partial(as_device, self.device, self.table, elsewhere=in_python(self.device))
        return reference_runtime(self.device, scope=scope)

    def kernels(self) -> Kernels:
        """Return the kernels that the device's module says are nondeterministic, or none."""
        return self._numerics().kernels

    def _numerics(self) -> Numerics:
        """Return the arithmetic that torch documents of another device.

        ``torch.NAME.computes_as()`` returns the type of that device: ``"cuda"``.
        """
        says = getattr(getattr(torch, self.device, None), "computes_as", None)
        return numerics(self.device if says is None else says())

    @property
    def settings(self) -> Sequence[str]:
        """The settings of torch that change the numbers of that other device."""
        says = getattr(getattr(torch, self.device, None), "computes_as", None)
        return () if says is None else drawn_on(says())

    @property
    def mixes(self) -> bool:
        """Whether programs may have CPU tensors beside the device's."""
        return self.exact

    def shadows(self) -> ReferenceRuntime:
        """Return the reference on CPU tensors."""
        return reference_on_cpu(
            self.device, self.table, self._numerics(), elsewhere=in_python(self.device)
        )

    def fit(self, case: Case) -> Case:
        """Return the case as other devices take it, with no deterministic algorithms of the CPU."""
        case = TorchBackend.fit(self, case)
        asks = case.plan.deterministic and not self.exact
        return case.with_plan(deterministic=False) if asks else case


@lru_cache(maxsize=4)
def _state(device: str) -> tuple[Any, str]:
    """Return the state of a device, and why; import ``torch_NAME`` if torch does not know it."""
    trouble = f"no module torch_{device}"
    if not _is_named(device):
        try:
            importlib.import_module(f"torch_{device}")
        except ModuleNotFoundError as error:
            if error.name != f"torch_{device}":
                return "broken", f"torch_{device} cannot be imported: {error}"
        except (Exception, SystemExit) as error:  # a vendor's module may raise anything
            first = str(error).partition("\n")[0]
            return "broken", f"torch_{device} cannot be imported: {type(error).__name__}: {first}"
    if not _is_named(device):
        return "missing", (
            f"torch has no device {device!r}, and there is {trouble}: name the module that "
            "registers it, --plugins=MODULE"
        )
    module = getattr(torch, device, None)
    if module is None:
        return "broken", (
            f"there is no torch.{device}: register the device's module, "
            f"torch._register_device_module({device!r}, module)"
        )
    if hasattr(module, "is_available") and not module.is_available():
        return "missing", f"torch.{device}.is_available() is False: no such device is here"
    if not hasattr(module, "get_amp_supported_dtype"):
        return "broken", (
            f"torch.{device} has no get_amp_supported_dtype(), without which "
            f"torch.autocast({device!r}) raises"
        )
    return "ready", f"torch {torch.__version__}"


def _is_named(device: str) -> bool:
    try:
        return torch.device(device).type == device
    except RuntimeError:
        return False


def named() -> list[Backend]:
    """Return the backends of the device that the options name, or nothing."""
    device = os.environ.get(OPTIONS["device"].variable, "")
    if not device:
        return []
    table = policies_of(device, os.environ.get(OPTIONS["policies"].variable, ""))
    # A PrivateUse1 device cannot choose its default dtype; other devices set it in C++.
    if _state(device)[0] == "ready":
        default = str(torch.get_autocast_dtype(device)).removeprefix("torch.")
        table = replace(table, default_dtype=default)
    adopt(table)
    return [VendorBackend(device=device, table=table, exact=exact) for exact in (True, False)]
