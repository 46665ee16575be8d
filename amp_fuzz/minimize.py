"""Make a case smaller while the same divergence stays.

The order is that of worth: the plan, the regions, the statements, then what nothing uses any more.
A statement whose value is still needed is replaced by an input of the same type.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import msgspec

from amp_fuzz.case import Case, Plan
from amp_fuzz.harness import Observation
from amp_fuzz.program import (
    DTYPES,
    FLOAT_DTYPES,
    Arg,
    Items,
    Node,
    Program,
    ProgramError,
    Ref,
    Region,
    Statement,
    TensorSpec,
    statements,
    uses,
)

__all__ = ["minimize"]

Types = dict[str, tuple[tuple[int, ...], str]]


def minimize(
    case: Case,
    keeps: Callable[[Case], bool],
    *,
    types: Types | None = None,
    seconds: float = 20.0,
) -> Case:
    """Return the smallest case found on which `keeps` still holds, within a time limit.

    types: the shape and dtype of each value, for replacing a statement by an input; see `types_of`.
    """
    deadline = time.monotonic() + seconds
    tried: set[bytes] = {case.json()}
    smaller = True
    while smaller and time.monotonic() < deadline:
        smaller = False
        for candidate in _candidates(case, types or {}):
            key = candidate.json()
            if key in tried:
                continue
            tried.add(key)
            if time.monotonic() > deadline:
                break
            try:
                candidate.program.check()
                candidate.plan.check()
            except ProgramError:
                continue
            if keeps(candidate):
                case, smaller = candidate, True
                break
    return case


def types_of(seen: Observation) -> Types:
    """Return shape and dtype of each value that an observation holds."""
    return {
        label.rpartition(".")[2]: (tuple(t.shape), str(t.dtype).removeprefix("torch."))
        for label, t in seen.values.items()
        if t is not None and not label.endswith((".grad", ".updated"))
    }


def _candidates(case: Case, types: Types) -> Iterator[Case]:
    for plan in _plans(case.plan):
        yield msgspec.structs.replace(case, plan=plan)
    for program in _programs(case.program, types):
        yield msgspec.structs.replace(case, program=program)
    if case.seed:
        yield msgspec.structs.replace(case, seed=0)


def _plans(plan: Plan) -> Iterator[Plan]:
    default = Plan()
    plain = Plan(contexts=plan.contexts, backward="none")
    if plan != plain:
        yield plain
    for backward in ("none", "outside"):  # the plainer first
        if plan.backward == backward:
            break
        yield msgspec.structs.replace(plan, backward=backward, backward_context=None)
    for field in msgspec.structs.fields(Plan):
        if field.name in ("contexts", "backward", "backward_context"):
            continue
        value = getattr(default, field.name)
        if getattr(plan, field.name) != value:
            yield msgspec.structs.replace(plan, **{field.name: value})
    if plan.transform == "vmap_grad":
        yield msgspec.structs.replace(plan, transform="vmap")
        yield msgspec.structs.replace(plan, transform="grad")
    for i in range(len(plan.contexts)):
        yield msgspec.structs.replace(plan, contexts=plan.contexts[:i] + plan.contexts[i + 1 :])
    for i, context in enumerate(plan.contexts):
        if context.cache_enabled is not None:
            plainer = msgspec.structs.replace(context, cache_enabled=None)
            contexts = (*plan.contexts[:i], plainer, *plan.contexts[i + 1 :])
            yield msgspec.structs.replace(plan, contexts=contexts)


def _programs(program: Program, types: Types) -> Iterator[Program]:
    count = sum(1 for _ in statements(program.body))
    # Halves first, then one by one from the end, where nothing depends on what goes.
    for size in (count // 2, count // 4, 1):
        for end in range(count, 0, -max(size, 1)):
            if size:
                found = _without(program, set(range(max(end - size, 0), end)), types)
                if found is not None:
                    yield found
    for i in range(_regions(program.body)):
        yield _pruned(msgspec.structs.replace(program, body=_unwrap(program.body, [i])))
    for i, spec in enumerate(program.inputs):
        for plainer in _specs(spec):
            inputs = (*program.inputs[:i], plainer, *program.inputs[i + 1 :])
            yield msgspec.structs.replace(program, inputs=inputs)


def _specs(spec: TensorSpec) -> Iterator[TensorSpec]:
    if spec.role == "weight":
        yield msgspec.structs.replace(spec, role="input")
    if spec.dtype in FLOAT_DTYPES and spec.dtype != "float32":
        yield msgspec.structs.replace(spec, dtype="float32")
    if spec.layout != "contiguous":
        yield msgspec.structs.replace(spec, layout="contiguous")
    if spec.domain not in ("normal", "index", "psd", "unit"):
        yield msgspec.structs.replace(spec, domain="normal")
    if spec.domain == "normal":
        yield msgspec.structs.replace(spec, domain="integers")


def _without(program: Program, gone: set[int], types: Types) -> Program | None:
    """Remove statements by number; what others still need becomes an input of its type."""
    everything = list(statements(program.body))
    kept = [s for i, s in enumerate(everything) if i not in gone]
    if not kept:
        return None
    missing = {n for i in gone for n in everything[i].outputs if n != "_"}
    needed = [n for n in dict.fromkeys(n for s in kept for n in uses(s)) if n in missing]
    inputs = list(program.inputs)
    names: dict[str, str] = {}
    number = 1 + max((int(s.name[1:]) for s in inputs), default=0)
    for name in needed:
        if name not in types or types[name][1] not in DTYPES:
            return None
        shape, dtype = types[name]
        names[name] = f"x{number}"
        inputs.append(TensorSpec(f"x{number}", shape, dtype))
        number += 1
    body = _filter(program.body, iter(range(len(everything))), gone, names)
    outputs = tuple(n for n in program.outputs if n not in missing)
    if not outputs or not body:
        return None
    return _pruned(Program(tuple(inputs), body, outputs))


def _filter(
    body: tuple[Node, ...], numbers: Iterator[int], gone: set[int], names: dict[str, str]
) -> tuple[Node, ...]:
    kept: list[Node] = []
    for node in body:
        if isinstance(node, Region):
            inner = _filter(node.body, numbers, gone, names)
            if inner:
                kept.append(Region(node.context, inner))
        elif next(numbers) not in gone:
            kept.append(_renamed(node, names))
    return tuple(kept)


def _renamed(statement: Statement, names: dict[str, str]) -> Statement:
    def change(arg: Arg) -> Arg:
        if isinstance(arg, Ref):
            return Ref(names.get(arg.name, arg.name))
        if isinstance(arg, Items):
            return Items(tuple(change(a) for a in arg.items))
        return arg

    return msgspec.structs.replace(
        statement,
        args=tuple(change(a) for a in statement.args),
        kwargs=tuple((k, change(a)) for k, a in statement.kwargs),
    )


def _pruned(program: Program) -> Program:
    used = {n for s in statements(program.body) for n in uses(s)} | set(program.outputs)
    return msgspec.structs.replace(
        program, inputs=tuple(s for s in program.inputs if s.name in used)
    )


def _regions(body: tuple[Node, ...]) -> int:
    return sum(1 + _regions(n.body) for n in body if isinstance(n, Region))


def _unwrap(body: tuple[Node, ...], number: list[int]) -> tuple[Node, ...]:
    """Replace the region of that number, in the order of the text, by its body."""
    nodes: list[Node] = []
    for node in body:
        if not isinstance(node, Region):
            nodes.append(node)
            continue
        number[0] -= 1
        if number[0] == -1:
            nodes += node.body
        else:
            nodes.append(Region(node.context, _unwrap(node.body, number)))
    return tuple(nodes)
