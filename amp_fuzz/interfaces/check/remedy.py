"""Find what to do about a call that raises under autocast and runs without.

Each remedy but the last, autocast off on inputs in float32, is run before it is told.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

import msgspec
import torch

from amp_fuzz import reference
from amp_fuzz.backends.harness import Observation, quiet
from amp_fuzz.backends.reference import ReferenceRuntime
from amp_fuzz.cases.case import Case, Plan
from amp_fuzz.cases.program import Program
from amp_fuzz.findings.notes import under_policies
from amp_fuzz.findings.remedies import lacking
from amp_fuzz.interfaces.check.adapters import Checked
from amp_fuzz.oracle.errors import refuses
from amp_fuzz.reference import load_table, tabled_devices

__all__ = ["elsewhere", "remedy", "runs_without"]

_HALVES = ("bfloat16", "float16")


def runs_without(checked: Checked, plan: Plan) -> bool:
    """Return whether the call runs with autocast off, in contexts of its own too."""
    base = checked.reference()
    plain = msgspec.structs.replace(plan, contexts=())
    return _runs(replace(base, runtime=replace(base.runtime, autocast=_Off)), plain)


def remedy(checked: Checked, plan: Plan, seen: Observation) -> tuple[str, tuple[str, ...]]:
    """Return one sentence on what to do, and the devices whose policies let the call run here.

    seen: the call under the reference, which raised.
    """
    assert seen.raised is not None
    at = f"{seen.raised.text}" if seen.raised.text else "the line that raises"
    if refuses(seen):
        return f"Call at {at} what the error names instead, which autocast allows.", ()
    if said := _decorated(checked, plan):
        return said, ()
    devices = _devices(checked, plan)
    there = f"; with the policies of {', '.join(devices)} it runs unchanged" if devices else ""
    for dtype in _HALVES if plan.contexts and checked.values else ():
        contexts = tuple(msgspec.structs.replace(c, dtype=dtype) for c in plan.contexts)
        other = msgspec.structs.replace(plan, contexts=contexts)
        if other != plan and _runs(checked.reference(), other):
            return f"Use {dtype} as autocast's dtype: it then runs{there}.", devices
    advice = f"Run {at} under autocast(enabled=False), on inputs cast to float32{there}."
    return advice, devices


def _decorated(checked: Checked, plan: Plan) -> str:
    """Return how to decorate an autograd Function of the callable, if it then runs, or ""."""
    for dtype, options in ((None, ""), (torch.float32, "(cast_inputs=torch.float32)")):
        with _decorating(checked.device, dtype) as names:
            runs = _runs(checked.reference(), plan)
        if runs and names:
            return (
                f"Decorate {' and '.join(names)}: forward with torch.amp.custom_fwd{options}, "
                "backward with torch.amp.custom_bwd; it then runs."
            )
    return ""


@contextmanager
def _decorating(device: str, cast: torch.dtype | None) -> Iterator[dict[str, None]]:
    """Decorate each Function that lacks it where it is applied; return their names."""
    honest: Any = torch.autograd.Function.__dict__["apply"]
    names: dict[str, None] = {}

    @cache
    def made(cls: Any) -> Any:
        forward = reference.custom_fwd(device_type=device, cast_inputs=cast)(cls.forward)
        backward = reference.custom_bwd(device_type=device)(cls.backward)
        body = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        return type(cls.__name__, (cls,), body)

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls.__module__.partition(".")[0] != "torch" and lacking(cls):
            names[cls.__qualname__] = None
            cls = made(cls)
        return honest.__get__(None, cls)(*args, **kwargs)

    with mock.patch.object(torch.autograd.Function, "apply", classmethod(apply)):
        yield names


def _devices(checked: Checked, plan: Plan) -> tuple[str, ...]:
    if not plan.contexts or not checked.values or not checked.exact:
        return ()
    return tuple(other for other, seen in elsewhere(checked, plan) if seen.raised is None)


def elsewhere(checked: Checked, plan: Plan) -> Iterator[tuple[str, Observation]]:
    """Yield each other device, and what the call does here under its policies."""
    for other in tabled_devices():
        table = load_table(other)
        dtypes = {c.dtype or load_table(checked.device).default_dtype for c in plan.contexts}
        if other != checked.device and dtypes <= set(table.supported_dtypes):
            with quiet():
                lent = under_policies(checked.reference(), table, checked.device)
                yield other, lent.run(_case(plan))


class _Off(reference.autocast):
    """A context of the reference that is off, whatever it is asked for."""

    def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(device_type, enabled=False)


def _runs(runtime: ReferenceRuntime, plan: Plan) -> bool:
    with quiet():
        return runtime.run(_case(plan)).raised is None


def _case(plan: Plan) -> Case:
    return Case(Program((), (), ()), plan)
