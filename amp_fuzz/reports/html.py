"""The report as one HTML page that needs no network: it contains styles, script and pictures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from jinja2 import Environment, PackageLoader, StrictUndefined

from amp_fuzz.cases.program import statements
from amp_fuzz.reports.view import (
    BackendView,
    FindingView,
    SummaryRow,
    View,
    clean,
    plural,
    rate,
    share,
    short_dtypes,
    time_of,
)

__all__ = ["render"]

MOST_FINDINGS, LONGEST_BLOCK = 200, 20_000
_LEVELS, _COLOURS = 6, 7  # as in the style sheet


def render(view: View) -> str:
    """Return the page. All text of records is escaped; links are http or https."""
    names = [b.name for b in view.backends]
    table = _table(view.summary, names)
    styles = _styles(view.backends)
    ran = [b for b in view.backends if b.cases]
    return _PAGE.render(
        view=view,
        table=table,
        detail=_detail(table),
        policies=sorted({row.policy for row in table}),
        level=partial(_level, most=max((c.cases for r in table for c in r.cells), default=0)),
        findings=view.new[:MOST_FINDINGS],
        size=_size,
        outcomes=_outcomes,
        reached=_reached,
        reach=share(sum(b.reached for b in ran), sum(b.reachable for b in ran)),
        parts=list(styles),
        styles=styles,
        bars={b.name: _times(b, styles) for b in ran if b.seconds},
        share=share,
        most_notes=MOST_FINDINGS,
    )


def _cut(text: str) -> str:
    if len(text) <= LONGEST_BLOCK:
        return text
    return text[:LONGEST_BLOCK] + "\n... (cut here: the record in the store has all of it)"


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
    counts = (("agreed", b.agreed), ("raised", b.raised), ("known", b.known), ("new", b.new))
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
    new: int = 0
    calls: int = 0
    kinds: dict[str, int] = field(default_factory=dict)

    def add(self, row: SummaryRow) -> None:
        self.cases += row.cases
        self.known += row.known
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
    return sorted(rows.values(), key=lambda r: (-r.new, -r.known, r.op, r.policy))


def _detail(table: Iterable[_Row]) -> list[list[list[object]]]:
    """Return the dtype mixes of each row in a compact form, for the page's script.

    A mix is its dtypes and, for each backend that has it, [column, cases, known, new, outcomes
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
        [i, c.cases, c.known, c.new, "" if c.kinds.keys() == {"agreed"} else c.said]
        for i, c in enumerate(cells)
        if c.cases
    ]


def _weight(cells: Sequence[_Cell]) -> tuple[int, int, int]:
    return -sum(c.new for c in cells), -sum(c.known for c in cells), -sum(c.cases for c in cells)


def _level(cases: int, *, most: int) -> int:
    """Return the shade of a cell on a logarithmic scale, 0 for none."""
    if cases <= 0:
        return 0
    return min(_LEVELS, 1 + int(_LEVELS * math.log1p(cases) / math.log1p(max(most, 1))))


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
}
_PAGE = _ENVIRONMENT.get_template("report.html")
