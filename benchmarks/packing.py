"""What compiling several programs at once would save: one compilation of them against one each.

    python -m benchmarks.packing [--backends=...] [--sizes=4,8] [--programs=48] [--output=FILE]
    python -m benchmarks.packing --candidates=exp,sum,softmax [--sizes=2,4] [--output=FILE]

Drawn programs that run, with the same plan and seed (drawn cases seldom share a plan: 81 of 100 are
distinct), are renamed apart and joined into one. CPU seconds with those of g++, one core, warm; the
ratio is that of one by one to together, so that more than 1 is a gain.

``--candidates`` asks the same of what the minimiser tries: a case of eight statements with one
wrong kernel of the backend is minimised, once for each op, and the candidates that were compiled
are compiled again, alone and in packs of those that follow each other under one plan. A pack ends
with the candidate that is taken, since what comes after it is made of it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from amp_fuzz.backends import Backend, backends
from amp_fuzz.backends.harness import quiet
from amp_fuzz.cases.case import Case, Plan
from amp_fuzz.cases.program import Items, Node, Program, Ref, Region, statements
from amp_fuzz.findings.minimize.target import Answer, Memory, Target, asker, shrink
from amp_fuzz.runs.engine import Settings, Task, draw
from amp_fuzz.upstream.explain import judge_of
from benchmarks.common import arguments, machine, read, versions, write
from benchmarks.compilers import spent
from tests.helpers import WrongKernel, drawn

PLANS = {"with backward": Plan(), "forward only": Plan(backward="none")}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--backends", default="compile[aot_eager],compile[inductor]")
    parser.add_argument("--sizes", default="4,8")
    parser.add_argument("--programs", type=int, default=48)
    parser.add_argument("--statements", type=int, default=8)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--candidates", metavar="OPS", default="", help="of searches, by op")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.candidates and os.environ.get("TORCHINDUCTOR_FORCE_DISABLE_CACHES") != "1":
        # What a search has compiled, Inductor would not compile again.
        parser.error("set TORCHINDUCTOR_FORCE_DISABLE_CACHES=1: caches would answer")
    sizes = [int(size) for size in args.sizes.split(",")]
    names = args.backends.split(",")
    result: dict[str, Any] = {}
    if args.candidates:
        ops = args.candidates.split(",")
        result["candidates"] = {name: searched(backends()[name], ops, sizes) for name in names}
    else:
        result["backends"] = {
            name: {
                plan: measure(backends()[name], PLANS[plan], sizes, args.programs, args.statements)
                for plan in PLANS
            }
            for name in names
        }
    result |= {
        "versions": versions("torch", "amp-fuzz"),
        "machine": machine(),
    }
    print(json.dumps(result, indent=2))
    if args.output:
        write(args.output, read(args.output) | result)


def measure(
    backend: Backend, plan: Plan, sizes: Sequence[int], count: int, most: int
) -> dict[str, Any]:
    """Return the seconds a program alone, and by size the ratio to that of programs together."""
    settings = Settings((backend.name,), max_statements=most)
    task = Task(backend.name, "packing", (), 2 * count, 5)
    runs: list[Case] = []
    with quiet():
        for drawn in draw(task, settings):  # this warms up, too
            case = backend.fit(msgspec.structs.replace(drawn, plan=plan, seed=0))
            if backend.run([case])[0].raised is None:
                runs.append(case)
            if len(runs) == count:
                break
        alone = [(case, spent(partial(backend.run, [case]))) for case in runs]
        result: dict[str, Any] = {
            "programs": len(alone),
            "statements": sum(len(list(statements(c.program.body))) for c, _ in alone) / len(alone),
            "seconds a program, one by one": round(sum(s for _, s in alone) / len(alone), 3),
        }
        for size in sizes:
            groups = [alone[i : i + size] for i in range(0, len(alone) - size + 1, size)]
            one_by_one = sum(s for group in groups for _, s in group)
            cases = [joined([c for c, _ in group]) for group in groups]
            together = sum(spent(partial(backend.run, [c])) for c in cases)
            result[f"ratio, {size} together"] = round(one_by_one / together, 2)
    return result


def searched(backend: Backend, ops: Sequence[str], sizes: Sequence[int]) -> dict[str, Any]:
    """Return the seconds a candidate alone, and by size the ratio to that of packs of them."""
    runs = [run for op in ops for run in _runs(WrongKernel(backend, op), op)]
    with quiet():
        costs = {c.id: spent(partial(backend.run, [c])) for run in runs for c in run}
        alone = sum(costs[c.id] for run in runs for c in run)
        result: dict[str, Any] = {
            "searches": len(ops),
            "candidates": sum(map(len, runs)),
            "in runs of": [len(run) for run in runs],
            "seconds a candidate, one by one": round(alone / sum(map(len, runs)), 3),
        }
        for size in sizes:
            packs = [run[i : i + size] for run in runs for i in range(0, len(run), size)]
            single = sum(costs[pack[0].id] for pack in packs if len(pack) == 1)
            cases = [joined(pack) for pack in packs if len(pack) > 1]
            together = single + sum(spent(partial(backend.run, [c])) for c in cases)
            result[f"packs of {size} at most"] = len(packs)
            result[f"ratio, {size} at most"] = round(alone / together, 2)
    return result


def _runs(backend: Backend, op: str) -> list[list[Case]]:
    """Return what a search compiled: lists of candidates of one plan and seed, in their order."""
    judge = judge_of(backend)
    with quiet():
        cases = drawn(200, ops=["mm", "relu", "add", "cat", op], focus=[op], seed=op)
        large = (c for c in cases if len(list(statements(c.program.body))) >= 8)
        verdict = next(v for v in map(judge.judge, large) if v.outcome == "diverged")
        target = Target.of(verdict)
        runs: list[list[Case]] = [[]]

        def said(case: Case, answer: Answer) -> None:
            if answer.said not in ("agreed", "diverged"):  # it was not compiled
                return
            last = runs[-1][-1] if runs[-1] else case
            if (last.plan, last.seed) != (case.plan, case.seed):
                runs.append([])
            runs[-1].append(case)
            if target.reply(answer) == "same":
                runs.append([])

        ask, memory = asker(judge, target), Memory(said=said)
        list(shrink(verdict.case, target, ask, backend.reference(), seconds=120, memory=memory))
    return [run for run in runs if run]


def joined(cases: Sequence[Case]) -> Case:
    """Return the programs of cases side by side as one; the plan is that of the first."""
    programs = [renamed(case.program, 1000 * (i + 1)) for i, case in enumerate(cases)]
    whole = Program(
        inputs=tuple(spec for p in programs for spec in p.inputs),
        body=tuple(node for p in programs for node in p.body),
        outputs=tuple(name for p in programs for name in p.outputs),
    )
    return msgspec.structs.replace(cases[0], program=whole)


def renamed(program: Program, offset: int) -> Program:
    """Return a program with every number in its names moved up."""

    def name(old: str) -> str:
        return old if old == "_" else f"{old[0]}{int(old[1:]) + offset}"

    def arg(value: Any) -> Any:
        if isinstance(value, Ref):
            return Ref(name(value.name))
        if isinstance(value, Items):
            return Items(tuple(arg(item) for item in value.items))
        return value

    def node(one: Node) -> Node:
        if isinstance(one, Region):
            return Region(one.context, tuple(map(node, one.body)))
        return msgspec.structs.replace(
            one,
            args=tuple(map(arg, one.args)),
            kwargs=tuple((key, arg(value)) for key, value in one.kwargs),
            outputs=tuple(map(name, one.outputs)),
        )

    return Program(
        tuple(msgspec.structs.replace(s, name=name(s.name)) for s in program.inputs),
        tuple(map(node, program.body)),
        tuple(map(name, program.outputs)),
    )


if __name__ == "__main__":
    main()
