"""Device against device: where the backends of a run agree, and where they differ.

Backends draw their own cases, so no case is on two of them. What is compared is how often the
cases that reached a kernel with a mix of dtypes diverged or raised: Fisher's exact test says
whether chance explains that the numbers are uneven.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple, TypeAlias

from amp_fuzz.records.schema import DIVERGING
from amp_fuzz.reports.frames import RunData
from amp_fuzz.reports.printable import plural

__all__ = ["Apart", "Devices", "Mix", "Pair", "Side", "devices", "uneven"]

MOST = 200  # rows of each table: the first ones
_CHANCE = 0.01  # that a page has one difference or more that is none
_CLOSE = 4.0  # the square of a z-score below which no chance is that small
_FAR = 2.0  # times that the largest excess of one backend is that of another


class Side(NamedTuple):
    """A kernel with a mix of dtypes on a backend: the cases that reached it, by outcome.

    raised: on both sides, alike. own: those that differ in the same way without autocast. kinds:
    all divergences at it, by kind.
    """

    policies: tuple[str, ...]
    cases: int
    raised: int
    own: int
    known: int
    new: int
    kinds: tuple[tuple[str, int], ...]

    @property
    def diverged(self) -> int:
        """How many cases diverged at it."""
        return self.own + self.known + self.new

    @property
    def text(self) -> str:
        """The outcomes in short: ``40``, ``2 value of 40``, ``9 raised alike of 9``."""
        parts = [f"{n:,} {kind}" for kind, n in self.kinds]
        parts += [f"{self.raised:,} raised alike"] if self.raised else []
        return f"{', '.join(parts)} of {self.cases:,}" if parts else f"{self.cases:,}"

    @property
    def share(self) -> float:
        """The share of its cases that diverged or raised."""
        return (self.diverged + self.raised) / self.cases


class Mix(NamedTuple):
    """A kernel with a mix of dtypes on which backends are uneven. sides: None: it was not reached.

    pairs: the columns that differ more than chance explains. chance: of the most uneven pair.
    """

    op: str
    dtypes: str
    sides: tuple[Side | None, ...]
    pairs: tuple[tuple[int, int], ...]
    chance: float

    @property
    def policies(self) -> tuple[str, ...]:
        """What autocast does with it: several if that differs between backends."""
        return tuple(dict.fromkeys(p for side in self.sides if side for p in side.policies))


class Pair(NamedTuple):
    """Two backends: the mixes that both reached, and on how many they differ.

    ops: whose excess was measured on both; apart: of these, on how many the largest of one is more
    than twice that of the other.
    """

    mixes: int = 0
    differ: int = 0
    ops: int = 0
    apart: int = 0

    @property
    def text(self) -> str:
        """The mixes in short, ``3/240``; "" if both reached none."""
        return f"{self.differ:,}/{self.mixes:,}" if self.mixes else ""

    @property
    def excess(self) -> str:
        """The ops in short, ``excess 56/380``; "" if none was measured on both."""
        return f"excess {self.apart:,}/{self.ops:,}" if self.ops else ""


class Apart(NamedTuple):
    """The largest excess of an op by column, -1 where none was measured, and the largest ratio."""

    op: str
    excess: tuple[float, ...]
    ratio: float


class Devices(NamedTuple):
    """The backends that ran, side by side.

    pairs: by the numbers of two columns, the smaller first. mixes: the most uneven ones, first
    those that chance does not explain. shared: how many mixes two backends or more reached; of
    these, uneven: how many are uneven, and differ: more than chance explains. apart: the ops whose
    excess differs most, of `measured` for which it was measured on two backends or more.
    """

    columns: tuple[str, ...] = ()
    pairs: Mapping[tuple[int, int], Pair] = {}
    mixes: tuple[Mix, ...] = ()
    shared: int = 0
    uneven: int = 0
    differ: int = 0
    apart: tuple[Apart, ...] = ()
    measured: int = 0

    def between(self, mix: Mix, most: int) -> str:
        """Return the pairs that differ in a mix, in words, at most so many."""
        if not mix.pairs:
            return "chance may explain it"
        names = [f"{self.columns[i]} and {self.columns[j]}" for i, j in mix.pairs[:most]]
        more = len(mix.pairs) - len(names)
        return ", ".join([*names, *([f"{plural(more, 'pair')} more"] if more else [])])

    def pair(self, one: int, other: int) -> Pair:
        """Return what two columns have in common."""
        return self.pairs[min(one, other), max(one, other)]


def devices(data: RunData) -> Devices:
    """Return the backends of a run side by side; no columns if fewer than two ran."""
    ran = set(data.cases["backend"].unique())
    columns = tuple(name for name in data.backends if name in ran)
    if len(columns) < 2:
        return Devices()
    rows = _rows(data, columns)
    shared = {key: sides for key, sides in rows.items() if sum(s is not None for s in sides) > 1}
    tests = {key: list(_tests(sides)) for key, sides in shared.items()}
    limit = _CHANCE / max(sum(map(len, tests.values())), 1)
    tried = {key: list(_chances(own)) for key, own in tests.items() if own}
    mixes = [
        Mix(
            *key,
            shared[key],
            tuple(sorted({pair for pair, chance in chances if chance < limit})),
            min(chance for _, chance in chances),
        )
        for key, chances in tried.items()
    ]
    mixes.sort(key=lambda mix: (mix.chance, mix.op, mix.dtypes))
    apart = tuple(sorted(_apart(data, columns), key=lambda row: (-row.ratio, row.op)))
    return Devices(
        columns,
        _pairs(columns, shared, mixes, apart),
        tuple(mixes[:MOST]),
        len(shared),
        len(mixes),
        sum(bool(mix.pairs) for mix in mixes),
        apart[:MOST],
        len(apart),
    )


_Sides: TypeAlias = tuple[Side | None, ...]


def _rows(data: RunData, columns: Sequence[str]) -> dict[tuple[str, str], _Sides]:
    """Return the mixes that cases reached, with a side for each column."""
    found: dict[tuple[str, str], dict[str, list[tuple[str, str, str, int]]]] = {}
    kernels = data.kernels[data.kernels["outcome"] != "elsewhere"]
    fields = ["op", "dtypes", "backend", "policy", "outcome", "kind", "cases"]
    for op, dtypes, backend, *rest in kernels[fields].itertuples(index=False, name=None):
        found.setdefault((op, dtypes), {}).setdefault(backend, []).append(tuple(rest))
    return {
        key: tuple(_side(of[name]) if name in of else None for name in columns)
        for key, of in sorted(found.items())
        if key[0]
    }


def _side(rows: Sequence[tuple[str, str, str, int]]) -> Side:
    counts, kinds = Counter[str](), Counter[str]()
    for _, outcome, kind, cases in rows:
        counts[outcome] += cases
        if outcome in DIVERGING:
            kinds[kind] += cases
    policies = tuple(sorted({policy for policy, *_ in rows}))
    own, known, new = (counts[name] for name in DIVERGING)
    said = tuple(sorted(kinds.items(), key=lambda item: (-item[1], item[0])))
    return Side(policies, counts.total(), counts["raised"], own, known, new, said)


class _Test(NamedTuple):
    """An outcome on two columns. apart: how far the numbers are, as the square of a z-score."""

    apart: float
    pair: tuple[int, int]
    numbers: tuple[int, int, int, int]


def _tests(sides: _Sides) -> Iterator[_Test]:
    """Yield a test for each pair of columns, and each outcome that one of them has."""
    there = [(i, side) for i, side in enumerate(sides) if side is not None]
    for (i, one), (j, other) in combinations(there, 2):
        mine, its = dict(one.kinds), dict(other.kinds)
        counts = {(mine.get(kind, 0), its.get(kind, 0)) for kind in mine.keys() | its.keys()}
        counts |= {(one.raised, other.raised), (one.diverged, other.diverged)}
        for pair in counts - {(0, 0), (one.cases, other.cases)}:
            numbers = (*pair, one.cases, other.cases)
            yield _Test(_apart_by(*numbers), (i, j), numbers)


def _apart_by(some: int, others: int, of_some: int, of_others: int) -> float:
    share = (some + others) / (of_some + of_others)
    spread = share * (1 - share) * (1 / of_some + 1 / of_others)
    return float((some / of_some - others / of_others) ** 2 / spread)


def _chances(tests: Sequence[_Test]) -> Iterator[tuple[tuple[int, int], float]]:
    """Yield the chance of the most uneven pair, and of each that may be marked.

    The exact test of all pairs of 10,000 mixes on six backends takes longer than the whole report.
    """
    most = max(tests)
    yield most.pair, uneven(*most.numbers)
    for test in tests:
        if test.apart > _CLOSE and test is not most:
            yield test.pair, uneven(*test.numbers)


def uneven(some: int, others: int, of_some: int, of_others: int) -> float:
    """Return how likely numbers are as uneven as these, or more, if both have the same cause.

    That is the smaller tail of Fisher's exact test: `some` of `of_some` cases, and `others` of
    `of_others`, with the sums given.
    """
    total, whole = some + others, of_some + of_others
    few = some * whole <= total * of_some
    step = -1 if few else 1
    most = max(0, total - of_others) if few else min(total, of_some)
    # From the numbers on, each term is smaller than the one before.
    term = tail = math.exp(_log_ways(of_some, some) + _log_ways(of_others, others)
                           - _log_ways(whole, total))  # fmt: skip
    at = some
    while at != most and term > tail * 1e-12:
        a, b = (at, of_others - total + at) if few else (of_some - at, total - at)
        c, d = (of_some - at + 1, total - at + 1) if few else (at + 1, of_others - total + at + 1)
        term *= a * b / (c * d)
        tail += term
        at += step
    return min(tail, 1.0)


def _log_ways(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def _apart(data: RunData, columns: Sequence[str]) -> Iterator[Apart]:
    for op in sorted({op for _, op in data.farthest}):
        values = tuple(data.farthest.get((name, op), -1.0) for name in columns)
        measured = [value for value in values if value >= 0]
        if len(measured) > 1:
            yield Apart(op, values, _ratio(min(measured), max(measured)))


def _ratio(small: float, large: float) -> float:
    return large / small if small else math.inf if large else 1.0


def _pairs(
    columns: Sequence[str],
    shared: Mapping[tuple[str, str], _Sides],
    mixes: Sequence[Mix],
    apart: Sequence[Apart],
) -> dict[tuple[int, int], Pair]:
    differ = Counter(pair for mix in mixes for pair in mix.pairs)
    found = {}
    for i, j in combinations(range(len(columns)), 2):
        both = sum(sides[i] is not None and sides[j] is not None for sides in shared.values())
        values = [(row.excess[i], row.excess[j]) for row in apart]
        measured = [sorted(pair) for pair in values if min(pair) >= 0]
        far = sum(_ratio(*pair) > _FAR for pair in measured)
        found[i, j] = Pair(both, differ[i, j], len(measured), far)
    return found
