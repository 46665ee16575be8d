"""``amp-fuzz baseline``: the findings that a project accepts: add, check, remove."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from amp_fuzz.config import OPTIONS, Options
from amp_fuzz.interfaces.cli.common import (
    Exit,
    Stopped,
    command_line,
    options,
    resolve_options,
    say,
    version,
    waiting,
)
from amp_fuzz.records.baseline import Baseline, Entry, added, entry_of, match, read, removed
from amp_fuzz.records.fingerprint import fingerprinted, title
from amp_fuzz.records.outputs import write_whole
from amp_fuzz.records.remote import store_at
from amp_fuzz.records.schema import OWN, DivergenceRecord
from amp_fuzz.records.store import Store
from amp_fuzz.reports.printable import plural

if TYPE_CHECKING:
    from amp_fuzz.findings.recheck import Came

__all__ = ["baseline"]

_Command = TypeVar("_Command", bound=Callable[..., Any])


@click.group(short_help="Manage the findings that a project accepts.")
def baseline() -> None:
    """Keep the findings that a project accepts in a file that it commits.

    A finding in amp-fuzz-baseline.toml does not fail a run, and hides no other finding. The file
    holds the case of each finding, so it can be checked anywhere.
    """


# -- update ---------------------------------------------------------------------------------------


def _day(_: click.Context, __: click.Parameter, value: str | None) -> datetime.date | None:
    if value is None:
        return None
    try:
        day = datetime.date.fromisoformat(value)
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a date: write it like 2027-03-31") from None
    if day < _today():
        raise click.BadParameter(f"{value} is in the past")
    return day


def _today() -> datetime.date:
    return datetime.datetime.now(datetime.UTC).date()


def _range(_: click.Context, __: click.Parameter, value: str | None) -> str | None:
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    try:
        SpecifierSet(value or "")
    except InvalidSpecifier:
        raise click.BadParameter(f"{value!r} is not a version range: write '>=2.13'") from None
    return value


@baseline.command(short_help="Add the findings of the last run, or some by id.")
@click.argument("ids", nargs=-1, metavar="[ID...]")
@click.option(
    "--reason", metavar="TEXT", help="Why they are accepted; by default the command asks."
)
@click.option("--link", default="", metavar="URL", help="Where they are discussed.")
@click.option("--expires", callback=_day, metavar="DATE", help="Accept them until this day.")
@click.option(
    "--torch",
    "versions",
    callback=_range,
    metavar="RANGE",
    help="Accept them with these torch versions; by default the installed one and later.",
)
@options("baseline", "store")
def update(
    ids: tuple[str, ...],
    reason: str | None,
    link: str,
    expires: datetime.date | None,
    versions: str | None,
    **given: Any,
) -> int:
    """Add the new findings of the last run, or the findings with these ids, to the baseline.

    Existing entries do not change.
    """
    chosen = resolve_options(given).options
    store, file = store_at(chosen.store), _file(chosen, missing=True)
    found = _by_id(store, ids) if ids else _of_last_run(store)
    fresh = []
    for record in found:
        if record.known == OWN:
            say(f"{record.id} differs in the same way without autocast: it fails no run by itself")
        if (entry := match(file.entries, record)) is not None:
            say(f"{record.id} is already in the baseline, as {entry.id}")
        else:
            fresh.append(record)
    if not fresh:
        say(f"{_shown(file.path)}: nothing to add")
        return Exit.OK
    if reason is not None and not reason.strip():
        raise Stopped("reason: the text is empty: say why they are accepted")
    about = {"link": link, "expires": expires, "torch": versions or _from_here()}
    entries: list[Entry] = []
    for record in fresh:
        why = reason or _asked(record)
        taken = [entry.id for entry in (*file.entries, *entries)]
        entries.append(entry_of(record, taken, reason=why, **about))  # type: ignore[arg-type]
    write_whole(file.path, added(file, entries).encode())
    for entry in entries:
        say(f"added {entry.id}: {entry.title} on {entry.backend}")
    say(f"wrote {_shown(file.path)}; commit it, and check it: {_command('check', file, chosen)}")
    return Exit.OK


def _from_here() -> str:
    major, minor, *_ = version("torch").split(".")
    return f">={major}.{minor}"


def _by_id(store: Store, ids: Iterable[str]) -> list[DivergenceRecord]:
    return [fingerprinted(store.finding(identity)) for identity in dict.fromkeys(ids)]


def _of_last_run(store: Store) -> list[DivergenceRecord]:
    """Return the new findings of the last run: for each cause the smallest."""
    runs = store.runs()
    if not runs:
        raise Stopped(f"{store.place}: no run yet: {command_line('run', store=store.place)}")
    found: dict[tuple[str, ...], DivergenceRecord] = {}
    for record in store.records(runs[-1]):
        if not isinstance(record, DivergenceRecord) or record.known:
            continue
        record = fingerprinted(record)
        key = (record.fingerprint, *record.as_if)
        if key not in found or _size(record) < _size(found[key]):
            found[key] = record
    return list(found.values())


def _size(record: DivergenceRecord) -> int:
    return len((record.minimised or record.case).json())


def _asked(record: DivergenceRecord) -> str:
    """Ask for the reason of a finding. Raises `Stopped` where nobody can answer."""
    if not sys.stdin.isatty():
        raise Stopped(
            f"{record.id}: no reason: say why it is accepted: "
            "amp-fuzz baseline update --reason='waits for pytorch#...'"
        )
    say(f"{title(record)} on {record.backend}: {record.expected} became {record.observed}")
    answer = ""
    while not answer.strip():
        answer = click.prompt("why is it accepted?", type=str)
    return answer


# -- check and prune ------------------------------------------------------------------------------


@baseline.command(short_help="Judge every case again: still there, fixed or expired.")
@options("baseline", "known", "timeout", "memory", "plugins", "device", "policies")
def check(**given: Any) -> int:
    """Judge the case of every finding again, and show the result.

    Exit codes: 0 every finding that can run here is still there and accepted; 1 a finding is
    fixed, expired or different now; 2 the file cannot be used; 5 no finding can run here.
    """
    chosen = resolve_options(given).options
    file = _file(chosen)
    if not file.entries:
        say(f"{_shown(file.path)}: no findings")
        return Exit.OK
    say(f"{_shown(file.path)}: {plural(len(file.entries), 'finding')}, torch {version('torch')}")
    ran = done = 0
    for entry, came in _came(file, chosen):
        late = entry.expired(_today())
        ran += came.state != "cannot"
        done += came.state in ("fixed", "changed", "listed") or late
        say(_line(entry, came, late))
    if done:
        say(f"to remove what is fixed: {_command('prune', file, chosen)}")
        return Exit.DIVERGED
    return Exit.OK if ran else Exit.NOTHING


def _line(entry: Entry, came: Came, late: bool) -> str:
    what = {
        "there": "still there",
        "fixed": "FIXED: remove it",
        "changed": f"CHANGED: its case now shows {came.detail}",
        "listed": f"not needed: {came.detail}: remove it",
        "not seen": f"not seen {came.detail}",
        "cannot": f"cannot run here: {came.detail}",
    }[came.state]
    if late:
        what = f"EXPIRED on {entry.expires}, {what}"
    more = f" ({entry.link})" if entry.link else ""
    return f"  {entry.id} on {entry.backend}: {what}\n    {entry.title}: {entry.reason}{more}"


@baseline.command(short_help="Remove the findings that no longer happen.")
@click.option("--dry-run", is_flag=True, help="Show what would be removed, and write nothing.")
@options("baseline", "known", "timeout", "memory", "plugins", "device", "policies")
def prune(dry_run: bool, **given: Any) -> int:
    """Judge every case again, and remove the findings that no longer happen.

    A finding that cannot run here stays, and so does a nondeterministic one. The rest of the file
    stays too.
    """
    chosen = resolve_options(given).options
    file = _file(chosen)
    gone: list[str] = []
    for entry, came in _came(file, chosen):
        if came.state in ("fixed", "listed"):
            gone.append(entry.id)
            say(f"{'would remove' if dry_run else 'removed'} {entry.id}: {_why(came)}")
        elif came.state == "cannot":
            say(f"kept {entry.id}: cannot run here: {came.detail}")
    if not gone:
        say(f"{_shown(file.path)}: nothing to remove")
    elif not dry_run:
        write_whole(file.path, removed(file, gone).encode())
        say(f"wrote {_shown(file.path)}: {plural(len(file.entries) - len(gone), 'finding')} left")
    return Exit.OK


def _why(came: Came) -> str:
    return "fixed" if came.state == "fixed" else came.detail


def _came(file: Baseline, chosen: Options) -> Sequence[tuple[Entry, Came]]:
    with waiting("judging"):
        from amp_fuzz.findings.recheck import recheck
        from amp_fuzz.runs.setup import known_of

        known, torch = known_of(chosen), version("torch")
        limits = {"timeout": chosen.timeout, "memory": chosen.memory}
        return list(recheck(file.entries, known, torch=torch, **limits))


# -- the file -------------------------------------------------------------------------------------


def _file(chosen: Options, *, missing: bool = False) -> Baseline:
    """Return the baseline. missing: whether the named file need not exist yet."""
    from amp_fuzz.runs.setup import baseline_of

    if missing and not chosen.baseline.exists() and _named(chosen):
        return Baseline(chosen.baseline)
    found = baseline_of(chosen)
    return found if missing or found.text else read(found.path, missing=False)


def _named(chosen: Options) -> bool:
    return bool(chosen.baseline != OPTIONS["baseline"].default)


def _command(name: str, file: Baseline, chosen: Options) -> str:
    words = [f"--baseline={chosen.baseline}"] if _named(chosen) else []
    return command_line("baseline", name, *words)


def _shown(path: Path) -> str:
    here = path.absolute()
    return str(here.relative_to(Path.cwd()) if here.is_relative_to(Path.cwd()) else path)
