"""The rows of a run's tables, made of its records: what reports count, and what Parquet holds.

docs/reference/store.md documents the columns. Nothing here needs pandas or pyarrow.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from amp_fuzz.records.fingerprint import ingredient
from amp_fuzz.records.schema import (
    DIVERGING,
    CaseRecord,
    DamageRecord,
    DivergenceRecord,
    EndRecord,
    IncidentRecord,
    KernelRecord,
    Note,
    NoteRecord,
    Record,
    outcome_of,
)

__all__ = [
    "ABSENT",
    "COLUMNS",
    "TABLES",
    "KernelRow",
    "Table",
    "alone",
    "diverged",
    "kernel_rows",
    "restored",
    "rows",
]

Table: TypeAlias = Literal["cases", "kernels", "findings"]
TABLES: tuple[Table, ...] = ("cases", "kernels", "findings")

# The columns of each table with their Arrow types; "word" is a string with few different values.
COLUMNS: Mapping[Table, Mapping[str, str]] = {
    "cases": {
        **dict.fromkeys(("run", "backend"), "word"),
        "row": "int64",
        "id": "string",
        **dict.fromkeys(("family", "outcome", "kind", "op", "policy", "dtypes"), "word"),
        **dict.fromkeys(("known", "groups", "platform"), "word"),
        "ops": "list<string>",
        "seconds": "map<string, double>",
        **dict.fromkeys(("unjudged", "varied"), "int64"),
        "uncompiled": "bool",
        "notes": "string",
        "recorded": "bool",
        "record": "string",
        "plan": "word",
        "excess": "double",
        "excess_op": "word",
        "hits": "int64",
        "promises": "list<string>",
    },
    "kernels": {
        **dict.fromkeys(("run", "backend"), "word"),
        **dict.fromkeys(("case", "at"), "int64"),
        **dict.fromkeys(("op", "policy", "dtypes", "outcome", "kind"), "word"),
        "calls": "int64",
    },
    "findings": {
        **dict.fromkeys(("run", "backend"), "word"),
        "row": "int64",
        "type": "word",
        **dict.fromkeys(("id", "case"), "string"),
        **dict.fromkeys(("family", "kind", "op", "policy", "dtypes"), "word"),
        **dict.fromkeys(("known", "fingerprint"), "word"),
        "record": "string",
    },
}

# The columns that tables of an earlier amp-fuzz lack, and what stands for them.
ABSENT: Mapping[str, str | float | tuple[str, ...]] = {
    "plan": "",
    "excess": -1.0,
    "excess_op": "",
    "hits": 0,
    "promises": (),
}

_Found: TypeAlias = Mapping[tuple[str, str], DivergenceRecord]
_encode = msgspec.json.Encoder().encode
_case_decoder = msgspec.json.Decoder(CaseRecord)
_notes_decoder = msgspec.json.Decoder(tuple[Note, ...])


class KernelRow(NamedTuple):
    """A kernel of a case. at: its index in the case's record; -1 if it is not there."""

    at: int
    op: str
    policy: str
    dtypes: str
    outcome: str
    kind: str
    calls: int


class Diverged(NamedTuple):
    """What a case that diverged has in its row: the first statement that diverged, and groups."""

    op: str
    policy: str
    dtypes: str
    groups: str


def kernel_rows(record: CaseRecord) -> Iterator[KernelRow]:
    """Yield the kernels of a case that did not diverge."""
    for at, k in enumerate(record.kernels):
        yield KernelRow(at, k.overload, k.policy, k.dtypes, record.outcome, "", k.count)


def diverged(
    record: CaseRecord, found: DivergenceRecord | None
) -> tuple[Diverged, list[KernelRow]]:
    """Return where a case diverged, and its kernels.

    found: its divergence, or None if the run has none of it. The kernel at which the divergence
    shows has the outcome of the case; the others were not compared and are ``elsewhere``.
    """
    guilty, at = _guilty(record, found), -1
    others = []
    for i, k in enumerate(record.kernels):
        if k == guilty:
            at = i
        else:
            others.append(KernelRow(i, k.overload, k.policy, k.dtypes, "elsewhere", "", k.count))
    op = found.op if found is not None and found.op else record.op
    groups = ",".join(record.groups) or (found.fingerprint if found is not None else "")
    return Diverged(op, guilty.policy, guilty.dtypes, groups), [
        *others,
        KernelRow(
            *(at, guilty.overload, guilty.policy, guilty.dtypes),
            *(record.outcome, record.kind, guilty.count),
        ),
    ]


def alone(found: DivergenceRecord) -> KernelRow:
    """Return the row of a divergence whose case has no record: its worker died, or it is lost."""
    outcome, policy = outcome_of(found.known), found.policy or "none"
    return KernelRow(-1, found.op, policy, found.dtypes, outcome, found.kind, 0)


def _guilty(record: CaseRecord, found: DivergenceRecord | None) -> KernelRecord:
    """Return the kernel at which a divergence shows, or one with the op's name.

    The divergence's record takes it from the minimised case, which is more precise than the case.
    """
    at = record.kernels[record.at] if 0 <= record.at < len(record.kernels) else None
    if found is None or not found.op:
        return at or KernelRecord(record.op, "none", "", 0)
    if at is not None and (at.policy, at.dtypes) == (found.policy, found.dtypes):
        return at
    return KernelRecord(found.op, found.policy, found.dtypes, 0)


# -- the tables -----------------------------------------------------------------------------------


def rows(
    run: str, records: Iterable[Record | DamageRecord], found: _Found
) -> Iterator[tuple[Table, tuple[object, ...]]]:
    """Yield the rows of a run in order, each with its table: a value for each of `COLUMNS`.

    found: the divergences of the run by backend and id of the case.
    """
    told: set[tuple[str, str]] = set()
    row = -1
    for row, record in enumerate(records):
        if not isinstance(record, CaseRecord):
            yield "findings", (run, *_finding(row, record))
            continue
        head: tuple[object, ...] = record.id, record.family, record.outcome, record.kind
        if record.outcome in DIVERGING:
            key = record.backend, record.id
            told.add(key)
            where, kernels = diverged(record, found.get(key))
            more = where.op, where.policy, where.dtypes, record.known, where.groups
        else:
            head, more = (record.id, record.family, record.outcome, ""), ("",) * 5
            kernels = list(kernel_rows(record))
        last = (
            *(record.platform, record.ops, tuple(record.seconds.items())),
            *(record.unjudged, record.varied, record.uncompiled),
            *(_encode(record.notes).decode() if record.notes else None, True),
            None if _plain(record) else _encode(record).decode(),
            *(record.plan, record.excess, record.excess_op, record.hits, record.promises),
        )
        yield "cases", (run, record.backend, row, *head, *more, *last)
        for k in kernels:
            yield "kernels", (run, record.backend, row, *k)
    for (backend, case), divergence in found.items():
        if (backend, case) in told:
            continue
        row += 1
        k = alone(divergence)
        yield (
            "cases",
            (
                *(run, backend, row, case, divergence.family, k.outcome, k.kind),
                *(k.op, k.policy, k.dtypes, divergence.known, divergence.fingerprint),
                *(divergence.platform, (), (), 0, 0, False, None, False, None),
                *(ingredient(divergence.case), -1.0, "", 0, ()),
            ),
        )
        yield "kernels", (run, backend, row, *k)


def _plain(record: CaseRecord) -> bool:
    """Return whether a row has all of a case: those that diverged have some of it as derived."""
    of = record.kind, record.op, record.known, record.at, record.groups
    return of == ("", "", "", -1, ()) and record.outcome in ("agreed", "raised")


def _finding(row: int, record: Record | DamageRecord) -> tuple[object, ...]:
    """Return a row of ``findings`` after its run."""
    text = _encode(record).decode()
    match record:
        case DivergenceRecord() as r:
            of = (r.id, r.case.id, r.family, r.kind, r.op, r.policy, r.dtypes)
            return r.backend, row, "divergence", *of, r.known, r.fingerprint, text
        case NoteRecord(note=n, case=case):
            of = (record.id, case.id, record.family, n.kind, n.op, "", "")
            return n.backend, row, "note", *of, "", "", text
        case IncidentRecord() as i:
            of = (i.case.id, i.case.id, i.family, i.kind, "", "", "")
            return i.backend, row, "incident", *of, "", "", text
        case EndRecord() as e:
            return e.backend, row, "end", "", "", e.family, e.reason, *[""] * 5, text
        case _:
            return "", row, "damage", *[""] * 9, text


def restored(row: Mapping[str, object], kernels: tuple[KernelRecord, ...]) -> CaseRecord:
    """Return the record of a case, from its row and the kernels that it recorded, in order."""
    if (text := row["record"]) is not None:
        return _case_decoder.decode(str(text))
    case = msgspec.convert(
        {
            **{name: row[name] for name in ("id", "backend", "family", "outcome", "platform")},
            **{name: row[name] for name in ("ops", "unjudged", "varied", "uncompiled")},
            **{name: row[name] for name in ABSENT if name in row},
            "seconds": dict(row["seconds"]),  # type: ignore[call-overload]
            "notes": _notes_decoder.decode(str(row["notes"])) if row["notes"] else (),
            "kernels": (),
            "type": "case",
        },
        CaseRecord,
    )
    return msgspec.structs.replace(case, kernels=kernels)
