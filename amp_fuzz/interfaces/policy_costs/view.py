"""What costs of policies say, as rows of tables and as a page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from amp_fuzz.interfaces.policy_costs.measure import DTYPES, FLOAT32, LOWER, Arrival, Way
from amp_fuzz.interfaces.policy_costs.tally import ARRIVALS, MARGIN, Costs, Tally, full

__all__ = ["BY_DEVICE", "View", "page"]

BY_DEVICE = ("lowered", "amplify", "in 16 bits if they arrive so", "amplify")
Verdicts: TypeAlias = Mapping[str, Mapping[str, Sequence[str]]]


class Loss(NamedTuple):
    """An op that loses more than a rounding where its operands arrive so, in an autocast dtype."""

    op: str
    dtype: str
    arrival: Arrival


@dataclass(frozen=True, slots=True)
class View:
    """Costs of drawn calls, and of those that callables make.

    stable: `Costs.verdicts` of each seed. What is said of drawn calls holds in each.
    """

    drawn: Costs | None = None
    met: Costs | None = None
    stable: Sequence[Verdicts] = ()

    @property
    def costs(self) -> Costs:
        """All calls."""
        total = Costs()
        for costs in self._both():
            total.merge(costs)
        return total

    def _both(self) -> list[Costs]:
        return [costs for costs in (self.drawn, self.met) if costs is not None]

    def ops(self) -> list[str]:
        """Return the ops that something can be said of."""
        return sorted({op for costs in self._both() for op in self._judged(costs)})

    def _judged(self, costs: Costs) -> list[str]:
        return costs.judged(1) if costs is self.met else costs.judged()

    # -- what is said -----------------------------------------------------------------------------

    def amplifies(self, loss: Loss) -> bool:
        """Return whether an op loses more than a rounding, drawn or met."""
        op, dtype, arrival = loss
        key = f"{dtype}; {arrival}"
        stable = all(op in verdicts["amplifies"][key] for verdicts in self.stable)
        return any(
            op in self._judged(costs) and costs.amplifies(op, dtype, arrival)
            for costs in self._both()
            if costs is not self.drawn or stable
        )

    def needless(self, op: str, dtype: str) -> bool:
        """Return whether an op loses no more than a rounding in any call, drawn or met."""
        stable = all(op in verdicts["needless"][dtype] for verdicts in self.stable)
        had = [costs for costs in self._both() if costs.calls[op]]
        return bool(had) and stable and all(costs.needless(op, dtype) for costs in had)

    def losses(self, ops: Iterable[str], arrivals: Sequence[Arrival] = ARRIVALS) -> list[Loss]:
        """Return where ops lose more than a rounding: for each op the worst, the worst op first."""
        found: list[tuple[float, Loss]] = []
        for op in ops:
            mine = [
                (self._left(loss), loss)
                for dtype in DTYPES
                for arrival in arrivals
                if self.amplifies(loss := Loss(op, dtype, arrival))
            ]
            found += sorted(mine)[:1]
        return [loss for _, loss in sorted(found)]

    def _left(self, loss: Loss) -> float:
        """Return how many of the dtype's digits are left, as a share."""
        tallies = [costs.lowered(*loss) for costs in self._both()]
        digits = [t.digits(0.1) for t in tallies if t is not None]
        return min(d for d in digits if d is not None) / full(loss.dtype)

    def lowered(self) -> list[Loss]:
        """Return the ops that a table lowers though they amplify."""
        costs = self.costs
        return self.losses([op for op in self.ops() if costs.lowers(op)])

    def needed(self) -> list[Loss]:
        """Return the ops that a table keeps in float32 and that, lowered, amplify."""
        costs = self.costs
        return self.losses([op for op in self.ops() if costs.keeps(op)])

    def unneeded(self) -> dict[str, list[str]]:
        """Return the ops that a table keeps in float32 without need, with the dtypes it is so."""
        costs = self.costs
        kept = {
            op: [dtype for dtype in DTYPES if self.needless(op, dtype)]
            for op in self.ops()
            if costs.keeps(op)
        }
        return {op: dtypes for op, dtypes in kept.items() if dtypes}

    def differing(self) -> tuple[list[Loss], int]:
        """Return the ops that only some tables keep in float32 though, lowered, they amplify.

        And how many others differ between tables, where that costs a rounding.
        """
        costs, way = self.costs, ("bfloat16", ARRIVALS[1])
        split = [
            op
            for op in self.ops()
            if costs.keeps(op) and any(costs.treated(op, d, way) == LOWER for d in costs.devices)
        ]
        found = self.losses(split, ("16 bits",))
        return found, len(split) - len(found)

    def unjudged(self) -> dict[str, list[str]]:
        """Return the ops with a rule that nothing is said of, by the reason met most often."""
        costs, judged = self.costs, set(self.ops())
        found: dict[str, list[str]] = {}
        for op in sorted(set(costs.policies) - judged):
            reasons = costs.left.get(op)
            if self.drawn is None and not reasons:
                continue  # the callable does not make it
            few = "too few calls" if costs.calls[op] else "no call reaches it on the CPU"
            reason = reasons.most_common(1)[0][0] if reasons else few
            found.setdefault(reason, []).append(op)
        return dict(sorted(found.items(), key=lambda item: -len(item[1])))

    # -- as rows ----------------------------------------------------------------------------------

    def columns(self) -> list[str]:
        """Return the headings of `row`."""
        sources = [name for name, costs in self._named() if costs is not None]
        return ["op", "dtype", "operands", *sources, "float32", "policies"]

    def row(self, loss: Loss) -> list[str]:
        """Return the cells of an op: digits that it keeps in half and in a tenth of the calls."""
        cells = [_cell(c.lowered(*loss)) for _, c in self._named() if c is not None]
        single = self.costs.tallies[loss.op].get(Way(loss.dtype, loss.arrival, FLOAT32))
        dtype = f"{loss.dtype}, {full(loss.dtype)}"
        policies = said(self.costs.policies[loss.op])
        return [loss.op, dtype, loss.arrival, *cells, _cell(single), policies]

    def by_device(self) -> list[list[str]]:
        """Return for devices and dtypes what `BY_DEVICE` says. Devices that are alike share one."""
        costs, by = self.costs, dict[tuple[str, ...], list[str]]()
        ops = self.ops()
        for device in costs.devices:
            for dtype in DTYPES:
                cells = [dtype]
                for arrival in ARRIVALS:
                    way = (dtype, arrival)
                    low = [op for op in ops if costs.treated(op, device, way) == LOWER]
                    amplify = sum(self.amplifies(Loss(op, dtype, arrival)) for op in low)
                    cells += [f"{len(low):,} of {len(ops):,}", f"{amplify:,}"]
                by.setdefault(tuple(cells), []).append(device)
        return [[", ".join(devices), *cells] for cells, devices in by.items()]

    def every(self) -> tuple[list[str], list[list[str]]]:
        """Return a table of all ops with a rule: its columns, and its rows."""
        costs = self.costs
        ways = [(dtype, arrival) for dtype in DTYPES for arrival in ARRIVALS]
        rows = []
        for op in self.ops():
            tallies = [costs.lowered(op, *way) for way in ways]
            single = costs.tallies[op].get(Way("bfloat16", "float32", FLOAT32))
            missing = any(t is not None and t.emulated for t in tallies)
            policies = said(costs.policies[op]) + ("; no kernel" if missing else "")
            cells = [*map(_cell, tallies), _cell(single)]
            rows.append([op, f"{costs.calls[op]:,}", *cells, policies])
        columns = [f"{dtype}, {arrival}" for dtype, arrival in ways]
        return ["op", "calls", *columns, "float32", "policies"], rows

    def _named(self) -> list[tuple[str, Costs | None]]:
        return [("drawn", self.drawn), ("met", self.met)]


def said(policies: Mapping[str, str]) -> str:
    """Return the policies of an op, as ``fp32 on cuda, mps; none on cpu``."""
    by: dict[str, list[str]] = {}
    for device, policy in policies.items():
        by.setdefault(policy or "none", []).append(device)
    if len(by) == 1:
        return f"{next(iter(by))} on all"
    return "; ".join(f"{policy} on {', '.join(devices)}" for policy, devices in by.items())


def _cell(tally: Tally | None) -> str:
    """Return what half and nine tenths of the calls keep, and how many are not finite."""
    if tally is None or (half := tally.digits(0.5)) is None:
        return "–"
    text = f"{half:.1f} / {tally.digits(0.1):.1f}"
    return f"{text}, {tally.overflowed:,} not finite" if tally.overflowed else text


# -- the page -------------------------------------------------------------------------------------


def page(view: View, head: str) -> str:
    """Return everything as Markdown. head: the title, and what was measured."""
    return "\n".join((head, *_sections(view)))


_KEPT = f"""\
Digits are `-log10` of the relative error in the Euclidean norm, against float64, of the result or
the gradient, whichever has fewer. A cell has those that half of the calls keep, and those that nine
tenths keep. *Operands* says how they arrive: in float32, which lowering rounds, or in 16 bits from
an op before, which lowering leaves alone. An op *amplifies* if more than {MARGIN} digits of those
that the dtype has are missing in a tenth of its calls: roundings of operands and result lose fewer.
"""


_NEEDLESS = f"""\
Lowered, these keep all but {MARGIN} digits of the dtype in every call, whether their operands
arrive in float32 or in 16 bits, and all results are finite. An op without a kernel of 16 bits on
the CPU is not among them.
"""
_DIFFERING = """\
These compute in float32 on some devices only. On others they compute in 16 bits if their operands
arrive so, and amplify. Ops that differ so without amplifying: {others}.
"""
_DEVICES = """\
Ops that compute in 16 bits as a whole, and how many of them amplify: those that a table lowers, and
those that do so if their operands arrive in 16 bits.
"""


def _sections(view: View) -> Iterator[str]:
    names, costs = _code, view.costs

    def row(loss: Loss) -> list[str]:
        op, *rest = view.row(loss)
        return [names([op]), *rest]

    some, others = view.differing()
    by: dict[tuple[str, str], list[str]] = {}
    for op, dtypes in view.unneeded().items():
        by.setdefault((", ".join(dtypes), said(costs.policies[op])), []).append(op)
    needless = [(*key, names(ops)) for key, ops in sorted(by.items())]
    unjudged = [(why, names(ops)) for why, ops in view.unjudged().items()]
    columns, every = view.every()
    yield _KEPT
    yield "## Lowered, though they amplify\n"
    yield _table(view.columns(), map(row, view.lowered()))
    yield "## Kept in float32 without need\n"
    yield _NEEDLESS
    yield _table(["dtype", "policies", "ops"], needless)
    yield "## Kept in float32, and would amplify\n"
    yield _table(view.columns(), map(row, view.needed()))
    yield "## Where tables differ\n"
    yield _DIFFERING.format(others=others)
    yield _table(view.columns(), map(row, some))
    yield "## By device\n"
    yield _DEVICES
    yield _table(["devices", "dtype", *BY_DEVICE], view.by_device())
    yield "## Not judged\n"
    yield _table(["why", "ops"], unjudged)
    yield "## Every op\n"
    yield "*No kernel*: the CPU has none of 16 bits, and float32 stands in for it.\n"
    yield _table(columns, ([names([op]), *rest] for op, *rest in every))


def _code(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    found = list(rows)
    lines = [columns, ["---"] * len(columns), *found]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n" if found else "None.\n"
