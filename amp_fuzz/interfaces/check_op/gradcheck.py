"""The contract of a first derivative: backward gives what the values of the op give.

`torch.autograd.gradcheck` compares with a tolerance and knows no kinks. So an honest clamp fails it
at an input near its limit, and a wrong one passes it at inputs far from it. Here `slopes` bounds
the error of each number, outputs near a kink are left out, and the op is also called on inputs of
our own. That works in any dtype; float64 has the smallest bounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from amp_fuzz.interfaces.check_op.backward import doubled, symmetric
from amp_fuzz.interfaces.check_op.passes import Pass, Passes, joined
from amp_fuzz.interfaces.check_op.slopes import CLOSE, STEPS, slopes, unit, width
from amp_fuzz.interfaces.check_op.tried import Broken, Skipped, Tried, Unjudged
from amp_fuzz.oracle.compare import same
from amp_fuzz.reports.printable import plural

__all__ = ["gradchecked"]

Point: TypeAlias = Mapping[str, torch.Tensor]
"""Tensors by name: values, or a direction."""

_DIRECTIONS = 3
_SIZES = (0.03, 0.3, 1.0, 2.5, 7.0, 20.0)
_SHOWN = 64


def gradchecked(tried: Tried) -> str:
    """Judge the gradients of a plain call by numbers, in float64 if the op runs in it."""
    tried.plain()
    line = _line(tried)
    given = line.start()
    reached = line.values(given)
    if not any(x.numel() for x in given.values()) or (reached is not None and not len(reached)):
        raise Skipped("it has no gradient with an element")
    generator = torch.Generator().manual_seed(line.passes.subject.seed)
    judged = 0
    for own, point in enumerate((given, *_own(line, given, generator))):
        several = [line.compared(point, _direction(point, generator)) for _ in range(_DIRECTIONS)]
        found = [one for one in several if one is not None]
        judged += bool(found)
        if found and all(one.differ for one in found):
            where, what = line.guilty(point) or ("", "backward differs from numbers")
            at = "inputs of our own" if own else "the inputs given"
            raise Broken(f"{what}, at {at}, in {line.shown}", where)
    if not judged:
        raise Unjudged(f"no number says what the derivative is, in {line.shown}")
    return f"{plural(judged, 'point')}, in {line.shown}"


def _line(tried: Tried) -> _Line:
    """Return what computes along a line: in float64, or as given if the op does not run in it."""
    bare = tried.passes.bare()
    wide = replace(bare, subject=doubled(tried.target.subject))
    for passes in (wide, bare):
        with passes.calling() as one:
            seen = joined(one.forward(), one.backward)
            names = [n for n in one.leaves() if one.tensors[n].grad is not None]
            if seen.raised is None and names:
                given = [one.tensors[n].dtype for n in names]
                dtypes = {d.to_real() for d in (*given, *(t.dtype for t in _trained(one)))}
                return _Line(passes, names, max(dtypes, key=unit))
    raise Skipped("it has no gradient without autocast")


def _trained(one: Pass) -> list[torch.Tensor]:
    """Return the outputs that have a derivative, in order."""
    plain = (t for t in one.outputs.values() if t.layout is torch.strided)
    return [t for t in plain if t.requires_grad]


@dataclass(frozen=True, slots=True)
class _Compared:
    """A derivative by backward and by numbers, and by how much honest ones may differ."""

    backward: float
    numbers: float
    allowed: float

    @property
    def differ(self) -> bool:
        """Whether the backward is wrong."""
        return abs(self.backward - self.numbers) > self.allowed


@dataclass(frozen=True, slots=True)
class _Line:
    """An op along lines through some points.

    names: of the tensors that move. dtype: the one with the fewest digits in which it computes.
    """

    passes: Passes
    names: list[str]
    dtype: torch.dtype

    @property
    def shown(self) -> str:
        """The dtype for people."""
        return str(self.dtype).removeprefix("torch.")

    def start(self) -> Point:
        """Return the values that the op was given."""
        with self.passes.calling() as one:
            return {name: one.tensors[name].detach().clone() for name in self.names}

    def values(self, point: Point) -> torch.Tensor | None:
        """Return the outputs at a point, or None if the op raises there."""
        with self.passes.calling() as one:
            _move(one, point)
            raised = one.forward().raised is not None
            return None if raised else torch.cat([torch.empty(0), *map(_flat, _trained(one))])

    def compared(self, point: Point, direction: Point) -> _Compared | None:
        """Compare the derivatives in a direction, or return None if no number says anything.

        They are those of a weighted sum of the outputs whose slopes are trusted.
        """
        far = width(self.dtype)
        places = [far * k / STEPS for k in range(-STEPS, STEPS + 1)] + [-far / CLOSE, far / CLOSE]
        rows = [
            self.values({n: _beyond(x, direction[n], by) for n, x in point.items()})
            for by in places
        ]
        whole = [row for row in rows if row is not None]
        if len(whole) < len(rows) or len({row.shape for row in whole}) > 1:
            return None
        found = slopes(torch.stack(whole), self.dtype)
        if not bool(found.trusted.any()):
            return None
        generator = torch.Generator().manual_seed(self.passes.subject.seed)
        weights = 0.5 + torch.rand(found.slope.shape, generator=generator, dtype=torch.float64)
        # With the signs of the slopes, nothing cancels.
        weights = torch.where(found.slope < 0, -weights, weights) / found.size
        weights = torch.where(found.trusted, weights, torch.zeros_like(weights))
        back = self.backward(point, weights / weights.abs().amax())
        if back is None:
            return None
        weights, gradients = back
        parts = [_times(g, direction[n]) for n, g in gradients.items()]
        total = sum(float(part.sum()) for part in parts)
        numbers = float((weights * found.slope)[found.trusted].sum())
        # A backward may be as inexact as the forward, or compute in float32 to half of its digits.
        lost = float((found.bound / found.size)[found.trusted].median()) * far
        digits = max(lost, math.sqrt(unit(torch.float32)))
        terms = sum(float(part.abs().sum()) for part in parts)
        terms += float((weights.abs() * found.size)[found.trusted].sum())
        allowed = float((weights.abs() * found.bound)[found.trusted].sum()) + digits * terms
        return _Compared(total, numbers, allowed) if math.isfinite(total) else None

    def others(self, point: Point) -> list[torch.Tensor]:
        """Return the outputs at a point that have no derivative: indices, counts, error codes."""
        with self.passes.calling() as one:
            _move(one, point)
            one.forward()
            return [t for t in one.outputs.values() if not t.dtype.is_floating_point]

    def backward(self, point: Point, weights: torch.Tensor) -> tuple[torch.Tensor, Point] | None:
        """Return weights as the outputs' dtypes have them, and gradients; None if it raises."""
        with self.passes.calling() as one:
            _move(one, point)
            if one.forward().raised is not None:
                return None
            outputs, leaves = _trained(one), [one.tensors[n] for n in self.names]
            shares = weights.split([_flat(t).numel() for t in outputs])
            cotangents = [_like(w, t) for w, t in zip(shares, outputs, strict=True)]
            try:
                found: Sequence[torch.Tensor | None] = torch.autograd.grad(
                    outputs, leaves, cotangents, allow_unused=True
                )
            except Exception:  # the op's own
                return None
            gradients = {n: g for n, g in zip(self.names, found, strict=True) if g is not None}
            return torch.cat(list(map(_flat, cotangents))), gradients

    def guilty(self, point: Point) -> tuple[str, str] | None:
        """Return the first tensor, or element of a small one, whose derivative is wrong."""
        for name, value in point.items():
            still = {n: torch.zeros_like(x) for n, x in point.items()}
            whole = _direction(point, torch.Generator().manual_seed(0))[name]
            found = self.compared(point, {**still, name: whole})
            if found is None or not found.differ:
                continue
            for at in range(min(value.numel(), _SHOWN)):
                one = torch.zeros_like(whole)
                one.view(-1)[at] = whole.reshape(-1)[at]
                found = self.compared(point, {**still, name: one})
                if found is not None and found.differ:
                    return f"{name}.grad", _said(name, value, at, found)
            return f"{name}.grad", f"the gradient of {name} differs from numbers"
        return None


def _said(name: str, value: torch.Tensor, at: int, found: _Compared) -> str:
    """Return how the derivative for one element differs."""
    place = [int(i) for i in torch.unravel_index(torch.tensor(at), value.shape)]
    number = f"{name}{place if place else ''} is {value.reshape(-1)[at].item():.4g}"
    if abs(found.numbers) <= found.allowed:
        return f"backward gives a gradient, and numbers give 0, where {number}"
    ratio = found.backward / found.numbers
    return f"backward gives {ratio:.4g} times the gradient that numbers give, where {number}"


def _move(one: Pass, point: Point) -> None:
    with torch.no_grad():
        for name, value in point.items():
            one.tensors[name].copy_(value)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's numbers in float64; a complex one has two."""
    tensor = tensor.detach()
    parts = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return parts.double().reshape(-1)


def _like(weights: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """Return weights as a gradient of an output."""
    if output.is_complex():
        weights = torch.view_as_complex(weights.reshape(-1, 2))
    return weights.reshape(output.shape).to(output.dtype)


def _times(gradient: torch.Tensor, direction: torch.Tensor) -> torch.Tensor:
    return _flat(gradient) * _flat(direction)


def _beyond(value: torch.Tensor, direction: torch.Tensor, far: float) -> torch.Tensor:
    """Return a point of a line, rounded to its dtype."""
    wide = torch.complex128 if value.is_complex() else torch.float64
    return (value.to(wide) + direction.to(wide) * far).to(value.dtype)


def _direction(point: Point, generator: torch.Generator) -> Point:
    """Return a direction in which each element moves by about its own size, symmetric if it is."""
    found = {}
    for name, value in point.items():
        numbers = _flat(value)
        spread = float(numbers.abs().mean()) if numbers.numel() else 0.0
        steps = numbers.abs().clamp(min=0.1 * spread or 1.0)
        steps *= torch.rand(numbers.shape, generator=generator, dtype=torch.float64) - 0.5
        steps = torch.where(steps < 0, -1.0, 1.0) * (steps.abs() + 0.5 * numbers.abs())
        moved = _like(steps, value.to(torch.complex128) if value.is_complex() else value.double())
        moved = (moved + moved.mH) / 2 if symmetric(value) else moved
        found[name] = torch.where(value == 0, 0, moved) if _triangular(value) else moved
    return found


def _own(line: _Line, given: Point, generator: torch.Generator) -> Iterator[Point]:
    """Yield points of our own, with the signs of those given, at which the op gives numbers.

    Each input takes each of some sizes, small and large; what a module holds stays. An input that
    is symmetric or triangular may have to be what it is. Outputs without a derivative stay as they
    are: one may say that the others mean nothing.
    """
    inputs = [n for n in line.passes.subject.inputs() if n in given and given[n].numel()]
    if not inputs or any(symmetric(given[n]) or _triangular(given[n]) for n in inputs):
        return
    known = line.others(given)
    smallest = min(max(1, given[n].numel()) for n in inputs)
    for turn in range(max(2, math.ceil(2 * len(_SIZES) / smallest))):
        point = dict(given)
        for name in inputs:
            point[name] = _spread(given[name], turn, generator)
        values = line.values(point)
        if values is None or not bool(torch.isfinite(values).any()):
            continue
        if all(same(a, b) for a, b in zip(known, line.others(point), strict=False)):
            yield point


def _spread(value: torch.Tensor, turn: int, generator: torch.Generator) -> torch.Tensor:
    """Return a tensor of values of many sizes, in another order each turn."""
    numbers = _flat(value)
    signs = [s for s in (1.0, -1.0) if not numbers.numel() or float((numbers * s).max()) > 0] or [1]
    choices = torch.tensor([size * s for size in _SIZES for s in signs], dtype=torch.float64)
    count = numbers.numel()
    taken = choices[(torch.arange(count) + turn * count) % len(choices)]
    taken = taken[torch.randperm(count, generator=generator)]
    taken = taken * (1 + 0.2 * torch.rand(count, generator=generator, dtype=torch.float64))
    return _like(taken, value)


def _triangular(value: torch.Tensor) -> bool:
    """Return whether it may have to stay triangular."""
    if value.dim() < 2 or min(value.shape[-2:]) < 2:
        return False
    return any(torch.equal(value, part) for part in (value.tril(), value.triu()))
