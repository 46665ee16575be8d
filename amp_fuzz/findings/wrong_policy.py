"""Find the cause behind an op that diverges: its policy, or nothing specific to the op.

One wrong policy shows in a dozen ways: another dtype, an error for mixed dtypes, other bits of a
gradient, in the op itself and in ops that call it. But the reference can assume that policy. If it
then agrees with torch on the whole case, the policy is the cause, whatever it shows as. A fault of
no particular op (the cast of a leaf, the state of a context) shows at every op: then two other ops
in its place show the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import replace
from itertools import islice
from typing import Any

import msgspec
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from amp_fuzz.backends.harness import Observation
from amp_fuzz.cases.case import Case
from amp_fuzz.cases.program import Items, Ref, Statement, TensorSpec, statements, transform, uses
from amp_fuzz.catalogue import CATALOGUE
from amp_fuzz.findings.minimize.target import Target, answer_of
from amp_fuzz.findings.wrong_context import acts_as, alike, unrestored
from amp_fuzz.findings.wrong_rule import RULES
from amp_fuzz.oracle.judge import Judge
from amp_fuzz.oracle.verdict import Verdict
from amp_fuzz.records.fingerprint import UNSTEADY, special
from amp_fuzz.records.schema import DivergenceRecord
from amp_fuzz.reference import Policy, Supposed, load_table
from amp_fuzz.upstream.supposed import agrees_with

__all__ = [
    "POLICIES",
    "WRONG_VALUES",
    "as_if",
    "caused",
    "general",
    "of_contexts",
    "only_kernel",
    "policies_of",
    "supposes",
]

POLICIES: Mapping[str, Supposed] = {
    "none": None,
    "lower_precision_fp": Policy.LOWER_PRECISION_FP,
    "fp32": Policy.FP32,
    "promote": Policy.PROMOTE,
    "banned": Policy.BANNED,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""The policies that an op may behave as, in the order in which they are tried.

A dtype is that of `torch.library.register_autocast`, which ops of the user's have.
"""

# A program with more kernels than this has too many possible assumptions.
_MOST_KERNELS = 6


def caused(
    judge: Judge,
    record: DivergenceRecord,
    first: Verdict,
    last: Verdict,
    seen: Callable[[Case], None] = lambda case: None,
    deadly: Set[str] = frozenset(),
) -> DivergenceRecord:
    """Return the record of a minimised divergence with its cause, as far as known.

    first: the divergence before minimising, which the cause must explain too. last: the one after.
    deadly: the ids of cases that must not run. On a compiler, where each case would be compiled,
    only the reference tries: rules that do not hold, and other policies.
    """
    if record.kind in UNSTEADY:
        return record
    quick = not judge.backend.ladder()
    target = replace(Target.of(last), op="", wording=())  # an error may name its op

    def shows(case: Case) -> bool:
        if case.id in deadly:
            return False
        seen(case)
        found = replace(judge, relations="all").judge(case)
        return found.divergence is not None and target.reply(answer_of(found)) == "same"

    found = of_contexts(judge, first, last)
    broken = bool(found.get("as_if")) and found["as_if"][0] in RULES
    if found and not broken:
        return msgspec.structs.replace(record, **found)
    policy = _of_policy(judge, record, first, last) if broken or not quick else record
    if broken and (not policy.as_if or general(last.case, judge.backend.device, shows)):
        return msgspec.structs.replace(record, **found)
    if not quick or policy.as_if:
        return policy
    if general(last.case, judge.backend.device, shows):
        return msgspec.structs.replace(record, general=True)
    if record.kind in WRONG_VALUES and (kernel := only_kernel(judge, last.case)):
        record = msgspec.structs.replace(record, overload=kernel)
    return _of_policy(judge, record, first, last)


def _of_policy(
    judge: Judge, record: DivergenceRecord, first: Verdict, last: Verdict
) -> DivergenceRecord:
    """Return the record of a divergence with the policies that explain it, if any does."""
    # A divergence that needs more than a plain context is not about an op's policy.
    if not (supposes(first) and supposes(last)) or special(last.case):
        return record
    kernels = policies_of(last)
    overload, names = as_if(judge, last.case, judge.backend.run([last.case])[0], kernels)
    observed = judge.backend.run([first.case])[0]
    names = tuple(
        n
        for n in names
        if agrees_with(judge.backend, first.case, observed, {overload: POLICIES[n]}, own=first.own)
    )
    if not names:
        return record
    return msgspec.structs.replace(
        record, overload=overload, as_if=names, policy=kernels[overload] or "none"
    )


def of_contexts(judge: Judge, first: Verdict, last: Verdict) -> dict[str, Any]:
    """Return the record's fields about faulty contexts; nothing if there are none."""
    left_behind = last.divergence is not None and last.divergence.kind == "state"
    if not (supposes(last) or left_behind):
        return {}
    if (left := unrestored(judge, last.case)) and set(left) <= set(unrestored(judge, first.case)):
        return {"left": left}
    if left_behind:
        return {}
    names = acts_as(judge, last.case, judge.backend.run([last.case])[0], last.own)
    if names:
        of_first = acts_as(judge, first.case, judge.backend.run([first.case])[0], first.own)
        if names[0] in RULES:
            # If the plan still matters, the context around it alone is not to blame.
            left_over = bool(special(last.case))
            names = tuple(
                name
                for name in names
                if name in RULES and name in of_first and not (left_over and "around" in name)
            )
            return {"as_if": names, "general": True} if names else {}
        # About the same setting: its dtype depends on contexts around it, which may be gone.
        names = alike([name for name in names if any(alike((name, n))[1:] for n in of_first)])
    return {"as_if": names, "general": True} if names else {}


WRONG_VALUES = ("bitwise", "value", "nonfinite", "grad-bitwise", "grad-value", "grad-nonfinite")
"""Kinds of wrong values and gradients."""


class _Heard(TorchDispatchMode):
    """Records kernels that compute: no views, and none that only create or copy a tensor."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: dict[str, None] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        aliases = any(r.alias_info is not None for r in func._schema.returns)
        if not aliases and any(str(a.type) == "Tensor" for a in func._schema.arguments[:1]):
            self.names.setdefault(str(func).removeprefix("aten.").removesuffix(".default"))
        return func(*args, **(kwargs or {}))


_COPIES = ("_to_copy", "clone", "detach", "_unsafe_view", "_local_scalar_dense")


def only_kernel(judge: Judge, case: Case) -> str:
    """Return the one kernel below autograd that a case without a backward pass runs, or "".

    Several ops may share one kernel, whose fault is one cause.
    """
    if case.plan.backward != "none" or case.plan.thread != "none":
        return ""
    with _Heard() as heard:
        judge.backend.reference().run(case)
    names = [name for name in heard.names if name not in _COPIES]
    return names[0] if len(names) == 1 else ""


def supposes(verdict: Verdict) -> bool:
    """Return whether another policy may explain a divergence; it cannot explain changed state."""
    found = verdict.divergence
    return found is not None and found.kind not in (*UNSTEADY, "state", "relation")


def policies_of(verdict: Verdict) -> dict[str, Policy | None]:
    """Return the autocast kernels that a case reached, in order, with their policies.

    So are the ops of the user's that it calls, which may have a kernel that nobody declared.
    """
    found: dict[str, Policy | None] = {k.overload: k.policy for k in verdict.kernels}
    called = (CATALOGUE[s.op] for s in statements(verdict.case.program.body))
    names = (name.removeprefix("aten::") for op in called for name in op.overloads[:1])
    found |= {name: None for name in names if "::" in name and name not in found}
    return found


def as_if(
    judge: Judge, case: Case, observed: Observation, kernels: Mapping[str, Policy | None]
) -> tuple[str, tuple[str, ...]]:
    """Return the kernel that behaves as if it had another policy, and which, or ``("", ())``.

    With any of these policies instead of its own, the reference agrees on the whole case.
    """
    for overload, own in islice(kernels.items(), _MOST_KERNELS):
        found = tuple(
            name
            for name, policy in POLICIES.items()
            if policy != own
            and ("::" in overload or not isinstance(policy, torch.dtype))
            and agrees_with(judge.backend, case, observed, {overload: policy})
        )
        if found:
            return overload, found
    return "", ()


# -- other ops in the place of one ----------------------------------------------------------------


def general(case: Case, device: str, shows: Callable[[Case], bool]) -> bool:
    """Return whether two other ops of the same policy, in place of the only one, show the same.

    Their inputs have the same dtypes and roles, and plan and regions stay. shows: whether a case
    shows the same divergence.
    """
    body = list(statements(case.program.body))
    if len(body) != 1:
        return False
    others = [made for made in _others(case, body[0], device) if made[1].op != body[0].op][:2]
    return len(others) == 2 and all(shows(_with(case, *made)) for made in others)


_SQUARE, _SAME, _LISTED, _ONE = "square", "same", "listed", "one"
# Ops that can replace others, and their inputs: matrices, two alike, a list, or one of any shape.
# The device's table says which of them have the wanted policy.
_STANDING = {
    "mm": _SQUARE,
    "linear": _SQUARE,
    "bmm": _SQUARE,
    "cat": _LISTED,
    "stack": _LISTED,
    "exp": _ONE,
    "expm1": _ONE,
    "l1_loss": _SAME,
    "smooth_l1_loss": _SAME,
    "huber_loss": _SAME,
    "abs": _ONE,
    "neg": _ONE,
    "relu": _ONE,
}


def _others(
    case: Case, statement: Statement, device: str
) -> Iterator[tuple[tuple[TensorSpec, ...], Statement]]:
    specs = {spec.name: spec for spec in case.program.inputs}
    given = [specs[name] for name in dict.fromkeys(uses(statement)) if name in specs]
    if not given:
        return
    wanted = _policy(statement.op, device)
    for op, takes in _STANDING.items():
        if _policy(op, device) != wanted:
            continue
        first, second = (_named(spec, i) for i, spec in enumerate((given * 2)[:2]))
        if takes == _ONE:
            yield (first,), _call(op, Ref(first.name))
            continue
        if takes == _SQUARE:
            shape = (1, 2, 2) if op == "bmm" else (2, 2)
            first, second = (_plain(spec, shape) for spec in (first, second))
        elif first.shape != second.shape:
            second = _plain(second, first.shape)
        names = Ref(first.name), Ref(second.name)
        args = (Items(names), 0) if takes == _LISTED else names
        yield (first, second), _call(op, *args)


def _policy(op: str, device: str) -> Policy | None:
    rules = load_table(device).rules
    names = (o.removeprefix("aten::") for o in CATALOGUE[op].overloads)
    return next((rules[name].policy for name in names if name in rules), None)


def _named(spec: TensorSpec, number: int) -> TensorSpec:
    letter = {"input": "x", "weight": "w", "buffer": "b"}[spec.role]
    return msgspec.structs.replace(spec, name=f"{letter}{number}")


def _plain(spec: TensorSpec, shape: tuple[int, ...]) -> TensorSpec:
    return msgspec.structs.replace(spec, shape=shape, values="")


def _call(op: str, *args: object) -> Statement:
    return Statement(op, "function", args, (), ("v0",))  # type: ignore[arg-type]


def _with(case: Case, inputs: tuple[TensorSpec, ...], statement: Statement) -> Case:
    body = transform(case.program.body, statement=lambda _: (statement,))
    return case.with_program(inputs=inputs, body=body, outputs=statement.outputs)
