"""What a backend is, and how backends are found.

A backend is one real implementation that can run a case. Backends come through the entry-point
group ``amp_fuzz.backends``: each entry is a function that returns a list of them.

A `Backend` can be run and judged. The protocols after it are optional. A backend that has their
methods is also called by ``amp_fuzz.check`` (`Calls`), has scripts that import only torch
(`Repros`), says more in issues (`Described`), and explains more (`Bisects`, `Explains`, `Watches`).
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import torch

from amp_fuzz.backends.harness import Observation, Runtime
from amp_fuzz.backends.reference import ReferenceRuntime
from amp_fuzz.cases.case import Case, Plan
from amp_fuzz.cases.program import Statement, TensorSpec, statements

__all__ = [
    "Availability",
    "Backend",
    "BackendError",
    "Bisects",
    "Call",
    "Calls",
    "Described",
    "Explains",
    "Facts",
    "Repros",
    "Watches",
    "documentation",
    "facts_of",
    "unsupported",
]


class BackendError(ValueError):
    """A backend that is unknown or cannot be used here. The message says what to do."""


@dataclass(frozen=True, slots=True)
class Availability:
    """Whether a backend can be used here: ``ready``, ``missing`` or ``broken``, and why.

    `detail` is a version when ready, the command that installs it when missing, the error when
    broken.
    """

    status: Literal["ready", "missing", "broken"]
    detail: str


class Backend(Protocol):
    """One real implementation of autocast.

    name: as in ``--backends``. device: the device type whose policy table it implements. trains:
    whether it can run backward passes. values: whether results have values (fake devices have
    dtypes and shapes only). exact: whether it runs the kernels that the reference runs, so that
    results are equal bit for bit; if not, rounding is told from more by `oracle.rounding`.
    repeats: whether a program that is called twice in a case runs the same code twice, so that the
    two results are equal bit for bit; a compiler that is given both calls at once may fuse each in
    its own way.
    """

    @property
    def name(self) -> str:
        """The name."""

    @property
    def device(self) -> str:
        """The device type."""

    @property
    def trains(self) -> bool:
        """Whether backward passes run."""

    @property
    def values(self) -> bool:
        """Whether results have values."""

    @property
    def exact(self) -> bool:
        """Whether it runs the reference's kernels."""

    @property
    def repeats(self) -> bool:
        """Whether two calls of a program run the same code."""

    def availability(self) -> Availability:
        """Say whether it can be used here."""

    def supports(self, op: str, form: str) -> bool:
        """Return whether the implementation can say a call of a catalogue op in that form."""

    def fit(self, case: Case) -> Case:
        """Return the case without what the implementation says that it does not support."""

    def run(self, cases: Sequence[Case]) -> list[Observation]:
        """Run cases and return one observation each; a backend may pack them together."""

    def ladder(self) -> Sequence[Backend]:
        """Return what does less than this one and less again, the least first; none for most.

        On a divergence, the first of these that diverges too is the stage where it comes from.
        """

    def reference(self) -> ReferenceRuntime:
        """Return the reference, on the same tensors and kernels as `run` uses."""


# -- what a backend may say besides ---------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts about a backend, for issues and for what a search may cost.

    area: the area in the title of an issue; by default ``amp`` and the device. made: how a program
    gets there, "compiled with `torch.compile`". promise: what its documentation promises of
    results, a sentence of Markdown; "" if that is autocast itself. seen: a sentence on how a
    divergence was seen. compiles: each program is compiled, which takes seconds. partial: the
    function that may raise for a callable whatever its autocast; such an error is no finding of a
    check. installs: what pip has to install for scripts that run it by amp-fuzz.
    """

    area: str = ""
    made: str = ""
    promise: str = ""
    seen: str = ""
    compiles: bool = False
    partial: str = ""
    installs: str = ""


@runtime_checkable
class Described(Protocol):
    """A backend of which more is known than `Facts` says by default."""

    def facts(self) -> Facts:
        """Return the facts."""


def facts_of(backend: object) -> Facts:
    """Return the facts of a backend; the default ones if it says none."""
    return backend.facts() if isinstance(backend, Described) else Facts()


@runtime_checkable
class Repros(Protocol):
    """How a script that imports no amp-fuzz shows a case on a backend: pieces of source.

    `amp_fuzz.backends.reproducing.TorchRepros` has them for a program that runs as it is under
    ``torch.autocast``. The scripts of a backend without them judge the case by amp-fuzz.
    """

    def setup(self, names: Set[str]) -> list[str]:
        """Return what stands before all else, the name of the device first; names: those in use."""

    def configuration(self, case: Case) -> str:
        """Return assignments that configure torch for a case, or ""."""

    def source(self, case: Case) -> str:
        """Return the program of a case, and how it is made what the backend runs."""

    def driver(self, text: str, case: Case) -> str:
        """Return the source of a case's driver as the backend runs it."""

    def placed(self, text: str, spec: TensorSpec) -> str:
        """Return the source of an input on the device. text: that of its values, on the CPU."""

    def cleanup(self) -> list[str]:
        """Return lines that take away what a run leaves behind."""


Call: TypeAlias = Callable[[Runtime, Callable[..., Any] | None], Observation]
"""Calls what is checked under a runtime, by another function if one is given."""


@runtime_checkable
class Calls(Protocol):
    """How ``amp_fuzz.check`` calls a callable on a backend, in the place of a case's program.

    `amp_fuzz.backends.torch_base.TorchBackend` has them for a callable that is called as it is.
    """

    def refuses(self, modules: Mapping[str, torch.nn.Module]) -> str:
        """Return why a callable that holds these modules cannot be called here, or ""."""

    def infers(self, function: Callable[..., Any]) -> bool:
        """Return whether a callable has no backward pass here."""

    def called(self, function: Callable[..., Any], plan: Plan, call: Call) -> Observation:
        """Call a callable as a plan says, and return what was observed."""


@runtime_checkable
class Watches(Protocol):
    """A backend whose autocast can be watched."""

    def watching(self, watched: Callable[[Any], Any]) -> Backend:
        """Return the backend with another autocast, which is made of its own."""


@runtime_checkable
class Bisects(Protocol):
    """A backend that can say which part of it is to blame."""

    def blame(self, agrees: Callable[[], bool]) -> str:
        """Return the part without which a case agrees, or "". agrees: runs the case again."""


@runtime_checkable
class Explains(Protocol):
    """A backend that writes casts of its own."""

    def explicit(self, case: Case) -> str:
        """Return the casts that it writes into a case's program, as comments, or ""."""


def documentation(page: str) -> str:
    """Return the address of a page of the installed torch's documentation."""
    version = ".".join(importlib.metadata.version("torch").split(".")[:2])
    return f"https://docs.pytorch.org/docs/{version}/{page}"


# -- which there are ------------------------------------------------------------------------------


def unsupported(case: Case, backend: Backend) -> Statement | None:
    """Return the first call that a backend cannot say, or None."""
    calls = statements(case.program.body)
    return next((s for s in calls if not backend.supports(s.op, s.form)), None)
