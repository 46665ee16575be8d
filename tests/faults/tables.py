"""Policy tables with one wrong rule each, and whether the audit's cells see it.

Where the other faults corrupt torch, these corrupt the table that torch is held to: the real
dispatcher is honest, and a cell must differ in which the right table agrees with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch

from amp_fuzz.backends import Backend
from amp_fuzz.backends.harness import Observation
from amp_fuzz.cases.case import Case
from amp_fuzz.catalogue import CATALOGUE, Op
from amp_fuzz.oracle import compare
from amp_fuzz.policies.tables import Rule, all_overloads
from amp_fuzz.reference import Policy, PolicyTable, as_device, load_table
from amp_fuzz.runs.audit import cases_of, judged
from amp_fuzz.strategies.drawing import usable
from amp_fuzz.upstream import shipped
from amp_fuzz.upstream.known import Known
from tests.faults.faults import EQUIVALENT
from tests.faults.wrapper import POLICIES, overload_of

__all__ = ["Audited", "Wrong", "corrupted", "equivalent", "wrong_policies"]


@dataclass(frozen=True, slots=True)
class Wrong:
    """A rule that a device's table should not have; policy None: it lacks the one it should have.

    own: what the table says of the op. redispatch: see `Rule`.
    """

    device: str
    overload: str
    own: Policy | None
    policy: Policy | None
    redispatch: str | None = None

    @property
    def name(self) -> str:
        """``sum:fp32``, ``mm:none``: as the policy faults are called."""
        return f"{self.overload}:{self.policy or 'none'}"


def wrong_policies(device: str) -> list[Wrong]:
    """Return each wrong policy of each op that the table of some device lists."""
    rules = load_table(device).rules
    return [
        Wrong(device, name, own, policy, redispatch)
        for name in sorted(all_overloads())
        if overload_of(name) is not None  # else a rule for another version of torch
        for own in [rules[name].policy if name in rules else None]
        for policy, redispatch in _possible(name)
        if policy is not own
    ]


def _possible(name: str) -> Iterator[tuple[Policy | None, str | None]]:
    """Yield the policies that an op's schema allows; see `tests.faults.faults`."""
    parameters = _parameters(name)
    for policy in (Policy.LOWER_PRECISION_FP, Policy.FP32, Policy.PROMOTE, None, Policy.BANNED):
        yield policy, None
    if any(p.name == "dtype" and isinstance(p.type, torch.OptionalType) for p in parameters):
        yield Policy.FP32_SET_OPT_DTYPE, None
    base = name.partition(".")[0]
    types = [(p.name, str(p.type)) for p in parameters]
    for other in getattr(torch.ops.aten, base).overloads():
        twin = _parameters(f"{base}.{other}".removesuffix(".default"))
        named = [(p.name, str(p.type)) for p in twin]
        if named[:-1] == types and named[-1][0] == "dtype":
            yield Policy.FP32_APPEND_DTYPE, f"{base}.{other}"


def _parameters(name: str) -> Any:
    return overload_of(name)._schema.arguments  # type: ignore[union-attr]


def corrupted(wrong: Wrong) -> PolicyTable:
    """Return the device's table with the wrong rule."""
    table = load_table(wrong.device)
    rules = {name: rule for name, rule in table.rules.items() if name != wrong.overload}
    if wrong.policy is not None:
        rules[wrong.overload] = Rule(
            wrong.overload, wrong.policy, ">=2.7", "a wrong table", wrong.redispatch
        )
    return replace(table, rules=MappingProxyType(rules))


_CELL = (
    "it is composite and passes every tensor on to linear, which the table casts to the autocast "
    "dtype too; what it computes of the two results has that dtype already"
)
_IN_FLOAT32 = {Policy.FP32, Policy.FP32_SET_OPT_DTYPE, Policy.FP32_APPEND_DTYPE}
# What no cell tells, beside `EQUIVALENT`: by device, own policy and wrong one.
_UNTOLD = {
    ("cpu", None, "rnn_relu_cell:lower_precision_fp"): _CELL,
    ("cpu", None, "rnn_tanh_cell:lower_precision_fp"): _CELL,
    ("cpu", None, "addr:promote"): (
        "addr computes in the common dtype of its tensors by itself, as the policy does: one draw "
        "of 24 differs, in its last bit"
    ),
    ("cpu", Policy.LOWER_PRECISION_FP, "_native_multi_head_attention:none"): (
        "its products are cast by policies of their own; it differs for biases of another dtype "
        "only, which the kernel reads out of bounds: native-attention-bias, a known finding"
    ),
}


def equivalent(wrong: Wrong) -> str:
    """Return why no program can tell a wrong policy from the right one, or ""."""
    types = [str(p.type) for p in _parameters(wrong.overload) if "Tensor" in str(p.type)]
    if {wrong.own, wrong.policy} == {Policy.PROMOTE, None} and types == ["Tensor"]:
        return "promote gives the dtype of its widest tensor, and the op has one tensor"
    if {wrong.own, wrong.policy} <= _IN_FLOAT32 and types == ["Tensor"]:
        return "both give float32, or the dtype that the caller names, from the same values"
    untold = _UNTOLD.get((wrong.device, wrong.own, wrong.name), "")
    return untold or (EQUIVALENT.get(wrong.name, "") * (POLICIES.get(wrong.overload) == wrong.own))


@dataclass(slots=True)
class Audited:
    """The cells of a backend, each run once by the backend and under the right table."""

    backend: Backend
    known: tuple[Known, ...] = field(default_factory=shipped)
    _runs: dict[str, tuple[Observation, bool]] = field(default_factory=dict)

    def sees(self, wrong: Wrong) -> Case | None:
        """Return a cell that differs under the wrong table and not under the right one, or None."""
        for case in self._cells(wrong.overload):
            observed, agrees = self._honest(case)
            if not agrees:
                continue
            with self._held_to(wrong):
                expected = self.backend.reference().run(case)
                if compare(expected, observed, values=self.backend.values) is None:
                    continue
                (cell,) = judged(self.backend, [case], self.known)
            if cell.status == "differs":
                return case
        return None

    def _held_to(self, wrong: Wrong) -> AbstractContextManager[None]:
        return as_device(wrong.device, corrupted(wrong))

    def _cells(self, overload: str) -> Iterator[Case]:
        """Yield the cells of the ops that reach an overload, of those first that are named so."""
        for op in sorted(
            self._reaching(overload), key=lambda o: o.overloads[0] != _whole(overload)
        ):
            for case in cases_of(self.backend, op):
                yield self.backend.fit(case)

    def _reaching(self, overload: str) -> list[Op]:
        ops = [op for op in CATALOGUE.values() if _whole(overload) in op.overloads]
        return list(usable(ops, self.backend.device))

    def _honest(self, case: Case) -> tuple[Observation, bool]:
        if case.id not in self._runs:
            expected, observed = self.backend.reference().run(case), self.backend.run([case])[0]
            agrees = compare(expected, observed, values=self.backend.values) is None
            self._runs[case.id] = observed, agrees
        return self._runs[case.id]


def _whole(overload: str) -> str:
    return f"aten::{overload}"
