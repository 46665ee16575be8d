"""``amp-fuzz explain``: where a case first diverges, by how much, and why."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from amp_fuzz.cases.program import statements
from amp_fuzz.interfaces.cli.common import (
    Exit,
    Stopped,
    command_line,
    options,
    resolve_options,
    say,
    waiting,
)
from amp_fuzz.interfaces.cli.replay import Job, job_of, judged_as, known_entries, note_lines
from amp_fuzz.records.remote import store_at
from amp_fuzz.upstream.known import Known

if TYPE_CHECKING:
    from amp_fuzz.findings.explanation import Explained, Value

__all__ = ["explain", "told"]

_WIDTH = 96


@click.command(short_help="Show where a case first diverges, and why.")
@click.argument("case", metavar="ID|FILE")
@click.option(
    "--backend", metavar="NAME", help="Use this backend, not the one that found the case."
)
@options("store", "known", "timeout", "memory", "plugins", "device", "policies")
def explain(case: str, backend: str | None, **given: Any) -> int:
    """Show where a case first diverges, by how much, and which casts make the difference.

    Shows each statement with the casts that autocast should make, and its value under the reference
    and on the backend. Then runs the reference without the weight cache, with one cast left out, or
    with one call under another policy. If such a run agrees with the backend, it shows what the
    backend did. Exits with 1 if the case diverges and no known finding explains it.
    """
    chosen = resolve_options(given).options
    job = job_of(case, store_at(chosen.store), backend)
    known = known_entries(chosen)
    with waiting(f"running {job.case.id} on {job.backend}"):
        from amp_fuzz.findings.explanation import explained

        found = explained(
            job.case, job.backend, known, timeout=chosen.timeout, memory=chosen.memory
        )
    if found.why:
        raise Stopped(f"{case}: {found.why}", Exit.MISSING if found.missing else Exit.USAGE)
    say(told(found, known))
    say(_next(job, found))
    return Exit.DIVERGED if found.outcome == "diverged" else Exit.OK


def _next(job: Job, found: Explained) -> str:
    words = [job.what]
    if job.finding is None or job.finding.backend != job.backend:
        words.append(f"--backend={job.backend}")
    name = "repro" if found.kind else "replay"
    words += ["--format=issue"] if found.kind else []
    what = "as an issue" if found.kind else "run it again"
    return f"{what}: {command_line(name, *words, store=job.store)}"


def told(found: Explained, known: Sequence[Known] = ()) -> str:
    """Return the explanation as text of at most 96 columns; long words are not broken."""
    return "\n".join([*_head(found, known), *_body(found), *_flips(found, known)])


def _head(found: Explained, known: Sequence[Known]) -> Iterator[str]:
    name = f"{found.case.id} on {found.backend}"
    yield f"plan: {found.case.plan}"
    if not found.kind:
        both = ": both raise the same error" if found.outcome == "raised" else ""
        yield f"{name}: agrees with the reference{both}"
        yield from note_lines(found.notes)
        return
    at = f" at {found.where}" if found.where else ""
    yield f"{name}: {judged_as(found.known)}: {found.kind}{at}"
    yield from _wrapped(f"expected  {found.expected}", "  ")
    yield from _wrapped(f"observed  {found.observed}", "  ")
    for entry in known:
        if entry.id in found.known.split("+"):
            yield from _wrapped(f"known as {entry.id}: {entry.what}", "  ")
    yield from note_lines(found.notes)


def _body(found: Explained) -> Iterator[str]:
    if not found.explicit:
        return
    yield ""
    if not found.whole:
        yield "# returned values only: a program that returns all values does not diverge this way"
    left = list(found.values)
    lines = iter(found.explicit.splitlines())
    for statement in statements(found.case.program.body):
        line = next(lines)
        if line.startswith("# under "):
            yield line
            line = next(lines)
        yield from _wrapped(line, "", more="    ")
        mine = [v for v in left if v.label.rpartition(".")[2] in statement.outputs]
        for value in mine:
            yield from _value(value, found)
        left = [v for v in left if v not in mine]
    if left:
        yield "# after the program"
    for value in left:
        yield from _value(value, found)


def _value(value: Value, found: Explained) -> Iterator[str]:
    mark = ">" if value.label == found.first else "!" if value.differs else " "
    if value.expected == value.observed:
        text = f"{value.label}  {value.expected}: {value.said}".replace("  :", ":")
    else:
        text = f"{value.label}  {value.expected}, observed {value.observed}: {value.said}"
    if value.label == found.first:
        text += "  <- the first that diverges"
    yield from _wrapped(text, f"  {mark} ", more="      ")


def _flips(found: Explained, known: Sequence[Known]) -> Iterator[str]:
    named = found.known.split("+")
    imitated = [k.quirk for k in known if k.quirk and k.id in named]
    if imitated:
        text = f"the reference agrees with the backend if it imitates {' and '.join(imitated)}"
        yield from ["", *_wrapped(text, "")]
    if not found.kind or not found.tried:
        return
    yield ""
    some = f"{found.tried} of {found.of}" if found.tried < found.of else f"{found.tried}"
    if not found.flips:
        yield from _wrapped(
            f"no single cast explains it: {some} runs of the reference, each with one cast left "
            "out, one call under another policy or no weight cache, disagree with the backend too",
            "",
        )
        return
    yield from _wrapped(
        f"the reference agrees with the backend if ({len(found.flips)} of {some} tried)", ""
    )
    for text in found.flips:
        yield from _wrapped(text, "  - ", more="    ")


def _wrapped(text: str, start: str, more: str | None = None) -> list[str]:
    more = " " * len(start) + "  " if more is None else more
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=start,
        subsequent_indent=more,
        break_long_words=False,
        break_on_hyphens=False,
        replace_whitespace=False,
        drop_whitespace=True,
    ) or [start]
