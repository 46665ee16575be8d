"""The case in which each fault shows: a file in `tests/cases/faults`, small, for any processor.

A hunt found each, and the minimiser made it small (`benchmarks/fault_cases.py`). So a test needs no
luck: honest torch agrees with the reference on the case, and with the fault it diverges.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from amp_fuzz.backends import Backend, backends
from amp_fuzz.backends.harness import quiet
from amp_fuzz.cases.case import Case, load
from amp_fuzz.oracle.judge import Judge
from amp_fuzz.oracle.verdict import Verdict
from amp_fuzz.reference import fp8
from amp_fuzz.upstream import shipped
from amp_fuzz.upstream.explain import judge_of
from tests.faults import fp8 as layers
from tests.faults.custom import CUSTOM, CustomFault
from tests.faults.fault import Fault, NumericFault, patched
from tests.faults.faults import FAULTS
from tests.faults.numeric import EAGER
from tests.faults.numeric_hunt import backend_of

__all__ = ["EVERY", "AnyFault", "holding", "judge_for", "kinds_of", "path_of", "showing", "verdict"]

AnyFault: TypeAlias = Fault | CustomFault

EVERY: Mapping[str, AnyFault] = {
    **FAULTS,
    **{fault.name: fault for fault in EAGER},
    **CUSTOM,
    **{f"fp8-{fault.name}": fault for fault in layers.FAULTS},
}
"""Every fault that shows without a compiler, by name."""

_FOLDER = Path(__file__).parents[1] / "cases" / "faults"


def path_of(name: str) -> Path:
    """Return the file of the case that shows a fault."""
    return _FOLDER / f"{name.replace(':', '@')}.json"


def showing(name: str) -> Case:
    """Return the case that shows a fault."""
    return load(path_of(name))


def kinds_of(fault: AnyFault) -> tuple[str, ...]:
    """Return the kinds of divergence that a fault may be found as; empty is any."""
    return fault.kinds if isinstance(fault, Fault) else ()


def judge_for(fault: AnyFault, *, honest: bool = False) -> Judge:
    """Return the judge of a fault's cases, of torch with the fault or without it."""
    backend: Backend
    match fault:
        case NumericFault():
            return judge_of(backend_of(fault, honest=honest), shipped(), "none")
        case layers.Seeded():
            own = layers.Own(contexts=fault.regions, corrupt=fault.corrupt)
            backend = replace(own, corrupt=lambda: patched(fp8)) if honest else own
        case CustomFault():
            backend = backends()[fault.backend]
        case _:
            return judge_of(backends()["eager-cpu"], shipped())
    return judge_of(backend, shipped(), "none")


def holding(fault: AnyFault, *, honest: bool = False) -> AbstractContextManager[object]:
    """Return the context of a fault, if its judge's backend does not enter it itself."""
    itself = isinstance(fault, (NumericFault, layers.Seeded))
    return nullcontext() if honest or itself else fault.corrupt()


def verdict(name: str, case: Case, *, honest: bool = False) -> Verdict:
    """Judge a case with a fault, or without it."""
    fault = EVERY[name]
    with quiet(), holding(fault, honest=honest):
        return judge_for(fault, honest=honest).judge(case)
