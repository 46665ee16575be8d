"""``amp-fuzz repro``: write a finding as a script, a test, or an issue."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import click
import msgspec

from amp_fuzz.config import Options
from amp_fuzz.interfaces.cli.common import (
    Exit,
    Stopped,
    command_line,
    options,
    resolve_options,
    say,
    waiting,
)
from amp_fuzz.interfaces.cli.replay import Job, answers, job_of, known_entries, raise_unless_judged
from amp_fuzz.records.outputs import write_whole
from amp_fuzz.records.remote import store_at
from amp_fuzz.records.schema import DIVERGING, DivergenceRecord
from amp_fuzz.reports.printable import clean_lines

if TYPE_CHECKING:
    from amp_fuzz.backends import Backend
    from amp_fuzz.findings.diagnosis import Examined
    from amp_fuzz.findings.repro.parts import Found
    from amp_fuzz.oracle import Kind

__all__ = ["code_of", "repro"]

Form = Literal["script", "pytest", "testcase", "issue"]

_TESTS = ("pytest", "testcase")


@click.command(short_help="Print a finding as a script, a test, or an issue.")
@click.argument("case", metavar="ID|PATH")
@click.option(
    "--backend", metavar="NAME", help="Use this backend, not the one that found the case."
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["script", "pytest", "testcase", "issue"]),
    default="script",
    help="A script, a test for a suite or for PyTorch's, or the Markdown of an issue.  "
    "[default: script]",
)
@click.option("-o", "--output", metavar="FILE", help="Write to this file, not to stdout.")
@click.option(
    "--run/--no-run",
    "runs",
    default=True,
    help="Run the script or the test, and say so if it does not reproduce the finding.  "
    "[default: --run]",
)
@options("store", "known", "timeout", "memory", "plugins", "device", "policies")
def repro(
    case: str, backend: str | None, form: Form, output: str | None, runs: bool, **given: Any
) -> int:
    """Print a finding, or a known bug, in a form that needs no amp-fuzz.

    A known bug is named by its id, and its smallest case is printed.

    script: imports only torch. It exits with 1 if the divergence reproduces, with 0 if it does not,
    and with 125 if it cannot tell, as git bisect run expects.
    pytest: a test that fails while the bug exists. testcase: one in PyTorch's own style, which is
    expected to fail. issue: Markdown for GitHub with the title in the first line. The case is
    judged again first.

    The script, or the test, then runs once in a new Python. If it does not reproduce the finding,
    stderr says so.
    """
    environ = dict(os.environ)  # as the reader's: backends may change ours
    chosen = resolve_options(given).options
    job = job_of(case, store_at(chosen.store), backend)
    what = "test" if form in _TESTS else form
    with waiting(f"writing the {what}"):
        code, text = _issue(job, chosen) if form == "issue" else (code_of(job, chosen, form),) * 2
    text = clean_lines(text)
    if output is None:
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        write_whole(Path(output), text.encode())
    failed, ran = "", "script" if form == "issue" else what
    if runs:
        from amp_fuzz.findings.repro.trial import tried
        from amp_fuzz.findings.repro.unit_tests import EXPECTED

        with waiting(f"running the {ran}"):
            ended = tried(
                clean_lines(code).replace(EXPECTED, ""),
                environ,
                test=form in _TESTS,
                timeout=chosen.timeout,
                memory=chosen.memory,
            )
        failed = "" if ended.reproduces else str(ended)
    if output is not None and Path(output).is_file():
        which = "whose script" if form == "issue" else "which"
        good = f", {which} reproduces the finding" * (runs and not failed)
        say(f"wrote {output}{good}; {_next(form, output)}")
    if failed:
        said = f"amp-fuzz: the {ran} does not reproduce the finding here: {failed}"
        click.echo(clean_lines(said), err=True)
    return Exit.OK


def _next(form: Form, output: str) -> str:
    if form == "issue":
        return "its first line is the title: https://github.com/pytorch/pytorch/issues/new/choose"
    return f"run it: {'pytest' if form == 'pytest' else 'python'} {output}"


def code_of(job: Job, chosen: Options, form: Form) -> str:
    """Return a script or a test. Judge the case first if no finding says what diverges."""
    backend = _backend(job)
    return _written(job, backend, _found(job, chosen, form), form)


def scripts_of(job: Job, chosen: Options) -> tuple[str, str]:
    """Return the script of a finding, and that of the same program in eager.

    The second is "" if the backend is eager itself, or has no eager beside it.
    """
    from amp_fuzz.backends import backends
    from amp_fuzz.backends.base import Repros

    backend = _backend(job)
    finding = _found(job, chosen, "script")
    script = _written(job, backend, finding, "script")
    eager = backends().get(f"eager-{backend.device}")
    if eager is None or eager.name == backend.name or not isinstance(backend, Repros):
        return script, ""
    try:
        return script, _written(job, eager, finding, "script")
    except Stopped:
        return script, ""


def _found(job: Job, chosen: Options, form: Form) -> Found:
    """Return what diverges: the finding, or else what judging the case says."""
    from amp_fuzz.oracle import Divergence

    finding: Divergence | DivergenceRecord | None = job.finding
    if job.finding is None or job.finding.backend != job.backend:
        answer = next(answers([job], (), chosen.timeout, chosen.memory))
        raise_unless_judged(job, answer)
        if answer.outcome not in DIVERGING:
            raise Stopped(
                f"{job.what}: agrees with the reference on {job.backend}: "
                f"no {'test' if form in _TESTS else form} to write"
            )
        finding = Divergence(
            cast("Kind", answer.kind), answer.where, answer.expected, answer.observed
        )
    assert finding is not None
    return finding


def _backend(job: Job) -> Backend:
    import torch

    from amp_fuzz.backends import BackendError, choose

    torch.set_num_threads(1)  # as in the judging process: the constants are computed here
    try:
        (backend,) = choose([job.backend])
    except BackendError as error:
        raise Stopped(f"{job.what}: {error}") from error
    return backend


def _written(job: Job, backend: Backend, finding: Found, form: Form) -> str:
    from amp_fuzz.findings.repro import script as core
    from amp_fuzz.findings.repro.as_test import pytest_form
    from amp_fuzz.findings.repro.unit_tests import method_of, unit_tests

    try:
        if form == "testcase":
            return unit_tests([method_of(job.case, backend, finding)])
        write = pytest_form if form == "pytest" else core.repro
        return write(job.case, backend, finding)
    except core.ReproError as error:
        raise Stopped(f"{job.what}: {error}") from error


def _issue(job: Job, chosen: Options) -> tuple[str, str]:
    """Return the script of an issue, and the issue."""
    from amp_fuzz.findings.diagnosis import examined
    from amp_fuzz.findings.repro.environment import environment
    from amp_fuzz.findings.repro.issue import issue

    backend, known = _backend(job), known_entries(chosen)
    found = examined(job.case, job.backend, known, timeout=chosen.timeout, memory=chosen.memory)
    if found.why:
        raise Stopped(f"{job.what}: {found.why}", Exit.MISSING if found.missing else Exit.USAGE)
    found = _as_found(job, found)
    assert found.record is not None
    # The explicit form has a place of its own in an issue.
    script = _written(job, backend, msgspec.structs.replace(found.record, explicit=""), "script")
    text = issue(job.case, backend, found, script, known=known, environment=environment())
    return script, text


def _as_found(job: Job, found: Examined) -> Examined:
    """Return what was found. Nondeterminism that does not show now comes from the finding."""
    from dataclasses import replace

    if found.record is not None:
        return found
    if job.finding and (job.finding.kind, job.finding.backend) == ("nondeterminism", job.backend):
        return replace(found, record=job.finding)
    again = command_line("replay", job.what, store=job.store)
    raise Stopped(
        f"{job.what}: agrees with the reference on {job.backend} now: nothing to report; "
        f"see: {again}"
    )
