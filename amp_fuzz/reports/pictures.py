"""What the pictures of a report show, as plain facts: each number stands in a cell of a table."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from amp_fuzz.cases.program import FLOAT_DTYPES
from amp_fuzz.records.fingerprint import plan_words
from amp_fuzz.records.schema import DIVERGING, MOST_EXCESS, Outcome
from amp_fuzz.reports.devices import Devices, devices
from amp_fuzz.reports.frames import RunData

__all__ = [
    "Cell",
    "Heat",
    "Pictures",
    "Spread",
    "Tested",
    "excess_text",
    "far",
    "pictures",
    "shade",
    "times_text",
]

LEVELS = 6  # shades in the style sheet


class Cell(NamedTuple):
    """A cell of a heat map. level: its shade, 0 for none. over: it needs attention.

    said: the same in words, for those who do not see the shade. numbers: that it shows, by name;
    None if there are none.
    """

    text: str
    level: int
    said: str
    over: bool = False
    numbers: Mapping[str, float | None] | None = None


class Heat(NamedTuple):
    """A heat map. rows: an op with a cell for each column, the worst first."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Cell, ...]], ...]


class Spread(NamedTuple):
    """The largest excess of each case of a backend in which one was measured.

    counts: the cases by `Pictures.edges`: those at most at the edge, and above the edge before; the
    last is above all. over: how many exceed the threshold.
    """

    backend: str
    measured: int
    median: float
    most_of_all: float
    largest: float
    over: int
    counts: tuple[int, ...]


class Tested(NamedTuple):
    """What was compared: the cases by kernel and policy, over all backends.

    plans: none if the run is of an earlier amp-fuzz, which did not record them.
    rows: the kernel, its policy, and a number for each dtype and each ingredient of a plan. A
    kernel that was not compared, though a backend lists it, has a row of zeros and no policy.
    policies: the number of kernels of each policy, and of those that each column reached.
    """

    dtypes: tuple[str, ...]
    plans: tuple[str, ...]
    rows: tuple[tuple[str, str, tuple[int, ...]], ...]
    policies: tuple[tuple[str, int, tuple[int, ...]], ...]

    @property
    def empty(self) -> int:
        """How many cells are empty."""
        return sum(not n for *_, counts in self.rows for n in counts)

    @property
    def size(self) -> int:
        """How many cells there are."""
        return len(self.rows) * (len(self.dtypes) + len(self.plans))


@dataclass(frozen=True, slots=True)
class Pictures:
    """The pictures of a run.

    threshold: of the excess; 0 if the run did not record it. edges: of the bins of `spreads`; the
    threshold is one of them.
    """

    divergences: Heat
    excess: Heat
    threshold: float
    edges: tuple[float, ...]
    spreads: tuple[Spread, ...]
    tested: Tested
    devices: Devices


def pictures(data: RunData) -> Pictures:
    """Return what the pictures of a run show."""
    threshold = data.run.threshold
    edges = tuple(threshold * 2.0**i for i in range(-6, 4))
    return Pictures(
        _divergences(data),
        _excess(data, threshold),
        threshold,
        edges,
        tuple(_spread(name, data.excess[name], edges, threshold) for name in _measured(data)),
        _tested(data),
        devices(data),
    )


# -- heat maps ------------------------------------------------------------------------------------


def _divergences(data: RunData) -> Heat:
    """Return op x backend: how many of the cases that call an op diverged first at it."""
    called: dict[tuple[str, str], int] = {}
    for backend, op, cases in data.ops.itertuples(index=False, name=None):
        called[op, backend] = cases
    for name, cases in data.cases["backend"].value_counts().items():
        called["", str(name)] = int(cases)  # a gradient, the state: no single op
    rows = data.cases[data.cases["outcome"].isin(DIVERGING)]
    keys = ["op", "backend", "outcome", "kind"]
    found: Counter[tuple[str, str, str]] = Counter()
    sizes = rows.groupby(keys, observed=True).size().reset_index()
    for op, backend, outcome, kind, cases in sizes.itertuples(index=False, name=None):
        found[op, backend, outcome] += cases
        if op and kind in ("crash", "timeout"):  # such a case has no record of what it called
            called[op, backend] = called.get((op, backend), 0) + cases
    columns = tuple(data.backends)
    lines = []
    for op in sorted({op for op, *_ in found}):
        counts = [{name: found[op, b, name] for name in DIVERGING} for b in columns]
        cells = (
            _diverged(of, [called.get((part, b), 0) for part in op.split("+")])
            for of, b in zip(counts, columns, strict=True)
        )
        new, total = sum(of["diverged"] for of in counts), sum(sum(of.values()) for of in counts)
        lines.append(((-new, -total, op), op, tuple(cells)))
    return Heat(columns, tuple(line[1:] for line in sorted(lines)))


def shade(share: float) -> int:
    """Return the shade of a share of cases, 0 for none."""
    return 1 + bisect_left((0.01, 0.03, 0.1, 0.3, 0.6), share) if share else 0


def _diverged(counts: Mapping[Outcome, int], called: Sequence[int]) -> Cell:
    """Return a cell.

    called: the cases that call each op. How many call all of several is unknown.
    """
    own, known, new = (counts[name] for name in DIVERGING)
    both, most = own + known + new, min(called)
    if not both and not most:
        return Cell("", 0, "not called")
    numbers: dict[str, float | None] = {"own": own, "known": known, "new": new, "called": most}
    parts = f"{own:,} without autocast too, " * bool(own) + f"{known:,} known, {new:,} new"
    if len(called) > 1 or not most:
        said = f"{both:,} diverged here: {parts}"
        numbers["called"] = None
        return Cell(f"{both:,}", min(both, 1), said, new > 0, numbers)
    if not both:
        return Cell("0", 0, f"none of {most:,} diverged here", numbers=numbers)
    level = shade(both / most)
    said = f"{both:,} of {most:,} diverged here: {parts}"
    return Cell(f"{both:,}/{most:,}", level, said, new > 0, numbers)


def _measured(data: RunData) -> tuple[str, ...]:
    return tuple(name for name in data.backends if len(data.excess.get(name, ())))


def _excess(data: RunData, threshold: float) -> Heat:
    """Return op x backend: the largest excess of a value that the op computed."""
    columns = _measured(data)
    lines = []
    for op in sorted({op for _, op in data.farthest}):
        values = [data.farthest.get((b, op), -1.0) for b in columns]
        lines.append(((-max(values), op), op, tuple(far(v, threshold) for v in values)))
    return Heat(columns, tuple(line[1:] for line in sorted(lines)))


def far(excess: float, threshold: float) -> Cell:
    """Return the cell of a largest excess, negative if none was measured."""
    if excess < 0:
        return Cell("", 0, "not measured")
    text, share = excess_text(excess), excess / threshold if threshold else 0.0
    numbers = {"excess": excess}
    if share > 1:
        return Cell(text, LEVELS, f"{text}: over the threshold", True, numbers)
    level = 1 + bisect_left((0.125, 0.25, 0.5, 0.75), share)
    return Cell(text, level, f"{text}: {100 * share:.0f} % of the threshold", numbers=numbers)


def excess_text(excess: float) -> str:
    """Return an excess with two or three digits; "beyond" for what has no number."""
    if excess >= MOST_EXCESS:
        return "beyond"
    return f"{excess:,.0f}" if excess >= 99.5 else f"{excess:.2g}"


def times_text(ratio: float) -> str:
    """Return how many times an excess is another; "beyond" for what has no number."""
    return f"{ratio:,.1f}" if ratio < MOST_EXCESS else "beyond"


# -- distributions --------------------------------------------------------------------------------


def _spread(
    backend: str, excess: Sequence[float], edges: Sequence[float], threshold: float
) -> Spread:
    values = np.sort(np.asarray(excess, dtype=float))
    # An excess that equals the threshold is not over it: bins hold their upper edge.
    until = [0, *np.searchsorted(values, edges, side="right").tolist(), len(values)]
    # A value that occurs, not one between two.
    median, most_of_all = np.quantile(values, [0.5, 0.99], method="higher").tolist()
    return Spread(
        backend,
        len(values),
        median,
        most_of_all,
        float(values[-1]),
        int((values > threshold).sum()) if threshold else 0,
        tuple(b - a for a, b in pairwise(until)),
    )


# -- what was tested ------------------------------------------------------------------------------

_MIXED, _OTHER = "several", "other"


def _tested(data: RunData) -> Tested:
    rows: dict[tuple[str, str], Counter[str]] = {}
    # Without a call it is the place of a divergence that is none of the case's kernels.
    compared = data.kernels[(data.kernels["outcome"] != "elsewhere") & (data.kernels["calls"] > 0)]
    dtypes = (*FLOAT_DTYPES, _MIXED, _OTHER)
    plans = plan_words() if data.plans or compared.empty else ()
    kernels = compared[["op", "policy", "dtypes", "cases"]]
    for op, policy, joined, cases in kernels.itertuples(index=False, name=None):
        rows.setdefault((op, policy), Counter())[_dtype(joined)] += cases
    for (op, policy, word), cases in data.plans.items():
        rows.setdefault((op, policy), Counter())[word] += cases
    met = {op for op, _ in rows}
    listed = {kernel for backend in data.run.backends for kernel in backend.kernels}
    rows |= {(op, ""): Counter() for op in listed - met}
    columns = (*dtypes, *plans)
    lines = [(*key, tuple(counts[c] for c in columns)) for key, counts in sorted(rows.items())]
    return Tested(dtypes, plans, tuple(lines), tuple(_policies(lines, len(columns))))


def _dtype(joined: str) -> str:
    names = set(joined.split(","))
    if len(names) > 1:
        return _MIXED
    (name,) = names
    return name if name in FLOAT_DTYPES else _OTHER


def _policies(
    lines: Iterable[tuple[str, str, tuple[int, ...]]], columns: int
) -> Iterable[tuple[str, int, tuple[int, ...]]]:
    of: dict[str, list[tuple[int, ...]]] = {}
    for _, policy, counts in lines:
        of.setdefault(policy, []).append(counts)
    for policy, rows in sorted(of.items(), key=lambda item: (item[0] == "", item[0])):
        yield policy, len(rows), tuple(sum(row[i] > 0 for row in rows) for i in range(columns))
