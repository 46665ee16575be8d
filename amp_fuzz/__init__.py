"""Numerical testing and fuzzing for mixed-precision autocast in PyTorch.

    from amp_fuzz import reference, strategies

`strategies` draws programs, plans and cases with Hypothesis. `reference.autocast` is an independent
implementation of autocast, as a context manager. `amp-fuzz run` and ``pytest --amp-fuzz`` compare
it with the real ones.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from amp_fuzz import reference, reports, strategies
    from amp_fuzz.cases.case import Case, CaseError, Plan, load, loads
    from amp_fuzz.cases.program import Program, ProgramError
    from amp_fuzz.interfaces.check import CheckError, CheckFailed, CheckResult, check
    from amp_fuzz.interfaces.check_op import OpResult, check_op
    from amp_fuzz.interfaces.precision import PrecisionLost, PrecisionResult, precision
    from amp_fuzz.interfaces.register import RegistrationError, register_op

__all__ = [
    "Case",
    "CaseError",
    "CheckError",
    "CheckFailed",
    "CheckResult",
    "OpResult",
    "Plan",
    "PrecisionLost",
    "PrecisionResult",
    "Program",
    "ProgramError",
    "RegistrationError",
    "check",
    "check_op",
    "load",
    "loads",
    "precision",
    "reference",
    "register_op",
    "reports",
    "strategies",
]

_HOMES = {
    "Case": "amp_fuzz.cases.case",
    "CaseError": "amp_fuzz.cases.case",
    "CheckError": "amp_fuzz.interfaces.check",
    "CheckFailed": "amp_fuzz.interfaces.check",
    "CheckResult": "amp_fuzz.interfaces.check",
    "OpResult": "amp_fuzz.interfaces.check_op",
    "Plan": "amp_fuzz.cases.case",
    "PrecisionLost": "amp_fuzz.interfaces.precision",
    "PrecisionResult": "amp_fuzz.interfaces.precision",
    "Program": "amp_fuzz.cases.program",
    "ProgramError": "amp_fuzz.cases.program",
    "RegistrationError": "amp_fuzz.interfaces.register",
    "check": "amp_fuzz.interfaces.check",
    "check_op": "amp_fuzz.interfaces.check_op",
    "load": "amp_fuzz.cases.case",
    "loads": "amp_fuzz.cases.case",
    "precision": "amp_fuzz.interfaces.precision",
    "register_op": "amp_fuzz.interfaces.register",
}


def __getattr__(name: str) -> object:
    # Lazily: the pytest plugin imports this package in every test run of its users.
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in ("backends", "catalogue", "reference", "reports", "strategies"):
        return importlib.import_module(f"amp_fuzz.{name}")
    if name == "privateuse1":
        return importlib.import_module("amp_fuzz.backends.privateuse1")
    if name == "__version__":
        from importlib.metadata import version

        return version("amp-fuzz")
    raise AttributeError(f"module 'amp_fuzz' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
