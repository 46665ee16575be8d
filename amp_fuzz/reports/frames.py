"""Records as pandas DataFrames, and the tables built from them."""

from __future__ import annotations

import math
import re
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal

import pandas as pd

from amp_fuzz.cases.program import statements
from amp_fuzz.records.fingerprint import ingredient
from amp_fuzz.records.rows import KernelRow, alone, diverged, kernel_rows
from amp_fuzz.records.schema import (
    DIVERGING,
    CaseRecord,
    DamageRecord,
    DivergenceRecord,
    EndRecord,
    IncidentRecord,
    Note,
    NoteRecord,
    Outcome,
    Record,
    RunRecord,
    outcome_of,
)
from amp_fuzz.records.store import Store
from amp_fuzz.reports.sums import summed

__all__ = [
    "Noted",
    "RunData",
    "cause_of",
    "coverage",
    "findings",
    "groups",
    "load",
    "outcomes",
    "plan_parts",
    "seconds",
    "summary",
]

_CASES = (
    "id", "backend", "family", "outcome", "kind", "op", "policy", "dtypes", "known", "groups",
)  # fmt: skip
_KERNELS = ("op", "policy", "dtypes", "backend", "outcome", "kind", "cases", "calls")
_OPS = ("backend", "op", "cases")
_PARTS = ("backend", "part", "seconds")
_DIVERGENCES = (
    "backend", "kind", "where", "op", "policy", "dtypes", "expected", "observed", "known",
    "family", "case", "id", "statements",
)  # fmt: skip
_ENDS = ("backend", "family", "cases", "seconds", "reason", "planned")
_GROUP = ["backend", "kind", "op", "policy", "dtypes", "known"]


@dataclass(frozen=True, slots=True)
class Noted:
    """The notes of one group. record: the one with the smallest case, or None if none is left.

    backends: the number of cases by backend.
    """

    note: Note
    record: NoteRecord | None
    backends: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class RunData:
    """The records of a run.

    cases: one row for each case; op, policy, dtypes are those of the first statement that diverged;
    groups are the fingerprints of its causes, joined by commas.
    kernels: op (the overload), policy, dtypes, backend, outcome, kind, with the numbers of cases
    that reached it and of calls. A case that diverged is ``backend``, ``known`` or ``diverged`` in
    the row of its divergence; its other kernels were not compared and are ``elsewhere``.
    ops: the catalogue's ops by backend. parts: seconds by backend and part of the work.
    divergences: one row for each of `records`, in order. ends: one row for each task that ended.
    damage: one line for each unreadable record. unjudged: by backend, how many values differ in a
    bit and could not be judged, and in how many cases. varied: the same of values that differ as
    torch documents. uncompiled: by backend, how many cases agreed without being compiled. hits: how
    many artefacts were loaded from a compiler's caches, in how many cases. notes: by group.
    incidents: workers that died without a finding.
    plans: by kernel, policy and ingredient of the plan, how often it was compared, on any backend.
    had: by backend and ingredient of the plan, how many cases had it.
    promised: by backend and promise of torch's documents, how many cases could have falsified it.
    excess: by backend, the largest excess of each case in which one was measured. farthest: the
    largest by backend and the op at which it was.
    state: ``killed`` if nothing runs and the end of the run was never recorded.
    """

    run: RunRecord
    store: Store
    cases: pd.DataFrame
    kernels: pd.DataFrame
    ops: pd.DataFrame
    parts: pd.DataFrame
    divergences: pd.DataFrame
    ends: pd.DataFrame
    records: tuple[DivergenceRecord, ...]
    damage: tuple[str, ...] = ()
    unjudged: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    varied: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    uncompiled: Mapping[str, int] = field(default_factory=dict)
    hits: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    incidents: tuple[IncidentRecord, ...] = ()
    state: Literal["ended", "running", "killed"] = "ended"
    notes: tuple[Noted, ...] = ()
    plans: Mapping[tuple[str, str, str], int] = field(default_factory=dict)
    had: Mapping[tuple[str, str], int] = field(default_factory=dict)
    promised: Mapping[tuple[str, str], int] = field(default_factory=dict)
    excess: Mapping[str, Sequence[float]] = field(default_factory=dict)
    farthest: Mapping[tuple[str, str], float] = field(default_factory=dict)

    @property
    def backends(self) -> list[str]:
        """The chosen backends, then others that occur in records."""
        seen = [*self.cases["backend"].unique(), *self.ends["backend"]]
        return list(dict.fromkeys([*(b.name for b in self.run.backends), *filter(None, seen)]))


def load(store: Store, run_id: str) -> RunData:
    """Read a run. Raises `StoreError` if it is missing or its head unreadable.

    An unreadable record is left out and named in `RunData.damage`. An unfinished last line, as a
    killed worker leaves it, is left out silently.
    """
    run = store.run(run_id)
    tally, cases = store.steady(run_id, lambda: _tallied(store, run_id))
    data = tally.finish(run, store, cases)
    whole = data.ends.loc[data.ends["backend"] == "", "reason"]
    if len(whole) and whole.iloc[-1] != "resumed":
        return data
    return replace(data, state="running" if store.is_running(run_id) else "killed")


def _tallied(store: Store, run_id: str) -> tuple[Tally, pd.DataFrame | None]:
    """Return what a run's records sum up to, and the cases of its tables."""
    tally, tables = Tally(), store.tables(run_id)
    if tables is not None and not store.fresh(run_id):
        return tally, summed(tables, tally, _CASES)
    for record in store.salvaged(run_id, []):  # the lines may be about cases in the tables
        tally.add(record)
    return tally, None


@cache
def plan_parts(plan: str) -> frozenset[str]:
    """Return the ingredients of a plan: all settings are one."""
    return frozenset(_SETTINGS.sub("settings", word) for word in plan.split("+") if word)


_SETTINGS = re.compile(r"settings=.*", re.DOTALL)


def _doubles() -> array[float]:
    return array("d")


@dataclass(slots=True)
class Tally:
    """Sums up records while reading, so memory grows with cases, not with their kernels."""

    cases: list[tuple[str, ...]] = field(default_factory=list)
    diverging: list[CaseRecord] = field(default_factory=list)
    kernels: Counter[tuple[str, ...]] = field(default_factory=Counter)
    calls: Counter[tuple[str, ...]] = field(default_factory=Counter)
    ops: Counter[tuple[str, str]] = field(default_factory=Counter)
    parts: defaultdict[tuple[str, str], array[float]] = field(
        default_factory=lambda: defaultdict(_doubles)
    )
    records: list[DivergenceRecord] = field(default_factory=list)
    ends: list[EndRecord] = field(default_factory=list)
    damage: list[str] = field(default_factory=list)
    incidents: list[IncidentRecord] = field(default_factory=list)
    unjudged: dict[str, tuple[int, int]] = field(default_factory=dict)
    varied: dict[str, tuple[int, int]] = field(default_factory=dict)
    uncompiled: Counter[str] = field(default_factory=Counter)
    hits: dict[str, tuple[int, int]] = field(default_factory=dict)
    notes: dict[tuple[str, ...], tuple[Note, Counter[str]]] = field(default_factory=dict)
    plans: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    words: Counter[tuple[str, str, str]] = field(default_factory=Counter)  # of the plans in tables
    had: Counter[tuple[str, str]] = field(default_factory=Counter)  # whole plans by backend
    promised: Counter[tuple[str, str]] = field(default_factory=Counter)
    excess: defaultdict[str, array[float]] = field(default_factory=lambda: defaultdict(_doubles))
    farthest: dict[tuple[str, str], float] = field(default_factory=dict)
    noted: dict[tuple[str, ...], NoteRecord] = field(default_factory=dict)

    def add(self, record: Record | DamageRecord) -> None:
        match record:
            case CaseRecord():
                self._case(record)
            case DivergenceRecord():
                self.records.append(record)
            case NoteRecord():
                self._note(record)
            case EndRecord():
                self.ends.append(record)
            case IncidentRecord():
                self.incidents.append(record)
            case DamageRecord():
                self.damage.append(record.error)

    def _note(self, record: NoteRecord) -> None:
        """Keep the smallest case of each group."""
        other = self.noted.get(record.note.group)
        if other is None or _size(record) < _size(other):
            self.noted[record.note.group] = record

    def _case(self, record: CaseRecord) -> None:
        self.annotate(record.notes, record.backend)
        self.had[record.backend, record.plan] += 1
        self.promised.update((record.backend, promise) for promise in record.promises)
        for name in ("varied", "unjudged", "hits"):
            if some := getattr(record, name):
                sums = getattr(self, name)
                values, cases = sums.get(record.backend, (0, 0))
                sums[record.backend] = values + some, cases + 1
        if record.excess >= 0:
            self.excess[record.backend].append(record.excess)
            self.reach(record.backend, record.excess_op, record.excess)
        if record.uncompiled:
            self.uncompiled[record.backend] += 1
        self.ops.update((record.backend, op) for op in set(record.ops))
        for part, spent in record.seconds.items():
            self.parts[record.backend, part].append(spent)
        if record.outcome in DIVERGING:
            self.diverging.append(record)  # held until all records are read
            return
        for kernel in kernel_rows(record):
            self._count(kernel, record.backend, record.plan)
        head = (record.id, record.backend, record.family, record.outcome)
        self.cases.append((*head, "", "", "", "", "", ""))

    def annotate(self, notes: Iterable[Note], backend: str, cases: int = 1) -> None:
        """Count the notes of so many cases."""
        for note in notes:
            _, counts = self.notes.setdefault(note.group, (note, Counter()))
            counts[backend] += cases

    def _diverged(self, record: CaseRecord, found: DivergenceRecord | None) -> None:
        where, kernels = diverged(record, found)
        for kernel in kernels:
            self._count(kernel, record.backend, record.plan)
        head = (record.id, record.backend, record.family, record.outcome, record.kind)
        rest = (where.op, where.policy, where.dtypes, record.known, where.groups)
        self.cases.append((*head, *rest))

    def _alone(self, found: DivergenceRecord) -> None:
        """Count a divergence whose case has no record."""
        kernel = alone(found)
        self._count(kernel, found.backend, plan="")
        self.had[found.backend, ingredient(found.case)] += 1
        head = (found.case.id, found.backend, found.family, kernel.outcome, kernel.kind)
        rest = (kernel.op, kernel.policy, kernel.dtypes, found.known, found.fingerprint)
        self.cases.append((*head, *rest))

    def reach(self, backend: str, op: str, excess: float) -> None:
        """Note an excess at an op."""
        self.farthest[backend, op] = max(excess, self.farthest.get((backend, op), 0.0))

    def _count(self, kernel: KernelRow, backend: str, plan: str) -> None:
        if kernel.outcome != "elsewhere" and kernel.at >= 0:
            self.plans[kernel.op, kernel.policy, plan] += 1
        of = (kernel.op, kernel.policy, kernel.dtypes, backend, kernel.outcome, kernel.kind)
        self.kernels[of] += 1
        self.calls[of] += kernel.calls

    def _words(self) -> Counter[tuple[str, str, str]]:
        found = Counter(self.words)
        for (op, policy, plan), count in self.plans.items():
            for word in plan_parts(plan):
                found[op, policy, word] += count
        return found

    def _ingredients(self) -> Counter[tuple[str, str]]:
        found: Counter[tuple[str, str]] = Counter()
        for (backend, plan), count in self.had.items():
            for word in plan_parts(plan):
                found[backend, word] += count
        return found

    def settle(self) -> pd.DataFrame:
        """Add the records that were held, and return the cases."""
        found = {(r.backend, r.case.id): r for r in self.records}
        for record in self.diverging:
            self._diverged(record, found.get((record.backend, record.id)))
        recorded = {(r.backend, r.id) for r in self.diverging}
        for key, divergence in found.items():
            if key not in recorded:
                self._alone(divergence)
        frame = _frame(self.cases, _CASES)
        return frame.astype(dict.fromkeys(_CASES[1:], "category"))

    def finish(self, run: RunRecord, store: Store, cases: pd.DataFrame | None) -> RunData:
        """Return the frames. cases: those of tables, which are summed up already."""
        if cases is None:
            cases = self.settle()
        kernels = [(*key, n, self.calls[key]) for key, n in self.kernels.items()]
        ends = [(e.backend, e.family, e.cases, e.seconds, e.reason, e.planned) for e in self.ends]
        return RunData(
            run=run,
            store=store,
            cases=cases,
            kernels=_frame(kernels, _KERNELS, cases=int, calls=int),
            ops=_frame([(*k, n) for k, n in self.ops.items()], _OPS, cases=int),
            parts=_frame(
                # Exact sums do not depend on the order.
                [(*k, math.fsum(n)) for k, n in sorted(self.parts.items(), key=_part)],
                _PARTS,
                seconds=float,
            ),
            divergences=_frame([_row(r) for r in self.records], _DIVERGENCES, statements=int),
            ends=_frame(ends, _ENDS, cases=int, seconds=float, planned=int),
            records=tuple(self.records),
            damage=tuple(self.damage),
            unjudged=dict(sorted(self.unjudged.items())),
            varied=dict(sorted(self.varied.items())),
            uncompiled=dict(sorted(self.uncompiled.items())),
            hits=dict(sorted(self.hits.items())),
            incidents=tuple(self.incidents),
            notes=tuple(
                Noted(note, self.noted.get(group), dict(counts))
                for group, (note, counts) in self.notes.items()
            ),
            plans=self._words(),
            had=self._ingredients(),
            promised=dict(sorted(self.promised.items())),
            excess=dict(self.excess),
            farthest=dict(self.farthest),
        )


def _size(record: NoteRecord) -> tuple[int, str]:
    return len(record.case.json()), record.id


LAPS = ("reference", "backend", "oracle", "relations", "confirm")


def _part(item: tuple[tuple[str, str], object]) -> tuple[int, str, str]:
    (backend, part), _ = item
    return LAPS.index(part) if part in LAPS else len(LAPS), part, backend


def _frame(
    rows: Sequence[tuple[object, ...]], columns: Sequence[str], **types: type
) -> pd.DataFrame:
    """Return a frame whose columns have their type even when it has no rows."""
    frame = pd.DataFrame(rows, columns=list(columns))
    return frame.astype({c: types.get(c, object) for c in columns})


def _row(record: DivergenceRecord) -> tuple[object, ...]:
    fields = [getattr(record, name) for name in _DIVERGENCES[:10]]
    small = record.minimised or record.case
    return (*fields, record.case.id, record.id, sum(1 for _ in statements(small.program.body)))


# -- tables ---------------------------------------------------------------------------------------


def summary(data: RunData) -> pd.DataFrame:
    """Return op x policy x dtypes x backend x kind, with numbers of cases and calls.

    kind: of the divergence, or ``agreed``, ``raised`` (both sides, alike), ``elsewhere`` (the case
    diverged, but not here). known: how many of the cases a known finding explains. own: how many
    differ in the same way without autocast. An op is an autocast kernel; a divergence at no kernel
    is listed under the catalogue's op or "".
    """
    frame = data.kernels.copy()
    frame["kind"] = frame["kind"].where(frame["kind"] != "", frame["outcome"])
    for name, outcome in (("known", "known"), ("own", "backend")):
        frame[name] = frame["cases"].where(frame["outcome"] == outcome, 0).astype(int)
    keys = ["op", "policy", "dtypes", "backend", "kind"]
    return frame.groupby(keys, as_index=False, sort=True)[["cases", "known", "own", "calls"]].sum()


def outcomes(data: RunData) -> pd.DataFrame:
    """Return, for each backend, the number of cases by outcome, and rates.

    raised_share: the share of cases that raised on both sides. rate: cases a second in one worker,
    from the tasks that ended, or else from the seconds of the cases; 0 if these are 0. ops: how
    many of the catalogue's ops were called.
    """
    counts = _sizes(data.cases, "backend", "outcome").unstack(fill_value=0)
    order = ["agreed", "raised", "backend", "known", "diverged"]
    frame = counts.reindex(index=data.backends, columns=order, fill_value=0).astype(int)
    frame.insert(0, "cases", frame.sum(axis=1))
    frame["raised_share"] = (frame["raised"] / frame["cases"]).where(frame["cases"] > 0, 0.0)
    ended = data.ends.groupby("backend")[["cases", "seconds"]].sum().reindex(frame.index)
    spent = data.parts.groupby("backend")["seconds"].sum().reindex(frame.index)
    whole = ended["seconds"] > 0
    frame["rate"] = (ended["cases"] / ended["seconds"]).where(whole, frame["cases"] / spent)
    frame["rate"] = frame["rate"].astype(float).replace(math.inf, 0.0).fillna(0.0)
    frame["ops"] = data.ops.groupby("backend")["op"].nunique().reindex(frame.index, fill_value=0)
    return frame.rename_axis(index="backend", columns=None)


def seconds(data: RunData) -> pd.DataFrame:
    """Return the seconds of each backend by part of the work.

    ``other`` is everything except judging: drawing cases, minimising, writing records.
    """
    frame = data.parts.pivot(index="backend", columns="part", values="seconds").fillna(0.0)
    parts = list(dict.fromkeys(data.parts["part"]))
    frame = frame.reindex(index=data.backends, columns=parts, fill_value=0.0).astype(float)
    ended = data.ends.groupby("backend")[["cases", "seconds"]].sum().reindex(frame.index).fillna(0)
    cases = _sizes(data.cases, "backend").reindex(frame.index, fill_value=0)
    # Tasks that were cut short have no seconds: count only the share of the others.
    share = (ended["cases"] / cases.clip(lower=1)).clip(upper=1.0)
    frame["other"] = (ended["seconds"] - frame.sum(axis=1) * share).clip(lower=0.0)
    return frame.rename_axis(index="backend", columns=None)


def coverage(data: RunData) -> pd.DataFrame:
    """Return, for each backend, which of the autocast kernels that torch lists were reached.

    reachable, reached: numbers. missing: the names of the others. unreachable: the names of kernels
    that no caller can reach, with the reason if the run recorded it. found: unreachable ones that a
    case reached.
    """
    rows = []
    for backend in data.run.backends:
        hits = set(data.kernels.loc[data.kernels["backend"] == backend.name, "op"])
        missing = tuple(k for k in backend.kernels if k not in hits)
        found = tuple(k for k in backend.unreachable if k.partition(": ")[0] in hits)
        reachable = len(backend.kernels)
        row = (backend.name, backend.device, reachable, reachable - len(missing))
        rows.append((*row, missing, backend.unreachable, found))
    columns = ("backend", "device", "reachable", "reached", "missing", "unreachable", "found")
    return _frame(rows, columns, reachable=int, reached=int).set_index("backend")


def cause_of(record: DivergenceRecord) -> str:
    """Return the name of a finding's cause: its fingerprint, or else the id of its case."""
    return record.fingerprint or record.id


def groups(
    data: RunData, found: pd.DataFrame, known: str = ""
) -> tuple[Counter[str], Counter[str]]:
    """Return by cause how many cases count for it, and how many count for another but show it.

    A case that no list explains counts once: for the first of its causes that has a finding, or for
    "" if none has. found: from `findings`. known: `OWN` for cases that differ without autocast too.
    """
    new = [record for record in data.records if record.known == known]
    shown = {cause_of(record) for record in new}
    joined = {record.joins: record.fingerprint for record in new if record.joins}
    by_id = {(record.backend, record.id): cause_of(record) for record in new}
    counts, others = Counter[str](), Counter[str]()
    rows = data.cases[(data.cases["outcome"] == outcome_of(known)) & (data.cases["groups"] != "")]
    for text, count in _sizes(rows, "groups").items():
        names = dict.fromkeys(joined.get(name, name) for name in str(text).split(","))
        own, *rest = [name for name in names if name in shown] or [""]
        counts[own] += count
        others.update(dict.fromkeys(rest, count))
    alone = found[found["known"] == known]
    for backend, name, count in zip(alone["backend"], alone["id"], alone["count"], strict=True):
        counts[by_id.get((str(backend), str(name)), "")] += int(count)
    return counts, others


def variants(data: RunData, outcome: Outcome = "diverged") -> dict[str, Counter[str]]:
    """Return by fingerprint the ways in which its cases diverged, as ``grad-value at tanh``."""
    found: defaultdict[str, Counter[str]] = defaultdict(Counter)
    rows = data.cases[data.cases["outcome"] == outcome]
    sizes = _sizes(rows, "groups", "kind", "op").reset_index(name="count")
    for joined, kind, op, count in sizes.itertuples(index=False, name=None):
        for name in filter(None, joined.split(",")):
            found[name][f"{kind} at {op}" if op else kind] += count
    return dict(found)


def _sizes(frame: pd.DataFrame, *keys: str) -> pd.Series[int]:
    """Return how many rows have the same keys, in the order in which they are met."""
    sizes = frame.groupby(list(keys), observed=True, sort=False).size()
    if isinstance(sizes.index, pd.MultiIndex):
        levels = [list(map(str, level)) for level in sizes.index.levels]
        sizes.index = sizes.index.set_levels(levels)
    else:
        sizes.index = sizes.index.astype(object)
    return sizes.astype(int)


def findings(data: RunData) -> pd.DataFrame:
    """Return one row for each sort of divergence that is known or in no group.

    The columns are backend, kind, op, policy, dtypes, known, count, id.
    count: the cases that diverged in this way. id: the case to replay: the smallest of the finding,
    or of the one that represents it, since only the first of similar findings is minimised (one for
    each backend, kind and known entry, or each backend, kind and op if it is new). "" if no record
    is left.
    """
    diverging = data.cases[data.cases["outcome"].isin(DIVERGING)]
    diverging = diverging[(diverging["groups"] == "") | (diverging["outcome"] == "known")]
    frame = _sizes(diverging, *_GROUP).rename("count").reset_index()
    small = data.divergences.sort_values("statements", kind="stable")
    frame["id"] = ""
    for keys in (_GROUP, ["backend", "kind", "op", "known"], ["backend", "kind", "known"]):
        first = small.drop_duplicates(keys).set_index(keys)["id"]
        wanted = pd.MultiIndex.from_frame(frame[keys])
        hits = pd.Series(first.reindex(wanted).to_numpy(), index=frame.index).fillna("")
        frame["id"] = frame["id"].where(frame["id"] != "", hits)
    order = frame.sort_values(["count", *_GROUP], ascending=[False] + [True] * len(_GROUP))
    return order.reset_index(drop=True)
