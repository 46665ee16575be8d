"""Cases to judge again: those of a project's folder, and the findings of the store."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from amp_fuzz.backends import Backend, BackendError, backends, unsupported
from amp_fuzz.backends.base import misplaced
from amp_fuzz.cases.case import Case, CaseError
from amp_fuzz.cases.program import ProgramError
from amp_fuzz.catalogue import check
from amp_fuzz.records.schema import OWN, CaseRecord, DivergenceRecord
from amp_fuzz.records.store import Store, StoreError, find_case

__all__ = [
    "FINDINGS",
    "CorpusError",
    "Kept",
    "fixed",
    "fixed_lines",
    "folder_cases",
    "kept_findings",
    "named",
]

FINDINGS = "findings"
"""The family of the store's findings among the cases of a run."""


class CorpusError(CaseError):
    """A corpus that cannot be used. The message names the file and the place."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A case to judge again on a backend. name: for the user. finding: its finding, if any."""

    name: str
    case: Case
    backend: str
    finding: DivergenceRecord | None = None


def folder_cases(folders: Iterable[Path], chosen: Sequence[Backend]) -> Iterator[Kept]:
    """Yield each ``*.json`` below the folders, for the backends of a run.

    A finding's file is for the backend that found it, if it is among them. A case file is for all
    that can run it. Raises `CorpusError`, naming the file and the place.
    """
    for folder in dict.fromkeys(folders):
        if not folder.is_dir():
            what = (
                "is a file: give the folder" if folder.exists() else "is missing: make the folder"
            )
            raise CorpusError(f"corpus: {folder} {what} that holds the case files")
        for path in sorted(folder.rglob("*.json")):
            name = path.relative_to(folder).as_posix()
            case, finding = _loaded(Store(folder), str(path))
            for backend in chosen:
                wanted = finding is None or finding.backend == backend.name
                if wanted and _runs(case, backend):
                    yield Kept(name, case, backend.name, finding)


def _runs(case: Case, backend: Backend) -> bool:
    return not unsupported(case, backend) and not misplaced(case, backend)


def named(store: Store, names: Iterable[str], default: str = "eager-cpu") -> Iterator[Kept]:
    """Yield the cases of ids and paths, for the backends that found them. Raises `CorpusError`."""
    for name in dict.fromkeys(names):
        case, finding = _loaded(store, name)
        backend = finding.backend if finding else default
        if backend not in backends():
            raise CorpusError(f"{name}: found on the backend {backend!r}, which is not installed")
        yield Kept(Path(name).name, case, backend, finding)


MOST = 100
"""The number of findings that each run judges again for each backend: the newest."""


def kept_findings(
    store: Store,
    chosen: Sequence[Backend],
    ids: Iterable[str] | None = None,
    before: float = math.inf,
) -> tuple[list[Kept], list[str]]:
    """Return the store's findings for these backends, and why others cannot be used.

    A finding of an older version may be unreadable; this must not end a run. ids: only these; by
    default the newest `MOST` for each backend, of those saved `before` a time.
    """
    found: list[Kept] = []
    trouble: list[str] = []
    names = {backend.name: backend for backend in chosen}
    kept = set(store.findings())
    for identity in store.newest(before) if ids is None else [i for i in ids if i in kept]:
        try:
            case, finding = _loaded(store, str(store.root / "findings" / f"{identity}.json"))
        except CorpusError as error:
            trouble.append(str(error))
            continue
        backend = names.get(finding.backend) if finding else None
        if finding is None or backend is None or (finding.known == OWN and ids is None):
            continue
        if _runs(case, backend):
            found.append(Kept(identity, case, finding.backend, finding))
    if ids is not None:
        return found, trouble
    some: list[Kept] = []
    for name in names:
        own = [kept for kept in found if kept.backend == name]
        some += own[:MOST]
        if len(own) > MOST:
            more = f"the {len(own) - MOST} oldest findings of {name}; the newest {MOST} are"
            trouble.append(f"{more} (remove settled ones with rm: {store.root / 'findings'})")
    return sorted(some, key=lambda kept: kept.name), trouble


def fixed(kept: Iterable[Kept], records: Iterable[CaseRecord]) -> list[Kept]:
    """Return the findings that agree now, by the records of a run that judged them again.

    Nondeterministic ones are never among them.
    """
    agreed = {(r.backend, r.id) for r in records if r.outcome in ("agreed", "raised")}
    return [
        k
        for k in kept
        if k.finding is not None
        and k.finding.kind != "nondeterminism"
        and (k.backend, k.case.id) in agreed
    ]


def fixed_lines(store: Store, run: str, kept: Sequence[Kept]) -> list[str]:
    """Return a line for each finding of a store that agreed in a run, with how to remove it."""
    if not kept:
        return []
    records = store.records(run)
    judged = [r for r in records if isinstance(r, CaseRecord) and r.family == FINDINGS]
    lines = []
    for one in fixed(kept, judged):
        assert one.finding is not None
        at = f" at {one.finding.op}" if one.finding.op else ""
        path = (store.root / "findings" / f"{one.name}.json").absolute()
        if path.is_relative_to(Path.cwd()):
            path = path.relative_to(Path.cwd())
        lines.append(f"{one.name} on {one.backend} ({one.finding.kind}{at}): remove it: rm {path}")
    return lines


def _loaded(store: Store, what: str) -> tuple[Case, DivergenceRecord | None]:
    try:
        case, finding = find_case(store, what)
        check(case.program)
    except ProgramError as error:
        raise CorpusError(f"{what}: {error}") from error
    except (CaseError, StoreError, BackendError) as error:
        raise CorpusError(str(error)) from error
    return case, finding
