"""``amp-fuzz replay``: run a case again."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing import connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from amp_fuzz.cases.case import Case
from amp_fuzz.config import Options
from amp_fuzz.interfaces.cli.common import (
    Exit,
    Internal,
    Stopped,
    command_line,
    options,
    resolve_options,
    say,
    waiting,
)
from amp_fuzz.records.remote import store_at
from amp_fuzz.records.schema import DIVERGING, DivergenceRecord, Note, outcome_of
from amp_fuzz.records.store import Store, StoreError, find_case
from amp_fuzz.upstream.known import Known

if TYPE_CHECKING:
    from amp_fuzz.upstream.bug import Example

__all__ = [
    "Answer",
    "Job",
    "answers",
    "check_ops",
    "job_of",
    "known_entries",
    "note_lines",
    "raise_unless_judged",
    "replay",
]

_DEFAULT_BACKEND = "eager-cpu"


@dataclass(frozen=True, slots=True)
class Job:
    """A case to judge. what: the user's name for it. finding: what was found before."""

    what: str
    case: Case
    backend: str
    finding: DivergenceRecord | None
    store: Path | str


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a case.

    error: why it cannot be judged. traceback: an error of our own. incident: how an earlier process
    that ran the case died.
    """

    outcome: str = ""
    kind: str = ""
    where: str = ""
    expected: str = ""
    observed: str = ""
    known: str = ""
    explicit: str = ""
    error: str = ""
    incident: str = ""
    code: int = Exit.USAGE
    traceback: str = ""
    notes: tuple[Note, ...] = ()


@click.command(short_help="Judge cases again, by id or file.")
@click.argument("cases", nargs=-1, required=True, metavar="ID|PATH...")
@click.option(
    "--backend", metavar="NAME", help="Use this backend, not the one that found the case."
)
@options("store", "known", "timeout", "memory", "plugins", "device", "policies")
def replay(cases: tuple[str, ...], backend: str | None, **given: Any) -> int:
    """Judge cases again, by id or file, and show what they do.

    Each case runs in a separate process, and once more if that dies, so a crash is reported too.
    Exits with 1 if a case diverges, no known finding explains it, and autocast has a part in it.
    """
    chosen = resolve_options(given).options
    jobs = [job_of(what, store_at(chosen.store), backend) for what in cases]
    code = Exit.OK
    known = known_entries(chosen)
    coming = answers(jobs, known, chosen.timeout, chosen.memory)
    for i, job in enumerate(jobs):
        with waiting(f"running {job.case.id} on {job.backend}"):
            answer = next(coming)
        raise_unless_judged(job, answer)
        say("\n" * (i > 0) + _story(job, answer, known))
        code = max(code, Exit.DIVERGED if answer.outcome == "diverged" else Exit.OK)
    return code


def job_of(what: str, store: Store, backend: str | None) -> Job:
    """Return the case that an id or a file names, for its own backend or another.

    The id of a known bug is its smallest case.
    """
    try:
        case, finding = find_case(store, what)
        found_by = finding.backend if finding else _DEFAULT_BACKEND
    except StoreError:
        if (example := _example(what)) is None:
            raise
        case, finding, found_by = example.case, None, example.backend
    check_ops(what, case)
    return Job(what, case, backend or found_by, finding, store.place)


def _example(name: str) -> Example | None:
    from amp_fuzz.upstream import BUGS

    return next(iter(BUGS[name].examples), None) if name in BUGS else None


def check_ops(what: str, case: Case) -> None:
    """Look up every op of the case. Raises `Stopped`, naming the file and the place."""
    from amp_fuzz.cases.program import ProgramError
    from amp_fuzz.catalogue import check

    try:
        check(case.program)
    except ProgramError as error:
        raise Stopped(f"{what}: {error}") from error


def known_entries(chosen: Options) -> tuple[Known, ...]:
    """Return the known entries of the options, for this torch."""
    from amp_fuzz.runs.setup import known_of

    return known_of(chosen)


# -- in another process ---------------------------------------------------------------------------


def answers(
    jobs: Sequence[Job], known: tuple[Known, ...], timeout: float, memory: float
) -> Iterator[Answer]:
    """Yield the answer to each job, in order, from a process that is replaced if it dies."""
    from amp_fuzz.findings.supervision.supervisor import Dead, talk

    left, before = list(jobs), ""  # how an earlier process that ran the first job died
    while left:
        try:
            for answer in talk(timeout, _judge_all, left, known, memory=memory):
                left = left[1:]
                yield replace(answer, incident=before)
                before = ""
        except Dead as dead:
            if not before:
                before = str(dead)
                continue
            left, before = left[1:], ""
            yield Answer("diverged", dead.kind, expected="an answer", observed=str(dead))


def _judge_all(pipe: connection.Connection, jobs: list[Job], known: tuple[Known, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles interrupts
    import traceback

    import torch

    from amp_fuzz.backends import BackendError
    from amp_fuzz.backends.registry import MissingBackend
    from amp_fuzz.plugins import inherited

    torch.set_num_threads(1)  # as in a run: some kernels sum in another order on several threads
    inherited()
    for job in jobs:
        try:
            answer = _judge(job, known)
        except BackendError as error:
            answer = Answer(error=str(error))
        except MissingBackend as error:
            answer = Answer(error=str(error), code=Exit.MISSING)
        except Exception:
            answer = Answer(traceback=traceback.format_exc())
        pipe.send(answer)
    pipe.send(None)


def _judge(job: Job, known: tuple[Known, ...]) -> Answer:
    from amp_fuzz.backends.harness import quiet
    from amp_fuzz.backends.registry import choose_backends
    from amp_fuzz.findings.explicit_form import explicit_form
    from amp_fuzz.findings.notes import notes_of
    from amp_fuzz.upstream.explain import judge_of

    (backend,) = choose_backends([job.backend])
    with quiet():
        judge = judge_of(backend, known, relations="all")
        verdict = judge.judge(job.case)
        notes = notes_of(judge, verdict)
        explicit = explicit_form(job.case, backend.reference())
    if verdict.divergence is None:
        return Answer(verdict.outcome, explicit=explicit, notes=notes)
    found = verdict.divergence
    return Answer(
        verdict.outcome,
        found.kind,
        found.where,
        found.expected,
        found.observed,
        verdict.known,
        explicit,
        notes=notes,
    )


# -- text -----------------------------------------------------------------------------------------


def _story(job: Job, answer: Answer, known: Sequence[Known]) -> str:
    """Return the report of a case: its program, what should happen, and what did."""
    lines = [str(job.case), ""]
    if answer.explicit:
        lines += ["the casts that autocast should make:", *_indented(answer.explicit), ""]
    lines += _verdict(job, answer, known)
    if answer.incident:
        lines.append(f"  incident: {answer.incident}; it gave an answer when it ran again")
    lines += note_lines(answer.notes)
    if job.finding and (answer.kind, job.backend) != (job.finding.kind, job.finding.backend):
        then = job.finding.kind + (f" at {job.finding.where}" if job.finding.where else "")
        lines.append(f"found on {job.finding.backend} as {then}")
    if answer.outcome in DIVERGING:
        words = [job.what]
        if job.finding is None or job.finding.backend != job.backend:
            words.append(f"--backend={job.backend}")
        again = command_line("repro", *words, store=job.store)
        lines.append(f"as a script for an issue: {again}")
    return "\n".join(lines)


def _verdict(job: Job, answer: Answer, known: Sequence[Known]) -> list[str]:
    name = f"{job.case.id} on {job.backend}"
    if answer.outcome == "agreed":
        return [f"{name}: agrees with the reference"]
    if answer.outcome == "raised":
        return [f"{name}: agrees with the reference: both raise the same error"]
    at = f" at {answer.where}" if answer.where else ""
    lines = [
        f"{name}: {judged_as(answer.known)}: {answer.kind}{at}",
        f"  expected  {answer.expected}",
        f"  observed  {answer.observed}",
    ]
    for entry in known:
        if entry.id in answer.known.split("+"):
            lines.append(f"  known as {entry.id}: {entry.what}")
            lines += [f"    {entry.link}"] if entry.link else []
    return lines


def judged_as(known: str) -> str:
    """Return what a divergence is, by the ids of the bugs that explain it."""
    outcome = outcome_of(known)
    if outcome == "backend":
        return "the backend's own: it differs in the same way without autocast"
    return "known" if outcome == "known" else "DIVERGES"


def note_lines(notes: Sequence[Note]) -> list[str]:
    """Return each note as lines: its kind and message, the statement, and what to do."""
    return [
        line
        for note in notes
        for line in (f"note, {note.kind}: {note.message}", f"  {note.where}", f"  {note.advice}")
    ]


def _indented(text: str) -> list[str]:
    return [f"  {line}" for line in text.splitlines()]


def raise_unless_judged(job: Job, answer: Answer) -> None:
    """Raise if a case was not judged."""
    if answer.traceback:
        raise Internal(answer.traceback)
    if answer.error:
        raise Stopped(f"{job.what}: {answer.error}", answer.code)
