"""What a hunt with random programs is made of: a line for each case, kept, and its counts.

`torchax_hunt.py` and `jax_hunt.py` share it. A hunt goes on where it stood when it was cut short.
What diverged is judged again once the package is another; how it was judged first is kept. The
hunts for seeded faults, `jax_faults.py` and `device_faults.py`, share `kept`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import amp_fuzz
from amp_fuzz.backends import backends
from amp_fuzz.backends.harness import quiet
from amp_fuzz.backends.jax.backend import JaxBackend
from amp_fuzz.backends.torchax.backend import TorchaxBackend
from amp_fuzz.cases.case import Case, loads
from amp_fuzz.findings.minimize.target import Shrunk, Target, asker, shrink
from amp_fuzz.oracle.judge import Judge
from amp_fuzz.oracle.labels import guilty_op
from amp_fuzz.oracle.verdict import Verdict
from amp_fuzz.runs.engine import Settings, Task, draw
from amp_fuzz.upstream import shipped
from amp_fuzz.upstream.explain import judge_of
from benchmarks.common import CASES, Row, arguments, machine, read, show, versions, write

Line = Row


def parser(doc: str, records: Path) -> argparse.ArgumentParser:
    """Return the parser of what every hunt is given."""
    made = arguments(doc)
    made.add_argument("what", nargs="+", help="BACKEND:CASES:SEED")
    made.add_argument("--records", type=Path, default=records)
    made.add_argument("--again", default="")
    made.add_argument("--output", type=Path)
    return made


def hunted(given: argparse.Namespace) -> list[Line]:
    """Hunt as the arguments say; return a line for each case."""
    torch.set_num_threads(1)
    given.records.mkdir(parents=True, exist_ok=True)
    again = given.again.split(",") if given.again else []
    rows: list[Line] = []
    for what in given.what:
        name, count, seed = what.rsplit(":", 2)
        path = given.records / f"{name}-{seed}.jsonl"
        rows += (
            {**line, "of": f"{name}:{seed}"}
            for line in hunt(name, int(count), int(seed), path, again)
        )
    return rows


def written(
    given: argparse.Namespace, path: Path, packages: Sequence[str], rows: list[Line]
) -> None:
    """Write what came of a hunt; backends that were not run stay as they were.

    The cases that are not explained become files in the folder ``open`` of the records.
    """
    path, result = given.output or path, read(given.output or path)
    result |= {"versions": versions(*packages), "machine": machine(f"{os.cpu_count()} cores")}
    result.setdefault("backends", {})
    for name in dict.fromkeys(row["backend"] for row in rows):
        asked = [what for what in given.what if what.rsplit(":", 2)[0] == name]
        own = summary([row for row in rows if row["backend"] == name])
        result["backends"][name] = {"asked": asked, **own}
    show(path, result)
    for row in rows:
        if row["outcome"] == "diverged":
            write(given.records / "open" / f"{row['id']}.json", row["case"])


def hunt(name: str, count: int, seed: int, path: Path, again: list[str]) -> list[Line]:
    """Judge the cases that a file has no line for, and those of `again`; return all lines."""
    backend = backends()[name]
    assert isinstance(backend, TorchaxBackend | JaxBackend)
    judge, clock, now = judge_of(backend, shipped()), _Clock(backend), _package()
    lines = [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []
    for i, line in enumerate(lines[:count]):
        today = line.get("judged") != now and (line["outcome"] == "diverged" or _any(again, line))
        if today and line["kind"] != "crash":
            fresh = judged(judge, loads(json.dumps(line["case"])))
            kept = {key: line[key] for key in ("number", "cpu", "first", "case") if key in line}
            lines[i] = {**fresh, **kept, "judged": now}
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    begun = path.with_suffix(".begun")
    died = begun.exists() and int(begun.read_text() or -1) == len(lines)
    if len(lines) >= count:
        backend.process.close()
        return lines[:count]
    before = lines[-1]["cpu"] if lines else 0.0
    with path.open("a") as file:
        for number, case in enumerate(draw(Task(name, "all", (), count, seed), Settings((name,)))):
            if number < len(lines):
                continue
            begun.write_text(str(number))
            line = _dead(name, case) if died else judged(judge, case)
            died = False
            line |= {"number": number, "cpu": round(before + clock.seconds(), 2), "judged": now}
            file.write(json.dumps({**line, "first": line["outcome"]}) + "\n")
            file.flush()
            lines.append({**line, "first": line["outcome"]})
    backend.process.close()
    return lines[:count]


def _package() -> str:
    """Return what is other once the package is: its list, its reference, its lowerings."""
    root = Path(amp_fuzz.__file__).parent
    found = hashlib.sha256()
    for path in sorted(p for p in root.rglob("*") if p.suffix in (".py", ".toml")):
        found.update(path.read_bytes())
    return found.hexdigest()[:12]


def _any(again: list[str], line: Line) -> bool:
    ids = line["known"].split("+") if line["known"] else []
    return bool(ids) and ("known" in again or any(i in again for i in ids))


def judged(judge: Judge, case: Case) -> Line:
    """Return what came of one case."""
    with quiet():
        verdict = judge.judge(case)
    line: Line = {
        "backend": verdict.backend,
        "id": verdict.case.id,
        "outcome": verdict.outcome,
        "known": verdict.known,
        "unjudged": verdict.unjudged,
        "platform": verdict.platform,
    }
    if (found := verdict.divergence) is not None:
        line |= {
            "kind": found.kind,
            "where": found.where,
            "op": guilty_op(verdict.case, found),
            "expected": found.expected,
            "observed": found.observed,
            "case": json.loads(verdict.case.json()),
        }
    return line


def _dead(name: str, case: Case) -> Line:
    return {
        "backend": name,
        "id": case.id,
        "outcome": "diverged",
        "known": "",
        "unjudged": 0,
        "platform": "",
        "kind": "crash",
        "where": "",
        "op": "",
        "expected": "an answer",
        "observed": "the process died",
        "case": json.loads(case.json()),
    }


class _Clock:
    """CPU seconds of this process and of those in which JAX was."""

    def __init__(self, backend: TorchaxBackend | JaxBackend) -> None:
        self._backend = backend
        self._start = self._sum()

    def seconds(self) -> float:
        return self._sum() - self._start

    def _sum(self) -> float:
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        return time.process_time() + ended.ru_utime + ended.ru_stime + self._living()

    def _living(self) -> float:
        process = self._backend.process._process
        if process is None:
            return 0.0
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def summary(rows: list[Line]) -> dict[str, Any]:
    """Return the counts of some cases."""
    outcomes = Counter(row["outcome"] for row in rows)
    known: Counter[str] = Counter()
    for row in rows:
        known.update(row["known"].split("+") if row["known"] else ())
    last = {row["of"]: row["cpu"] for row in rows}
    return {
        "cases": len(rows),
        "judged first": dict(Counter(row.get("first", row["outcome"]) for row in rows)),
        "agree": outcomes["agreed"],
        "raise alike": outcomes["raised"],
        "known": outcomes["known"],
        "unexplained": outcomes["diverged"],
        "known by cause": dict(known.most_common()),
        "not explained": [_shown(row) for row in rows if row["outcome"] == "diverged"],
        "values of which nothing is said": sum(row["unjudged"] for row in rows),
        "platforms": dict(Counter(row["platform"] for row in rows)),
        "CPU seconds": round(sum(last.values()), 1),
    }


def _shown(row: Line) -> str:
    return (
        f"{row['backend']} {row['id']}: {row['kind']} {row['op']} at {row['where']}: "
        f"{row['expected'][:80]} / {row['observed'][:80]}"
    )


def kept(folder: str, name: str, found: Verdict, judge: Judge, seconds: float) -> Row:
    """Minimise the case that showed a fault, keep it as a file that tests read, and return both.

    folder: of tests/cases.
    """
    assert found.divergence is not None
    target = Target.of(found, ("kind", "op"))
    small, reference = found.case, judge.backend.reference()
    for event in shrink(found.case, target, asker(judge, target), reference, seconds=seconds):
        if isinstance(event, Shrunk):
            small = event.case
            break
    path = CASES / folder / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(small.json() + b"\n")
    return {"kind": found.divergence.kind, "case": small.id}
