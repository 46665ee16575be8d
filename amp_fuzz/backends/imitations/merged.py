"""What TorchScript makes of a program's common subexpressions: one call in the place of two.

The pass (torch/csrc/jit/passes/common_subexpression_elimination.cpp) goes over a graph from the
top. It takes a call for an earlier one with the same arguments, unless something writes to them, or
both results are returned. It does not ask for the grad mode: a value is the one that was made under
``no_grad``, or the other way round (https://github.com/pytorch/pytorch/pull/76075, not merged).
"""

from __future__ import annotations

import msgspec

from amp_fuzz.cases.program import (
    Autocast,
    Node,
    Program,
    Region,
    Statement,
    statements,
    substituted,
)
from amp_fuzz.cases.program import uses as read_by

__all__ = ["merged"]


def merged(program: Program) -> Program:
    """Return a program without the calls that TorchScript takes for earlier ones.

    It returns as many values, of other names. Calls under two autocast contexts are not merged.
    """
    return _Merger(program).program()


class _Merger:
    def __init__(self, program: Program) -> None:
        self.source = program
        self.returned = set(program.outputs)
        self.names: dict[str, str] = {}
        self.calls: dict[tuple[object, ...], Statement] = {}
        self.written = _written(program)

    def program(self) -> Program:
        body = self.body(self.source.body, ())
        outputs = tuple(self.names.get(name, name) for name in self.source.outputs)
        return msgspec.structs.replace(self.source, body=body, outputs=outputs)

    def body(self, body: tuple[Node, ...], contexts: tuple[Autocast, ...]) -> tuple[Node, ...]:
        kept: list[Node] = []
        for node in body:
            if isinstance(node, Region):
                own = (node.context,) if isinstance(node.context, Autocast) else ()
                inner = self.body(node.body, contexts + own)
                kept += [Region(node.context, inner)] if inner else []
            elif (call := self.call(node, contexts)) is not None:
                kept.append(call)
        return tuple(kept)

    def call(self, statement: Statement, contexts: tuple[Autocast, ...]) -> Statement | None:
        """Return a call of what is left of its arguments; None for one that was made before."""
        statement = substituted(statement, self.names)
        if self.written.intersection([*read_by(statement), *statement.outputs]):
            return statement
        key = statement.op, statement.args, statement.kwargs, contexts
        first = self.calls.setdefault(key, statement)
        if first is statement or (self.returns(first) and self.returns(statement)):
            return statement
        self.names |= dict(zip(statement.outputs, first.outputs, strict=True))
        if self.returns(statement):
            self.returned |= set(first.outputs)
        return None

    def returns(self, statement: Statement) -> bool:
        return not self.returned.isdisjoint(statement.outputs)


def _written(program: Program) -> set[str]:
    """Return the names of what is written in place, or as an ``out=``, before and after."""
    found: set[str] = set()
    for call in statements(program.body):
        if call.form == "inplace":
            found.update([*list(read_by(call))[:1], *call.outputs])
        elif call.form == "out":
            out = Statement(call.op, call.form, (), tuple(k for k in call.kwargs if k[0] == "out"))
            found.update([*read_by(out), *call.outputs])
    return found
