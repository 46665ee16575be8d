"""What a program may write in place: buffers, and values of its own that share no input's memory.

Backends run a program several times on the same inputs, and copy only buffers. An alias counts as
the tensor whose memory it is. Drawn cases keep the rule, and so do the candidates of the minimiser.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from amp_fuzz.cases.program import Program, Statement, refs, statements, uses
from amp_fuzz.catalogue.core import Op, Shape

__all__ = ["memory_written", "shares", "written", "wrongly_written"]


def written(call: Statement) -> Iterator[str]:
    """Yield the names that a call writes: its receiver in place, or what it is given as ``out``."""
    if call.form == "inplace" and call.args:
        yield from refs(call.args[0])
    for name, arg in call.kwargs:
        if name == "out":
            yield from refs(arg)


def shares(call: Statement, op: Op, shapes: Mapping[str, Shape]) -> bool:
    """Return whether the outputs of a call may share memory with the first tensor that it reads.

    shapes: of values by name, as far as they are known.
    """
    if call.form in ("inplace", "out"):
        return call.form == "inplace"
    return op.view or (op.view_if is not None and op.view_if(call, shapes))


def memory_written(
    calls: Sequence[Statement], ops: Mapping[str, Op], shapes: Mapping[str, Shape]
) -> frozenset[str]:
    """Return the names that calls write or may write through an alias. shapes: as in `shares`."""
    found = {name for call in calls for name in written(call)}
    for call in reversed(calls):
        op, first = ops.get(call.op), next(uses(call), "")
        if op is not None and not found.isdisjoint(call.outputs) and shares(call, op, shapes):
            found.add(first)
    return frozenset(found)


def wrongly_written(program: Program, ops: Mapping[str, Op]) -> str:
    """Return the name of a value that the program writes but must not, or "".

    It is an input that is no buffer, or an output of an op with `Op.read_only`.
    """
    calls = list(statements(program.body))
    shapes = {spec.name: spec.shape for spec in program.inputs}
    found = memory_written(calls, ops, shapes)
    protected = [spec.name for spec in program.inputs if spec.role != "buffer"]
    for call in calls:
        if (op := ops.get(call.op)) is not None and op.read_only:
            protected += call.outputs
    return next((name for name in protected if name in found), "")
