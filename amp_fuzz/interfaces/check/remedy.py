"""Find what to do about a call that raises under autocast and runs without.

Each remedy is run before it is told. The remedies are those of a case, and one more: autocast off
at the line that raises.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import torch
from torch.overrides import TorchFunctionMode

from amp_fuzz import reference
from amp_fuzz.backends.harness import Observation, quiet
from amp_fuzz.backends.torch_state import chosen_dtypes
from amp_fuzz.cases.case import Case, Plan
from amp_fuzz.cases.program import Program
from amp_fuzz.findings import remedies
from amp_fuzz.findings.notes import under_policies
from amp_fuzz.interfaces.check.adapters import Checked
from amp_fuzz.interfaces.check.call import Names, call, user_line
from amp_fuzz.interfaces.check.trees import mapped
from amp_fuzz.oracle.errors import refuses
from amp_fuzz.reference import load_table, tabled_devices

__all__ = ["elsewhere", "remedy", "runs_without"]


def runs_without(checked: Checked, plan: Plan) -> bool:
    """Return whether the call runs with autocast off, in contexts of its own too."""
    base = checked.reference()
    off = replace(base, runtime=replace(base.runtime, autocast=_Off))
    with quiet():
        return off.run(_case(msgspec.structs.replace(plan, contexts=()))).raised is None


def remedy(checked: Checked, plan: Plan, seen: Observation) -> tuple[str, tuple[str, ...]]:
    """Return one sentence on what to do, and the devices whose policies let the call run here.

    seen: the call under the reference, which raised.
    """
    assert seen.raised is not None
    at = seen.raised.text
    if refuses(seen):
        there = at or "the line that raises"
        return f"Call at {there} what the error names instead, which autocast allows.", ()
    found = remedies.remedy(_case(plan), checked.reference())
    if found is not None and found.kind in ("decorate", "backward"):
        return f"{found.advice}.", ()
    devices = _devices(checked, plan)
    there = f"; with the policies of {', '.join(devices)} it runs unchanged" if devices else ""
    if found is not None and found.kind == "dtype":
        return f"{found.advice}{there}.", devices
    if _runs_apart(checked, plan, at):
        advice = f"Run {at} under autocast(enabled=False), on inputs cast to float32"
    else:  # as `runs_without` did
        own = "" if plan.contexts else ", its own contexts off too"
        advice = f"Call {checked.subject.name} under autocast(enabled=False){own}"
    return f"{advice}{there}.", devices


def _runs_apart(checked: Checked, plan: Plan, at: str) -> bool:
    """Return whether the call runs if one line of it does so without autocast, in float32."""

    def invoke(*args: Any, **kwargs: Any) -> Any:
        with _Apart(at, checked.device):
            return checked.subject.function(*args, **kwargs)

    runtime = checked.reference().runtime
    with quiet():
        seen = call(checked.subject, runtime, plan, Names(), invoke=invoke, redirect=True)
    return seen.raised is None


class _Apart(TorchFunctionMode):
    """Calls what one line calls of torch without autocast, on inputs cast to float32."""

    def __init__(self, at: str, device: str) -> None:
        super().__init__()
        self.at, self.device = at, device

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if user_line() != self.at:
            return func(*args, **(kwargs or {}))
        with reference.autocast(self.device, enabled=False):
            given, named = mapped(_single, (args, kwargs or {}))
            return func(*given, **named)


def _single(value: Any) -> Any:
    halves = (torch.float16, torch.bfloat16)
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in halves else value


def _devices(checked: Checked, plan: Plan) -> tuple[str, ...]:
    if not plan.contexts or not checked.values or not checked.exact:
        return ()
    return tuple(other for other, seen in elsewhere(checked, plan) if seen.raised is None)


def elsewhere(checked: Checked, plan: Plan) -> Iterator[tuple[str, Observation]]:
    """Yield each other device, and what the call does here under its policies and this dtype."""
    chosen = str(chosen_dtypes().get(checked.device, "")).removeprefix("torch.")
    default = chosen or load_table(checked.device).default_dtype
    contexts = [msgspec.structs.replace(c, dtype=c.dtype or default) for c in plan.contexts]
    plan = msgspec.structs.replace(plan, contexts=tuple(contexts))
    for other in tabled_devices():
        table = load_table(other)
        taken = {c.dtype for c in contexts} <= set(table.supported_dtypes)
        if other != checked.device and taken:
            with quiet():
                lent = under_policies(checked.reference(), table, checked.device)
                yield other, lent.run(_case(plan))


class _Off(reference.autocast):
    """A context of the reference that is off, whatever it is asked for."""

    def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(device_type, enabled=False)


def _case(plan: Plan) -> Case:
    return Case(Program((), (), ()), plan)
