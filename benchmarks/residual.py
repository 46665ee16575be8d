"""What a run says of causes that it has not seen, against what its further cases show.

    python benchmarks/residual.py STORE [STORE ...] [--splits=N]

The drawn cases of each run are split by backend: the first part stands for a run that ended, the
rest are held out. ``half``: as many are held out, at most 1,000. ``tenth``: a tenth as many. The
first split cuts each family at the same share in the order of its draw, as a shorter run would have
ended; the others do so in a random order. `amp_fuzz.reports.unseen` estimates from the first part;
the causes that only the second shows are counted. A backend with fewer than 200 drawn cases in a
run is left out. Splits of one run share its cases, so their errors are not independent.

Writes ``benchmarks/residual.json``, from which `make pages` writes docs/evidence/unseen.md.
"""

from __future__ import annotations

import random
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from amp_fuzz.records.schema import AIMED, DIVERGING, GIVEN, OWN, CaseRecord
from amp_fuzz.records.store import Store
from amp_fuzz.reports import unseen
from amp_fuzz.reports.unseen import AHEAD, estimate
from benchmarks.common import ROOT, Row, arguments, commit, show

JSON = ROOT / "benchmarks" / "residual.json"
LEAST = 200
SHARES = {"half": 1 / 2, "tenth": 1 / 11}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("stores", nargs="+", type=Path)
    parser.add_argument("--splits", type=int, default=100, help="of each backend of a run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=JSON)
    args = parser.parse_args()
    rows = [
        row
        for store in map(Store, args.stores)
        for name in store.runs()
        for row in measured(store, name, args.splits, args.seed)
    ]
    result = {
        "code": commit(),
        "splits": args.splits,
        "seed": args.seed,
        "whole": [
            {
                "causes": "own" if own else "autocast",
                "held_out": held,
                **summed([row for row in rows if (row["own"], row["part"]) == (own, held)]),
            }
            for own in (False, True)
            for held in SHARES
        ],
        "runs": [row for row in rows if row["split"] == 0],
    }
    show(args.output, result)


def measured(store: Store, name: str, splits: int, seed: int) -> Iterator[Row]:
    """Yield a row for each backend and split of a run, of autocast's causes and of its own."""
    run = store.run(name)
    found: defaultdict[str, list[CaseRecord]] = defaultdict(list)
    for record in store.records(name):
        if isinstance(record, CaseRecord) and record.family not in (*GIVEN, AIMED):
            found[record.backend].append(record)
    for backend, cases in found.items():
        if len(cases) < LEAST:
            continue
        for number in range(splits):
            order = random.Random(f"{seed} {number}").sample(cases, len(cases))
            for (part, share), own in product(SHARES.items(), (False, True)):
                if any(causes(case, own=own) for case in cases):
                    parts = cut(order if number else cases, share)
                    said = compared(*parts, own=own)
                    head = {"run": name, "torch": run.versions.get("torch", "")}
                    of = {"backend": backend, "own": own, "split": number, "part": part}
                    yield {**head, **of, **said}


def cut(cases: Sequence[CaseRecord], share: float) -> tuple[list[CaseRecord], list[CaseRecord]]:
    """Return a first part of cases, and those held out: the same share of each family."""
    ahead = min(AHEAD, int(len(cases) * share))
    families: defaultdict[str, list[CaseRecord]] = defaultdict(list)
    for case in cases:
        families[case.family].append(case)
    before, after = list[CaseRecord](), list[CaseRecord]()
    for own in families.values():
        at = len(own) - round(len(own) * ahead / len(cases))
        before += own[:at]
        after += own[at:]
    return before, after


def causes(case: CaseRecord, *, own: bool) -> tuple[str, ...]:
    """Return the causes of a case: the backend's own, or the others."""
    if case.outcome not in DIVERGING or (case.outcome == OWN) is not own:
        return ()
    return unseen.causes(case.outcome, case.kind, case.op, case.known, case.groups)


def compared(before: Sequence[CaseRecord], after: Sequence[CaseRecord], *, own: bool) -> Row:
    """Return what the first cases predict of those held out, and what these show."""
    counts = Counter(cause for case in before for cause in causes(case, own=own))
    said = estimate(list(counts.values()), len(before), len(after))
    new = [set(causes(case, own=own)) - counts.keys() for case in after]
    return {
        "cases": len(before),
        "held_out": len(after),
        "once": sum(n == 1 for n in counts.values()),
        "chance": said.chance,
        "at_most": said.at_most,
        "causes": said.causes,
        "new_causes": len(set[str]().union(*new)),
        "cases_with_new": sum(map(bool, new)),
        "next_case": said.next_case,
    }


def summed(rows: Sequence[Row]) -> Row:
    """Return predictions and what was observed, over all splits.

    pairs: of a run and a backend. bounded: the splits whose bound says something.
    """
    bounded = [row for row in rows if row["at_most"] < 0.995]

    def both(predicted: Iterable[float], observed: Iterable[int]) -> Row:
        return {"predicted": round(sum(predicted), 1), "observed": sum(observed)}

    return {
        "pairs": len({(row["run"], row["backend"]) for row in rows}),
        "splits": len(rows),
        "cases": sum(row["held_out"] for row in rows),
        "new_causes": both((row["causes"] for row in rows), (row["new_causes"] for row in rows)),
        "cases_with_new": both(
            (row["next_case"] * row["held_out"] for row in rows),
            (row["cases_with_new"] for row in rows),
        ),
        "splits_with_new": both(
            (row["chance"] for row in rows), (row["new_causes"] > 0 for row in rows)
        ),
        "bounded": {
            "splits": len(bounded),
            **both((row["at_most"] for row in bounded), (row["new_causes"] > 0 for row in bounded)),
        },
    }


if __name__ == "__main__":
    main()
