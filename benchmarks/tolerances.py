"""Fixed tolerances beside the rounding oracle, on the same honest and the same faulty cases.

    python benchmarks/tolerances.py [--honest=1000] [--compiled=60] [--each=5] [--faulty=2000]

Honest pairs: the reference's values and those of another implementation that is right. Two are
made here: kernels that compute in float64 and round once, and sums in another order. The third is
``compile[aot_eager_decomp_partition]``. Faulty pairs: for each fault in eager kernels the first
cases on which it changes a bit, whether or not any judge minds; for each fault in a compiler the
case that numeric_faults.py found. Writes ``benchmarks/tolerances.json`` and the page.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import same as dynamo_same

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from amp_fuzz.backends import Backend, backends
from amp_fuzz.backends.compile import CompileBackend
from amp_fuzz.backends.harness import Observation, quiet
from amp_fuzz.cases.case import Case
from amp_fuzz.oracle import Divergence, Rounding
from amp_fuzz.oracle.compare import same as bitwise
from amp_fuzz.oracle.judge import Judge
from amp_fuzz.oracle.labels import guilty_op
from amp_fuzz.reference import Band
from amp_fuzz.upstream import shipped
from amp_fuzz.upstream.explain import judge_of
from benchmarks.common import Row, arguments, conditions, read, write
from benchmarks.numeric_faults import JSON, TOLERANCES, write_page
from tests.faults.corrupted import Corrupted
from tests.faults.honest import Accurate, reordered
from tests.faults.numeric import COMPILED, EAGER, NumericFault
from tests.faults.numeric_hunt import KINDS, Step, backend_of, way

JUDGES = {
    "ours": "amp-fuzz, rounding oracle",
    "assert_close": "`torch.testing.assert_close`, defaults",
    "same": "`torch._dynamo.utils.same`, tol 1e-4, with fp64 re-run",
    "nnsmith": "NNSmith, rtol 1e-2, atol 1e-3",
}

ABOUT = [
    "The numbers count pairs of runs. A judge flags a pair if it rejects any value of it. For all",
    "judges, NaN equals NaN. The fp64 reference of `same` is the clean float64 copy that the",
    "shadows keep of each value of the reference: the value of the program with all tensors in",
    "float64. If the shadows cannot follow an op, neither amp-fuzz nor `same` rejects its value.",
    "",
    "We leave out pairs that differ in dtype, shape or an error, pairs whose shadows failed, and",
    "honest pairs that meet a known bug. All judges see the others. Each flagged honest pair is",
    "a false alarm. Each faulty pair that is not flagged is a miss, although some of them are",
    "no more wrong than another rounding.",
    "",
    "For a fault in eager kernels, the pairs are the first five in 2,000 cases that differ in a",
    "bit, flagged or not. For a fault in a compiler, the pair is the one case that amp-fuzz",
    "found, so by construction amp-fuzz misses none. A fault counts as never noticed if no pair",
    "of it is flagged.",
]


@dataclass(slots=True)
class Group:
    """Pairs of one kind: how many there are, how many differ in a bit, and who flags how many."""

    name: str
    verb: str
    pairs: int = 0
    differ: int = 0
    unlike: int = 0
    failed: int = 0
    known: Counter[str] = field(default_factory=Counter)
    flags: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)

    def json(self) -> Row:
        flags = {j: self.flags[j] for j in JUDGES}
        counts = flags if self.verb == "false alarms" else self.missed(flags)
        row: Row = {"name": self.name, "verb": self.verb, "pairs": self.pairs}
        row |= {"differ": self.differ, "unlike": self.unlike, "shadows failed": self.failed}
        row |= {"known": dict(self.known)} if self.verb == "false alarms" else {}
        row |= {"range": self.flags["range"], "not followed": self.flags["not followed"]}
        return row | {"flags": flags, "counts": counts, "flagged by ours": self.notes}

    def missed(self, flags: Mapping[str, int]) -> dict[str, int]:
        return {j: self.differ - n for j, n in flags.items()}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--honest", type=int, default=1000, help="cases of each")
    parser.add_argument("--compiled", type=int, default=60, help="cases that are compiled")
    parser.add_argument("--each", type=int, default=5, help="faulty pairs of each eager fault")
    parser.add_argument("--faulty", type=int, default=2000, help="cases these are looked for in")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--again", metavar="NAME", help="only these honest pairs; keep the rest")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)  # `same` warns of NaN
    count = args.honest if args.again else max(args.honest, args.faulty)
    steps = list(way(count, seed=args.seed))
    names = {n for step in steps for n in step.reached if n.startswith("aten.")}
    rung = CompileBackend("aot_eager_decomp_partition")
    noticed: dict[str, set[str]] = {j: set() for j in JUDGES}
    some = steps[: args.honest]
    groups: list[Group] = []
    faults: list[NumericFault] = []
    parts: list[tuple[Sequence[NumericFault], Callable[[], Group]]] = [
        ((), lambda: accurate(names, some)),
        ((), lambda: honest("sums in another order", Corrupted(patches=reordered), some)),
        (EAGER, lambda: faulty_eager(steps[: args.faulty], args.each, noticed)),
        ((), lambda: honest("aot_eager_decomp_partition", rung, steps[: args.compiled])),
        (COMPILED, lambda: faulty_compiled(args.seed, noticed)),
    ]
    if args.again:
        again(args.again, [parts[0], parts[1], parts[3]])
        return
    for more, part in parts:
        groups.append(part())
        faults += more
        print(json.dumps(groups[-1].json()), flush=True)
        keep(args, groups, [f.name for f in faults], noticed)


def again(name: str, parts: Sequence[tuple[Any, Callable[[], Group]]]) -> None:
    """Measure one group of honest pairs again; the file has the others."""
    result = read(TOLERANCES)
    names = [g["name"] for g in result["pairs"] if g["verb"] == "false alarms"]
    made = parts[names.index(name)][1]().json()
    print(json.dumps(made))
    result["pairs"] = [made if g["name"] == name else g for g in result["pairs"]]
    write(TOLERANCES, result)
    write_page()


def keep(args: argparse.Namespace, groups: Sequence[Group], names: list[str], noticed: Any) -> None:
    """Write what there is so far."""
    result = {
        "run": conditions(args.seed, 0.0),
        "about": ABOUT,
        "judges": JUDGES,
        "faults": len(names),
        "pairs": [g.json() for g in groups],
        "never": {j: [n for n in names if n not in noticed[j]] for j in JUDGES},
    }
    write(TOLERANCES, result)
    write_page()


def accurate(names: set[str], steps: Sequence[Step]) -> Group:
    """Judge the pairs of kernels that compute in float64."""
    kernels = Accurate(names)
    try:
        return honest("float64 kernels", Corrupted(patches=kernels), steps)
    finally:
        kernels.close()


def honest(name: str, backend: Backend, steps: Sequence[Step]) -> Group:
    """Judge the pairs of an honest implementation and the reference."""
    group = Group(name, "false alarms")
    plain = backends()["eager-cpu"] if isinstance(backend, Corrupted) else backend
    for step in steps:
        tally(group, backend, step.case, judge_of(plain, shipped()))
    return group


def faulty_eager(steps: Sequence[Step], each: int, noticed: dict[str, set[str]]) -> Group:
    """Judge the first cases on which each fault changes a bit."""
    group = Group("faults in eager kernels", "misses")
    for fault in EAGER:
        backend, wanted = backend_of(fault), set(fault.reached)
        before = group.differ
        for step in (s for s in steps if wanted & s.reached):
            if group.differ - before >= each:
                break
            for judge in tally(group, backend, step.case):
                noticed[judge].add(fault.name)
    return group


def faulty_compiled(seed: int, noticed: dict[str, set[str]]) -> Group:
    """Judge the case on which numeric_faults.py found each fault of a compiler."""
    group = Group("faults in compilers, as found by ours", "misses")
    rows = read(JSON).get("compiled", {}).get("faults", [])
    steps = list(way(500, seed=seed))
    for fault in COMPILED:
        for case in found_case(fault, rows, steps):
            for judge in tally(group, backend_of(fault), case):
                noticed[judge].add(fault.name)
    return group


def found_case(fault: NumericFault, rows: Sequence[Row], steps: Sequence[Step]) -> Iterator[Case]:
    for row in rows:
        if row["name"] == fault.name and row["found"]:
            yield steps[row["cases"] - 1].case


def tally(group: Group, backend: Backend, case: Case, bugs: Judge | None = None) -> list[str]:
    """Judge one pair and count it; return who flags it.

    bugs: judges the implementation as it comes, where a pair with a known bug does not count.
    """
    case = backend.fit(case)
    reference = backend.reference()
    with quiet():
        expected, observed = reference.run(case), backend.run([case])[0]
        values = comparable(expected, observed)
        group.pairs += 1
        if values is None:  # an error or another dtype on one side: not about values
            group.unlike += 1
            return []
        differ = [value for value in values if not bitwise(*value[1:])]
        if not differ:
            return []
        known = bugs.judge(case).known if bugs else ""
        if known:
            group.known[known] += 1
            return []
        rounding = Rounding(partial(reference.shadowed, case))
        _, bands = reference.shadowed(case, 8, 8)
        # Inside composite ops the shadows are not always the reference (see the page).
        if any(n not in bands or unlike(bands[n], want) for n, want, _ in differ):
            group.failed += 1
            return []
        group.differ += 1
        flagged = []
        for name, judge in judges(rounding, bands, group).items():
            found = [judge(*value) for value in differ]
            if any(found):
                flagged.append(name)
            first = next((d for d in found if d and name == "ours"), None)
            if first is not None and len(group.notes) < 40:
                note = f"{case.id} {first.kind} {first.where} {guilty_op(case, first)}"
                group.notes.append(f"{note}: {first.observed}")
    group.flags.update(flagged)
    group.flags["not followed"] += not all(bands[n].known for n, _, _ in differ)
    return flagged


def unlike(band: Band, value: torch.Tensor | None) -> bool:
    """Return whether a band is of another dtype or shape than the value that it is for."""
    return value is None or (value.dtype, value.shape) != (band.nominal.dtype, band.nominal.shape)


Value = tuple[str, torch.Tensor, torch.Tensor]  # its label, the reference's, the backend's


def comparable(expected: Observation, observed: Observation) -> list[Value] | None:
    """Return the tensors on both sides, or None where one is unlike the other."""
    if (expected.raised is None) != (observed.raised is None):
        return None
    values: list[Value] = []
    for label, want in expected.values.items():
        if want is None:
            continue
        got = observed.values.get(label)
        if got is None or (want.dtype, want.shape) != (got.dtype, got.shape):
            return None
        values.append((label, want, got))
    return values


def judges(rounding: Rounding, bands: Mapping[str, Band], group: Group) -> dict[str, Any]:
    """Return the judges: each says whether it refuses a value."""
    ranged: list[str] = []

    def ours(label: str, want: Any, got: Any) -> Divergence | None:
        found = rounding(label, want, got)
        if found is not None and found.kind not in KINDS and not ranged:
            ranged.append(label)
            group.flags["range"] += 1
        return found if found is not None and found.kind in KINDS else None

    def close(label: str, want: Any, got: Any) -> bool:
        return refuses(lambda: torch.testing.assert_close(got, want, equal_nan=True))

    def same(label: str, want: Any, got: Any) -> bool:
        band = bands[label]
        if not band.known:
            return False
        silent: Callable[..., None] = lambda *a, **k: None  # noqa: E731
        exact = band.clean if band.clean.dtype is torch.float64 else None
        return not dynamo_same(
            want, got, exact, tol=1e-4, equal_nan=True, log_error=silent, cos_similarity=False
        )

    def nnsmith(label: str, want: Any, got: Any) -> bool:
        def check() -> None:
            torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-3, equal_nan=True)

        return refuses(check)

    return {"ours": ours, "assert_close": close, "same": same, "nnsmith": nnsmith}


def refuses(check: Callable[[], None]) -> bool:
    try:
        check()
    except AssertionError:
        return True
    return False


if __name__ == "__main__":
    main()
