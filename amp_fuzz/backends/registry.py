"""Find backends by entry point, name and pattern, and tell which are ready."""

from __future__ import annotations

import difflib
import importlib.metadata
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from amp_fuzz.backends.base import Availability, Backend, BackendError
from amp_fuzz.backends.torch_base import TorchBackend

__all__ = [
    "MissingBackend",
    "backends",
    "choose",
    "choose_backends",
    "is_pattern",
    "matching",
    "without_values",
]

GROUP = "amp_fuzz.backends"


class MissingBackend(ValueError):
    """A requested backend cannot be used here. The message says what to do."""


@dataclass(frozen=True, slots=True)
class _Unloaded(TorchBackend):
    """The backends of another package, of which only the entry point's name and an error exist."""

    name: str
    problem: str

    def availability(self) -> Availability:
        """Return the error."""
        return Availability("broken", self.problem)


@lru_cache(maxsize=1)
def backends() -> dict[str, Backend]:
    """Return every installed backend by name, whether or not it can be used here.

    Where the module of another package fails, the name of its entry point is a broken backend.
    """
    found: dict[str, Backend] = {}
    for entry in importlib.metadata.entry_points(group=GROUP):
        try:
            listed = {backend.name: backend for backend in entry.load()()}
        except (Exception, SystemExit) as error:
            if entry.dist is not None and entry.dist.name == "amp-fuzz":
                raise
            package = "its package" if entry.dist is None else entry.dist.name
            first = str(error).partition("\n")[0]
            problem = (
                f"{entry.value} raises {type(error).__name__}: {first}: mend or remove {package}"
            )
            listed = {entry.name: _Unloaded(name=entry.name, problem=problem)}
        found |= listed
    return found


def is_pattern(name: str) -> bool:
    """Return whether a name is a pattern for ready backends, not one that must be ready."""
    return name == "all" or "*" in name


def _matched(known: dict[str, Backend], pattern: str) -> dict[str, Backend]:
    # Only * is special: the names of compiled backends have brackets.
    parts = [re.escape(part) for part in pattern.split("*")]
    matches = re.compile(".*" if pattern == "all" else ".*".join(parts)).fullmatch
    return {name: backend for name, backend in known.items() if matches(name)}


def matching(names: Iterable[str]) -> list[Backend]:
    """Return the backends that match patterns among the names, ready or not."""
    found: dict[str, Backend] = {}
    for name in filter(is_pattern, names):
        found |= _matched(backends(), name)
    return list(found.values())


def choose(names: Iterable[str]) -> list[Backend]:
    """Return the backends of these names.

    ``all`` is every ready backend; a name with ``*`` is every ready one that it matches.
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
            near = difflib.get_close_matches(name, [*known, "all"], n=len(known))
            ready = (n for n in near if n == "all" or known[n].availability().status == "ready")
            near = [first] if (first := next(ready, "")) else near
            hint = f": did you mean {near[0]!r}?" if near else f": use {', '.join(known)} or all"
            if name.startswith("eager-"):
                own = name.removeprefix("eager-").partition("[")[0]
                hint += f" (name an installed device with --device={own})"
            raise BackendError(f"unknown backend {name!r}{hint}")
    return list(chosen.values())


def without_values(device: str) -> Backend:
    """Return torch's autocast kernels of a device type, on tensors without values."""
    from amp_fuzz.backends.fake import FakeBackend

    return FakeBackend(device)


def choose_backends(names: Iterable[str], require: Iterable[str] = ()) -> tuple[Backend, ...]:
    """Return the backends of these names, all ready; patterns match only ready ones.

    Raises `BackendError` for an unknown name, and `MissingBackend` for one that is named in either
    list and cannot be used here.
    """
    names = tuple(names)
    chosen = choose(names)
    for backend in [*chosen, *choose(name for name in require if not is_pattern(name))]:
        state = backend.availability()
        if state.status != "ready":
            raise MissingBackend(f"backend {backend.name} is {state.status} here: {state.detail}")
    return tuple(chosen)
