"""How soon the default strategies meet public bugs that they were told nothing of.

    python benchmarks/rediscovery.py [--backends='compile*,script'] [--seeds=1,2,3] [--seconds=600]

Draws are the engine's own, of all ops and with default settings, a stream for each backend and
seed. `tests/public/bugs.py` says how a divergence is known for one of the bugs; its tests hold that
by hand-written cases. Writes ``benchmarks/rediscovery.json``; what is not run is kept as it was.
Seconds are CPU seconds of one core, the C++ compiler's included, until all bugs of the backend were
met. 600 of them are half of what two cores have in ten minutes.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
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
    cpu_seconds,
    machine,
    named,
    read,
    versions,
    write,
)
from tests.public.bugs import BUGS, Bug

JSON = ROOT / "benchmarks" / "rediscovery.json"
PAGE = ROOT / "docs" / "internals" / "ingredients.md"  # which ends in the table
HEAD = "| bug | what | backend |"


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--backends", default="*", help="names or globs, comma-separated")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--ops", default="", help="not the default: only these ops or families")
    parser.add_argument("--output", type=Path, default=JSON)
    args = parser.parse_args()
    torch.set_num_threads(1)
    chosen = [
        name for name in dict.fromkeys(bug.backend for bug in BUGS) if named(name, args.backends)
    ]
    ops = tuple(args.ops.split(",")) if args.ops else ()
    for name in chosen:
        for seed in map(int, args.seeds.split(",")):
            bugs = [bug for bug in BUGS if bug.backend == name]
            for bug, found in hunt(bugs, seed, args.seconds, ops):
                add(args.output, bug, found, seed)
    if args.output == JSON:
        text = PAGE.read_text()
        PAGE.write_text(text[: text.index(HEAD)] + table(json.loads(JSON.read_text())))


def hunt(
    bugs: list[Bug], seed: int, limit: float, ops: tuple[str, ...]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each bug with the case that met it first, or with how many did not."""
    backend = backends()[bugs[0].backend]
    settings = Settings(backends=(backend.name,), seed=seed, known=shipped(), ops=ops)
    judge = judge_of(backend, settings.known, settings.relations)
    left = {bug.name: bug for bug in bugs}
    cpu = wall = 0.0
    number = 0
    cases = draw(Task(backend.name, "all", (), sys.maxsize, seed), settings)
    with quiet(), suppress(KeyboardInterrupt):  # what was run until then counts
        while left and cpu < limit:
            start = cpu_seconds(), time.perf_counter()
            verdict = judge.judge(next(cases))
            cpu, wall = cpu + cpu_seconds() - start[0], wall + time.perf_counter() - start[1]
            number += 1
            for name in [n for n, bug in left.items() if bug.recognise(verdict)]:
                del left[name]
                assert verdict.divergence is not None
                found = {
                    "case": number,
                    "cpu seconds": round(cpu, 1),
                    "wall seconds": round(wall, 1),
                    "kind": verdict.divergence.kind,
                    "known": verdict.known,
                    "id": verdict.case.id,
                }
                print(backend.name, seed, name, found, flush=True)
                yield name, found
    for name in left:
        missed = {"not within": number, "cpu seconds": round(cpu, 1)}
        print(backend.name, seed, name, missed, flush=True)
        yield name, missed


def add(path: Path, name: str, found: dict[str, Any], seed: int) -> None:
    result: Row = {"bugs": {}} | read(path)
    order = [bug.name for bug in BUGS]
    bug = BUGS[order.index(name)]
    entry = result["bugs"].setdefault(name, {"seeds": {}})
    entry |= {"what": bug.what, "backend": bug.backend}
    entry["seeds"][str(seed)] = found
    result["bugs"] = {n: result["bugs"][n] for n in order if n in result["bugs"]}
    result["versions"] = versions("torch", "numpy", "amp-fuzz")
    result["python"] = platform.python_version()
    result["machine"] = machine()
    write(path, result)


def table(result: dict[str, Any]) -> str:
    """Return the table of the page: a bug a line, a seed a column."""
    seeds = sorted({seed for bug in result["bugs"].values() for seed in bug["seeds"]}, key=int)
    lines = [HEAD + "".join(f" seed {seed} |" for seed in seeds), "|---" * (3 + len(seeds)) + "|"]
    for name, bug in result["bugs"].items():
        cells = [_cell(bug["seeds"].get(seed)) for seed in seeds]
        lines.append("| " + " | ".join([name, bug["what"], f"`{bug['backend']}`", *cells]) + " |")
    return "\n".join(lines) + "\n"


def _cell(found: dict[str, Any] | None) -> str:
    if found is None:
        return "not run"
    if "case" in found:
        return f"case {found['case']:,}, {found['cpu seconds']:.0f} s"
    return f"not in {found['not within']:,} cases, {found['cpu seconds']:.0f} s"


if __name__ == "__main__":
    main()
