"""What a backend is, and how backends are found.

A backend is one real implementation that can run a case. Backends come through the entry-point
group ``amp_fuzz.backends``: each entry is a function that returns a list of them.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, Protocol

from amp_fuzz.backends.reference import ReferenceRuntime
from amp_fuzz.case import Case
from amp_fuzz.harness import Observation
from amp_fuzz.program import Statement, statements

__all__ = [
    "Availability",
    "Backend",
    "BackendError",
    "backends",
    "choose",
    "is_pattern",
    "matching",
    "unsupported",
]

GROUP = "amp_fuzz.backends"


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


def unsupported(case: Case, backend: Backend) -> Statement | None:
    """Return the first call that a backend cannot say, or None."""
    calls = statements(case.program.body)
    return next((s for s in calls if not backend.supports(s.op, s.form)), None)


@lru_cache(maxsize=1)
def backends() -> dict[str, Backend]:
    """Return every installed backend by name, whether or not it can be used here."""
    found: dict[str, Backend] = {}
    for entry in importlib.metadata.entry_points(group=GROUP):
        for backend in entry.load()():
            found[backend.name] = backend
    return found


def is_pattern(name: str) -> bool:
    """Return whether a name stands for the backends that are ready, not for one that must be."""
    return name == "all" or "*" in name


def _matched(known: dict[str, Backend], pattern: str) -> dict[str, Backend]:
    # Only * is special: the names of compiled backends have brackets.
    parts = [re.escape(part) for part in pattern.split("*")]
    matches = re.compile(".*" if pattern == "all" else ".*".join(parts)).fullmatch
    return {name: backend for name, backend in known.items() if matches(name)}


def matching(names: Iterable[str]) -> list[Backend]:
    """Return the backends that patterns among the names match, whether or not they are ready."""
    found: dict[str, Backend] = {}
    for name in filter(is_pattern, names):
        found |= _matched(backends(), name)
    return list(found.values())


def choose(names: Iterable[str]) -> list[Backend]:
    """Return the backends of these names.

    ``all`` is every one that is ready here, a name with ``*`` those of them that it matches.
    Raises `BackendError` for an unknown name, with the nearest one.
    """
    known = backends()
    chosen: dict[str, Backend] = {}
    for name in names:
        if name in known:
            chosen[name] = known[name]
        elif is_pattern(name):
            matched = _matched(known, name)
            if not matched:
                raise BackendError(f"no backend matches {name!r}: use {', '.join(known)} or all")
            chosen |= {n: b for n, b in matched.items() if b.availability().status == "ready"}
        else:
            near = difflib.get_close_matches(name, [*known, "all"], n=1)
            hint = f": did you mean {near[0]!r}?" if near else f": use {', '.join(known)} or all"
            if name.startswith("eager-"):
                own = name.removeprefix("eager-").partition("[")[0]
                hint += f" (a device that you have installed is named by --device={own})"
            raise BackendError(f"no backend is called {name!r}{hint}")
    return list(chosen.values())
