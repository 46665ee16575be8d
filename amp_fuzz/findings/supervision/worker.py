"""The minimiser's process: judge a case, then ever smaller ones, and report each.

`amp_fuzz.findings.supervision.supervisor` starts it and outlives it.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing import connection
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec

from amp_fuzz.backends.accelerator import DeviceFailure, or_ends
from amp_fuzz.backends.harness import quiet
from amp_fuzz.backends.reference import ReferenceRuntime
from amp_fuzz.cases.case import Case
from amp_fuzz.findings.explicit_form import explicit_form
from amp_fuzz.findings.minimize import Smaller
from amp_fuzz.findings.minimize.target import (
    PARTS,
    Answer,
    Memory,
    Part,
    Shrunk,
    Target,
    answer_of,
    asker,
    confirmed,
    paired,
    part_of,
    shrink,
    stage_of,
)
from amp_fuzz.findings.supervision.processes import expendable
from amp_fuzz.findings.wrong_policy import caused
from amp_fuzz.oracle.judge import Judge
from amp_fuzz.plugins import inherited
from amp_fuzz.records.fingerprint import fingerprinted
from amp_fuzz.records.schema import DivergenceRecord, listed, unanswered
from amp_fuzz.upstream.explain import judge_of
from amp_fuzz.upstream.known import Known

__all__ = ["Best", "Done", "Event", "Job", "Said", "Stuck", "Trying", "answer", "prepared", "run"]


@dataclass(frozen=True, slots=True)
class Job:
    """A case to minimise, as sent to another process.

    timeout: seconds for one candidate. memory: GiB that it may hold. check: a command that judges
    candidates instead of the backend. finding: what was found, if known. blind: the reference dies
    of the case, so its values are unavailable.
    """

    case: Case
    backend: str
    known: tuple[Known, ...] = ()
    parts: tuple[Part, ...] = PARTS
    check: str = ""
    timeout: float = 120.0
    memory: float = 8.0
    finding: DivergenceRecord | None = None
    blind: bool = False


@dataclass(frozen=True, slots=True)
class Best:
    """The smallest case so far. by: the name of the pass. tried: candidates."""

    record: DivergenceRecord
    by: str
    tried: int


@dataclass(frozen=True, slots=True)
class Done:
    """The end. record: of the smallest case; confirmed: whether a fresh process shows it too."""

    record: DivergenceRecord
    tried: int
    seconds: float
    reason: Literal["done", "time"]
    confirmed: bool = False


@dataclass(frozen=True, slots=True)
class Stuck:
    """The case cannot be minimised. missing: the backend is missing. traceback: of our error."""

    why: str
    missing: bool = False
    traceback: str = ""


Event: TypeAlias = Best | Done | Stuck


@dataclass(frozen=True, slots=True)
class Trying:
    """A candidate is about to run."""

    id: str


@dataclass(frozen=True, slots=True)
class Said:
    """The answer to a candidate."""

    id: str
    answer: Answer


class _CheckError(ValueError):
    """A command that answers neither good nor bad."""


@dataclass(frozen=True, slots=True)
class _Check:
    """Asks a command about candidates: 0 is bad, 1 is good, 125 means skip.

    reference: candidates must run under it; None if the case itself does not.
    """

    words: tuple[str, ...]
    timeout: float
    reference: ReferenceRuntime | None

    def __call__(self, case: Case) -> Answer:
        if self.reference is not None and self.reference.run(case).raised:
            return Answer("raised")
        with tempfile.TemporaryDirectory(prefix="amp-fuzz-") as folder:
            path = Path(folder) / f"{case.id}.json"
            path.write_bytes(case.json())
            none = subprocess.DEVNULL
            try:
                code = subprocess.run(
                    [*self.words, str(path)],
                    stdin=none,
                    stdout=none,
                    stderr=none,
                    check=False,
                    timeout=self.timeout,
                ).returncode
            except subprocess.TimeoutExpired:
                return Answer("timeout")
            except OSError as error:
                raise _CheckError(f"check: {self.words[0]}: {error.strerror}") from error
        if code == 0:
            return Answer("diverged", "check")
        if code not in (1, 125):
            raise _CheckError(
                f"check: the command ended with exit code {code}: end it with 0 for a case that "
                "is bad, 1 for a good one, 125 to skip it"
            )
        return Answer("agreed" if code == 1 else "skipped")


def prepared() -> None:
    """Prepare a process that judges cases for another: quiet, and with one thread."""
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles interrupts
    expendable()
    torch.set_num_threads(1)  # as in a run: some kernels sum in another order on several threads
    inherited()
    # The output of libraries for hundreds of candidates helps nobody.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


def _judge(job: Job) -> Judge:
    from amp_fuzz.backends.registry import choose_backends

    (backend,) = choose_backends([job.backend])
    return judge_of(backend, job.known, relations="all")


def _asking(job: Job, judge: Judge, target: Target) -> Callable[[Case], Answer]:
    if job.check:
        reference = judge.backend.reference()
        raises = job.blind or reference.run(job.case).raised is not None
        words = tuple(shlex.split(job.check))
        return _Check(words, job.timeout * 0.9, None if raises else reference)
    return _with_memory(asker(judge, target))


def _with_memory(ask: Callable[[Case], Answer]) -> Callable[[Case], Answer]:
    """Return a function that skips a candidate for which the device has too little memory."""

    def asked(case: Case) -> Answer:
        try:
            return ask(case)
        except DeviceFailure as failure:
            if failure.kind != "memory":
                raise
            return Answer("skipped")

    return asked


def answer(pipe: connection.Connection, job: Job) -> None:
    """Judge a case in this process and send the answer."""
    prepared()
    with quiet(), or_ends():
        judge = _judge(job)
        if job.check:
            pipe.send(_asking(job, judge, _CHECKED)(job.case))
        else:
            pipe.send(_with_memory(lambda case: answer_of(judge.judge(case)))(job.case))
    pipe.send(None)


def run(
    pipe: connection.Connection,
    job: Job,
    target: Target | None,
    answers: dict[str, Answer],
    seconds: float,
) -> None:
    """Search, and send each step; the last message is a `Done` or a `Stuck`."""
    from amp_fuzz.backends import BackendError
    from amp_fuzz.backends.registry import MissingBackend

    prepared()
    try:
        with quiet(), or_ends():
            _search(pipe, job, target, answers, seconds)
    except (BrokenPipeError, ConnectionResetError):
        pass  # the parent is done with us
    except MissingBackend as error:
        pipe.send(Stuck(str(error), missing=True))
    except (BackendError, _CheckError) as error:
        pipe.send(Stuck(str(error)))
    except Exception as error:
        pipe.send(Stuck(str(error), traceback=traceback.format_exc()))


_CHECKED = Target("check", parts=("kind",))


def _search(
    pipe: connection.Connection,
    job: Job,
    target: Target | None,
    answers: dict[str, Answer],
    seconds: float,
) -> None:
    judge = _judge(job)
    if not job.check:  # a case from a file may not be as the backend draws them
        job = replace(job, case=judge.backend.fit(job.case))
    record = job.finding or _record(job, target)
    if target is None:
        found = _target(job, judge)
        if isinstance(found, Stuck):
            pipe.send(found)
            return
        target, record = found
        pipe.send(target)
    memory = Memory(
        dict(answers),
        trying=lambda case: pipe.send(Trying(case.id)),
        said=lambda case, answer: pipe.send(Said(case.id, answer)),
    )
    ask, reference = _asking(job, judge, target), judge.backend.reference()
    tried = 0
    for event in shrink(
        job.case,
        target,
        ask,
        reference,
        seconds=seconds,
        pairs=not job.check and paired(judge.backend, job.case),
        memory=memory,
        blind=job.blind,
    ):
        if isinstance(event, Smaller):
            record = msgspec.structs.replace(record, minimised=event.case)
            pipe.send(Best(record, event.by, event.number))
        elif isinstance(event, Shrunk):
            tried = event.tried
            record = _final(job, judge, target, record, event)
            pipe.send(Done(record, tried, event.seconds, event.reason))


def _target(job: Job, judge: Judge) -> Stuck | tuple[Target, DivergenceRecord]:
    """Return the divergence to keep, and its record."""
    if job.check:
        if _asking(job, judge, _CHECKED)(job.case).said != "diverged":
            return Stuck("the command does not report the case itself as bad (exit code 0)")
        return _CHECKED, job.finding or _record(job, _CHECKED)
    verdict = judge.judge(job.case)
    if verdict.divergence is None:
        return Stuck(f"agrees with the reference on {job.backend}: nothing to minimise")
    if verdict.divergence.kind == "nondeterminism":
        return Stuck(
            "differs from run to run, so one run of a candidate proves nothing: give "
            "--check=CMD, a command that runs a case often enough (exit code 0: bad, 1: good)"
        )
    stage = stage_of(judge, verdict)
    family = job.finding.family if job.finding else ""
    record = msgspec.structs.replace(verdict.finding(family), stage=stage)
    return replace(Target.of(verdict, job.parts), stage=stage), record


def _record(job: Job, target: Target | None) -> DivergenceRecord:
    """Return the record of a divergence that only shows from outside the process."""
    kind = target.kind if target else ""
    return unanswered(job.backend, kind, job.case, kind)


def _final(
    job: Job, judge: Judge, target: Target, record: DivergenceRecord, end: Shrunk
) -> DivergenceRecord:
    op = record.op if target.kind in ("crash", "timeout") and record.op else end.op
    changes: dict[str, Any] = {"minimised": end.case, "op": op, "nearest": end.nearest}
    if not job.check and target.kind not in ("crash", "timeout"):
        last = confirmed(judge, target, end.chain)
        if last is not None:
            op = end.op if last.case == end.case else ""
            found = last.finding(record.family, last.case, op=op)
            part = "" if listed(target.known) else part_of(judge, last, target.stage)
            changes = {"case": job.case, "nearest": end.nearest, "stage": target.stage}
            changes["part"] = part
            changes["explicit"] = explicit_form(last.case, judge.backend.reference())
            record = msgspec.structs.replace(found, **changes)
            return fingerprinted(record if target.known else caused(judge, record, last, last))
    return fingerprinted(msgspec.structs.replace(record, **changes))
