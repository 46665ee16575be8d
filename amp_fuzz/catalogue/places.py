"""Where the values of a program are, if some of its inputs are on the CPU beside another device.

A call whose tensors are all on the CPU runs on the CPU. One with tensors of both devices runs on
the device under test, and takes few CPU tensors: a tensor without dimensions as an operand of a
pointwise op (https://docs.pytorch.org/docs/stable/notes/cuda.html, "you can't usually perform
cross-device operations"; TensorIterator's ``allow_cpu_scalars``), indices, the source of a copy.
Entries say which: `Op.cpu_scalars` and `Op.cpu_tensors`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from amp_fuzz.cases.program import Program, Statement, refs, statements, uses
from amp_fuzz.catalogue.core import Op, Shape

__all__ = ["calls_of_both", "on_the_cpu", "refused_in"]


def on_the_cpu(program: Program) -> frozenset[str]:
    """Return the names of the values that are on the CPU; none where no input is put there."""
    there = {spec.name for spec in program.inputs if spec.device}
    for call in statements(program.body) if there else ():
        read = set(uses(call))
        if read and read <= there:
            there |= set(call.outputs) - {"_"}
    return frozenset(there)


def calls_of_both(program: Program, there: frozenset[str]) -> Iterator[Statement]:
    """Yield the calls with tensors of both devices. there: the names of what is on the CPU."""
    for call in statements(program.body) if there else ():
        read = set(uses(call))
        if read & there and read - there:
            yield call


def _refused(call: Statement, op: Op, there: frozenset[str], shapes: Mapping[str, Shape]) -> str:
    """Return the name of a CPU tensor that a call with tensors of both devices refuses, or "".

    shapes: of values by name, as far as they are known.
    """
    for i, arg in enumerate(call.args):
        for name in refs(arg):
            written = i == 0 and call.form == "inplace"
            if name not in there or (i in op.cpu_tensors and not written):
                continue
            if written or i not in op.cpu_scalars or shapes.get(name, ()):
                return name
    keywords = (name for _, arg in call.kwargs for name in refs(arg))
    return next((name for name in keywords if name in there), "")


def refused_in(
    program: Program, ops: Mapping[str, Op], shapes: Mapping[str, Shape] = MappingProxyType({})
) -> tuple[Statement, str] | None:
    """Return the first call that refuses a CPU tensor, with its name, or None.

    Refused are also CPU tensors alone, if the CPU has no such op. shapes: of values, as far as they
    are known; those of inputs are.
    """
    there = on_the_cpu(program)
    shapes = {**shapes, **{spec.name: spec.shape for spec in program.inputs}}
    for call in statements(program.body) if there else ():
        read, op = list(uses(call)), ops.get(call.op)
        if op is None or there.isdisjoint(read):
            continue
        if there.issuperset(read):
            name = read[0] if "cpu" not in (op.devices or ("cpu",)) else ""
        else:
            name = _refused(call, op, there, shapes)
        if name:
            return call, name
    return None
