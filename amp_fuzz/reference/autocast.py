"""Autocast, written again in Python, at the same place of the dispatcher.

``autocast`` is a context manager and decorator like `torch.autocast`, driven by a policy table. It
sees what torch's autocast sees: composite ops decompose through it, backward passes run under it,
and it works on any module. It never asks torch's own autocast what to do.

State is what torch's is: enabled and dtype for each device type, and whether casts of weights are
cached, all thread-local; the cache itself is one for the process and is cleared when the outermost
context of a thread ends.
"""

from __future__ import annotations

import functools
import itertools
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.utils.checkpoint

from amp_fuzz.reference import dispatch, flips, tables, torchax
from amp_fuzz.reference.casts import (
    cacheable,
    device_of,
    eligible,
    promoted,
    promoted_in_order,
    taking,
    tensors_of,
)
from amp_fuzz.reference.queries import Queries
from amp_fuzz.reference.tables import (
    DEVICES,
    Policy,
    PolicyTable,
    Rule,
    all_overloads,
    load_table,
)
from amp_fuzz.reference.xla import note

__all__ = [
    "QUIRKS",
    "Cast",
    "KernelCall",
    "as_device",
    "autocast",
    "checkpoint",
    "clear_cache",
    "custom_bwd",
    "custom_fwd",
    "declare_op",
    "grad",
    "imitating",
    "log_kernels",
    "quirks",
    "snapshot",
    "supposing",
    "vmap",
]

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Cast:
    """One cast that the reference made: which tensor (by `id`), from and to which dtype."""

    source: int
    old: torch.dtype
    new: torch.dtype
    cached: bool = False


@dataclass(frozen=True, slots=True)
class KernelCall:
    """One call that reached an autocast kernel of the reference.

    overload: without ``aten::``. policy: its policy. dtypes: of its tensor arguments, in order.
    casts: those that were made. sets_dtype: whether it set the op's ``dtype=`` instead of casting.
    """

    device: str
    overload: str
    policy: Policy
    dtypes: tuple[torch.dtype, ...]
    casts: tuple[Cast, ...]
    sets_dtype: bool = False


class _State:
    """The autocast state of a thread, and of those of autograd that work for it."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.enabled: dict[str, bool] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self.tables: dict[str, PolicyTable] = {}
        self.cache_enabled = True
        self.nesting = 0
        self.resets = 0
        self.answers = True
        self.keeps_casts = True
        self.imitates = 0
        self.log: list[KernelCall] | None = None

    def dtype(self, device: str) -> torch.dtype:
        return self.dtypes.get(device) or _dtype(_table(device).default_dtype)

    def on(self) -> bool:
        """Return whether a call has to come here: it may be cast, or what is wrong imitated."""
        imitates = self.imitates or (self.nesting and torchax.names(_quirks))
        return bool(imitates) or any(self.enabled.values())


_KEY = "amp_fuzz.reference.autocast"


def _here() -> _State:
    """Return the state of this thread.

    A backward pass of an accelerator's tensors runs in a thread of autograd's own, under the state
    of the thread that called it. torch carries the dispatch keys there, and with them whatever an
    extension stashed; Python's thread-local storage stays behind.
    """
    found: _State | None = dispatch.stashed(_KEY)
    if found is None:
        found = _State()
        dispatch.stash(_KEY, found)
    if "backward-thread-cache" in _quirks and found.thread != threading.get_ident():
        return _Behind(found)
    return found


class _Own(threading.local):
    cache_enabled = True
    nesting = 0


_own = _Own()


class _Behind(_State):
    """A state in a thread of autograd's, where torch has another cache flag and nesting depth."""

    def __init__(self, state: _State) -> None:
        object.__setattr__(self, "_whole", state)

    def __getattr__(self, name: str) -> Any:
        return getattr(_own if hasattr(_Own, name) else self._whole, name)

    def __setattr__(self, name: str, value: object) -> None:
        target = _own if hasattr(_Own, name) else self._whole
        setattr(target, name, value)


def _default_dtype(device: str) -> torch.dtype:
    return _here().dtype(device) if device in (*DEVICES, *_lent) else torch.float16


def _is_enabled(device: str | None) -> bool:
    """Answer whether autocast is on; without a device, whether any is.

    Modules ask without a device where their documentation says "autocast is disabled"
    (`torch.nn.MultiheadAttention`, conditions of the fast path).
    """
    if device is None and "query-asks-cuda" in _quirks:
        device = "cuda"
    if device is None:
        return any(_here().enabled.values())
    return _here().enabled.get(device, False)


def _is_any_enabled() -> bool:
    blind = ("mps", "maia") if "any-query-misses-devices" in _quirks else ()
    return any(on for device, on in _here().enabled.items() if device not in blind)


_queries = Queries(
    inside=lambda: _here().nesting > 0 and _here().answers,
    enabled=_is_enabled,
    dtype=_default_dtype,
    any_enabled=_is_any_enabled,
)

torch_answers = _queries.suspended

# (id of a leaf, dtype) -> (the leaf, weakly; its cast). The weak reference guards against a new
# tensor that takes the id of a dead one. The dtype belongs to the key: contexts of two dtypes nest.
_cache: dict[tuple[int, torch.dtype | None], tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}
_cache_lock = threading.Lock()


# In which order the arguments of one op are cast. Autocast's wrapper casts them inside one C++
# call, whose order of evaluation the language leaves open: GCC goes from the last to the first,
# Clang from the first to the last. It shows in the last bit of a gradient that is summed from
# several casts of one tensor, since autograd runs later nodes first.
_LAST_FIRST = "GCC" in torch.__config__.show()


def clear_cache() -> None:
    """Forget every cached cast, in every thread."""
    with _cache_lock:
        _cache.clear()


@contextmanager
def own_cache() -> Iterator[None]:
    """Run a block with a weight cache of its own: it sees no earlier cast and leaves none."""
    with _cache_lock:
        before = dict(_cache)
        _cache.clear()
    try:
        yield
    finally:
        with _cache_lock:
            _cache.clear()
            _cache.update(before)


# Upstream bugs that the reference imitates on request: see `quirks`.
QUIRKS = (
    "any-query-misses-devices",
    "backward-thread-cache",
    "cache-ignores-dtype",
    "cache-ignores-grad-mode",
    "compile-addcdiv",
    "compile-any-uint8",
    "compile-atanh",
    "compile-backward-autocast",
    "compile-cat-empty",
    "compile-checkpoint-zeros",
    "compile-dropout",
    "compile-erf",
    "compile-expm1",
    "compile-fractional-pool",
    "compile-functions",
    "compile-group-norm",
    "compile-hardsigmoid",
    "compile-interpolation",
    "compile-kernels",
    "compile-lstm",
    "compile-matrix-rank",
    "compile-max-pool-indices",
    "compile-mixed-cross",
    "compile-mixed-layer-norm",
    "compile-mixed-mv",
    "compile-norm-statistics",
    "compile-out",
    "compile-promotion",
    "compile-remainder",
    "compile-std",
    "compile-traced-backward",
    "compile-views",
    "compile-weight-cache",
    "compile-weight-norm",
    "compile-written-casts",
    "compile-zero-dim-loss",
    "custom-fwd-setup-context",
    "custom-op-body-off",
    "custom-op-weight-cache",
    "export-checkpoint",
    "export-composites",
    "export-embedding-bag",
    "export-grad-mode-left",
    "export-inference-composites",
    "export-inference-mode",
    "export-loss-out",
    "export-no-grad",
    "export-promotion",
    "export-take",
    "func-grad-ambient-backward",
    "promote-foreign-half",
    "promote-skips-optional",
    "query-asks-cuda",
    "torchax-backward-dtypes",
    "torchax-checkpoint",
    "torchax-checkpoint-functions",
    "torchax-composites",
    "torchax-cut-graph",
    "torchax-dtype-argument",
    "torchax-float64",
    "torchax-formulas",
    "torchax-lowerings",
    "torchax-norms",
    "torchax-out",
    "torchax-promotion",
    "torchax-scalars",
    "torchax-softmax-dtype",
    "torchax-stale-jit",
    "torchax-sums",
    "torchax-svd-signs",
    "torchax-torch-autocast",
    "torchax-type-as",
    "torchscript-addmm",
    "torchscript-autodiff",
    "torchscript-common-subexpressions",
    "torchscript-fallback",
    "torchscript-formulas",
    "torchscript-mul-scalar",
    "torchscript-pass",
    "torchscript-reduction",
    "trace-grad-modes",
    "trace-max-out",
    "trace-weight-cache",
    "transform-before-autocast",
    "xla-depthwise",
    "xla-excess-precision",
    "xla-fast-tanh",
    "xla-gamma",
    "xla-masked-products",
    "xla-subnormals",
    "xla-sums",
)


class _Noting(frozenset[str]):
    """Names that note which names are looked for in them."""

    asked: set[str]

    @classmethod
    def of(cls, names: frozenset[str], asked: set[str]) -> _Noting:
        """Return such names, and note in a set what they are asked."""
        made = cls(names)
        made.asked = asked
        return made

    def __contains__(self, name: object) -> bool:
        self.asked.add(str(name))
        return super().__contains__(name)


_quirks: frozenset[str] = frozenset()


@contextmanager
def quirks(names: Iterable[str]) -> Iterator[None]:
    """Imitate known upstream bugs for a block, in every thread.

    A divergence that vanishes when the reference imitates a bug is explained by that bug, exactly;
    one that does not vanish is another one. Each name has a page in docs/findings/.

    any-query-misses-devices: the question whether any autocast is on, which recurrent modules ask
        before they compare dtypes, leaves out mps and maia.
    backward-thread-cache: in the thread that runs the backward pass of an accelerator's tensors the
        weight cache is on, whatever ``cache_enabled`` says, and a context that is entered there is
        an outermost one: leaving it clears the cache.
    cache-ignores-dtype: the weight cache is keyed by the weight alone, so that under nested
        contexts of two dtypes the cast of the outer one is used in the inner one.
    cache-ignores-grad-mode: a cast made under ``no_grad`` or ``inference_mode`` is cached as it is,
        and no gradient flows through it in a later pass that trains.
    compile-backward-autocast: the backward pass of a compiled program runs under what surrounded
        its forward, wherever it stands.
    compile-any-uint8, compile-atanh, compile-erf, compile-expm1, compile-fractional-pool,
        compile-group-norm, compile-hardsigmoid, compile-max-pool-indices, compile-mixed-cross,
        compile-mixed-layer-norm, compile-mixed-mv, compile-promotion, compile-remainder,
        compile-std, compile-weight-norm, export-promotion: an op is computed as a decomposition or
        a lowering does it (`amp_fuzz.reference.lowered`).
    compile-checkpoint-zeros: a reentrant checkpoint is one that is not, so that no zeros come back
        to what none of its used results depends on.
    compile-dropout: a dropout that drops nothing returns a copy, where eager returns its input.
    compile-functions: a Python function of torch that modes may override is called again from what
        it hands on to them; `torch.nn.functional.l1_loss` does not hand on its weights, and
        `torch.chain_matmul` not its ``out=``.
    compile-kernels: autocast decides about the ops that a graph consists of, not about what their
        kernels call; in an ``inference_mode`` region composite ops are kernels too.
    compile-lstm: an LSTM whose input requires grad, or with a tensor of another dtype than float32
        and bfloat16, is computed cell by cell.
    compile-out: a composite op with an ``out=`` is called without it, so that autocast casts for
        it, and its result is copied; so is any op whose ``out=`` has another dtype.
    compile-views: a view that is made under ``no_grad`` in a program and returned from it
        has a ``grad_fn``.
    compile-weight-cache: a compiled program neither sees nor leaves a cast in the weight cache.
    compile-written-casts: what is computed from a float32 that the program casts to 16 bits takes
        it as it was before, but for ops that are kernels by themselves
        (`amp_fuzz.reference.written`).
    custom-fwd-setup-context: ``custom_fwd`` leaves the state on the first argument of the forward,
        which is no ``ctx`` where the function has a ``setup_context``: its backward raises.
    custom-op-body-off: the body of a custom op runs with autocast off, as a fake kernel does, and
        what stands in a graph of AOTAutograd.
    custom-op-weight-cache: a weight's cast that is made in the body of a custom op, and has no
        history there, stays in the weight cache.
    export-checkpoint: in an exported program a reentrant checkpoint is its body under ``no_grad``,
        under which what comes after it is, too, and so is one in another that is not reentrant.
    export-composites: an op that is made of others and has no policy of its own is computed without
        autocast, as where an export is decomposed.
    export-grad-mode-left: in an exported program an error in a ``no_grad`` region leaves gradients
        off.
    export-embedding-bag, export-loss-out, export-take: a call raises as it does where it is
        exported, or the export decomposed.
    export-inference-composites: so it is in inference mode, where any program is exported.
    export-inference-mode: in an exported program an inference mode region is its body.
    export-no-grad: in an exported program a ``no_grad`` region inside an autocast region is its
        body, and gradients are on after it; a checkpoint's is, too.
    func-grad-ambient-backward: under an autocast context `torch.func.grad` runs the backward ops
        under that context too.
    promote-foreign-half: a 16-bit input that is not of the autocast dtype raises in an op of the
        ``promote`` policy, unless an argument before it is float32.
    promote-skips-optional: an optional tensor has no say in the ``promote`` policy.
    query-asks-cuda: ``torch.is_autocast_enabled()`` without a device is about cuda, so that modules
        which ask so take their fast path under the autocast of any other device.
    torchax-backward-dtypes: autocast casts what products are given below autograd: their gradients
        are products with what was given, not with its casts.
    torchax-checkpoint: a checkpoint is recomputed under whatever surrounds the backward pass.
    torchax-checkpoint-functions: what a checkpoint recomputes torchax does not see as functions,
        but as the ops that these are made of (the backend's part).
    torchax-composites: a composite op has no policy, the ops that it is made of have theirs; those
        that torchax computes whole (`OPAQUE`) have none, nor has what they are made of, unless
        another function calls them.
    torchax-cut-graph: what torchax computes above autograd has no history: what functions of
        `amp_fuzz.reference.torchax.CUTS` return, and casts by ``to`` (the backend's part).
    torchax-dtype-argument: sum, nansum and vector norms know no ``dtype=``, nor does cumsum of a
        tensor of no dimension; cumprod gives such integers back (`amp_fuzz.reference.torchax`).
    torchax-float64: float64 tensors are cast like any others.
    torchax-formulas: cumsum, cumprod, fmod, gelu, sigmoid, exp2, log_softmax and
        binary_cross_entropy_with_logits round each step of other formulas in 16 bits; derivatives
        of quotients, maxima, clamp, atan2, Cholesky factors and two losses are JAX's.
    torchax-lowerings: slice_scatter of a negative dimension writes everywhere, embedding_bag has no
        weights, cholesky_inverse is that of ``x @ x.mH``, eigh of the mean of both triangles; the
        largest of a dimension gives its gradient to all that are equal; pow takes roots of -inf for
        those of inf; lgamma and digamma give float32, complex complex64; embedding does not scale
        gradients by frequency; empty tensors have no say in what cat gives; cdist of order inf is
        a root of a sum of powers.
    torchax-norms: layer, group and batch norms, vector and weight norms, and logaddexp are computed
        step by step in the dtype of their input, and statistics have gradients; that of a norm of
        zeros is NaN.
    torchax-out: what is given as ``out=`` to some ops becomes what they return, with its dtype and
        shape; other ops do not write it (the backend's part).
    torchax-promotion: a tensor of no dimension takes part in type promotion as any other, and
        kernels that refuse inputs of two dtypes promote them; softmax takes integers.
    torchax-scalars: a Python number is rounded to the 16-bit dtype of the tensor it meets.
    torchax-softmax-dtype: softmax knows no ``dtype=`` in a program whose first call is a pass in
        inference_mode (the backend's part).
    torchax-stale-jit: a program runs under the autocast of its first call (the backend's part).
    torchax-sums: addmm, linear, convolutions and others round their product before they add to it.
    torchax-svd-signs: singular vectors have the signs that were observed, which U and V share
        (`amp_fuzz.reference.gauge`).
    torchax-torch-autocast: a context casts nothing.
    torchax-type-as: ``x.type_as(y)`` changes x itself, and returns it (the backend's part).
    torchscript-addmm: an addmm without factors is a product, which is rounded, and a sum
        (`amp_fuzz.reference.formulas`).
    torchscript-autodiff: from the third call on, the gradients of a scripted program come from
        TorchScript's own formulas, which cast and round elsewhere.
    torchscript-common-subexpressions: of two calls with the same arguments one is made, though the
        other stands in another grad mode (`amp_fuzz.backends.merged`).
    torchscript-fallback: beside torchscript-pass, what was profiled as needing no grad, and is
        given what does, is cast once more; an addmm there is a product, and a sum in float32.
    torchscript-formulas: the gradients of relu, clamp, where, addcmul, div and softplus are
        computed as TorchScript does, without autocast too (`amp_fuzz.reference.formulas`).
    torchscript-mul-scalar: a number beyond the range of float16 is infinite where a float16 tensor
        is multiplied with it in place (`amp_fuzz.reference.formulas`).
    torchscript-pass: a scripted or traced program is cast after TorchScript's own list, on top of
        the autocast around it (`amp_fuzz.reference.torchscript`).
    torchscript-reduction: losses that are called by their overload without `reduction` take the
        mean, as their schema says.
    trace-grad-modes: the functions of `torch.nn.functional` know no ``no_grad``.
    trace-max-out: max and min of all elements with ``out=`` are those of two tensors, element by
        element; what they should write to is taken for the result from there on.
    trace-weight-cache: a cast that stands in the weight cache when a trace begins is a constant of
        the trace.
    transform-before-autocast: inside `torch.func.grad` and `vmap` autocast is not asked about the
        op that was called, but about those that the transform makes of it, at each level again.
    xla-depthwise: a convolution of float64 in which each group has one channel also multiplies the
        channels of the others, with 0 (`amp_fuzz.reference.xla`).
    xla-excess-precision: what is computed from a 16-bit result takes it as it was before it was
        rounded (`amp_fuzz.reference.xla`).
    xla-fast-tanh: tanh of float32, also in gelu and mish, is a quotient of polynomials, off by up
        to 4.3 units of 2^-24 where it is near 1 (`amp_fuzz.reference.xla`).
    xla-gamma: lgamma and digamma are computed by Lanczos' approximation, which cancels near 1 and 2
        (`amp_fuzz.reference.xla`).
    xla-masked-products: a product with a mask is 0 where the mask is off, whatever the other factor
        is: a program that XLA compiles selects (`amp_fuzz.reference.lowered`).
    xla-subnormals: shadows take subnormal numbers for 0 at any op, half of the time: XLA's kernels
        for the CPU do, and its moves do not.
    xla-sums: sums, means and `mse_loss` of float32 lose in the shadows what a sum loses that adds
        one term after the other (`amp_fuzz.reference.sums`).
    """
    global _quirks
    names = frozenset(names)
    if unknown := names - set(QUIRKS):
        raise ValueError(f"quirks={sorted(unknown)!r} are unknown: use {', '.join(QUIRKS)}")
    before, _quirks = _quirks, names
    if isinstance(before, _Noting):
        _quirks = _Noting.of(names, before.asked)
    try:
        yield
    finally:
        _quirks = before
        if not _lendable(before):
            _take_back()


def active_quirks() -> frozenset[str]:
    """Return the quirks that are being imitated."""
    return _quirks


@contextmanager
def asking() -> Iterator[set[str]]:
    """Collect the quirks that the reference asks for by ``in``, in any thread.

    It does the same with one that it does not ask for as without it.
    """
    global _quirks
    asked: set[str] = set()
    before, _quirks = _quirks, _Noting.of(_quirks, asked)
    try:
        yield asked
    finally:
        _quirks = before


_supposed: Mapping[str, Policy | None] = {}


@contextmanager
def supposing(policies: Mapping[str, Policy | None]) -> Iterator[None]:
    """Give ops another policy than their table does, or none, for a block and in every thread.

    policies: by overload, as in `Rule.overload`; one that the device's table has not stays without.
    A divergence that vanishes under it is one of that policy, whatever it shows as.
    """
    global _supposed
    before, _supposed = _supposed, dict(policies)
    try:
        yield
    finally:
        _supposed = before


# Tables of device types that have none of their own: see `as_device`.
_lent: dict[str, PolicyTable] = {}


@contextmanager
def as_device(device_type: str, table: PolicyTable, *, tensors: str = "") -> Iterator[None]:
    """Give a device type a policy table for a block, in every thread.

    It may be any name: of a device that came with no table, or of one that is not here, as which
    the tensors of another device type are taken, by `tensors`: then these are cast where they
    would be if they were of `device_type`.
    """
    before = _lent.get(device_type)
    _lent[device_type] = table
    try:
        with taking(tensors or device_type, device_type):
            yield
    finally:
        _restore(_lent, device_type, before)


def _table(device: str) -> PolicyTable:
    return _lent.get(device) or _own_table(device)


def supposed() -> Mapping[str, Policy | None]:
    """Return the policies that are supposed."""
    return _supposed


@functools.cache
def _own_table(device: str) -> PolicyTable:
    return load_table(device)


# Ops of the user's that have no policy: what their bodies call is cast.
_bodies: set[str] = set()


def declare_op(overload: str, rules: Mapping[str, Rule]) -> None:
    """Tell the reference of an op of the user's: its rule for each device type that has one.

    Without one its body runs under the autocast around it, as any Python does.
    """
    for device, rule in rules.items():
        tables.declare(device, rule)
    _bodies.discard(overload)
    if not rules:
        _bodies.add(overload)
        _register([overload])
    _own_table.cache_clear()


def _dtype(name: str) -> torch.dtype:
    return cast(torch.dtype, getattr(torch, name))


_registered: set[tuple[str, str]] = set()
_keys: tuple[str, ...] = (dispatch.OWN,)


def _register(names: Iterable[str]) -> None:
    for name, key in itertools.product(names, _keys):
        if (name, key) not in _registered and (name, key) not in _passing:
            overload = dispatch.overload_of(name)
            if overload is None and "::" in name:
                continue  # an op of the user's, which may still come
            _registered.add((name, key))
            if overload is not None:  # this torch is older or newer than the rule
                dispatch.register(name, _kernel(name, overload, key), key)


# Ops without a policy of which something wrong is imitated. Their kernels go with the quirk: some
# of these ops are called with numbers in the place of tensors, which no kernel can hand on.
_passing: set[tuple[str, str]] = set()


def _lend(names: Iterable[str]) -> None:
    for name, key in itertools.product(names, _keys):
        overload = dispatch.overload_of(name)
        known = (name, key) in _registered or (name, key) in _passing
        if overload is not None and not known:
            _passing.add((name, key))
            dispatch.register(name, _kernel(name, overload, key), key, lent=True)


def _lendable(names: frozenset[str]) -> tuple[str, ...]:
    """Return the ops without a policy whose calls may go wrong under some quirks."""
    return (*torchax.names(names), *_composites(names))


def _composites(names: frozenset[str]) -> frozenset[str]:
    found = {"export-composites", "export-inference-composites"} & names
    return dispatch.functional_composites() if found else frozenset()


def _comes_apart(name: str) -> bool:
    """Return whether a composite op comes apart below autocast."""
    if name not in _composites(_quirks):
        return False
    return "export-composites" in _quirks or torch.is_inference_mode_enabled()


def _take_back() -> None:
    if _passing:
        _passing.clear()
        dispatch.take_back()


def _kernel(name: str, overload: Any, key: str) -> Callable[..., Any]:
    """Return the kernel for an overload: one for all devices, since they share the key."""
    whole = key == dispatch.FIRST and not dispatch.is_composite(overload)

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        found = _rule(name, args, kwargs)
        if name in _bodies and "custom-op-body-off" in _quirks:
            with dispatch.exclude():
                return overload(*args, **kwargs)
        called = torchax.made(name, _quirks) or overload
        if "torchax-composites" in _quirks:
            if name in torchax.OPAQUE and not torchax.is_opaque(name):
                called = overload
            apart = torchax.TAKEN_APART.get(name)
            if apart and (made := apart(*args, **kwargs)) is not NotImplemented:
                return made
            if torchax.is_opaque(name):
                with dispatch.exclude():
                    return called(*args, **kwargs)
            if dispatch.is_composite(overload):
                found = None
        if "torchax-backward-dtypes" in _quirks and name == "matmul":
            found = None  # a product of those that it is made of
        if (deciding := flips.current()) is not None:
            found = _decided(deciding, found, name, args, kwargs)
        if found is None and whole:  # what its batching rule calls is no call of the program
            with dispatch.exclude():
                return overload(*args, **kwargs)
        if found is None and (
            called is not overload or torchax.numbers(name, args) or _comes_apart(name)
        ):
            with dispatch.exclude():
                return called(*args, **kwargs)
        if found is None:
            return overload.redispatch(dispatch.after(keyset, key), *args, **kwargs)
        device, rule = found
        return _POLICIES[rule.policy](_Caster(device, rule), called, args, kwargs)

    return kernel


def _rule(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[str, Rule] | None:
    """Return the device whose autocast handles a call, and its rule for the op.

    That is the enabled device which has a tensor among the arguments; an accelerator comes before
    the CPU, as in the order of torch's dispatch keys.
    """
    state = _here()
    enabled = [d for d, on in state.enabled.items() if on]
    if not enabled or "torchax-torch-autocast" in _quirks:
        return None
    present = {device_of(t) for t in tensors_of((*args, *kwargs.values()))}
    here = [d for d in enabled if d in present]
    if not here:
        return None
    device = here[0] if len(here) == 1 else min(here, key=lambda d: d == "cpu")
    rule = state.tables[device].rules.get(name)
    if rule is not None and name in _supposed:
        policy = _supposed[name]
        return None if policy is None else (device, replace(rule, policy=policy))
    return None if rule is None else (device, rule)


def _decided(
    deciding: flips.Flips,
    found: tuple[str, Rule] | None,
    name: str,
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> tuple[str, Rule] | None:
    """Return the rule of a call as a flip has it; that of an op without a rule may be one."""
    device = found[0] if found else _asked_device(args, kwargs)
    if device is None:
        return None
    own = found[1].policy if found else None
    policy = deciding.policy(name, own)
    if policy is own:
        return found
    return None if policy is None else (device, Rule(name, policy, "", "a flip"))


def _asked_device(args: Sequence[Any], kwargs: dict[str, Any]) -> str | None:
    present = {device_of(t) for t in tensors_of((*args, *kwargs.values()))}
    return next((d for d, on in _here().enabled.items() if on and d in present), None)


class _Caster:
    """Casts the arguments of one call, and logs it."""

    __slots__ = ("casts", "device", "low", "rule")

    def __init__(self, device: str, rule: Rule) -> None:
        self.device, self.rule = device, rule
        self.low = _here().dtype(device)
        if (deciding := flips.current()) is not None and deciding.decisions:
            self.low = deciding.low(self.low)
        self.casts: list[Cast] = []

    def log(self, args: Sequence[Any], kwargs: dict[str, Any], *, sets_dtype: bool = False) -> None:
        if (log := _here().log) is not None:
            dtypes = tuple(t.dtype for t in tensors_of((*args, *kwargs.values())))
            log.append(
                KernelCall(
                    self.device,
                    self.rule.overload,
                    self.rule.policy,
                    dtypes,
                    tuple(self.casts),
                    sets_dtype,
                )
            )

    def run(
        self, overload: Any, args: Sequence[Any], kwargs: dict[str, Any], to: torch.dtype
    ) -> Any:
        """Cast every eligible tensor to `to` and call the op with autocast off."""
        given = [*args, *kwargs.values()]
        if _LAST_FIRST:
            cast_args = [self._argument(a, to) for a in reversed(given)][::-1]
            self.casts.reverse()
        else:
            cast_args = [self._argument(a, to) for a in given]
        self.log(args, kwargs)
        n = len(args)
        return overload(*cast_args[:n], **dict(zip(kwargs, cast_args[n:], strict=True)))

    def _argument(self, arg: Any, to: torch.dtype) -> Any:
        if isinstance(arg, torch.Tensor):
            return self._cast(arg, to)
        if isinstance(arg, (list, tuple)):
            return [self._cast(a, to) if isinstance(a, torch.Tensor) else a for a in arg]
        return arg

    def _cast(self, tensor: torch.Tensor, to: torch.dtype) -> torch.Tensor:
        if tensor.dtype is to or not _eligible(tensor, self.device):
            return tensor
        deciding = flips.current()
        if deciding is not None and deciding.leaves_out(tensor.dtype, to):
            return tensor
        cached = _here().cache_enabled and cacheable(tensor, to, self.low) and _may_train_later()
        self.casts.append(Cast(id(tensor), tensor.dtype, to, cached))
        return _cached(tensor, to) if cached else tensor.to(to)


def _eligible(tensor: torch.Tensor, device: str) -> bool:
    if "torchax-float64" in _quirks and tensor.dtype is torch.float64:
        return device_of(tensor) == device
    return eligible(tensor, device)


def _may_train_later() -> bool:
    """Return whether a cast made now may serve a pass that trains: not in inference mode."""
    return not torch.is_inference_mode_enabled() or "cache-ignores-grad-mode" in _quirks


def _cached(tensor: torch.Tensor, to: torch.dtype) -> torch.Tensor:
    """Return the cached cast of a weight, making it first if need be.

    It is made with grad enabled whatever the mode, so that a first pass under ``no_grad`` does not
    leave a cast behind through which no gradient flows; one that is made below autograd, where none
    can flow, is not kept. It is not made anew when the weight was updated in place inside the
    outermost context.
    """
    kind = None if "cache-ignores-dtype" in _quirks else to
    with _cache_lock:
        entry = _cache.get((id(tensor), kind))
        if entry is not None and entry[0]() is tensor:
            return entry[1]
        with torch.set_grad_enabled(
            torch.is_grad_enabled() or "cache-ignores-grad-mode" not in _quirks
        ):
            made = tensor.to(to)
        if _here().keeps_casts:
            _cache[id(tensor), kind] = (weakref.ref(tensor), made)
        return made


def _lower(c: _Caster, overload: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    with dispatch.exclude():
        if "torchax-backward-dtypes" in _quirks and torchax.is_product(c.rule.overload, args):
            with torch.no_grad():
                made = c.run(overload, args, kwargs, c.low)
            return torchax.differentiated(c.rule.overload, made, args, kwargs)
        return c.run(overload, args, kwargs, c.low)


def _fp32(c: _Caster, overload: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    with dispatch.exclude():
        return c.run(overload, args, kwargs, torch.float32)


def _promote(c: _Caster, overload: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    with dispatch.exclude():
        asked = tensors_of((*args, *kwargs.values()))
        if "promote-skips-optional" in _quirks:
            parameters = {p.name: p for p in overload._schema.arguments}
            given = {**dict(zip(parameters, args, strict=False)), **kwargs}
            optional = torch.OptionalType.ofTensor()
            asked = tensors_of(v for name, v in given.items() if parameters[name].type != optional)
        if "promote-foreign-half" in _quirks:
            to = promoted_in_order(asked, c.device, c.low)
        else:
            to = promoted(asked, c.device, c.low)
        return c.run(overload, args, kwargs, to)


def _set_dtype(c: _Caster, overload: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``softmax(x)`` runs as ``softmax(x, dtype=float32)``, unless the caller gave a dtype."""
    with dispatch.exclude():
        first = args[0]
        sets = isinstance(first, torch.Tensor) and eligible(first, c.device)
        c.log(args, kwargs, sets_dtype=sets)
        if not sets:
            return overload(*args, **kwargs)
        args = list(args)
        for i, parameter in enumerate(overload._schema.arguments):
            if parameter.name != "dtype":
                continue
            if i < len(args):
                args[i] = torch.float32 if args[i] is None else args[i]
            elif kwargs.get("dtype") is None:
                kwargs = {**kwargs, "dtype": torch.float32}
        return overload(*args, **kwargs)


def _cast_inputs(c: _Caster, overload: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Cast the inputs of a custom op with `register_autocast`; its body runs without autocast."""
    to = _dtype(cast(str, c.rule.cast_inputs))
    with dispatch.exclude():
        given = tensors_of((*args, *kwargs.values()))
        c.casts += [
            Cast(id(t), t.dtype, to) for t in given if t.dtype is not to and eligible(t, c.device)
        ]
        c.log(args, kwargs)
        return overload(
            *(cast_eligible(a, c.device, to) for a in args),
            **{k: cast_eligible(a, c.device, to) for k, a in kwargs.items()},
        )


def _append_dtype(c: _Caster, overload: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``norm(x, p)`` runs as the overload of ``norm`` that takes a dtype."""
    with dispatch.exclude():
        first = args[0]
        dtype = torch.float32 if eligible(first, c.device) else first.dtype
        c.log(args, kwargs, sets_dtype=True)
        target = dispatch.overload_of(cast(str, c.rule.redispatch))
        if target is None:
            raise RuntimeError(f"{c.rule.overload} has no overload {c.rule.redispatch}")
        names = [p.name for p in overload._schema.arguments]
        defaults = {p.name: p.default_value for p in overload._schema.arguments}
        given = {**defaults, **dict(zip(names, args, strict=False)), **kwargs, "dtype": dtype}
        wanted = target._schema.arguments
        positional = [given[p.name] for p in wanted if not p.kwarg_only]
        keywords = {p.name: given[p.name] for p in wanted if p.kwarg_only}
        return target(*positional, **keywords)


def _banned(c: _Caster, overload: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    c.log(args, kwargs)
    raise RuntimeError(
        f"aten::{c.rule.overload} is unsafe to autocast: combine it with the sigmoid before it, as "
        "in torch.nn.functional.binary_cross_entropy_with_logits"
    )


_POLICIES: dict[Policy, Callable[..., Any]] = {
    Policy.LOWER_PRECISION_FP: _lower,
    Policy.FP32: _fp32,
    Policy.FP32_SET_OPT_DTYPE: _set_dtype,
    Policy.FP32_APPEND_DTYPE: _append_dtype,
    Policy.PROMOTE: _promote,
    Policy.BANNED: _banned,
    Policy.CAST_INPUTS: _cast_inputs,
}


class _Saved(threading.local):
    """What one context will restore, in each thread: a decorated function may run in several."""

    def __init__(self) -> None:
        self.states: list[tuple[Any, ...]] = []


class autocast:
    """Run a block, or a function, under the reference's autocast.

    Args:
        device_type: the device type whose tensors are cast: "cpu", "cuda", "xpu", "mps", "mtia",
            "maia", or whatever `table` is for.
        dtype: what ``lower_precision_fp`` ops run in; None is the current autocast dtype of the
            device, at first its default. A dtype that the device's table does not support warns
            and disables, as `torch.autocast` does.
        enabled: False disables autocast in the block.
        cache_enabled: whether casts of float32 leaves that require grad are cached; None keeps the
            current setting.
        table: a policy table to use instead of the one shipped for the device type.

    Example::

        with amp_fuzz.reference.autocast("cpu", dtype=torch.bfloat16):
            output = model(input)

    Source of the behaviour: https://docs.pytorch.org/docs/stable/amp.html.
    """

    def __init__(
        self,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
        *,
        table: PolicyTable | None = None,
    ) -> None:
        if table is None and device_type not in (*DEVICES, *_lent):
            raise ValueError(
                f"device_type={device_type!r} has no policy table: use one of "
                f"{', '.join(DEVICES)}, or give table="
            )
        self.device = device_type
        self.table = table or _table(device_type)
        self.dtype = dtype or _here().dtypes.get(device_type) or _dtype(self.table.default_dtype)
        self.cache_enabled = _here().cache_enabled if cache_enabled is None else cache_enabled
        if enabled and str(self.dtype).removeprefix("torch.") not in self.table.supported_dtypes:
            warnings.warn(
                f"autocast for {device_type} supports {', '.join(self.table.supported_dtypes)}, "
                f"not {self.dtype}: disabled",
                stacklevel=2,
            )
            enabled = False
        self.enabled = enabled
        self._saved = _Saved()

    def __enter__(self) -> autocast:
        s, d = _here(), self.device
        _register(self.table.rules)
        _lend(_lendable(_quirks))
        before = s.enabled.get(d, False), s.dtypes.get(d), s.tables.get(d), s.cache_enabled
        self._saved.states.append((s.resets, *before))
        s.enabled[d], s.dtypes[d], s.tables[d] = self.enabled, self.dtype, self.table
        s.cache_enabled = self.cache_enabled
        s.nesting += 1
        _queries.enter()
        dispatch.switch(s.on())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        s, d = _here(), self.device
        resets, enabled, dtype, table, cache_enabled = self._saved.states.pop()
        if s.resets != resets:  # it was left behind, and what it had set is gone
            return
        _queries.leave()
        s.nesting -= 1
        if s.nesting == 0:
            clear_cache()
        s.enabled[d], s.cache_enabled = enabled, cache_enabled
        _restore(s.dtypes, d, dtype)
        _restore(s.tables, d, table)
        dispatch.switch(s.on())

    def __call__(self, function: F) -> F:
        @functools.wraps(function)
        def decorated(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return cast(F, decorated)


def _restore(mapping: dict[str, Any], key: str, value: Any) -> None:
    if value is None:
        mapping.pop(key, None)
    else:
        mapping[key] = value


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The autocast state of a thread at one moment."""

    contexts: tuple[tuple[str, torch.dtype, bool, bool, PolicyTable | None], ...]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Enter the same state again, as a new nested context."""
        with ExitStack() as stack:
            for device, dtype, enabled, cache, table in self.contexts:
                stack.enter_context(autocast(device, dtype, enabled, cache, table=table))
            yield

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Disable the autocast of these devices."""
        with ExitStack() as stack:
            for device, dtype, _, cache, table in self.contexts:
                stack.enter_context(autocast(device, dtype, False, cache, table=table))
            yield


def snapshot(*devices: str) -> Snapshot:
    """Return the state of these devices, and of the CPU."""
    return Snapshot(
        tuple(
            (
                d,
                _here().dtype(d),
                _here().enabled.get(d, False),
                _here().cache_enabled,
                _here().tables.get(d),
            )
            for d in dict.fromkeys((*devices, "cpu"))
        )
    )


def enabled_devices() -> list[str]:
    """Return the device types whose autocast is on in this thread, accelerators first."""
    return sorted((d for d, on in _here().enabled.items() if on), key=lambda d: d == "cpu")


@contextmanager
def imitating() -> Iterator[None]:
    """Imitate for a block what is wrong with single ops, with autocast or without: `quirks`."""
    _lend(_lendable(_quirks))
    state = _here()
    state.imitates += 1
    dispatch.switch(state.on())
    try:
        yield
    finally:
        state.imitates -= 1
        dispatch.switch(state.on())


@contextmanager
def keeping_no_casts() -> Iterator[None]:
    """Make casts of weights for a block without keeping them in the cache."""
    before, _here().keeps_casts = _here().keeps_casts, False
    try:
        yield
    finally:
        _here().keeps_casts = before


@contextmanager
def _answering(answers: bool) -> Iterator[None]:
    before, _here().answers = _here().answers, answers
    try:
        yield
    finally:
        _here().answers = before


def checkpoint(device: str) -> Callable[..., Any]:
    """Return `torch.utils.checkpoint.checkpoint` as it behaves under the reference.

    The recomputation runs under the autocast state of the forward pass, whatever surrounds the
    backward pass (documented for ``preserve_rng_state`` and autocast alike).

    Under the quirk ``compile-checkpoint-zeros`` none is reentrant, as none is that dynamo makes;
    under ``torchax-checkpoint`` the state is not restored.
    """

    def run(function: Callable[..., Any], *args: Any, use_reentrant: bool) -> Any:
        use_reentrant = use_reentrant and "compile-checkpoint-zeros" not in _quirks
        state = snapshot(device)
        first = [True]

        def body(*inputs: Any) -> Any:
            with _answering(True):
                if first.pop() if first else False:
                    return function(*inputs)
                if "torchax-checkpoint" in _quirks:
                    note(["checkpoint"])
                    return function(*inputs)
                with state.restored():
                    return function(*inputs)

        # torch's checkpoint asks for the autocast state, to restore torch's own: it must not be
        # told the reference's.
        with _answering(False):
            return torch.utils.checkpoint.checkpoint(body, *args, use_reentrant=use_reentrant)

    return run


def custom_fwd(*, device_type: str, cast_inputs: torch.dtype | None = None) -> Callable[[F], F]:
    """Like `torch.amp.custom_fwd`: remember the state for the backward.

    cast_inputs: in a region where autocast is on, cast the eligible inputs to this dtype and run
    the forward with autocast disabled; elsewhere it has no effect.

    A forward that is given no ``ctx``, as where the function has a ``setup_context``, keeps the
    state of its latest call itself.
    """

    def decorate(forward: F) -> F:
        @functools.wraps(forward)
        def decorated(*args: Any, **kwargs: Any) -> Any:
            apart = "custom-fwd-setup-context" not in _quirks and not _is_ctx(args)
            keeper: Any = decorated if apart else args[0]
            enabled = _here().enabled.get(device_type, False)
            keeper._reference_state = _ForwardState(
                _here().dtype(device_type),
                enabled and cast_inputs is None,
                _here().tables.get(device_type),
            )
            if cast_inputs is None or not enabled:
                return forward(*args, **kwargs)
            with autocast(device_type, enabled=False):
                args = tuple(cast_eligible(a, device_type, cast_inputs) for a in args)
                kwargs = {k: cast_eligible(v, device_type, cast_inputs) for k, v in kwargs.items()}
                return forward(*args, **kwargs)

        return cast(F, decorated)

    return decorate


class _ForwardState(NamedTuple):
    """The autocast state under which the operations of a forward ran."""

    dtype: torch.dtype
    enabled: bool
    table: PolicyTable | None


def _is_ctx(args: Sequence[Any]) -> bool:
    return bool(args) and isinstance(args[0], torch.autograd.function.FunctionCtx)


def cast_eligible(value: Any, device: str, to: torch.dtype) -> Any:
    """Cast an argument, or what stands in a list, if it is eligible."""
    if isinstance(value, torch.Tensor):
        return value.to(to) if eligible(value, device) else value
    if isinstance(value, (list, tuple)):
        return type(value)(cast_eligible(v, device, to) for v in value)
    return value


def custom_bwd(*, device_type: str) -> Callable[[F], F]:
    """Like `torch.amp.custom_bwd`: run the backward under the state of the forward."""

    def decorate(backward: F) -> F:
        @functools.wraps(backward)
        def decorated(ctx: Any, *args: Any, **kwargs: Any) -> Any:
            kept: _ForwardState | None = getattr(ctx, "_reference_state", None)
            if kept is None and "custom-fwd-setup-context" in _quirks:
                name = type(ctx).__name__
                raise AttributeError(f"'{name}' object has no attribute '_fwd_used_autocast'")
            state = kept or ctx._forward_cls.forward._reference_state
            with autocast(device_type, state.dtype, state.enabled, table=state.table):
                return backward(ctx, *args, **kwargs)

        return cast(F, decorated)

    return decorate


def grad(device: str) -> Callable[..., Any]:
    """Return `torch.func.grad` as it behaves under the reference.

    "Backward ops run in the same type that autocast used for corresponding forward ops": autocast
    is for the function alone, not for the backward ops of the transform.
    """

    def transform(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        def transformed(*args: Any) -> Any:
            if "func-grad-ambient-backward" in _quirks:
                return _first(torch.func.grad(function, **options))(*args)
            state = snapshot(device)

            def inside(*inputs: Any) -> Any:
                with state.restored():
                    return function(*inputs)

            with state.disabled():
                return _first(torch.func.grad(inside, **options))(*args)

        return transformed

    return transform


def vmap(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Return `torch.func.vmap` as it behaves under the reference.

    It means what a loop over the calls means, so autocast decides about the ops that are called
    before a batching rule makes others of them.
    """
    return _first(torch.func.vmap(function, **options))


def _first(transformed: Callable[..., Any]) -> Callable[..., Any]:
    """Return a transformed function in which autocast decides before the transform does."""
    global _keys
    if dispatch.FIRST not in _keys:
        _keys = (dispatch.OWN, dispatch.FIRST)
        # Also those that have no policy on this device.
        _register(all_overloads() | tables.declared_overloads())

    def call(*args: Any) -> Any:
        if "transform-before-autocast" in _quirks:
            return transformed(*args)
        with dispatch.first():
            return transformed(*args)

    return call


@contextmanager
def log_kernels() -> Iterator[list[KernelCall]]:
    """Collect every call that reaches a kernel of the reference in this thread."""
    log: list[KernelCall] = []
    before, _here().log = _here().log, log
    try:
        yield log
    finally:
        _here().log = before


@contextmanager
def default_dtypes(dtypes: Mapping[str, torch.dtype]) -> Iterator[None]:
    """Let contexts without a dtype take these, by device, for a block outside of any context.

    `torch.set_autocast_dtype` does so for torch's own.
    """
    s = _here()
    before = dict(s.dtypes)
    s.dtypes.update(dtypes)
    try:
        yield
    finally:
        s.dtypes.clear()
        s.dtypes.update(before)


def state() -> tuple[object, ...]:
    """Return the whole state of this thread, comparable: for the check that it is restored."""
    s = _here()
    return (
        tuple(sorted((d, on) for d, on in s.enabled.items() if on)),
        tuple(sorted((d, str(t)) for d, t in s.dtypes.items())),
        s.cache_enabled,
        s.nesting,
        dispatch.is_on(),
        len(_cache),
    )


def reset() -> None:
    """Put the state of this thread back to that of a fresh one, and clear the cache."""
    s = _here()
    s.enabled.clear()
    s.dtypes.clear()
    s.tables.clear()
    for _ in range(s.nesting):
        _queries.leave()
    s.cache_enabled, s.nesting, s.resets = True, 0, s.resets + 1
    dispatch.switch(on=False)
    clear_cache()
