"""What treatments of ops cost, added up over calls."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from amp_fuzz.interfaces.policy_costs.measure import (
    DTYPES,
    FLOAT32,
    LOWER,
    Arrival,
    Kept,
    Way,
    parts,
)
from amp_fuzz.interfaces.precision.result import digits_in
from amp_fuzz.policies.tables import Policy, PolicyTable

__all__ = ["ARRIVALS", "MARGIN", "Costs", "Tally", "full", "treatment"]

ARRIVALS: tuple[Arrival, ...] = ("float32", "16 bits")
MARGIN = 0.5
"""Digits below those of the dtype at which an op counts as losing more than a rounding does."""
_FEWEST = 5
"""Drawn calls below which nothing is said of an op."""


def full(dtype: str) -> float:
    """Return the digits that an autocast dtype has."""
    return round(digits_in(DTYPES[dtype]), 1)


@dataclass(slots=True)
class Tally:
    """What one way keeps of an op's calls: how many calls keep so many digits, to a tenth.

    overflowed, vanished: calls with elements that became infinite or NaN, or with a result or a
    gradient that became 0. emulated: those for which the CPU has no kernel of 16 bits.
    """

    results: Counter[float] = field(default_factory=Counter)
    gradients: Counter[float] = field(default_factory=Counter)
    overflowed: int = 0
    vanished: int = 0
    emulated: int = 0

    def add(self, kept: Kept) -> None:
        """Add a call."""
        if kept.results is not None:
            self.results[round(kept.results, 1)] += 1
        if kept.gradients is not None:
            self.gradients[round(kept.gradients, 1)] += 1
        self.overflowed += kept.overflowed
        self.vanished += kept.vanished
        self.emulated += kept.emulated

    def merge(self, other: Tally) -> None:
        """Add the calls of another one."""
        self.results += other.results
        self.gradients += other.gradients
        self.overflowed += other.overflowed
        self.vanished += other.vanished
        self.emulated += other.emulated

    def digits(self, share: float) -> float | None:
        """Return the digits below which this share of the calls is, of the worse of both kinds."""
        found = [_quantile(some, share) for some in (self.results, self.gradients) if some]
        return min(found, default=None)

    def amplifies(self, dtype: str) -> bool:
        """Return whether more than roundings to a dtype is lost in a tenth of the calls."""
        digits = self.digits(0.1)
        return digits is not None and digits < full(dtype) - MARGIN


def _quantile(counts: Counter[float], share: float) -> float:
    left = share * counts.total()
    for digits in sorted(counts):
        left -= counts[digits]
        if left <= 0:
            return digits
    return max(counts)


def treatment(policy: str, arrival: Arrival) -> str:
    """Return how a policy treats a call; "" if it raises. All operands arrive alike."""
    if policy == Policy.BANNED:
        return ""
    if policy == Policy.LOWER_PRECISION_FP:
        return LOWER
    as_it_arrives = policy in ("", Policy.PROMOTE)
    return LOWER if as_it_arrives and arrival == "16 bits" else FLOAT32


@dataclass(slots=True)
class Costs:
    """What treatments of ops cost, by op.

    tallies: by op and way. calls: that were judged. left: those that were not, by reason. policies:
    by op and device; "" is no rule.
    """

    tallies: dict[str, dict[Way, Tally]] = field(default_factory=lambda: defaultdict(dict))
    calls: Counter[str] = field(default_factory=Counter)
    left: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    policies: dict[str, dict[str, str]] = field(default_factory=dict)

    @classmethod
    def of(cls, tables: Mapping[str, PolicyTable]) -> Costs:
        """Return costs without calls, of the ops that have a rule on some device."""
        names = sorted({name for table in tables.values() for name in table.rules})
        found = {
            name: {
                device: str(table.rules[name].policy) if name in table.rules else ""
                for device, table in tables.items()
            }
            for name in names
        }
        return cls(policies=found)

    @property
    def devices(self) -> list[str]:
        """The devices whose policies these are."""
        return list(next(iter(self.policies.values()), {}))

    def add(self, op: str, way: Way, kept: Kept) -> None:
        """Add a call that was made in a way."""
        self.tallies[op].setdefault(way, Tally()).add(kept)

    def merge(self, other: Costs) -> None:
        """Add the calls of others."""
        for op, ways in other.tallies.items():
            for way, tally in ways.items():
                self.tallies[op].setdefault(way, Tally()).merge(tally)
        self.calls += other.calls
        for op, reasons in other.left.items():
            self.left[op] += reasons
        self.policies |= other.policies

    # -- what they say ----------------------------------------------------------------------------

    def judged(self, fewest: int = _FEWEST) -> list[str]:
        """Return the ops with enough calls."""
        return sorted(op for op in self.policies if self.calls[op] >= fewest)

    def lowered(self, op: str, dtype: str, arrival: Arrival) -> Tally | None:
        """Return what an op keeps if it is lowered."""
        return self.tallies[op].get(Way(dtype, arrival, LOWER)) if op in self.tallies else None

    def treated(self, op: str, device: str, way: tuple[str, Arrival]) -> str:
        """Return how a device treats an op's calls, of a dtype and an arrival."""
        policy, in_parts = self.policies[op][device], parts(device)
        whole = policy or Way(*way, in_parts) not in self.tallies.get(op, ())
        return treatment(policy, way[1]) if whole else in_parts

    def lowers(self, op: str) -> list[str]:
        """Return the devices that lower an op's float32 operands."""
        policies = self.policies[op]
        return [d for d, p in policies.items() if treatment(p, "float32") == LOWER]

    def keeps(self, op: str) -> list[str]:
        """Return the devices whose table has an op computed in float32."""
        return [d for d, p in self.policies[op].items() if p.startswith("fp32")]

    def amplifies(self, op: str, dtype: str, arrival: Arrival) -> bool:
        """Return whether the op, lowered, loses more than a rounding in a tenth of its calls."""
        tally = self.lowered(op, dtype, arrival)
        return tally is not None and tally.amplifies(dtype)

    def needless(self, op: str, dtype: str) -> bool:
        """Return whether the op, lowered, loses no more than a rounding in any call.

        Not if the CPU has no kernel of 16 bits for it.
        """
        tallies = [self.lowered(op, dtype, arrival) for arrival in ARRIVALS]
        return all(
            t is not None
            and not (t.overflowed or t.vanished or t.emulated)
            and (worst := t.digits(0)) is not None
            and worst >= full(dtype) - MARGIN
            for t in tallies
        )

    def verdicts(self) -> dict[str, dict[str, list[str]]]:
        """Return the ops that amplify and those that need no float32, by autocast dtype."""
        return {
            "amplifies": {
                f"{dtype}; {arrival}": [
                    op for op in self.judged() if self.amplifies(op, dtype, arrival)
                ]
                for dtype in DTYPES
                for arrival in ARRIVALS
            },
            "needless": {
                dtype: [op for op in self.judged() if self.needless(op, dtype)] for dtype in DTYPES
            },
        }

    # -- as data ----------------------------------------------------------------------------------

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return {
            "torch": torch.__version__,
            "calls": dict(sorted(self.calls.items())),
            "left": {op: dict(reasons) for op, reasons in sorted(self.left.items())},
            "policies": self.policies,
            "tallies": {
                op: {"; ".join(way): _data(tally) for way, tally in sorted(ways.items())}
                for op, ways in sorted(self.tallies.items())
                if ways
            },
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Costs:
        """Return what `as_dict` returned."""
        made = cls(calls=Counter(data["calls"]), policies=dict(data["policies"]))
        made.left.update({op: Counter(reasons) for op, reasons in data["left"].items()})
        for op, ways in data["tallies"].items():
            made.tallies[op] = {Way(*key.split("; ")): _tally(row) for key, row in ways.items()}
        return made


_COUNTED = ("overflowed", "vanished", "emulated")


def _data(tally: Tally) -> dict[str, Any]:
    counts = {"results": _text(tally.results), "gradients": _text(tally.gradients)}
    more = {name: getattr(tally, name) for name in _COUNTED}
    return {**counts, **{name: n for name, n in more.items() if n}}


def _tally(row: Mapping[str, Any]) -> Tally:
    counts = _counted(row["results"]), _counted(row["gradients"])
    return Tally(*counts, *(row.get(name, 0) for name in _COUNTED))


def _text(counts: Counter[float]) -> str:
    return " ".join(f"{digits:.1f}:{n}" for digits, n in sorted(counts.items()))


def _counted(text: str) -> Counter[float]:
    pairs = (pair.split(":") for pair in text.split())
    return Counter({float(digits): int(n) for digits, n in pairs})
