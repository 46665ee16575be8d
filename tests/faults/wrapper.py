"""What torch's C++ wrapper around an autocast kernel does, in Python, over the real kernels.

`Wrapper` is an honest copy of aten/src/ATen/autocast_mode.{h,cpp} for one device type, upstream's
quirks included; a fault is a subclass that gets one thing wrong. `installed` registers it over
torch's own kernels on the device's autocast key, so that the state, the dispatcher, the context
managers and autograd around it are torch's own. It shares no line with `amp_fuzz.reference`.

The device is the CPU, or the one that the environment variable FAULTS_DEVICE names: ``cuda``, or a
device on PrivateUse1 that a plugin installs.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch._C import DispatchKey, DispatchKeySet

from amp_fuzz.backends.privateuse1 import Autocast, module
from amp_fuzz.plugins import inherited
from amp_fuzz.policies.tables import DEVICES, load_table

__all__ = [
    "DEVICE",
    "KEY",
    "KEYSET",
    "POLICIES",
    "Kernel",
    "Value",
    "Wrapper",
    "installed",
    "overload_of",
    "registered",
]

inherited()
DEVICE = os.environ.get("FAULTS_DEVICE", "cpu")
KEY = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}.get(DEVICE, "AutocastPrivateUse1")
_RULES = load_table(DEVICE if DEVICE in DEVICES else "cuda").rules
# The device's table, overload -> policy: what there is to corrupt.
POLICIES: Mapping[str, str] = {name: rule.policy.value for name, rule in _RULES.items()}

KEYSET: Any = DispatchKeySet(getattr(DispatchKey, KEY))
# A device in Python has no quirks of upstream's C++, and a cache that Python can reach.
_CPP = KEY != "AutocastPrivateUse1"
GET_KERNEL: Any = getattr(torch.library, "get_kernel", None)
"""torch 2.7 has none. A test that needs it is skipped there."""
# Bound before anything is registered over it: see `Wrapper.cached`.
_PRELU: Any = GET_KERNEL and GET_KERNEL("aten::prelu", KEY)
# In which order GCC evaluates the arguments of a call, and so in which autocast casts them.
_LAST_FIRST = "GCC" in torch.__config__.show()

Value = Any


def overload_of(name: str) -> Any | None:
    """Return the OpOverload of ``sum.dim_IntList``, or None if this torch lacks it."""
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base, None), overload or "default", None)


def twin_of(name: str) -> Any | None:
    """Return the overload with the same arguments and then a dtype, or None."""
    rule = _RULES.get(name)
    if rule is not None and rule.redispatch is not None:
        return overload_of(rule.redispatch)
    own = overload_of(name)._schema.arguments  # type: ignore[union-attr]
    types = [(a.name, str(a.type)) for a in own]
    packet = getattr(torch.ops.aten, name.partition(".")[0])
    for other in packet.overloads():
        twin = getattr(packet, other)
        *first, last = twin._schema.arguments
        if [(a.name, str(a.type)) for a in first] == types and last.name == "dtype":
            return twin
    return None


@dataclass(frozen=True, slots=True)
class Kernel:
    """An op as the wrapper meets it: its name, overload and policy."""

    name: str
    overload: Any
    policy: str

    @property
    def parameters(self) -> Sequence[Any]:
        """The arguments of the schema: each has name, type, kwarg_only, default_value."""
        parameters: Sequence[Any] = self.overload._schema.arguments
        return parameters

    def given(self, args: Sequence[Value], kwargs: Mapping[str, Value]) -> list[tuple[Any, Value]]:
        """Return the arguments of a call with their parameters, in the order of the schema."""
        pairs = list(zip(self.parameters, args, strict=False))
        return pairs + [
            (p, kwargs[p.name]) for p in self.parameters[len(args) :] if p.name in kwargs
        ]


class Wrapper:
    """Casts the arguments of a call by the policy of its op and calls the op, autocast excluded."""

    @property
    def low(self) -> torch.dtype:
        """The autocast dtype."""
        return torch.get_autocast_dtype(DEVICE)

    def call(
        self, kernel: Kernel, keys: Any, args: Sequence[Value], kwargs: Mapping[str, Value]
    ) -> Value:
        """Run one call that the dispatcher, at these keys, brought here."""
        if kernel.policy == "banned":
            raise RuntimeError(f"{kernel.name} is unsafe to autocast")
        with torch._C._ExcludeDispatchKeyGuard(KEYSET):
            return self.run(kernel, args, kwargs)

    def run(self, kernel: Kernel, args: Sequence[Value], kwargs: Mapping[str, Value]) -> Value:
        """Cast and call; the wrapper's key is excluded."""
        if kernel.policy == "fp32_set_opt_dtype":
            return self.set_dtype(kernel, args, kwargs)
        if kernel.policy == "fp32_append_dtype":
            return self.append_dtype(kernel, args, kwargs)
        to = self.target(kernel, args, kwargs)
        return self.invoke(kernel, self.cast_all(kernel, args, kwargs, to), len(args))

    def invoke(self, kernel: Kernel, given: Sequence[tuple[Any, Value]], positional: int) -> Value:
        """Call the op itself."""
        args = [v for _, v in given[:positional]]
        return kernel.overload(*args, **{p.name: v for p, v in given[positional:]})

    def set_dtype(
        self, kernel: Kernel, args: Sequence[Value], kwargs: Mapping[str, Value]
    ) -> Value:
        """Pass ``dtype=float32`` where the caller gave none, if the first argument is eligible."""
        given = {p.name: value for p, value in kernel.given(args, kwargs)}
        if isinstance(args[0], torch.Tensor) and self.eligible(args[0]):
            given["dtype"] = given.get("dtype") or torch.float32
        named = {
            p.name: given.pop(p.name) for p in kernel.parameters if p.kwarg_only and p.name in given
        }
        last = max((i for i, p in enumerate(kernel.parameters) if p.name in given), default=-1)
        positional = [given.get(p.name, p.default_value) for p in kernel.parameters[: last + 1]]
        return kernel.overload(*positional, **named)

    def append_dtype(
        self, kernel: Kernel, args: Sequence[Value], kwargs: Mapping[str, Value]
    ) -> Value:
        """Call the overload that takes a dtype too: float32, if the first argument is eligible."""
        twin = twin_of(kernel.name)
        assert twin is not None
        given = [p.default_value for p in kernel.parameters]
        places = {p.name: i for i, p in enumerate(kernel.parameters)}
        given[: len(args)] = args
        for name, value in kwargs.items():
            given[places[name]] = value
        first = args[0]
        return twin(*given, dtype=torch.float32 if self.eligible(first) else first.dtype)

    def target(
        self, kernel: Kernel, args: Sequence[Value], kwargs: Mapping[str, Value]
    ) -> torch.dtype:
        """Return the dtype that the policy casts to."""
        if kernel.policy == "fp32":
            return torch.float32
        if kernel.policy == "promote":
            return self.promoted(self.asked(kernel, args, kwargs))
        return self.low

    def asked(
        self, kernel: Kernel, args: Sequence[Value], kwargs: Mapping[str, Value]
    ) -> list[torch.Tensor]:
        """Return the tensors that have a say in the promote policy: upstream asks no optional."""
        found: list[torch.Tensor] = []
        for parameter, value in kernel.given(args, kwargs):
            if _CPP and isinstance(parameter.type, torch.OptionalType):
                continue
            found += [t for t in _listed(value) if isinstance(t, torch.Tensor)]
        return found

    def promoted(self, tensors: Iterable[torch.Tensor]) -> torch.dtype:
        """Return the widest dtype of the tensors; upstream knows the autocast dtype and float32."""
        if not _CPP:
            dtypes = {t.dtype for t in tensors if self.eligible(t)} or {self.low}
            return dtypes.pop() if len(dtypes) == 1 else torch.float32
        current = low = self.low
        for tensor in tensors:
            if not self.eligible(tensor):
                continue
            if torch.float32 in (current, tensor.dtype):
                current = torch.float32
            elif not (current is low and tensor.dtype is low):
                raise RuntimeError("Unexpected floating ScalarType in at::autocast::prioritize")
        return current

    def cast_all(
        self,
        kernel: Kernel,
        args: Sequence[Value],
        kwargs: Mapping[str, Value],
        to: torch.dtype,
    ) -> list[tuple[Any, Value]]:
        """Cast what the call is given, in the order of the C++ compiler."""
        given = kernel.given(args, kwargs)
        numbered = list(enumerate(given))
        done = [
            (p, self.cast(kernel, i, p, v, to))
            for i, (p, v) in (reversed(numbered) if _LAST_FIRST else numbered)
        ]
        return done[::-1] if _LAST_FIRST else done

    def cast(self, kernel: Kernel, i: int, parameter: Any, value: Value, to: torch.dtype) -> Value:
        """Cast one argument: a tensor, or the tensors of a list."""
        if isinstance(value, (list, tuple)):
            return [self.cast(kernel, i, parameter, v, to) for v in value]
        if not isinstance(value, torch.Tensor) or not self.casts(kernel, i, parameter, value, to):
            return value
        low = self.low
        if self.cacheable(value, to, low) and torch.is_autocast_cache_enabled():
            return self.cached(value, low)
        return self.convert(value, to)

    def casts(
        self, kernel: Kernel, i: int, parameter: Any, tensor: torch.Tensor, to: torch.dtype
    ) -> bool:
        """Return whether argument number `i` is cast."""
        return tensor.dtype is not to and self.eligible(tensor)

    def eligible(self, tensor: torch.Tensor) -> bool:
        """Return whether autocast may cast a tensor."""
        own = tensor.device.type == DEVICE
        return own and tensor.is_floating_point() and tensor.dtype is not torch.float64

    def cacheable(self, tensor: torch.Tensor, to: torch.dtype, low: torch.dtype) -> bool:
        """Return whether the weight cache may hold the cast of a tensor."""
        return (
            to is low
            and tensor.dtype is torch.float32
            and tensor.requires_grad
            and tensor.is_leaf
            and not tensor._is_view()
            and not torch.is_inference_mode_enabled()
        )

    def cached(self, tensor: torch.Tensor, low: torch.dtype) -> torch.Tensor:
        """Return the cast from torch's own weight cache, which makes it if need be.

        Nothing gives Python that cache; but torch's own kernel of ``prelu`` casts any tensor
        through it and keeps the cast for its backward, with its place in the graph.
        """
        if not _CPP:
            own: Any = next(kept.cache for kept in module._kept if isinstance(kept, Autocast))
            return own.cast(tensor, low)
        # Hooks of our own, or a checkpoint around it would drop what is kept.
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_same, _same):
            if _PRELU is None:
                pytest.skip("torch 2.7 has no torch.library.get_kernel")
            through = _PRELU.call_boxed(KEYSET, tensor, tensor.new_ones(1, dtype=low))
            kept: torch.Tensor = through.grad_fn._saved_self
        return kept

    def convert(self, tensor: torch.Tensor, to: torch.dtype) -> torch.Tensor:
        """Make the cast itself, where nothing is cached."""
        return tensor.to(to)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _listed(value: Value) -> Sequence[Value]:
    return value if isinstance(value, (list, tuple)) else [value]


@contextmanager
def installed(wrapper: Wrapper, policies: Mapping[str, str] = POLICIES) -> Iterator[None]:
    """Register the wrapper over torch's kernels of these ops for a block, and put them back."""
    with registered(
        {
            name: _entry(wrapper, Kernel(name, overload, policy))
            for name, policy in policies.items()
            if (overload := overload_of(name)) is not None
        }
    ):
        yield


def _entry(wrapper: Wrapper, kernel: Kernel) -> Callable[..., Any]:
    # "none" is what an op that is in no list has: the dispatcher passes by.
    if kernel.policy == "none":
        return torch.library.fallthrough_kernel

    def entry(keys: Any, *args: Value, **kwargs: Value) -> Value:
        return wrapper.call(kernel, keys, args, kwargs)

    return entry


@contextmanager
def registered(kernels: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Register Python kernels on the device's autocast key for a block."""
    library = torch.library.Library("aten", "IMPL")
    how = {} if _CPP else {"allow_override": True}  # of kernels in Python
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "Overriding a previously registered kernel"
            for name, kernel in kernels.items():
                library.impl(name, kernel, KEY, with_keyset=True, **how)
        yield
    finally:
        library._destroy()
