"""Notes of a case: it raises only under autocast, or what it does depends on the device.

None is a divergence: both sides follow their policy table. The judge adds further notes to its
verdict (a rounding that a compiler left out).

*autocast-raises*: a case that raised runs again under the reference, without autocast, forward only
and up to the statement that raised.

*portability*: policy tables are data, and the dtypes of a statement's inputs are observed. If other
dtypes would meet under another device's policies, the statement alone runs here under those, once
for each signature; later cases look it up. A kernel may be missing only here: if that run raises,
fake tensors of the other device decide.

*context*: the tables say on which devices a context does something else, or nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, MutableMapping, Set
from dataclasses import replace
from functools import partialmethod
from typing import Any, NamedTuple

import msgspec
import torch

from amp_fuzz import reference
from amp_fuzz.backends import without_values
from amp_fuzz.backends.harness import Observation, Raised, run_marked
from amp_fuzz.backends.reference import ReferenceRuntime
from amp_fuzz.backends.source import autocast_call, statement_source
from amp_fuzz.cases.case import Case, Plan, bare, inferring, opened
from amp_fuzz.cases.program import (
    FLOAT_DTYPES,
    Arg,
    Autocast,
    DType,
    Items,
    Node,
    Program,
    Ref,
    Statement,
    TensorSpec,
    statements,
    uses,
)
from amp_fuzz.catalogue import CATALOGUE, Op
from amp_fuzz.findings.contexts import Fact, by_dtype, without_dtype, without_tensors
from amp_fuzz.findings.guilty import alone
from amp_fuzz.findings.minimize import capture, without
from amp_fuzz.findings.remedies import remedy
from amp_fuzz.oracle.errors import refuses
from amp_fuzz.oracle.judge import Judge
from amp_fuzz.oracle.labels import named
from amp_fuzz.oracle.verdict import Verdict
from amp_fuzz.records.schema import NOTE_KINDS, Note
from amp_fuzz.reference import Policy, PolicyTable, load_table, tabled_devices

__all__ = ["Memory", "notes_of", "under_policies"]

Memory = MutableMapping[tuple[str, ...], str]
"""What a statement does on another device, by signature. Plain data: processes can share it."""

_HALVES = ("bfloat16", "float16")


def notes_of(
    judge: Judge,
    verdict: Verdict,
    kinds: Collection[str] = NOTE_KINDS,
    memory: Memory | None = None,
) -> tuple[Note, ...]:
    """Return the notes of these kinds: the verdict's own, and those of this module.

    memory: filled here; pass it again for other cases.
    """
    own = tuple(note for note in verdict.notes if note.kind in kinds)
    if verdict.outcome in ("agreed", "raised") and "context" in kinds:
        own += tuple(_contexts(judge, verdict))
    if verdict.outcome == "raised" and "autocast-raises" in kinds:
        return (*own, *_raising(judge, verdict))
    if verdict.outcome == "agreed" and "portability" in kinds:
        return (*own, *_differing(judge, verdict, {} if memory is None else memory))
    return own


# -- a program that raises under autocast alone ---------------------------------------------------


def _raising(judge: Judge, verdict: Verdict) -> Iterator[Note]:
    seen, runtime = verdict.seen, judge.backend.reference()
    if seen is None or seen.raised is None or refuses(seen):  # a ban says what to do
        return
    case, at = _until(verdict.case, seen.raised)
    if _untouched(case, at, seen, judge.backend.device):
        return
    if runtime.run(bare(case)).raised is not None or _astray(case, at, runtime):
        return
    small = None if at is None else alone(case, (at,), capture(case, runtime))
    if small is None or runtime.run(small).raised is None:  # it depends on the statements around it
        small = None
    devices = () if small is None else _devices_running(small, judge.backend.device, runtime)
    op = "backward" if at is None else list(statements(case.program.body))[at].op
    yield Note(
        "autocast-raises",
        judge.backend.name,
        op,
        seen.raised.text,
        f"{seen.raised.kind}: {_first_line(seen.raised)}",
        _remedy(case, small, devices, runtime),
        ",".join(devices),
    )


def _until(case: Case, raised: Raised) -> tuple[Case, int | None]:
    """Return the forward part of a case up to the statement that raised, and its number.

    The number is None, and the case the whole one, if not a statement raised but the plan, mostly
    the backward pass.
    """
    body = list(statements(case.program.body))
    at = next((i for i, s in enumerate(body) if statement_source(s) == raised.text), None)
    if at is None or case.plan.transform != "none":
        return case, at
    case = inferring(case)
    program = without(case.program, set(range(at + 1, len(body))), {})
    return (case, at) if program is None else (msgspec.structs.replace(case, program=program), at)


def _untouched(case: Case, at: int | None, seen: Observation, device: str) -> bool:
    """Return whether the case surely raises the same error without autocast."""
    casts = any(call.casts or call.sets_dtype for call in seen.kernels)
    if at is None:
        return not casts
    statement = list(statements(case.program.body))[at]
    rules = load_table(device).rules
    if any(name.removeprefix("aten::") in rules for name in CATALOGUE[statement.op].overloads):
        return False
    return not casts or {spec.name for spec in case.program.inputs}.issuperset(uses(statement))


def _astray(case: Case, at: int | None, runtime: ReferenceRuntime) -> bool:
    """Return whether a statement got a tensor on another device than without autocast.

    Autocast moves none: a fake kernel lost the device, as it does for those dtypes by itself.
    """
    if at is None:
        return False
    under, plain = _places(case, at, runtime), _places(bare(case), at, runtime)
    return any(place != plain.get(name, place) for name, place in under.items())


def _places(case: Case, at: int, runtime: ReferenceRuntime) -> dict[str, str]:
    """Return the device types of a statement's inputs in its first call."""
    wanted, found = uses(list(statements(case.program.body))[at]), dict[str, str]()

    def mark(number: int, names: Mapping[str, Any]) -> None:
        if number == at and not found:
            tensors = {n: names[n] for n in wanted if isinstance(names.get(n), torch.Tensor)}
            found.update({name: tensor.device.type for name, tensor in tensors.items()})

    run_marked(case, runtime.runtime, mark)
    return found


def _devices_running(small: Case, device: str, runtime: ReferenceRuntime) -> tuple[str, ...]:
    """Return the devices whose policies let a statement run on this device's kernels."""
    dtypes = {dtype for _, dtype in _under(small, device)}
    tables = {other: load_table(other) for other in tabled_devices() if other != device}
    return tuple(
        other
        for other, table in tables.items()
        if dtypes <= set(table.supported_dtypes)
        and under_policies(runtime, table, device).run(small).raised is None
    )


def _remedy(
    case: Case, small: Case | None, devices: tuple[str, ...], runtime: ReferenceRuntime
) -> str:
    """Return a sentence on what to do, on the statement alone if it raises alone. It was run."""
    there = f"; with the policies of {', '.join(devices)} it runs unchanged" if devices else ""
    found = (small and remedy(small, runtime)) or remedy(case, runtime)
    assert found is not None  # the whole case runs without autocast
    return f"{found.advice}{there}."


# -- a statement that another device's policies treat otherwise -----------------------------------


def _differing(judge: Judge, verdict: Verdict, memory: Memory) -> Iterator[Note]:
    case, seen, device = verdict.case, verdict.seen, judge.backend.device
    if seen is None or not _plain(case.plan):
        return
    specs = _specs(case, seen)
    for statement, dtype in _under(case, device):
        op = CATALOGUE[statement.op]
        if statement.form in ("inplace", "out") or not op.overloads:
            continue
        given = [specs.get(name) for name in uses(statement)]
        made = [specs.get(name) for name in statement.outputs if name != "_"]
        if None in given or None in made:
            continue
        floats = {s.dtype for s in given if s is not None and s.dtype in FLOAT_DTYPES}
        here = ", ".join(s.dtype for s in made if s is not None)
        told: dict[str, list[str]] = {}
        for others in _unlike(op, device, dtype, floats):
            key = (device, others[0], dtype, here, *_signature(statement, specs))
            if key not in memory:
                memory[key] = _elsewhere(judge, statement, specs, here, others[0], dtype)
            if memory[key]:
                told.setdefault(memory[key], []).extend(others)
        if told:
            yield _note(judge.backend.name, statement, device, here, told)


def _note(
    backend: str, statement: Statement, device: str, here: str, told: Mapping[str, list[str]]
) -> Note:
    """Return the note of a statement. told: the devices that differ, by what it does there."""
    words = _words if all(_words(what) != _words(here) for what in told) else str
    sides = [f"{words(what)} on {', '.join(sorted(where))}" for what, where in told.items()]
    errors = [what.removeprefix("raises ") for what in told if what.startswith("raises ")]
    name = next(n for n in statement.outputs if n != "_")
    advice = f"Cast {name} to the dtype that later statements expect."
    if errors:
        advice = f"Give it float32 inputs, or call another op: there it raises {errors[0]}"
    return Note(
        "portability",
        backend,
        statement.op,
        statement_source(statement),
        "; ".join([f"{words(here)} on {device}", *sorted(sides)]),
        advice,
        ",".join(sorted(name for where in told.values() for name in where)),
    )


def _words(what: str) -> str:
    """Return dtypes as a group of notes shows them: both 16-bit ones alike, integers left out."""
    if what.startswith("raises "):
        return what.partition(": ")[0]
    floats = [d for d in what.split(", ") if d.startswith(("float", "bfloat", "complex"))]
    return ", ".join(dict.fromkeys("16 bits" if d in _HALVES else d for d in floats))


def _plain(plan: Plan) -> bool:
    """Return whether statements run under the contexts around them."""
    entries = ("context", "decorator", "custom_fwd", "setup_context")
    return plan.entry in entries and plan.transform == "none" and plan.thread != "inside"


def _specs(case: Case, seen: Observation) -> dict[str, TensorSpec]:
    """Return the types of a case's inputs and of the observed values."""
    found = {spec.name: spec for spec in case.program.inputs}
    for label, value in seen.values.items():
        name = named(label)
        if value is not None and name not in found:
            dtype = str(value.dtype).removeprefix("torch.")
            found[name] = TensorSpec(name, tuple(value.shape), dtype)
    return found


def _under(case: Case, device: str) -> Iterator[tuple[Statement, str]]:
    """Yield the statements that run under autocast of a device, each with its dtype."""

    def walk(body: tuple[Node, ...], around: _State) -> Iterator[tuple[Statement, str]]:
        for node in body:
            if isinstance(node, Statement):
                if around.enabled:
                    yield node, around.dtype
            elif isinstance(node.context, Autocast):
                yield from walk(node.body, _entered(node.context, device, around))
            else:
                yield from walk(node.body, around)

    state = _State(load_table(device).default_dtype, enabled=False)
    for context in case.plan.contexts:
        state = _entered(context, device, state)
    yield from walk(case.program.body, state)


class _State(NamedTuple):
    """Autocast's state of a device."""

    dtype: str
    enabled: bool


def _entered(context: Autocast, device: str, around: _State) -> _State:
    if context.device not in (None, device):
        return around
    dtype = context.dtype or around.dtype
    return _State(dtype, context.enabled and dtype in load_table(device).supported_dtypes)


def _unlike(op: Op, device: str, dtype: str, floats: Set[str]) -> Iterator[tuple[str, ...]]:
    """Yield the devices on which other dtypes meet at an op, those with equal policies together."""
    names = [name.removeprefix("aten::") for name in op.overloads]

    def policies(of: PolicyTable) -> tuple[Policy | None, ...]:
        return tuple(of.rules[n].policy if n in of.rules else None for n in names)

    own = policies(load_table(device))
    alike: dict[tuple[Policy | None, ...], list[str]] = {}
    for other in tabled_devices():
        table = load_table(other)
        theirs = policies(table)
        if other == device or theirs == own or dtype not in table.supported_dtypes:
            continue
        pairs = zip(own, theirs, strict=True)
        if any(_meeting(a, floats, dtype) != _meeting(b, floats, dtype) for a, b in pairs):
            alike.setdefault(theirs, []).append(other)
    yield from map(tuple, alike.values())


def _meeting(policy: Policy | None, floats: Set[str], dtype: str) -> Set[str]:
    """Return the dtypes that meet in a kernel; setting a dtype, or raising, counts as one."""
    given = floats - {"float64"}
    match policy:
        case Policy.BANNED:
            return {"raises"}
        case _ if not given:
            return floats
        case Policy.LOWER_PRECISION_FP:
            return floats - given | {dtype}
        case Policy.FP32:
            return floats - given | {"float32"}
        case Policy.PROMOTE:
            foreign = given - {dtype, "float32"}
            return {"raises"} if foreign else floats - given | {max(given, key=_WIDTHS.index)}
        case Policy.FP32_SET_OPT_DTYPE | Policy.FP32_APPEND_DTYPE:
            return floats | {"sets float32"}
        case _:
            return floats


# -- contexts that do something else elsewhere ----------------------------------------------------


def _contexts(judge: Judge, verdict: Verdict) -> Iterator[Note]:
    """Yield what is to be known of the contexts of a case, each fact once."""
    case, device = verdict.case, judge.backend.device
    met = {device, *(spec.device for spec in case.program.inputs)}
    told: set[Fact] = set()
    for context, inherits in opened(case, device):
        if not context.enabled:
            continue
        if context.device not in (None, device):
            fact = None if context.device in met else without_tensors(context.device, device)
        elif context.dtype is not None:
            fact = by_dtype(device, context.dtype)
        else:
            fact = None if inherits else without_dtype(device)
        if fact is not None and fact not in told:
            told.add(fact)
            yield fact.note(judge.backend.name, autocast_call(context))


_WIDTHS = (*_HALVES, "float32")


def _signature(statement: Statement, specs: Mapping[str, TensorSpec]) -> tuple[str, ...]:
    """Return what decides the dtypes of a statement's results."""

    def word(arg: Arg) -> str:
        match arg:
            case Ref():
                spec = specs[arg.name]
                return " ".join([spec.dtype, spec.device, "" if spec.shape else "scalar"]).strip()
            case Items():
                return f"[{', '.join(map(word, arg.items))}]"
            case DType():
                return arg.name
            case str() | bool() | None:
                return repr(arg)
            case _:
                return type(arg).__name__

    named_args = (f"{name}={word(arg)}" for name, arg in statement.kwargs)
    return statement.op, statement.form, *map(word, statement.args), *named_args


def _elsewhere(
    judge: Judge,
    statement: Statement,
    specs: Mapping[str, TensorSpec],
    here: str,
    other: str,
    dtype: str,
) -> str:
    """Return a statement's result dtypes under another device's policies, or how it raises.

    here: its result dtypes under this device's policies. Returns "" if these are the same, or if
    the policies do not make the difference.
    """
    given = tuple(specs[name] for name in dict.fromkeys(uses(statement)))
    made = tuple(name for name in statement.outputs if name != "_")
    plan = Plan((Autocast(dtype=dtype),), backward="none")
    case = Case(Program(given, (statement,), made), plan)
    device, runtime = judge.backend.device, judge.backend.reference()
    if _came(runtime.run(case), made) != here:  # it ran otherwise, as on tensors of the CPU
        return ""
    lent = under_policies(runtime, load_table(other), device)
    came = _came(lent.run(case), made)
    if came.startswith("raises "):
        there = without_values(other)
        (seen,) = there.run([case])
        came = _came(seen, made)
        control = under_policies(there.reference(), load_table(device), other).run(case)
        if _came(control, made) != here:
            return ""
    return "" if came == here else came


def _came(seen: Observation, made: tuple[str, ...]) -> str:
    if seen.raised is not None:
        return f"raises {seen.raised.kind}: {_first_line(seen.raised)}"
    found = [value for name in made if (value := seen.values.get(name)) is not None]
    return ", ".join(str(value.dtype).removeprefix("torch.") for value in found)


def under_policies(runtime: ReferenceRuntime, table: PolicyTable, device: str) -> ReferenceRuntime:
    """Return a reference that applies another device's policies to tensors of a device."""

    class autocast(reference.autocast):
        __init__ = partialmethod(reference.autocast.__init__, table=replace(table, device=device))

    return replace(runtime, runtime=replace(runtime.runtime, autocast=autocast))


def _first_line(raised: Raised) -> str:
    return raised.message.strip().partition("\n")[0][:160]
