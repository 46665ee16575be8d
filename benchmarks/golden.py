"""The golden run: what each of some thousand stored cases comes to, before and after a change.

    python benchmarks/golden.py draw                      # write the cases, from seeds
    python benchmarks/golden.py run OUTPUT [BACKEND ...]  # judge them
    python benchmarks/golden.py compare BEFORE AFTER      # exit 1 and list each difference

A run that was cut short goes on where it stood if it is given its output again. A line of an output
is a verdict: outcome, known entries, divergence, guilty op, fingerprint, notes.
Each backend runs in a process of its own. If a process dies of a case, the line says so.
The cases are drawn by the engine over all ops; those that hunts left open and the examples of known
bugs come besides.
"""

from __future__ import annotations

import json
import lzma
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from amp_fuzz.backends import BackendError, backends
from amp_fuzz.backends.harness import quiet
from amp_fuzz.cases.case import Case, loads
from amp_fuzz.oracle.labels import guilty_op
from amp_fuzz.records.fingerprint import fingerprint
from amp_fuzz.runs.engine import Settings, Task, draw
from amp_fuzz.runs.setup import open_findings
from amp_fuzz.upstream import BUGS, shipped
from amp_fuzz.upstream.explain import judge_of
from benchmarks.common import arguments

CASES = Path(__file__).with_name("golden.jsonl.xz")
SEED = 20261124
COUNTS = {
    "eager-cpu": 1000,
    "fake-cuda": 150,
    "fake-xpu": 100,
    "fake-mps": 150,
    "fake-mtia": 100,
    "fake-maia": 150,
    "privateuse1": 150,
    "privateuse1[cpu]": 50,
    "script": 200,
    "script[freeze]": 50,
    "trace": 200,
    "trace[freeze]": 40,
    "trace[check]": 40,
    "export": 120,
    "export[decomposed]": 120,
    "compile[eager]": 80,
    "compile[aot_eager]": 160,
    "compile[aot_eager+default]": 40,
    "compile[aot_eager_decomp_partition]": 60,
    "compile[inductor]": 60,
    "compile[inductor+casts]": 20,
    "jax": 60,
    "jax[jit]": 50,
    "torchax": 100,
    "torchax[jit]": 50,
    "torchax[torch.autocast]": 20,
    "torchax[autograd]": 40,
}


def main() -> int:
    parser = arguments(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("draw")
    run = commands.add_parser("run")
    run.add_argument("output", type=Path)
    run.add_argument("backends", nargs="*")
    both = commands.add_parser("compare")
    both.add_argument("before", type=Path)
    both.add_argument("after", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.command == "compare":
        return compare(args.before, args.after)
    if args.command == "run":
        judge_all(args.output, args.backends)
        return 0
    with lzma.open(CASES, "wt", preset=9) as file:
        for backend, case in dict.fromkeys(drawn()):
            print(json.dumps({"backend": backend, "case": json.loads(case.json())}), file=file)
    return 0


def drawn() -> Iterator[tuple[str, Case]]:
    """Yield each golden case with its backend."""
    for bug in BUGS.values():
        yield from ((example.backend, example.case) for example in bug.examples)
    yield from ((entry.backend, entry.load()) for entry in open_findings().entries)
    for name, count in COUNTS.items():
        for case in draw(Task(name, "all", (), count, SEED), Settings((name,))):
            yield name, case


def judge_all(output: Path, only: list[str]) -> None:
    """Judge the cases that the output has no line for, each backend in a process of its own."""
    cases: dict[str, list[Any]] = {}
    with lzma.open(CASES, "rt") as file:
        for line in map(json.loads, file):
            cases.setdefault(line["backend"], []).append(line["case"])
    for name in only or cases:
        done = sum(1 for _ in _lines(output, name))
        while done < len(cases[name]):
            child = os.fork()
            if child == 0:
                _judged(name, cases[name][done:], output)
                os._exit(0)
            _, status = os.waitpid(child, 0)
            done = sum(1 for _ in _lines(output, name))
            if status and done < len(cases[name]):
                case = loads(json.dumps(cases[name][done]))
                _write(output, {"backend": name, "id": case.id, "outcome": f"died: {status}"})
                done += 1


def _judged(name: str, cases: list[Any], output: Path) -> None:
    judge = judge_of(backends()[name], shipped())
    for case in cases:
        one = loads(json.dumps(case))
        try:
            with quiet():
                verdict = judge.judge(one)
        except BackendError as error:  # the backend lacks an op today
            _write(output, {"backend": name, "id": one.id, "outcome": f"refused: {error}"})
            continue
        line: dict[str, Any] = {
            "backend": name,
            "id": verdict.case.id,
            "outcome": verdict.outcome,
            "known": verdict.known,
            "unjudged": verdict.unjudged,
            "uncompiled": verdict.uncompiled,
            "kernels": [[k.overload, k.policy.value, len(k.casts)] for k in verdict.kernels],
            "notes": [[note.kind, note.op, note.where] for note in verdict.notes],
        }
        if (found := verdict.divergence) is not None:
            line |= {
                "kind": found.kind,
                "where": found.where,
                "expected": found.expected,
                "observed": found.observed,
                "op": guilty_op(verdict.case, found),
                "fingerprint": str(fingerprint(verdict.finding("all"))),
            }
        _write(output, line)


def _write(output: Path, line: dict[str, Any]) -> None:
    with output.open("a") as file:
        print(json.dumps(line), file=file)


def _lines(output: Path, name: str) -> Iterator[dict[str, Any]]:
    if output.exists():
        yield from (x for x in map(json.loads, output.open()) if x["backend"] == name)


def _line(text: str) -> Any:
    return json.loads(_ADDRESS.sub("0x...", text))


_ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}")


def compare(before: Path, after: Path) -> int:
    """Print each case that comes to something else; return 1 if there is one.

    Addresses in texts do not count.
    """
    lines = [
        {(x["backend"], x["id"]): x for x in map(_line, path.open())} for path in (before, after)
    ]
    differing = 0
    for key in dict.fromkeys([*lines[0], *lines[1]]):
        one, other = (side.get(key) for side in lines)
        if one is None or other is None:
            differing += 1
            print(*key, "only before" if other is None else "only after")
        elif one != other:
            differing += 1
            print(*key)
            for field in dict.fromkeys([*one, *other]):
                if one.get(field) != other.get(field):
                    print(f"    {field}: {one.get(field)!r} -> {other.get(field)!r}")
    print(f"{len(lines[0])} cases before, {len(lines[1])} after, {differing} differ")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
