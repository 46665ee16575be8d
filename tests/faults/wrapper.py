"""What torch's C++ wrapper around an autocast kernel does, in Python, over the real kernels.

`Wrapper` is an honest copy of aten/src/ATen/autocast_mode.{h,cpp} for one device type, the CPU,
upstream's quirks included; a fault is a subclass that gets one thing wrong. `installed` registers
it over torch's own kernels on ``AutocastCPU``, so that the state, the dispatcher, the context
managers and autograd around it are torch's own. It shares no line with `amp_fuzz.reference`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch._C import DispatchKey, DispatchKeySet

from amp_fuzz.reference import load_table

__all__ = [
    "KEYSET",
    "POLICIES",
    "Kernel",
    "Value",
    "Wrapper",
    "installed",
    "overload_of",
    "registered",
]

# The CPU's table, overload -> policy: what there is to corrupt.
POLICIES: Mapping[str, str] = {
    name: rule.policy.value for name, rule in load_table("cpu").rules.items()
}

_KEY: Any = DispatchKey.AutocastCPU
KEYSET: Any = DispatchKeySet(_KEY)
GET_KERNEL: Any = getattr(torch.library, "get_kernel", None)
"""torch 2.7 has none. A test that needs it is skipped there."""
# Bound before anything is registered over it: see `Wrapper.cached`.
_PRELU: Any = GET_KERNEL and GET_KERNEL("aten::prelu", "AutocastCPU")
# In which order GCC evaluates the arguments of a call, and so in which autocast casts them.
_LAST_FIRST = "GCC" in torch.__config__.show()

Value = Any


def overload_of(name: str) -> Any | None:
    """Return the OpOverload of ``sum.dim_IntList``, or None if this torch lacks it."""
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base, None), overload or "default", None)


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
        return torch.get_autocast_dtype("cpu")

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
        changed = dict(kwargs)
        if isinstance(args[0], torch.Tensor) and self.eligible(args[0]):
            changed["dtype"] = kwargs.get("dtype") or torch.float32
        return kernel.overload(*args, **changed)

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
            if isinstance(parameter.type, torch.OptionalType):
                continue
            found += [t for t in _listed(value) if isinstance(t, torch.Tensor)]
        return found

    def promoted(self, tensors: Iterable[torch.Tensor]) -> torch.dtype:
        """Return the widest dtype of the tensors; upstream knows the autocast dtype and float32."""
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
        return tensor.is_floating_point() and tensor.dtype is not torch.float64

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
        # Hooks of our own, or a checkpoint around it would drop what is kept.
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_same, _same):
            if _PRELU is None:
                pytest.skip("torch 2.7 has no torch.library.get_kernel")
            through = _PRELU.call_boxed(KEYSET, tensor, torch.ones(1, dtype=low))
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
    """Register Python kernels on ``AutocastCPU`` for a block."""
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "Overriding a previously registered kernel"
            for name, kernel in kernels.items():
                library.impl(name, kernel, "AutocastCPU", with_keyset=True)
        yield
    finally:
        library._destroy()
