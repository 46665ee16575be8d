"""Autocast of the device: a policy table as kernels on the key ``AutocastPrivateUse1``.

``torch.autocast`` turns the key on for a block. A kernel casts its arguments by its op's policy and
calls the op again with the key off. Ops without a kernel must fall through, which the dispatcher
does for no key by default.

Upstream's C++ (aten/src/ATen/autocast_mode.h) does the same for the devices that it knows. Python
cannot reach its cache of weights' casts, so `WeightCache` is a separate one, cleared when torch
clears its own.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from amp_fuzz.policies.tables import PolicyTable, Rule

__all__ = ["Autocast", "WeightCache"]

KEY = "AutocastPrivateUse1"
_OFF = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, KEY))
# The order in which an op's arguments are cast shows in the last bit of a gradient that is summed
# from several casts of one tensor. Upstream's order is its compiler's; GCC casts the last first.
_LAST_FIRST = "GCC" in torch.__config__.show()


class WeightCache:
    """Casts of weights to the autocast dtype, until the outermost context ends.

    A weight that is used twice is cast once, so its gradient is summed before it is cast back.
    """

    def __init__(self) -> None:
        self._casts: dict[
            tuple[int, torch.dtype], tuple[weakref.ref[torch.Tensor], torch.Tensor]
        ] = {}
        self._lock = threading.Lock()

    def clear(self) -> None:
        """Forget every cast."""
        with self._lock:
            self._casts.clear()

    def cast(self, weight: torch.Tensor, to: torch.dtype) -> torch.Tensor:
        """Return the cast of a weight, with a gradient even if a first pass runs without."""
        with self._lock:
            known = self._casts.get((id(weight), to))
            if known is not None and known[0]() is weight:
                return known[1]
            with torch.enable_grad():
                made = weight.to(to)
            if made.requires_grad:  # below autograd, as in a custom op's body, it requires none
                self._casts[id(weight), to] = (weakref.ref(weight), made)
            return made


class Autocast:
    """The autocast kernels of one device type, after one policy table.

    Each method is one decision, so a vendor's own rule is one method of a subclass.
    """

    def __init__(self, device_type: str, table: PolicyTable) -> None:
        self.device_type, self.table = device_type, table
        self.cache = WeightCache()
        self._libraries: dict[str, torch.library.Library] = {}  # dropping them would unregister

    def register(self) -> None:
        """Register the kernels, the fallthrough, and the clearing of the cache."""
        self.fall_through()
        for rule in self.table.rules.values():
            overload = overload_of(rule.overload)
            if overload is not None:  # this torch is older or newer than the rule
                namespace, _, name = rule.overload.rpartition("::")
                self._library(namespace or "aten").impl(name, self.kernel(rule, overload), KEY)
        self.clear_with_torch()

    def fall_through(self) -> None:
        """Let every op without a kernel fall through; otherwise each of them raises."""
        self._library("_").fallback(torch.library.fallthrough_kernel, KEY)

    def clear_with_torch(self) -> None:
        """Clear the cache whenever torch clears its own, at the end of the outermost context."""
        clear_torch = torch.clear_autocast_cache

        @functools.wraps(clear_torch)
        def clear() -> None:
            clear_torch()
            self.clear()

        torch.clear_autocast_cache = clear

    def clear(self) -> None:
        """Forget the casts of weights."""
        self.cache.clear()

    def kernel(self, rule: Rule, overload: Any) -> Callable[..., Any]:
        """Return the kernel of one op."""

        def kernel(*args: Any, **kwargs: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(_OFF):
                return self.decided(rule, overload, args, kwargs)

        return kernel

    def decided(
        self, rule: Rule, overload: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Call an op by its policy, with the method of that name."""
        policy: Callable[..., Any] = getattr(self, rule.policy.value)
        return policy(rule, overload, args, kwargs)

    # -- decisions ------------------------------------------------------------------------------

    def low(self) -> torch.dtype:
        """Return the dtype of the context."""
        return torch.get_autocast_dtype(self.device_type)

    def eligible(self, value: object) -> bool:
        """Return whether a value may be cast: a floating tensor of the device, except float64."""
        return (
            isinstance(value, torch.Tensor)
            and value.device.type == self.device_type
            and value.is_floating_point()
            and value.dtype is not torch.float64
        )

    def cacheable(self, tensor: torch.Tensor, to: torch.dtype) -> bool:
        """Return whether the cast of a tensor is kept: a float32 leaf that requires grad."""
        return (
            torch.is_autocast_cache_enabled()
            and to is self.low()
            and tensor.dtype is torch.float32
            and tensor.requires_grad
            and not tensor._is_view()  # of a view, is_leaf makes a new grad_fn, and may fail
            and tensor.is_leaf
            and not torch.is_inference_mode_enabled()
        )

    def cast(self, value: Any, to: torch.dtype) -> Any:
        """Return an argument for an op that runs in `to`."""
        if isinstance(value, (list, tuple)):
            return [self.cast(v, to) for v in value]
        if not self.eligible(value) or value.dtype is to:
            return value
        return self.cache.cast(value, to) if self.cacheable(value, to) else value.to(to)

    def promoted(self, tensors: Iterable[torch.Tensor]) -> torch.dtype:
        """Return the dtype in which an op of the promote policy runs: its arguments' widest."""
        dtypes = {t.dtype for t in tensors if self.eligible(t)} or {self.low()}
        return dtypes.pop() if len(dtypes) == 1 else torch.float32

    # -- policies -------------------------------------------------------------------------------

    def run(
        self, overload: Any, args: Sequence[Any], kwargs: Mapping[str, Any], to: torch.dtype
    ) -> Any:
        """Call an op with every argument cast."""
        given = [*args, *kwargs.values()]
        order = reversed(given) if _LAST_FIRST else given
        ready = [self.cast(value, to) for value in order]
        ready = ready[::-1] if _LAST_FIRST else ready
        named = dict(zip(kwargs, ready[len(args) :], strict=True))
        return overload(*ready[: len(args)], **named)

    def lower_precision_fp(
        self, rule: Rule, overload: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run in the dtype of the context."""
        return self.run(overload, args, kwargs, self.low())

    def fp32(
        self, rule: Rule, overload: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run in float32."""
        return self.run(overload, args, kwargs, torch.float32)

    def promote(
        self, rule: Rule, overload: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run in the widest dtype among the arguments."""
        return self.run(overload, args, kwargs, self.promoted(_tensors((*args, *kwargs.values()))))

    def fp32_set_opt_dtype(
        self, rule: Rule, overload: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Ask for a float32 result, unless the caller names a dtype."""
        if not self.eligible(args[0]):
            return overload(*args, **kwargs)
        given = {**_named(overload, args), **kwargs}
        if given.get("dtype") is None:
            given["dtype"] = torch.float32
        return _called(overload, given)

    def fp32_append_dtype(
        self, rule: Rule, overload: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Call the overload that takes a dtype, with float32."""
        assert rule.redispatch is not None
        given = {**_named(overload, args, defaults=True), **kwargs}
        given["dtype"] = torch.float32 if self.eligible(args[0]) else args[0].dtype
        return _called(overload_of(rule.redispatch), given)

    def banned(
        self, rule: Rule, overload: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Raise."""
        raise RuntimeError(
            f"aten::{rule.overload} is unsafe to autocast: combine it with the sigmoid before it, "
            "as in torch.nn.functional.binary_cross_entropy_with_logits"
        )

    def _library(self, namespace: str) -> torch.library.Library:
        if namespace not in self._libraries:
            self._libraries[namespace] = torch.library.Library(namespace, "IMPL")
        return self._libraries[namespace]


def overload_of(name: str) -> Any | None:
    """Return the overload of a rule's name, or None if this torch lacks it."""
    namespace, _, own = name.rpartition("::")
    base, _, overload = own.partition(".")
    packet = getattr(getattr(torch.ops, namespace or "aten"), base, None)
    return None if packet is None else getattr(packet, overload or "default", None)


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _named(overload: Any, args: Sequence[Any], *, defaults: bool = False) -> dict[str, Any]:
    """Return the arguments of a call by their names."""
    parameters = overload._schema.arguments
    found = {p.name: p.default_value for p in parameters} if defaults else {}
    return {**found, **{p.name: value for p, value in zip(parameters, args, strict=False)}}


def _called(overload: Any, given: Mapping[str, Any]) -> Any:
    """Call an op with arguments by their names, as its schema takes them."""
    parameters = [p for p in overload._schema.arguments if p.name in given]
    args = [given[p.name] for p in parameters if not p.kwarg_only]
    return overload(*args, **{p.name: given[p.name] for p in parameters if p.kwarg_only})
