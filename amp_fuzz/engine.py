"""The engine: draw cases, judge them, and say what happened as a stream of typed events.

`explore` is the whole loop in one process: `draw` draws, `Judge` judges.
`amp_fuzz.workers.run` spreads it over processes.
"""

from __future__ import annotations

import random
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import msgspec

from amp_fuzz.backends import Backend, backends
from amp_fuzz.backends.scripted import ScriptBackend
from amp_fuzz.case import Case, bare
from amp_fuzz.catalogue import CATALOGUE, Op, select
from amp_fuzz.explicit import explicit_form
from amp_fuzz.judge import Judge, Verdict, quiet
from amp_fuzz.known import Known
from amp_fuzz.minimize import Smaller
from amp_fuzz.records import CaseRecord, DivergenceRecord, EndRecord
from amp_fuzz.shrink import Memory, Shrunk, Target, asker, confirmed, part_of, shrink, stage_of
from amp_fuzz.strategies.drawing import draw_case, usable
from amp_fuzz.triage import fingerprint

__all__ = [
    "Crashed",
    "Event",
    "Failed",
    "Finding",
    "Finished",
    "Planned",
    "Progress",
    "Settings",
    "Suspected",
    "Task",
    "explore",
    "plan_tasks",
    "runnable",
    "signature_of",
]


@dataclass(frozen=True, slots=True)
class Settings:
    """How a run is done.

    cases: for each backend. ops: names of the ops that programs are drawn from. seconds: stop the
    run after so long; 0 is never. timeout: seconds after which a worker that answers nothing is
    ended. minimize: seconds for making each new finding smaller. fail_fast: stop at the first new
    divergence.
    """

    backends: tuple[str, ...]
    cases: int = 2000
    ops: tuple[str, ...] = ()
    seed: int = 0
    profile: str = "dev"
    workers: int = 1
    relations: Literal["none", "one", "all"] = "one"
    known: tuple[Known, ...] = ()
    seconds: float = 0.0
    timeout: float = 120.0
    minimize: float = 20.0
    max_statements: int = 12
    fail_fast: bool = False


@dataclass(frozen=True, slots=True)
class Task:
    """A part of a run: so many cases on one backend, each with a call of one of these ops."""

    backend: str
    family: str
    focus: tuple[str, ...]
    cases: int
    seed: int


@dataclass(frozen=True, slots=True)
class Planned:
    """So many cases more will be run on a backend."""

    backend: str
    cases: int


@dataclass(frozen=True, slots=True)
class Progress:
    """Cases that were judged since the last one, by outcome and by known entry; kernels reached."""

    backend: str
    family: str
    outcomes: Counter[str]
    known: Counter[str]
    kernels: frozenset[str]


@dataclass(frozen=True, slots=True)
class Finding:
    """A divergence, minimised. `new`: no known entry explains it."""

    record: DivergenceRecord
    new: bool


@dataclass(frozen=True, slots=True)
class Suspected:
    """A divergence as small as it is so far; a `Finding` follows, unless the run is cut short."""

    record: DivergenceRecord


@dataclass(frozen=True, slots=True)
class Finished:
    """A task came to its end."""

    task: Task
    record: EndRecord


@dataclass(frozen=True, slots=True)
class Crashed:
    """A worker died or hung while it ran a case; `record` says which."""

    record: DivergenceRecord
    detail: str


@dataclass(frozen=True, slots=True)
class Failed:
    """Something of ours went wrong in a worker: an internal error, or a full disk."""

    detail: str
    usage: bool = False


Event: TypeAlias = Planned | Progress | Suspected | Finding | Finished | Crashed | Failed


def seed_of(*parts: object) -> int:
    """Return a seed that depends on all parts and is the same on every machine."""
    return zlib.crc32("/".join(map(str, parts)).encode())


def plan_tasks(settings: Settings, chosen: Sequence[Backend]) -> list[Task]:
    """Split a run into tasks: for each backend, one a family, in proportion to its ops.

    The tasks of different backends alternate, so that a run that is cut short has seen them all.
    """
    rows: list[list[Task]] = []
    for backend in chosen:
        ops = runnable((CATALOGUE[name] for name in settings.ops or CATALOGUE), backend)
        families: dict[str, list[Op]] = {}
        for op in ops:
            families.setdefault(op.family, []).append(op)
        row = []
        left, total = settings.cases, len(ops)
        for family, members in families.items():
            share = round(left * len(members) / total) if total else 0
            left, total = left - share, total - len(members)
            if share:
                names = tuple(op.name for op in members)
                seed = seed_of(settings.seed, backend.name, family)
                row.append(Task(backend.name, family, names, share, seed))
        rows.append(row)
    return [row[i] for i in range(max(map(len, rows), default=0)) for row in rows if i < len(row)]


def runnable(ops: Iterable[Op], backend: Backend) -> tuple[Op, ...]:
    """Return the ops that a backend can run, each with the forms that it can be called in."""
    found = []
    for op in usable(ops, backend.device):
        forms = {f: text for f, text in op.forms.items() if backend.supports(op.name, f)}
        if forms:
            found.append(op if len(forms) == len(op.forms) else replace(op, forms=forms))
    return tuple(found)


def explore(
    task: Task,
    settings: Settings,
    *,
    seen: Callable[[Case], None] = lambda case: None,
    signatures: set[tuple[str, ...]] | None = None,
) -> Iterator[Event | CaseRecord]:
    """Run a task in this process, yielding a record for each case and an event for each finding.

    `seen` is told each case before it runs. `signatures` are the divergences that were already
    minimised; others like them are counted, not minimised again.
    """
    signatures = set() if signatures is None else signatures
    judge = Judge(backends()[task.backend], settings.known, settings.relations)
    for case in draw(task, settings):
        seen(case)
        with quiet():
            verdict = judge.judge(case)
        yield verdict.record(task.family)
        if verdict.divergence is not None:
            yield from _finding(judge, verdict, task, settings, signatures, seen)
        if settings.fail_fast and verdict.outcome == "diverged":
            break


def draw(task: Task, settings: Settings) -> Iterator[Case]:
    """Yield the cases of a task: what they are depends on the seed and the number of each alone.

    The strategies draw from the same grammar for Hypothesis. Here its bytes come from Python's
    generator instead: in Hypothesis 6.170 about a third of the programs that its generate phase
    draws repeat an earlier one (it mutates what it drew), and each takes four times as long
    (benchmarks/generation.py). Making a finding small is `minimize`'s part, not Hypothesis's.
    """
    backend = backends()[task.backend]
    ops = runnable(select(settings.ops or ("*",)), backend)
    focus = runnable(select(task.focus), backend) if task.focus else ()
    for number in range(task.cases):
        yield draw_case(
            random.Random(f"{task.seed}/{number}").randbytes,
            backend.device,
            trains=backend.trains,
            ops=ops,
            focus=focus,
            statements=settings.max_statements,
            fused=not backend.exact,
        )


def _finding(
    judge: Judge,
    verdict: Verdict,
    task: Task,
    settings: Settings,
    signatures: set[tuple[str, ...]],
    seen: Callable[[Case], None],
) -> Iterator[Event]:
    """Minimise a divergence whose like was not seen yet, and make its events."""
    assert verdict.divergence is not None
    rough = verdict.finding(task.family)
    signature = signature_of(rough)
    if signature in signatures:
        return
    signatures.add(signature)
    yield Suspected(rough)
    stage, record, last, without = "", rough, verdict, False
    with quiet():
        try:
            if verdict.divergence.kind != "nondeterminism":
                stage = stage_of(judge, verdict, seen)
                # A known one is explained already: its example need not be the smallest.
                limit = min(settings.minimize, 2.0) if verdict.known else settings.minimize
                if settings.minimize > 0:
                    for smaller, again in _smaller(judge, verdict, rough, stage, limit, seen):
                        record, last = smaller, again
                        yield Suspected(record)
                without = _bare(judge, last, seen)
        except KeyboardInterrupt:
            yield Finding(record, new=not verdict.known)
            raise
        small = record.minimised or verdict.case
        record = msgspec.structs.replace(
            record,
            minimised=small,
            explicit=_explicit(judge, small),
            stage=stage,
            bare=without,
        )
        record = msgspec.structs.replace(record, fingerprint=fingerprint(record).hash)
    final = signature_of(record)
    if final != signature and final in signatures:
        return
    signatures.add(final)
    yield Finding(record, new=not verdict.known)


def _smaller(
    judge: Judge,
    verdict: Verdict,
    rough: DivergenceRecord,
    stage: str,
    seconds: float,
    seen: Callable[[Case], None],
) -> Iterator[tuple[DivergenceRecord, Verdict]]:
    """Yield the record of a divergence with ever smaller cases; the last one is confirmed.

    With it comes the last verdict that is confirmed.
    """
    target = replace(Target.of(verdict), stage=stage)
    ask, reference = asker(judge, target), judge.backend.reference()
    for event in shrink(
        verdict.case,
        target,
        ask,
        reference,
        seconds=seconds,
        memory=Memory(trying=seen),
    ):
        if isinstance(event, Smaller):
            yield msgspec.structs.replace(rough, minimised=event.case), verdict
        elif isinstance(event, Shrunk):
            steps = len(event.chain) - 1
            last = confirmed(judge, target, event.chain) if steps else verdict
            if last is None:  # gone when it was run again: what was found stays as it was
                yield rough, verdict
                continue
            op = event.op if last.case == event.case else ""
            record = last.finding(rough.family, last.case, op=op)
            part = "" if verdict.known else part_of(judge, last, stage, seen)
            record = msgspec.structs.replace(
                record, case=verdict.case, nearest=event.nearest, part=part
            )
            yield record, last


def signature_of(record: DivergenceRecord) -> tuple[str, ...]:
    """Return what makes findings alike.

    A known one is kept once for each backend and kind, a new one once for each op that it shows at;
    errors that name no op, once for each text.
    """
    about = "" if record.known else record.op
    if record.kind == "raise" and not about:
        raised = f"{record.expected} -> {record.observed}"
        about = re.sub(r"[\d.]+|\[.*?\]|'.*?'", "#", raised)[:160]
    return (record.backend, record.kind, record.known, "" if record.known else about)


def _bare(judge: Judge, verdict: Verdict, seen: Callable[[Case], None]) -> bool:
    """Return whether a case diverges in the same way with its autocast contexts taken away."""
    assert verdict.divergence is not None
    plain = bare(verdict.case)
    seen(plain)
    relations: Literal["one", "all"] = "all" if verdict.divergence.kind == "relation" else "one"
    found = replace(judge, known=(), relations=relations).judge(plain).divergence
    return found is not None and found.kind == verdict.divergence.kind


def _explicit(judge: Judge, case: Case) -> str:
    try:
        text = explicit_form(case, judge.backend.reference())
        theirs = judge.backend.explicit(case) if isinstance(judge.backend, ScriptBackend) else ""
        return f"{text}\n{theirs}" if theirs else text
    except Exception as error:  # the explicit form explains; it must not cost the finding
        return f"# no explicit form: {type(error).__name__}: {error}"
