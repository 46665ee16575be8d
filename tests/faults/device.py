"""Faults of a PrivateUse1 device: ways in which Python policies and casts could be wrong.

Each is a subclass of `amp_fuzz.backends.privateuse1.Autocast`, or a change to what stands around
it. They live in the device's own process, which puts on the one whose name stands in a file:
setting the device up anew for each would need a process each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from amp_fuzz.backends import privateuse1
from amp_fuzz.backends.harness import Observation
from amp_fuzz.backends.privateuse1 import Autocast
from amp_fuzz.backends.privateuse1.backend import Device, PrivateUse1Backend
from amp_fuzz.backends.process import Apart
from amp_fuzz.cases.case import Case
from amp_fuzz.policies.tables import Rule
from tests.faults.fault import patched

__all__ = ["FAULTS", "UNREGISTERED", "DeviceFault", "Faulty", "NoFallthrough", "faulty_device"]

UNREGISTERED = "no-fallthrough"
"""The fault that is there from the start: nothing is registered for ops without a policy."""


@dataclass(frozen=True, slots=True)
class DeviceFault:
    """what: one line. autocast: the kernels that have it. around: what is wrong besides."""

    name: str
    what: str
    autocast: type[Autocast] = Autocast
    around: Callable[[], AbstractContextManager[Any]] = nullcontext


_FOUND: list[DeviceFault] = []


def _fault(name: str, what: str) -> Callable[[type[Autocast]], type[Autocast]]:
    def register(mutant: type[Autocast]) -> type[Autocast]:
        _FOUND.append(DeviceFault(name, what, mutant))
        return mutant

    return register


def _wrong_policy(name: str, what: str, op: str, policy: str | None) -> None:
    """Make a fault of one op that gets another policy, or none."""

    class Mutant(Autocast):
        def decided(self, rule: Rule, overload: Any, args: Any, kwargs: Any) -> Any:
            if rule.overload != op:
                return super().decided(rule, overload, args, kwargs)
            if policy is None:
                return overload(*args, **kwargs)
            return getattr(self, policy)(rule, overload, args, kwargs)

    _fault(name, what)(Mutant)


_wrong_policy("missing-op", "mm has no kernel", "mm", None)
_wrong_policy("missing-loss", "mse_loss has no kernel", "mse_loss", None)
_wrong_policy("wrong-policy-low", "addmm runs in float32", "addmm", "fp32")
_wrong_policy("wrong-policy-float32", "exp runs in the autocast dtype", "exp", "lower_precision_fp")
_wrong_policy("wrong-policy-promote", "addcmul runs in 16 bits", "addcmul", "lower_precision_fp")


# -- eligibility ----------------------------------------------------------------------------------


@_fault("float64-cast", "float64 is cast too")
class _Float64(Autocast):
    def eligible(self, value: object) -> bool:
        return super().eligible(value) or (
            isinstance(value, torch.Tensor) and value.dtype is torch.float64
        )


@_fault("other-half-kept", "a tensor of the other 16-bit dtype is left as it is")
class _OtherHalf(Autocast):
    def cast(self, value: Any, to: torch.dtype) -> Any:
        half = isinstance(value, torch.Tensor) and value.element_size() == 2
        return value if half and to.itemsize == 2 else super().cast(value, to)


@_fault("lists-not-cast", "tensors in a list are not cast")
class _Lists(Autocast):
    def cast(self, value: Any, to: torch.dtype) -> Any:
        return value if isinstance(value, (list, tuple)) else super().cast(value, to)


@_fault("first-argument-only", "only the first argument is cast")
class _First(Autocast):
    def run(self, overload: Any, args: Sequence[Any], kwargs: Any, to: torch.dtype) -> Any:
        return overload(self.cast(args[0], to), *args[1:], **kwargs)


# -- casts ----------------------------------------------------------------------------------------


@_fault("cast-detached", "no gradient flows through a cast")
class _Detached(Autocast):
    def cast(self, value: Any, to: torch.dtype) -> Any:
        made = super().cast(value, to)
        return made.detach() if isinstance(made, torch.Tensor) and made is not value else made


@_fault("cast-by-float16", "casts to bfloat16 go by way of float16")
class _ByFloat16(Autocast):
    def cast(self, value: Any, to: torch.dtype) -> Any:
        if to is torch.bfloat16 and self.eligible(value) and value.dtype is torch.float32:
            value = value.to(torch.float16)
        return super().cast(value, to)


# -- the weight cache -----------------------------------------------------------------------------


@_fault("cache-missing", "there is no weight cache")
class _NoCache(Autocast):
    def cacheable(self, tensor: torch.Tensor, to: torch.dtype) -> bool:
        return False


@_fault("cache-flag-ignored", "cache_enabled=False is ignored")
class _Flag(Autocast):
    def cacheable(self, tensor: torch.Tensor, to: torch.dtype) -> bool:
        with patched(torch, is_autocast_cache_enabled=lambda: True):
            return super().cacheable(tensor, to)


@_fault("cache-not-cleared", "casts of weights outlive their context")
class _Kept(Autocast):
    def clear(self) -> None:
        """Keep them."""


@_fault("cache-without-gradient", "a first pass without gradients leaves casts that have none")
class _NoGradient(Autocast):
    def cast(self, value: Any, to: torch.dtype) -> Any:
        if isinstance(value, (list, tuple)) or not self.eligible(value) or value.dtype is to:
            return super().cast(value, to)
        kept = self.__dict__.setdefault("kept", {})
        if not self.cacheable(value, to):
            return value.to(to)
        if id(value) not in kept or kept[id(value)][0] is not value:
            kept[id(value)] = (value, value.to(to))
        return kept[id(value)][1]

    def clear(self) -> None:
        super().clear()
        self.__dict__.pop("kept", None)


# -- policies -------------------------------------------------------------------------------------


@_fault("promote-low", "promote takes the autocast dtype")
class _PromoteLow(Autocast):
    def promoted(self, tensors: Iterable[torch.Tensor]) -> torch.dtype:
        return self.low()


@_fault("promote-first", "promote takes the dtype of the first tensor")
class _PromoteFirst(Autocast):
    def promoted(self, tensors: Iterable[torch.Tensor]) -> torch.dtype:
        return next((t.dtype for t in tensors if self.eligible(t)), self.low())


@_fault("set-dtype-always", "fp32_set_opt_dtype overrides the dtype that the caller gives")
class _SetAlways(Autocast):
    def fp32_set_opt_dtype(
        self, rule: Rule, overload: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        names = [p.name for p in overload._schema.arguments]
        place = names.index("dtype")
        given = [None if i == place else a for i, a in enumerate(args)]
        rest = {k: v for k, v in kwargs.items() if k != "dtype"}
        return super().fp32_set_opt_dtype(rule, overload, given, rest)


@_fault("append-dtype-own", "fp32_append_dtype appends the dtype of the argument")
class _AppendOwn(Autocast):
    def fp32_append_dtype(
        self, rule: Rule, overload: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        return overload(*args, **kwargs)


@_fault("banned-allowed", "a banned op runs")
class _Allowed(Autocast):
    def banned(
        self, rule: Rule, overload: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        return overload(*args, **kwargs)


# -- state ----------------------------------------------------------------------------------------


@_fault("nested-dtype-lost", "the dtype of the outermost context holds for those inside it")
class _Outermost(Autocast):
    def low(self) -> torch.dtype:
        return self.__dict__.setdefault("first", super().low())

    def clear(self) -> None:
        super().clear()
        self.__dict__.pop("first", None)


@_fault("default-dtype", "the dtype of the context is not asked for")
class _Default(Autocast):
    def low(self) -> torch.dtype:
        return torch.float16


_Context: Any = torch.amp.autocast_mode.autocast
_enter, _exit = _Context.__enter__, _Context.__exit__


def _around(name: str, what: str, **methods: Any) -> None:
    _FOUND.append(DeviceFault(name, what, around=lambda: patched(_Context, **methods)))


def _entered_on(self: Any) -> Any:
    before = torch.is_autocast_enabled(self.device)
    entered = _enter(self)
    if before:
        torch.set_autocast_enabled(self.device, True)
    return entered


def _left_on(self: Any, *error: Any) -> Any:
    left = _exit(self, *error)
    torch.set_autocast_enabled(self.device, self._enabled)
    return left


def _left_dtype(self: Any, *error: Any) -> Any:
    left = _exit(self, *error)
    torch.set_autocast_dtype(self.device, self.fast_dtype)
    return left


_around("disabled-ignored", "enabled=False in an enabled context is ignored", __enter__=_entered_on)
_around("enabled-not-restored", "a context leaves autocast on", __exit__=_left_on)
_around("dtype-not-restored", "a context leaves its dtype", __exit__=_left_dtype)


@contextmanager
def _no_bfloat16() -> Any:
    module = torch.get_device_module(privateuse1.DEVICE)
    with patched(module, get_amp_supported_dtype=lambda: [torch.float16, torch.float32]):
        yield


_FOUND.append(
    DeviceFault("dtype-unsupported", "the module does not say bfloat16", around=_no_bfloat16)
)

FAULTS: Mapping[str, DeviceFault] = {fault.name: fault for fault in _FOUND}


# -- the device's process -------------------------------------------------------------------------


class Faulty(Device):
    """A device with the fault whose name stands in a file; an empty file: none."""

    faults: Mapping[str, DeviceFault] = FAULTS

    def __init__(self, policies: str, file: str) -> None:
        self._file = Path(file)
        made: list[Autocast] = []

        def autocast(*given: Any) -> Autocast:
            made.append(Autocast(*given))
            return made[0]

        super().__init__(policies, autocast=autocast)
        self._kernels = made[0]

    def observe(self, case: Case) -> Observation:
        """Run a case under torch's autocast with the fault."""
        fault = self.faults.get(self._file.read_text())
        if fault is None:
            return super().observe(case)
        self._kernels.__class__ = fault.autocast
        try:
            with fault.around():
                return super().observe(case)
        finally:
            self._kernels.__class__ = Autocast
            self._kernels.clear()


class NoFallthrough(Device):
    """A device that registers no fallthrough."""

    def __init__(self, policies: str) -> None:
        class Mutant(Autocast):
            def fall_through(self) -> None:
                """Forget it."""

        super().__init__(policies, autocast=Mutant)


@contextmanager
def faulty_device(
    served: str, folders: pytest.TempPathFactory
) -> Iterator[tuple[PrivateUse1Backend, Path]]:
    """Start a device with faults; yield it, and the file that says which one it has.

    served: the class, as `Apart` takes it.
    """
    file = folders.mktemp("device") / "fault"
    file.write_text("")
    process = Apart(served, "cuda", str(file))
    yield PrivateUse1Backend("cuda", process), file
    process.close()
