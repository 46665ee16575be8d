"""The distance between two cases: in how many places they differ."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import msgspec

from amp_fuzz.cases.case import Case
from amp_fuzz.cases.literals import Number
from amp_fuzz.cases.program import Context, Node, Region, Statement
from amp_fuzz.findings.minimize.edit import renamed
from amp_fuzz.findings.minimize.shapes import frozen_case
from amp_fuzz.findings.minimize.specs import held_numbers

__all__ = ["Distance", "distance", "nearest"]

Distance: TypeAlias = tuple[int, int, int, float]
"""The number of places that differ; of these, elements of inputs; inputs whose elements only one
case holds; the distance of the elements. Smaller is nearer."""

_Elements: TypeAlias = Mapping[tuple[str, tuple[int, ...]], Number]


def nearest(case: Case, others: Iterable[Case], *, literal: bool = True) -> Case | None:
    """Return the case of `others` nearest to a case, the first of equals, or None if there is none.

    literal: whether inputs have values; if so, the values count and not their domains.
    """
    best: Case | None = None
    least: Distance | None = None
    said = _Said(case, literal=literal)
    for other in others:
        found = said.distance(_Said(other, literal=literal), least)
        if found is not None and (least is None or found < least):
            best, least = other, found
    return best


def distance(case: Case, other: Case, *, literal: bool = True) -> Distance:
    """Return the distance between two cases."""
    found = _Said(case, literal=literal).distance(_Said(other, literal=literal), None)
    assert found is not None
    return found


class _Said:
    """The content of a case by place.

    Statements are numbered through regions, and each has the contexts around it. So removing a
    region changes one thing of each statement in it.
    """

    def __init__(self, case: Case, *, literal: bool) -> None:
        self.held = tuple(bool(s.values) for s in case.program.inputs)
        if literal:  # before renaming: drawn values depend on names
            (case,) = frozen_case(case)
        program = renamed(case.program)
        self._inputs, self._literal = program.inputs, literal
        self.sizes = [math.prod(s.shape) for s in program.inputs]
        self.places = dict(_walked(msgspec.to_builtins(case.plan), "plan"))
        self.places |= {f"output {name}": "" for name in program.outputs}
        for number, (statement, around) in enumerate(_statements(program.body, ())):
            self.places[f"{number} in"] = repr(around)
            self.places |= _walked(msgspec.to_builtins(statement.args), f"{number} args")
            for name, arg in statement.kwargs:
                self.places |= _walked(msgspec.to_builtins(arg), f"{number} {name}=")
            self.places[f"{number} op"] = statement.op
            self.places[f"{number} form"] = statement.form
        drawn = False
        for spec in program.inputs:
            for field in ("shape", "dtype", "layout", "device"):
                self.places[f"{spec.name} {field}"] = repr(getattr(spec, field))
            if not (literal and spec.values):
                self.places[f"{spec.name} drawn"] = f"{spec.domain} {spec.bound}"
                drawn = True
        if drawn or not literal:
            self.places["seed"] = str(case.seed)

    def elements(self) -> _Elements:
        found: dict[tuple[str, tuple[int, ...]], Number] = {}
        for spec in self._inputs if self._literal else ():
            if spec.values:
                coordinates = itertools.product(*map(range, spec.shape))
                found |= {
                    (spec.name, place): number
                    for place, number in zip(coordinates, held_numbers(spec), strict=True)
                }
        return found

    def distance(self, other: _Said, least: Distance | None) -> Distance | None:
        """Return the distance to another case, or None if it is beyond `least`."""
        names = self.places.keys() | other.places.keys()
        places = sum(self.places.get(n) != other.places.get(n) for n in names)
        # A large case has thousands of elements, and cannot be close to a small one.
        if least is not None and places + abs(sum(self.sizes) - sum(other.sizes)) > least[0]:
            return None
        mine, theirs = self.elements(), other.elements()
        differing = [
            (mine.get(place), theirs.get(place))
            for place in mine.keys() | theirs.keys()
            if repr(mine.get(place)) != repr(theirs.get(place))
        ]
        held = sum(a != b for a, b in itertools.zip_longest(self.held, other.held))
        apart = sum(_apart(a, b) for a, b in differing)
        return places + len(differing), len(differing), held, apart


def _statements(
    body: tuple[Node, ...], around: tuple[Context, ...]
) -> Iterator[tuple[Statement, tuple[Context, ...]]]:
    for node in body:
        if isinstance(node, Region):
            yield from _statements(node.body, (*around, node.context))
        else:
            yield node, around


def _walked(value: Any, place: str) -> dict[str, str]:
    if isinstance(value, dict):
        pairs = [(f"{place}.{key}", inner) for key, inner in value.items()]
    elif isinstance(value, (list, tuple)):
        pairs = [(f"{place}[{i}]", inner) for i, inner in enumerate(value)]
    else:
        return {place: repr(value)}
    return {name: text for key, inner in pairs for name, text in _walked(inner, key).items()}


def _apart(a: Number | None, b: Number | None) -> float:
    if a is None or b is None:
        return math.inf
    found = abs(complex(a) - complex(b))
    return found if math.isfinite(found) else math.inf
