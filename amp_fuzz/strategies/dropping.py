"""Leave out parts of a drawn program, by separate choices.

Removing the draws of a statement changes the meaning of later draws: the value that a later call
reads is drawn as a number, and there is one value fewer to count. Shrinking changes one thing at a
time, so many statements could not be removed. Here, setting one choice to 0 removes a statement and
changes nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from amp_fuzz.cases.program import (
    Node,
    Program,
    Region,
    returning_all,
    returning_last,
    statements,
    uses,
)

__all__ = ["dropped"]


def dropped(program: Program, keeps: Sequence[int], around: Sequence[int]) -> Program:
    """Return a program without the statements whose number among `keeps` is 0.

    Statements that others read stay, and so does the last. around: the same for regions, in the
    order in which they begin; the body of a region stays. Statements and regions beyond the lists
    stay.
    """
    calls = list(statements(program.body))
    gone: set[int] = set()
    read: set[str] = set(uses(calls[-1]))
    for number in range(len(calls) - 2, -1, -1):
        droppable = number < len(keeps) and not keeps[number]
        if droppable and read.isdisjoint(calls[number].outputs):
            gone.add(number)
        else:
            read.update(uses(calls[number]))
    body = _without(program.body, gone, iter(range(len(calls))), iter(around))
    if body == program.body:
        return program
    used = read | {n for i, s in enumerate(calls) if i not in gone for n in s.outputs}
    inputs = tuple(s for s in program.inputs if s.name in used)
    whole = returning_all(Program(inputs, body, ()))
    if not whole.outputs:
        return program
    everything = program == returning_all(program)
    return whole if everything else returning_last(whole)


def _without(
    body: tuple[Node, ...], gone: set[int], numbers: Iterator[int], around: Iterator[int]
) -> tuple[Node, ...]:
    kept: list[Node] = []
    for node in body:
        if isinstance(node, Region):
            keep = next(around, 1)
            inner = _without(node.body, gone, numbers, around)
            if keep and inner:
                kept.append(msgspec.structs.replace(node, body=inner))
            else:
                kept += inner
        elif next(numbers) not in gone:
            kept.append(node)
    return tuple(kept)
