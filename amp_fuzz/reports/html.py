"""The report as HTML pages that need no network: each contains its styles and its script.

Pictures are tables whose cells have a shade or a bar, so that they say their numbers to everyone;
only the curves of the trend are SVG, with a table beside them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined

from amp_fuzz.cases.program import statements
from amp_fuzz.records.promises import promises
from amp_fuzz.reports.conformance import counted
from amp_fuzz.reports.pictures import LEVELS, excess_text, far, shade, times_text
from amp_fuzz.reports.printable import plural
from amp_fuzz.reports.promised import ENOUGH, totals
from amp_fuzz.reports.trend import Trend
from amp_fuzz.reports.unseen import AHEAD
from amp_fuzz.reports.view import (
    BackendView,
    FindingView,
    SummaryRow,
    View,
    clean,
    rate,
    share,
    short_dtypes,
    time_of,
)

if TYPE_CHECKING:
    from amp_fuzz.reports.conformance import Audit

__all__ = ["pages", "rendered"]

# The first page stays small whatever the run holds; the side pages have the rest.
MOST_FINDINGS, MOST_ROWS, LONGEST_BLOCK = 50, 30, 4_000
SIDE_FINDINGS, SIDE_BLOCK = 100, 20_000
_COLOURS = 7  # as in the style sheet


def pages(view: View, audit: Audit | None = None) -> dict[str, str]:
    """Return the pages by file name, ``report.html`` first.

    All text of records is escaped; links are http or https. audit: the conformance matrix that is
    in the folder of the report.
    """
    names = [b.name for b in view.backends]
    table = _table(view.summary, names)
    styles = _styles(view.backends)
    ran = [b for b in view.backends if b.cases]
    side = {}
    if table:
        side["ops.html"] = _page(
            *("ops.html", view),
            table=table,
            detail=_detail(table),
            policies=sorted({row.policy for row in table}),
            level=partial(_level, most=max((c.cases for r in table for c in r.cells), default=0)),
        )
    if view.pictures.tested.rows:
        most = max(n for *_, counts in view.pictures.tested.rows for n in counts)
        side["tested.html"] = _page("tested.html", view, level=_level, most=most)
    if view.pictures.devices.columns:
        threshold = view.pictures.threshold
        side["devices.html"] = _page("devices.html", view, audit=audit, threshold=threshold)
    if view.promised:
        side["promises.html"] = _page("promises.html", view, documents=promises().documents)
    parts = range(MOST_FINDINGS, len(view.new), SIDE_FINDINGS)
    for number, start in enumerate(parts, 2):
        side[f"findings-{number}.html"] = _page(
            *("findings.html", view),
            findings=view.new[start : start + SIDE_FINDINGS],
            first=start + 1,
            longest=SIDE_BLOCK,
        )
    if audit is not None:
        side["conformance.html"] = _page("conformance.html", view, audit=audit)
    first = _page(
        *("report.html", view),
        side=list(side),
        findings=view.new[:MOST_FINDINGS],
        longest=LONGEST_BLOCK,
        ahead=AHEAD,
        totals=totals(view.promised) if view.promised else (),
        enough=ENOUGH,
        most_rows=MOST_ROWS,
        most_notes=MOST_FINDINGS,
        most_own=MOST_FINDINGS,
        outcomes=_outcomes,
        reached=_reached,
        reach=share(sum(b.reached for b in ran), sum(b.reachable for b in ran)),
        parts=list(styles),
        styles=styles,
        bars={b.name: _times(b, styles) for b in ran if b.seconds},
        fastest=max((b.rate for b in ran), default=0.0),
        charts=_charts(view.trend),
        height=_height,
        level=_level,
        audit=audit,
    )
    return {"report.html": first, **side}


def _page(template: str, view: View, **facts: object) -> str:
    return rendered(template, view=view, share=share, size=_size, shade=shade, far=far, **facts)


def rendered(template: str, **facts: object) -> str:
    """Return a page made from one of the templates."""
    return _ENVIRONMENT.get_template(template).render(**facts)


def _cut(text: str, longest: int) -> str:
    if len(text) <= longest:
        return text
    return text[:longest] + "\n... (cut here: the record in the store has all of it)"


def _size(finding: FindingView) -> tuple[int, int]:
    """Return the number of statements of a finding's case, and of the case before minimising."""
    before, after = finding.record.case, finding.case
    return len([*statements(after.program.body)]), len([*statements(before.program.body)])


# -- bars -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a stacked bar: its colour class, and its position in per cent of the bar."""

    title: str
    value: float
    style: str
    start: float
    width: float


def _stack(values: Iterable[tuple[str, float, str]], whole: float) -> list[_Part]:
    parts, start = [], 0.0
    for title, value, style in values:
        width = 100 * value / whole if whole else 0.0
        parts.append(_Part(title, value, style, round(start, 3), round(width, 3)))
        start += width
    return parts


def _outcomes(b: BackendView) -> list[_Part]:
    counts = (
        *(("agreed", b.agreed), ("raised", b.raised)),
        *(("own", b.own), ("known", b.known), ("new", b.new)),
    )
    return _stack([(f"{name}: {n:,}", n, f"f-{name}") for name, n in counts], b.cases)


def _reached(b: BackendView) -> list[_Part]:
    return _stack([(f"reached: {b.coverage}", b.reached, "f-agreed")], b.reachable)


def _styles(backends: Sequence[BackendView]) -> dict[str, str]:
    """Return the parts of the work in one order for all backends, each with its colour."""
    names = dict.fromkeys(name for b in backends for name, _ in b.seconds if name != "other")
    styles = {name: f"f-p{i}" if i < _COLOURS else "f-other" for i, name in enumerate(names)}
    return styles | {"other": "f-other"}


def _times(b: BackendView, styles: dict[str, str]) -> list[_Part]:
    spent = dict(b.seconds)
    whole = sum(spent.values())
    values = [(name, spent.get(name, 0.0), style) for name, style in styles.items()]
    titles = [(f"{n}: {time_of(v)} ({share(v, whole)})", v, style) for n, v, style in values]
    return _stack(titles, whole)


# -- the table of ops -----------------------------------------------------------------------------


@dataclass(slots=True)
class _Cell:
    """The outcomes of an op, by policy and perhaps dtypes, on one backend."""

    cases: int = 0
    known: int = 0
    own: int = 0
    new: int = 0
    calls: int = 0
    kinds: dict[str, int] = field(default_factory=dict)

    def add(self, row: SummaryRow) -> None:
        self.cases += row.cases
        self.known += row.known
        self.own += row.own
        self.new += row.new
        self.calls += row.calls
        self.kinds[row.kind] = self.kinds.get(row.kind, 0) + row.cases

    @property
    def said(self) -> str:
        """The outcomes of its cases: ``agreed 8, raised 1``."""
        return ", ".join(f"{kind} {n:,}" for kind, n in sorted(self.kinds.items()))


@dataclass(slots=True)
class _Row:
    """An op under a policy: a cell for each backend, and the same for each mix of dtypes."""

    op: str
    policy: str
    cells: list[_Cell]
    mixes: dict[str, list[_Cell]] = field(default_factory=dict)

    @property
    def cases(self) -> int:
        return sum(c.cases for c in self.cells)

    @property
    def known(self) -> int:
        return sum(c.known for c in self.cells)

    @property
    def own(self) -> int:
        return sum(c.own for c in self.cells)

    @property
    def new(self) -> int:
        return sum(c.new for c in self.cells)


def _table(summary: Iterable[SummaryRow], backends: Sequence[str]) -> list[_Row]:
    rows: dict[tuple[str, str], _Row] = {}
    column = {name: i for i, name in enumerate(backends)}
    for entry in summary:
        key = (entry.op, entry.policy)
        row = rows.setdefault(key, _Row(*key, [_Cell() for _ in backends]))
        mix = row.mixes.setdefault(entry.dtypes, [_Cell() for _ in backends])
        for cell in (row.cells[column[entry.backend]], mix[column[entry.backend]]):
            cell.add(entry)
    return sorted(rows.values(), key=lambda r: (-r.new, -r.known, -r.own, r.op, r.policy))


def _detail(table: Iterable[_Row]) -> list[list[list[object]]]:
    """Return the dtype mixes of each row in a compact form, for the page's script.

    A mix is its dtypes and, for each backend that has it, [column, cases, own, known, new, outcomes
    unless all cases agreed].
    """
    return [
        [
            [short_dtypes(dtypes), *_cells(cells)]
            for dtypes, cells in sorted(row.mixes.items(), key=lambda m: _weight(m[1]))
        ]
        for row in table
    ]


def _cells(cells: Iterable[_Cell]) -> list[list[object]]:
    return [
        [i, c.cases, c.own, c.known, c.new, "" if c.kinds.keys() == {"agreed"} else c.said]
        for i, c in enumerate(cells)
        if c.cases
    ]


def _weight(cells: Sequence[_Cell]) -> tuple[int, int, int]:
    return -sum(c.new for c in cells), -sum(c.known for c in cells), -sum(c.cases for c in cells)


def _level(cases: int, most: int) -> int:
    """Return the shade of a cell on a logarithmic scale, 0 for none."""
    if cases <= 0:
        return 0
    return min(LEVELS, 1 + int(LEVELS * math.log1p(cases) / math.log1p(max(most, 1))))


def _height(cases: int, most: int) -> float:
    """Return the height of a bar in per cent on the same scale."""
    return round(100 * math.log1p(cases) / math.log1p(most), 1) if most else 0.0


# -- curves ---------------------------------------------------------------------------------------


class _Line(NamedTuple):
    """A curve: its points in per cent of the chart from the top left, in pieces without a gap."""

    name: str
    style: str
    pieces: tuple[str, ...]
    last: str


class _Chart(NamedTuple):
    title: str
    top: str
    lines: tuple[_Line, ...]


def _charts(trend: Trend) -> tuple[_Chart, ...]:
    """Return the curves of a trend: findings, kernel coverage and speed. None of a single run."""
    points = trend.points
    if len(points) < 2:
        return ()
    causes: dict[str, list[float | None]] = {
        "open": [p.open for p in points],
        "new": [p.new for p in points],
        "fixed": [p.fixed for p in points],
    }
    numbers = {b: [p.backends.get(b) for p in points] for b in trend.backends}
    reached = {
        b: [100 * n.reached / n.reachable if n and n.reachable else None for n in of]
        for b, of in numbers.items()
    }
    speed = {b: [n.rate if n and n.rate else None for n in of] for b, of in numbers.items()}
    tones = {"open": "l-open", "new": "l-new", "fixed": "l-fixed"}
    colours = {b: f"l-p{i}" if i < _COLOURS else "l-other" for i, b in enumerate(trend.backends)}
    most = max(v for of in causes.values() for v in of if v is not None)
    fastest = max((v for of in speed.values() for v in of if v is not None), default=0.0)
    return (
        _chart("findings", causes if most else {}, tones, most, "{:,.0f}".format),
        _chart("autocast kernels reached", reached, colours, 100.0, "{:.0f} %".format),
        _chart("cases a second of one worker", speed, colours, fastest, rate),
    )


def _chart(
    title: str,
    series: Mapping[str, Sequence[float | None]],
    styles: Mapping[str, str],
    top: float,
    said: Callable[[float], str],
) -> _Chart:
    lines = []
    for name, values in series.items():
        pieces, piece = [], list[str]()
        for i, value in enumerate([*values, None]):
            if value is not None:
                x, y = 100 * i / (len(values) - 1), 100 - 100 * value / top
                piece.append(f"{x:.2f},{y:.2f}")
            elif piece:
                pieces.append(" ".join(piece if len(piece) > 1 else piece * 2))  # a dot
                piece = []
        if pieces:
            last = next(v for v in reversed(values) if v is not None)
            lines.append(_Line(name, styles[name], tuple(pieces), said(last)))
    return _Chart(title, said(top), tuple(lines))


_ENVIRONMENT = Environment(
    loader=PackageLoader("amp_fuzz.reports"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_ENVIRONMENT.filters |= {
    "clean": clean,
    "number": "{:,}".format,
    "plural": plural,
    "rate": rate,
    "time": time_of,
    "cut": _cut,
    "short": short_dtypes,
    "excess": excess_text,
    "times": times_text,
    "counted": counted,
}
