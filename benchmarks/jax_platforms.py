"""Judge programs on a simulated TPU: by the arithmetic of a TPU, and by that of a CPU.

    python benchmarks/jax_platforms.py honest jax 1000
    python benchmarks/jax_platforms.py honest torchax 1000
    python benchmarks/jax_platforms.py faults

Products round their inputs as a TPU's do (`tests/faults/tpu.py`); all else is the CPU's. Each case
has a product, and its precision is drawn. Each observation is judged twice: with the arithmetic of
a TPU, and with that of a CPU, which must object to some, or the first judgement says nothing. What
also diverges on the CPU as it is, without rounded products, is no false alarm: it is counted apart.
``faults`` seeds faults beside the rounding. Both continue where they stopped, and write to
``benchmarks/jax_platforms.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from amp_fuzz.backends import backends
from amp_fuzz.backends.harness import Observation, quiet
from amp_fuzz.backends.jax.backend import JaxBackend
from amp_fuzz.backends.jax.platforms import Platform
from amp_fuzz.backends.process import Apart
from amp_fuzz.backends.torchax.backend import Mode, TorchaxBackend
from amp_fuzz.cases.case import Case
from amp_fuzz.oracle.judge import Judge
from amp_fuzz.oracle.verdict import Verdict
from amp_fuzz.runs.engine import Settings, Task, draw
from amp_fuzz.upstream import shipped
from amp_fuzz.upstream.explain import judge_of
from benchmarks.common import arguments, machine, read, show, versions
from tests.faults.tpu import FAULTS

JSON = Path(__file__).with_suffix(".json")
PRODUCTS = ("matmul", "conv*")
STATEMENTS = 3
CPU = Platform("cpu", "cpu")
# The ops at which each fault is aimed, and the precision that shows it.
AIMS: dict[str, tuple[tuple[str, ...], str]] = {
    "missing-pass": (("mm", "linear"), "high"),
    "one-pass": (("mm", "linear"), "high"),
    "highest-one-pass": (("mm", "linear"), "highest"),
    "float8": (("mm", "linear"), "default"),
    "narrow-high": (("mm", "linear"), "high"),
    "gain": (("mm", "linear"), "default"),
    "narrow-softmax": (("softmax", "log_softmax"), ""),
    "dropped-bias": (("addmm",), ""),
    "missing-cast": (("mm",), ""),
    "gradient-sign": (("tanh",), ""),
    "element": (("cat",), ""),
}


class Once:
    """A process of which each case is asked once; said: in place of the platform it found."""

    def __init__(self, process: Apart, seen: dict[str, Observation], said: object = None) -> None:
        self.process, self.seen, self._said = process, seen, said

    def run(self, case: Case, *, reference: bool = False) -> Observation:
        if case.id not in self.seen:
            self.seen[case.id] = self.process.run(case)
        return self.seen[case.id]

    def said(self) -> object:
        return self._said or self.process.said()


def simulated(kind: str, file: Path) -> Apart:
    """Return a process with a simulated TPU, whose fault is named in a file."""
    own = (Mode(),) if kind == "torchax" else ("cuda", False, False)
    return Apart("tests.faults.tpu:Simulated", str(file), kind, *own, lives=120)


def backend_of(kind: str, process: Any) -> JaxBackend | TorchaxBackend:
    """Return a backend with that process."""
    return TorchaxBackend(Mode(), process) if kind == "torchax" else JaxBackend(process=process)


def honest(kind: str, count: int, seed: int, folder: Path) -> dict[str, Any]:
    """Judge cases twice; return counts, and what is not explained."""
    path = folder / f"{kind}-{seed}.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    (folder / "none").write_text("")
    process, seen = simulated(kind, folder / "none"), dict[str, Observation]()
    with_tpu = judge_of(backend_of(kind, Once(process, seen)), shipped())
    with_cpu = Judge(backend_of(kind, Once(process, seen, CPU)), confirm=False)
    cases = draw(
        Task(kind, "honest", PRODUCTS, count, seed), Settings((kind,), max_statements=STATEMENTS)
    )
    plain = judge_of(backends()[kind], shipped())  # the CPU as it is
    with path.open("a") as file, quiet():
        for number, case in enumerate(cases):
            if number < len(lines):
                continue
            seen.clear()
            own, other = with_tpu.judge(case), with_cpu.judge(case)
            line = _line(own) | {"number": number, "cpu": _line(other)}
            if own.outcome == "diverged":
                line["plain"] = plain.judge(case).outcome
            file.write(json.dumps(line) + "\n")
            file.flush()
            lines.append(line)
    process.close()
    return _counted(lines[:count], seed)


def _line(verdict: Verdict) -> dict[str, Any]:
    line: dict[str, Any] = {
        "id": verdict.case.id,
        "precision": verdict.case.plan.precision,
        "outcome": verdict.outcome,
        "known": verdict.known,
        "unjudged": verdict.unjudged,
    }
    if (found := verdict.divergence) is not None:
        line |= {"kind": found.kind, "where": found.where}
        line |= {"expected": found.expected, "observed": found.observed}
        line["case"] = json.loads(verdict.case.json())
    return line


def _counted(lines: list[dict[str, Any]], seed: int) -> dict[str, Any]:
    found: dict[str, Any] = {"seed": seed, "cases": len(lines)}
    for level in ("default", "high", "highest"):
        own = [line for line in lines if line["precision"] == level]
        values = [x for x in own if x["cpu"].get("kind") in ("value", "grad-value")]
        found[level] = {
            "cases": len(own),
            "with a TPU's arithmetic": dict(Counter(x["outcome"] for x in own)),
            "a value diverges with a CPU's": len(values),
        }
    found["values of which nothing is said"] = sum(x["unjudged"] for x in lines)
    found["not explained"] = [
        f"{x['id']} {x['precision']}: {x['kind']} {x['where']}: "
        f"{x['expected'][:90]} / {x['observed'][:90]}"
        for x in lines
        if x["outcome"] == "diverged" and x["plain"] != "diverged"
    ]
    found["not explained on the CPU as it is, either"] = sum(
        x["outcome"] == x.get("plain") == "diverged" for x in lines
    )
    return found


def hunt(kind: str, name: str, cases: int, folder: Path) -> dict[str, Any]:
    """Return after how many cases a fault is found that honest code does not show."""
    file, (ops, level) = folder / "fault", AIMS[name]
    file.write_text("")
    process = simulated(kind, file)
    judge = judge_of(backend_of(kind, process), shipped())
    row: dict[str, Any] = {"what": FAULTS[name], "found": False, "cases": cases}
    drawn = draw(Task(kind, "faults", ops, cases, 0), Settings((kind,), max_statements=STATEMENTS))
    with quiet():
        for number, case in enumerate(drawn, 1):
            given = case.with_plan(precision=level) if level else case
            file.write_text(name)
            verdict = judge.judge(given)
            file.write_text("")
            if verdict.outcome == "diverged" and judge.judge(given).outcome != "diverged":
                assert verdict.divergence is not None
                row |= {"found": True, "cases": number, "kind": verdict.divergence.kind}
                break
    process.close()
    return row


def main() -> int:
    """Do what the command line asks for; return 1 if something is not explained or not found."""
    parser = arguments(__doc__)
    parser.add_argument("what", choices=("honest", "faults"))
    parser.add_argument("kind", nargs="?", default="jax", choices=("jax", "torchax"))
    parser.add_argument("cases", nargs="?", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--records", type=Path, default=Path(".amp-fuzz/jax-platforms"))
    parser.add_argument("--only", metavar="NAME", help="hunt for this fault, again if need be")
    options: argparse.Namespace = parser.parse_args()
    torch.set_num_threads(1)
    options.records.mkdir(parents=True, exist_ok=True)
    result = read(JSON) | {"versions": versions("torch", "jax", "jaxlib", "torchax")}
    result["machine"] = machine(f"{os.cpu_count()} cores")
    if options.what == "honest":
        made = honest(options.kind, options.cases, options.seed, options.records)
        result.setdefault("honest", {})[options.kind] = made
        show(JSON, result)
        return int(bool(made["not explained"]))
    rows = result.setdefault("faults", {}).setdefault(options.kind, {})
    with tempfile.TemporaryDirectory() as folder:
        for name in [options.only] if options.only else [n for n in FAULTS if n not in rows]:
            rows[name] = hunt(options.kind, name, options.cases, Path(folder))
            show(JSON, result)
    return int(not all(row["found"] for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
