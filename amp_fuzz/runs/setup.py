"""Turn options into a run that can start: backends, ops, known list, seed, and the run's record.

The command and the pytest plugin both begin here, so both reject the same things in the same words.
"""

from __future__ import annotations

import difflib
import platform
import secrets
from dataclasses import dataclass
from datetime import UTC, date, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from packaging.specifiers import InvalidSpecifier

from amp_fuzz import findings
from amp_fuzz.catalogue import CATALOGUE, select
from amp_fuzz.config import OPTIONS, Options, judging_options
from amp_fuzz.oracle.rounding import THRESHOLD
from amp_fuzz.records.baseline import Baseline, Entry, read
from amp_fuzz.records.schema import (
    BackendRecord,
    BaselineRecord,
    KnownRecord,
    NoteKind,
    RunRecord,
)
from amp_fuzz.runs import surroundings
from amp_fuzz.upstream import shipped
from amp_fuzz.upstream.known import Known, KnownError, load_known

if TYPE_CHECKING:
    from collections.abc import Iterable

    from amp_fuzz.backends import Backend
    from amp_fuzz.runs.engine import Settings

__all__ = [
    "Session",
    "baseline_of",
    "known_of",
    "open_findings",
    "prepare",
    "versions",
]

_PACKAGES = ("amp-fuzz", "torch", "hypothesis", "numpy")


@dataclass(frozen=True, slots=True)
class Session:
    """A run that can start. record: its head. settings: for the engine."""

    record: RunRecord
    settings: Settings
    chosen: tuple[Backend, ...]


def prepare(options: Options, *, command: str = "") -> Session:
    """Return a run that can start.

    Imports torch. A seed is drawn if the options have none.

    Raises:
        ProgramError: a pattern of `options.ops` matches nothing.
        KnownError: a known list cannot be read.
        BaselineError: the baseline cannot be read.
        BackendError: a backend is unknown.
        MissingBackend: a named or required backend cannot be used here.
    """
    ops = tuple(op.name for op in select(options.ops))
    known = known_of(options)

    from amp_fuzz.backends import Alone
    from amp_fuzz.backends.registry import choose_backends
    from amp_fuzz.backends.settings import current
    from amp_fuzz.runs.engine import Settings

    chosen = choose_backends(options.backends, options.require)

    seed = secrets.randbelow(2**32) if options.seed is None else options.seed
    alone = any(isinstance(backend, Alone) and backend.alone() for backend in chosen)
    started = datetime.now(UTC)
    baseline = baseline_of(options)
    held, listed = _held(baseline, chosen), _held(open_findings(), chosen)
    today = started.date()
    record = RunRecord(
        # Runs sorted by name are in order of time.
        id=f"{started:%Y%m%d-%H%M%S}-{secrets.token_hex(2)}",
        seed=seed,
        profile=options.profile,
        backends=tuple(_backend_record(backend) for backend in chosen),
        versions=versions(),
        started=started.isoformat(timespec="seconds"),
        command=command,
        baseline=str(baseline.path) if baseline.entries else "",
        entries=tuple(_baseline_record(entry, today) for entry in held),
        fail_on=options.fail_on,
        require_coverage=options.require_coverage,
        options=tuple(judging_options()),
        known=(
            *(
                KnownRecord(entry.id, entry.what, entry.why, entry.link)
                for entry in known
                if any(entry.on(backend.name) for backend in chosen)
            ),
            *(KnownRecord(e.id, e.reason, "nobody has explained it", e.link) for e in listed),
        ),
        machine=surroundings.machine(),
        commits=surroundings.commits(),
        branch=surroundings.branch(),
        flags=current(),
        configuration=surroundings.configuration(options),
        threshold=THRESHOLD,
    )
    settings = Settings(
        backends=tuple(backend.name for backend in chosen),
        cases=options.cases,
        aimed=options.aimed,
        ops=() if len(ops) == len(CATALOGUE) else ops,
        seed=seed,
        profile=options.profile,
        workers=1 if alone else options.workers,
        relations=cast('Literal["none", "one", "all"]', options.relations),
        known=known,
        seconds=options.seconds,
        timeout=options.timeout,
        memory=options.memory,
        isolate=options.isolate != "never",
        minimize=options.minimize,
        max_statements=options.max_statements,
        fail_fast=options.fail_fast,
        notes=cast("tuple[NoteKind, ...]", options.notes),
        fail_on=options.fail_on,
        baseline=tuple(entry for entry in held if not entry.expired(today)),
        overdue=tuple(entry for entry in held if entry.expired(today)),
        open=listed,
    )
    return Session(record, settings, chosen)


def known_of(options: Options) -> tuple[Known, ...]:
    """Return the entries of the package and of the options, for this torch.

    Raises `KnownError`.
    """
    torch = version("torch")
    entries = [*shipped(), *(entry for path in options.known for entry in load_known(path))]
    found = []
    for entry in entries:
        _check_quirk(entry)
        try:
            if entry.holds(torch):
                found.append(entry)
        except InvalidSpecifier as error:
            raise KnownError(f"{entry.id}: torch={entry.torch!r}: write it as '>=2.7'") from error
    return tuple(found)


def baseline_of(options: Options) -> Baseline:
    """Return the project's baseline: the file of the option, or the nearest one upwards, or none.

    Raises `BaselineError`, also if a named file is missing.
    """
    path = options.baseline
    if path != OPTIONS["baseline"].default:
        return read(path, missing=False)
    here = Path.cwd()
    found = next((p for f in (here, *here.parents) if (p := f / path.name).is_file()), path)
    return read(found)


def open_findings() -> Baseline:
    """Return the findings that the package lists and nobody has explained."""
    return read(Path(findings.__file__).with_name("open.toml"), missing=False)


def _held(baseline: Baseline, chosen: Iterable[Backend]) -> tuple[Entry, ...]:
    """Return the entries for these backends and this torch."""
    names = {backend.name for backend in chosen}
    torch = version("torch")
    return tuple(e for e in baseline.entries if e.backend in names and e.holds(torch))


def _baseline_record(entry: Entry, today: date) -> BaselineRecord:
    return BaselineRecord(
        id=entry.id,
        fingerprint=entry.fingerprint,
        backend=entry.backend,
        kind=entry.kind,
        case=entry.load().id,
        title=entry.title or str(entry.parts),
        reason=entry.reason,
        link=entry.link,
        expires=entry.expires.isoformat() if entry.expires else "",
        expired=entry.expired(today),
    )


def _check_quirk(entry: Known) -> None:
    from amp_fuzz.upstream import QUIRKS

    if entry.quirk and entry.quirk not in QUIRKS:
        near = difflib.get_close_matches(entry.quirk, QUIRKS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(QUIRKS)}"
        raise KnownError(f"{entry.id}: quirk={entry.quirk!r} is unknown: {hint}")


def versions() -> dict[str, str]:
    """Return the versions of the packages that a run depends on."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found | {"python": platform.python_version(), "platform": platform.platform()}


def _backend_record(backend: Backend) -> BackendRecord:
    from amp_fuzz.backends.base import facts_of
    from amp_fuzz.backends.dispatcher import kernels

    listed = kernels(backend.device)
    return BackendRecord(
        name=backend.name,
        device=backend.device,
        detail=backend.availability().detail,
        kernels=listed.reachable,
        unreachable=tuple(f"{name}: {why}" for name, why in listed.unreachable.items()),
        implements=facts_of(backend).implements,
    )
