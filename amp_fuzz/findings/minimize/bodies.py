"""Smaller bodies: fewer regions, fewer statements, fewer outputs and inputs."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from amp_fuzz.cases.case import Case
from amp_fuzz.cases.program import (
    FP8,
    Autocast,
    Checkpoint,
    Context,
    Node,
    Program,
    Region,
    Statement,
    statements,
    substituted,
    transform,
    uses,
)
from amp_fuzz.findings.minimize.capture import Taken, Values
from amp_fuzz.findings.minimize.edit import count, mapped, pruned, without
from amp_fuzz.findings.minimize.plans import contexts

__all__ = ["fewer", "inputs", "joined", "outputs", "regions"]


def fewer(case: Case, values: Values) -> Iterator[Case]:
    """Yield the case with fewer statements: without halves, quarters, ..., then one at a time.

    Values that other statements need become inputs with the reference's values. This is delta
    debugging (Zeller and Hildebrandt 2002) without complements, which are halves again, and from
    the end, where nothing depends on the removed statements.
    """
    program, trains = case.program, case.plan.backward != "none"
    total = count(program)
    size = total // 2
    while size >= 1:
        for end in range(total, 0, -size):
            gone = set(range(max(end - size, 0), end))
            found = without(program, gone, values, trains=trains)
            if found is not None:
                yield msgspec.structs.replace(case, program=found)
        size //= 2


def joined(case: Case, values: Values) -> Iterator[Case]:
    """Yield the case with one statement fewer; another value of the same type replaces its value.

    So gradients still flow from the statements before it to those after it.
    """
    program = case.program
    types = _types(program, values)
    body = list(statements(program.body))
    defined = [s.name for s in program.inputs]
    for i, statement in enumerate(body):
        for old in statement.outputs:
            for new in dict.fromkeys([*uses(statement), *defined]):
                if old not in types or types.get(new) != types[old]:
                    continue
                names = {old: new}
                shorter = mapped(program, lambda _, s, n=names: substituted(s, n))  # type: ignore[misc]
                outputs = tuple(dict.fromkeys(names.get(n, n) for n in program.outputs))
                shorter = msgspec.structs.replace(shorter, outputs=outputs)
                found = without(shorter, {i}, {})
                if found is not None:
                    yield msgspec.structs.replace(case, program=found)
        defined += statement.outputs


def _types(program: Program, values: Values) -> dict[str, tuple[tuple[int, ...], str]]:
    def type_of(taken: Taken) -> tuple[tuple[int, ...], str]:
        return taken.shape, taken.dtype

    found = {s.name: (s.shape, s.dtype) for s in program.inputs}
    return {**{name: type_of(t) for (_, name), t in values.items()}, **found}


# -- regions --------------------------------------------------------------------------------------


def regions(case: Case) -> Iterator[Case]:
    """Yield the case with one region fewer, or with a plainer one."""
    program = case.program
    if _regions(program.body) > 1:
        yield _with(case, tuple(statements(program.body)))
    for i in range(_regions(program.body)):
        region = _region(program.body, i)
        yield _with(case, _changed(program.body, region, None))
        for context in _plainer(region.context):
            yield _with(case, _changed(program.body, region, context))


def _plainer(context: Context) -> Iterator[Context]:
    if isinstance(context, Autocast):
        yield from contexts(context)
    elif isinstance(context, Checkpoint) and context != Checkpoint():
        yield Checkpoint()
    elif isinstance(context, FP8):
        for field in msgspec.structs.fields(context)[1:]:
            if getattr(context, field.name) != field.default:
                yield msgspec.structs.replace(context, **{field.name: field.default})


def _with(case: Case, body: tuple[Node, ...]) -> Case:
    return msgspec.structs.replace(case, program=pruned(case.with_program(body=body).program))


def _all(body: tuple[Node, ...]) -> Iterator[Region]:
    for node in body:
        if isinstance(node, Region):
            yield node
            yield from _all(node.body)


def _regions(body: tuple[Node, ...]) -> int:
    return sum(1 for _ in _all(body))


def _region(body: tuple[Node, ...], number: int) -> Region:
    return list(_all(body))[number]


def _changed(body: tuple[Node, ...], region: Region, context: Context | None) -> tuple[Node, ...]:
    """Give a region of a body another context; None: no region."""

    def change(node: Region, inner: tuple[Node, ...]) -> tuple[Node, ...]:
        if node is not region:
            return (Region(node.context, inner),)
        return inner if context is None else (Region(context, inner),)

    return transform(body, region=change)


# -- outputs and inputs ---------------------------------------------------------------------------


def outputs(case: Case) -> Iterator[Case]:
    """Yield the case with fewer outputs: with only one, then with one fewer."""
    program = case.program
    names = program.outputs
    if len(names) < 2:
        return
    for name in names:
        yield _returning(case, (name,))
    for i in reversed(range(len(names))):
        yield _returning(case, names[:i] + names[i + 1 :])


def _returning(case: Case, names: tuple[str, ...]) -> Case:
    program = msgspec.structs.replace(case.program, outputs=names)
    return msgspec.structs.replace(case, program=pruned(_dropped(program)))


def _dropped(program: Program) -> Program:
    """Drop the names of values that nothing reads, but keep the one that a call must have."""
    read = {n for s in statements(program.body) for n in uses(s)} | set(program.outputs)

    def change(_: int, statement: Statement) -> Statement:
        names = tuple(n if n in read else "_" for n in statement.outputs)
        return (
            msgspec.structs.replace(statement, outputs=names) if set(names) != {"_"} else statement
        )

    return mapped(program, change)


def inputs(case: Case) -> Iterator[Case]:
    """Yield the case with one input fewer; another of the same type is read instead."""
    program = case.program
    specs = program.inputs
    for i, spec in enumerate(specs):
        for other in specs[:i]:
            if (spec.shape, spec.dtype) != (other.shape, other.dtype):
                continue
            names = {spec.name: other.name}
            merged = mapped(program, lambda _, s, n=names: substituted(s, n))  # type: ignore[misc]
            kept = tuple(dict.fromkeys(names.get(n, n) for n in program.outputs))
            merged = pruned(msgspec.structs.replace(merged, outputs=kept))
            yield msgspec.structs.replace(case, program=merged)
