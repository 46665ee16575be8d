"""All known bugs: the records of every file in the packages below `amp_fuzz.upstream`.

Those of autocast are code, those of backends alone are data (`amp_fuzz.upstream.own`).
"""

from __future__ import annotations

import importlib
import pkgutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import cache
from importlib.metadata import version
from types import ModuleType

from amp_fuzz import upstream
from amp_fuzz.backends import imitation
from amp_fuzz.backends.imitation import Composed, Imitation, compose
from amp_fuzz.cases.case import Case
from amp_fuzz.upstream.bug import Bug
from amp_fuzz.upstream.known import Known
from amp_fuzz.upstream.own import own_bugs

__all__ = [
    "BUGS",
    "FILES",
    "IMITATIONS",
    "QUIRKS",
    "composed",
    "may",
    "own_about",
    "quirks",
    "shipped",
]


def _files() -> Iterator[ModuleType]:
    for package in pkgutil.iter_modules(upstream.__path__, f"{upstream.__name__}."):
        if not package.ispkg:
            continue
        for module in pkgutil.iter_modules(
            importlib.import_module(package.name).__path__, f"{package.name}."
        ):
            yield importlib.import_module(module.name)


FILES: tuple[ModuleType, ...] = tuple(file for file in _files() if hasattr(file, "BUGS"))
"""The modules that have bugs, by name. The docstring of each is their page."""

_ALL: tuple[Bug, ...] = (*(bug for file in FILES for bug in file.BUGS), *own_bugs())

if twice := [name for name, count in Counter(bug.id for bug in _ALL).items() if count > 1]:
    raise ValueError(f"{', '.join(twice)}: two known bugs have this id: rename one")

BUGS: Mapping[str, Bug] = {bug.id: bug for bug in sorted(_ALL, key=lambda bug: bug.rank)}
"""Every bug, by id, in the order in which they are tried."""

IMITATIONS: Mapping[str, Imitation] = {
    bug.id: bug.imitation for bug in BUGS.values() if bug.imitation is not None
}
"""The imitations of those that have one."""

imitation.KNOWN.update(IMITATIONS)

QUIRKS = tuple(sorted(IMITATIONS))
"""The ids of the bugs that the reference can imitate."""


@cache
def shipped() -> tuple[Known, ...]:
    """Return the known list of the package: the bugs of autocast that the installed torch has."""
    torch = version("torch")
    bugs = (bug for bug in BUGS.values() if not bug.own)
    return tuple(bug.entry for bug in bugs if bug.entry.holds(torch))


@cache
def composed(names: frozenset[str]) -> Composed:
    """Return these bugs as one imitation."""
    parts = {name: made for name, made in IMITATIONS.items() if name in names}
    return compose(parts, names=names, by=f"{__name__}:composed")


def own_about(op: str, kind: str, backend: str) -> list[Bug]:
    """Return the record of a backend's own bug that speaks of an op, if there is one alone."""
    found = [
        bug
        for bug in BUGS.values()
        if bug.own and op in bug.ops and kind in bug.kinds and bug.entry.on(backend)
    ]
    return found if len(found) == 1 else []


def may(name: str, case: Case) -> bool:
    """Return whether imitating a bug may change a case; cheaper than imitating it."""
    known = IMITATIONS.get(name)
    return known is None or known.applies(case)


def quirks(names: Iterable[str]) -> AbstractContextManager[None]:
    """Imitate known upstream bugs for a block, beside what is documented of a backend.

    Raises `ValueError` for an unknown one.
    """
    names = frozenset(names)
    if unknown := names - set(QUIRKS):
        raise ValueError(f"quirks={sorted(unknown)!r} are unknown: use {', '.join(QUIRKS)}")
    return imitation.imitating(composed(names).beside(imitation.current().others))
