"""How soon a default run meets each fault of the state that compilers keep.

    python benchmarks/kept_state.py [--only='guard-*,key-*'] [--seed=1] [--seconds=120]

`tests/faults/kept.py` has the faults. Draws are the engine's own, of all ops and with default
settings, a stream for each fault. A case counts if its outcome is "diverged", or "backend" for a
fault in which autocast has no part, and if the honest backend's is neither. Seconds are CPU
seconds of one core, the C++ compiler's included, until that case was judged. Writes
``benchmarks/kept_state.json`` and the page of it; what is not run is kept as it was, with the seed
of its run.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from amp_fuzz.backends import backends
from amp_fuzz.backends.harness import quiet
from amp_fuzz.runs.engine import Settings, Task, draw
from amp_fuzz.upstream import shipped
from amp_fuzz.upstream.explain import judge_of
from benchmarks.common import (
    ROOT,
    Row,
    arguments,
    conditions,
    cpu_seconds,
    named,
    read,
    write,
)
from tests.faults.kept import KEPT, Kept

JSON = Path(__file__).with_suffix(".json")
PAGE = ROOT / "docs" / "evidence" / "kept-state.md"


def hunt(fault: Kept, seed: int, limit: float) -> Row:
    """Return the first case of the stream that shows a fault, or how many did not."""
    fit = backends()[fault.place].fit
    settings = Settings(backends=(fault.place,), seed=seed, known=shipped())
    judge = judge_of(fault.wrong, settings.known, settings.relations)
    plain = judge_of(fault.honest, settings.known, settings.relations)
    spent, number = 0.0, 0
    cases = draw(Task(fault.place, "all", (), sys.maxsize, seed), settings)
    with quiet():
        while spent < limit:
            start, case = cpu_seconds(), fit(next(cases))
            verdict = judge.judge(case)
            spent += cpu_seconds() - start
            number += 1
            shown = ("diverged", "backend") if fault.own else ("diverged",)
            if verdict.outcome in shown and plain.judge(case).outcome not in shown:
                assert verdict.divergence is not None
                found: dict[str, Any] = {"outcome": verdict.outcome}
                found |= {"kind": verdict.divergence.kind, "id": case.id}
                return {"found": True, "case": number, "cpu seconds": round(spent, 1), **found}
    return {"found": False, "case": number, "cpu seconds": round(spent, 1)}


_HEAD = """\
# Faults of kept state

<!-- Written by benchmarks/kept_state.py. -->

Compilers keep code between calls, under guards, and between processes, in caches with keys. They
keep fields of a context over a graph break, a recomputation and a backward pass. In each fault one
part of such a state is missing. A default run of the backend draws cases until one shows the fault:
it diverges with the fault, and not without it.
"""
_COLUMNS = (
    "| fault | backend | seed | cases | CPU seconds | kind |",
    "|---|---|---:|---:|---:|---|",
)


def page(result: Row) -> str:
    """Return the page: a fault a line."""
    rows = result["faults"]
    found = [row for row in rows.values() if row["found"]]
    soon = sum(row["cpu seconds"] <= 120 for row in found)
    met = f"{soon} of {len(rows)} faults were met within 120 CPU seconds of one core."
    lines = [_HEAD, met, "", *_COLUMNS]
    for name, row in rows.items():
        seen = row["kind"] if row["found"] else "not met"
        if row.get("outcome") == "backend":
            seen += ", without autocast too"
        cells = [f"{name}: {row['what']}", f"`{row['backend']}`"]
        cells += [f"{row['seed']:,}", f"{row['case']:,}", f"{row['cpu seconds']:.0f}", seen]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", default="*", help="names or globs, comma-separated")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--output", type=Path, default=JSON)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name, fault in KEPT.items():
        if not named(name, args.only):
            continue
        row = {"what": fault.what, "backend": fault.place, "seed": args.seed}
        row |= hunt(fault, args.seed, args.seconds)
        print(name, row, flush=True)
        result: Row = {"faults": {}} | read(args.output)
        rows = result["faults"] | {name: row}
        result["faults"] = {n: rows[n] for n in KEPT if n in rows}
        result |= conditions(args.seed, args.seconds)
        write(args.output, result)
    if args.output == JSON:
        PAGE.write_text(page(read(JSON)))


if __name__ == "__main__":
    main()
