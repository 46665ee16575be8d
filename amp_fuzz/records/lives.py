"""The life of a finding: since when it is seen, whether it is fixed, whether it came back.

It is read from the records of the store's runs. A run that draws a cause sees it. A run that judges
the case of a finding again, and finds that both sides agree, says that it is fixed. The newest
torch decides.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import msgspec
from packaging.version import InvalidVersion, Version

from amp_fuzz.cases.case import Case
from amp_fuzz.records.schema import (
    GIVEN,
    CaseRecord,
    DivergenceRecord,
    Record,
    RunRecord,
    outcome_of,
)
from amp_fuzz.records.store import Store, StoreError

__all__ = ["Life", "Seen", "Step", "history", "lives"]

State: TypeAlias = Literal["new", "known", "backend", "fixed", "back"]
_decoder = msgspec.json.Decoder(Record)

# What stands in the lines of records that say something of a cause, or that judge a case again.
_WORDS = (
    b'{"type":"divergence"',
    b'"groups":["',
    *(f'"family":"{name}"'.encode() for name in GIVEN),
)
_BLOCK = 1 << 20  # bytes that are searched at once, which is faster than line by line


class Seen(NamedTuple):
    """A run: its id, when it started (UTC in ISO 8601), and its torch."""

    run: str
    started: str
    torch: str

    def __str__(self) -> str:
        return f"{self.started[:10]} on torch {self.torch}"


class _Said(NamedTuple):
    backend: str
    id: str
    outcome: str
    groups: tuple[str, ...]


class Life(NamedTuple):
    """What the runs of a store say of a cause.

    state: ``new``; ``known`` if a list of known bugs or the baseline explains its case now;
    ``backend`` if its case is now seen to differ in the same way without autocast;
    ``fixed`` if the last run that judged its case found that both sides agree; ``back`` if it was
    fixed and has been seen since. first, last: the first and the last run that saw it. fixed: the
    run that found it fixed last, or None.
    """

    state: State
    first: Seen
    last: Seen
    fixed: Seen | None

    def __str__(self) -> str:
        """Return the life in one line, without runs that say nothing more."""
        parts = [f"first seen {self.first}"]
        if self.fixed is not None:
            parts.append(f"fixed {self.fixed}")
        if self.state == "back":
            parts.append(f"back {self.last}")
        elif self.fixed is None and self.last.run != self.first.run:
            parts.append(f"last seen {self.last}")
        return ", ".join(parts)


def lives(
    store: Store,
    findings: Iterable[DivergenceRecord],
    until: str | None = None,
    *,
    unread: list[str] | None = None,
) -> dict[tuple[str, str], Life]:
    """Return the lives of findings by their backends and ids, as far as runs tell.

    until: the last run to consider; by default all. A run whose head cannot be read is left out, as
    is one whose tables cannot be; unread gets the error of such tables.
    """
    return history(store, findings, until, unread=unread)[1]


class Step(NamedTuple):
    """What a run changed: the causes that it saw first, found fixed, or saw again after that.

    open: those that no list explained and that were not fixed, after it.
    """

    seen: Seen
    new: int
    fixed: int
    back: int
    open: int


def history(
    store: Store,
    findings: Iterable[DivergenceRecord],
    until: str | None = None,
    *,
    unread: list[str] | None = None,
) -> tuple[list[Step], dict[tuple[str, str], Life]]:
    """Return what each run changed for findings, oldest first, and their `lives`."""
    kept = list(findings)
    causes = {_cause(f): f for f in kept}
    cases = {(f.backend, case.id): _cause(f) for f in kept for case in _cases(f)}
    found: dict[_Cause, Life] = {}
    steps = []
    for run, head in _runs(store, until):
        seen = Seen(run, head.started, head.versions.get("torch", "?"))
        try:
            told = _told(store, run) if kept else []
        except StoreError as error:
            if unread is not None:
                unread.append(str(error))
            continue
        turned = []
        for cause, outcomes in _met(told, causes, cases).items():
            was = found.get(cause)
            now = _after(was, causes[cause], seen, list(outcomes.values()))
            if now is not None:
                found[cause] = now
                turned += [now.state] if was is None or was.state != now.state else []
        new = sum(life.state == "new" and life.first == seen for life in found.values())
        still = sum(life.state in ("new", "back") for life in found.values())
        steps.append(Step(seen, new, turned.count("fixed"), turned.count("back"), still))
    return steps, {(f.backend, f.id): found[_cause(f)] for f in kept if _cause(f) in found}


_Cause: TypeAlias = tuple[str, str]


def _cause(finding: DivergenceRecord) -> _Cause:
    return finding.fingerprint or finding.id, finding.backend


def _cases(finding: DivergenceRecord) -> Iterator[Case]:
    yield finding.case
    if finding.minimised is not None:
        yield finding.minimised


def _runs(store: Store, until: str | None) -> Iterator[tuple[str, RunRecord]]:
    heads = []
    for run in store.runs():
        with suppress(StoreError):
            heads.append((run, store.run(run)))
    heads.sort(key=lambda pair: (pair[1].started, pair[0]))
    for run, head in heads:
        yield run, head
        if run == until:
            return


def _met(
    told: Iterable[_Said],
    causes: Collection[_Cause],
    cases: Mapping[tuple[str, str], _Cause],
) -> Mapping[_Cause, dict[str, str]]:
    """Return, for each cause that a run met, the outcomes of its cases by their ids.

    cases: the causes of the cases that findings keep, by backend and id.
    """
    met: defaultdict[_Cause, dict[str, str]] = defaultdict(dict)
    for said in told:
        own = {cause for name in said.groups if (cause := (name, said.backend)) in causes}
        again = cases.get((said.backend, said.id))
        if again is not None and (again in own or not said.groups):
            own.add(again)
        for cause in own:
            met[cause][said.id] = said.outcome
    return met


def _after(
    life: Life | None, finding: DivergenceRecord, seen: Seen, outcomes: list[str]
) -> Life | None:
    """Return a life after a run in which the cause, or its case, came to these outcomes.

    A run on an older torch than the newest that was asked changes nothing: one sweep has several,
    and a bug that the newest torch no longer has is fixed.
    """
    asked = (life.last, life.fixed) if life is not None else ()
    if any(other is not None and _older(seen, other) for other in asked):
        return life
    for outcome in ("diverged", "known", "backend"):
        if outcome in outcomes:
            back = life is not None and life.state in ("fixed", "back")
            state: State = outcome if outcome != "diverged" else "back" if back else "new"
            return Life(state, life.first if life else seen, seen, life.fixed if life else None)
    if life is None or finding.kind == "nondeterminism":  # what does not show proves nothing
        return life
    return life if life.state == "fixed" else life._replace(state="fixed", fixed=seen)


def _older(one: Seen, other: Seen) -> bool:
    """Return whether a run had an older torch; False if one of the versions is none."""
    try:
        return Version(one.torch).release < Version(other.torch).release
    except InvalidVersion:
        return False


def _told(store: Store, run: str) -> list[_Said]:
    return store.steady(run, lambda: list(_said(store, run)))


def _said(store: Store, run: str) -> Iterator[_Said]:
    """Yield the cases of a run that met a cause or were judged again; some of them twice."""
    if (tables := store.tables(run)) is not None:
        for path in tables.files["findings"]:
            columns = ("type", "backend", "case", "known", "fingerprint")
            for row in tables.rows(path, columns):
                if row["type"] == "divergence":
                    yield _diverged(row["backend"], row["case"], row["known"], row["fingerprint"])
        for path in tables.files["cases"]:
            for row in tables.rows(path, ("family", *_Said._fields)):
                if row["groups"] or row["family"] in GIVEN:
                    groups = tuple(row["groups"].split(",")) if row["groups"] else ()
                    yield _Said(row["backend"], row["id"], row["outcome"], groups)
    for path in store.lines(run):
        with suppress(OSError):
            for line in _lines(path):
                with suppress(msgspec.MsgspecError, ValueError, RecursionError):
                    yield from _of(_decoder.decode(line))


def _lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file in which one of the words stands, in order."""
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            block += file.readline()
            spans = set()
            for word in _WORDS:
                at = block.find(word)
                while at >= 0:
                    end = block.find(b"\n", at) + 1 or len(block)
                    spans.add((block.rfind(b"\n", 0, at) + 1, end))
                    at = block.find(word, end)
            for start, end in sorted(spans):
                yield block[start:end]


def _of(record: Record) -> Iterator[_Said]:
    match record:
        case CaseRecord() as r:
            yield _Said(r.backend, r.id, r.outcome, r.groups)
        case DivergenceRecord() as r:
            yield _diverged(r.backend, r.case.id, r.known, r.fingerprint)


def _diverged(backend: str, case: str, known: str, fingerprint: str) -> _Said:
    """Return what a divergence says. Of a process that died, nothing else tells."""
    return _Said(backend, case, outcome_of(known), (fingerprint,) if fingerprint else ())
