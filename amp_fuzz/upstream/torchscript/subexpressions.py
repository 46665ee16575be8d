"""Calls that a scripted program makes once where Python makes them twice.

## torchscript-common-subexpressions: a gradient that no_grad takes away elsewhere

If a program computes the same twice, TorchScript computes it once, from the first call on
(`torch/csrc/jit/passes/common_subexpression_elimination.cpp`). The pass goes over a graph from the
top. It takes a call for an earlier one with the same arguments, unless something writes to them,
or both results are returned. It does not ask for the grad mode (a pull request that asked was
taken back: [#76075](https://github.com/pytorch/pytorch/pull/76075)). If the first stands under
`no_grad`, what is computed from the second has no gradient; if the second does, what is computed
from it has one. The reference runs the program with one of them, and must agree on the whole
case, also if the backward pass then raises "element 1 of tensors does not require grad and does
not have a grad_fn".

```python
@torch.jit.script
def program(x, w):
    with torch.no_grad():
        target = torch.exp(w) + x
    return (target - torch.exp(w) * x).sum()


program(torch.ones(2), torch.ones(2, requires_grad=True)).requires_grad  # False; True in eager
```
"""

from __future__ import annotations

import msgspec

from amp_fuzz.backends.imitation import Imitation
from amp_fuzz.cases.build import call, case, under, x
from amp_fuzz.cases.case import Case
from amp_fuzz.cases.program import (
    Autocast,
    Node,
    NoGrad,
    Program,
    Region,
    Statement,
    statements,
    substituted,
)
from amp_fuzz.cases.program import uses as read_by
from amp_fuzz.upstream.bug import Bug, Example
from amp_fuzz.upstream.torchscript.overloads import reduced
from amp_fuzz.upstream.torchscript.programs import changed

__all__ = ["BUGS", "merged"]


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
    for made in statements(program.body):
        if made.form == "inplace":
            found.update([*list(read_by(made))[:1], *made.outputs])
        elif made.form == "out":
            out = Statement(made.op, made.form, (), tuple(k for k in made.kwargs if k[0] == "out"))
            found.update([*read_by(out), *made.outputs])
    return found


def _merges(case: Case) -> bool:
    program = reduced(case.program)  # then more calls are the same, and none fewer
    return merged(program) != program


def _twice(first: Node, second: Node, *returns: str) -> Example:
    """Return two calls, v0 and v1, and what is computed from each, v2 and v3."""
    after = call("mul", "v0", "x0", to="v2"), call("add", "v1", "x0", to="v3")
    inputs = [x("x0", 2), x("w1", 2)]
    made = case(inputs, first, second, *after, returns=returns or ("v2", "v3"), contexts=())
    return Example("script", made)


EXP, AGAIN = call("exp", "w1"), call("exp", "w1", to="v1")

BUGS = (
    Bug(
        id="torchscript-common-subexpressions",
        what="what a scripted program computes under no_grad and again without it has no gradient, or one under no_grad too",
        why="TorchScript eliminates common subexpressions across grad modes",
        link="https://github.com/pytorch/pytorch/pull/76075",
        torch=">=2.7",
        seen="2.15.0",
        backends=("script*",),
        imitation=Imitation(wrap=changed(merged), applies=_merges),
        examples=(
            _twice(under(NoGrad(), EXP), AGAIN),
            _twice(EXP, under(NoGrad(), AGAIN)),
            _twice(under(NoGrad(), EXP), AGAIN, "v0", "v3"),
            Example(  # the transpose of a weight, which is returned: the backward pass raises
                "script",
                case(
                    [
                        x("w0", 1, 1, domain="zeros"),
                        x("x1", values="3f800000"),
                        x("x2", 1, 1),
                    ],
                    under(NoGrad(), call("einsum", "ij->ji", "w0")),
                    under(
                        Autocast(enabled=False),
                        call("atan2", "x1", "v0", to="v1"),
                        call("addmm", "x1", "v1", "x2", to="v2"),
                    ),
                    call("float", "v2", to="v3", form="method"),
                    call("einsum", "ij->ji", "w0", to="v4"),
                    returns=("v3", "v4"),
                ),
                wrong="atan2",
            ),
        ),
    ),
)
