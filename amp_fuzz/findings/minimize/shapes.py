"""Smaller shapes: all dimensions of one size at once, with the arguments that name that size.

There are no rules for the shapes of an op. A change that breaks a call raises under the reference,
where the case did not raise, and is rejected for that. For ops that read past their inputs instead
of raising, `amp_fuzz.catalogue.unchecked` has the documented shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import msgspec

from amp_fuzz.cases.case import Case
from amp_fuzz.cases.program import Arg, Items, Program, Statement, TensorSpec
from amp_fuzz.findings.minimize.edit import mapped, replace_input
from amp_fuzz.findings.minimize.specs import elements, frozen, narrowed, selected

__all__ = ["frozen_case", "ranks", "sizes"]


def frozen_case(case: Case) -> Iterator[Case]:
    """Yield the case holding its own elements, so a smaller shape is a part of them."""
    inputs = tuple(frozen(s, case.seed) for s in case.program.inputs)
    yield case.with_program(inputs=inputs)


def sizes(case: Case) -> Iterator[Case]:
    """Yield the case with smaller dimensions, those that shrink most first."""
    program = case.program
    found = sorted({d for s in program.inputs for d in s.shape if d > 1}, reverse=True)
    for to in (1, 2):
        smaller = {d: to for d in found if d > to}
        if len(smaller) > 1:
            yield from _resized(case, smaller)
    for size in found:
        for to in dict.fromkeys((1, 2, size // 2, size - 1)):
            if not 0 < to < size:
                continue
            several = {d: d // size * to for d in found if d % size == 0}
            if len(several) > 1:  # three projections in one weight, heads side by side
                yield from _resized(case, several)
            yield from _resized(case, {size: to})
    for i, spec in enumerate(program.inputs):
        for dim, size in enumerate(spec.shape):
            for to in dict.fromkeys((1, 2, size // 2, size - 1)):
                if not 0 < to < size:
                    continue
                starts = dict.fromkeys((0, size - to)) if spec.values else (0,)
                for start in starts:
                    smaller_spec = narrowed(spec, dim, start, to)
                    yield _with(case, replace_input(program, i, smaller_spec))


def _resized(case: Case, smaller: Mapping[int, int]) -> Iterator[Case]:
    """Yield the case with sizes replaced, in inputs and arguments, then only in inputs."""
    ends = (False, True) if any(s.values for s in case.program.inputs) else (False,)
    for last in ends:
        inputs = tuple(_narrowed(s, smaller, last=last) for s in case.program.inputs)
        program = msgspec.structs.replace(case.program, inputs=inputs)
        said = mapped(program, lambda _, s: _saying(s, smaller))
        yield _with(case, said)
        if said != program:
            yield _with(case, program)


def _narrowed(spec: TensorSpec, smaller: Mapping[int, int], *, last: bool) -> TensorSpec:
    for dim, size in enumerate(spec.shape):
        if size in smaller:
            start = size - smaller[size] if last else 0
            spec = narrowed(spec, dim, start, smaller[size])
    return spec


def _saying(statement: Statement, smaller: Mapping[int, int]) -> Statement:
    def change(arg: Arg) -> Arg:
        if isinstance(arg, Items):
            return Items(tuple(change(a) for a in arg.items))
        if isinstance(arg, int) and not isinstance(arg, bool):
            return smaller.get(arg, arg)
        return arg

    return msgspec.structs.replace(
        statement,
        args=tuple(map(change, statement.args)),
        kwargs=tuple((k, change(a)) for k, a in statement.kwargs),
    )


def ranks(case: Case) -> Iterator[Case]:
    """Yield the case with one dimension fewer: in all inputs that have it, then in one."""
    specs = case.program.inputs
    longest = max((len(s.shape) for s in specs), default=0)
    if longest:
        yield _each(case, _scalar)
    for dim in range(longest):
        for only_longest in (False, True):
            least = longest if only_longest else dim + 1

            def drop(spec: TensorSpec, dim: int = dim, least: int = least) -> TensorSpec:
                fits = len(spec.shape) >= least and spec.shape[dim] > 0
                return selected(spec, dim, 0) if fits else spec

            yield _each(case, drop)
    for i, spec in enumerate(specs):
        for dim, size in enumerate(spec.shape):
            if size:
                yield _with(case, replace_input(case.program, i, selected(spec, dim, 0)))


def _scalar(spec: TensorSpec) -> TensorSpec:
    while spec.shape and elements(spec):
        spec = selected(spec, 0, 0)
    return spec


def _each(case: Case, change: Callable[[TensorSpec], TensorSpec]) -> Case:
    inputs = tuple(map(change, case.program.inputs))
    return _with(case, msgspec.structs.replace(case.program, inputs=inputs))


def _with(case: Case, program: Program) -> Case:
    return msgspec.structs.replace(case, program=program)
