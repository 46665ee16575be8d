"""Corrupt autocast on purpose, fault by fault, and ask whether the engine notices.

Writes ``benchmarks/faults.json`` and from it ``docs/evidence/faults.md``. A part that is not run is
kept as it was. Seconds are CPU seconds of one core, so that a busy machine does not change what is
found.

``FAULTS_DEVICE=cuda`` seeds the same faults in the autocast of another device: then the result goes
to ``--output``, and nothing is proven about faults that cannot be told. ``--budget`` is for all
faults together, by the clock: those of single policies are then a sample, the same each time.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib
import math
import random
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import ROOT, Row, arguments, conditions, read, write
from tests.faults.faults import CONTROLS, EQUIVALENT, FAULTS, POLICY, SEMANTIC
from tests.faults.hunt import hunt, hunt_along, record
from tests.faults.wrapper import DEVICE

JSON, TABLE = ROOT / "benchmarks" / "faults.json", ROOT / "docs" / "evidence" / "faults.md"


def main() -> int:
    """Run what the command line asks for and return an exit code: 1 if a fault was not found."""
    parser = arguments(__doc__)
    parser.add_argument("--policy", action="store_true", help="only the faults of single policies")
    parser.add_argument("--semantic", action="store_true", help="only the semantic faults")
    parser.add_argument(
        "--only", metavar="GLOB", help="only faults of these names; prints, no file"
    )
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N; prints, no file")
    parser.add_argument("--workers", type=int, default=2, help="processes (default 2)")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each fault (default 60)")
    parser.add_argument("--seed", type=int, default=0, help="of the engine's draws (default 0)")
    parser.add_argument("--report", action="store_true", help="only write the page again")
    parser.add_argument("--budget", type=float, default=math.inf, metavar="SECONDS")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write this file alone")
    options = parser.parse_args()
    importlib.import_module("torch._dynamo")  # 7 s of CPU time at the first checkpoint of a fork
    options.deadline = time.monotonic() + options.budget
    warnings.simplefilter("ignore")
    both = options.policy == options.semantic
    alone = options.output is not None or DEVICE != "cpu"
    part = options.only is not None or options.limit is not None or alone
    result = Row(device=DEVICE) if alone else read(JSON)
    if options.report:
        TABLE.write_text(table(result))
        return 0
    for section, faults, search in (
        ("semantic", SEMANTIC, _semantic),
        ("policy", POLICY, _policy),
    ):
        if not (both or getattr(options, section)):
            continue
        names = fnmatch.filter(faults, options.only or "*")[: options.limit]
        result[section] = search(names, options)
        show(section, result[section]["faults"])
        result["run"] = conditions(options.seed, options.seconds)
        write(options.output, result)
        if not part:
            write(JSON, result)
            TABLE.write_text(table(result))
            print(f"written: {JSON.relative_to(ROOT)}, {TABLE.relative_to(ROOT)}")
    rows = [r for s in ("semantic", "policy") for r in result.get(s, {}).get("faults", ())]
    return int(bool(_missed(rows)))


def _semantic(names: Sequence[str], options: argparse.Namespace) -> Row:
    def search(name: str) -> Row:
        fault = {**SEMANTIC, **CONTROLS}[name]
        return hunt(fault, seconds=options.seconds, seed=options.seed).json()

    half = time.monotonic() + options.budget * 0.6
    rows = list(isolated(search, [*CONTROLS, *names], options.workers, half))
    controls = [r for r in rows if r["name"] in CONTROLS]
    return {"controls": controls, "faults": _ordered(rows, names)}


def _policy(names: Sequence[str], options: argparse.Namespace) -> Row:
    if math.isfinite(options.budget):
        names = random.Random(options.seed).sample(names, len(names))
    # In another process: no fork survives that an accelerator is in use here.
    with ProcessPoolExecutor(1, get_context("fork")) as pool:
        way = pool.submit(record, seconds=options.seconds, seed=options.seed)
        steps, control = way.result()
    print(f"the engine's way: {control.cases} cases in {control.seconds:.0f} s", flush=True)

    def search(name: str) -> Row:
        return hunt_along(POLICY[name], steps).json()

    rows = list(isolated(search, names, options.workers, options.deadline))
    return {"controls": [control.json()], "faults": _ordered(rows, names)}


def _ordered(rows: Sequence[Row], names: Sequence[str]) -> list[Row]:
    return sorted((r for r in rows if r["name"] in names), key=lambda r: names.index(r["name"]))


def isolated(
    search: Callable[[str], Row], names: Sequence[str], workers: int, until: float = math.inf
) -> Iterator[Row]:
    """Search for each fault in a process of its own: one that kills it is found, as a crash.

    until: the time after which no other search begins.
    """
    context = get_context("fork")
    waiting, done = list(reversed(names)), 0
    running: dict[Any, tuple[str, Any]] = {}
    while running or (waiting and time.monotonic() < until):
        while waiting and len(running) < workers and time.monotonic() < until:
            name = waiting.pop()
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(theirs, search, name))
            process.start()
            theirs.close()
            running[ours] = (name, process)
        pipe: Any
        for pipe in connection.wait(list(running)):
            name, process = running.pop(pipe)
            try:
                row = pipe.recv()
            except EOFError:
                row = Row(name=name, found=True, cases=0, seconds=0.0, kind="crash", where="")
            process.join()
            done += 1
            mark = "found" if row["found"] else "-----"
            kind = row.get("error") or row["kind"]
            print(
                f"{done:4}/{len(names)} {mark} {row['name']:44} {row['cases']:6} cases "
                f"{row['seconds']:6.1f} s  {kind}",
                flush=True,
            )
            yield row


def _child(pipe: connection.Connection, search: Callable[[str], Row], name: str) -> None:
    try:
        row = search(name)
    except Exception:
        row = Row(name=name, found=False, cases=0, seconds=0.0, kind="", where="")
        row["error"] = traceback.format_exc()
    pipe.send(row)


def show(section: str, rows: Sequence[Row]) -> None:
    """Print what came of a section, and what was not found."""
    found = _found(rows)
    print(f"{section}: {_summary(rows)}")
    if found:
        print(f"  {_times(found)}")
    for name in _missed(rows):
        print(f"  not found: {name}")


def _told(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of faults that can be told from honest autocast."""
    return [r for r in rows if not FAULTS[r["name"]].equivalent]


def _found(rows: Sequence[Row]) -> list[Row]:
    return [r for r in _told(rows) if r["found"]]


def _missed(rows: Sequence[Row]) -> list[str]:
    return [r["name"] for r in _told(rows) if not r["found"]]


def _summary(rows: Sequence[Row]) -> str:
    found, told = len(_found(rows)), len(_told(rows))
    share = f" ({found / told:.1%})" if told else ""
    same = len(rows) - told
    note = f", {same} more are indistinguishable from honest autocast" if same else ""
    return f"{found} of {told} found{share}{note}"


def _times(found: Sequence[Row]) -> str:
    seconds, cases = [r["seconds"] for r in found], [r["cases"] for r in found]
    return (
        f"median {statistics.median(cases):.0f} cases and {statistics.median(seconds):.1f} s, "
        f"the slowest {max(cases)} cases and {max(seconds):.1f} s"
    )


def table(result: dict[str, Any]) -> str:
    """Return the Markdown page."""
    run = result["run"]
    versions = ", ".join(f"{name} {v}" for name, v in run["versions"].items())
    lines = [
        "# Seeded faults",
        "",
        "The benchmark corrupts autocast in real torch, one fault at a time, and runs the engine",
        "that users run, without hints. A divergence counts only if unmodified torch agrees with",
        "the reference on that case, so a fault that shows only through a known bug does not",
        "count. The policy faults share one stream of cases. For each fault, only the cases that",
        "call its op run again, but all cases of the stream are counted.",
        "",
        f"The limit is {run['seconds_limit']:.0f} CPU seconds of one core for each fault",
        f"({run['machine']['cpu']}). Seed {run['seed']}, {versions}.",
        "",
        "| faults | found | to find one |",
        "|---|---|---|",
    ]
    for section in ("semantic", "policy"):
        if section in result:
            rows = result[section]["faults"]
            times = _times(_found(rows)) if _found(rows) else ""
            lines.append(f"| {section} | {_summary(rows)} | {times} |")
    for section in ("semantic", "policy"):
        for row in result.get(section, {}).get("controls", ()):
            alarms = "a false alarm" if row["found"] else "no false alarm"
            lines.append(f"| control: {row['name']} | {alarms} | {row['cases']} cases |")
    if "semantic" in result:
        lines += ["", "## Semantic faults", "", _HEAD, "|---|---|---|---|---:|---:|"]
        lines += [_line(r) for r in result["semantic"]["faults"]]
    if "policy" in result:
        lines += ["", "## Policies", "", *_policies(result["policy"]["faults"])]
    lines += ["", "To repeat: `.venv/bin/python benchmarks/faults.py`"]
    return "\n".join(lines) + "\n"


_HEAD = "| fault | what torch does | found as | at | cases | seconds |"


def _line(row: Row) -> str:
    fault = FAULTS[row["name"]]
    if not row["found"]:
        kind = "indistinguishable" if fault.equivalent else "**not found**"
        return (
            f"| {row['name']} | {fault.what} | {kind} | | {row['cases']} | {row['seconds']:.1f} |"
        )
    at = row["op"] or "gradients, state"
    kind, cases, seconds = row["kind"], row["cases"], row["seconds"]
    return f"| {row['name']} | {fault.what} | {kind} | {at} | {cases} | {seconds:.1f} |"


def _policies(rows: Sequence[Row]) -> list[str]:
    lines = [
        "Each op of the CPU table is given every policy other than its own.",
        "",
        "| policy given | found | to find one |",
        "|---|---|---|",
    ]
    given = dict.fromkeys(r["name"].rpartition(":")[2] for r in rows)
    for policy in given:
        members = [r for r in rows if r["name"].endswith(f":{policy}")]
        found = _found(members)
        lines.append(f"| {policy} | {_summary(members)} | {_times(found) if found else ''} |")
    missed = _missed(rows)
    if missed:
        lines += ["", "Not found: " + ", ".join(f"`{name}`" for name in missed) + "."]
    lines += ["", "Faults that no program can distinguish from honest autocast:", ""]
    return lines + [f"- `{name}`: {why}" for name, why in EQUIVALENT.items()]


if __name__ == "__main__":
    sys.exit(main())
