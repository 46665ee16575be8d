"""Hypothesis strategies for autocast: tensors, programs, plans, and whole cases.

Usable in anyone's ``@given``::

    @given(strategies.cases(device="cpu"))
    def test_my_backend(case): ...

Every strategy shrinks: fewer statements and regions, plainer plans, smaller shapes, float32 inputs
of plain values.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec
from hypothesis import strategies as st

from amp_fuzz.cases.program import DOMAINS, DTYPES, LAYOUTS, TensorSpec
from amp_fuzz.cases.program import statements as calls
from amp_fuzz.catalogue import CATALOGUE, Op, select
from amp_fuzz.policies.tables import DEVICES
from amp_fuzz.strategies import drawing
from amp_fuzz.strategies.choices import Bytes
from amp_fuzz.strategies.dropping import dropped

if TYPE_CHECKING:
    import torch

    from amp_fuzz.cases.case import Case, Plan
    from amp_fuzz.cases.program import Program

__all__ = ["cases", "plans", "programs", "tensors"]


@lru_cache(maxsize=256)
def _binary(size: int) -> st.SearchStrategy[bytes]:
    return st.binary(min_size=size, max_size=size)


def _source(draw: st.DrawFn) -> Bytes:
    def source(size: int) -> bytes:
        return draw(_binary(size)) if size else b""

    return source


def plans(*, device: str = "cpu", trains: bool = True) -> st.SearchStrategy[Plan]:
    """Return a strategy for plans: how a program is driven.

    Args:
        device: the device type under test; one that has a policy table.
        trains: whether plans may have a backward pass.
    """
    _check_device(device)
    return _plans(device, trains)


@st.composite
def _plans(draw: st.DrawFn, device: str, trains: bool) -> Plan:
    return drawing.draw_plan(_source(draw), device, trains=trains)


def programs(
    *,
    device: str = "cpu",
    ops: Iterable[str] | None = None,
    max_statements: int = 12,
) -> st.SearchStrategy[Program]:
    """Return a strategy for programs: random op graphs with the contexts inside them.

    Args:
        device: the device type whose dtypes and ops to follow.
        ops: op names, families or globs (``["conv*", "losses"]``) to draw from; None is all.
        max_statements: the most statements in a program, 1 or more.

    Raises:
        ProgramError: a pattern matches no op.
    """
    _check_device(device)
    chosen = _chosen(ops, device)
    _check_count(max_statements)
    return _programs(device, chosen, max_statements)


@st.composite
def _programs(draw: st.DrawFn, device: str, ops: tuple[Op, ...], statements: int) -> Program:
    source = _source(draw)
    program = drawing.draw_program(source, device, ops=ops, statements=statements)
    return _dropped(source, program, statements)


def _dropped(source: Bytes, program: Program, statements: int) -> Program:
    """Leave out statements and regions as drawn: rarely any, except while an example shrinks."""
    return dropped(program, source(statements), source(statements))


def cases(
    *,
    device: str = "cpu",
    trains: bool = True,
    ops: Iterable[str] | None = None,
    focus: Iterable[str] = (),
    form: str | None = None,
    max_statements: int = 12,
) -> st.SearchStrategy[Case]:
    """Return a strategy for cases: a program, its plan, and a seed for its values.

    Args:
        device: the device type under test.
        trains: whether plans may have a backward pass.
        ops: op names, families or globs to draw from; None is all.
        focus: ops, families or globs of which each program has at least one call.
        form: the form of that call (``"inplace"``), if all focused ops have it.
        max_statements: the most statements in a program, 1 or more.

    Raises:
        ProgramError: a pattern matches no op.
    """
    _check_device(device)
    _check_count(max_statements)
    focused = _chosen(focus, device) if focus else ()
    return _cases(device, trains, _chosen(ops, device), focused, form, max_statements)


@st.composite
def _cases(
    draw: st.DrawFn,
    device: str,
    trains: bool,
    ops: tuple[Op, ...],
    focus: tuple[Op, ...],
    form: str | None,
    statements: int,
) -> Case:
    source = _source(draw)
    case = drawing.draw_case(
        source,
        device,
        trains=trains,
        ops=ops,
        focus=focus,
        form=form,
        statements=statements,
    )
    program = _dropped(source, case.program, statements)
    names = {op.name for op in focus}
    if names and names.isdisjoint(s.op for s in calls(program.body)):
        return case
    return msgspec.structs.replace(case, program=program)


def tensors(
    *,
    shape: tuple[int, ...] | st.SearchStrategy[tuple[int, ...]] | None = None,
    dtype: str | st.SearchStrategy[str] | None = None,
) -> st.SearchStrategy[torch.Tensor]:
    """Return a strategy for CPU tensors with the values and layouts that programs use as inputs.

    Values: normal, uniform, small integers, near overflow of the dtype, subnormal, ties and
    cancelling pairs, zeros of both signs. Layouts: contiguous, transposed, strided, and views at an
    offset. Shapes: rank 0 to 3, sizes 0 to 33.

    Args:
        shape: a shape, or a strategy for shapes.
        dtype: a dtype by name (``"bfloat16"``), or a strategy for names; floating by default.

    Raises:
        ValueError: an unknown dtype.
    """
    if isinstance(dtype, str) and dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r} is unknown: use one of {', '.join(DTYPES)}")
    if shape is None:
        sizes = st.sampled_from((2, 3, 1, 4, 5, 8, 0, 17, 33))
        shape = st.lists(sizes, max_size=3).map(tuple)
    shapes = st.just(shape) if isinstance(shape, tuple) else shape
    if dtype is None:
        dtype = st.sampled_from(("float32", "bfloat16", "float16", "float64"))
    dtypes = st.just(dtype) if isinstance(dtype, str) else dtype
    plain = [d for d in DOMAINS if d not in ("index", "psd")]
    return st.builds(
        _tensor,
        shapes,
        dtypes,
        st.sampled_from(plain),
        st.sampled_from(LAYOUTS),
        st.integers(0, 0xFFFF),
    )


def _tensor(
    shape: tuple[int, ...], dtype: str, domain: Any, layout: Any, seed: int
) -> torch.Tensor:
    from amp_fuzz.cases.inputs import tensor

    return tensor(TensorSpec("x0", shape, dtype, domain, layout), seed)


def _check_device(device: str) -> None:
    if device not in DEVICES:
        raise ValueError(f"device={device!r} has no policy table: use one of {', '.join(DEVICES)}")


def _check_count(max_statements: int) -> None:
    if max_statements < 1:
        raise ValueError(f"max_statements={max_statements!r} must be at least 1")


def _chosen(ops: Iterable[str] | None, device: str) -> tuple[Op, ...]:
    chosen = tuple(CATALOGUE.values()) if ops is None else select(ops)
    return drawing.usable(chosen, device)
