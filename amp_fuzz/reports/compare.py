"""Two runs side by side: causes that are new, gone, or met more or less often than before."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias

from amp_fuzz.records.schema import GIVEN, OWN
from amp_fuzz.reports import Report
from amp_fuzz.reports.printable import plural
from amp_fuzz.reports.view import BackendView, FindingView, met

__all__ = ["Change", "Comparison", "Condition", "Speed", "compare", "conditions", "failing"]

State: TypeAlias = Literal["new", "more", "fewer", "fixed", "changed", "gone", "not seen"]

_GONE, _CHANGED = 0.01, 0.001  # chances below which a difference is said


class Change(NamedTuple):
    """A cause, or a known bug, on a backend.

    own: whether it is a cause that shows in the same way without autocast.

    state: new: only the second run met it, and if it is a known bug, chance does not explain that.
    fixed: the second run judged its case again, and both sides agreed. changed: it did, and the
    case is known now, or diverges by another cause. gone, more, fewer: chance does not explain the
    numbers. not seen: chance may, or the second run never called its op; said only of causes that
    are not known. before, after: the drawn cases that met it, of so many. Cases that are judged
    again do not count. known: whether it is a known bug. replay: a command, or "".
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
    own: bool = False


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
    """Two runs. differ: what else differs between them, a line each: versions, seeds, options.

    missing, added: backends that ran in the first only, and in the second only.
    """

    before: str
    after: str
    differ: tuple[str, ...]
    backends: tuple[Speed, ...]
    missing: tuple[str, ...]
    added: tuple[str, ...]
    changes: tuple[Change, ...]


def compare(before: Report, after: Report) -> Comparison:
    """Compare two runs, by backend and cause."""
    speeds = tuple(_speeds(before, after))
    both = {speed.backend for speed in speeds}
    ran, runs = ({b.name for b in side.view.backends if b.cases} for side in (before, after))
    changes = [change for change in _changes(before, after) if change.backend in both]
    order: Sequence[State] = ("new", "more", "fewer", "fixed", "changed", "gone", "not seen")
    changes.sort(key=lambda c: (c.known, c.own, order.index(c.state), -c.after, -c.before, c.id))
    return Comparison(
        before.view.run_id,
        after.view.run_id,
        tuple(_differ(before, after)),
        speeds,
        tuple(sorted(ran - both)),
        tuple(sorted(runs - both)),
        tuple(changes),
    )


def _differ(before: Report, after: Report) -> Iterator[str]:
    one, other = before.data.run, after.data.run
    for name in sorted({*one.versions, *other.versions}):
        yield from _line(name, one.versions.get(name, ""), other.versions.get(name, ""))
    yield from _line("seed", str(one.seed), str(other.seed))
    yield from _line("profile", one.profile, other.profile)
    yield from _line("options", " ".join(one.options), " ".join(other.options))
    yield from _line("command", *(_SEED.sub("", run.command) for run in (one, other)))
    for mine, others in ((one.machine, other.machine), (one.flags, other.flags)):
        for name in sorted({*mine, *others}) if mine and others else ():  # earlier runs have none
            yield from _line(name, mine.get(name, ""), others.get(name, ""))
    yield from _line("branch", one.branch or other.branch, other.branch or one.branch)
    for name in sorted({*one.commits} & {*other.commits}):
        yield from _line(f"commit of {name}", one.commits[name][:12], other.commits[name][:12])
    details = {b.name: b.detail for b in other.backends}
    for backend in one.backends:
        yield from _line(backend.name, backend.detail, details.get(backend.name, backend.detail))


_SEED = re.compile(r" --(?:seed|store)=\S+")


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
    return int(((cases["backend"] == backend.name) & ~cases["family"].isin(GIVEN)).sum())


_Sort: TypeAlias = Literal["", "backend", "known"]
_Key: TypeAlias = tuple[str, _Sort, str]


def _changes(before: Report, after: Report) -> Iterator[Change]:
    """Yield what is not the same, as far as the numbers can tell."""
    drawn = {s.backend: s.cases for s in _speeds(before, after)}
    one, other = _causes(before), _causes(after)
    again, called = _again(after), [_called(side) for side in (before, after)]
    for key in one.keys() | other.keys():
        backend, sort, name = key
        known = sort == "known"
        was, now = (side[key].cases if key in side else 0 for side in (one, other))
        of = drawn.get(backend, (0, 0))
        met = other.get(key) or one[key]
        state = _state(was, now, of)
        if key not in one:
            state = "new" if state == "new" or not known else None
        elif key not in other:
            state = "gone" if state == "gone" else None if known else "not seen"
            if (backend, met.op) in called[0] - called[1]:
                state = None if known else "not seen"
            judged = again.get((backend, met.case), state)
            # Nondeterminism that does not show proves nothing.
            if (met.kind, judged) != ("nondeterminism", "fixed"):
                state = judged
        elif state in ("new", "gone"):
            state = "more" if state == "new" else "fewer"
        if state is not None:
            own = sort == OWN
            yield Change(state, backend, name, met.title, was, now, *of, known, met.replay, own)


class _Cause(NamedTuple):
    title: str
    cases: int
    case: str
    kind: str
    op: str
    replay: str


def _causes(report: Report) -> Mapping[_Key, _Cause]:
    """Return the causes that a run met, by backend, with the numbers of drawn cases.

    Causes with one fingerprint, which behave as different policies, are one.
    """
    cases = report.data.cases
    new_causes, known_causes = met(replace(report.data, cases=cases[~cases["family"].isin(GIVEN)]))
    counts: dict[_Key, int] = {}
    for new in new_causes:
        counts.setdefault(_key(new), new.cases)
    for known in known_causes:
        counts |= {(backend, "known", known.id): n for backend, n in known.backends}
    found: dict[_Key, _Cause] = {}
    for new in (*report.view.new, *report.view.own):
        record, key = new.record, _key(new)
        title = f"{new.title} on {record.backend}"
        cause = _Cause(title, counts.get(key, 0), new.id, record.kind, record.op, new.replay)
        found.setdefault(key, cause)
    for known in report.view.known:
        # Ops of a known bug are told only if it has one.
        op = known.ops[0][0] if len(known.ops) == 1 else ""
        for backend, _ in known.backends:
            key = backend, "known", known.id
            found[key] = _Cause(known.what, counts.get(key, 0), "", "", op, known.replay)
    return found


def _key(new: FindingView) -> _Key:
    sort: _Sort = OWN if new.record.known == OWN else ""
    return new.record.backend, sort, new.record.fingerprint or new.id


def _again(report: Report) -> dict[tuple[str, str], State]:
    """Return what became of the findings that a run judged again, by backend and case."""
    cases = report.data.cases
    mine = cases[cases["family"].isin(GIVEN)]
    found: dict[tuple[str, str], State] = {}
    for backend, case, outcome in zip(mine["backend"], mine["id"], mine["outcome"], strict=True):
        found[backend, case] = "fixed" if outcome in ("agreed", "raised") else "changed"
    return found


def _called(report: Report) -> set[tuple[str, str]]:
    """Return the ops of the catalogue that the cases of a run called, by backend."""
    ops = report.data.ops
    return set(zip(ops["backend"], ops["op"], strict=True))


def _state(before: int, after: int, drawn: tuple[int, int]) -> State | None:
    """Return how the numbers of drawn cases differ; None if chance explains it."""
    chance = _chance(before, after, drawn)
    if chance >= (_CHANGED if before and after else _GONE):
        return None
    if not before or not after:
        return "gone" if before else "new"
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
    """Yield a line for each condition that holds, and for what ran in the first run only.

    What did not run proves nothing. Without a condition, nothing fails.
    """
    wanted = tuple(wanted)
    for name in comparison.missing if wanted else ():
        yield f"{name} ran in A and not in B"
    for condition in wanted:
        match condition.name:
            case "slower":
                slow = [s for s in comparison.backends if s.slower > condition.percent]
                for speed in slow:
                    yield f"{speed.backend} is {speed.slower:.0f} % slower"
            case "fewer-kernels":
                for speed in comparison.backends:
                    if (less := speed.reached[0] - speed.reached[1]) > 0:
                        yield f"{speed.backend} reaches {plural(less, 'kernel')} fewer"
            case name:
                causes = [c for c in comparison.changes if not (c.known or c.own)]
                count = sum(c.state == name for c in causes)
                if count:
                    how = "met more often" if name == "more" else name
                    yield f"{plural(count, 'cause')} {'is' if count == 1 else 'are'} {how}"
