"""Put some inputs of a drawn program on the CPU, so that it stays well formed.

Users do this in three ways: a number in a tensor (a temperature, a scale, the weight of a loss) is
an operand of a pointwise op, indices come from the CPU, and a part of a model stays there. All
three are one step here: an input goes to the CPU, and with it whatever it meets in a call that
takes no tensors of both devices (`amp_fuzz.catalogue.places`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from amp_fuzz.cases.case import Plan
from amp_fuzz.cases.program import (
    FLOAT_DTYPES,
    Autocast,
    Program,
    Ref,
    Role,
    Statement,
    TensorSpec,
    statements,
    uses,
)
from amp_fuzz.catalogue import CATALOGUE
from amp_fuzz.catalogue.core import Shape, Value
from amp_fuzz.catalogue.places import calls_of_both, on_the_cpu, refused_in
from amp_fuzz.strategies.choices import Bytes, digits

__all__ = ["Values", "with_cpu_tensors"]

Values = Mapping[str, Value]
Shapes = Mapping[str, Shape]

# What is done to a value with a number of the CPU. Most of these have a policy somewhere.
_WITH_A_NUMBER = ("mul", "atan2", "addcmul", "pow.Tensor_Tensor", "div", "poisson_nll_loss")
_DTYPES = ("float32", "float32", "bfloat16", "float16", "float64", "int64")
_MOVES, _NUMBERS = 256, 256


def with_cpu_tensors(
    source: Bytes, plan: Plan, program: Program, values: Values
) -> tuple[Plan, Program]:
    """Return a case with some of its inputs on the CPU, and sometimes with the CPU's autocast.

    values: those of the program, by name. A function transform gets none: a batch of numbers is a
    tensor of one dimension, which an op of another device refuses.
    """
    how, context, dtype = digits(source, 8, 6, 2)
    moves = digits(source, *[_MOVES] * 3)
    number = digits(source, len(_WITH_A_NUMBER), _NUMBERS, len(_DTYPES), 2, 4)
    if plan.transform != "none":
        return plan, program
    made, shapes = program, {name: value.shape for name, value in values.items()}
    if how != 7:
        made = _placed(program, shapes, moves[: 1 + how % 3], scalars=how < 5)
    if how > 4:
        made = _scaled(made, values, number)
    if not made.mixed:
        return plan, program
    return _under_both(plan, context, ("bfloat16", "float16")[dtype]), made


def _under_both(plan: Plan, how: int, dtype: str) -> Plan:
    """Return a plan with the CPU's autocast around everything or innermost, or the plan itself."""
    of_cpu = (Autocast("cpu", dtype),)
    if how == 4:
        return msgspec.structs.replace(plan, contexts=of_cpu + plan.contexts)
    if how == 5 and plan.entry == "context":
        return msgspec.structs.replace(plan, contexts=plan.contexts + of_cpu)
    return plan


def _placed(program: Program, shapes: Shapes, picks: Sequence[int], *, scalars: bool) -> Program:
    """Return a program with inputs on the CPU. scalars: those that may stay alone there first."""
    for pick in picks:
        found = [*_alone(program, shapes), *_numbers(program, shapes)] if scalars else []
        if not found:
            inputs = (spec for spec in program.inputs if not spec.device)
            moved = (_moved(program, shapes, spec) for spec in inputs)
            found = [made for made in moved if made is not None]
        if found:
            program = found[pick % len(found)]
    whole = _with(program, {spec.name for spec in program.inputs})  # under any autocast
    return program if program.mixed or refused_in(whole, CATALOGUE, shapes) else whole


def _alone(program: Program, shapes: Shapes) -> list[Program]:
    """Return the program with one more input on the CPU, which meets tensors of the device."""
    found = []
    for spec in program.inputs:
        if not spec.device:
            made = _with(program, {spec.name})
            there = on_the_cpu(made)
            met = any(spec.name in set(uses(call)) for call in calls_of_both(made, there))
            if met and refused_in(made, CATALOGUE, shapes) is None:
                found.append(made)
    return found


def _numbers(program: Program, shapes: Shapes) -> list[Program]:
    """Return the program with one input as a number on the CPU.

    It is read once, by a pointwise op whose result has the shape of another operand.
    """
    read = [name for call in statements(program.body) for name in uses(call)]
    found = []
    for call in statements(program.body):
        scalars = CATALOGUE[call.op].cpu_scalars if call.op in CATALOGUE else ()
        operands = {i: arg.name for i, arg in enumerate(call.args) if isinstance(arg, Ref)}
        for i in scalars:
            spec = next((s for s in program.inputs if s.name == operands.get(i)), None)
            if spec is None or spec.device or not spec.shape:
                continue
            others = {shapes.get(name) for j, name in operands.items() if j != i}
            if read.count(spec.name) > 1 or shapes.get(call.outputs[0]) not in others:
                continue
            number = msgspec.structs.replace(spec, shape=(), layout="contiguous")
            made = _with(_replaced(program, number), {spec.name})
            if refused_in(made, CATALOGUE, shapes) is None:
                found.append(made)
    return found


def _moved(program: Program, shapes: Shapes, first: TensorSpec) -> Program | None:
    """Return the program with an input on the CPU, and all that it meets, or None.

    None: nothing would be left on the device, or no inputs can make the program well formed.
    """
    names = {first.name}
    while (found := refused_in(made := _with(program, names), CATALOGUE, shapes)) is not None:
        call, _ = found
        there = on_the_cpu(made)
        away = {name for name in uses(call) if name not in there}
        more = _ancestors(program, away) - names - {s.name for s in made.inputs if s.device}
        if not more:
            return None
        names |= more
    return made if any(not spec.device for spec in made.inputs) else None


def _scaled(program: Program, values: Values, drawn: Sequence[int]) -> Program:
    """Return the program with a last call: of a value of the device and a number of the CPU."""
    op, which, dtype, order, role = drawn
    there = on_the_cpu(program)
    made = [name for call in statements(program.body) for name in call.outputs]
    found = [
        values[name]
        for name in made
        if name in values and name not in there and values[name].dtype in FLOAT_DTYPES
    ]
    if not found or CATALOGUE.keys().isdisjoint(_WITH_A_NUMBER[op : op + 1]):
        return program
    value, kind = found[which % len(found)], _DTYPES[dtype]
    trains: Role = "weight" if role == 3 and kind in FLOAT_DTYPES else "input"
    name = f"{'w' if trains == 'weight' else 'x'}{len(program.inputs)}"
    number = TensorSpec(name, (), kind, role=trains, device="cpu")
    args = [Ref(value.name), Ref(name)]
    if _WITH_A_NUMBER[op] == "addcmul":
        args.insert(0, Ref(value.name))
    elif order and 0 in CATALOGUE[_WITH_A_NUMBER[op]].cpu_scalars:
        args.reverse()
    kwargs = (("reduction", "none"),) if _WITH_A_NUMBER[op] == "poisson_nll_loss" else ()
    result = f"v{1 + max((int(n[1:]) for n in made if n != '_'), default=-1)}"
    last = Statement(_WITH_A_NUMBER[op], "function", tuple(args), kwargs, (result,))
    return Program((*program.inputs, number), (*program.body, last), (*program.outputs, result))


def _ancestors(program: Program, names: set[str]) -> set[str]:
    """Return the inputs from which values are computed."""
    wanted = set(names)
    for call in reversed(list(statements(program.body))):
        if wanted.intersection(call.outputs):
            wanted |= set(uses(call))
    return wanted & {spec.name for spec in program.inputs}


def _with(program: Program, names: set[str]) -> Program:
    inputs = tuple(
        msgspec.structs.replace(spec, device="cpu") if spec.name in names else spec
        for spec in program.inputs
    )
    return msgspec.structs.replace(program, inputs=inputs)


def _replaced(program: Program, new: TensorSpec) -> Program:
    inputs = tuple(new if spec.name == new.name else spec for spec in program.inputs)
    return msgspec.structs.replace(program, inputs=inputs)
