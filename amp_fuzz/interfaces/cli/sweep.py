"""``amp-fuzz sweep``: many runs over machines and versions of torch, on Ray."""

from __future__ import annotations

import importlib.util
import os
import secrets
import sys
import time
from collections import defaultdict
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from amp_fuzz.interfaces.cli.common import (
    Exit,
    Internal,
    Stopped,
    command_line,
    duration,
    say,
    table,
    waiting,
)
from amp_fuzz.interfaces.cli.progress import Board, shown
from amp_fuzz.interfaces.signals import Interrupted, Interrupts
from amp_fuzz.records.remote import RemoteStore, store_at
from amp_fuzz.records.schema import (
    DIVERGING,
    CaseRecord,
    DivergenceRecord,
    IncidentRecord,
    Outcome,
    incident_line,
    outcome_of,
)
from amp_fuzz.records.store import Store, StoreError
from amp_fuzz.reports.printable import plural

if TYPE_CHECKING:
    from amp_fuzz.runs.sweep.cluster import Nodes
    from amp_fuzz.runs.sweep.following import Follower
    from amp_fuzz.runs.sweep.log import Log, ShardEnd
    from amp_fuzz.runs.sweep.matrix import Plan, Shard
    from amp_fuzz.runs.sweep.node import Job

__all__ = ["sweep"]


@click.command(short_help="Run a matrix of runs on a Ray cluster.")
@click.argument("file", metavar="SWEEP.TOML", type=click.Path(path_type=Path))
@click.option(
    "--address", metavar="HOST:PORT", help="A Ray cluster, or auto.  [default: this machine]"
)
@click.option("--dry-run", "dry", is_flag=True, help="Print the plan, and run nothing.")
@click.option("--new", "anew", is_flag=True, help="Do not continue the last sweep of this file.")
def sweep(file: Path, address: str | None, dry: bool, anew: bool) -> int:
    """Run a matrix of backends, environments, seeds and options on the nodes of a Ray cluster.

    SWEEP.TOML lists them, and what each needs of a node: docs/guide/sweep.md. Each shard is a run
    in the store. A sweep that was interrupted or killed continues when its command is given again:
    cases on record do not run again.

    Exit codes are those of run; 6 if some shards did not end.
    """
    from amp_fuzz.runs.sweep import log as logs
    from amp_fuzz.runs.sweep.matrix import load

    seed = secrets.randbelow(2**31)
    plan = load(file, sys.executable, seed)
    store = store_at(plan.store)
    text = plan.path.read_text("utf-8")
    if dry:
        before = None if anew else logs.unfinished(store, plan.path, text)
        _show(load(file, sys.executable, before.head.seed) if before else plan, before)
        return Exit.OK
    if importlib.util.find_spec("ray") is None:
        raise Stopped(
            "sweep needs Ray: pip install 'amp-fuzz[sweep]'; amp-fuzz run covers one machine "
            "without it, with a worker for each CPU"
        )
    with (
        Interrupts() as interrupts,
        logs.running(store, plan.path, text, seed=seed, anew=anew) as log,
    ):
        plan = load(file, sys.executable, log.head.seed)
        try:
            return _swept(plan, log, address, interrupts)
        except Interrupted:
            say(f"interrupted; continue: {_again(plan, address)}")
    return interrupts.code or Exit.OK


def _again(plan: Plan, address: str | None) -> str:
    more = [f"--address={address}"] if address else []
    return command_line("sweep", _short(plan.path), *more)


def _short(path: Path | str) -> str:
    """Return a path relative to the current folder if it is below that, and a URL unchanged."""
    here = Path.cwd()
    if isinstance(path, str):
        return path
    return os.fspath(path.relative_to(here) if path.is_relative_to(here) else path)


def _place(store: Store) -> Path | str:
    place = store.place
    return place if isinstance(place, str) else Path(_short(place))


def _show(plan: Plan, log: Log | None) -> None:
    """Print the shards, together where only the seed differs."""
    rows: defaultdict[str, list[Shard]] = defaultdict(list)
    for shard in plan.shards:
        rows[shard.row].append(shard)
    table(
        ("environment", "backend", "shards", "cases each", "needs", "options"),
        [
            (
                *(shards[0].environment, shards[0].backend, str(len(shards))),
                *(f"{shards[0].cases:,}", _needs(shards[0]), " ".join(shards[0].options)),
            )
            for shards in rows.values()
        ],
    )
    cases = sum(shard.cases for shard in plan.shards)
    limit = f", at most {duration(plan.seconds)}" if plan.seconds else ""
    say(f"{plural(len(plan.shards), 'shard')}, {cases:,} cases{limit}, in {_short(plan.store)}")
    if log is not None:
        ended = sum(end.ran for end in log.ends.values())
        say(f"continues sweep {log.head.id}: {plural(ended, 'shard')} ended")


def _needs(shard: Shard) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in shard.needs.items() if amount)


# -- the sweep ------------------------------------------------------------------------------------


def _swept(plan: Plan, log: Log, address: str | None, interrupts: Interrupts) -> int:
    from amp_fuzz.runs.sweep import cluster

    with ExitStack() as stack:
        try:
            what = "connecting to Ray" if address else "starting Ray"
            with interrupts.stoppable(), waiting(what):
                stack.enter_context(cluster.connected(address))
        except cluster.ClusterError as error:
            raise Stopped(str(error)) from error
        left = _possible(plan, log, cluster.nodes())
        with interrupts.stoppable(), waiting("asking the environments"):
            _check(plan, log, left)
        until = time.time() + plan.seconds if plan.seconds else 0.0
        tally = _Tally(plan, log, left)
        tally.head(address)
        _work(tally, until, interrupts)
    return _conclude(tally, address, bool(until) and time.time() >= until)


def _possible(plan: Plan, log: Log, nodes: Nodes) -> list[Shard]:
    """Return the shards that are left and that some node can run; name the others.

    Raises `Stopped` if one of these must be possible.
    """
    from amp_fuzz.runs.sweep.cluster import described, has

    left, named = [], set[str]()
    for shard in plan.shards:
        if shard.number in log.ends and log.ends[shard.number].ran:
            continue
        if any(has(node, shard.needs) for node in nodes):
            left.append(shard)
            continue
        said = f"{shard.backend} needs {_needs(shard)}, and no node has that"
        if shard.named:
            here = "; ".join(map(described, nodes))
            raise Stopped(
                f"{said} ({here}): add such a node, as with `ray start --address=HEAD --resources="
                f"...`, or take {shard.backend} out of {_short(plan.path)}",
                Exit.MISSING,
            )
        if said not in named:
            named.add(said)
            say(f"skipped: {said}")
    return left


def _check(plan: Plan, log: Log, left: list[Shard]) -> None:
    """Ask each environment, on a node of each kind, whether its runs can start."""
    from amp_fuzz.runs.sweep.cluster import work
    from amp_fuzz.runs.sweep.node import probe

    kinds: defaultdict[tuple[object, ...], list[Shard]] = defaultdict(list)
    for shard in left:
        kinds[shard.environment, _needs(shard), shard.options].append(shard)
    jobs = []
    for shards in kinds.values():
        names = dict.fromkeys(shard.backend for shard in shards)
        words = [f"--backends={','.join(names)}", *shards[0].options]
        jobs.append((_job(plan, log, shards[0], 0, words), shards[0].needs))
    with closing(work(probe, jobs, retries=plan.retries)) as ends:
        for end in ends:
            if end.code:
                where = plan.shards[end.number].environment
                raise Stopped(f"environment {where}: {end.error}", max(end.code, Exit.USAGE))


def _job(plan: Plan, log: Log, shard: Shard, until: float, words: list[str]) -> Job:
    from amp_fuzz.runs.sweep.node import Job

    ours = {k: v for k, v in os.environ.items() if k.startswith("AMP_FUZZ_") or k == "PYTHONPATH"}
    return Job(
        number=shard.number,
        run=log.run_id(shard),
        python=shard.python,
        words=tuple(words),
        store=str(log.store.place),
        folder=os.fspath(plan.path.parent),
        log=log.output(shard),
        until=until,
        variables=ours,
        first=shard.first,
    )


def _work(tally: _Tally, until: float, interrupts: Interrupts) -> None:
    from amp_fuzz.runs.sweep.cluster import work
    from amp_fuzz.runs.sweep.node import attempt

    plan, log = tally.plan, tally.log
    began = datetime.fromisoformat(log.head.started).timestamp()
    jobs = [
        (
            _job(plan, log, s, until, [*s.words, f"--before={began if s.first else 0}"]),
            s.needs,
        )
        for s in tally.left
    ]
    with shown(tally.board) as tick:

        def looked() -> None:
            tally.look(now=False)
            tick()

        with (
            closing(work(attempt, jobs, retries=plan.retries, looked=looked)) as ends,
            interrupts.stoppable(),
        ):
            for end in ends:
                tally.end(end)
    tally.look()


_ANNOUNCED = 20
_LOOK = 10.0  # seconds between two looks at a store at a URL


@dataclass(slots=True)
class _Tally:
    """The counts of a sweep, from the records of its runs.

    groups: what is new, by its cause: one record, and the rows that met it. trouble: why the last
    look at a store at a URL failed. after: when the next look is due.
    """

    plan: Plan
    log: Log
    left: list[Shard]
    board: Board = field(default_factory=Board)
    followers: dict[int, Follower] = field(default_factory=dict)
    groups: dict[str, tuple[DivergenceRecord, set[str]]] = field(default_factory=dict)
    incidents: int = 0
    ready: bool = False
    trouble: str = ""
    after: float = 0.0

    def __post_init__(self) -> None:
        from amp_fuzz.runs.sweep.following import Follower

        self.board.limit = self.plan.seconds
        for shard in self.plan.shards:
            self.followers[shard.number] = Follower(self.log.store, self.log.run_id(shard))
            self.board.row(shard.row).total += shard.cases
        self.look()  # what earlier attempts recorded is no news, and not of this rate
        self.ready = True

    def head(self, address: str | None) -> None:
        """Print what runs, where."""
        shards, at = self.plan.shards, address or "this machine"
        say(f"amp-fuzz sweep {self.log.head.id}, {plural(len(shards), 'shard')} on {at}")
        done = sum(row.done for row in self.board.rows.values())
        if done or self.log.ends:
            ended = len(shards) - len(self.left)
            say(f"continues: {plural(ended, 'shard')} ended, {plural(done, 'case')} on record")
        say(f"records in {_place(self.log.store)}/runs/{self.log.head.id}-*")

    def look(self, *, now: bool = True) -> None:
        """Read what the runs have recorded since the last look.

        now: otherwise only if a look is due. A store at a URL is listed over the network: looking
        takes at most a tenth of the time.
        """
        began = time.monotonic()
        if not now and began < self.after:
            return
        self.trouble = ""
        for number in self.followers:
            self._read(number)
        if isinstance(self.plan.store, str):
            self.after = time.monotonic() + max(_LOOK, 9 * (time.monotonic() - began))

    def _read(self, number: int) -> bool:
        """Read what a run has recorded, and return whether its records could be read."""
        shard, store = self.plan.shards[number], self.log.store
        store.look_again(self.log.run_id(shard))
        try:
            for record in self.followers[number].new():
                self._note(shard, record)
        except StoreError as error:  # the network; the next look reads it
            self.trouble = str(error)
            return False
        return True

    def _note(self, shard: Shard, record: CaseRecord | DivergenceRecord | IncidentRecord) -> None:
        row = self.board.row(shard.row)
        if isinstance(record, IncidentRecord):
            self.incidents += 1
            if self.ready and self.incidents <= _ANNOUNCED:
                say(f"incident: {shard.environment}: {incident_line(record)}")
        elif isinstance(record, DivergenceRecord):
            died = record.kind in ("crash", "timeout")
            if died:  # such a case leaves no other record
                self._count(shard, outcome_of(record.known))
            if not record.known:
                self._new(shard, record)
        else:
            self._count(shard, record.outcome)
        row.total = max(row.total, row.done)

    def _count(self, shard: Shard, outcome: Outcome) -> None:
        own, known, new = (outcome == name for name in DIVERGING)
        if self.ready:
            self.board.add(shard.row, 1, own=own, known=known, new=new)
            return
        row = self.board.row(shard.row)
        row.done, row.own = row.done + 1, row.own + own
        row.known, row.new = row.known + known, row.new + new

    def _new(self, shard: Shard, record: DivergenceRecord) -> None:
        from amp_fuzz.records.fingerprint import title

        cause = record.fingerprint or record.id
        if cause in self.groups:
            self.groups[cause][1].add(shard.row)
            return
        self.groups[cause] = (record, {shard.row})
        if self.ready and len(self.groups) <= _ANNOUNCED:
            say(f"new: {title(record)} on {shard.row}: {record.expected} became {record.observed}")

    def end(self, end: ShardEnd) -> None:
        """Record the end of a shard."""
        shard = self.plan.shards[end.number]
        self.log.add(end)
        if end.ran:
            if self._read(end.number):
                del self.followers[end.number]
        else:
            say(f"shard {self.log.run_id(shard)} ({shard.row}): {end.error}")


# -- after it -------------------------------------------------------------------------------------


def _conclude(tally: _Tally, address: str | None, late: bool) -> int:
    """Print the summary, and return the exit code."""
    plan, log = tally.plan, tally.log
    store = _place(log.store)
    if isinstance(log.store, RemoteStore):
        try:
            log.store.refresh()  # findings have names that depend on those that are there
        except StoreError as error:
            tally.trouble = str(error)
    if tally.trouble:
        say(f"not counted below: what could not be read: {tally.trouble}")
    rows = tally.board.rows.values()
    say()
    table(
        ("environment and backend", "cases", "own", "known", "new"),
        [(row.name, f"{row.done:,}", *map(str, (row.own, row.known, row.new))) for row in rows],
    )
    for record, met in list(tally.groups.values())[:_ANNOUNCED]:
        say(_group(log.store, record, sorted(met)))
    if (more := len(tally.groups) - _ANNOUNCED) > 0:
        say(f"new: {more} more; all of them: {command_line('list', 'findings', store=store)}")
    cases = sum(row.done for row in rows)
    say(f"{plural(cases, 'case')}, {plural(len(tally.groups), 'new group')} of findings")
    say(f"look: {command_line('list', store=store)}")
    failed = [end for end in log.ends.values() if not end.ran and not (late and end.code < 0)]
    if not failed:
        from amp_fuzz.runs.sweep.log import Over

        log.add(Over(stopped=late))
    worst = max((end.code for end in failed), default=0)
    said = f"{plural(len(failed), 'shard')} did not end; continue: {_again(plan, address)}"
    if worst == Exit.INTERNAL:
        raise Internal(f"{next(end.error for end in failed if end.code == worst)}\n{said}")
    if failed:
        raise Stopped(said, worst if worst > 0 else Exit.UNENDED)
    if any(end.code == Exit.DIVERGED for end in log.ends.values()):
        return Exit.DIVERGED
    if not cases:
        raise Stopped("nothing ran: no backend is ready, or the time was up", Exit.NOTHING)
    return Exit.OK


def _group(store: Store, record: DivergenceRecord, met: list[str]) -> str:
    from amp_fuzz.records.fingerprint import title

    where = f"{', '.join(met[:6])}{' ...' if len(met) > 6 else ''}"
    replay = command_line("replay", store.name_of(record), store=_place(store))
    return f"new: {title(record)} on {where}\n     {replay}"
