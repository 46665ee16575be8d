"""One exact copy beside each tensor of a computation: what it would be without rounding.

A `Twin` is a dispatch mode, as `Shadow` is, and lean: one copy in float64, none perturbed. It does
not bound what another implementation may compute; it measures what this one lost. Casts change
nothing of the exact copy, constants keep what was written, and each op computes from the exact
copies of its arguments. Decisions are those of the computation itself: indices, masks, conditions,
and what was drawn at random, so that both take the same way.

Memory is followed, not tensors: an exact copy is laid out as the storage that it belongs to, and a
view of the one is the same view of the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from amp_fuzz.reference import dispatch
from amp_fuzz.reference.shadow.band import REAL
from amp_fuzz.reference.shadow.call import Facts, facts_of
from amp_fuzz.reference.shadow.copies import (
    WIDE,
    no_modes,
    resolved,
    seen_as,
    tensors_in,
    with_tensors,
)
from amp_fuzz.reference.shadow.exact import EXACT
from amp_fuzz.reference.shadow.schemas import bound, draws, targets_of
from amp_fuzz.reference.shadow.written import SIXTEEN

__all__ = ["Redraw", "Step", "Twin", "TwinError", "is_followed"]

_aten = torch.ops.aten
_CASTS = (_aten._to_copy.default, _aten.clone.default)
_CHANCES = (
    *("bernoulli", "poisson", "rand_like", "randn_like", "randint_like"),
    *("cauchy", "exponential", "geometric", "log_normal", "uniform"),
)
"""Ops that draw from the chances, or in the shape, of what they are given: the draw is exact."""
_PRODUCTS = frozenset(
    (
        _aten.mm.default,
        _aten.bmm.default,
        _aten.addmm.default,
        _aten.baddbmm.default,
        _aten.convolution.default,
        _aten.convolution_backward.default,
    )
)
"""Those whose 16-bit kernels add up in float32 and round once, on every device."""
_PICKING: Mapping[Any, int] = {
    **dict.fromkeys(
        (
            _aten.max.dim,
            _aten.min.dim,
            _aten.median.dim,
            _aten.nanmedian.dim,
            _aten.mode.default,
            _aten.kthvalue.default,
            _aten.topk.default,
            _aten.sort.default,
            _aten.sort.stable,
            _aten.cummax.default,
            _aten.cummin.default,
        ),
        1,
    ),
    _aten.max_pool2d_with_indices.default: 2,
    _aten.adaptive_max_pool2d.default: 2,
    _aten.max_pool3d_with_indices.default: 3,
    _aten.adaptive_max_pool3d.default: 3,
}
"""Those that return elements and where they were, among how many dimensions."""
_LEAST = 16 * 2**20
_to = torch.Tensor.to  # a watch exchanges the method while a block runs


@dataclass(slots=True)
class _Memory:
    """The exact copy of a storage: ``[elements]``, float64 or complex128.

    keep: tells when the storage is gone; while it is held, no other storage has the same address.
    flat: another memory may have it too if `shared`. real, nbytes: of the storage. tags: what the
    user of the mode notes of it.
    """

    keep: StorageWeakRef
    flat: torch.Tensor
    real: torch.dtype
    nbytes: int
    shared: bool = False
    tags: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Step:
    """One op: what it read and what it made, beside what that is exactly.

    func, args, kwargs: the call. facts: what is known of the op. given: its tensors, with the exact
    copy of each that is a float, as they were before. made: the floating results, with theirs;
    None where the op could not be followed. numbers: the other results that are new. single: the
    floating results before they were rounded to 16 bits, where they are known.

    It holds while the note of it runs: what is written later may be written to its tensors.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    facts: Facts
    given: Sequence[tuple[torch.Tensor, torch.Tensor | None]]
    made: Sequence[tuple[torch.Tensor, torch.Tensor | None]]
    numbers: Sequence[torch.Tensor]
    single: Sequence[torch.Tensor] | None = None

    def again(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """Return the floating results for other tensors of wide dtypes; None: they do not come.

        Nothing is written: what the op would write in place, it writes to a copy.
        """
        return _run(self.func, self.args, self.kwargs, tensors, [t for t, _ in self.made])


class TwinError(RuntimeError):
    """An op was not followed, by a fault of this package: the callable did not raise."""


def is_followed(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is one whose memory can have an exact copy."""
    return (
        tensor.layout is torch.strided
        and not tensor.is_meta
        and not tensor.is_quantized
        and not tensor.is_nested
        and not tensor._is_zerotensor()
        and type(tensor) in (torch.Tensor, torch.nn.Parameter)
    )


class Twin(dispatch.Mode):
    """Keep an exact copy beside each floating tensor of a block.

    Args:
        note: is told of each op that makes or writes floating tensors, after it has run. It is
            called outside of all modes, without gradients.

    Use it inside or around `reference.autocast`, or torch's own, and ask `exact` for any tensor of
    the block. What it meets for the first time counts as exact. On the CPU a product of 16-bit
    tensors is computed in float32 and rounded once, as the 16-bit kernels of accelerators do.
    Those of the CPU take up to ten times as long where it has no instructions for 16 bits, and
    differ in the order of the sum.

    refused: the ops that no kernel computes in float64 or float32; their results count as exact.
    drawn: each op that drew at random, and what it made; see `Redraw`.
    """

    def __init__(self, note: Callable[[Step], None] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._note = note
        self._memories: dict[int, _Memory] = {}
        self._added, self._sweep_at = 0, _LEAST
        self.refused: set[str] = set()
        self.drawn: list[tuple[Any, list[torch.Tensor]]] = []

    def exact(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the exact copy of a floating tensor: float64 or complex128, of its shape."""
        with torch.no_grad(), no_modes():
            own = tensor.detach()
            self._memory(own).shared = True  # what is written later is written to another one
            return self._seen(own)

    def tags(self, tensor: torch.Tensor) -> dict[str, Any]:
        """Return what is noted of the memory of a floating tensor, to read and to add to."""
        found = self._memories.get(_address(tensor))
        if found is None:
            with torch.no_grad(), no_modes():
                found = self._memory(tensor.detach())
        return found.tags

    def forget(self) -> None:
        """Let go of all exact copies."""
        self._memories.clear()

    # -- the copies -------------------------------------------------------------------------------

    def _memory(self, tensor: torch.Tensor) -> _Memory:
        storage = tensor.untyped_storage()
        found = self._memories.get(storage._cdata)
        nbytes, real = storage.nbytes(), REAL.get(tensor.dtype, tensor.dtype)
        if found is not None and found.real is real and found.nbytes == nbytes:
            return found
        plain = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        plain.set_(storage, 0, (nbytes // tensor.element_size(),), (1,))
        made = self._remember(storage, _wide(plain), real)
        if found is not None and found.real is real:  # it was resized
            old, new = _numbers(found.flat), _numbers(made.flat)
            count = min(len(old), len(new))
            new[:count] = old[:count]
        return made

    def _remember(
        self, storage: torch.UntypedStorage, flat: torch.Tensor, real: torch.dtype
    ) -> _Memory:
        made = _Memory(StorageWeakRef(storage), flat, real, storage.nbytes())
        self._memories[storage._cdata] = made
        self._added += flat.nbytes + _LEAST // 1024  # sweep after a thousand small ones, too
        if self._added > self._sweep_at:
            self._sweep()
        return made

    def _sweep(self) -> None:
        gone = [key for key, memory in self._memories.items() if memory.keep.expired()]
        for key in gone:
            del self._memories[key]
        left = sum(memory.flat.nbytes for memory in self._memories.values())
        self._added, self._sweep_at = 0, max(_LEAST, left // 8)

    def _window(self, memory: _Memory, tensor: torch.Tensor) -> torch.Tensor:
        """Return the part of an exact copy that a tensor covers, without its lazy bits."""
        flat = memory.flat
        if tensor.is_complex() and not flat.is_complex():
            flat = torch.view_as_complex(flat[: len(flat) // 2 * 2].reshape(-1, 2))
        elif not tensor.is_complex():
            flat = _numbers(flat)
        return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def _seen(self, tensor: torch.Tensor) -> torch.Tensor:
        return seen_as(self._window(self._memory(tensor), tensor), tensor)

    def _write(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Keep what was written to a tensor. Nothing else may hold the memory of `value`."""
        memory = self._memory(tensor)
        value = seen_as(value, tensor)
        if _covers(tensor) and memory.flat.is_complex() == value.is_complex():
            memory.flat, memory.shared = _laid_out(value, tensor), False
            return
        if memory.shared:
            memory.flat, memory.shared = memory.flat.clone(), False
        self._window(memory, tensor).copy_(value)

    def _share(self, tensor: torch.Tensor, source: torch.Tensor) -> bool:
        """Let a cast have the exact copy of what was cast, if both are laid out alike."""
        alike = (
            tensor.stride() == source.stride()
            and tensor.is_complex() == source.is_complex()
            and tensor.storage_offset() == source.storage_offset() == 0
            and tensor.device == source.device
            and _elements(tensor) == _elements(source) == tensor.numel()
        )
        if alike:
            memory = self._memory(source)
            memory.shared = True
            storage, real = tensor.untyped_storage(), REAL.get(tensor.dtype, tensor.dtype)
            self._remember(storage, memory.flat, real).shared = True
        return alike

    # -- following --------------------------------------------------------------------------------

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an op, then run it on the exact copies."""
        kwargs = kwargs or {}
        tensors = tensors_in((args, kwargs))
        facts = facts_of(func)
        if not all(map(is_followed, tensors)):
            with dispatch.kept():
                return func(*args, **kwargs)
        targets = targets_of(func, args, kwargs) if facts.writes else []
        before = self._before(tensors, targets) if targets else []
        single = _single_product(func, args, kwargs, tensors)
        if single is None:
            with dispatch.kept():
                out = func(*args, **kwargs)
        else:
            out = _rounded(single, tensors[0].dtype)
        own = {_address(t) for t in tensors}
        fresh = [t for t in tensors_in(out) if is_followed(t) and _address(t) not in own]
        if facts.uninitialised or not (targets or fresh):
            return out
        with torch.no_grad(), no_modes():
            written = [tensors[i].detach() for i in targets]
            made = [t.detach() for t in fresh]
            before = before or [
                (t.detach(), self._seen(t.detach()) if t.dtype in WIDE else None) for t in tensors
            ]
            try:
                self._follow(func, args, kwargs, facts, before, written, made, single)
            except Exception as error:
                raise TwinError(f"{func} cannot be followed: please report it") from error
        return out

    def _before(
        self, tensors: Sequence[torch.Tensor], targets: Sequence[int]
    ) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """Return tensors and their exact copies, with copies of what an op is to write."""
        with torch.no_grad(), no_modes():
            found = []
            for i, tensor in enumerate(tensors):
                t = tensor.detach()
                exact = self._seen(t) if t.dtype in WIDE else None
                if i in targets:
                    exact = exact if exact is None or _covers(t) else exact.clone()
                    t = t.clone() if exact is None or self._note is not None else t
                found.append((t, exact))
            return found

    def _follow(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        facts: Facts,
        before: list[tuple[torch.Tensor, torch.Tensor | None]],
        written: Sequence[torch.Tensor],
        fresh: Sequence[torch.Tensor],
        single: Any,
    ) -> None:
        for t in written:
            if t.dtype not in WIDE:  # it may be a float's memory, seen as integers
                self._memories.pop(_address(t), None)
        written = [t for t in written if t.dtype in WIDE]
        floats = [t for t in fresh if t.dtype in WIDE]
        results = [*written, *floats]
        made: Sequence[torch.Tensor | None] | None
        if facts.draws and draws(func, args, kwargs):
            made = self._drawn(func, args, kwargs, before, results, [*fresh, *written])
        elif func in _CASTS and self._cast(before, floats):
            made = [self._seen(t) for t in floats]
            floats = []
        elif func in _PICKING and before[0][1] is not None and not written:
            made = [_picked(func, args, kwargs, before[0][1], fresh[1])]
        else:
            wide = [t if exact is None else exact for t, exact in before]
            made = _run(func, args, kwargs, wide, results) if results else []
        if made is None:
            self.refused.add(str(func).removeprefix("aten."))
            made = [None] * len(results)
        kept = {_address(t) for t in written}
        for t, exact in zip([*written, *floats], made, strict=False):
            value = _wide(t) if exact is None else exact
            address = _address(t)
            if address in kept or not _covers(t):
                self._write(t, value)
            else:
                flat = _laid_out(seen_as(value, t), t)
                self._remember(t.untyped_storage(), flat, REAL.get(t.dtype, t.dtype))
            kept.add(address)
        if self._note is not None:
            numbers = [t for t in fresh if t.dtype not in WIDE]
            pairs = list(zip(results, made, strict=True))
            unrounded = None if single is None else tensors_in(single)
            self._note(Step(func, args, kwargs, facts, before, pairs, numbers, unrounded))

    def _cast(
        self,
        before: Sequence[tuple[torch.Tensor, torch.Tensor | None]],
        floats: Sequence[torch.Tensor],
    ) -> bool:
        """Follow a cast or a copy without computing; False: it has to be run."""
        if not floats or len(before) != 1 or before[0][1] is None:
            return False
        source = before[0][0]
        if source.is_conj() or source.is_neg() or floats[0].shape != source.shape:
            return False
        return self._share(floats[0], source)

    def _drawn(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        before: Sequence[tuple[torch.Tensor, torch.Tensor | None]],
        results: Sequence[torch.Tensor],
        all_made: Sequence[torch.Tensor],
    ) -> Sequence[torch.Tensor | None] | None:
        """Return the exact results of an op that draws: what was drawn is as it is."""
        if func is _aten.native_dropout.default:
            p = float(bound(func, args, kwargs)["p"])
            exact, mask = before[0][1], all_made[1]
            assert exact is not None
            self.drawn.append((func, [mask.clone()]))
            return [exact * mask * (0.0 if p == 1 else 1 / (1 - p))]
        self.drawn.append((func, [t.clone() for t in all_made]))
        name = func._schema.name.removeprefix("aten::")
        depends = any(exact is not None for _, exact in before) and name not in _CHANCES
        if results and depends and not targets_of(func, args, kwargs):
            return None
        return [_wide(t) for t in results]


class Redraw(dispatch.Mode):
    """Let a block run as it did in a `Twin`, without exact copies: its draws and its products.

    A run in another dtype draws other numbers from the same seed. drawn: see `Twin`. An op that
    draws another kind, or another shape, draws for itself, and so do all after it. native: whether
    products are those of torch's own kernels of 16 bits, which may add in another order.
    """

    def __init__(
        self, drawn: Sequence[tuple[Any, list[torch.Tensor]]], *, native: bool = False
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._drawn, self._native = list(reversed(drawn)), native

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an op, and replace what it drew."""
        kwargs = kwargs or {}
        if func in _PRODUCTS and not self._native:
            tensors = tensors_in((args, kwargs))
            single = _single_product(func, args, kwargs, tensors)
            if single is not None:
                return _rounded(single, tensors[0].dtype)
        with dispatch.kept():
            out = func(*args, **kwargs)
        facts = facts_of(func)
        if not (facts.draws and self._drawn and draws(func, args, kwargs)):
            return out
        tensors = tensors_in((args, kwargs))
        targets = targets_of(func, args, kwargs) if facts.writes else []
        ids = {id(tensors[i]) for i in targets}
        made = [t for t in tensors_in(out) if id(t) not in ids] + [tensors[i] for i in targets]
        dropout = func is _aten.native_dropout.default
        drawn = made[1:] if dropout else made
        before, values = self._drawn.pop()
        if before is not func or [t.shape for t in drawn] != [v.shape for v in values]:
            self._drawn.clear()
            return out
        with torch.no_grad():
            for t, value in zip(drawn, values, strict=True):
                t.copy_(value)
            if dropout:  # its result is what it was given, with zeros
                p = float(bound(func, args, kwargs)["p"])
                kept = made[1].to(made[0].dtype)
                made[0].copy_(tensors[0] * kept * (0.0 if p == 1 else 1 / (1 - p)))
        return out


def _picked(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    exact: torch.Tensor,
    index: torch.Tensor,
) -> torch.Tensor:
    """Return the exact copies of the elements that an op picked."""
    dims = _PICKING[func]
    if dims > 1:
        flat = exact.flatten(-dims).gather(-1, index.flatten(-dims))
        return flat.view(index.shape)
    dim = bound(func, args, kwargs)["dim"]
    if exact.dim() == 0:
        return exact.clone()
    if index.dim() == exact.dim():
        return exact.gather(dim, index)
    return exact.gather(dim, index.unsqueeze(dim)).squeeze(dim)


def _single_product(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[torch.Tensor]
) -> Any:
    """Return a product of 16-bit tensors of the CPU in float32; None: it is none."""
    if func not in _PRODUCTS or len({t.dtype for t in tensors}) != 1:
        return None
    if any(t.device.type != "cpu" or t.dtype not in SIXTEEN or not is_followed(t) for t in tensors):
        return None
    turn = iter([_to(t, torch.float32) for t in tensors])
    return func(*(with_tensors(a, turn) for a in args), **kwargs)


def _rounded(tree: Any, dtype: torch.dtype) -> Any:
    """Return the floating results of an op in another dtype."""
    if isinstance(tree, tuple):
        return tuple(_rounded(part, dtype) for part in tree)
    return _to(tree, dtype) if isinstance(tree, torch.Tensor) else tree


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor in float64 or complex128."""
    return _to(tensor, WIDE[tensor.dtype], copy=True)


def _numbers(flat: torch.Tensor) -> torch.Tensor:
    """Return a flat tensor as real numbers."""
    return torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata  # type: ignore[no-any-return]


def _covers(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is all of its storage, each element once."""
    if tensor.storage_offset() or _elements(tensor) != tensor.numel():
        return False
    return tensor.is_contiguous() or _is_dense(tensor)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is contiguous in some order of its dimensions."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order).is_contiguous()


def _laid_out(value: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return a value as the storage has it that a tensor covers, ``[elements]``."""
    if value.stride() != tensor.stride():
        value = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=value.dtype, device=value.device
        ).copy_(value)
    return value.as_strided((value.numel(),), (1,))


def _elements(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes() // tensor.element_size()


def _run(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tensors: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor],
) -> list[torch.Tensor] | None:
    """Run an op on other tensors; return what it writes, then its new floating results.

    All are new. None: no kernel takes the tensors, not those of float32 either.
    """
    facts = facts_of(func)
    targets = targets_of(func, args, kwargs) if facts.writes else []
    tensors = [t.clone() if i in targets else t for i, t in enumerate(tensors)]
    if facts.pointwise and not facts.moves and not any(t.dtype in WIDE for t in tensors):
        tensors = [_to(t, torch.float64) for t in tensors]  # a quotient of integers
    double = not any(t.dtype in _SINGLE.values() for t in tensors)
    for narrow in (False, True):
        given = [_single(t) for t in tensors] if narrow else tensors
        try:
            own, out = _called(func, args, kwargs, given, results)
        except Exception:
            continue
        found = [own[i] for i in targets if own[i].dtype in WIDE]
        ids = {id(t) for t in found}
        addresses = {_address(t) for t in own}
        fresh = [t for t in tensors_in(out) if t.dtype in WIDE and id(t) not in ids]
        found += [t.clone() if _address(t) in addresses else t for t in fresh]
        found = [resolved(t) for t in found]
        if double:
            found = [_to(t, WIDE[t.dtype]) for t in found]
        if [t.shape for t in found] == [t.shape for t in results]:
            return found
    return None


def _called(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tensors: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor],
) -> tuple[Sequence[torch.Tensor], Any]:
    turn = iter(tensors)
    wide = any(t.dtype in (torch.float64, torch.complex128) for t in tensors)
    wide = wide or not any(t.dtype in WIDE for t in tensors)
    dtypes = WIDE if wide else {dtype: _SINGLE[found] for dtype, found in WIDE.items()}
    own = [with_tensors(a, turn, dtypes) for a in args]
    named = {name: with_tensors(a, turn, dtypes) for name, a in kwargs.items()}
    if not tensors and results and "dtype" in {a.name for a in func._schema.arguments}:
        named["dtype"] = WIDE[results[0].dtype]
    if named.get("half_to_float") or (func in _HALF_TO_FLOAT and len(own) > 2 and own[2]):
        own, named = own[:2], {**named, "half_to_float": False}
    function = EXACT.get(func, func) if wide else func
    return tensors, function(*own, **named)


_HALF_TO_FLOAT = (_aten._softmax.default, _aten._log_softmax.default)


_SINGLE = {torch.float64: torch.float32, torch.complex128: torch.complex64}


def _single(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(_SINGLE[tensor.dtype]) if tensor.dtype in _SINGLE else tensor
