"""A PrivateUse1 device in Python, with the policies of any other device.

Its tensors are in CPU memory and its kernels are the CPU's. So it has, say, CUDA's autocast with
the CPU's numerics, forward and backward, on a machine without a GPU. The device itself is
`amp_fuzz.backends.privateuse1`. The reference runs the same kernels on plain CPU tensors, which it
treats as the device's: it shares neither the device's tensors nor its casts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from amp_fuzz.backends import harness, privateuse1
from amp_fuzz.backends.base import Availability, Backend, Facts
from amp_fuzz.backends.harness import Observation
from amp_fuzz.backends.privateuse1 import Autocast
from amp_fuzz.backends.process import REFUSES, Apart
from amp_fuzz.backends.reference import ReferenceRuntime, reference_runtime
from amp_fuzz.backends.reproducing import TorchRepros
from amp_fuzz.backends.torch_base import TorchBackend, as_elsewhere
from amp_fuzz.cases.case import Case, unselective
from amp_fuzz.cases.program import TensorSpec
from amp_fuzz.cases.settings import drawn_on
from amp_fuzz.policies.tables import DEVICES, PolicyTable, load_table
from amp_fuzz.reference import as_device

__all__ = ["Device", "PrivateUse1Backend", "backends"]

_DEFAULT = "cuda"


@dataclass(frozen=True, slots=True)
class PrivateUse1Backend(TorchRepros, TorchBackend):
    """``torch.autocast`` on a PrivateUse1 device that follows the policy table of `device`.

    process: the process with the device.
    """

    device: str
    process: Apart = field(compare=False)

    @property
    def name(self) -> str:
        """``privateuse1``, with CUDA's table, ``privateuse1[cpu]``, ..."""
        return "privateuse1" if self.device == _DEFAULT else f"privateuse1[{self.device}]"

    def facts(self) -> Facts:
        """Return that torch's documents speak of such devices."""
        return Facts(implements=("backend=privateuse1",))

    def availability(self) -> Availability:
        """Return whether this torch supports a device in Python."""
        if not privateuse1.supported():
            return Availability("missing", "needs torch 2.10: pip install 'torch>=2.10'")
        detail = f"torch {torch.__version__}, the policies of {self.device} with CPU kernels"
        return Availability("ready", detail)

    @property
    def settings(self) -> Sequence[str]:
        """Those of the CPU, whose kernels it has."""
        return drawn_on("cpu")

    @property
    def mixes(self) -> bool:
        """Whether programs may have CPU tensors beside the device's."""
        return True

    def fit(self, case: Case) -> Case:
        """Return the case as the device takes it, whatever device its policies are of.

        It lacks the zeros of forward-mode AD (``aten::_efficientzerotensor``). If a checkpoint
        raises in autograd's thread for the device, torch 2.13 ends the process ("terminate called
        without an active exception"). Selective ones may, and those of weights of other dtypes.
        """
        if case.plan.update == "cast":
            case = case.with_plan(update="data")
        if case.plan.transform in ("jvp", "forward_ad", "jacfwd"):
            case = case.with_plan(transform="grad")
        return unselective(as_elsewhere(case))

    def run(self, cases: Sequence[Case]) -> list[Observation]:
        """Run cases in the device's process."""
        return [self.process.run(case) for case in cases]

    def refuses(self, modules: Mapping[str, torch.nn.Module]) -> str:
        """Return the reason: callables stay in their process."""
        return REFUSES

    def setup(self, names: Set[str]) -> list[str]:
        """Return the source that installs the device."""
        text = _INSTALLED.format(policies=self.device, threads=torch.get_num_threads())
        return ["from amp_fuzz import privateuse1", text]

    def placed(self, text: str, spec: TensorSpec) -> str:
        """Return the source of a tensor on the device."""
        odd = spec.layout in ("strided", "offset")  # a copy to the device would be neither
        return f"privateuse1.placed({text})" if odd else f"{text}.to(device)"

    def reference(self) -> ReferenceRuntime:
        """Return the reference on tensors of the device.

        Requests other than runs are answered here, on CPU tensors treated as the device's.
        """
        runtime = reference_runtime(privateuse1.DEVICE, scope=self.scope).runtime
        return ApartReference(replace(runtime, place=lambda tensor: tensor), self.process)

    def scope(self) -> AbstractContextManager[None]:
        """Return the context in which the reference treats CPU tensors as the device's."""
        table = _table(self.device)
        return as_device(privateuse1.DEVICE, table, tensors="cpu", elsewhere=True)


_INSTALLED = """\
# A device in Python, which follows the policies of {policies} with the kernels of the CPU.
device = privateuse1.install("{policies}")
torch.set_num_threads({threads})
"""


@dataclass(frozen=True, slots=True)
class ApartReference(ReferenceRuntime):
    """The reference in the separate process."""

    process: Apart

    def run(self, case: Case) -> Observation:
        """Run one case there."""
        return self.process.run(case, reference=True)

    def asked(self, case: Case) -> set[str] | None:
        """Return None: the bugs asked for there are unknown here."""
        return None


def _table(policies: str) -> PolicyTable:
    """Return the policies; the default dtype of a PrivateUse1 device is always float16."""
    return replace(load_table(policies), default_dtype="float16")


class Device:
    """PrivateUse1 as a device of this process: torch's autocast there, and the reference."""

    def __init__(
        self,
        policies: str,
        *,
        autocast: Callable[[str, PolicyTable], Autocast] = Autocast,
    ) -> None:
        device = privateuse1.install(policies, autocast=autocast)
        self._torch = TorchBackend(device=device).runtime(place=privateuse1.placed)
        scope = partial(as_device, device, _table(policies), elsewhere=True)
        runtime = reference_runtime(device, scope=scope)
        self._reference = ReferenceRuntime(replace(runtime.runtime, place=privateuse1.placed))

    def observe(self, case: Case) -> Observation:
        """Run a case under torch's autocast."""
        return harness.run(case, self._torch)

    def expect(self, case: Case) -> Observation:
        """Run a case under the reference."""
        return self._reference.run(case)


def backends() -> list[Backend]:
    """Return one backend for each policy table, CUDA's first."""
    tables = (_DEFAULT, *(name for name in DEVICES if name != _DEFAULT))
    return [PrivateUse1Backend(name, Apart(f"{__name__}:Device", name)) for name in tables]
