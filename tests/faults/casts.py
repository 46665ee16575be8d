"""Faults in how arguments are cast and in what the weight cache keeps: mutants of `Wrapper`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch._C import DispatchKey

from tests.faults.fault import Fault, patched
from tests.faults.wrapper import (
    DEVICE,
    KEY,
    KEYSET,
    POLICIES,
    Kernel,
    Value,
    Wrapper,
    installed,
    overload_of,
    registered,
)

__all__ = ["CONTROLS", "FAULTS"]

_FOUND: list[Fault] = []

VALUE = ("bitwise", "nonfinite")
GRAD = ("grad-bitwise", "grad-nonfinite", "grad-missing", "grad-dtype")
TYPE = ("dtype", "raise")


def _fault(name: str, what: str, *kinds: str) -> Callable[[type[Wrapper]], type[Wrapper]]:
    """Make a fault of a mutant: all of the CPU's kernels are replaced by it."""

    def register(mutant: type[Wrapper]) -> type[Wrapper]:
        _FOUND.append(Fault(name, what, kinds, lambda: _installed(mutant)))
        return mutant

    return register


def _installed(mutant: type[Wrapper]) -> AbstractContextManager[None]:
    wrapper = mutant()
    return wrapper.scope() if isinstance(wrapper, OwnCache) else installed(wrapper)


# -- promote --------------------------------------------------------------------------------------


@_fault("promote-first", "promote takes the dtype of the first eligible tensor", *TYPE, *VALUE)
class _PromoteFirst(Wrapper):
    def promoted(self, tensors: Iterable[torch.Tensor]) -> torch.dtype:
        super().promoted(tensors)
        return next((t.dtype for t in tensors if self.eligible(t)), self.low)


@_fault("promote-narrowest", "promote takes the narrowest dtype", *TYPE, *VALUE)
class _PromoteNarrowest(Wrapper):
    def promoted(self, tensors: Iterable[torch.Tensor]) -> torch.dtype:
        super().promoted(tensors)
        dtypes = [t.dtype for t in tensors if self.eligible(t)]
        return min(dtypes, key=lambda d: d.itemsize, default=self.low)


@_fault("promote-low", "promote always takes the autocast dtype", *TYPE, *VALUE)
class _PromoteLow(Wrapper):
    def promoted(self, tensors: Iterable[torch.Tensor]) -> torch.dtype:
        super().promoted(tensors)
        return self.low


@_fault("promote-float32", "promote always takes float32", *TYPE)
class _PromoteFloat32(Wrapper):
    def promoted(self, tensors: Iterable[torch.Tensor]) -> torch.dtype:
        super().promoted(tensors)
        return torch.float32


# Backward passes call cat too: that of lu of a matrix which is not square puts two float32 parts
# together, under the autocast around it. Only the bits of a gradient show it.
@_fault(
    "promote-ignores-lists",
    "promote ignores tensors in a list",
    *TYPE,
    *VALUE,
    "grad-bitwise",
)
class _PromoteIgnoresLists(Wrapper):
    def asked(
        self, kernel: Kernel, args: Sequence[Value], kwargs: Mapping[str, Value]
    ) -> list[torch.Tensor]:
        return super().asked(kernel, [a for a in args if not isinstance(a, (list, tuple))], kwargs)


@_fault("promote-ignores-last", "promote ignores the last tensor", *TYPE, *VALUE)
class _PromoteIgnoresLast(Wrapper):
    def asked(
        self, kernel: Kernel, args: Sequence[Value], kwargs: Mapping[str, Value]
    ) -> list[torch.Tensor]:
        return super().asked(kernel, args, kwargs)[:-1]


# -- which tensors are cast -----------------------------------------------------------------------


@_fault("float64-cast", "float64 tensors are cast too", *TYPE, "grad-bitwise")
class _Float64(Wrapper):
    def eligible(self, tensor: torch.Tensor) -> bool:
        return tensor.is_floating_point()

    def promoted(self, tensors: Iterable[torch.Tensor]) -> torch.dtype:
        return super().promoted(t for t in tensors if t.dtype is not torch.float64)


@_fault("integers-cast", "integer tensors are cast too", *TYPE)
class _Integers(Wrapper):
    def casts(
        self, kernel: Kernel, i: int, parameter: Any, tensor: torch.Tensor, to: torch.dtype
    ) -> bool:
        plain = super().casts(kernel, i, parameter, tensor, to)
        return plain or not (tensor.is_floating_point() or tensor.is_complex())


@_fault(
    "complex-cast", "complex tensors are cast too, and lose their imaginary part", *TYPE, *VALUE
)
class _Complex(Wrapper):
    def casts(
        self, kernel: Kernel, i: int, parameter: Any, tensor: torch.Tensor, to: torch.dtype
    ) -> bool:
        return super().casts(kernel, i, parameter, tensor, to) or tensor.is_complex()


def _skips(
    name: str,
    what: str,
    skipped: Callable[[Kernel, int, Any, torch.Tensor, torch.dtype], bool],
    *kinds: str,
) -> None:
    """Make a fault in which some of the arguments that must be cast are not."""

    class Skips(Wrapper):
        def casts(
            self, kernel: Kernel, i: int, parameter: Any, tensor: torch.Tensor, to: torch.dtype
        ) -> bool:
            plain = super().casts(kernel, i, parameter, tensor, to)
            return plain and not skipped(kernel, i, parameter, tensor, to)

    _fault(name, what, *kinds)(Skips)


def _last_tensor(kernel: Kernel) -> int:
    return max(i for i, p in enumerate(kernel.parameters) if "Tensor" in str(p.type))


_MIXED = (*TYPE, *VALUE, *GRAD)
_skips("first-only", "only the first argument is cast", lambda k, i, p, t, to: i > 0, *_MIXED)
_skips(
    "last-not-cast",
    "the last tensor argument is not cast",
    lambda k, i, p, t, to: i == _last_tensor(k),
    *_MIXED,
)
_skips(
    "keywords-not-cast",
    "tensors passed by keyword (arguments with a default) are not cast",
    lambda k, i, p, t, to: p.kwarg_only or p.has_default_value(),
    *_MIXED,
)
_skips(
    "optional-not-cast",
    "optional tensors (bias, mask, class weights) are not cast",
    lambda k, i, p, t, to: isinstance(p.type, torch.OptionalType),
    *_MIXED,
)
_skips(
    "0-dim-not-cast",
    "0-d tensors are not cast",
    lambda k, i, p, t, to: t.dim() == 0,
    *_MIXED,
)
_skips(
    "empty-not-cast",
    "empty tensors are not cast",
    lambda k, i, p, t, to: t.numel() == 0,
    *_MIXED,
)
_skips(
    "strided-not-cast",
    "non-contiguous tensors are not cast",
    lambda k, i, p, t, to: not t.is_contiguous(),
    *_MIXED,
)
_skips("views-not-cast", "views are not cast", lambda k, i, p, t, to: t._is_view(), *_MIXED)
_skips(
    "constants-not-cast",
    "tensors that do not require grad are not cast",
    lambda k, i, p, t, to: not t.requires_grad,
    *_MIXED,
)
_skips(
    "no-grad-not-cast",
    "nothing is cast under no_grad",
    lambda k, i, p, t, to: not torch.is_grad_enabled(),
    *_MIXED,
)
_skips(
    "inference-not-cast",
    "nothing is cast under inference_mode",
    lambda k, i, p, t, to: torch.is_inference_mode_enabled(),
    *_MIXED,
)
_skips(
    "other-half-not-cast",
    "a 16-bit tensor that is not of the autocast dtype is not cast",
    lambda k, i, p, t, to: (
        t.dtype.itemsize == 2 and t.dtype is not torch.get_autocast_dtype(DEVICE)
    ),
    *_MIXED,
)
_skips(
    "fp32-bfloat16-only",
    "the fp32 policy does nothing in a float16 context",
    lambda k, i, p, t, to: (
        to is torch.float32 and torch.get_autocast_dtype(DEVICE) is torch.float16
    ),
    *_MIXED,
)


# -- the cast itself ------------------------------------------------------------------------------


def _converts(
    name: str, what: str, convert: Callable[[torch.Tensor, torch.dtype], torch.Tensor], *kinds: str
) -> None:
    """Make a fault in the conversion; the cache keeps its casts too."""

    class Converts(OwnCache):
        def convert(self, tensor: torch.Tensor, to: torch.dtype) -> torch.Tensor:
            return convert(tensor, to)

    _fault(name, what, *kinds)(Converts)


class _Cast(torch.autograd.Function):
    """A cast whose backward pass is `wrong(gradient, number of the pass)`."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, to: torch.dtype, wrong: Callable[..., Any]
    ) -> torch.Tensor:
        ctx.dtype, ctx.wrong, ctx.passes = tensor.dtype, wrong, 0
        return tensor.to(to)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.passes += 1
        return ctx.wrong(gradients[0].to(ctx.dtype), ctx.passes), None, None


def _backward(wrong: Callable[[torch.Tensor, int], torch.Tensor | None]) -> Any:
    def convert(tensor: torch.Tensor, to: torch.dtype) -> torch.Tensor:
        made: torch.Tensor = _Cast.apply(tensor, to, wrong)  # type: ignore[no-untyped-call]
        return made

    return convert


def _truncated(tensor: torch.Tensor, to: torch.dtype) -> torch.Tensor:
    if to is torch.float32 or tensor.dtype is not torch.float32:
        return tensor.to(to)
    # Clear the bits that the narrow mantissa has no place for; what is left converts exactly.
    dropped = 16 if to is torch.bfloat16 else 13
    kept = (tensor.detach().view(torch.int32) >> dropped << dropped).view(torch.float32)
    return (tensor + (kept - tensor).detach()).to(to) if tensor.requires_grad else kept.to(to)


class OwnCache(Wrapper):
    """A wrapper with a weight cache of its own, which can be got wrong; honest as it stands."""

    def __init__(self) -> None:
        self.kept: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Install it, and clear its cache where torch clears its own."""
        clear = torch.clear_autocast_cache

        def cleared() -> None:
            clear()
            self.clear()

        with patched(torch, clear_autocast_cache=cleared), installed(self):
            yield

    def clear(self) -> None:
        """Forget the casts, at the end of the outermost context."""
        self.kept.clear()

    def key(self, tensor: torch.Tensor, low: torch.dtype) -> Any:
        """Return what a cast is found by; the dtype is no part of it, upstream."""
        return id(tensor)

    def current(self, tensor: torch.Tensor, made: torch.Tensor) -> bool:
        """Return whether a cast may still be used."""
        return True

    def cached(self, tensor: torch.Tensor, low: torch.dtype) -> torch.Tensor:
        key = self.key(tensor, low)
        entry = self.kept.get(key)
        if entry is None or not self.current(tensor, entry[1]):
            # The tensor is kept too, so that no other takes its id.
            entry = self.kept[key] = (tensor, self.make(tensor, low))
        return entry[1]

    def make(self, tensor: torch.Tensor, low: torch.dtype) -> torch.Tensor:
        """Make the cast that is kept."""
        with torch.enable_grad():
            return self.convert(tensor, low)


_converts(
    "through-float16",
    "casts to bfloat16 go through float16",
    lambda t, to: t.to(torch.float16).to(to),
    *VALUE,
    *GRAD,
)
_converts(
    "through-bfloat16",
    "casts go through bfloat16",
    lambda t, to: t.to(torch.bfloat16).to(to),
    *VALUE,
    *GRAD,
)
_converts("truncated", "casts truncate instead of rounding to nearest", _truncated, *VALUE, *GRAD)
_converts(
    "cast-detached", "no gradient flows through a cast", lambda t, to: t.detach().to(to), *GRAD
)
_converts("gradient-zero", "the gradient of a cast is zero", _backward(lambda g, n: g * 0), *GRAD)
_converts(
    "gradient-doubled", "the gradient of a cast is doubled", _backward(lambda g, n: g * 2), *GRAD
)
_converts(
    "gradient-rounded",
    "the gradient of a cast from float32 is rounded once more",
    _backward(lambda g, n: g.to(torch.float16).to(g.dtype)),
    *GRAD,
)
_converts(
    "second-backward-lost",
    "a second backward pass over a retained graph stops at the casts",
    _backward(lambda g, n: g if n == 1 else None),
    *GRAD,
    "relation",
)


def _low_gradient(tensor: torch.Tensor, to: torch.dtype) -> torch.Tensor:
    if tensor.is_leaf and tensor.requires_grad and tensor.grad is None:
        tensor.grad_dtype = to
    return tensor.to(to)


_converts(
    "gradient-low",
    "the gradient of a weight stays in the dtype it was cast to",
    _low_gradient,
    "grad-dtype",
)


# -- the weight cache -----------------------------------------------------------------------------


def _cache(name: str, what: str, *kinds: str) -> Callable[[type[OwnCache]], type[OwnCache]]:
    def register(mutant: type[OwnCache]) -> type[OwnCache]:
        _fault(name, what, *kinds)(mutant)
        return mutant

    return register


@_cache("cache-survives", "the cache survives the outermost context", *VALUE, *GRAD, *TYPE)
class _Survives(OwnCache):
    def clear(self) -> None:
        pass


@_cache(
    "cache-follows-updates",
    "a weight is cast again after an in-place update",
    *VALUE,
    *GRAD,
)
class _Follows(OwnCache):
    def make(self, tensor: torch.Tensor, low: torch.dtype) -> torch.Tensor:
        made = super().make(tensor, low)
        made.version_cast = tensor._version  # type: ignore[attr-defined]
        return made

    def current(self, tensor: torch.Tensor, made: torch.Tensor) -> bool:
        return bool(made.version_cast == tensor._version)  # type: ignore[attr-defined]


# A value shows it where the cached cast has the dtype of another context.
@_cache("cache-always", "cache_enabled=False is ignored", *GRAD, *VALUE)
class _Always(OwnCache):
    def cast(self, kernel: Kernel, i: int, parameter: Any, value: Value, to: torch.dtype) -> Value:
        before = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(True)
        try:
            return super().cast(kernel, i, parameter, value, to)
        finally:
            torch.set_autocast_cache_enabled(before)


@_cache("cache-never", "nothing is ever cached", *GRAD, *VALUE)
class _Never(OwnCache):
    def cacheable(self, tensor: torch.Tensor, to: torch.dtype, low: torch.dtype) -> bool:
        return False


@_cache("cache-detached", "no gradient flows through a cached cast", *GRAD)
class _Detached(OwnCache):
    def make(self, tensor: torch.Tensor, low: torch.dtype) -> torch.Tensor:
        return tensor.detach().to(low)


@_cache("cache-under-no-grad", "a cast made under no_grad is kept for passes that train", *GRAD)
class _NoGrad(OwnCache):
    def make(self, tensor: torch.Tensor, low: torch.dtype) -> torch.Tensor:
        return self.convert(tensor, low)


@_cache(
    "cache-under-inference",
    "a cast made under inference_mode is kept for passes that train",
    "raise",
    *GRAD,
)
class _Inference(OwnCache):
    def cacheable(self, tensor: torch.Tensor, to: torch.dtype, low: torch.dtype) -> bool:
        with torch.inference_mode(mode=False):
            return super().cacheable(tensor, to, low)


@_cache("cache-views", "leaves that are views are cached", *GRAD)
class _Views(OwnCache):
    def cacheable(self, tensor: torch.Tensor, to: torch.dtype, low: torch.dtype) -> bool:
        kind = to is low and tensor.dtype is torch.float32
        plain = super().cacheable(tensor, to, low)
        inference = torch.is_inference_mode_enabled()
        return plain or (kind and tensor.is_leaf and tensor.requires_grad and not inference)


@_cache("cache-activations", "tensors that are no leaves are cached", *GRAD, *VALUE)
class _Activations(OwnCache):
    def cacheable(self, tensor: torch.Tensor, to: torch.dtype, low: torch.dtype) -> bool:
        kind = to is low and tensor.dtype is torch.float32
        inference = torch.is_inference_mode_enabled()
        return kind and tensor.requires_grad and not tensor._is_view() and not inference


@_cache("cache-by-shape", "weights of one shape share a cast", *VALUE, *GRAD)
class _Shape(OwnCache):
    def key(self, tensor: torch.Tensor, low: torch.dtype) -> Any:
        return tuple(tensor.shape)


# -- which calls are cast -------------------------------------------------------------------------


@_fault(
    "first-call-only",
    "an op casts only at its first call in a context",
    *_MIXED,
    "relation",
    "nondeterminism",
)
class _FirstCall(OwnCache):
    def __init__(self) -> None:
        super().__init__()
        self.called: set[str] = set()

    def clear(self) -> None:
        super().clear()
        self.called.clear()

    def run(self, kernel: Kernel, args: Sequence[Value], kwargs: Mapping[str, Value]) -> Value:
        if kernel.name in self.called:
            return kernel.overload(*args, **kwargs)
        self.called.add(kernel.name)
        return super().run(kernel, args, kwargs)


@_fault(
    "results-kept",
    "an op called again on the same tensors returns the previous result",
    *VALUE,
    *GRAD,
    "raise",
)
class _Results(OwnCache):
    def run(self, kernel: Kernel, args: Sequence[Value], kwargs: Mapping[str, Value]) -> Value:
        key = (kernel.name, tuple(map(id, args)))
        if key not in self.kept:
            self.kept[key] = (args, super().run(kernel, args, kwargs))  # type: ignore[assignment]
        return self.kept[key][1]


_AFTER = torch._C._dispatch_keyset_full_after(getattr(DispatchKey, KEY))


@_fault("autocast-within", "autocast stays on inside an op: its parts are cast again", *_MIXED)
class _Within(Wrapper):
    def call(
        self, kernel: Kernel, keys: Any, args: Sequence[Value], kwargs: Mapping[str, Value]
    ) -> Value:
        with torch._C._ExcludeDispatchKeyGuard(KEYSET):
            given = self.cast_all(kernel, args, kwargs, self.target(kernel, args, kwargs))
        # Past the wrapper of this op, but not of those that it calls.
        positional = [v for _, v in given[: len(args)]]
        named = {p.name: v for p, v in given[len(args) :]}
        return kernel.overload.redispatch(keys & _AFTER, *positional, **named)


def _variant(name: str, suffix: str) -> tuple[str, Any] | None:
    """Return the in-place (``_``) or ``out=`` (``out``) overload of an op, with its name."""
    base, _, overload = name.partition(".")
    if suffix == "_":
        other = f"{base}_.{overload}" if overload else f"{base}_"
    else:
        other = f"{base}.{overload}_out" if overload else f"{base}.out"
    found = overload_of(other)
    return None if found is None else (other, found)


def _variants(wrapper: Wrapper, suffix: str) -> AbstractContextManager[None]:
    """Put kernels on the in-place or ``out=`` variants of the table's ops: torch has none there."""

    def entry(kernel: Kernel) -> Callable[..., Any]:
        def run(keys: Any, *args: Value, **kwargs: Value) -> Value:
            with torch._C._ExcludeDispatchKeyGuard(KEYSET):
                given = wrapper.cast_all(kernel, args, kwargs, wrapper.target(kernel, args, kwargs))
                if suffix == "_":
                    given = [(p, v if n else args[0]) for n, (p, v) in enumerate(given)]
                else:
                    given = [(p, kwargs.get(p.name, v)) for p, v in given]
                return wrapper.invoke(kernel, given, len(args))

        return run

    return registered(
        {
            found[0]: entry(Kernel(found[0], found[1], policy))
            for name, policy in POLICIES.items()
            if (found := _variant(name, suffix)) is not None
        }
    )


_FOUND += [
    Fault(
        "inplace-cast",
        "in-place calls cast too, except the tensor that they write to",
        _MIXED,
        lambda: _variants(Wrapper(), "_"),
    ),
    Fault(
        "out-cast",
        "calls with out= cast too, except the tensor that they write to",
        _MIXED,
        lambda: _variants(Wrapper(), "out"),
    ),
]

FAULTS: Sequence[Fault] = tuple(_FOUND)
CONTROLS: Sequence[Fault] = (
    Fault("honest", "honest kernels, torch's own cache", (), lambda: installed(Wrapper())),
    Fault("honest-cache", "honest kernels, a cache in Python", (), lambda: OwnCache().scope()),
)
