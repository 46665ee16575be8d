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
from amp_fuzz.cases.program import Autocast, regions, statements, uses
from amp_fuzz.records.schema import DivergenceRecord

__all__ = [
    "UNSTEADY",
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
    case = record.minimised or record.case
    kind, words, cause = kind_of(record.kind), sorted(special(case)), _cause(record)
    op = "*" if record.general else record.overload or record.op

    def named(kind: str, op: str, policy: str, *words: str, dtypes: bool = False) -> Fingerprint:
        types = _dtypes(record, case) if dtypes else ()
        said = "+".join(filter(None, words))
        return Fingerprint(kind, record.backend, record.stage, op, policy, types, said)

    match cause:
        case "context" | "rule":  # for a rule, no plan matters
            acts = f"acts={record.as_if[0].partition('=')[0]}"
            return named("context", "*", "*", *(words if cause == "context" else ()), acts)
        case "policy":
            return named("policy", record.overload, record.policy)
        case "state":  # the op does not matter; of contexts, only how they are entered and left
            matters = ("entry=", "interrupted", "thread=") if record.left else ""
            plan = [w for w in words if w.startswith(matters) and not w.startswith("backward=")]
            return named("state", "*", "none", *_left_behind(record), *plan)
        case "unsteady" if op:  # not minimised: much of its case is unrelated
            died = re.search(r" died (?:of |with )(.+)", record.observed)
            return named(kind, op, "none", died[1] if died and kind != "nondeterminism" else "")
        case "unsteady":
            return named(kind, "", record.policy, dtypes=True)
        case "part":
            return named("part", record.part, "*")
        case "plan":
            return named(kind, "*", "*", *words, _shown(record))
        case "op":
            return named(kind, op, record.policy, ingredient(case), _shown(record), dtypes=True)


UNSTEADY = ("nondeterminism", "crash", "timeout")
"""Kinds for which nothing can be tried a second time."""

_Cause = Literal["context", "rule", "policy", "state", "unsteady", "part", "plan", "op"]


def _cause(record: DivergenceRecord) -> _Cause:
    """Return what names a finding: of an unsteady one, nothing but its kind and op is known."""
    if record.as_if and record.general:
        setting = record.as_if[0].partition("=")[0]
        return "context" if setting in ("dtype", "enabled", "cache_enabled") else "rule"
    if record.as_if:
        return "policy"
    if record.left or record.kind == "state":
        return "state"
    if record.kind in UNSTEADY:
        return "unsteady"
    if ": " in record.part and record.kind not in ("raise", "relation"):
        # An option that is switched off, such as `emulate_precision_casts`, identifies no single
        # fault. Errors are kept apart from wrong results: one lowering may have a bug of each.
        return "part"
    return "plan" if record.general and special(record.minimised or record.case) else "op"


# What of a plan nearly every case has.
_USUAL = {"", "autocast", "nested", "disabled", "backward=outside", "backward=inside"}


def special(case: Case) -> set[str]:
    """Return the unusual part of a case's ingredient: ``entry=decorator``, ``checkpoint``."""
    return set(ingredient(case).split("+")) - _USUAL


_WIDTH = {"float16": 0, "bfloat16": 0, "float32": 1, "float64": 2, "complex64": 3, "complex128": 4}


def kind_of(kind: str) -> str:
    """Return the kind of a fingerprint for that of a divergence: ``value`` for ``bitwise``."""
    # The drawn values decide whether a wrong value is finite.
    return kind.replace("bitwise", "value").replace("nonfinite", "value")


def fingerprinted(record: DivergenceRecord) -> DivergenceRecord:
    """Return a finding with its fingerprint."""
    return msgspec.structs.replace(record, fingerprint=fingerprint(record).hash)


def title(record: DivergenceRecord) -> str:
    """Return a finding in a few words, as the heading of its group."""
    kind, op, others = record.kind, record.op, " or ".join(record.as_if)
    words, at = sorted(special(record.minimised or record.case)), f" at {op}" if op else ""
    match _cause(record):
        case "context":
            return f"autocast with {' and '.join(words)} acts as if it said {others}"
        case "rule":
            return f"the backend acts as if: {others.replace('=', ' is ')}"
        case "policy":
            return f"{record.overload} behaves as if its policy were {others}, not {record.policy}"
        case "state":
            names = ", ".join(word.removeprefix("leaves=") for word in _left_behind(record))
            shown = f", as {kind}{at}" if kind != "state" else ""
            return "state: " + (names or "autocast's state") + f" not restored{shown}"
        case "part":
            return f"{record.part} is wrong, as {kind}{at}"
        case _ if record.general:
            policy = f" of {record.policy}" if record.policy not in ("", "none") else ""
            under = f" under {', '.join(words)}" if words else policy
            return f"{kind} at any op{under}, as {op}"
        case _:
            return f"{kind}{at}"


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


def _shown(record: DivergenceRecord) -> str:
    """Return what tells an error from another, or the relation that does not hold."""
    if record.kind == "raise":
        return f"raises={_error(record.expected)}->{_error(record.observed)}"
    return f"relation={record.where.partition(':')[0]}" if record.kind == "relation" else ""


def _error(side: str) -> str:
    return "none" if side == "no error" else side.partition(":")[0]


def _left_behind(record: DivergenceRecord) -> list[str]:
    """Return ``leaves=weight cache`` for each part of the state that is not restored."""
    changed = re.findall(r"(?:^|[,;] )([a-z][a-z ]*): [^:]*? became ", record.observed)
    return [f"leaves={name}" for name in record.left or dict.fromkeys(changed)]


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
        if value == plain or (name == "loop" and plan.passes == 1):
            continue
        if name == "settings":
            value = ", ".join(value)
        found.append(f"{name}={value}" if isinstance(value, str) else name)
    if case.program.mixed:
        found.append("cpu tensors")
    kinds = {str(context.__struct_config__.tag) for context in inner}
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
