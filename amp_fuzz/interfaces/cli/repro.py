"""``amp-fuzz repro``: write a finding as a script, a test, or an issue."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
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
from amp_fuzz.interfaces.cli.replay import (
    Answer,
    Job,
    answers,
    job_of,
    known_entries,
    raise_unless_judged,
)
from amp_fuzz.records.outputs import write_whole
from amp_fuzz.records.remote import store_at
from amp_fuzz.records.schema import DIVERGING, DivergenceRecord
from amp_fuzz.reports.printable import clean_lines

if TYPE_CHECKING:
    from amp_fuzz.backends import Backend
    from amp_fuzz.findings.diagnosis import Examined
    from amp_fuzz.findings.repro.parts import Found
    from amp_fuzz.findings.repro.template import Issue
    from amp_fuzz.oracle import Kind
    from amp_fuzz.upstream.known import Known

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
@click.option(
    "--check",
    is_flag=True,
    help="Hold the issue against PyTorch's template for fuzzers; exit with 1 if a rule is broken.",
)
@click.option(
    "--last-good",
    default="",
    metavar="VERSION",
    help="The last torch without the finding, as `amp-fuzz bisect` says, or none; for an issue.",
)
@options("store", "known", "timeout", "memory", "plugins", "device", "policies")
def repro(
    case: str,
    backend: str | None,
    form: Form,
    output: str | None,
    runs: bool,
    check: bool,
    last_good: str,
    **given: Any,
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

    --check writes an issue and holds it against the rules of PyTorch's template. It says which are
    broken, a line each, and what to do.
    """
    environ = dict(os.environ)  # as the reader's: backends may change ours
    chosen = resolve_options(given).options
    job = job_of(case, store_at(chosen.store), backend)
    form = "issue" if check else form
    what = "test" if form in _TESTS else form
    ran, failed, written = "script" if form == "issue" else what, "", Written("", "")
    writers = list(_writers(job, chosen, form, last_good))
    for left, write in zip(reversed(range(len(writers))), writers, strict=True):
        with waiting(f"writing the {what}"):
            written = write()
        failed = ""
        if not runs and not left:
            break  # a shorter script is tried all the same: it must reproduce to be chosen
        from amp_fuzz.findings.repro.trial import tried
        from amp_fuzz.findings.repro.unit_tests import EXPECTED

        with waiting(f"running the {ran}"):
            ended = tried(
                clean_lines(written.code).replace(EXPECTED, ""),
                environ,
                test=form in _TESTS,
                timeout=chosen.timeout,
                memory=chosen.memory,
            )
        failed = "" if ended.reproduces else str(ended)
        if not failed:
            break
    text = clean_lines(written.text)
    if check and output is None:
        pass  # the answer is what is printed
    elif output is None:
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        write_whole(Path(output), text.encode())
    if output is not None and Path(output).is_file():
        which = "whose script" if form == "issue" else "which"
        good = f", {which} reproduces the finding" * (runs and not failed)
        say(f"wrote {output}{good}; {_next(form, output)}")
    if failed and runs:
        said = f"amp-fuzz: the {ran} does not reproduce the finding here: {failed}"
        click.echo(clean_lines(said), err=True)
    return _checked(written, not failed, environ, chosen) if check else Exit.OK


def _checked(written: Written, shown: bool, environ: dict[str, str], chosen: Options) -> int:
    """Say which rules of PyTorch's template an issue breaks; return the exit code."""
    from dataclasses import replace
    from tempfile import TemporaryDirectory

    from amp_fuzz.findings.repro.template import RULES, broken, told
    from amp_fuzz.findings.repro.trial import tried

    assert written.issue is not None
    issue = replace(written.issue, shown=shown)
    if issue.compiled and "There is no trace" not in issue.text:
        with waiting("making a trace"), TemporaryDirectory(prefix="amp-fuzz-") as folder:
            traced = environ | {"TORCH_TRACE": folder}
            tried(issue.script, traced, timeout=chosen.timeout, memory=chosen.memory)
            files = [f for f in Path(folder).rglob("*") if f.is_file() and f.stat().st_size]
            issue = replace(issue, traced=len(files))
    rules = broken(issue)
    say(told(rules).rstrip() if rules else f"all {len(RULES)} rules hold")
    return Exit.DIVERGED if rules else Exit.OK


def _next(form: Form, output: str) -> str:
    if form == "issue":
        return "its first line is the title: https://github.com/pytorch/pytorch/issues/new/choose"
    return f"run it: {'pytest' if form == 'pytest' else 'python'} {output}"


@dataclass(frozen=True, slots=True)
class Written:
    """A script or a test, the text that holds it, and of an issue what its rules are about."""

    code: str
    text: str
    issue: Issue | None = None


Writer = Callable[[], Written]


def _writers(job: Job, chosen: Options, form: Form, last_good: str = "") -> Iterator[Writer]:
    """Yield what writes a finding: the shortest script first, and that which compares most last.

    A script is short because it is of a simpler case, and leaves out what its case does not need.
    The next one is for a script that does not reproduce.
    """
    if form in _TESTS:
        yield lambda: _alone(code_of(job, chosen, form))
        return
    from amp_fuzz.findings.repro.short import WHOLE

    found = _examined(job, chosen) if form == "issue" else None
    finding: Found | None = found.record if found else _found(job, chosen, form)
    assert finding is not None
    simple, seen = _simpler(job, finding, chosen)
    tries = [(simple, seen, True), (job, finding, True), (job, finding, False)]
    whole = finding.kind in WHOLE
    for one, seen, brief in tries[2 if whole else simple.case == job.case :]:
        script = partial(_script, one, seen, named=job.case.id, brief=brief, apart=form == "issue")
        if found is None:
            yield lambda script=script: _alone(script())  # type: ignore[misc]
        else:
            known = found if one is job else None
            yield partial(_issue, one, chosen, known, script, job.case.id, last_good)


def _alone(code: str) -> Written:
    return Written(code, code)


def script_of(job: Job, chosen: Options) -> str:
    """Return the script that is tried first. Judge the case if no finding says what diverges."""
    return next(_writers(job, chosen, "script"))().code


def code_of(job: Job, chosen: Options, form: Form) -> str:
    """Return a script or a test. Judge the case first if no finding says what diverges."""
    backend = _backend(job)
    return _written(job, backend, _found(job, chosen, form), form)


def _script(job: Job, finding: Found, *, named: str, brief: bool, apart: bool) -> str:
    """Return a script.

    named: the id of the case that was found. brief: compare what suffices. apart: the program's
    explicit form stands beside the script, not in it.
    """
    from amp_fuzz.findings.repro.parts import ReproError
    from amp_fuzz.findings.repro.short import short

    backend = _backend(job)
    if isinstance(finding, DivergenceRecord) and apart:
        finding = msgspec.structs.replace(finding, explicit="")
    if not brief:
        return _written(job, backend, finding, "script")
    try:
        return short(job.case, backend, finding, named=named)
    except ReproError as error:
        raise Stopped(f"{job.what}: {error}") from error


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


_SIMPLIFIED = ("dtype", "shape", "device", "missing", "bitwise", "nonfinite", "value", "raise")


def _simpler(job: Job, finding: Found, chosen: Options) -> tuple[Job, Found]:
    """Return a case that shows a finding and is simpler to read, and what diverges there."""
    from dataclasses import replace

    from amp_fuzz.cases.case import Case
    from amp_fuzz.findings.repro.script import ours_alone
    from amp_fuzz.findings.repro.simpler import Seen, simpler
    from amp_fuzz.oracle import Divergence

    if finding.kind.removeprefix("grad-") not in _SIMPLIFIED or ours_alone(_backend(job), finding):
        return job, finding
    explicit = dict[str, str]()

    def answered(case: Case, known: tuple[Known, ...] = ()) -> Answer:
        one = replace(job, case=case, finding=None)
        return next(answers([one], known, chosen.timeout, chosen.memory))

    def judged(case: Case) -> Seen | None:
        answer = answered(case)
        if answer.outcome not in DIVERGING:
            return None
        explicit[case.id] = answer.explicit
        return Seen(answer.kind, answer.where, answer.expected, answer.observed)

    entries = known_entries(chosen)
    first = Seen(finding.kind, finding.where, finding.expected, finding.observed)
    case, seen = simpler(job.case, first, judged, lambda case: answered(case, entries).known)
    if case == job.case:
        return job, finding
    told = {"expected": seen.expected, "observed": seen.observed}
    if isinstance(finding, DivergenceRecord):
        record = msgspec.structs.replace(finding, explicit=explicit[case.id], **told)
        return replace(job, case=case), record
    return replace(job, case=case), Divergence(cast("Kind", seen.kind), seen.where, **told)


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


def _examined(job: Job, chosen: Options) -> Examined:
    """Return what a case shows now, with a record."""
    from amp_fuzz.findings.diagnosis import examined

    _backend(job)
    known = known_entries(chosen)
    found = examined(job.case, job.backend, known, timeout=chosen.timeout, memory=chosen.memory)
    if found.why:
        raise Stopped(f"{job.what}: {found.why}", Exit.MISSING if found.missing else Exit.USAGE)
    return _as_found(job, found)


def _issue(
    job: Job,
    chosen: Options,
    found: Examined | None,
    script: Callable[[], str],
    named: str,
    last_good: str,
) -> Written:
    """Return an issue and its script. found: what the case shows, if known."""
    from amp_fuzz.backends import facts_of
    from amp_fuzz.cases.program import statements
    from amp_fuzz.catalogue import CATALOGUE
    from amp_fuzz.findings.repro.environment import environment
    from amp_fuzz.findings.repro.issue import first_bad, issue
    from amp_fuzz.findings.repro.template import Issue
    from amp_fuzz.upstream import BUGS
    from amp_fuzz.upstream.registry import own_about

    found = found or _examined(job, chosen)
    record = found.record
    assert record is not None
    backend, known, code = _backend(job), known_entries(chosen), script()
    bugs = [BUGS[name] for name in (job.what, *record.known.split("+")) if name in BUGS]
    bugs = bugs or own_about(record.op, record.kind, job.backend)
    text = issue(
        job.case,
        backend,
        found,
        code,
        known=known,
        environment=environment(),
        named=named,
        versions=first_bad({bug.torch for bug in bugs}, last_good),
    )
    about = Issue(
        text,
        code,
        compiled=facts_of(backend).area.startswith("torch.compile"),
        values=bool(found.dtype),
        op=record.op,
        dtype=found.dtype,
        draws=any(CATALOGUE[s.op].random for s in statements(job.case.program.body)),
        inductor="inductor" in backend.name,
        same=found.same,
        rungs=tuple(name for name, _ in found.rungs),
    )
    return Written(code, text, about)


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
