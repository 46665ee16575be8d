"""Ten faults at once, of different sorts: each must come out as one cause.

`backends` is a backend for an entry point: what finds them runs in worker processes, where torch
may die of what is tried.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from amp_fuzz.backends import Backend
from amp_fuzz.cases.case import CUSTOM_OPS, Case
from tests.faults.corrupted import Corrupted
from tests.faults.faults import FAULTS
from tests.faults.numeric import NUMERIC

__all__ = ["FEW", "TEN", "Faulty", "backends", "counts", "install", "seeded"]

TEN = (
    # policies
    "cat:lower_precision_fp",
    "conv2d:none",
    "linear:fp32",
    "mse_loss:banned",
    "prelu:promote",
    # contexts and state
    "cache-flag-not-restored",
    "decorator-dtype",
    # numbers
    "logsumexp-no-max",
    "hypot-naive",
    "group-norm-no-bias",
)
FEW = ("linear:fp32", "cat:lower_precision_fp", "cache-flag-not-restored", "sin-tail")


@contextmanager
def seeded(*names: str) -> Iterator[None]:
    """Put torch wrong in several ways."""
    every = {**FAULTS, **NUMERIC}
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(every[name].corrupt())
        yield


@dataclass(frozen=True)
class Faulty(Corrupted):
    """Eager in a torch with several faults."""

    label: str = "faulty-cpu"

    @property
    def name(self) -> str:
        """The backend's name."""
        return self.label


def backends() -> list[Backend]:
    """Return a backend with ten faults, and one with a few of them."""
    return [
        Faulty(patches=lambda: seeded(*TEN)),
        Faulty(patches=lambda: seeded(*FEW), label="flawed-cpu"),
    ]


def counts(case: Case) -> bool:
    """Return whether faults can be in a case: their Python kernels have no part in some."""
    return case.plan.transform == "none" and case.plan.entry not in CUSTOM_OPS


def install(folder: Path) -> None:
    """Write an entry point for `backends` to a folder, which must come onto `sys.path`."""
    info = folder / "faulty-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty\nVersion: 1.0\n")
    points = "[amp_fuzz.backends]\nfaulty = tests.faults.many:backends\n"
    (info / "entry_points.txt").write_text(points)
