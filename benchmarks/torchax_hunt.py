"""What random programs meet on torchax: each divergence explained by a known entry, or listed.

    python benchmarks/torchax_hunt.py 'torchax[jit]:1000:101' ... [--records=DIR] [--again=IDS]

Each argument is a backend, how many cases and a seed. Cases are those that a run draws, judged with
the known list of the package. DIR keeps a line for each case, with the CPU seconds of both
processes until then: a run that is cut short goes on where it stood. What diverged is judged again
with the list of today; so is what one of the entries IDS (joined by commas) explained, or any of
them (``--again=known``). A case of which the process died is recorded when the run goes on.

Writes counts, what each entry explained, what is not explained, and the first case that met each
of the differences of DIFFERENCES, into torchax_hunt.json beside it (or ``--output=FILE``).
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import os
import platform
import resource
import time
from collections import Counter
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from amp_fuzz.backends import backends
from amp_fuzz.backends.torchax import TorchaxBackend
from amp_fuzz.case import Case, loads
from amp_fuzz.engine import Settings, Task, draw
from amp_fuzz.judge import Judge, guilty_op, quiet
from amp_fuzz.known import shipped

Line = dict[str, Any]

LOSSES = ("*_loss*", "*Loss*", "cross_entropy*", "kl_div*", "nll*", "poisson*")
DIFFERENCES: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "torch.autocast('jax') casts nothing": (("torchax-torch-autocast",), ("*",)),
    "linear and einsum are not lowered": (("torchax-composites",), ("linear*", "Linear", "einsum")),
    "convolutions, prelu, vecdot are not lowered": (
        ("torchax-composites", "torchax-16-bit"),
        ("conv*", "Conv*", "prelu", "linalg.vecdot"),
    ),
    "cat, stack, index_copy raise": (("torchax-promote",), ("*",)),
    "fp32 policies of losses, pools, padding are not applied": (
        ("torchax-composites",),
        (*LOSSES, "*pool3d*", "*_pad1d", "*_pad2d", "*_pad3d"),
    ),
    "fft, quantile and linalg raise in 16 bits": (
        ("torchax-16-bit",),
        ("fft*", "*quantile*", "linalg*", "stft*", ""),
    ),
    "float64 is cast": (("torchax-float64",), ("*",)),
    "stale jit": (("torchax-stale-jit",), ("*",)),
    "dtype= of reductions is ignored": (("torchax-dtype-argument", "torchax-mean-dtype"), ("*",)),
    "0-d tensors promote": (("torchax-promotion",), ("*",)),
    "a product is rounded before it is added to": (("torchax-sums",), ("*",)),
    "layer_norm rounds step by step": (("torchax-norms",), ("*layer_norm*", "*LayerNorm*")),
    "renorm of 16 bits raises": (("torchax-raises",), ("renorm",)),
}
"""What was known before, by the entries that explain it and the ops that it shows at."""

PACKAGES = ("torch", "torchax", "jax", "jaxlib", "amp-fuzz")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", nargs="+", help="BACKEND:CASES:SEED")
    parser.add_argument("--records", type=Path, default=Path(".amp-fuzz/torchax-hunt"))
    parser.add_argument("--again", default="")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    given.records.mkdir(parents=True, exist_ok=True)
    rows: list[Line] = []
    for what in given.what:
        name, count, seed = what.rsplit(":", 2)
        path = given.records / f"{name}-{seed}.jsonl"
        again = given.again.split(",") if given.again else []
        rows += (
            {**line, "of": f"{name}:{seed}"}
            for line in hunt(name, int(count), int(seed), path, again)
        )
    result = {
        "versions": {package: version(package) for package in PACKAGES},
        "machine": f"{platform.machine()}, {platform.system()}, {os.cpu_count()} cores",
        "asked": given.what,
        "all": summary(rows),
        "differences known before": {name: met(rows, *how) for name, how in DIFFERENCES.items()},
        "backends": {
            name: summary([row for row in rows if row["backend"] == name])
            for name in dict.fromkeys(row["backend"] for row in rows)
        },
    }
    given.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["all"], indent=1))


def hunt(name: str, count: int, seed: int, path: Path, again: list[str]) -> list[Line]:
    """Judge the cases that a file has no line for, and those of `again`; return all lines."""
    backend = backends()[name]
    assert isinstance(backend, TorchaxBackend)
    judge, clock = Judge(backend, shipped()), _Clock(backend)
    now = hashlib.sha256(repr(judge.known).encode()).hexdigest()[:12]  # the list of today
    lines = [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []
    for i, line in enumerate(lines[:count]):
        today = line.get("judged") != now and (line["outcome"] == "diverged" or _any(again, line))
        if today and line["kind"] != "crash":
            fresh = judged(judge, loads(json.dumps(line["case"])))
            lines[i] = {**fresh, "number": line["number"], "cpu": line["cpu"], "judged": now}
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
            line |= {"number": number, "cpu": round(before + clock.seconds(), 2)}
            file.write(json.dumps(line) + "\n")
            file.flush()
            lines.append(line)
    backend.process.close()
    return lines[:count]


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
    """CPU seconds of this process and of those in which torchax was."""

    def __init__(self, backend: TorchaxBackend) -> None:
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


# -- what is written ------------------------------------------------------------------------------


def summary(rows: list[Line]) -> dict[str, Any]:
    """Return the counts of some cases."""
    outcomes = Counter(row["outcome"] for row in rows)
    known: Counter[str] = Counter()
    for row in rows:
        known.update(row["known"].split("+") if row["known"] else ())
    last = {row["of"]: row["cpu"] for row in rows}
    return {
        "cases": len(rows),
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


def met(rows: list[Line], ids: tuple[str, ...], ops: tuple[str, ...]) -> dict[str, Any] | None:
    """Return which case met a difference first, after how many of its backend and seed."""
    for row in rows:
        known = row["known"].split("+") if row["known"] else []
        at = any(fnmatch.fnmatchcase(row.get("op", ""), op) for op in ops)
        if at and any(i in known for i in ids):
            before = [r["id"] for r in rows if r["of"] == row["of"] and r["number"] < row["number"]]
            return {
                "case": row["id"],
                "of": row["of"],
                "after cases": len(before),
                "CPU seconds": row["cpu"],
                "explained by": row["known"],
            }
    return None


def _shown(row: Line) -> str:
    return (
        f"{row['backend']} {row['id']}: {row['kind']} {row['op']} at {row['where']}: "
        f"{row['expected'][:80]} / {row['observed'][:80]}"
    )


if __name__ == "__main__":
    main()
