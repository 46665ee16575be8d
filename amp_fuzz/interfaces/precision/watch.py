"""What one run under autocast lost, op by op: by statement, and as events."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch.utils.flop_counter import flop_registry

from amp_fuzz.interfaces.precision.sites import Place, Places
from amp_fuzz.reference.shadow.copies import WIDE
from amp_fuzz.reference.shadow.schemas import draws
from amp_fuzz.reference.shadow.twin import Step, Twin, is_followed
from amp_fuzz.reference.shadow.written import SIXTEEN, in_method

__all__ = ["Event", "EventKind", "Tally", "Watch", "error_of"]

_aten = torch.ops.aten

EventKind: TypeAlias = Literal[
    "overflow",
    "vanish",
    "collapse",
    "constant",
    "lowered",
    "stuck",
    "choice",
    "raises",
]
_WHOLE = {torch.bfloat16: 256, torch.float16: 2048}
"""Up to here a dtype has every whole number."""
_CONSTANTS = ("add", "sub", "rsub", "clamp", "clamp_min", "maximum", "fill", "full", "where")
_CHOOSING = (
    *("argmax", "argmin", "max", "min", "sort", "topk", "kthvalue", "mode", "searchsorted"),
    *("bucketize", "eq", "ne", "gt", "ge", "lt", "le", "nonzero", "cast"),
    *(f"max_pool{n}d_with_indices" for n in (2, 3)),
    *(f"adaptive_max_pool{n}d" for n in (2, 3)),
)
"""Ops whose results of whole numbers and booleans are computed from floats."""
_ADDING = ("add", "add_", "sub_", "lerp_", "addcmul_", "addcdiv_", "copy_")


@dataclass(slots=True)
class Tally:
    """What the ops of one statement lost, forward or backward.

    given, made, result: the largest relative error (the Euclidean norm of a tensor's error over
    that of the exact tensor) of what other statements gave it, of what an op added itself, and of
    what an op returned. overflowed, flushed: how many elements became infinite or NaN, and 0,
    though they exactly are neither; of: of how many. low: elements that are 16 bits wide. ops:
    their names.
    """

    given: float = 0.0
    made: float = 0.0
    result: float = 0.0
    overflowed: int = 0
    flushed: int = 0
    of: int = 0
    low: int = 0
    ops: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class Event:
    """Something that a statement of the user's code lost, and how often.

    op: the op, as torch names it. text: what happened, a sentence without its subject's place.
    count: how often it happened there.
    """

    kind: EventKind
    place: Place
    backward: bool
    op: str
    text: str
    count: int = 1


def error_of(value: torch.Tensor, exact: torch.Tensor) -> tuple[float, int]:
    """Return the relative error of a tensor, and how many of its elements are lost.

    The error is the Euclidean norm of the difference over that of the exact tensor, among elements
    that are finite in both; 0 where both are 0. Lost are those that are finite only exactly.
    """
    off, size = 0.0, 0.0
    for part, exactly in zip(*_parts(value, exact), strict=True):
        off = math.hypot(off, _norm(exactly - part))
        size = math.hypot(size, _norm(exactly))
    lost = 0
    if not (off < float("inf") and size < float("inf")):
        wide = value.to(exact.dtype)
        finite = torch.isfinite(exact)
        lost = int((finite & ~torch.isfinite(wide)).sum())
        finite &= torch.isfinite(wide)
        off, size = _norm((wide - exact)[finite]), _norm(exact[finite])
    if off == 0:
        return 0.0, lost
    return (off / size if size else float("inf")), lost


def _norm(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor)) if tensor.numel() else 0.0


_PART = 2**15


def _parts(*tensors: torch.Tensor) -> Sequence[Sequence[torch.Tensor]]:
    """Return tensors of one shape in parts that stay in a core's cache: new memory takes longer."""
    if tensors[0].device.type != "cpu" or tensors[0].numel() <= _PART:
        return [[t] for t in tensors]
    order = sorted(range(tensors[0].dim()), key=tensors[0].stride, reverse=True)
    ordered = [t.permute(order) for t in tensors]
    if not all(t.is_contiguous() for t in ordered):
        return [[t] for t in tensors]
    return [t.view(-1).split(_PART) for t in ordered]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Watch:
    """Follows a run with a `Twin`: give `Watch.note` to it.

    state: the storages that live longer than the call (parameters, buffers), as ``_cdata``. casts:
    how many autocast made. written: the statements that ask for 16 bits by hand. choices: how many
    results of whole numbers and booleans are others for exact numbers. products: floating-point
    operations of products, by statement and whether they were in 16 bits.
    """

    def __init__(self, places: Places, state: frozenset[int]) -> None:
        self.places, self.state = places, state
        self.twin = Twin(self.note)
        self.tallies: dict[tuple[Place, bool], Tally] = {}
        self.events: dict[tuple[Any, ...], Event] = {}
        self.products: Counter[tuple[Place, bool]] = Counter()
        self.casts = 0
        self.written: dict[Place, None] = {}
        self.choices = 0

    # -- one op -----------------------------------------------------------------------------------

    def note(self, step: Step) -> None:
        """Take in one op: see `Twin`."""
        place, backward = self.places.now()
        name = step.func.__name__.partition(".")[0]
        name = "cast" if name == "_to_copy" else name
        tally = self.tallies.setdefault((place, backward), Tally())
        tally.ops[name] += 1
        if step.func is _aten._to_copy.default and step.made:
            self._cast(step, place, backward)
        here = place, backward
        given = max(
            (self._known(t, here) for t, exact in step.given if exact is not None), default=0.0
        )
        low = any(t.dtype in SIXTEEN for t, _ in step.made)
        if low and place.file and not backward and (in_method() or not step.given):
            self.written.setdefault(place)
        made = self._made(step) if low else [0.0] * len(step.made)
        tally.given = max(tally.given, given)
        by = next((b for t, e in step.given if e is not None and (b := self._by(t))), None)
        for (t, exact), own in zip(step.made, made, strict=True):
            if by is not None and step.facts.pointwise and t.dtype is torch.float32:
                self.twin.tags(t)["wide"] = by
            if exact is None:
                continue
            error, lost = error_of(t, exact)
            error = math.inf if lost else error
            self.twin.tags(t).update(error=error, here=here)
            tally.made, tally.result = max(tally.made, own), max(tally.result, error)
            tally.of += t.numel()
            tally.low += t.numel() if t.dtype in SIXTEEN else 0
            if lost:
                self._overflowed(step, t, lost, tally, place, backward, name)
            if t.dtype in SIXTEEN:
                self._small(step, t, exact, tally, place, backward, name)
        if step.numbers and name in _CHOOSING:
            self._chosen(step, place, backward, name)
        if name in _ADDING and step.facts.writes and low:
            self._added(step, place, backward, name)
        self._count(step, place, low)

    def _known(self, tensor: torch.Tensor, here: tuple[Place, bool]) -> float:
        """Return the error of an operand; 0 if the same statement made it, as in a loop."""
        tags = self.twin.tags(tensor)
        return 0.0 if tags.get("here") == here else float(tags.get("error", 0.0))

    def _by(self, tensor: torch.Tensor) -> Place | None:
        """Return where the user's code made a tensor float32 by hand, or what it is made of."""
        return self.twin.tags(tensor).get("wide")

    def _made(self, step: Step) -> list[float]:
        """Return the error that the op itself adds to each result: it computes in float32.

        What is drawn at random has none.
        """
        if step.facts.draws and draws(step.func, step.args, step.kwargs):
            return [0.0] * len(step.made)
        if step.single is not None:
            return [error_of(t, f)[0] for (t, _), f in zip(step.made, step.single, strict=True)]
        inputs = [t.float() if t.dtype in SIXTEEN else t for t, _ in step.given]
        if any(t.dtype not in (torch.float32, torch.float64) for t in inputs if t.dtype in WIDE):
            return [0.0] * len(step.made)
        if any(exact is None for _, exact in step.made):
            return [0.0] * len(step.made)
        cast = step.func is _aten._to_copy.default
        found = [t.double() if t.dtype not in WIDE else t for t in inputs[:1]] if cast else None
        found = found or step.again(inputs)
        if found is None:
            return [0.0] * len(step.made)
        errors = [error_of(t, f) for (t, _), f in zip(step.made, found, strict=True)]
        return [math.inf if lost else error for error, lost in errors]

    # -- events -----------------------------------------------------------------------------------

    def _tell(
        self, kind: EventKind, place: Place, backward: bool, op: str, text: str, key: Any = None
    ) -> None:
        event = self.events.get((kind, place, backward, op, key))
        if event is not None:
            event.count += 1
            return
        self.events[kind, place, backward, op, key] = Event(kind, place, backward, op, text)

    def _overflowed(
        self,
        step: Step,
        t: torch.Tensor,
        lost: int,
        tally: Tally,
        place: Place,
        backward: bool,
        name: str,
    ) -> None:
        tally.overflowed += lost
        if any(
            exact is not None and bool((torch.isfinite(exact) & ~torch.isfinite(g)).any())
            for g, exact in step.given
        ):
            return  # an op before this one is told of
        some = f"{lost} of {t.numel()} elements of {name}"
        found = step.again([g.double() if g.dtype in WIDE else g for g, _ in step.given])
        if found is not None and not all(bool(torch.isfinite(f).all()) for f in found):
            text = f"{some} are not finite for operands that lost their digits"
        else:
            text = f"{some} leave the range of {_short(t.dtype)}"
        self._tell("overflow", place, backward, name, text)

    def _small(
        self,
        step: Step,
        t: torch.Tensor,
        exact: torch.Tensor,
        tally: Tally,
        place: Place,
        backward: bool,
        name: str,
    ) -> None:
        if t.is_complex():
            return
        flushed = 0
        if t.dtype is torch.float16:
            there, kept = int(torch.count_nonzero(exact)), int(torch.count_nonzero(t))
            flushed = max(there - kept, 0)
            tally.flushed += flushed
            if flushed and not kept and t.numel() > 1:
                text = f"all {there} elements of {name} that are not 0 become 0 in float16"
                self._tell("vanish", place, backward, name, text)
        if name.rstrip("_") in _CONSTANTS and not backward:
            self._constant(step, t, exact, place, name)
        if not backward and 1 < t.numel() <= 2**20:
            self._collapsed(t, exact, place, name)

    def _constant(
        self, step: Step, t: torch.Tensor, exact: torch.Tensor, place: Place, name: str
    ) -> None:
        """Tell of a number in the code that is 0 in 16 bits, if a result is so too."""
        for value in (*step.args, *step.kwargs.values()):
            if isinstance(value, bool) or not isinstance(value, int | float) or value == 0:
                continue
            held = float(torch.tensor(float(value)).to(t.dtype))
            if held == 0 and bool(((t == 0) & (exact != 0)).any()):
                text = f"{value!r} is 0 in {_short(t.dtype)}, and {name} gives 0 where it counts"
                self._tell("constant", place, False, name, text, value)

    def _collapsed(self, t: torch.Tensor, exact: torch.Tensor, place: Place, name: str) -> None:
        """Tell of different whole numbers that become equal."""
        end = torch.linalg.vector_norm(exact, float("inf")).item()
        if not _WHOLE[t.dtype] < end < 2.0**53 or bool((exact != exact.round()).any()):
            return
        there, kept = len(torch.unique(exact)), len(torch.unique(t))
        if kept < there:
            text = (
                f"{there} different whole numbers up to {end:.0f} become {kept} in "
                f"{_short(t.dtype)}, which has each only up to {_WHOLE[t.dtype]}"
            )
            self._tell("collapse", place, False, name, text)

    def wide(self, tensor: torch.Tensor, place: Place) -> None:
        """Say that the user's code made a tensor float32 by hand."""
        if tensor.dtype is torch.float32 and is_followed(tensor):
            self.twin.tags(tensor)["wide"] = place

    def raised(self, place: Place, error: Exception) -> None:
        """Tell of the statement that raised an error."""
        text = f"raises {type(error).__name__}: {error}".partition("\n")[0]
        self._tell("raises", place, False, "", text)

    def _cast(self, step: Step, place: Place, backward: bool) -> None:
        """Tell of a cast that autocast makes of what was made float32 by hand before."""
        (given, exact), (made, _) = step.given[0], step.made[0]
        if made.dtype not in SIXTEEN or exact is None or given.dtype in SIXTEEN or in_method():
            return
        by = self._by(given)
        if by is not None and not backward and given.dtype is torch.float32:
            text = f"float32 by hand at {by.short}, cast to {_short(made.dtype)} again by autocast"
            self._tell("lowered", place, False, "cast", text, by)

    def _chosen(self, step: Step, place: Place, backward: bool, name: str) -> None:
        """Tell of indices that are others for exact numbers."""
        wide = [t if exact is None else exact for t, exact in step.given]
        if all(exact is None for _, exact in step.given):
            return
        turn = iter(wide)
        args = [next(turn) if isinstance(a, torch.Tensor) else a for a in step.args]
        try:
            found = step.func(*args, **step.kwargs)
        except Exception:
            return
        exactly = found if isinstance(found, tuple) else (found,)
        theirs = [t for t in exactly if t.dtype not in WIDE]
        for mine, other in zip(step.numbers, theirs, strict=False):
            off = int((mine != other).sum()) if mine.shape == other.shape else 0
            if off:
                self.choices += off
                text = (
                    f"{off} of {mine.numel()} results of {name} differ from those of exact numbers"
                )
                self._tell("choice", place, backward, name, text)

    def _added(self, step: Step, place: Place, backward: bool, name: str) -> None:
        """Tell of updates of what outlives the call that are smaller than its last place."""
        t, exact = step.made[0]
        if exact is None or t.untyped_storage()._cdata not in self.state:
            return
        before = next((p for p in step.given if p[0].shape == t.shape and p[1] is not None), None)
        if before is None or before[1] is None:
            return
        moved = exact != before[1]
        stuck = moved & (t == before[0])
        if 2 * int(stuck.sum()) >= int(moved.sum()) > 0:
            text = (
                f"{int(stuck.sum())} of {int(moved.sum())} elements do not move: the update is "
                f"smaller than the last place of {_short(t.dtype)}"
            )
            self._tell("stuck", place, backward, name, text)

    # -- products ---------------------------------------------------------------------------------

    def _count(self, step: Step, place: Place, low: bool) -> None:
        formula = flop_registry.get(step.func._overloadpacket)
        if formula is None or not step.made:
            return
        try:
            out: Any = step.made[0][0] if len(step.made) == 1 else tuple(t for t, _ in step.made)
            self.products[place, low] += int(formula(*step.args, **step.kwargs, out_val=out))
        except Exception:  # a formula for other arguments
            return

    def told(self, *kinds: EventKind) -> Sequence[Event]:
        """Return the events of some kinds, in order."""
        return [event for event in self.events.values() if not kinds or event.kind in kinds]
