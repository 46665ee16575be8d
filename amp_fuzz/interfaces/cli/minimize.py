"""``amp-fuzz minimize``: shrink a case while it shows the same divergence."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click
import msgspec

from amp_fuzz.cases.case import Case
from amp_fuzz.cases.program import statements
from amp_fuzz.config import folder_of
from amp_fuzz.interfaces.cli.common import (
    Exit,
    Internal,
    Stopped,
    command_line,
    console,
    duration,
    options,
    resolve_options,
    say,
    version,
)
from amp_fuzz.records.schema import DivergenceRecord
from amp_fuzz.records.store import Store, find_case
from amp_fuzz.reports.printable import plural

if TYPE_CHECKING:
    from amp_fuzz.findings.supervision.worker import Best, Done, Job

__all__ = ["minimize"]

_DEFAULT_BACKEND = "eager-cpu"


_PARTS = "kind,op,stage"


def _parts(_: click.Context, __: click.Parameter, value: str) -> tuple[str, ...]:
    """Parse what must not change: words separated by commas."""
    allowed = ("kind", "op", "stage", "where")
    words = tuple(dict.fromkeys(value.split(",")))
    for word in words:
        if word not in allowed:
            raise click.BadParameter(f"{word!r} is not one of {', '.join(allowed)}")
    return words


@click.command(short_help="Shrink a case while it shows the same divergence.")
@click.argument("case", metavar="ID|FILE")
@click.option(
    "--backend", metavar="NAME", help="Use this backend, not the one that found the case."
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0),
    default=120.0,
    help="Stop after this long; a later call continues from there.  [default: 120]",
)
@click.option(
    "--match",
    "parts",
    callback=_parts,
    default=_PARTS,
    metavar="PARTS",
    help="What must not change: kind, op, stage, where.  [default: kind,op,stage]",
)
@click.option(
    "--check",
    metavar="CMD",
    default="",
    help="Run this command on each case file to judge it: exit code 0 is bad, 1 good, 125 skip.",
)
@click.option("--again", is_flag=True, help="Forget what earlier calls tried.")
@options("store", "known", "timeout", "memory", "plugins", "device", "policies")
def minimize(
    case: str,
    backend: str | None,
    seconds: float,
    parts: tuple[Any, ...],
    check: str,
    again: bool,
    **given: Any,
) -> int:
    """Shrink a case while it shows the same divergence.

    Candidates run in a supervised process, so one that crashes or hangs costs only itself. The
    store keeps what was tried: if a call was cut short, the same command continues it. The result
    is kept as a finding.
    """
    chosen = resolve_options(given).options
    store = Store(folder_of(chosen.store, "amp-fuzz minimize"))
    job = _job(case, store, backend, parts, check, given)
    journal = _journal(store, job, again=again)
    best: DivergenceRecord | None = None
    done: Done | None = None
    from amp_fuzz.findings.supervision.supervisor import minimise
    from amp_fuzz.findings.supervision.worker import Best, Stuck

    try:
        with _progress() as show:
            for event in minimise(job, seconds=seconds, journal=journal):
                if isinstance(event, Stuck):
                    if event.traceback:
                        raise Internal(event.traceback)
                    code = Exit.MISSING if event.missing else Exit.USAGE
                    raise Stopped(f"{case}: {event.why}", code)
                best = event.record
                if isinstance(event, Best):
                    show(event)
                else:
                    done = event
    except KeyboardInterrupt:
        if best is not None:
            kept = store.save(best).stem
            say(f"kept the best so far as {kept}; to continue: {_again(case, job, store)}")
        raise
    assert done is not None
    store.save(done.record)
    say(_story(case, job, done, store))
    return Exit.OK


def _job(
    what: str,
    store: Store,
    backend: str | None,
    parts: tuple[Any, ...],
    check: str,
    given: dict[str, Any],
) -> Job:
    from amp_fuzz.findings.supervision.worker import Job
    from amp_fuzz.interfaces.cli.replay import check_ops
    from amp_fuzz.runs.setup import known_of

    case, finding = find_case(store, what)
    check_ops(what, case)
    found_by = finding.backend if finding else _DEFAULT_BACKEND
    chosen = resolve_options(given).options
    known, limits = known_of(chosen), (chosen.timeout, chosen.memory)
    same = finding if backend in (None, found_by) else None
    return Job(case, backend or found_by, known, cast("Any", parts), check, *limits, same)


def _journal(store: Store, job: Job, *, again: bool) -> Any:
    from amp_fuzz.findings.minimize.target import Answer
    from amp_fuzz.findings.supervision.supervisor import Journal

    about = msgspec.json.encode(
        {
            "case": job.case.id,
            "backend": job.backend,
            "match": job.parts,
            "check": job.check,
            "amp-fuzz": version(),
            "torch": version("torch"),
            "known": [entry.id for entry in job.known],
            "answers": [field.name for field in msgspec.structs.fields(Answer)],
        }
    )
    store.create()
    name = hashlib.blake2b(about, digest_size=4).hexdigest()
    path = store.root / "minimize" / f"{job.case.id}-{name}.jsonl"
    if again:
        path.unlink(missing_ok=True)
    return Journal(path, about.decode())


# -- text -----------------------------------------------------------------------------------------


@contextmanager
def _progress() -> Iterator[Any]:
    """Show the best so far: in place in a terminal, otherwise one line for each."""
    out = console()
    if not out.is_terminal:
        yield lambda best: say(_line(best))
        return
    with out.status("minimising ...") as status:
        yield lambda best: status.update(f"minimising: {_line(best)}")


def _line(best: Best) -> str:
    case = best.record.minimised or best.record.case
    return f"{best.tried} tried: {size(case)} ({best.by})"


def size(case: Case) -> str:
    """Return how large a case is: ``2 statements, 12 elements``."""
    total = 0
    for spec in case.program.inputs:
        count = 1
        for d in spec.shape:
            count *= d
        total += count
    calls = sum(1 for _ in statements(case.program.body))
    return f"{plural(calls, 'statement')}, {plural(total, 'element')}"


def _story(what: str, job: Job, done: Done, store: Store) -> str:
    record = done.record
    small = record.minimised or record.case
    at = f" at {record.where}" if record.where else ""
    lines = [
        f"{record.id} on {record.backend}: {record.kind}{at}",
        f"  {size(job.case)} -> {size(small)}",
        f"  {plural(done.tried, 'candidate')} in {duration(done.seconds)}",
        *(f"  {line}" for line in str(small).splitlines()[1:]),
    ]
    if not job.check:
        lines += [f"  expected  {record.expected}", f"  observed  {record.observed}"]
    lines.append(f"  fingerprint {record.fingerprint}: {_cause(record)}")
    if record.nearest is not None:
        lines += ["the nearest case that agrees:", *_differing(small, record.nearest)]
    if not done.confirmed:
        lines.append("NOT confirmed: a fresh process does not show it; it may be nondeterministic")
    if done.reason == "time":
        lines.append(f"time is up; to continue: {_again(what, job, store)}")
    if not job.check:
        script = command_line("repro", store.name_of(record), **_at(store))
        lines.append(f"as a script for an issue: {script}")
    return "\n".join(lines)


def _cause(record: DivergenceRecord) -> str:
    from amp_fuzz.records.fingerprint import fingerprint

    return str(fingerprint(record))


def _at(store: Store) -> dict[str, Path]:
    return {"store": store.root}


def _again(what: str, job: Job, store: Store) -> str:
    words = ["minimize", what, f"--backend={job.backend}"]
    words += [f"--check={job.check}"] if job.check else []
    words += [f"--match={','.join(job.parts)}"] if ",".join(job.parts) != _PARTS else []
    return command_line(*words, store=store.place)


def _differing(small: Case, nearest: Case) -> list[str]:
    """Return the lines in which the nearest case that agrees differs from the smallest case."""
    import difflib

    old, new = (str(c).splitlines()[1:] for c in (small, nearest))
    lines = difflib.unified_diff(old, new, n=0, lineterm="")
    return [f"  {line}" for line in lines if not line.startswith(("---", "+++", "@@"))]
