"""The content of a report, as plain facts that text, Markdown and HTML render."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import msgspec
import pandas as pd

from amp_fuzz.cases.case import Case
from amp_fuzz.records.fingerprint import plan_words, title
from amp_fuzz.records.schema import (
    GIVEN,
    OPEN,
    OWN,
    BaselineRecord,
    DivergenceRecord,
    Note,
    NoteKind,
    incident_line,
    outcome_of,
)
from amp_fuzz.reports import frames
from amp_fuzz.reports.frames import RunData
from amp_fuzz.reports.pictures import Pictures, pictures
from amp_fuzz.reports.printable import clean, clean_lines, plural
from amp_fuzz.reports.promised import Promised, promised
from amp_fuzz.reports.trend import Trend
from amp_fuzz.reports.unseen import Unseen, unseen, untried

__all__ = [
    "BackendView",
    "BaselineView",
    "FindingView",
    "KnownView",
    "NoteView",
    "SummaryRow",
    "Verdict",
    "View",
    "clean",
    "clean_lines",
    "met",
    "rate",
    "share",
    "short_dtypes",
    "time_of",
    "view",
]

_NAMED = 3  # backends in a title
_INCIDENTS = 10  # at most this many are shown one by one
DEFAULT_STORE = Path(".amp-fuzz")

# The order of new findings: first those that stop a run, then exact ones.
_KINDS = (
    "crash", "timeout", "state", "raise", "dtype", "shape", "device", "grad-missing",
    "grad-dtype", "grad-device", "bitwise", "value", "nonfinite", "grad-value", "precision",
    "range", "relation", "nondeterminism",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class BackendView:
    """A backend of the run.

    own: the cases that differ in the same way without autocast. rate: cases a second in one worker.
    seconds: by part of the work.
    """

    name: str
    device: str
    detail: str
    cases: int
    agreed: int
    raised: int
    own: int
    known: int
    new: int
    rate: float
    ops: int
    reachable: int
    reached: int
    missing: tuple[str, ...]
    unreachable: tuple[tuple[str, str], ...]
    seconds: tuple[tuple[str, float], ...]

    @property
    def coverage(self) -> str:
        """The kernels reached, of those that are reachable: ``127/127 (100 %)``."""
        if not self.reachable:
            return "none listed"
        return f"{self.reached}/{self.reachable} ({share(self.reached, self.reachable)})"


class Bug(Protocol):
    """A known bug, as reports show it."""

    @property
    def id(self) -> str:
        """Its name in records."""

    @property
    def what(self) -> str:
        """What happens, in one line."""

    @property
    def why(self) -> str:
        """Its cause, in one line."""

    @property
    def link(self) -> str:
        """The upstream issue, or ""."""


@dataclass(frozen=True, slots=True)
class KnownView:
    """A known finding that explains divergences of this run. ops: with numbers of cases."""

    id: str
    what: str
    why: str
    link: str
    cases: int
    backends: tuple[tuple[str, int], ...]
    kinds: tuple[tuple[str, int], ...]
    ops: tuple[tuple[str, int], ...]
    replay: str

    @property
    def open(self) -> bool:
        """Whether it is listed, and nobody has explained it."""
        return self.id.startswith(OPEN)

    @property
    def url(self) -> str:
        """The link, if it is safe to follow: a user's own list may contain anything."""
        safe = re.fullmatch(r"https?://[^\s<>\"'`|()\[\]]+", self.link)
        return self.link if safe else ""


@dataclass(frozen=True, slots=True)
class BaselineView:
    """An entry of the project's baseline, and the result of its case in this run.

    state: ``there``, ``fixed``, ``expired``, ``changed`` (it diverges differently), ``not run``, or
    ``not seen`` (it is nondeterministic and did not occur).
    """

    id: str
    title: str
    backend: str
    reason: str
    link: str
    expires: str
    state: Literal["there", "fixed", "expired", "changed", "not run", "not seen"]

    @property
    def sentence(self) -> str:
        """What to do about it, or ""."""
        name = f"{self.id} on {self.backend}"
        match self.state:
            case "fixed":
                return f"fixed: {name} no longer happens: remove it: amp-fuzz baseline prune"
            case "expired":
                return (
                    f"expired: {name} was accepted until {self.expires}: fix it, or give it "
                    "another date, with a reason"
                )
            case "changed":
                return f"changed: the case of {name} now diverges in another way"
            case _:
                return ""


@dataclass(frozen=True, slots=True)
class FindingView:
    """The group of a cause that no list explains. record: the case to replay.

    cases: how many count for it. also: how many show it and count for another cause.
    file: the store's file of the finding, a path or a URL.
    variants: the ways in which a compiler's part shows, with numbers of cases, most first. life:
    what earlier runs of the store say of it; "" if none met it. range: the versions that have it,
    as `amp-fuzz bisect` found; "" if it was not asked.
    """

    record: DivergenceRecord
    cases: int
    replay: str
    repro: str
    file: str
    variants: tuple[tuple[str, int], ...] = ()
    life: str = ""
    range: str = ""
    also: int = 0

    @property
    def counted(self) -> str:
        """The numbers of cases: ``24 cases``, or more if some count for another finding."""
        more = f", and {self.also:,} that count for another finding" if self.also else ""
        return plural(self.cases, "case") + more

    @property
    def id(self) -> str:
        """The id of the case to replay."""
        return self.record.id

    @property
    def case(self) -> Case:
        """The smallest case that shows it."""
        return self.record.minimised or self.record.case

    @property
    def bare(self) -> bool:
        """Whether a new cause shows without autocast contexts too."""
        return self.record.bare and not self.record.known

    @property
    def program(self) -> str:
        """The listing of that case."""
        return clean_lines(str(self.case))

    @property
    def title(self) -> str:
        """The group's heading: ``dtype at mm``."""
        return title(self.record)

    @property
    def short(self) -> tuple[str, str, str]:
        """The case in three lines: plan, inputs, statements."""
        _, plan, *lines = self.program.splitlines()
        given = [line for line in lines if re.match(r"[xwb]\d+: ", line)]
        body = [line.strip() for line in lines[len(given) : -1]]
        more = f"; ... ({plural(len(body) - 2, 'line')} more)" if len(body) > 3 else ""
        done = "; ".join(body if len(body) <= 3 else body[:2]) + more
        return plan, ", ".join(given) or "no inputs", done

    @property
    def shown(self) -> str:
        """How a compiler's part shows, if in several ways: ``value at tanh (3), range (1)``."""
        several = self.variants if len(self.variants) > 1 else ()
        return ", ".join(f"{how} ({cases:,})" for how, cases in several)

    @property
    def explicit(self) -> str:
        """The case with the casts that autocast should make written out, or ""."""
        return clean_lines(self.record.explicit)

    @property
    def at(self) -> str:
        """The op with its policy and dtypes, as far as they are known; "" if it is no single op."""
        r = self.record
        if not r.op:
            return ""
        parts = [p for p in ("" if r.policy == "none" else r.policy, r.dtypes) if p]
        return r.op + (f" ({'; '.join(parts)})" if parts else "")


@dataclass(frozen=True, slots=True)
class NoteView:
    """A group of notes: the note of its smallest case, and how many cases show it.

    fails: whether its kind fails the run. replay: "" if no case of it is left.
    """

    note: Note
    cases: int
    backends: tuple[tuple[str, int], ...]
    replay: str
    fails: bool

    @property
    def on(self) -> str:
        """The backends with their numbers of cases: ``eager-cpu 3, fake-cuda 1``."""
        return ", ".join(f"{name} {n:,}" for name, n in self.backends)


NOTE_TITLES: Mapping[NoteKind, str] = {
    "precision": "precision: a compiler left out a rounding",
    "autocast-raises": "autocast raises: the program runs without autocast and raises under it",
    "portability": "portability: another device's policies raise, or give another dtype",
    "context": "context: an autocast context does something else on another device, or nothing",
}


CALM = ("agreed", "raised", "elsewhere")


class SummaryRow(NamedTuple):
    """A row of `frames.summary`.

    known: how many of `cases` a known finding explains. own: how many differ without autocast too.
    """

    op: str
    policy: str
    dtypes: str
    backend: str
    kind: str
    cases: int
    known: int
    own: int
    calls: int

    @property
    def new(self) -> int:
        """The cases that diverged here in an unknown way."""
        return 0 if self.kind in CALM else self.cases - self.known - self.own

    @property
    def what(self) -> str:
        """The kind, and whether it is known: ``raise (known)``, ``dtype (NEW)``."""
        if self.kind in CALM:
            return self.kind
        sorts = {"NEW": self.new, "known": self.known, "without autocast too": self.own}
        words = next((word for word, n in sorts.items() if n == self.cases), f"{self.new} NEW")
        return f"{self.kind} ({words})"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict of a run. nothing: no case ran. unended: nothing new, but the run did not end.

    The same if some of its records cannot be read. Otherwise the worst outcome: backend: what
    differs does so without autocast too.
    """

    kind: Literal["nothing", "new", "unended", "known", "backend", "clean"]
    sentence: str
    next: str


@dataclass(frozen=True, slots=True)
class View:
    """A run as reports show it.

    took: wall time in seconds, 0 if the run did not end. stopped: how far it came if its time was
    up, or "". own: the causes that show in the same way without autocast; own_fails: whether they
    fail the run. notes: what else a reader must know to trust the numbers. lost: new diverging
    cases that left no record to replay. summary: the most important rows first: new divergences,
    known ones, then what was reached most. unseen: the causes that more cases may show. untried: by
    backend, the ingredients of plans that no case had. promised: the promises of torch's documents
    that the run could test, with numbers of cases; none if it counted none. trend: the runs of the
    store up to this one; none if only its records were read.
    """

    run_id: str
    seed: int
    profile: str
    started: str
    command: str
    versions: tuple[tuple[str, str], ...]
    store: str
    took: float
    cases: int
    agreed: int
    raised: int
    backends: tuple[BackendView, ...]
    known: tuple[KnownView, ...]
    known_cases: int
    new: tuple[FindingView, ...]
    new_cases: int
    own: tuple[FindingView, ...]
    own_cases: int
    own_fails: bool
    lost: int
    verdict: Verdict
    stopped: str
    notes: tuple[str, ...]
    summary: tuple[SummaryRow, ...]
    pictures: Pictures
    baseline: tuple[BaselineView, ...] = ()
    noted: tuple[NoteView, ...] = ()
    unseen: tuple[Unseen, ...] = ()
    untried: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    promised: tuple[Promised, ...] = ()
    trend: Trend = field(default_factory=Trend)

    @property
    def noted_by_kind(self) -> tuple[tuple[str, tuple[NoteView, ...]], ...]:
        """The notes by the title of their kind, those that fail first."""
        by_kind = {k: tuple(n for n in self.noted if n.note.kind == k) for k in NOTE_TITLES}
        order = sorted(by_kind, key=lambda k: not any(n.fails for n in by_kind[k]))
        return tuple((NOTE_TITLES[kind], by_kind[kind]) for kind in order if by_kind[kind])

    @property
    def failing(self) -> tuple[FindingView, ...]:
        """The causes that fail the run."""
        return self.new + self.own * self.own_fails

    @property
    def untried_anywhere(self) -> tuple[str, ...]:
        """The ingredients that no case had on any backend."""
        words = [set(words) for words in self.untried.values()]
        return tuple(word for word in plan_words() if words and all(word in own for own in words))

    @property
    def own_title(self) -> str:
        """The title of the causes that show in the same way without autocast."""
        names = list(dict.fromkeys(clean(f.record.backend) for f in self.own))
        said = ", ".join(names) if len(names) <= _NAMED else plural(len(names), "backend")
        return f"{said}, without autocast's doing"

    @property
    def own_sentence(self) -> str:
        """How many cases differ without autocast too, or ""."""
        if not self.own_cases:
            return ""
        differ = "case differs" if self.own_cases == 1 else "cases differ"
        groups = plural(len(self.own), "group")
        return (
            f"{self.own_cases:,} {differ} in the same way without autocast: the backend's own "
            f"({groups}; amp-fuzz report -v shows {'it' if len(self.own) == 1 else 'them'})"
        )

    @property
    def tone(self) -> Literal["good", "warn", "bad"]:
        """How the verdict looks: it is not green if there is a note."""
        if self.verdict.kind == "new":
            return "bad"
        return "warn" if self.notes or self.verdict.kind in ("nothing", "unended") else "good"

    @property
    def follow_up(self) -> str:
        """The next command to type for a reader of the written report."""
        if self.verdict.kind in ("new", "nothing", "unended"):
            return self.verdict.next
        return clean(self.command) or f"amp-fuzz run --seed={self.seed}"


def view(data: RunData, known: Sequence[Bug]) -> View:
    """Return the content of the run's report. known: explains the known findings."""
    totals = frames.outcomes(data)
    found = frames.findings(data)
    new, own = _causes(data, found), _causes(data, found, OWN)
    backends = _backends(data, totals)
    explained = _known(data, found, known)
    baseline = tuple(_baseline(data))
    noted = _noted(data)
    diverged = int(totals["diverged"].sum())
    lost = frames.groups(data, found)[0][""]
    cases = int(totals["cases"].sum())
    return View(
        run_id=data.run.id,
        seed=data.run.seed,
        profile=data.run.profile,
        started=data.run.started,
        command=data.run.command,
        versions=tuple(data.run.versions.items()),
        store=str(data.store.place),
        took=float(data.ends.loc[data.ends["backend"] == "", "seconds"].sum()),
        cases=cases,
        agreed=int(totals["agreed"].sum()),
        raised=int(totals["raised"].sum()),
        backends=backends,
        known=explained,
        known_cases=int(totals["known"].sum()),
        new=new,
        new_cases=diverged,
        own=own,
        own_cases=int(totals["backend"].sum()),
        own_fails="backend" in data.run.fail_on,
        lost=lost,
        verdict=_verdict(data, backends, explained, new, baseline, noted),
        stopped=_stopped(data),
        notes=tuple(_notes(data, backends, lost)),
        summary=tuple(sorted(_summary(data), key=_first)),
        pictures=pictures(data),
        baseline=baseline,
        noted=noted,
        unseen=unseen(data),
        untried=untried(data),
        promised=promised(data),
    )


def met(data: RunData) -> tuple[tuple[FindingView, ...], tuple[KnownView, ...]]:
    """Return the causes and the known findings of a run, without the rest of its view.

    The causes are the new ones, then those that show in the same way without autocast.
    """
    found = frames.findings(data)
    causes = _causes(data, found) + _causes(data, found, OWN)
    return causes, _known(data, found, ())


def _noted(data: RunData) -> tuple[NoteView, ...]:
    """Return the groups of notes, those with most cases first."""
    views = []
    for group in data.notes:
        note = group.record.note if group.record else group.note
        backends = sorted(group.backends.items(), key=lambda pair: (-pair[1], pair[0]))
        case = group.record.id if group.record else ""
        replay = _command(data, "replay", case, f"--backend={note.backend}") if case else ""
        fails = note.kind in data.run.fail_on
        views.append(NoteView(note, sum(group.backends.values()), tuple(backends), replay, fails))
    return tuple(sorted(views, key=lambda v: (-v.cases, v.note.group)))


def _baseline(data: RunData) -> Iterable[BaselineView]:
    """Yield the entries of the baseline with the results of their cases."""
    own = data.cases[data.cases["family"] == "baseline"]
    came = {(r.backend, r.id): r for r in own.itertuples(index=False)}
    for entry in data.run.entries:
        row = came.get((entry.backend, entry.case))
        state: Any = "not run"
        if row is not None and row.outcome in ("agreed", "raised"):
            state = "not seen" if entry.kind == "nondeterminism" else "fixed"
        elif row is not None:
            there = entry.id in str(row.known).split("+")
            state = "there" if there else "changed"
        if entry.expired:
            state = "expired"
        yield BaselineView(
            entry.id, entry.title, entry.backend, entry.reason, entry.link, entry.expires, state
        )


def _backends(data: RunData, totals: pd.DataFrame) -> tuple[BackendView, ...]:
    covered = frames.coverage(data).to_dict("index")
    spent = frames.seconds(data)
    heads = {b.name: b for b in data.run.backends}
    views = []
    for name, row in zip(totals.index, totals.to_dict("records"), strict=True):
        reach = covered.get(name, {})
        head = heads.get(str(name))
        parts = [(str(p), round(float(s), 3)) for p, s in spent.loc[name].items() if s > 0]
        views.append(
            BackendView(
                name=str(name),
                device=head.device if head else "",
                detail=head.detail if head else "not in the head of the run",
                cases=int(row["cases"]),
                agreed=int(row["agreed"]),
                raised=int(row["raised"]),
                own=int(row["backend"]),
                known=int(row["known"]),
                new=int(row["diverged"]),
                rate=float(row["rate"]),
                ops=int(row["ops"]),
                reachable=int(reach.get("reachable", 0)),
                reached=int(reach.get("reached", 0)),
                missing=reach.get("missing", ()),
                unreachable=tuple(_reason(k) for k in reach.get("unreachable", ())),
                seconds=tuple(parts),
            )
        )
    return tuple(views)


def _reason(kernel: str) -> tuple[str, str]:
    """Split ``name: why it cannot be reached``; a bare name has no reason."""
    name, _, why = kernel.partition(": ")
    return name, why


def _known(data: RunData, found: pd.DataFrame, entries: Sequence[Bug]) -> tuple[KnownView, ...]:
    bugs: dict[str, Bug | BaselineRecord] = {k.id: k for k in (*data.run.known, *entries)}
    bugs |= {entry.id: entry for entry in data.run.entries}
    # Two bugs may meet in one case, which then counts for each; ids are joined by "+".
    each = found.assign(known=found["known"].astype(str).str.split("+")).explode("known")
    each = each[~each["known"].isin(["", OWN])]
    views = []
    for name, rows in each.groupby("known"):
        entry = bugs.get(str(name))
        ids = [i for i in rows["id"] if i]
        views.append(
            KnownView(
                id=str(name),
                what=_what(entry),
                why=(entry.reason if isinstance(entry, BaselineRecord) else entry.why)
                if entry
                else "",
                link=entry.link if entry else "",
                cases=int(rows["count"].sum()),
                backends=_counts(rows, "backend"),
                kinds=_counts(rows, "kind"),
                ops=_counts(rows, "op"),
                replay=_command(data, "replay", ids[0]) if ids else "",
            )
        )
    return tuple(sorted(views, key=lambda k: (-k.cases, k.id)))


def _what(entry: Bug | BaselineRecord | None) -> str:
    if entry is None:
        return "no known bug of this name stands in the record of the run"
    if isinstance(entry, BaselineRecord):
        return f"in the project's baseline: {entry.title}"
    return entry.what


def _counts(rows: pd.DataFrame, column: str) -> tuple[tuple[str, int], ...]:
    sums = [(str(name), int(n)) for name, n in rows.groupby(column)["count"].sum().items()]
    return tuple(sorted(sums, key=lambda pair: (-pair[1], pair[0])))


def _causes(data: RunData, found: pd.DataFrame, known: str = "") -> tuple[FindingView, ...]:
    """Return one view for each cause that no list explains, with the cases that show it.

    Each such case of the run counts for one view, or for none if its cause left no record. known:
    `OWN` for causes that show in the same way without autocast.
    """
    counts, others = frames.groups(data, found, known)
    variants = frames.variants(data, outcome_of(known))
    views = []
    store = data.store
    for cause, records in _by_cause(data.records, known).items():
        if not counts[cause] + others[cause]:
            continue
        record = min(records, key=lambda r: (bool(r.joins), _size(r)))
        # Each finding of a cause names the policies that explain it: those that explain all.
        common = tuple(name for name in record.as_if if all(name in r.as_if for r in records))
        record = msgspec.structs.replace(record, as_if=common or record.as_if)
        kept = store.name_of(record)
        view = FindingView(
            record,
            cases=counts[cause],
            also=others[cause],
            replay=_command(data, "replay", kept),
            repro=_command(data, "repro", kept) + " > repro.py",
            file=f"{store.place}/findings/{kept}.json",
            range=store.range_of(record),
            variants=tuple(variants.get(record.fingerprint, Counter()).most_common())
            if record.part
            else (),
        )
        views.append(view)
    return tuple(sorted(views, key=_rank))


def _by_cause(records: Iterable[DivergenceRecord], known: str) -> dict[str, list[DivergenceRecord]]:
    """Return the findings by cause: several processes may meet one. known: as of `_causes`."""
    found: dict[str, list[DivergenceRecord]] = {}
    for record in records:
        if record.known == known:
            found.setdefault(frames.cause_of(record), []).append(record)
    return found


def _size(record: DivergenceRecord) -> int:
    return len((record.minimised or record.case).json())


def _rank(finding: FindingView) -> tuple[int, int, str, str, str]:
    r = finding.record
    kind = _KINDS.index(r.kind) if r.kind in _KINDS else len(_KINDS)
    return kind, -finding.cases, r.backend, r.op, r.id


def _command(data: RunData, name: str, *what: str) -> str:
    """Return an amp-fuzz command line, with the store if it is not the default.

    Commands that judge cases again also name the run's devices and plugins.
    """
    place = data.store.place
    usual = isinstance(place, Path) and place.resolve() == DEFAULT_STORE.resolve()
    store = [] if usual else [f"--store={place}"]
    more = () if name in ("report", "run") else data.run.options
    return shlex.join(["amp-fuzz", name, *what, *more, *store])


def _verdict(
    data: RunData,
    backends: Sequence[BackendView],
    known: Sequence[KnownView],
    new: Sequence[FindingView],
    baseline: Sequence[BaselineView] = (),
    noted: Sequence[NoteView] = (),
) -> Verdict:
    cases, ran = sum(b.cases for b in backends), sum(1 for b in backends if b.cases)
    over = f"{plural(cases, 'case')} on {plural(ran, 'backend')}"
    given = int(data.cases["family"].isin(GIVEN).sum())
    over += f" ({given:,} judged again, {cases - given:,} drawn)" if given else ""
    idle = [b.name for b in backends if not b.cases]
    but = f" But {', '.join(idle)} ran nothing." if idle else ""
    diverged, explained = sum(b.new for b in backends), sum(b.known for b in backends)
    own = sum(b.own for b in backends)
    report = _command(data, "report", data.run.id)
    late = sum(entry.state == "expired" for entry in baseline)
    expired = f"EXPIRED: {plural(late, 'entry')} of the baseline" if late else ""
    if data.state != "ended" and not diverged:
        return _unended(data, over, explained)
    failing = _failing(data, noted, own) + _short(data, backends)
    if data.damage and cases and not (diverged or expired or failing):
        lost = f"{plural(len(data.damage), 'record')} cannot be read"
        sentence = f"INCOMPLETE: {lost}. Nothing new in the others{_of(over, explained)}.{but}"
        return Verdict("unended", sentence, report)
    if (_last(data)["reason"] == "crashed").any() and cases and not (diverged or expired):
        sentence = f"AN ERROR ENDED THE RUN: nothing new so far{_of(over, explained)}.{failing}"
        return Verdict("unended", sentence, report)
    if not cases:
        sentence = "NOTHING RAN: 0 cases, so this run says nothing about autocast."
        return Verdict("nothing", sentence, "amp-fuzz doctor")
    if diverged:
        what = plural(len(new), "new finding") if new else "New divergences"
        sentence = f"{what}: of {over}, {diverged:,} diverged in an unknown way.{but}"
        sentence += f" {expired}." if expired else ""
        sentence += failing
        if not new:
            return Verdict("new", sentence, report)
        issue = _command(data, "repro", new[0].record.id) + " --format=issue -o issue.md"
        return Verdict("new", sentence, issue)
    if expired:
        sentence = f"{expired}. Nothing new{_of(over, explained)}.{but}{failing}"
        return Verdict("new", sentence, "amp-fuzz baseline check")
    kind: Literal["new", "known", "backend", "clean"] = "backend" if own else "clean"
    if explained:
        kind = "known"
        about = "Nothing new about autocast" if own else "Nothing new"
        sentence = (
            f"{about}: of {over}, {explained:,} diverged, and {_explaining(known)}.{but}{failing}"
        )
    elif own:
        sentence = (
            f"Nothing new about autocast: {over} agreed with the reference, or differ without "
            f"autocast too.{but}{failing}"
        )
    else:
        sentence = f"Nothing diverged: {over} agreed with the reference.{but}{failing}"
    return Verdict("new" if failing else kind, sentence, report)


def _explaining(known: Sequence[KnownView]) -> str:
    left, one = sum(view.open for view in known), len(known) == 1
    findings = plural(len(known), "known finding")
    if not left:
        return f"{findings} explain{'s' if one else ''} them all"
    which = "which" if one else f"of which {left:,}"
    return f"{findings} cover{'s' if one else ''} them all, {which} nobody has explained"


def _failing(data: RunData, noted: Iterable[NoteView], own: int) -> str:
    """Return a sentence about the notes, incidents and own cases that fail the run, or ""."""
    kinds = {view.note.kind for view in noted if view.fails}
    found = [plural(sum(view.fails for view in noted), "note")] if kinds else []
    words: list[str] = sorted(kinds)
    if data.incidents and "incident" in data.run.fail_on:
        found.append(plural(len(data.incidents), "incident"))
        words.append("incident")
    if own and "backend" in data.run.fail_on:
        found.append(f"{plural(own, 'case')} of the backend's own")
        words.append("backend")
    if not found:
        return ""
    return f" FAILS: {' and '.join(found)}, as --fail-on={','.join(words)} says."


def _short(data: RunData, backends: Iterable[BackendView]) -> str:
    """Return a sentence about the backends that reached too few of their kernels, or ""."""
    least = data.run.require_coverage
    short = [
        f"{b.name} reached {b.reached} of {b.reachable} autocast kernels "
        f"({share(b.reached, b.reachable)})"
        for b in backends
        if 100 * b.reached < least * b.reachable
    ]
    return f" FAILS: {', '.join(short)}; --require-coverage={least:g}." if short else ""


def _of(over: str, explained: int) -> str:
    """Return the number of cases for a sentence, and how many of them diverged, if any."""
    return f", of {over}" + (
        f", of which {explained:,} diverged in a known way" if explained else ""
    )


def _unended(data: RunData, over: str, explained: int) -> Verdict:
    """Return the verdict of a run without a new finding whose end was never recorded."""
    so_far = f"nothing new so far{_of(over, explained)}"
    if data.state == "running":
        report = _command(data, "report", data.run.id)
        return Verdict("unended", f"STILL RUNNING: {so_far}.", report)
    again = data.run.command
    if again.startswith("amp-fuzz run"):
        again = _command(data, "run", f"--resume={data.run.id}")
    return Verdict("unended", f"THE RUN DID NOT END: {so_far}.", again)


def _last(data: RunData) -> pd.DataFrame:
    """Return the last end of the whole run, if there is one."""
    return data.ends[data.ends["backend"] == ""].tail(1)


def _stopped(data: RunData) -> str:
    """Return how far a run came whose time was up, or ""."""
    last = _last(data)
    done, planned = int(last["cases"].sum()), int(last["planned"].sum())
    if not planned or (last["reason"] != "stopped").any():
        return ""
    after = time_of(float(last["seconds"].sum()))
    # If all were judged, the time ran out while a finding was being minimised.
    ran = f"{done:,} of {plural(planned, 'case')}"
    all_ran = f"all {plural(done, 'case')} ran, but a finding may be larger than necessary"
    return f"stopped after {after}: {ran if done < planned else all_ran}"


def _notes(data: RunData, backends: Iterable[BackendView], lost: int) -> Iterable[str]:
    for backend in backends:
        if not backend.cases:
            yield f"{backend.name} ran nothing ({backend.detail})"
    if data.state == "killed":
        yield "the run was killed, or its machine stopped: the numbers cover only the part that ran"
    last = _last(data)
    ends = pd.concat([data.ends[data.ends["backend"] != ""], last])
    early = ends[~ends["reason"].isin(["done", "resumed"])]
    for reason, rows in early.groupby("reason"):
        whole = (rows["backend"] == "").any()
        if reason == "stopped" and _stopped(data):
            continue
        what = "the run" if whole else plural(len(rows), "task")
        yield f"{_ENDED[str(reason)].format(what)}: the numbers cover only the part that ran"
    for line in list(map(incident_line, data.incidents))[:_INCIDENTS]:
        yield f"incident: {clean(line)}"
    if len(data.incidents) > _INCIDENTS:
        yield f"incidents: {len(data.incidents) - _INCIDENTS} more in the records"
    if lost:
        yield (
            f"{plural(lost, 'new diverging case')} left no record to replay: run again with "
            f"--seed={data.run.seed}"
        )
    for on, (values, cases) in data.varied.items():
        yield (
            f"{on}: {plural(cases, 'case')} varied, as documented: {plural(values, 'value')}, "
            "computed by kernels that torch lists as nondeterministic"
        )
    for on, (values, cases) in data.unjudged.items():
        yield (
            f"{on}: not judged: {plural(values, 'value')} in {plural(cases, 'case')}, which differ "
            "in a bit where no shadow could follow"
        )
    for on, (artefacts, cases) in data.hits.items():
        yield (
            f"{on}: {plural(cases, 'case')} loaded {plural(artefacts, 'artefact')} from the "
            "compiler's caches"
        )
    for on, cases in data.uncompiled.items():
        yield (
            f"{on}: {plural(cases, 'case')} agreed without being compiled: dynamo made no "
            "graph of them"
        )
    if data.damage:
        yield (
            f"left out: {plural(len(data.damage), 'record')} that could not be read; the first: "
            f"{clean(data.damage[0])}"
        )
    for name, row in frames.coverage(data).iterrows():
        if row["found"]:
            yield f"{name}: listed as unreachable, but reached: {', '.join(row['found'])}"


_ENDED = {
    "stopped": "{} stopped before the end",
    "interrupted": "an interrupt ended {}",
    "crashed": "an error ended {}",
}


def _summary(data: RunData) -> Iterable[SummaryRow]:
    table = frames.summary(data)[list(SummaryRow._fields)]
    for row in table.itertuples(index=False, name=None):
        yield SummaryRow._make((*map(str, row[:5]), *map(int, row[5:])))


def _first(row: SummaryRow) -> tuple[bool, bool, int, SummaryRow]:
    return row.new == 0, row.kind in CALM, -row.cases, row


# -- words ----------------------------------------------------------------------------------------


def share(part: float, whole: float) -> str:
    """Return a share in per cent; 100 % only of all, 0 % only of none."""
    if not whole:
        return "-"
    percent = 100 * part / whole
    if 0 < part < whole:
        percent = min(max(percent, 0.1), 99.9)
        return f"{percent:.1f} %"
    return f"{percent:.0f} %"


def rate(value: float) -> str:
    """Return cases a second with two or three significant digits."""
    if value <= 0:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def time_of(seconds: float) -> str:
    """Return a time with its unit: ``-``, ``31 ms``, ``8.4 s``, ``2 min 14 s``, ``3 h 5 min``."""
    if seconds <= 0:
        return "-"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {left} s"


_DTYPES = {
    "bfloat16": "bf16",
    "float16": "f16",
    "float32": "f32",
    "float64": "f64",
    "complex64": "c64",
    "complex128": "c128",
    "int64": "i64",
    "int32": "i32",
    "uint8": "u8",
}


def short_dtypes(dtypes: str) -> str:
    """Return dtypes joined by commas as PyTorch's graph listings shorten them: ``bf16,f32``."""
    return ",".join(_DTYPES.get(d, d) for d in dtypes.split(","))
