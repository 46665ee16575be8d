"""Accelerators that this machine lacks: their real autocast kernels on fake tensors.

Under `FakeTensorMode` a CPU-only torch runs the autocast kernels of cuda, xpu, mps, mtia and maia
on tensors without values. So dtypes, shapes and errors of the autocast layer can be checked on any
machine. ``torch.autocast("cuda")`` disables itself if CUDA is missing, so the state is set with the
same public setters that it uses.
"""

from __future__ import annotations

import logging
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import msgspec
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from amp_fuzz.backends import device_guards, harness
from amp_fuzz.backends.base import Availability, Backend, Call, Facts
from amp_fuzz.backends.dispatcher import has_autocast
from amp_fuzz.backends.eager import has_device
from amp_fuzz.backends.harness import Observation, Runtime
from amp_fuzz.backends.reference import ReferenceRuntime, reference_runtime
from amp_fuzz.backends.refusals import Refusing
from amp_fuzz.backends.reproducing import TorchRepros, source_of
from amp_fuzz.backends.settings import applied
from amp_fuzz.backends.torch_base import TorchBackend
from amp_fuzz.cases.case import CUSTOM_OPS, Case, Plan, Transform, unbroken
from amp_fuzz.cases.program import statements
from amp_fuzz.patching import patched
from amp_fuzz.reference import Policy, load_table, since
from amp_fuzz.versions import holds

__all__ = ["FakeAutocast", "FakeBackend", "backends"]


class FakeAutocast:
    """``torch.autocast`` for a missing device, with the setters that it uses itself.

    Like `torch.autocast`, it disables itself for a dtype that the device does not support; cuda
    accepts any.
    """

    def __init__(self, device_type, dtype=None, enabled=True, cache_enabled=None):  # type: ignore[no-untyped-def]
        self.device = device_type
        self.dtype = torch.get_autocast_dtype(device_type) if dtype is None else dtype
        halves = (torch.float16, torch.bfloat16)
        self.enabled = enabled and (device_type == "cuda" or self.dtype in halves)
        self.cache = torch.is_autocast_cache_enabled() if cache_enabled is None else cache_enabled
        self.saved = []

    def set(self, enabled: bool, dtype: torch.dtype, cache: bool, included: bool) -> None:
        torch.set_autocast_enabled(self.device, enabled)
        torch.set_autocast_dtype(self.device, dtype)
        torch.set_autocast_cache_enabled(cache)
        if self.device == "maia":
            # Fake maia tensors lack the autocast key that other devices' tensors carry (seen
            # on torch 2.13), so it is put on every dispatch of this thread instead.
            torch._C._dispatch_tls_set_dispatch_key_included("AutocastMAIA", included)

    def __enter__(self):  # type: ignore[no-untyped-def]
        d = self.device
        before = (torch.is_autocast_enabled(d), torch.get_autocast_dtype(d))
        # In the body of a custom op autocast is off, but the key is still included: two states.
        included = d == "maia" and torch._C._dispatch_tls_is_dispatch_key_included("AutocastMAIA")
        self.saved.append((*before, torch.is_autocast_cache_enabled(), included))
        self.set(self.enabled, self.dtype, self.cache, self.enabled)
        torch.autocast_increment_nesting()
        return self

    def __exit__(self, *error):  # type: ignore[no-untyped-def]
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        self.set(*self.saved.pop())

    def __call__(self, function):  # type: ignore[no-untyped-def]
        def decorated(*args, **kwargs):  # type: ignore[no-untyped-def]
            with self:
                return function(*args, **kwargs)

        return decorated


# Fake kernels log every error that they raise; here errors are ordinary observations.
_LOGGER = logging.getLogger("torch._subclasses.fake_tensor")


@lru_cache(maxsize=1)
def _mode() -> Refusing:
    # One for all cases: creating one costs about as much as a small program.
    return Refusing()


@contextmanager
def fake_tensors(device: str) -> Iterator[None]:
    """Enter the process's fake mode, silenced, with a device guard for its tensors.

    `torch.autocast`, which `custom_fwd` enters, asks until 2.9 whether macOS is new enough for
    bfloat16 on mps. A torch without mps raises there. And a torch that was built with CUDA asks
    cuDNN about an LSTM, and until 2.10 the driver about attention, which raises where no GPU is:
    there both are made of torch's own ops, as in a torch without CUDA.
    """
    level = _LOGGER.level
    _LOGGER.setLevel(logging.CRITICAL + 1)
    try:
        macos = patched(torch.backends.mps, "is_macos_or_newer", lambda major, minor: True)
        own = macos if device == "mps" else nullcontext()
        if _lacks_gpu(device):
            own = _without_libraries()
        with own, device_guards.stand_in(device), _mode():
            yield
    finally:
        _LOGGER.setLevel(level)


@contextmanager
def _without_libraries() -> Iterator[None]:
    """Leave cuDNN and attention's own kernels out, also where flags are frozen (`applied`)."""
    with applied(["torch.backends.cudnn.enabled = False"]), sdpa_kernel(SDPBackend.MATH):
        yield


@lru_cache(maxsize=8)
def _lacks_gpu(device: str) -> bool:
    """Return whether a device is CUDA, of which this torch has the libraries and no hardware."""
    return device == "cuda" and torch.backends.cudnn.is_available() and not has_device(device)


_TRANSFORMS: Mapping[Transform, Transform] = {
    "functionalize": "vmap",
    "jvp": "grad",
    "forward_ad": "grad",
    "jacrev": "grad",
    "jacfwd": "grad",
}
"""The transforms that fake tensors lack, and what comes in their place."""


@dataclass(frozen=True, slots=True)
class FakeBackend(TorchRepros, TorchBackend):
    """The real autocast kernels of a device type, on fake tensors.

    If a fake device lacks something, both sides raise.
    """

    device: str
    trains: bool = field(default=False, kw_only=True)
    values: bool = field(default=False, kw_only=True)

    @property
    def name(self) -> str:
        """``fake-cuda``, ``fake-xpu``, ..."""
        return f"fake-{self.device}"

    def availability(self) -> Availability:
        """Return whether this torch has autocast for the device type."""
        if not has_autocast(self.device):
            return Availability("missing", f"needs torch >={since(self.device)}")
        if not device_guards.known():
            return Availability("broken", "libc10 has no known registry of device guards")
        return Availability("ready", f"torch {torch.__version__}, no values")

    @property
    def mixes(self) -> bool:
        """Whether programs may have CPU tensors beside the device's."""
        return True

    def fit(self, case: Case) -> Case:
        """Return the case, without branches on values, which fake tensors lack.

        Most transforms ask for what fake tensors lack too: their device, or what makes a dual
        tensor. On maia the case is without CPU tensors if it calls an op that autocast refuses.

        Fake maia tensors have no key of their own: it is on every dispatch (`FakeAutocast`), so a
        call of CPU tensors alone is refused too. Other policies ask for the device.
        """
        case = unbroken(TorchBackend.fit(self, case))
        case = case.with_plan(transform=_TRANSFORMS.get(case.plan.transform, case.plan.transform))
        if self.device != "maia" or not case.program.mixed:
            return case
        rules = load_table(self.device).rules.values()
        refused = {rule.overload for rule in rules if rule.policy is Policy.BANNED}
        if not any(s.op in refused for s in statements(case.program.body)):
            return case
        inputs = [msgspec.structs.replace(spec, device="") for spec in case.program.inputs]
        return case.with_program(inputs=tuple(inputs))

    def observe(self, case: Case) -> Observation:
        """Run one case under the fake mode."""
        try:
            return harness.run(case, self.runtime())
        finally:
            if case.plan.entry in CUSTOM_OPS:  # an op that is never called again stays in the cache
                Refusing.cache_clear()

    def runtime(self, **more: Any) -> Runtime:
        """Return torch's autocast kernels of the device, on fake tensors."""
        own = {"autocast": FakeAutocast, "scope": self.scope, "fake": True}
        return TorchBackend.runtime(self, **{**own, **more})

    def scope(self) -> AbstractContextManager[None]:
        """Return the context in which tensors of the device are fake."""
        return fake_tensors(self.device)

    def reference(self) -> ReferenceRuntime:
        """Return the reference on fake tensors of the device."""
        return reference_runtime(self.device, scope=self.scope, fake=True)

    def facts(self) -> Facts:
        """Return how a divergence was observed."""
        return Facts(
            seen="It was observed on fake tensors, with torch's autocast kernels for that device",
            implements=("backend=fake",),
        )

    def called(self, function: Callable[..., Any], plan: Plan, call: Call) -> Observation:
        """Call a callable unchanged."""
        return TorchBackend.called(self, function, plan, call)

    def watching(self, watched: Callable[[Any], Any]) -> Backend:
        """Return the backend with another autocast, built from its own."""
        return replace(self, watched=watched)

    def setup(self, names: Set[str]) -> list[str]:
        """Return the name of the device, its stand-in guard, the fake mode, and autocast."""
        parts = [f'device = "{self.device}"', f"{device_guards.source(self.device)}\n{_MODE}"]
        if self.device == "mps" and holds("<2.11"):
            parts.append("torch.backends.mps.is_macos_or_newer = lambda major, minor: True")
        if _lacks_gpu(self.device):
            parts.append(_WITHOUT_LIBRARIES)
        if "autocast" in names:
            parts.append(source_of(FakeAutocast).replace("class FakeAutocast", "class autocast"))
        return parts

    def short(self, code: str) -> str:
        """Return a script that turns autocast on by its setters, if it enters it once."""
        fakes = f"{device_guards.source(self.device)}\n{_MODE}"
        entered = list(re.finditer(_ENTERED, code, re.MULTILINE))
        if len(entered) != 1 or len(re.findall(r"\bautocast\(", code)) != 1:
            return code
        (match,) = entered
        pad, dtype = match[1], match[2]
        lines = [
            "torch.set_autocast_enabled(device, True)",
            f"torch.set_autocast_dtype(device, {dtype})",
        ]
        if self.device == "maia":  # its fake tensors lack the key
            lines.append('torch._C._dispatch_tls_set_dispatch_key_included("AutocastMAIA", True)')
        inside = textwrap.dedent(match[3]).splitlines()
        body = "".join(f"{pad}{line}\n" for line in [*lines, *inside])
        code = code[: match.start()] + body + code[match.end() :]
        own = source_of(FakeAutocast).replace("class FakeAutocast", "class autocast")
        if ").requires_grad_()\n" not in code:  # autograd asks for the guard
            code = code.replace(fakes, "FakeTensorMode().__enter__()\n")
        return code.replace(own, "")


_ENTERED = r"^( *)with autocast\(device, dtype=([\w.]+)\):\n((?:\1 {4}.*\n)+)"

_MODE = """\
# Every tensor from here on has a dtype and a shape but no values.
logging.getLogger("torch._subclasses.fake_tensor").disabled = True
FakeTensorMode().__enter__()
"""

_WITHOUT_LIBRARIES = """\
# No driver is here that an LSTM and attention could ask about the GPU.
torch.backends.cudnn.enabled = False
torch.backends.cuda.enable_flash_sdp(False)
torch.backends.cuda.enable_mem_efficient_sdp(False)
torch.backends.cuda.enable_cudnn_sdp(False)
"""


def backends() -> list[Backend]:
    """Return one backend for each accelerator that has a policy table."""
    return [FakeBackend(device) for device in ("cuda", "xpu", "mps", "mtia", "maia")]
