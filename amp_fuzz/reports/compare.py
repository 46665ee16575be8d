"""Two runs side by side: causes that are new, gone, or met more or less often than before."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from amp_fuzz.records.schema import GIVEN
from amp_fuzz.reports import Report
from amp_fuzz.reports.view import BackendView, plural

__all__ = ["Change", "Comparison", "Condition", "Speed", "compare", "conditions", "failing"]

State: TypeAlias = Literal["new", "more", "fewer", "fixed", "gone", "not seen"]

_GONE, _CHANGED = 0.01, 0.001  # chances below which a difference is said


class Change(NamedTuple):
    """A cause, or a known bug, on a backend.

    state: new: only the second run met it, and if it is a known bug, chance does not explain that.
    fixed: the second run judged its case again, and both sides agreed. gone, more, fewer: chance
    does not explain the numbers. not seen: chance may; said only of causes that are not known.
    before, after: the cases that met it, of so many that were drawn. known: whether it is a known
    bug. replay: a command, or "".
    """

    state: State
    backend: str
    id: str
    title: str
    before: int
    after: int
    of_before: int
    of_after: int
    known: bool
    replay: str


class Speed(NamedTuple):
    """A backend in both runs: cases drawn, cases a second of a worker, autocast kernels reached."""

    backend: str
    cases: tuple[int, int]
    rates: tuple[float, float]
    reached: tuple[int, int]

    @property
    def slower(self) -> float:
        """By how many per cent the second run is slower; negative if it is faster."""
        before, after = self.rates
        return 100 * (1 - after / before) if before and after else 0.0


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs. differ: what else differs between them, a line each: versions, seeds, options."""

    before: str
    after: str
    differ: tuple[str, ...]
    backends: tuple[Speed, ...]
    missing: tuple[str, ...]
    changes: tuple[Change, ...]


def compare(before: Report, after: Report) -> Comparison:
    """Compare two runs, by backend and cause."""
    speeds = tuple(_speeds(before, after))
    both = {speed.backend for speed in speeds}
    alone = {b.name for b in (*before.view.backends, *after.view.backends) if b.cases} - both
    changes = [change for change in _changes(before, after) if change.backend in both]
    order: Sequence[State] = ("new", "more", "fewer", "fixed", "gone", "not seen")
    changes.sort(key=lambda c: (c.known, order.index(c.state), -c.after, -c.before, c.id))
    return Comparison(
        before.view.run_id,
        after.view.run_id,
        tuple(_differ(before, after)),
        speeds,
        tuple(sorted(alone)),
        tuple(changes),
    )


def _differ(before: Report, after: Report) -> Iterator[str]:
    one, other = before.data.run, after.data.run
    for name in sorted({*one.versions, *other.versions}):
        yield from _line(name, one.versions.get(name, ""), other.versions.get(name, ""))
    yield from _line("seed", str(one.seed), str(other.seed))
    yield from _line("profile", one.profile, other.profile)
    yield from _line("options", " ".join(one.options), " ".join(other.options))
    details = {b.name: b.detail for b in other.backends}
    for backend in one.backends:
        yield from _line(backend.name, backend.detail, details.get(backend.name, backend.detail))


def _line(name: str, before: str, after: str) -> Iterator[str]:
    if before != after:
        yield f"{name}: {before or 'none'} -> {after or 'none'}"


def _speeds(before: Report, after: Report) -> Iterator[Speed]:
    others = {b.name: b for b in after.view.backends}
    for one in before.view.backends:
        other = others.get(one.name)
        if one.cases and other is not None and other.cases:
            drawn = _drawn(before, one), _drawn(after, other)
            rates = one.rate, other.rate
            yield Speed(one.name, drawn, rates, (one.reached, other.reached))


def _drawn(report: Report, backend: BackendView) -> int:
    cases = report.data.cases
    mine = cases[(cases["backend"] == backend.name) & ~cases["family"].isin(GIVEN)]
    return len(mine)


_Key: TypeAlias = tuple[str, bool, str]


def _changes(before: Report, after: Report) -> Iterator[Change]:
    """Yield what is not the same, as far as the numbers can tell."""
    drawn = {s.backend: s.cases for s in _speeds(before, after)}
    one, other = _causes(before), _causes(after)
    agree = _agree(after)
    for key in one.keys() | other.keys():
        backend, known, name = key
        was, now = (side[key].cases if key in side else 0 for side in (one, other))
        of = drawn.get(backend, (0, 0))
        state = _state(was, now, of, known)
        met = other.get(key) or one[key]
        if key not in other and (backend, met.case) in agree:
            state = "fixed"
        if state is not None:
            yield Change(state, backend, name, met.title, was, now, *of, known, met.replay)


class _Cause(NamedTuple):
    title: str
    cases: int
    case: str
    replay: str


def _causes(report: Report) -> Mapping[_Key, _Cause]:
    """Return the causes that a run met among the cases that it drew, by backend."""
    found: dict[_Key, _Cause] = {}
    for new in report.view.new:
        record = new.record
        name = record.fingerprint or record.id
        title = f"{new.title} on {record.backend}"
        found[record.backend, False, name] = _Cause(title, new.cases, new.id, new.replay)
    for known in report.view.known:
        for backend, cases in known.backends:
            found[backend, True, known.id] = _Cause(known.what, cases, "", known.replay)
    return found


def _agree(report: Report) -> set[tuple[str, str]]:
    """Return the findings of the store that a run judged again, and that agreed."""
    cases = report.data.cases
    mine = cases[cases["family"].isin(GIVEN) & cases["outcome"].isin(["agreed", "raised"])]
    return set(zip(mine["backend"], mine["id"], strict=True))


def _state(before: int, after: int, drawn: tuple[int, int], known: bool) -> State | None:
    """Return how the numbers differ; None if chance explains it and nobody needs to know."""
    chance = _chance(before, after, drawn)
    if not before:
        return "new" if chance < _GONE or not known else None
    if not after:
        return "gone" if chance < _GONE else None if known else "not seen"
    if chance >= _CHANGED:
        return None
    return "more" if after * drawn[0] > before * drawn[1] else "fewer"


def _chance(before: int, after: int, drawn: tuple[int, int]) -> float:
    """Return how likely so uneven numbers are, or more uneven ones, if nothing changed.

    Each of ``before + after`` cases then fell into the second run with the same chance, that of its
    share of all cases: the smaller tail of a binomial distribution.
    """
    total, share = before + after, drawn[1] / max(sum(drawn), 1)
    if not 0 < share < 1:
        return 1.0
    few = after <= total * share
    tail = range(after + 1) if few else range(after, total + 1)
    return sum(math.exp(_log_binomial(total, i, share)) for i in tail)


def _log_binomial(n: int, k: int, p: float) -> float:
    ways = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
    return ways + k * math.log(p) + (n - k) * math.log1p(-p)


# -- what fails -----------------------------------------------------------------------------------


class Condition(NamedTuple):
    """A condition that fails a comparison. percent: how much slower is too slow."""

    name: Literal["new", "more", "fewer-kernels", "slower"]
    percent: float = 0.0


def conditions(text: str) -> tuple[Condition, ...]:
    """Read conditions, joined by commas. Raises `ValueError`, with what they may be."""
    found = []
    for word in filter(None, (part.strip() for part in text.split(","))):
        match = re.fullmatch(r"(new|more|fewer-kernels)|slower:(\d+(?:\.\d+)?)%?", word)
        if match is None:
            raise ValueError(f"{word!r}: use new, more, fewer-kernels, slower:PERCENT")
        slower = match[2] is not None
        found.append(Condition("slower", float(match[2])) if slower else Condition(match[1]))  # type: ignore[arg-type]
    return tuple(found)


def failing(comparison: Comparison, wanted: Iterable[Condition]) -> Iterator[str]:
    """Yield a line for each condition that holds."""
    for condition in wanted:
        match condition.name:
            case "slower":
                slow = [s for s in comparison.backends if s.slower > condition.percent]
                for speed in slow:
                    yield f"{speed.backend} is {speed.slower:.0f} % slower"
            case "fewer-kernels":
                for speed in comparison.backends:
                    if (less := speed.reached[0] - speed.reached[1]) > 0:
                        yield f"{speed.backend} reaches {plural(less, 'kernel')} less"
            case name:
                count = sum(c.state == name and not c.known for c in comparison.changes)
                if count:
                    yield f"{plural(count, 'cause')} {'is' if count == 1 else 'are'} {name}"
