"""What a run has not seen: causes that more cases of its draw may show, and ingredients of plans.

A run that found nothing new has not shown that nothing is left. How rare its causes are says how
many are left: of many causes that few cases show, some are seen once, some twice, and some not yet.
The estimates are those of the field for species not seen yet:

- I. J. Good, "The population frequencies of species and the estimation of population parameters",
  Biometrika 40 (1953): the next case shows an unseen cause with a chance of about the share of
  cases that show a cause which no other case shows.
- W. W. Esty, "A normal limit law for a nonparametric estimator of the coverage of a random sample",
  Annals of Statistics 11 (1983): how far off that is.
- B. Efron and R. Thisted, "Estimating the number of unseen species: how many words did Shakespeare
  know?", Biometrika 63 (1976): how many unseen causes further cases show.
- M. Boehme, "STADS: software testing as species discovery", ACM TOSEM 27 (2018): the same for
  fuzzers.

They need cases that are drawn independently of each other. Cases that are judged again, and those
that aim at a kernel, are not: they count for nothing here. A cause that one of them shows is seen,
so the estimates are about the other causes. The draw of a case is the same throughout a run, but
each family has a fixed share of the cases, which makes numbers vary less than assumed here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from statistics import NormalDist
from typing import TYPE_CHECKING, NamedTuple

from amp_fuzz.records.fingerprint import plan_words
from amp_fuzz.records.schema import AIMED, DIVERGING, GIVEN, OWN
from amp_fuzz.reports.printable import clean, plural

if TYPE_CHECKING:
    import pandas as pd

    from amp_fuzz.reports.frames import RunData

__all__ = ["AHEAD", "LEVEL", "Estimate", "Unseen", "causes", "estimate", "unseen", "untried"]

AHEAD = 1000
"""How many more cases the reports speak of."""

LEVEL = 0.95
"""How sure the bound of a chance is."""

_Z = NormalDist().inv_cdf(LEVEL)
_TERMS = 10  # of Efron and Thisted's series; they used nine


class Estimate(NamedTuple):
    """What so many more cases show.

    next_case: the chance that the next case shows an unseen cause. chance: that any of them does.
    at_most: its upper bound, which holds for `LEVEL` of the runs. causes: how many unseen causes
    they show, on average.
    """

    next_case: float
    chance: float
    at_most: float
    causes: float


def estimate(counts: Collection[int], cases: int, ahead: int = AHEAD) -> Estimate:
    """Estimate what `ahead` more cases show that `cases` cases have not.

    counts: for each cause, in how many of the cases it shows. Without cases, nothing is known: both
    chances are 1.

    The bound of the chance of the next case is Poisson's for the number of causes seen once, or
    Esty's if that is larger: 3 / cases (the rule of three) if no cause is seen once or twice. What
    was seen decides the chance of each further case alike, so the chance over several follows, for
    any number of them. The number of causes is Efron and Thisted's while `ahead` is at most
    `cases`; beyond that it grows no faster than in proportion.
    """
    if not cases:
        return Estimate(1.0, 1.0, 1.0, 0.0)
    sizes = Counter(counts)
    once, twice = sizes[1], sizes[2]
    most = max(_poisson(once), once + _Z * math.sqrt(once + 2 * twice))
    here, above = min(once / cases, 1.0), min(most / cases, 1.0)
    chance, at_most = _any(here, ahead), _any(above, ahead)
    ratio = ahead / cases
    number = _new(sizes, min(ratio, 1.0)) * max(ratio, 1.0)
    # An average is at least the chance of one, and at most that of no cause seen twice.
    return Estimate(here, chance, at_most, min(max(number, chance), ratio * once))


def _poisson(count: int) -> float:
    """Return the upper bound of a Poisson mean, by Wilson and Hilferty: within 1 % of exact."""
    most = count + 1
    return float(most * (1 - 1 / (9 * most) + _Z / (3 * math.sqrt(most))) ** 3)


def _any(chance: float, cases: int) -> float:
    """Return the chance that one of some cases shows what each shows with a chance."""
    return 1.0 if chance >= 1 else -math.expm1(cases * math.log1p(-chance))


def _new(sizes: Mapping[int, int], ratio: float) -> float:
    """Return Efron and Thisted's number of new causes in `ratio` times as many further cases.

    Good and Toulmin's series alternates: frequent causes, of which nothing follows for rare ones,
    add noise. Each term is weighted by a tail of a binomial distribution, which leaves them out.
    """
    share = 1 / (1 + ratio)
    ways = [
        math.comb(_TERMS, k) * share**k * (1 - share) ** (_TERMS - k) for k in range(_TERMS + 1)
    ]
    return 0.0 - sum((-ratio) ** k * sizes.get(k, 0) * sum(ways[k:]) for k in range(1, _TERMS + 1))


# -- of a run -------------------------------------------------------------------------------------


class Unseen(NamedTuple):
    """The causes that a backend's drawn cases showed, and the estimate for `AHEAD` more.

    A cause is a new one, a known bug, or an accepted one of the baseline. own: the backend's own
    are apart, since they are no bugs of autocast, and often many more. cases: the drawn ones.
    causes: those that only drawn cases show. once: of them, those that one case shows.
    """

    backend: str
    own: bool
    cases: int
    causes: int
    once: int
    twice: int
    ahead: Estimate

    @property
    def name(self) -> str:
        """The backend, and which of its causes."""
        return f"{clean(self.backend)}{', its own' * self.own}"

    @property
    def likely(self) -> str:
        """The chance in words: ``22 %, at most 61 %``, and without the part that says nothing."""
        sure = self.ahead.at_most < _SURE
        bound = f"at most {_percent(self.ahead.at_most)}" if sure else ""
        chance = _percent(self.ahead.chance) if self.cases and self.once else ""
        return ", ".join(filter(None, (chance, bound))) or "unknown: too few cases"

    @property
    def expected(self) -> str:
        """How many unseen causes more cases show on average: ``2.3``, ``12``, ``0``."""
        number = self.ahead.causes
        return "-" if not self.cases else f"{number:.1f}" if 0 < number < 9.95 else f"{number:,.0f}"

    @property
    def counted(self) -> str:
        """What the chance is computed from: ``4,000 drawn cases, 0 causes seen once``."""
        return f"{plural(self.cases, 'drawn case')}, {plural(self.once, 'cause')} seen once"


_SURE = 0.995


def _percent(chance: float) -> str:
    return "over 99 %" if chance >= _SURE else f"{100 * chance:.0f} %"


def unseen(data: RunData) -> tuple[Unseen, ...]:
    """Return what each backend that ran may show yet; its own causes apart, if it showed any."""
    found = {
        key: Counter[str]() for key in ((b, own) for b in data.backends for own in (False, True))
    }
    elsewhere: dict[tuple[str, bool], set[str]] = {key: set() for key in found}
    for drawn, backend, own, names, cases in _causes(data):
        for name in names:
            if drawn:
                found[backend, own][name] += cases
            else:
                elsewhere[backend, own].add(name)
    whole, drawn_cases = (
        frame["backend"].value_counts() for frame in (data.cases, data.cases[_drawn(data)])
    )
    rows = []
    for (backend, own), counts in found.items():
        if not whole.get(backend, 0) or (own and not counts):
            continue
        cases = int(drawn_cases.get(backend, 0))
        sizes = [n for name, n in counts.items() if name not in elsewhere[backend, own]]
        once, twice = sizes.count(1), sizes.count(2)
        rows.append(Unseen(backend, own, cases, len(sizes), once, twice, estimate(sizes, cases)))
    return tuple(rows)


def _drawn(data: RunData) -> pd.Series[bool]:
    return ~data.cases["family"].isin((*GIVEN, AIMED))


def _causes(data: RunData) -> Iterator[tuple[bool, str, bool, tuple[str, ...], int]]:
    """Yield whether cases are drawn, their backend, whether own, their causes, and how many."""
    joined = {record.joins: record.fingerprint for record in data.records if record.joins}
    rows = data.cases[data.cases["outcome"].isin(DIVERGING)].assign(drawn=_drawn(data))
    keys = ["drawn", "backend", "outcome", "kind", "op", "known", "groups"]
    sizes = rows.groupby(keys, observed=True).size().reset_index()
    for drawn, backend, outcome, kind, op, known, groups, cases in sizes.itertuples(
        index=False, name=None
    ):
        names = causes(outcome, kind, op, known, groups.split(",") if groups else ())
        names = tuple(dict.fromkeys(joined.get(name, name) for name in names))
        yield bool(drawn), backend, outcome == OWN, names, int(cases)


def causes(outcome: str, kind: str, op: str, known: str, groups: Sequence[str]) -> tuple[str, ...]:
    """Return the causes of a case that diverged; one by its kind and op if it was not examined."""
    if outcome == "known":
        return tuple(known.split("+"))
    return tuple(groups) or (f"{kind} at {op}",)


def untried(data: RunData) -> dict[str, tuple[str, ...]]:
    """Return by backend the ingredients of plans that no case had, given cases included.

    Empty if the run is of an earlier amp-fuzz, which did not record plans.
    """
    if not data.plans:
        return {}
    return {
        name: tuple(word for word in plan_words() if (name, word) not in data.had)
        for name in data.cases["backend"].unique()
    }
