"""The report as one HTML page that needs no network: styles, script and pictures are inside it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from jinja2 import Environment, PackageLoader, StrictUndefined

from amp_fuzz.program import statements
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
_LEVELS = 6


def render(view: View) -> str:
    """Return the page. Everything that a record holds is escaped; links are http or https."""
    environment = Environment(
        loader=PackageLoader("amp_fuzz.reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "clean": clean,
        "number": "{:,}".format,
        "plural": plural,
        "rate": rate,
        "time": time_of,
        "cut": _cut,
        "short": short_dtypes,
    }
    names = [b.name for b in view.backends]
    table = _table(view.summary, names)
    return environment.get_template("report.html").render(
        view=view,
        table=table,
        detail=_detail(table),
        policies=sorted({row.policy for row in table}),
        level=partial(_level, most=max((c.cases for r in table for c in r.cells), default=0)),
        findings=view.new[:MOST_FINDINGS],
        size=_size,
        outcomes=_outcomes,
        parts=_parts(view.backends),
        share=share,
    )


def _cut(text: str) -> str:
    if len(text) <= LONGEST_BLOCK:
        return text
    return text[:LONGEST_BLOCK] + "\n... (cut here: the record in the store has all of it)"


def _size(finding: FindingView) -> tuple[int, int]:
    """Return the numbers of statements of a finding's case, and of the case before minimising."""
    before, after = finding.record.case, finding.case
    return len([*statements(after.program.body)]), len([*statements(before.program.body)])


# -- bars -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a stacked bar: where it begins and how wide it is, in per cent of the bar."""

    name: str
    value: float
    start: float
    width: float


def _stack(values: Iterable[tuple[str, float]], whole: float) -> list[_Part]:
    parts, start = [], 0.0
    for name, value in values:
        width = 100 * value / whole if whole else 0.0
        parts.append(_Part(name, value, round(start, 3), round(width, 3)))
        start += width
    return parts


def _outcomes(b: BackendView) -> list[_Part]:
    counts = (("agreed", b.agreed), ("raised", b.raised), ("known", b.known), ("new", b.new))
    return _stack(counts, b.cases)


def _parts(backends: Sequence[BackendView]) -> dict[str, list[_Part]]:
    """Return the bar of each backend's time, parts in one order for all."""
    names = list(dict.fromkeys(name for b in backends for name, _ in b.seconds if name != "other"))
    bars = {}
    for b in backends:
        spent = dict(b.seconds)
        if whole := sum(spent.values()):
            bars[b.name] = _stack([(n, spent.get(n, 0.0)) for n in (*names, "other")], whole)
    return bars


# -- the table of ops -----------------------------------------------------------------------------


@dataclass(slots=True)
class _Cell:
    """What came of an op, by policy and perhaps dtypes, on one backend."""

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
    def title(self) -> str:
        kinds = ", ".join(f"{kind} {n:,}" for kind, n in sorted(self.kinds.items()))
        return f"{plural(self.cases, 'case')}, {plural(self.calls, 'call')}: {kinds}"


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
    """Return the mixes of dtypes of each row, as small as they go: the page's script shows them.

    A mix is its dtypes and, for each backend that has it, [column, cases, known, new, title].
    """
    return [
        [
            [short_dtypes(dtypes), *_cells(cells)]
            for dtypes, cells in sorted(row.mixes.items(), key=lambda m: _weight(m[1]))
        ]
        for row in table
    ]


def _cells(cells: Iterable[_Cell]) -> list[list[object]]:
    return [[i, c.cases, c.known, c.new, c.title] for i, c in enumerate(cells) if c.cases]


def _weight(cells: Sequence[_Cell]) -> tuple[int, int, int]:
    return -sum(c.new for c in cells), -sum(c.known for c in cells), -sum(c.cases for c in cells)


def _level(cases: int, *, most: int) -> int:
    """Return the shade of a cell, 0 for none, on a logarithmic scale."""
    if cases <= 0:
        return 0
    return max(1, math.ceil(_LEVELS * math.log1p(cases) / math.log1p(max(most, 1))))
