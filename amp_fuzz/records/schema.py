"""The records of a run: one JSON line for each event, append-only, readable without torch.

A run is a folder: ``run.json`` (a `RunRecord`) and ``records-*.jsonl``, one file for each worker,
with `CaseRecord`, `DivergenceRecord`, `NoteRecord`, `IncidentRecord` and `EndRecord` lines. A
compacted run has ``tables-N`` in place of the lines; docs/reference/store.md documents both.
"""

from __future__ import annotations

import re
from typing import Literal, TypeAlias, get_args

import msgspec

from amp_fuzz.cases.case import Case

__all__ = [
    "AIMED",
    "DIVERGING",
    "GIVEN",
    "MOST_EXCESS",
    "NOTE_KINDS",
    "OPEN",
    "OWN",
    "BackendRecord",
    "BaselineRecord",
    "CaseRecord",
    "DamageRecord",
    "DivergenceRecord",
    "EndRecord",
    "IncidentRecord",
    "KernelRecord",
    "KnownRecord",
    "Note",
    "NoteKind",
    "NoteRecord",
    "Outcome",
    "Record",
    "RunRecord",
    "incident_line",
    "listed",
    "outcome_of",
    "unanswered",
]

RECORDS_FORMAT = 1
MOST_EXCESS = 1e9  # JSON has no infinity

# Families of cases that a run judges in addition to those that it draws.
GIVEN = ("baseline", "findings", "corpus", "replay")

AIMED = "coverage"
"""The family of cases that aim at autocast kernels which no case has reached yet."""

Outcome: TypeAlias = Literal["agreed", "raised", "backend", "known", "diverged"]
DIVERGING: tuple[Outcome, ...] = ("backend", "known", "diverged")

OWN: Literal["backend"] = "backend"
"""In the place of a known bug: the backend differs in the same way without autocast."""

OPEN = "open-"
"""The beginning of the id of a finding that the package lists and nobody has explained."""


def listed(known: str) -> bool:
    """Return whether a list explains a divergence, by the ids that its record names."""
    return known not in ("", OWN)


def outcome_of(known: str) -> Outcome:
    """Return the outcome of a case that diverged, by the ids that its record names."""
    if listed(known):
        return "known"
    return "backend" if known else "diverged"


NoteKind: TypeAlias = Literal["precision", "autocast-raises", "portability", "context"]
NOTE_KINDS: tuple[NoteKind, ...] = get_args(NoteKind)


class BackendRecord(msgspec.Struct, frozen=True):
    """A backend of a run: its name, device type, and version or why it could not be used.

    `kernels` are the reachable autocast kernels that torch's dispatcher lists for the device. The
    run's kernel coverage is the part of them that occurs in `CaseRecord.kernels`. `implements` are
    the facts by which promises of torch's documents are about it.
    """

    name: str
    device: str
    detail: str
    kernels: tuple[str, ...] = ()
    unreachable: tuple[str, ...] = ()
    implements: tuple[str, ...] = ()


class BaselineRecord(msgspec.Struct, frozen=True):
    """An entry of the project's baseline for a backend of the run.

    case: the id of its case, which the run judges again. expires: in ISO 8601, or "". expired:
    whether that day had passed when the run began.
    """

    id: str
    fingerprint: str
    backend: str
    kind: str
    case: str
    title: str
    reason: str
    link: str = ""
    expires: str = ""
    expired: bool = False


class KnownRecord(msgspec.Struct, frozen=True):
    """A known bug that may explain divergences of a run, as reports show it."""

    id: str
    what: str
    why: str
    link: str = ""


class RunRecord(msgspec.Struct, frozen=True):
    """The head of a run.

    started: UTC in ISO 8601. baseline: the file, if there is one. options: those that affect how
    its cases are judged, as commands take them (``--plugins=mine``). fail_on: what else fails it:
    kinds of notes, ``incident``, ``backend``. require_coverage: the percentage of autocast kernels
    that each backend must reach. known: the known bugs of its backends. machine: processor, cores,
    memory. commits: of ``amp-fuzz``, if it ran from a checkout, and of the ``project`` in whose
    checkout the run was started. branch: of the latter. flags: settings that change numbers
    (docs/reference/settings.md) when the run began: the expression that reads each, and its value.
    configuration: the options that are not at their default, as text. threshold: the excess over
    which a value diverges. A run of an earlier amp-fuzz has none of these six.
    """

    id: str
    seed: int
    profile: str
    backends: tuple[BackendRecord, ...]
    versions: dict[str, str]
    started: str
    command: str = ""
    format: int = RECORDS_FORMAT
    baseline: str = ""
    entries: tuple[BaselineRecord, ...] = ()
    fail_on: tuple[str, ...] = ()
    require_coverage: float = 0.0
    options: tuple[str, ...] = ()
    known: tuple[KnownRecord, ...] = ()
    machine: dict[str, str] = {}
    commits: dict[str, str] = {}
    branch: str = ""
    flags: dict[str, str] = {}
    configuration: dict[str, str] = {}
    threshold: float = 0.0


class KernelRecord(msgspec.Struct, frozen=True, array_like=True):
    """An autocast kernel that a case reached, and how often; dtypes are joined by commas."""

    overload: str
    policy: str
    dtypes: str
    count: int


class Note(msgspec.Struct, frozen=True):
    """A fact about a case that is neither agreement nor divergence, and fails nothing by default.

    precision: a compiler left out a rounding. autocast-raises: the program runs without autocast
    and raises under it. portability: another device's policies raise or round where these do not.
    context: a context does something else on another device, or nothing.
    Of `amp_fuzz.check` alone, not-restored: state that a call changed cannot be restored;
    stale-cast: a weight changes inside an autocast context, and is used through its old cast then;
    not-finite: a value is NaN, infinite or 0 under autocast, and not without.
    where: the statement as text. message: the observed effect in one line. advice: the remedy in
    one sentence. device: the devices, joined by commas, that run the statement (autocast-raises)
    or that differ (portability, context); "" if there is none.
    """

    kind: NoteKind | Literal["not-restored", "stale-cast", "not-finite"]
    backend: str
    op: str
    where: str
    message: str
    advice: str
    device: str = ""

    @property
    def group(self) -> tuple[str, str, str]:
        """Kind, op, and message without numbers, shapes and C++ dtypes: equal for one cause."""
        return self.kind, self.op, _VARYING.sub("#", self.message)


# These vary from case to case. Python dtypes stay, since a note is about them.
_VARYING = re.compile(
    r"\[[^\]]*\]|(?<![\w.])(?:[vwxb]\d+|-?\d+(?:\.\d+)?)\b"
    r"|(?:c10::)?\b(?:Half|BFloat16|Float|Double|float|double)\b"
)


class NoteRecord(msgspec.Struct, frozen=True, tag="note"):
    """A note with the smallest case of its group that the process has met so far."""

    note: Note
    case: Case
    family: str = ""

    @property
    def id(self) -> str:
        """The id of the case to replay."""
        return self.case.id


class CaseRecord(msgspec.Struct, frozen=True, tag="case"):
    """A case that was run. raised: both sides raised the same error. seconds: wall time by part.

    kind, op, known: of its divergence, as in `DivergenceRecord`, or "". Only the first of similar
    divergences is recorded with its case; these fields count the others. at: the index in `kernels`
    of that op's kernel, or -1. unjudged: how many values differ in a bit where no shadow could
    follow, so they are not judged. varied: how many differ in a bit because they are computed by
    kernels that torch documents as nondeterministic. uncompiled: it agreed, but the compiler made
    no graph of it.
    groups: fingerprints of its causes, if it diverged and no known list explains it; it counts for
    the first. outcome: ``backend`` if the backend differs in the same way without autocast.
    platform: the platform of a backend that chooses one itself: ``cpu``, ``gpu`` or ``tpu`` for
    JAX. notes: at most one of each group. plan: its ingredients, as `fingerprint.ingredient` names
    them. excess: the largest that was measured, at most `MOST_EXCESS`; -1 if no value differed in a
    bit or no shadow could follow. excess_op: the op that computed that value, or "". hits: how many
    artefacts the backend loaded from a compiler's caches. promises: the ids of those of torch's
    documents that it could have falsified; see `amp_fuzz.records.promises`.
    """

    id: str
    backend: str
    family: str
    outcome: Outcome
    ops: tuple[str, ...]
    kernels: tuple[KernelRecord, ...]
    seconds: dict[str, float]
    kind: str = ""
    op: str = ""
    known: str = ""
    at: int = -1
    unjudged: int = 0
    varied: int = 0
    uncompiled: bool = False
    groups: tuple[str, ...] = ()
    platform: str = ""
    notes: tuple[Note, ...] = ()
    plan: str = ""
    excess: float = -1.0
    excess_op: str = ""
    hits: int = 0
    promises: tuple[str, ...] = ()


class DivergenceRecord(msgspec.Struct, frozen=True, tag="divergence"):
    """A divergence, with the case that shows it.

    op, policy, dtypes: of the first statement that diverges ("" if none does: a gradient, the
    state). known: the id of the known entry that explains it, `OWN`, or "". minimised: a smaller
    case with the same divergence. stage: for a compiler, the first rung of its ladder that
    diverges, or "". part: the guilty part of that rung, if torch's bisector names one: ``lowerings:
    avg_pool3d_backward``, ``emulate_precision_casts``, or "". bare: the case diverges in the same
    way without its autocast contexts. nearest: a case similar to the minimised one that agrees with
    the reference. fingerprint: ten hex digits that name the cause; see
    `amp_fuzz.records.fingerprint`. general: other ops in place of the guilty one show the same.
    overload: the guilty kernel, if there is only one. as_if: the policies, or ``none``, that would
    explain the whole case in place of that kernel's own; for a `general` divergence, the settings
    that contexts act as if they had. left: parts of the state that contexts do not restore; with
    them restored, the case agrees. like: for what is the backend's own, the known bug of its kind
    and op, or "". platform: as in `CaseRecord`. joins: an earlier fingerprint of the finding,
    before the run met the cause that explains it: cases of both are one group.
    """

    backend: str
    kind: str
    where: str
    op: str
    policy: str
    dtypes: str
    expected: str
    observed: str
    known: str
    case: Case
    minimised: Case | None = None
    explicit: str = ""
    family: str = ""
    stage: str = ""
    part: str = ""
    bare: bool = False
    nearest: Case | None = None
    fingerprint: str = ""
    general: bool = False
    overload: str = ""
    as_if: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    like: str = ""
    platform: str = ""
    output: str = ""
    joins: str = ""

    @property
    def id(self) -> str:
        """The id of the case to replay: the minimised one if there is one."""
        return (self.minimised or self.case).id


def unanswered(
    backend: str, kind: str, case: Case, observed: str, family: str = "", op: str = ""
) -> DivergenceRecord:
    """Return the record of a case that killed its process, or gave no answer.

    op: the op whose kernel was running, if known.
    """
    return DivergenceRecord(
        backend=backend,
        kind=kind,
        where="",
        op=op,
        policy="",
        dtypes="",
        expected="an answer",
        observed=observed,
        known="",
        case=case,
        family=family,
    )


class IncidentRecord(msgspec.Struct, frozen=True, tag="incident"):
    """A worker process died or gave no answer, but this is not a finding.

    Its case gave an answer in another process, or was a candidate of the minimiser, or the device
    had too little memory for it. of: for a candidate, the id of the case being minimised, else "".
    kind: ``crash``, ``timeout``, or ``memory`` if the device ran out of it. detail: how the process
    ended. output: the last lines that it wrote. unjudged: there was too little memory even for the
    case alone. unconfirmed: the time was up before its case could run again.
    """

    backend: str
    family: str
    kind: str
    case: Case
    detail: str
    output: str = ""
    of: str = ""
    unjudged: bool = False
    unconfirmed: bool = False


def incident_line(record: IncidentRecord) -> str:
    """Return an incident in one line."""
    what = f"{record.detail}, case {record.case.id} of {record.backend}"
    if record.of:
        return f"{what}: a smaller form of {record.of}, which goes on without it"
    if record.unjudged:
        return f"{what}: also when it ran alone, so it was not judged"
    if record.unconfirmed:
        return f"{what}: the time was up before it could run again, so it was not judged"
    return f"{what}: it gave an answer when it ran again, so the case is not to blame"


class EndRecord(msgspec.Struct, frozen=True, tag="end"):
    """The end of a worker or of the run. planned: the cases that it had to run, if known.

    reason: ``resumed`` cancels an earlier end, since the run continues.
    """

    backend: str
    family: str
    cases: int
    seconds: float
    reason: Literal["done", "stopped", "interrupted", "crashed", "resumed"] = "done"
    planned: int = 0


class DamageRecord(msgspec.Struct, frozen=True, tag="damage"):
    """A line that could not be read: only in the tables of a run. error: names file and number."""

    error: str


Record: TypeAlias = CaseRecord | DivergenceRecord | NoteRecord | IncidentRecord | EndRecord
