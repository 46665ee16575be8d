"""The fingerprint that names a cause: the same on every machine and version.

It is computed after minimising, when everything unrelated to the cause is gone. It contains only
names, and no number that another machine or version could round differently.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, fields
from typing import Literal, get_args, get_origin, get_type_hints

import msgspec

from amp_fuzz.cases.case import Case, Plan
from amp_fuzz.cases.program import Autocast, Checkpoint, regions, statements, uses
from amp_fuzz.records.schema import DivergenceRecord

__all__ = [
    "Fingerprint",
    "fingerprint",
    "fingerprinted",
    "ingredient",
    "kind_of",
    "plan_words",
    "special",
    "title",
]


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What names the cause of a divergence.

    kind: of the divergence, ``value`` of all wrong values, ``grad-value`` of all wrong gradients;
    ``policy``, whatever it shows as, where an op has another policy than its table says;
    ``context`` where a context acts as if it said something else; ``state`` where contexts do not
    restore it; ``part`` of all wrong results for which a compiler has one lowering, decomposition
    or pass to blame. stage: of a compiler, its first rung that diverges, else "". op: the guilty
    op, two joined by ``+``, or ``*`` where others in its place show the same; of ``part``, its
    name: ``lowerings: tanh``. policy: what autocast does
    with it, ``*`` where the plan alone matters. dtypes: of its inputs. ingredient: what of plan and
    regions is left; see `ingredient`.
    """

    kind: str
    backend: str
    stage: str
    op: str
    policy: str
    dtypes: tuple[str, ...]
    ingredient: str

    def __str__(self) -> str:
        """Return the fields in order, as they are hashed."""
        parts = (getattr(self, field.name) for field in fields(self))
        return " | ".join(",".join(p) if isinstance(p, tuple) else p for p in parts)

    @property
    def hash(self) -> str:
        """Ten hex digits, the same on every machine and version."""
        return hashlib.blake2b(str(self).encode(), digest_size=5).hexdigest()


def fingerprint(record: DivergenceRecord) -> Fingerprint:
    """Return the fingerprint of a finding. It is most specific for a minimised one."""
    kind, on, stage = kind_of(record.kind), record.backend, record.stage
    case = record.minimised or record.case
    if record.as_if and record.general:
        plan = sorted(special(case)) if _of_plan(record) else []
        said = "+".join([*plan, f"acts={record.as_if[0].partition('=')[0]}"])
        return Fingerprint("context", on, stage, "*", "*", (), said)
    if record.as_if:
        return Fingerprint("policy", on, stage, record.overload, record.policy, (), "")
    if record.left:  # of the plan, only how contexts are entered and left matters
        left = [f"leaves={name}" for name in record.left]
        left += sorted(w for w in special(case) if w.startswith(_ENTERED))
        return Fingerprint("state", on, stage, "*", "none", (), "+".join(left))
    if kind == "state":  # the state left behind matters, not the op
        own = (w for w in special(case) if not w.startswith("backward="))
        left = [*_left_behind(record.observed), *sorted(own)]
        return Fingerprint(kind, on, stage, "*", "none", (), "+".join(left))
    op = "*" if record.general else record.overload or record.op
    if kind == "nondeterminism" and op:  # not minimised: much of its case is unrelated
        return Fingerprint(kind, on, stage, op, "none", (), "")
    if kind in ("crash", "timeout") and op:  # not minimised either; any dtypes
        died = re.search(r" died (?:of |with )(.+)", record.observed)
        return Fingerprint(kind, on, stage, op, "none", (), died[1] if died else "")
    if kind in ("nondeterminism", "crash", "timeout"):
        return Fingerprint(kind, on, stage, op, record.policy, _dtypes(record, case), "")
    if _blamed(record):
        return Fingerprint("part", on, stage, record.part, "*", (), "")
    more = [ingredient(case)]
    if kind == "raise":
        more.append(f"raises={_error(record.expected)}->{_error(record.observed)}")
    if kind == "relation":
        more.append(f"relation={record.where.partition(':')[0]}")
    said = "+".join(filter(None, more))
    if record.general and (words := special(case)):  # the plan is what matters
        more[0] = "+".join(sorted(words))
        return Fingerprint(kind, on, stage, "*", "*", (), "+".join(more))
    return Fingerprint(kind, on, stage, op, record.policy, _dtypes(record, case), said)


def _of_plan(record: DivergenceRecord) -> bool:
    """Return whether a context acts as if it said something else: for a rule, no plan matters."""
    return record.as_if[0].partition("=")[0] in ("dtype", "enabled", "cache_enabled")


def _blamed(record: DivergenceRecord) -> bool:
    """Return whether a named part of a compiler explains a wrong result.

    An option that is switched off, such as ``emulate_precision_casts``, identifies no single fault.
    Errors are kept apart from wrong results: one lowering may have a bug of each.
    """
    return ": " in record.part and record.kind not in ("raise", "relation", "state")


# What of a plan nearly every case has.
_USUAL = {"", "autocast", "nested", "disabled", "backward=outside", "backward=inside"}


def special(case: Case) -> set[str]:
    """Return the unusual part of a case's ingredient: ``entry=decorator``, ``checkpoint``."""
    return set(ingredient(case).split("+")) - _USUAL


# Of a plan, how its contexts are entered and left.
_ENTERED = ("entry=", "interrupted", "thread=")

_WIDTH = {"float16": 0, "bfloat16": 0, "float32": 1, "float64": 2, "complex64": 3, "complex128": 4}

# The drawn values decide whether a wrong value is finite.
_KINDS = {
    "bitwise": "value",
    "nonfinite": "value",
    "grad-bitwise": "grad-value",
    "grad-nonfinite": "grad-value",
}


def kind_of(kind: str) -> str:
    """Return the kind of a fingerprint for that of a divergence: ``value`` for ``bitwise``."""
    return _KINDS.get(kind, kind)


def fingerprinted(record: DivergenceRecord) -> DivergenceRecord:
    """Return a finding with its fingerprint."""
    return msgspec.structs.replace(record, fingerprint=fingerprint(record).hash)


def title(record: DivergenceRecord) -> str:
    """Return a finding in a few words, as the heading of its group."""
    policy = "" if record.policy in ("", "none") else record.policy
    if record.as_if and record.general:
        if not _of_plan(record):
            said = " or ".join(name.replace("=", " is ") for name in record.as_if)
            return f"the backend acts as if: {said}"
        plan = " and ".join(sorted(special(record.minimised or record.case)))
        return f"autocast with {plan} acts as if it said {' or '.join(record.as_if)}"
    if record.as_if:
        other = " or ".join(record.as_if)
        return f"{record.overload} behaves as if its policy were {other}, not {record.policy}"
    if record.kind == "state" or record.left:
        left = [f"leaves={name}" for name in record.left] or _left_behind(record.observed)
        names = ", ".join(word.removeprefix("leaves=") for word in left) or "autocast's state"
        shown = "" if record.kind == "state" else f", as {record.kind}"
        shown += f" at {record.op}" if shown and record.op else ""
        return f"state: {names} not restored{shown}"
    if _blamed(record):
        at = f" at {record.op}" if record.op else ""
        return f"{record.part} is wrong, as {record.kind}{at}"
    if record.general:
        words = special(record.minimised or record.case)
        of = f" under {', '.join(sorted(words))}" if words else f" of {policy}" * bool(policy)
        return f"{record.kind} at any op{of}, as {record.op}"
    return f"{record.kind} at {record.op}" if record.op else record.kind


def _dtypes(record: DivergenceRecord, case: Case) -> tuple[str, ...]:
    """Return the dtypes of the guilty op's inputs, as far as they are known.

    If it may be any op, the number of its tensors does not matter. If it is a single kernel, only
    the dtype that it computes in does.
    """
    given = _given(record, case)
    if record.general:
        return tuple(sorted(set(given)))
    if record.overload:  # one kernel, which computes in the widest
        floats = [d for d in given if d in _WIDTH]
        return (max(floats, key=_WIDTH.__getitem__) if floats else "float32",)
    return given


def _given(record: DivergenceRecord, case: Case) -> tuple[str, ...]:
    if dtypes := tuple(filter(None, record.dtypes.split(","))):
        return dtypes
    types = {s.name: s.dtype for s in case.program.inputs}
    body = list(statements(case.program.body))
    if len(body) == 1:
        return tuple(types[name] for name in uses(body[0]) if name in types)
    return tuple(sorted(set(types.values())))


def _error(side: str) -> str:
    return "none" if side == "no error" else side.partition(":")[0]


def _left_behind(observed: str) -> list[str]:
    """Return ``leaves=weight cache`` for each part of the state that has changed."""
    names = re.findall(r"(?:^|[,;] )([a-z][a-z ]*): [^:]*? became ", observed)
    return [f"leaves={name}" for name in dict.fromkeys(names)]


_PLAIN = {
    field.name: getattr(Plan(contexts=(), backward="none"), field.name)
    for field in msgspec.structs.fields(Plan)
    if field.name not in ("contexts", "backward_context")
}


def ingredient(case: Case) -> str:
    """Return the ingredients of a plan and its regions, joined by ``+``: ``autocast+steps``.

    Only the number of contexts counts, ``autocast`` or ``nested``, and not their arguments: a
    divergence is the same under float16. Each kind of region counts once.
    """
    plan, found = case.plan, list[str]()
    inner = list(regions(case.program.body))
    contexts = len(plan.contexts) + sum(isinstance(c, Autocast) for c in inner)
    if contexts:
        found.append("autocast" if contexts == 1 else "nested")
    if any(isinstance(c, Autocast) and not c.enabled for c in (*plan.contexts, *inner)):
        found.append("disabled")
    for name, plain in _PLAIN.items():
        value = getattr(plan, name)
        if value == plain or (name == "loop" and plan.steps == 1):
            continue
        if name == "settings":
            value = ", ".join(value)
        found.append(f"{name}={value}" if isinstance(value, str) else name)
    if case.program.mixed:
        found.append("cpu tensors")
    kinds = {"checkpoint" if isinstance(c, Checkpoint) else _tag(c) for c in inner}
    return "+".join([*found, *sorted(kinds - {"autocast"})])


def plan_words() -> tuple[str, ...]:
    """Return each ingredient that a case may have, in the order in which `ingredient` names them.

    ``settings`` stands for all settings.
    """
    found = ["autocast", "nested", "disabled"]
    hints = get_type_hints(Plan)
    for name, plain in _PLAIN.items():
        values = get_args(hints[name]) if get_origin(hints[name]) is Literal else ()
        found += [f"{name}={value}" for value in values if value != plain] or [name]
    return (*found, "cpu tensors", "checkpoint", "fp8", "inference_mode", "no_grad")


def _tag(context: msgspec.Struct) -> str:
    return str(context.__struct_config__.tag)
