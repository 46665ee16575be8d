"""What a run writes down: one JSON line an event, append-only, readable without torch.

A run is a folder: ``run.json`` (a `RunRecord`) and ``records-*.jsonl``, one file a worker, of
`CaseRecord`, `DivergenceRecord`, `NoteRecord` and `EndRecord` lines.
"""

from __future__ import annotations

import re
from typing import Literal, TypeAlias, get_args

import msgspec

from amp_fuzz.cases.case import Case

__all__ = [
    "GIVEN",
    "NOTE_KINDS",
    "BackendRecord",
    "BaselineRecord",
    "CaseRecord",
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
    "unanswered",
]

RECORDS_FORMAT = 1

# Families of cases that are judged besides those that a run draws.
GIVEN = ("baseline", "findings", "corpus", "replay")

Outcome: TypeAlias = Literal["agreed", "raised", "known", "diverged"]
NoteKind: TypeAlias = Literal["precision", "autocast-raises", "portability"]
NOTE_KINDS: tuple[NoteKind, ...] = get_args(NoteKind)


class BackendRecord(msgspec.Struct, frozen=True):
    """A backend of a run: its name, device type, and version or why it could not be used.

    `kernels` are the autocast kernels that torch's dispatcher lists for the device and that can be
    reached; what `CaseRecord.kernels` covers of them is the run's kernel coverage.
    """

    name: str
    device: str
    detail: str
    kernels: tuple[str, ...] = ()
    unreachable: tuple[str, ...] = ()


class BaselineRecord(msgspec.Struct, frozen=True):
    """An entry of the project's baseline that speaks of a backend of the run.

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
    """A known bug that may explain divergences of a run: what a report says of it."""

    id: str
    what: str
    why: str
    link: str = ""


class RunRecord(msgspec.Struct, frozen=True):
    """The head of a run.

    started: UTC in ISO 8601. baseline: the file, where there is one. options: those without which
    its cases would be judged otherwise, as commands take them (``--plugins=mine``). fail_on: the
    kinds of notes that fail it. known: the bugs that are known of its backends.
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
    options: tuple[str, ...] = ()
    known: tuple[KnownRecord, ...] = ()


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
    where: the statement as text. message: one line, the observed effect. advice: one sentence, the
    remedy. device: devices joined by commas: those that run the statement (autocast-raises), or
    those that differ (portability); "" if none is named.
    """

    kind: NoteKind
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


# What varies from case to case. Dtypes as Python writes them stay: they are what a note is about.
_VARYING = re.compile(
    r"\[[^\]]*\]|(?<![\w.])(?:[vwxb]\d+|-?\d+(?:\.\d+)?)\b"
    r"|(?:c10::)?\b(?:Half|BFloat16|Float|Double|float|double)\b"
)


class NoteRecord(msgspec.Struct, frozen=True, tag="note"):
    """A note with the case that shows it: the smallest of its group that the process met so far."""

    note: Note
    case: Case
    family: str = ""

    @property
    def id(self) -> str:
        """The id of the case to replay."""
        return self.case.id


class CaseRecord(msgspec.Struct, frozen=True, tag="case"):
    """A case that was run. raised: both sides raised the same error. seconds: wall time by part.

    kind, op, known: of its divergence, as in `DivergenceRecord`, or "". Only the first
    divergence of its like is written out with its case; these say how often each came. at: the
    index in `kernels` of that op's kernel; -1 if it reached none. unjudged: how many values differ
    in a bit where no shadow could follow, so that nothing is said of them. uncompiled: it agreed,
    but the compiler had made no graph of it. groups: fingerprints of the causes that it shows, if
    it diverged in a way that no known list explains. platform: what the backend ran on, where it
    chooses that itself: ``cpu``, ``gpu`` or ``tpu`` of JAX. notes: at most one of each group.
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
    uncompiled: bool = False
    groups: tuple[str, ...] = ()
    platform: str = ""
    notes: tuple[Note, ...] = ()


class DivergenceRecord(msgspec.Struct, frozen=True, tag="divergence"):
    """A divergence, with the case that shows it.

    op, policy, dtypes: of the statement that diverges first ("" where no statement does: a
    gradient, the state). known: the id of the entry of the known list that explains it, or "".
    minimised: a smaller case with the same divergence. stage: of a compiler, the first rung of its
    ladder that diverges; "" where there is none. part: what of that rung is to blame, where torch's
    bisector can say: ``lowerings: avg_pool3d_backward``, ``emulate_precision_casts``, or "". bare:
    the case diverges in the same way with its autocast contexts taken away. nearest: a case like
    the minimised one that agrees with the reference. fingerprint: ten hex digits that name the
    cause; see `amp_fuzz.records.fingerprint`. general: other ops in the place of the guilty one
    show the same. overload: the kernel to blame, where there is one only. as_if: policies, or
    ``none``, with which instead of its own that kernel of autocast explains the whole; of a
    `general` one, what contexts act as if they said. left: parts of the state that contexts do not
    restore: with them restored, the case agrees. platform: as in `CaseRecord`.
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
    platform: str = ""
    output: str = ""

    @property
    def id(self) -> str:
        """The id of the case to replay: the minimised one if there is one."""
        return (self.minimised or self.case).id


def unanswered(
    backend: str, kind: str, case: Case, observed: str, family: str = "", op: str = ""
) -> DivergenceRecord:
    """Return the record of a case that its process died of, or never answered.

    op: in whose kernel it was then, if that is known.
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
    """A worker process died, or gave no answer, and that is no finding.

    Either its case gave an answer when another process ran it again, or the case was a candidate of
    the minimiser: a smaller case that nobody drew. of: then, the id of the case that was made
    smaller, else "". kind: ``crash`` or ``timeout``. detail: how the process ended. output: the
    last lines that it wrote.
    """

    backend: str
    family: str
    kind: str
    case: Case
    detail: str
    output: str = ""
    of: str = ""


def incident_line(record: IncidentRecord) -> str:
    """Return an incident in one line."""
    what = f"{record.detail}, case {record.case.id} of {record.backend}"
    if record.of:
        return f"{what}: a smaller form of {record.of}, which goes on without it"
    return f"{what}: it gave an answer when it ran again, so the machine is to blame, not the case"


class EndRecord(msgspec.Struct, frozen=True, tag="end"):
    """A worker, or the run, came to its end. planned: the cases that it was to run, if known.

    reason: ``resumed`` takes back an end before it, since the run goes on.
    """

    backend: str
    family: str
    cases: int
    seconds: float
    reason: Literal["done", "stopped", "interrupted", "crashed", "resumed"] = "done"
    planned: int = 0


Record: TypeAlias = CaseRecord | DivergenceRecord | NoteRecord | IncidentRecord | EndRecord
