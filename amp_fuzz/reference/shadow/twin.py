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

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from amp_fuzz.reference import dispatch
from amp_fuzz.reference.shadow.call import Facts, facts_of
from amp_fuzz.reference.shadow.copies import WIDE, no_modes, resolved, seen_as, tensors_in
from amp_fuzz.reference.shadow.exact import EXACT
from amp_fuzz.reference.shadow.schemas import bound, draws

__all__ = ["Redraw", "Step", "Twin", "is_followed"]

_aten = torch.ops.aten
_CASTS = (_aten._to_copy.default, _aten.clone.default)


@dataclass(slots=True)
class _Memory:
    """The exact copy of a storage: ``[elements]``, float64 or complex128.

    keep: tells when the storage is gone. shared: another storage has the same exact copy. tags:
    what the user of the mode notes of it.
    """

    keep: StorageWeakRef
    flat: torch.Tensor
    shared: bool = False
    tags: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Step:
    """One op: what it read and what it made, beside what that is exactly.

    func, args, kwargs: the call. facts: what is known of the op. given: its tensors, with the exact
    copy of each that is a float, as they were before. made: the floating results, with theirs;
    None where the op could not be followed. numbers: the other results that are new.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    facts: Facts
    given: Sequence[tuple[torch.Tensor, torch.Tensor | None]]
    made: Sequence[tuple[torch.Tensor, torch.Tensor | None]]
    numbers: Sequence[torch.Tensor]

    def again(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """Return the floating results for other tensors of wide dtypes; None: they do not come.

        Nothing is written: what the op would write in place, it writes to a copy.
        """
        own = [t.clone() if i in _targets(self) else t for i, t in enumerate(tensors)]
        found = _run(self.func, self.args, self.kwargs, own, [t for t, _ in self.made])
        return None if found is None or len(found) != len(self.made) else found


def is_followed(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is one whose memory can have an exact copy."""
    return (
        tensor.layout is torch.strided
        and not tensor.is_meta
        and not tensor.is_quantized
        and not tensor._is_zerotensor()
        and type(tensor) in (torch.Tensor, torch.nn.Parameter)
    )


class Twin(TorchDispatchMode):
    """Keep an exact copy beside each floating tensor of a block.

    Args:
        note: is told of each op that makes or writes floating tensors, after it has run. It is
            called outside of all modes, without gradients.

    Use it inside or around `reference.autocast`, or torch's own, and ask `exact` for any tensor of
    the block. What it meets for the first time counts as exact.

    refused: the ops that no kernel computes in float64 or float32; their results count as exact.
    drawn: each op that drew at random, and what it made; see `Redraw`.
    """

    def __init__(self, note: Callable[[Step], None] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._note = note
        self._memories: dict[int, _Memory] = {}
        self._sweep_at = 1024
        self.refused: set[str] = set()
        self.drawn: list[tuple[Any, list[torch.Tensor]]] = []

    def exact(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the exact copy of a floating tensor: float64 or complex128, of its shape."""
        with torch.no_grad(), no_modes():
            return self._seen(tensor.detach()).clone()

    def tags(self, tensor: torch.Tensor) -> dict[str, Any]:
        """Return what is noted of the memory of a floating tensor, to read and to add to."""
        with torch.no_grad(), no_modes():
            return self._memory(tensor.detach()).tags

    # -- the copies -------------------------------------------------------------------------------

    def _memory(self, tensor: torch.Tensor) -> _Memory:
        storage = tensor.untyped_storage()
        key = storage._cdata
        found = self._memories.get(key)
        if found is None or found.keep.expired():
            plain = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            count = storage.nbytes() // tensor.element_size()
            flat = plain.set_(storage, 0, (count,), (1,)).to(WIDE[tensor.dtype])
            found = self._memories[key] = _Memory(StorageWeakRef(storage), flat)
            if len(self._memories) > self._sweep_at:
                self._sweep()
        return found

    def _sweep(self) -> None:
        gone = [key for key, memory in self._memories.items() if memory.keep.expired()]
        for key in gone:
            del self._memories[key]
        self._sweep_at = max(1024, len(self._memories) + 256)

    def _window(self, memory: _Memory, tensor: torch.Tensor) -> torch.Tensor:
        """Return the part of an exact copy that a tensor covers, without its lazy bits."""
        flat = memory.flat
        if flat.is_complex() and not tensor.is_complex():
            flat = torch.view_as_real(flat).reshape(-1)
        elif tensor.is_complex() and not flat.is_complex():
            flat = torch.view_as_complex(flat.reshape(-1, 2))
        return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def _seen(self, tensor: torch.Tensor) -> torch.Tensor:
        return seen_as(self._window(self._memory(tensor), tensor), tensor)

    def _own(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the part of an exact copy to write to: no other storage's."""
        memory = self._memory(tensor)
        if memory.shared:
            memory.flat, memory.shared = memory.flat.clone(), False
        return self._window(memory, tensor)

    def _keep(self, tensor: torch.Tensor, made: torch.Tensor) -> None:
        """Keep the exact copy of a tensor that an op made, laid out as the tensor is."""
        storage = tensor.untyped_storage()
        count = storage.nbytes() // tensor.element_size()
        same = made.stride() == tensor.stride() and tensor.storage_offset() == 0
        if same and made.storage_offset() == 0 and _elements(made) == count:
            flat = made.as_strided((count,), (1,))
        else:
            flat = torch.zeros(count, dtype=made.dtype, device=made.device)
            flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).copy_(made)
        self._memories[storage._cdata] = _Memory(StorageWeakRef(storage), flat)
        if len(self._memories) > self._sweep_at:
            self._sweep()

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
            storage = tensor.untyped_storage()
            self._memories[storage._cdata] = _Memory(StorageWeakRef(storage), memory.flat, True)
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
        with torch.no_grad():
            # What is written in place must be known as it was before.
            before = self._given(tensors, clone=self._note is not None) if facts.writes else []
        with dispatch.kept():
            out = func(*args, **kwargs)
        if facts.view and not facts.writes:
            return out
        with torch.no_grad(), no_modes():
            self._follow(func, args, kwargs, facts, tensors, before, out)
        return out

    def _given(
        self, tensors: Sequence[torch.Tensor], *, clone: bool
    ) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        with no_modes():
            return [
                (t.detach().clone() if clone else t, self._seen(t.detach()).clone())
                if t.dtype in WIDE
                else (t, None)
                for t in tensors
            ]

    def _follow(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        facts: Facts,
        tensors: Sequence[torch.Tensor],
        before: list[tuple[torch.Tensor, torch.Tensor | None]],
        out: Any,
    ) -> None:
        own = {t.untyped_storage()._cdata for t in tensors}
        fresh = [
            t.detach()
            for t in tensors_in(out)
            if is_followed(t) and t.untyped_storage()._cdata not in own
        ]
        written = [tensors[i].detach() for i in _targets_of(func, args, kwargs, facts)]
        written = [t for t in written if t.dtype in WIDE]
        floats = [t for t in fresh if t.dtype in WIDE]
        if facts.uninitialised or not (written or fresh):
            return
        if not before:
            before = [
                (t.detach(), self._seen(t.detach()) if t.dtype in WIDE else None) for t in tensors
            ]
        results = [*written, *floats]
        made: Sequence[torch.Tensor | None] | None
        if facts.draws and draws(func, args, kwargs):
            self.drawn.append((func, [t.clone() for t in (*fresh, *written)]))
            made = self._drawn(func, args, kwargs, before, results, fresh)
        elif func in _CASTS and not written and self._cast(tensors, floats):
            made = [self._seen(t) for t in floats]
        else:
            wide = [t if exact is None else exact for t, exact in before]
            made = _run(func, args, kwargs, wide, results) if results else []
            if made is None or len(made) != len(results):
                made = None
        if made is None:
            self.refused.add(str(func).removeprefix("aten."))
            made = [None] * len(results)
        for t, exact in zip(results, made, strict=True):
            value = t.to(WIDE[t.dtype]) if exact is None else exact
            if any(t is w for w in written):
                self._own(t).copy_(seen_as(value, t))
            elif not (func in _CASTS and t.untyped_storage()._cdata in self._memories):
                self._keep(t, value)
        if self._note is not None:
            numbers = [t for t in fresh if t.dtype not in WIDE]
            pairs = list(zip(results, made, strict=True))
            self._note(Step(func, args, kwargs, facts, before, pairs, numbers))

    def _cast(self, tensors: Sequence[torch.Tensor], floats: Sequence[torch.Tensor]) -> bool:
        """Follow a cast or a copy without computing; False: it has to be run."""
        if not floats or len(tensors) != 1 or tensors[0].dtype not in WIDE:
            return False
        source = tensors[0].detach()
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
        fresh: Sequence[torch.Tensor],
    ) -> Sequence[torch.Tensor | None] | None:
        """Return the exact results of an op that draws: what was drawn is as it is."""
        if func is _aten.native_dropout.default:
            p = float(bound(func, args, kwargs)["p"])
            exact = before[0][1]
            assert exact is not None
            return [exact * fresh[1].to(exact.dtype) * (0.0 if p == 1 else 1 / (1 - p))]
        if any(exact is not None for _, exact in before) and not _targets_of(
            func, args, kwargs, facts_of(func)
        ):
            return None
        return [t.to(WIDE[t.dtype]) for t in results]


class Redraw(TorchDispatchMode):
    """Let the random ops of a block make again what those of another run made, in order.

    A run in another dtype draws other numbers from the same seed. drawn: see `Twin`. An op that
    draws another kind, or another shape, draws for itself, and so do all after it.
    """

    def __init__(self, drawn: Sequence[tuple[Any, list[torch.Tensor]]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._drawn = list(reversed(drawn))

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an op, and replace what it drew."""
        kwargs = kwargs or {}
        with dispatch.kept():
            out = func(*args, **kwargs)
        facts = facts_of(func)
        if not (facts.draws and self._drawn and draws(func, args, kwargs)):
            return out
        tensors = tensors_in((args, kwargs))
        targets = _targets_of(func, args, kwargs, facts)
        ids = {id(tensors[i]) for i in targets}
        made = [t for t in tensors_in(out) if id(t) not in ids] + [tensors[i] for i in targets]
        before, values = self._drawn.pop()
        if before is not func or [t.shape for t in made] != [v.shape for v in values]:
            self._drawn.clear()
            return out
        if func is _aten.native_dropout.default:  # its result is what it was given, with zeros
            p = float(bound(func, args, kwargs)["p"])
            kept = values[1].to(made[0].dtype)
            made[0].copy_(tensors[0] * kept * (0.0 if p == 1 else 1 / (1 - p)))
            made[1].copy_(values[1])
            return out
        with torch.no_grad():
            for t, value in zip(made, values, strict=True):
                t.copy_(value)
        return out


def _elements(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes() // tensor.element_size()


def _targets(step: Step) -> list[int]:
    return _targets_of(step.func, step.args, step.kwargs, step.facts)


def _targets_of(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], facts: Facts
) -> list[int]:
    """Return the numbers, among the tensors, of those that an op writes."""
    if not facts.writes:
        return []
    names = [a.name for a in func._schema.arguments]
    writes = {a.name for a in func._schema.arguments if a.alias_info and a.alias_info.is_write}
    given = [*zip(names, args, strict=False), *kwargs.items()]
    if not writes and dict(given).get("training"):  # the statistics of a batch norm
        writes = {"running_mean", "running_var"}
    found: list[int] = []
    number = 0
    for name, argument in given:
        count = len(tensors_in(argument))
        if name in writes:
            found += range(number, number + count)
        number += count
    return found


def _run(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tensors: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor],
) -> list[torch.Tensor] | None:
    """Run an op on wide tensors; return what it writes, then its new floating results.

    None: no kernel takes them, not those of float32 either.
    """
    facts = facts_of(func)
    targets = _targets_of(func, args, kwargs, facts)
    tensors = list(tensors)
    for i in targets:
        if tensors[i].dtype in WIDE:
            tensors[i] = tensors[i].clone()
    if facts.pointwise and not facts.moves and not any(t.dtype in WIDE for t in tensors):
        tensors = [t.double() for t in tensors]  # a quotient of integers
    for narrow in (False, True):
        given = [_single(t) for t in tensors] if narrow else tensors
        try:
            own, out = _called(func, args, kwargs, given, results)
        except Exception:
            continue
        found = [own[i] for i in targets if own[i].dtype in WIDE]
        ids = {id(t) for t in found}
        storages = {t.untyped_storage()._cdata for t in own}
        fresh = [t for t in tensors_in(out) if t.dtype in WIDE and id(t) not in ids]
        found += [t.clone() if t.untyped_storage()._cdata in storages else t for t in fresh]
        found = [resolved(t).to(WIDE[t.dtype]) for t in found]
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
    own = [_argument(a, turn, wide) for a in args]
    named = {name: _argument(a, turn, wide) for name, a in kwargs.items()}
    if not tensors and results and "dtype" in {a.name for a in func._schema.arguments}:
        named["dtype"] = WIDE[results[0].dtype]
    if named.get("half_to_float") or (func in _HALF_TO_FLOAT and len(own) > 2 and own[2]):
        own, named = own[:2], {**named, "half_to_float": False}
    function = EXACT.get(func, func) if wide else func
    return tensors, function(*own, **named)


_HALF_TO_FLOAT = (_aten._softmax.default, _aten._log_softmax.default)


def _argument(tree: Any, turn: Iterator[torch.Tensor], wide: bool) -> Any:
    if isinstance(tree, torch.Tensor):
        return next(turn)
    if isinstance(tree, (tuple, list)):
        return [_argument(part, turn, wide) for part in tree]
    if isinstance(tree, torch.dtype):
        found = WIDE.get(tree, tree)
        return found if wide or found is tree else _SINGLE[found]
    return tree


_SINGLE = {torch.float64: torch.float32, torch.complex128: torch.complex64}


def _single(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(_SINGLE[tensor.dtype]) if tensor.dtype in _SINGLE else tensor
