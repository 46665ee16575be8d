"""Edit programs and keep them valid: remove statements, rename, drop what is unused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set

import msgspec

from amp_fuzz.cases.program import (
    FLOAT_DTYPES,
    Node,
    Program,
    Region,
    Statement,
    TensorSpec,
    statements,
    substituted,
    transform,
    uses,
)
from amp_fuzz.catalogue import CATALOGUE
from amp_fuzz.catalogue.places import on_the_cpu
from amp_fuzz.catalogue.writes import memory_written
from amp_fuzz.findings.minimize.capture import Taken, Values

__all__ = [
    "count",
    "mapped",
    "pruned",
    "renamed",
    "replace_input",
    "replace_statement",
    "without",
]


def count(program: Program) -> int:
    """Return the number of statements."""
    return sum(1 for _ in statements(program.body))


def without(
    program: Program, gone: Set[int], values: Values, *, trains: bool = False
) -> Program | None:
    """Remove statements by number; values that others need become inputs.

    trains: such an input is a weight if its value required grad. Returns None if a needed value is
    unknown, or nothing is left.
    """
    everything = list(statements(program.body))
    kept = {i: s for i, s in enumerate(everything) if i not in gone}
    if not kept:
        return None
    missing = {n for i in gone for n in everything[i].outputs if n != "_"}
    shapes = {spec.name: spec.shape for spec in program.inputs}
    written = memory_written(list(kept.values()), CATALOGUE, shapes)
    inputs, names = list(program.inputs), dict[str, str]()
    there = on_the_cpu(program)
    number = 1 + max((int(s.name[1:]) for s in inputs), default=-1)
    for i, statement in kept.items():
        for name in uses(statement):
            if name not in missing or name in names:
                continue
            taken = values.get((i, name))
            if taken is None:
                return None
            spec = _spec(number, taken, written=name in written, trains=trains)
            if name in there:
                spec = msgspec.structs.replace(spec, device="cpu")
            names[name] = spec.name
            inputs.append(spec)
            number += 1
    body = _filtered(program.body, iter(range(len(everything))), gone, names)
    outputs = tuple(n for n in program.outputs if n not in missing)
    if not any(n in outputs for s in kept.values() for n in s.outputs):
        # The program would return nothing.
        outputs += tuple(n for s in kept.values() for n in s.outputs if n != "_")
    if not outputs:
        return None
    return pruned(Program(tuple(inputs), body, outputs))


def _spec(number: int, taken: Taken, *, written: bool, trains: bool) -> TensorSpec:
    weight = trains and taken.requires_grad and taken.dtype in FLOAT_DTYPES and not written
    letter, role = ("b", "buffer") if written else ("w", "weight") if weight else ("x", "input")
    return TensorSpec(
        f"{letter}{number}",
        taken.shape,
        taken.dtype,
        role=role,  # type: ignore[arg-type]
        values=taken.values,
    )


def _filtered(
    body: tuple[Node, ...], numbers: Iterator[int], gone: Set[int], names: Mapping[str, str]
) -> tuple[Node, ...]:
    return transform(
        body,
        region=lambda node, inner: (Region(node.context, inner),) if inner else (),
        statement=lambda node: (substituted(node, names),) if next(numbers) not in gone else (),
    )


def pruned(program: Program) -> Program:
    """Return a program without the inputs that nothing uses."""
    used = {n for s in statements(program.body) for n in uses(s)} | set(program.outputs)
    kept = tuple(s for s in program.inputs if s.name in used)
    return msgspec.structs.replace(program, inputs=kept)


def mapped(program: Program, change: Callable[[int, Statement], Statement]) -> Program:
    """Return a program with its statements mapped by a function of number and statement."""
    numbers = iter(range(count(program)))

    body = transform(program.body, statement=lambda node: (change(next(numbers), node),))
    return msgspec.structs.replace(program, body=body)


def replace_statement(program: Program, number: int, new: Statement) -> Program:
    """Return a program with a statement replaced; unused inputs are dropped."""
    return pruned(mapped(program, lambda i, old: new if i == number else old))


def replace_input(program: Program, number: int, new: TensorSpec) -> Program:
    """Return a program with an input replaced."""
    inputs = (*program.inputs[:number], new, *program.inputs[number + 1 :])
    return msgspec.structs.replace(program, inputs=inputs)


def renamed(program: Program) -> Program:
    """Return a program whose names are numbered in order of appearance."""
    letters = {"input": "x", "weight": "w", "buffer": "b"}
    names = {s.name: f"{letters[s.role]}{i}" for i, s in enumerate(program.inputs)}
    made = [n for s in statements(program.body) for n in s.outputs if n != "_"]
    names |= {n: f"v{i}" for i, n in enumerate(made)}

    def change(_: int, statement: Statement) -> Statement:
        outputs = tuple(names.get(n, n) for n in statement.outputs)
        return msgspec.structs.replace(substituted(statement, names), outputs=outputs)

    changed = mapped(program, change)
    inputs = tuple(msgspec.structs.replace(s, name=names[s.name]) for s in program.inputs)
    outputs = tuple(names[n] for n in program.outputs)
    return msgspec.structs.replace(changed, inputs=inputs, outputs=outputs)
