"""Record what a case does under the reference as a straight line of ATen calls.

The reference is above the recording dispatch mode, so the recording has its casts written out, and
composite ops are decomposed as autocast sees them. Tensors are tracked by their memory: a view is a
geometry over it; in-place and ``out=`` ops write it. Random and uninitialised values are taken from
the recorded run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from amp_fuzz.reference import dispatch
from amp_fuzz.reference.shadow.copies import tensors_in
from amp_fuzz.reference.shadow.schemas import draws

__all__ = ["Memory", "Place", "Read", "Recorder", "Recording", "Step", "dense"]


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a tensor: its memory, and its geometry there, in elements.

    conjugated, negated: the tensor is the conjugate or negative of the memory.
    """

    memory: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    conjugated: bool = False
    negated: bool = False


@dataclass(frozen=True, slots=True)
class Read:
    """A tensor as an argument. stops: no gradient flows back through it."""

    place: Place
    stops: bool


@dataclass(slots=True)
class Memory:
    """A storage as one dtype: its size, and its elements when it was first met.

    initial: flat; None if a step of the recording writes all of it first. weight: it belongs to an
    input that collects a gradient. trains: gradients may flow back to it.
    """

    dtype: torch.dtype
    count: int
    initial: torch.Tensor | None
    weight: bool = False
    trains: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """One call of an op that computes something new.

    op: an overload that writes nothing, ``add.Tensor`` for ``add_.Tensor``. args, kwargs: as the
    dispatcher passed them, with `Read` for tensors. writes: where its results go; a result is
    cast and broadcast to the place's dtype and shape if `casts` marks it as written over an
    existing tensor. drawn: the results themselves, if they are random. quiet: grad mode was off, so
    the overwritten value keeps its derivative.
    """

    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    writes: tuple[Place, ...]
    casts: bool = False
    drawn: tuple[torch.Tensor, ...] | None = None
    quiet: bool = False


@dataclass(slots=True)
class Recording:
    """A recorded program. observed, starts: in the order of the requests.

    starts: the tensors from which a backward pass starts, with their cotangents. weights: by label.
    """

    memories: list[Memory] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    observed: list[tuple[str, Place]] = field(default_factory=list)
    starts: list[tuple[Place, torch.Tensor]] = field(default_factory=list)
    weights: list[tuple[str, Place]] = field(default_factory=list)


class Recorder(TorchDispatchMode):
    """Record every op of a block until `stop`."""

    def __init__(self) -> None:
        super().__init__()
        self.recording = Recording()
        self.on = True
        self.failed: Exception | None = None
        self._memories: dict[tuple[int, torch.dtype], int] = {}
        self._kept: list[torch.UntypedStorage] = []
        self._twins: set[int] = set()

    # -- what is asked of it ----------------------------------------------------------------------

    def weight(self, label: str, tensor: torch.Tensor) -> None:
        """Mark an input that collects a gradient."""
        with _disable_current_modes():
            place = self.place(tensor)
        memory = self.recording.memories[place.memory]
        memory.weight = memory.trains = True
        self.recording.weights.append((label, place))

    def observe(self, label: str, tensor: torch.Tensor) -> None:
        """Note an observed tensor."""
        if self.on:
            with _disable_current_modes():
                self.recording.observed.append((label, self.place(tensor)))

    def start(self, tensor: torch.Tensor, cotangent: torch.Tensor) -> None:
        """Note a tensor from which the backward pass starts."""
        with _disable_current_modes():
            self.recording.starts.append((self.place(tensor), cotangent.detach().clone()))

    def stop(self) -> None:
        """Stop recording: the backward pass follows."""
        self.on = False

    # -- recording --------------------------------------------------------------------------------

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an op and note it."""
        kwargs = kwargs or {}
        plain = self.on and torch.Tag.inplace_view not in func.tags
        if not plain or any(t.device.type != "cpu" for t in tensors_in((args, kwargs))):
            with dispatch.kept():
                return func(*args, **kwargs)
        if func.__name__.partition(".")[0] in _MASKED:
            args = (args[0], [*_places(args[1])], *args[2:])
        # Their state before the op, which may write or resize them.
        given, named = tree_map_only(torch.Tensor, self._read, (args, kwargs))
        with dispatch.kept():
            out = func(*args, **kwargs)
        try:
            self._note(func, args, kwargs, given, named, out)
        except Exception as error:  # ours, not the case's
            self.failed, self.on = error, False
        return out

    def _note(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        given: tuple[Any, ...],
        named: dict[str, Any],
        out: Any,
    ) -> None:
        form, random = functional(func), draws(func, args, kwargs)
        written = form.written(args, kwargs, random)
        made = [t for t in tensors_in(out) if not any(t is w for w in written)]
        if not written:  # a view computes nothing, unless it has another dtype
            viewed = {_key(t)[0] for t in tensors_in((args, kwargs))}
            made = [t for t in made if _key(t)[0] not in viewed or _key(t) not in self._memories]
        if form.uninitialised or not (written or made) or any(t.device.type != "cpu" for t in made):
            return
        if any(self._index(t) in self._twins for t in written):
            raise NotImplementedError(f"{form.name} writes memory of two dtypes")
        drawn = tuple(t.detach().clone() for t in (*written, *made)) if random else None
        places = *map(self.place, written), *(self.place(t, fresh=True) for t in made)
        memories = self.recording.memories
        reads = (r for r in tree_leaves((given, named)) if isinstance(r, Read) and not r.stops)
        if any(memories[r.place.memory].trains for r in reads):
            if random:
                raise NotImplementedError(f"{form.name} draws, and has a gradient")
            for place in places:
                memories[place.memory].trains = True
        names = {k: v for k, v in named.items() if k not in form.outs}
        quiet = not torch.is_grad_enabled()
        step = Step(form.name, given, names, places, bool(written), drawn, quiet)
        self.recording.steps.append(step)

    def _read(self, tensor: torch.Tensor) -> Read:
        return Read(self.place(tensor), not tensor.requires_grad)

    def place(self, tensor: torch.Tensor, *, fresh: bool = False) -> Place:
        """Return the place of a tensor; memory met for the first time is a constant.

        fresh: a step writes it, as far as can be seen all of it.
        """
        index = self._index(tensor, fresh=fresh)
        return Place(
            index,
            tuple(tensor.shape),
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def _index(self, tensor: torch.Tensor, *, fresh: bool = False) -> int:
        if tensor._is_zerotensor():
            tensor = torch.zeros(tensor.shape, dtype=tensor.dtype)
        storage, key = tensor.untyped_storage(), _key(tensor)
        count = storage.nbytes() // tensor.element_size()
        memories = self.recording.memories
        found = self._memories.get(key)
        if found is not None and memories[found].count == count:
            return found
        others = [i for (data, _), i in self._memories.items() if data == storage._cdata]
        initial = None
        if not fresh or tensor.numel() != count:
            plain = torch.empty(0, dtype=tensor.dtype).set_(storage, 0, (count,), (1,))
            initial = plain.detach().clone()
        memories.append(Memory(tensor.dtype, count, initial))
        self._kept.append(storage)  # the id of a freed storage may be reused
        index = len(memories) - 1
        self._memories[key] = index
        if others and found is None:
            self._twins.update((index, *others))
        return index


def _key(tensor: torch.Tensor) -> tuple[int, torch.dtype]:
    return tensor.untyped_storage()._cdata, tensor.dtype


# Masks among their indices choose the number of elements: they count as the chosen indices.
_MASKED = frozenset(("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"))


def _places(indices: Sequence[torch.Tensor | None]) -> Iterator[torch.Tensor | None]:
    for index in indices:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            yield index
        else:
            yield from index.nonzero(as_tuple=True) if index.dim() else [index]


# -- ops and their schemas ----------------------------------------------------------------------

_UNINITIALISED = frozenset(
    ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
)


@dataclass(frozen=True, slots=True)
class Form:
    """How an overload writes: its functional overload, and the arguments that it writes.

    outs: keyword arguments that are written but not read.
    """

    name: str
    arguments: tuple[str, ...]
    writes: tuple[str, ...]
    outs: tuple[str, ...]
    uninitialised: bool

    def written(
        self, args: Sequence[Any], kwargs: dict[str, Any], random: bool
    ) -> list[torch.Tensor]:
        """Return the written tensors, in the order of the schema."""
        given = {**dict(zip(self.arguments, args, strict=False)), **kwargs}
        # Where it draws nothing, rrelu writes no noise.
        names = (n for n in self.writes if random or n != "noise")
        return tensors_in([given.get(name) for name in names])


@lru_cache(maxsize=4096)
def functional(func: Any) -> Form:
    """Return the form of an overload: ``add`` for ``add_.Tensor`` and ``add.out``."""
    arguments = func._schema.arguments
    writes = [a for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    outs = tuple(a.name for a in writes if a.kwarg_only)
    base, _, overload = func.__name__.partition(".")
    name = _without_writing(func, base, overload, outs) if writes else f"{base}.{overload}"
    names, written = (tuple(a.name for a in some) for some in (arguments, writes))
    return Form(name, names, written, outs, base in _UNINITIALISED)


def _without_writing(func: Any, base: str, overload: str, outs: tuple[str, ...]) -> str:
    """Return the name of the overload with the same arguments that writes none."""
    if not outs:
        plain = base[:-1] if base.endswith("_") else base
        return f"{plain}.{overload}"
    wanted = [(a.name, str(a.type)) for a in func._schema.arguments if a.name not in outs]
    packet = getattr(torch.ops.aten, base)
    for other in packet.overloads():
        found = getattr(packet, other)
        if [(a.name, str(a.type)) for a in found._schema.arguments] == wanted:
            return f"{base}.{other}"
    return f"{base}.{overload}"


def dense(place: Place, count: int) -> tuple[int, ...] | None:
    """Return the order of dimensions in which a place covers its whole memory, or None."""
    if place.offset or math.prod(place.shape) != count:
        return None
    order = sorted(range(len(place.shape)), key=lambda d: (-place.strides[d], place.shape[d] == 1))
    step = 1
    for d in reversed(order):
        if place.shape[d] != 1:
            if place.strides[d] != step:
                return None
            step *= place.shape[d]
    return tuple(order)
