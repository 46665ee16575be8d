"""What compilers come to on an honest torch: each divergence explained, or listed as not.

    python benchmarks/honest.py 'compile[inductor]:1000:72' ... [--records=DIR] [--output=FILE]

Each argument is a backend, how many cases and a seed. Cases are drawn by the engine over all ops,
judged with the known list of the package, and counted: by outcome, by known entry, and what is not
explained by kind and op. "compiled" says whether anything was compared that never ran compiled: how
many cases dynamo made a graph of, how many had graph breaks, and how many had no graph at all, by
what came of them. "excess" and "bias" are of the values that differ in a bit from eager's, over all
cases, screened with 8 samples, in units of the spread (the threshold is 4).

DIR keeps a line for each case: a run that is cut short goes on where it stood, and what diverged is
judged again with the list of today.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch._dynamo
from torch._dynamo.utils import counters

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from amp_fuzz.backends import Backend, backends
from amp_fuzz.backends.harness import quiet
from amp_fuzz.cases.case import Case, loads
from amp_fuzz.oracle import Divergence, Rounding
from amp_fuzz.oracle.judge import Judge
from amp_fuzz.oracle.labels import guilty_op
from amp_fuzz.oracle.rounding import SCREEN
from amp_fuzz.oracle.trial import Trial
from amp_fuzz.reference import distance
from amp_fuzz.runs.engine import Settings, Task, draw
from amp_fuzz.upstream import shipped
from amp_fuzz.upstream.explain import judge_of
from benchmarks.common import arguments, machine, show, versions

ASKED: list[Rounding] = []  # of a case: the one that knows nothing of bugs
DISTANCES: dict[str, tuple[float, float]] = {}  # of a case, by label


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("what", nargs="+", help="BACKEND:CASES:SEED")
    parser.add_argument("--records", type=Path, default=Path(".amp-fuzz/honest"))
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    _listen()
    args.records.mkdir(parents=True, exist_ok=True)
    lines: dict[str, list[dict[str, Any]]] = {}
    seeds: dict[str, list[int]] = {}
    for what in args.what:
        name, count, seed = what.rsplit(":", 2)
        path = args.records / f"{name}-{seed}.jsonl"
        lines.setdefault(name, []).extend(records(backends()[name], int(count), int(seed), path))
        seeds.setdefault(name, []).append(int(seed))
    result = {
        "backends": {name: {"seeds": seeds[name], **summary(rows)} for name, rows in lines.items()},
        "versions": versions("torch", "amp-fuzz"),
        "machine": machine(f"{os.cpu_count()} cores"),
    }
    show(args.output, result)


def records(backend: Backend, count: int, seed: int, path: Path) -> Iterator[dict[str, Any]]:
    """Judge the cases that a file has no line for, and those again that were not explained."""
    judge = judge_of(backend, shipped())
    kept = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    for line in kept[:count]:
        if line.get("outcome") == "diverged":
            again = judged(judge, loads(json.dumps(line["case"])))
            again["compiled"] = line.get("compiled", again["compiled"])
            line = {**line, **again}
        yield line
    settings = Settings((backend.name,))
    with path.open("a") as file:
        for number, case in enumerate(draw(Task(backend.name, "all", (), count, seed), settings)):
            if number < len(kept):
                continue
            line = judged(judge, case)
            file.write(json.dumps(line) + "\n")
            file.flush()
            yield line


def judged(judge: Judge, case: Case) -> dict[str, Any]:
    """Return what came of one case, and how much of it was compiled."""
    counters.clear()
    ASKED.clear()
    DISTANCES.clear()
    with quiet():
        verdict = judge.judge(case)
    line: dict[str, Any] = {
        "id": case.id,
        "outcome": verdict.outcome,
        "known": verdict.known,
        "unjudged": verdict.unjudged,
        "distances": [[_finite(e), _finite(b)] for e, b in DISTANCES.values()],
        "compiled": {
            "graphs": counters["stats"].get("unique_graphs", 0),
            "breaks": sum(counters["graph_break"].values()),
            "frames": counters["frames"].get("total", 0),
        },
    }
    if verdict.outcome == "diverged":
        line |= {"divergence": said(verdict.case, verdict.divergence), "case": _json(verdict.case)}
        line["bare"] = Trial.of(verdict.case, judge.backend).bare().compare() is not None
    return line


def said(case: Case, divergence: Divergence | None) -> dict[str, str]:
    """Return a divergence as text."""
    assert divergence is not None
    return {
        "kind": divergence.kind,
        "op": guilty_op(case, divergence),
        "expected": divergence.expected,
        "observed": divergence.observed,
    }


def summary(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the counts of one backend."""
    known: Counter[str] = Counter()
    for line in lines:
        known.update(line["known"].split("+") if line["known"] else ())
    unexplained = Counter(
        f"{d['kind']} {d['op']}".strip() + (", also without autocast" if line["bare"] else "")
        for line in lines
        if line["outcome"] == "diverged" and (d := line["divergence"])
    )
    graphs = [line["compiled"]["graphs"] for line in lines]
    without = Counter(line["outcome"] for line in lines if not line["compiled"]["graphs"])
    distances = [d for line in lines for d in line.get("distances", ())]
    return {
        "cases": len(lines),
        "outcomes": dict(Counter(line["outcome"] for line in lines)),
        "known": dict(known.most_common()),
        "unexplained": dict(unexplained.most_common()),
        "unjudged values": sum(line["unjudged"] for line in lines),
        "values that differ": len(distances),
        "excess, quantiles 0.5 0.9 0.99 1": _quantiles([e for e, _ in distances]),
        "bias, quantiles 0.5 0.9 0.99 1": _quantiles([b for _, b in distances]),
        "compiled": {
            "with a graph": sum(n > 0 for n in graphs),
            "with graph breaks": sum(line["compiled"]["breaks"] > 0 for line in lines),
            "graphs": sum(graphs),
            "without any graph, by outcome": dict(without),
        },
    }


def _listen() -> None:
    """Note how far each value is the first time that the oracle is asked about it.

    Asked again, it confirms with more samples, or explains a divergence with another reference.
    """
    asked = Rounding.__call__

    def noted(
        self: Rounding, label: str, want: torch.Tensor, got: torch.Tensor
    ) -> Divergence | None:
        found = asked(self, label, want, got)
        if not ASKED:
            ASKED.append(self)
        if self is ASKED[0] and label not in DISTANCES and label not in self.unjudged:
            band = self._band(label, SCREEN)  # which is kept
            assert band is not None
            far = distance(band, got)
            DISTANCES[label] = far.excess, far.bias
        return found

    patch.object(Rounding, "__call__", noted).start()  # for as long as the process lives


def _quantiles(values: list[float]) -> list[float]:
    ordered = sorted(values)
    at = (0.5, 0.9, 0.99, 1.0)
    return [round(ordered[math.ceil(q * len(ordered)) - 1], 3) for q in at] if ordered else []


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 1e300


def _json(case: Case) -> Any:
    return json.loads(case.json())


if __name__ == "__main__":
    main()
