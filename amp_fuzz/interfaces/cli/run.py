"""``amp-fuzz run``: fuzz, show progress, print a summary, return the exit code."""

from __future__ import annotations

import dataclasses
import math
import os
import secrets
import shlex
import time
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
import msgspec

from amp_fuzz.config import OPTIONS, Options, Resolved, folder_of
from amp_fuzz.findings.supervision.processes import few_primitives
from amp_fuzz.interfaces.cli.common import (
    Exit,
    Internal,
    Stopped,
    command_line,
    console,
    options,
    resolve_options,
    say,
    waiting,
)
from amp_fuzz.interfaces.cli.progress import Board, shown
from amp_fuzz.interfaces.signals import Interrupted, Interrupts
from amp_fuzz.records.schema import (
    DIVERGING,
    CaseRecord,
    DivergenceRecord,
    EndRecord,
    RunRecord,
    incident_line,
)
from amp_fuzz.records.store import Store, StoreError, find_run
from amp_fuzz.reports.printable import plural

if TYPE_CHECKING:
    from amp_fuzz.runs.corpus import Kept
    from amp_fuzz.runs.engine import Event
    from amp_fuzz.runs.setup import Session

__all__ = ["run"]

# The options that decide what a run does. A profile only stands for values of these.
_AGAIN = (
    "seed",
    "backends",
    "ops",
    "cases",
    "aimed",
    "relations",
    "max-statements",
    "seconds",
    "known",
    "plugins",
    "device",
    "policies",
    "baseline",
    "corpus",
    "isolate",
    "notes",
    "fail-on",
    "require-coverage",
)
# The options that only affect time. --resume may change them.
_LIMITS = ("workers", "timeout", "memory", "minimize", "fail-fast")


@click.command(short_help="Fuzz with random programs, and report.")
@options(
    "backends",
    "ops",
    "cases",
    "aimed",
    "seed",
    "profile",
    "workers",
    "seconds",
    "relations",
    "max-statements",
    "known",
    "plugins",
    "device",
    "policies",
    "baseline",
    "corpus",
    "fail-fast",
    "notes",
    "fail-on",
    "require",
    "require-coverage",
    "timeout",
    "memory",
    "isolate",
    "minimize",
    "store",
    "report",
)
@click.option("-v", "--verbose", is_flag=True, help="Show kernels, known findings and notes too.")
@click.option("--resume", metavar="RUN", help="Continue a run that did not end: its id, or latest.")
@click.option("--shard", metavar="RUN", hidden=True, help="Be this run of a sweep, or continue it.")
@click.option("--until", type=float, hidden=True, help="When the sweep ends, since the epoch.")
@click.option(
    "--before",
    "older",
    type=float,
    hidden=True,
    help="Judge only older findings; 0: nothing first.",
)
@click.option("--ready", is_flag=True, hidden=True, help="Only say whether the run can start.")
def run(
    verbose: bool,
    resume: str | None,
    shard: str | None,
    until: float | None,
    older: float | None,
    ready: bool,
    **given: Any,
) -> int:
    """Draw random programs, run them under the reference and under each backend, and compare.

    Prints a summary, writes a report, and keeps every record and finding in the store.
    """
    before = None
    if shard is not None and shard in Store(_root(given)).runs():
        resume, given = shard, {**dict.fromkeys(given), "store": given["store"]}
    if resume is not None:
        before, given = _resumed(resume, given)
    resolved = resolve_options(given)
    chosen = resolved.options
    if chosen.seed is None:
        chosen = dataclasses.replace(chosen, seed=secrets.randbelow(2**32))
    store = Store(folder_of(chosen.store, "amp-fuzz run"))
    store.create()
    few_primitives()
    with Interrupts() as interrupts:
        try:
            with interrupts.importing(), waiting("importing torch"):
                from amp_fuzz.reports.trend import forget
                from amp_fuzz.runs.setup import prepare

                session = prepare(chosen, command=_again(resolved, chosen.seed))
                if ready:
                    return Exit.OK
                session = _sharded(session, shard, until)
                session, kept = _keeping(session, store, chosen, older)
                if before is not None:
                    session = _going_on(session, before, store)
        except Interrupted:
            click.echo("amp-fuzz: interrupted", err=True)
            return interrupts.code or 0
        with store.running(session.record):
            if before is not None:
                _write_end(store, session, EndRecord("", "", 0, 0.0, "resumed"))
                forget(store, before.id)
            _head(session, chosen, resolved.files)
            if kept:
                _first(kept, chosen)

            tally = _Tally(Board(limit=chosen.seconds), store)
            _listen(session, store, tally, interrupts)
            _end(store, session, tally, interrupts)
        folder = None if shard is not None else chosen.report
        code = _conclude(store, session, tally, folder, interrupts, verbose=verbose)
        if kept:
            _say_fixed(store, session, kept)
    return interrupts.code or code


def _root(given: dict[str, Any]) -> Path:
    return folder_of(resolve_options({"store": given["store"]}).options.store, "amp-fuzz run")


def _resuming(run_id: str, store: Store) -> str:
    """Return the command that continues a run."""
    return command_line("run", f"--resume={run_id}", store=store.place)


def _sharded(session: Session, shard: str | None, until: float | None) -> Session:
    """Return the session of a shard: the id of its run, and the time that is left."""
    record, settings = session.record, session.settings
    if shard is not None:
        record = msgspec.structs.replace(record, id=shard)
    if until is not None:
        left = max(until - time.time(), 0.001)
        if not 0 < settings.seconds < left:
            settings = dataclasses.replace(settings, seconds=left)
    return dataclasses.replace(session, record=record, settings=settings)


# -- going on with a run that did not end ---------------------------------------------------------


def _resumed(run_id: str, given: dict[str, Any]) -> tuple[RunRecord, dict[str, Any]]:
    """Return the record of a run, and its options together with those given now.

    Raises `StoreError` for a missing run, `Stopped` for one that cannot be resumed.
    """
    own = Store(_root(given))
    store, identity = find_run(own, run_id)
    record = store.run(identity)
    words = shlex.split(record.command)
    if words[:2] != ["amp-fuzz", "run"]:
        raise Stopped(
            f"{record.id} was not started by amp-fuzz run: run it again: {record.command}"
        )
    if store.is_running(record.id):
        raise Stopped(f"{record.id} is still running")
    now = {name: value for name, value in given.items() if value not in (None, ())}
    fixed = [f"--{name}" for name in _AGAIN if OPTIONS[name].field in now]
    if fixed:
        raise Stopped(f"--resume keeps the options of the run: leave out {', '.join(fixed)}")
    then = run.make_context("run", [*words[2:], f"--profile={record.profile}"]).params
    for name in ("verbose", "resume", "shard", "until", "older", "ready"):
        then.pop(name)
    if store is not own:  # RUN is a path
        now["store"] = store.root
    return record, then | now


def _going_on(session: Session, before: RunRecord, store: Store) -> Session:
    """Return a session for the rest of a run. Raises `Stopped` if torch changed."""
    now = session.record
    changed = [
        f"{name} was {before.versions.get(name)} and is {version}"
        for name, version in now.versions.items()
        if before.versions.get(name) != version
    ]
    if changed:
        raise Stopped(f"{before.id} cannot be resumed: {'; '.join(changed)}")
    done: dict[tuple[str, str], dict[str, frozenset[str]]] = {}
    for record in store.records(before.id):
        if isinstance(record, CaseRecord):
            reached = frozenset(kernel.overload for kernel in record.kernels)
            done.setdefault((record.backend, record.family), {})[record.id] = reached
        elif isinstance(record, DivergenceRecord) and record.kind in ("crash", "timeout"):
            done.setdefault((record.backend, record.family), {})[record.case.id] = frozenset()
    settings = dataclasses.replace(session.settings, done=done)
    return dataclasses.replace(session, record=before, settings=settings)


_FINDINGS, _CORPUS = "findings", "corpus"  # families of cases that are judged first


def _keeping(
    session: Session, store: Store, chosen: Options, older: float | None
) -> tuple[Session, dict[str, list[Kept]]]:
    """Return the session that judges the store's findings and the corpus first, and these.

    older: only findings that were saved before this time; 0: nothing, and no corpus.
    """
    from amp_fuzz.runs.corpus import folder_cases, kept_findings

    if older == 0:
        return session, {}
    before = math.inf if older is None else older
    findings, trouble = kept_findings(store, session.chosen, before=before)
    for text in trouble:
        say(f"not judged again: {text}")
    kept = {_FINDINGS: findings, _CORPUS: list(folder_cases(chosen.corpus, session.chosen))}
    cases = tuple((k.backend, family, k.case) for family, own in kept.items() for k in own)
    settings = dataclasses.replace(session.settings, kept=cases)
    return dataclasses.replace(session, settings=settings), kept


def _first(kept: dict[str, list[Kept]], chosen: Options) -> None:
    parts = [f"{plural(len(kept[_FINDINGS]), 'finding')} of the store"] if kept[_FINDINGS] else []
    if chosen.corpus:
        folders = ", ".join(_short(folder) for folder in chosen.corpus)
        parts.append(f"{plural(len(kept[_CORPUS]), 'case')} of {folders}")
    if parts:
        say(f"judged first: {', '.join(parts)}")


def _say_fixed(store: Store, session: Session, kept: dict[str, list[Kept]]) -> None:
    """Name the findings of the store that agree now."""
    from amp_fuzz.runs.corpus import fixed_lines

    for text in fixed_lines(store, session.record.id, kept[_FINDINGS]):
        say(f"fixed: {text}")


def _again(resolved: Resolved, seed: int | None) -> str:
    """Return the command that draws the same cases again.

    It repeats every option that was given, even a default value, since a profile or a file may set
    another.
    """
    chosen = dataclasses.replace(resolved.options, seed=seed)
    words = []
    for name in (*_AGAIN, *_LIMITS):
        option = OPTIONS[name]
        value = getattr(chosen, option.field)
        if value == option.default and resolved.sources[name] == "default":
            continue
        if name == "baseline" and not value.exists():
            continue
        words += option.words(value)
    return command_line("run", *words)


def _head(session: Session, chosen: Options, files: tuple[Path, ...]) -> None:
    """Print what will run."""
    from amp_fuzz.runs.engine import limits

    record, settings = session.record, session.settings
    ops = plural(len(settings.ops), "op") if settings.ops else "all ops"
    say(
        f"amp-fuzz {record.versions['amp-fuzz']}, torch {record.versions['torch']}, "
        f"seed {record.seed}, profile {record.profile}"
    )
    names = ", ".join(b.name for b in record.backends)
    cases, workers = plural(settings.cases, "case"), plural(settings.workers, "worker")
    say(", ".join([f"{names}: {cases} each", *limits(settings), ops, workers]))
    for path in files:
        say(f"options from {_short(path)}")
    if record.baseline:
        say(f"baseline {_short(Path(record.baseline))}: {_entries(session)}")
    say(f"records in {_short(Path(chosen.store) / 'runs' / record.id)}")


def _entries(session: Session) -> str:
    held, late = len(session.record.entries), len(session.settings.overdue)
    return plural(held, "known finding") + (f", {late} of them EXPIRED" if late else "")


def _short(path: Path) -> str:
    """Return a path relative to the current folder if it is below that."""
    try:
        return os.fspath(path.absolute().relative_to(Path.cwd()))
    except ValueError:
        return os.fspath(path)


# -- the run --------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Tally:
    """The counts and the state of a run."""

    board: Board
    store: Store
    started: float = field(default_factory=time.monotonic)
    cases: int = 0
    planned: int = 0
    cut: bool = False
    diverged: bool = False
    happened: int = 0
    failure: str = ""
    internal: bool = False
    announced: set[tuple[str, str, str]] = field(default_factory=set)

    def note(self, event: Event) -> None:
        from amp_fuzz.runs.engine import (
            Crashed,
            Failed,
            Finding,
            Happened,
            Planned,
            Progress,
            TimeUp,
        )

        if isinstance(event, Planned):
            self.planned += event.cases
            self.board.row(event.backend).total += event.cases
        elif isinstance(event, TimeUp):
            self.cut = True
        elif isinstance(event, Progress):
            own, known, new = (event.outcome == name for name in DIVERGING)
            self.diverged |= new
            self.board.add(event.backend, 1, own=own, known=known, new=new)
        elif isinstance(event, Crashed):
            new = not event.record.known
            self.diverged |= new
            self.board.add(event.record.backend, 1, known=not new, new=new)
            if new and event.first:
                self.announce(event.record, event.detail)
        elif isinstance(event, Finding):
            if event.new:  # the `Progress` that follows counts it, unless an interrupt comes first
                self.diverged = True
                self.announce(event.record, "")
        elif isinstance(event, Happened):
            self.happened += 1
            if self.happened <= _ANNOUNCED:
                say(f"incident: {incident_line(event.record)}")
        elif isinstance(event, Failed):
            self.failure, self.internal = event.detail, not event.usage

    def announce(self, record: DivergenceRecord, detail: str) -> None:
        """Print a new divergence when it is found: each once, and at most `_ANNOUNCED`."""
        key = (record.backend, record.id, record.kind)
        if key in self.announced:
            return
        self.announced.add(key)
        if len(self.announced) <= _ANNOUNCED:
            _announce(record, detail, self.store)
        elif len(self.announced) == _ANNOUNCED + 1:
            say("new: more; see the summary and the report")


_ANNOUNCED = 20


def _announce(record: DivergenceRecord, detail: str, store: Store) -> None:
    from amp_fuzz.records.fingerprint import title

    what = detail or f"{record.expected} became {record.observed}"
    say(
        f"new: {title(record)} on {record.backend}: {what.splitlines()[0][:160]}\n"
        f"     {command_line('replay', store.name_of(record), store=store.place)}"
    )


def _listen(session: Session, store: Store, tally: _Tally, interrupts: Interrupts) -> None:
    """Run and show progress until the end or the first interrupt, then end the workers."""
    from amp_fuzz.runs import workers
    from amp_fuzz.runs.engine import Progress

    with closing(workers.run(session.settings, store, session.record.id)) as events:
        try:
            with interrupts.stoppable(), shown(tally.board) as tick:
                for event in events:
                    interrupts.check()
                    tally.note(event)
                    if isinstance(event, Progress):
                        tick()
        except Interrupted:
            say("stopping: ending the workers; their records are kept")
        except StoreError as error:
            tally.failure = str(error)


def _end(store: Store, session: Session, tally: _Tally, interrupts: Interrupts) -> None:
    """Record that the run ended, and how."""
    seconds = time.monotonic() - tally.started
    reason: Literal["done", "stopped", "interrupted", "crashed"] = "done"
    if interrupts.received:
        reason = "interrupted"
    elif tally.failure:
        reason = "crashed"
    elif tally.cut or (session.settings.fail_fast and tally.diverged):
        reason = "stopped"
    # Count again: when a run is stopped, workers have recorded more than they reported.
    tally.cases = _recorded(store, session.record.id)
    end = EndRecord("", "", tally.cases, round(seconds, 3), reason, tally.planned)
    try:
        _write_end(store, session, end)
    except StoreError as error:
        tally.failure = tally.failure or str(error)


def _write_end(store: Store, session: Session, end: EndRecord) -> None:
    with closing(store.writer(session.record.id, "run")) as writer:
        writer.write(end)


def _recorded(store: Store, run_id: str) -> int:
    """Return how many cases have a record, or have a divergence with one, as a report counts them.

    If a worker dies or is ended, it may have recorded a divergence but not its case.
    """
    count = 0
    told: set[tuple[str, str]] = set()
    recorded: set[tuple[str, str]] = set()
    tables = store.tables(run_id)  # if it was compacted before it went on
    if tables is not None:
        for path in tables.files["cases"]:
            frame = tables.read(path, ("backend", "id", "outcome", "recorded")).to_pandas()
            count += int(frame["recorded"].sum())
            for row in frame[frame["outcome"].isin(DIVERGING)].itertuples():
                (recorded if row.recorded else told).add((row.backend, row.id))
    for path in store.lines(run_id):
        with path.open("rb") as lines:
            for line in lines:
                if line.startswith(b'{"type":"case"'):
                    count += 1
                    if b'"outcome":"agreed"' not in line and line.endswith(b"\n"):
                        case = msgspec.json.decode(line, type=CaseRecord)
                        recorded.add((case.backend, case.id))
                elif line.startswith(b'{"type":"divergence"') and line.endswith(b"\n"):
                    found = msgspec.json.decode(line, type=DivergenceRecord)
                    told.add((found.backend, found.case.id))
    return count + len(told - recorded)


# -- after it -------------------------------------------------------------------------------------


def _conclude(
    store: Store,
    session: Session,
    tally: _Tally,
    folder: Path | None,
    interrupts: Interrupts,
    *,
    verbose: bool = False,
) -> int:
    """Print the summary, write the report if it has a folder, and return the exit code."""
    from amp_fuzz import reports

    say()
    seen = reports.read(store, session.record.id, known=session.settings.known)
    say(seen.terminal(width=console().width, verbose=verbose).rstrip("\n"))
    try:
        if folder is not None:
            say(reports.written(seen.write(folder)))
    except StoreError as error:
        tally.failure = tally.failure or str(error)
    say(f"again:  {session.record.command}")
    if interrupts.received:
        say(f"go on:  {_resuming(session.record.id, store)}")
    if tally.internal:
        raise Internal(tally.failure)
    if tally.failure:
        raise Stopped(tally.failure)
    if seen.view.verdict.kind == "new":
        return Exit.DIVERGED
    if not tally.cases and not interrupts.received:
        names = ", ".join(session.settings.backends) or "no backend, since none is ready here"
        raise Stopped(f"nothing ran: no case for {names}: widen --ops or --seconds", Exit.NOTHING)
    return Exit.OK
