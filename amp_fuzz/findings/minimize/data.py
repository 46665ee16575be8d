"""Plainer inputs: float32, contiguous, without a gradient, and small integers for elements."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import msgspec

from amp_fuzz.cases.case import Case
from amp_fuzz.cases.literals import Number
from amp_fuzz.cases.program import Arg, DType, Items, Statement, TensorSpec
from amp_fuzz.findings.minimize.edit import mapped, replace_input
from amp_fuzz.findings.minimize.specs import (
    cast,
    elements,
    held_numbers,
    moved,
    with_numbers,
)

__all__ = ["cost", "devices", "dtypes", "layouts", "roles", "seeds", "values"]

_PLAINER = {
    "float64": ("float32",),
    "float16": ("float32", "bfloat16"),
    "bfloat16": ("float32",),
    "complex128": ("complex64", "float32"),
    "complex64": ("float32",),
    "int64": ("float32",),
    "int32": ("int64", "float32"),
    "uint8": ("int64",),
}


def dtypes(case: Case) -> Iterator[Case]:
    """Yield the case with dtypes closer to float32: of all inputs, then one, then arguments."""
    specs = case.program.inputs
    plain = tuple(cast(s, _PLAINER.get(s.dtype, (s.dtype,))[0]) for s in specs)
    if plain != specs:
        yield _with_inputs(case, plain)
    for i, spec in enumerate(specs):
        for dtype in _PLAINER.get(spec.dtype, ()):
            yield _with(case, i, cast(spec, dtype))
    # In another type, other values overflow.
    for powers in (False, True):
        wide = tuple(moved(s, _PLAINER.get(s.dtype, (s.dtype,))[0], powers=powers) for s in specs)
        if wide not in (plain, specs):
            yield _with_inputs(case, wide)
    said = mapped(case.program, lambda _, s: _saying_float32(s))
    if said != case.program:
        yield msgspec.structs.replace(case, program=said)


def _saying_float32(statement: Statement) -> Statement:
    def change(arg: Arg) -> Arg:
        if isinstance(arg, Items):
            return Items(tuple(map(change, arg.items)))
        return DType("float32") if isinstance(arg, DType) else arg

    return msgspec.structs.replace(
        statement,
        args=tuple(map(change, statement.args)),
        kwargs=tuple((k, change(a)) for k, a in statement.kwargs),
    )


def roles(case: Case) -> Iterator[Case]:
    """Yield the case with inputs that carry no gradient and are passed unchanged."""
    for i, spec in enumerate(case.program.inputs):
        if spec.role != "input":
            yield _with(case, i, msgspec.structs.replace(spec, role="input"))


def devices(case: Case) -> Iterator[Case]:
    """Yield the case with inputs of the CPU on the device under test: all, then one."""
    specs = case.program.inputs
    for name in ("", *(s.name for s in specs if s.device)) if case.program.mixed else ():
        back = {s.name for s in specs if name in ("", s.name)}
        yield _with_inputs(
            case,
            tuple(msgspec.structs.replace(s, device="") if s.name in back else s for s in specs),
        )


def layouts(case: Case) -> Iterator[Case]:
    """Yield the case with contiguous inputs: all, then one."""
    specs = case.program.inputs
    plain = tuple(msgspec.structs.replace(s, layout="contiguous") for s in specs)
    yield _with_inputs(case, plain)
    for i, spec in enumerate(plain):
        yield _with(case, i, spec)


def seeds(case: Case) -> Iterator[Case]:
    """Yield the case with seed 0, and inputs of the plain domain where they are drawn."""
    yield msgspec.structs.replace(case, seed=0)
    for i, spec in enumerate(case.program.inputs):
        if not spec.values and spec.domain not in ("normal", "index", "psd", "unit"):
            yield _with(case, i, msgspec.structs.replace(spec, domain="normal"))


# -- elements -------------------------------------------------------------------------------------

_SMALL = (1, 2, -1, 3)


def values(case: Case) -> Iterator[Case]:
    """Yield the case with plainer elements: equal small integers, fewer nonzeros, rounder numbers.

    `cost` defines plainer, so no two cases are each plainer than the other.
    """
    specs = case.program.inputs
    for plain in _ALIKE:
        found = [_plainer(s, plain(s)) or s for s in specs]
        yield _with_inputs(case, tuple(found))
    for i, spec in enumerate(specs):
        for new in _elements(spec):
            plainer = _plainer(spec, new)
            if plainer is not None:
                yield _with(case, i, plainer)


def _ones(spec: TensorSpec) -> list[Number]:
    return [1] * elements(spec)


def _counted(spec: TensorSpec) -> list[Number]:
    return [_SMALL[i % len(_SMALL)] for i in range(elements(spec))]


def _rounded(spec: TensorSpec) -> list[Number]:
    return [_integer(v) for v in _held(spec)]


_ALIKE = (_ones, _counted, _rounded)


def _held(spec: TensorSpec) -> list[Number]:
    return held_numbers(spec) if spec.values else []


def _elements(spec: TensorSpec) -> Iterator[list[Number]]:
    """Yield plainer elements for one input that holds its own."""
    now = _held(spec)
    if not now:
        return
    yield [0] * len(now)
    yield _ones(spec)
    yield _counted(spec)
    yield [_integer(v) for v in now]
    size = len(now) // 2
    while size >= 1 and len(now) // size <= 64:  # only a part, then without a part
        for start in range(0, len(now), size):
            end = min(start + size, len(now))
            yield [v if start <= i < end else 0 for i, v in enumerate(now)]
            yield [0 if start <= i < end else v for i, v in enumerate(now)]
        size //= 2
    places = [i for i, v in enumerate(now) if cost(v) > 1]
    for i in places[:16]:
        for new in _rounder(now[i]):
            yield [new if j == i else v for j, v in enumerate(now)]


def _integer(value: Number) -> Number:
    if isinstance(value, complex):
        return complex(_small(value.real), _small(value.imag))
    return _small(value) if isinstance(value, float) else min(max(value, -4), 4)


def _small(value: float) -> float:
    return float(min(max(round(value), -4), 4)) if math.isfinite(value) else value


def _rounder(value: Number) -> Iterator[Number]:
    """Yield plainer numbers close to one, or at least of the same sort."""
    yield 1
    if isinstance(value, (bool, complex)):
        return
    if isinstance(value, int) or math.isfinite(value):
        yield -1
        yield 2
    if isinstance(value, int):
        yield value // 2
    elif math.isfinite(value) and value:
        _, exponent = math.frexp(value)
        yield math.copysign(math.ldexp(0.5, exponent), value)  # the power of two below
        yield math.copysign(2.0 ** (exponent // 2), value)
        for digits in (2, 4):  # its first bits
            step = math.ldexp(1.0, exponent - digits)
            yield round(value / step) * step if step else value


def cost(value: Number) -> int:
    """Return how far a number is from plain: 0, 1, small integers, integers, others, inf, NaN."""
    if isinstance(value, complex):
        return cost(value.real) + cost(value.imag)
    if value != value:
        return 1000
    if math.isinf(value):
        return 999
    if value == 0:
        return int(math.copysign(1, value) < 0)
    if value == 1:
        return 1
    sign = int(value < 0)
    if abs(value) <= 8 and value == int(value):
        return 2 * int(abs(value)) + sign
    mantissa, exponent = math.frexp(value)
    bits = abs(mantissa).as_integer_ratio()[1].bit_length()
    return 20 + 2 * bits + min(abs(exponent), 400) + sign


def _plainer(spec: TensorSpec, new: Sequence[Number]) -> TensorSpec | None:
    """Return the input with these elements if they are plainer than its own."""
    if not spec.values:
        return None
    held = held_numbers(spec)
    if spec.dtype == "bool":
        new = [bool(v) for v in new]
    elif spec.dtype in ("int64", "int32", "uint8"):
        new = [int(v) if not isinstance(v, complex) else 0 for v in new]
        # An index that was in range stays in it.
        new = [v if 0 <= v <= max(h, 0) or h < 0 else h for v, h in zip(new, held, strict=True)]  # type: ignore[operator,type-var]
    if len(new) != len(held) or sum(map(cost, new)) >= sum(map(cost, held)):
        return None
    return with_numbers(spec, list(new))


def _with(case: Case, number: int, spec: TensorSpec) -> Case:
    return msgspec.structs.replace(case, program=replace_input(case.program, number, spec))


def _with_inputs(case: Case, inputs: tuple[TensorSpec, ...]) -> Case:
    return case.with_program(inputs=inputs)
