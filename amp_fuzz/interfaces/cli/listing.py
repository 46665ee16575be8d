"""``amp-fuzz list`` and ``amp-fuzz report``: what the store holds, and the result of a run."""

from __future__ import annotations

from typing import Any

import click

from amp_fuzz.cases.program import statements
from amp_fuzz.config import Options, did_you_mean
from amp_fuzz.interfaces.cli.common import (
    Exit,
    command_line,
    console,
    options,
    resolve_options,
    say,
    table,
    waiting,
)
from amp_fuzz.records.lives import Life, Seen, lives
from amp_fuzz.records.remote import store_at
from amp_fuzz.records.schema import DivergenceRecord
from amp_fuzz.records.store import Store, StoreError, find_run
from amp_fuzz.reports.printable import plural

__all__ = ["listing", "report"]

_WHAT = ("findings", "runs", "ops", "backends", "known")


@click.command("list", short_help="List runs, findings, ops, backends, known findings.")
@click.argument("what", default="", metavar=f"[{'|'.join(_WHAT)}]")
@options("ops", "known", "store", "plugins", "device", "policies")
def listing(what: str, **given: Any) -> int:
    """List the store's runs and findings; or ops, backends or known findings."""
    if what not in ("", *_WHAT):
        hint = did_you_mean(what, _WHAT) or f": use {', '.join(_WHAT)}"
        raise click.UsageError(f"cannot list {what!r}{hint}")
    chosen = resolve_options(given).options
    if what == "ops":
        _ops(chosen)
    elif what == "backends":
        _backends()
    elif what == "known":
        _known(chosen)
    else:
        store = store_at(chosen.store)
        _check_store(store)
        if what in ("", "runs"):
            _runs(store)
        if what == "":
            say()
        if what in ("", "findings"):
            _findings(store)
    return Exit.OK


def _check_store(store: Store) -> None:
    if store.root.exists() and not store.root.is_dir():
        raise StoreError(f"{store.root}: not a folder: give another with --store")


def _runs(store: Store) -> None:
    ids = store.runs()
    if not ids:
        say(f"no runs in {store.place} yet; start one: {command_line('run', store=store.place)}")
        return
    rows, damaged = [], []
    for run in ids:
        try:
            head = store.run(run)
        except StoreError as error:
            damaged.append(str(error))
            continue
        names = ", ".join(b.name for b in head.backends)
        torch, branch = head.versions.get("torch", "?"), head.branch or "-"
        rows.append((run, head.profile, str(head.seed), branch, torch, names))
    table(("run", "profile", "seed", "branch", "torch", "backends"), rows)
    for line in damaged:
        say(line)
    if rows:
        say(f"a run's report: {command_line('report', rows[-1][0], store=store.place)}")


def _findings(store: Store) -> None:
    names = store.findings()
    if not names:
        say(f"no findings in {store.place}")
        return
    kept, damaged = {}, []
    for name in names:
        try:
            kept[name] = store.finding(name)
        except StoreError as error:
            damaged.append(str(error))
    unread: list[str] = []
    with waiting("reading"):
        told = lives(store, kept.values(), unread=unread)
    rows = [_finding(n, found, told.get((found.backend, found.id))) for n, found in kept.items()]
    # Those that came back and new ones first: these need attention.
    order = ("back", "new", "fixed")
    rows.sort(key=lambda row: (order.index(row[6]) if row[6] in order else 3, *row[1:]))
    head = ("finding", "backend", "kind", "op", "statements", "group", "state")
    table((*head, "first seen", "last seen"), rows)
    for line in damaged:
        say(line)
    if unread:
        say(f"runs that cannot be read, and are left out above: {len(unread)}: {unread[0]}")
    if rows:
        look = command_line("replay", rows[0][0], store=store.place)
        say(f"look at one: {look}")


def _finding(name: str, found: DivergenceRecord, life: Life | None) -> tuple[str, ...]:
    size = sum(1 for _ in statements((found.minimised or found.case).program.body))
    group = found.fingerprint or "-"
    state: str = life.state if life else "known" if found.known else "new"
    if state == "known":
        state = found.known or state
    seen = ("", "") if life is None else (_seen(life.first), _seen(life.last))
    return (name, found.backend, found.kind, found.op, str(size), group, state, *seen)


def _seen(run: Seen) -> str:
    return f"{run.started[:10]}, {run.torch}"


def _ops(chosen: Options) -> None:
    from amp_fuzz.catalogue import select

    rows = [(op.name, op.family, ", ".join(op.forms)) for op in select(chosen.ops)]
    table(("op", "family", "forms"), rows)
    say(f"{plural(len(rows), 'op')}; draw from some only: {command_line('run', '--ops=conv*')}")


def _backends() -> None:
    with waiting("importing torch"):
        from amp_fuzz.backends import backends

        rows = []
        for name, backend in backends().items():
            state = backend.availability()
            rows.append((name, backend.device, state.status, state.detail))
    table(("backend", "device", "status", "detail"), rows)


def _known(chosen: Options) -> None:
    from amp_fuzz.runs.setup import known_of

    rows = [(k.id, ", ".join(k.backends), f"{k.what} {k.link}".strip()) for k in known_of(chosen)]
    table(("known", "backends", "what"), rows)


@click.command(short_help="Show a run again: its summary and its report.")
@click.argument("run", default="latest", metavar="[RUN]")
@click.option("-v", "--verbose", is_flag=True, help="With kernels, known findings and notes.")
@options("report", "known", "store")
def report(run: str, verbose: bool, **given: Any) -> int:
    """Print the summary of a run, by default the last one, and write its report.

    RUN is an id, latest, latest~1, latest:main (of a branch), or the path or URL of a run's folder
    or of a store.

    Exits with 0 whatever the run found, and with 6 if it was killed before its end or some of its
    records cannot be read.
    """
    chosen = resolve_options(given).options
    store = store_at(chosen.store)
    _check_store(store)
    store, identity = find_run(store, run)

    from amp_fuzz import reports
    from amp_fuzz.runs.setup import known_of

    seen = reports.read(store, identity, known=known_of(chosen))
    say(seen.terminal(width=console().width, verbose=verbose).rstrip("\n"))
    if not verbose:
        say(f"amp-fuzz run {identity}: seed {seen.view.seed}, profile {seen.view.profile}")
    say(reports.written(seen.write(chosen.report)))
    return Exit.UNENDED if seen.data.state == "killed" or seen.data.damage else Exit.OK
