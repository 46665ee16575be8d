"""Measure false alarms and misses on a device that adds in another order at each call.

The device is `tests/atomics.py`: the kernels that torch documents as nondeterministic on CUDA give
other bits at each call. ``drawn`` judges cases as a run draws them, ``aimed`` cases of which each
calls an op with such a kernel: none may diverge, unless something else explains it. ``faults``
makes one kernel wrong on the backend's side only and counts the cases until it is found.

Cases are judged in processes that may die. Results are kept in --records, and a run that was cut
short goes on where it stood.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from amp_fuzz.backends import vendor
from amp_fuzz.backends.devices import policies_of
from amp_fuzz.backends.harness import Observation, quiet
from amp_fuzz.cases.case import Case
from amp_fuzz.catalogue import Op, select
from amp_fuzz.oracle.judge import Judge
from amp_fuzz.policies.tables import adopt
from amp_fuzz.runs.engine import runnable
from amp_fuzz.strategies.drawing import draw_case
from amp_fuzz.upstream import shipped
from amp_fuzz.upstream.explain import judge_of
from amp_fuzz.upstream.known import Known
from benchmarks.common import ROOT, Row, arguments, commit, machine, read, show, versions
from tests import atomics

OUTPUT = ROOT / "benchmarks" / "nondeterminism.json"
SEED = 20261125
MOST = 300  # cases for one fault
# A factory call in a Python kernel on a device in Python, which torch cannot dispatch.
PYTHON = "Hit Python dispatch key but no arguments had PyInterpreter"

# A kernel, and the ops of the catalogue that reach it, forward or backward.
KERNELS = {
    "index_add": ("index_add", "index_select", "repeat_interleave"),
    "scatter_add": ("scatter_add", "scatter_add.duplicates", "gather", "take_along_dim"),
    "scatter_reduce": ("scatter_reduce",),
    "scatter": ("scatter",),
    "index_copy": ("index_copy",),
    "cumsum": ("cumsum",),
    "convolution": ("conv1d", "conv2d", "conv3d", "conv_transpose2d"),
    "convolution_backward": ("conv1d", "conv2d", "conv3d", "conv_transpose2d"),
    "max_pool3d_with_indices_backward": ("max_pool3d",),
    "avg_pool3d_backward": ("avg_pool3d",),
    "_adaptive_avg_pool2d_backward": ("adaptive_avg_pool2d",),
    "adaptive_max_pool2d_backward": ("adaptive_max_pool2d",),
    "upsample_bilinear2d_backward": ("upsample_bilinear2d",),
    "reflection_pad2d_backward": ("reflection_pad2d",),
    "replication_pad2d_backward": ("replication_pad2d",),
    "grid_sampler_2d_backward": ("grid_sampler_2d", "grid_sampler"),
    "nll_loss_forward": ("nll_loss",),
    "_ctc_loss_backward": ("ctc_loss", "ctc_loss.lists"),
}
OTHERS = (
    *("index_put", "index_put.accumulate", "index_put.pairs", "index_put.mask", "take"),
    *("conv_transpose1d", "conv_transpose3d", "convolution", "_convolution", "embedding_bag"),
    *("adaptive_avg_pool3d", "adaptive_max_pool3d", "fractional_max_pool2d", "median.dim"),
    *("fractional_max_pool3d", "upsample_bicubic2d", "upsample_linear1d", "upsample_trilinear3d"),
    *("reflection_pad1d", "reflection_pad3d", "replication_pad1d", "replication_pad3d"),
    *("grid_sampler_3d", "nll_loss2d", "max_unpool1d", "max_unpool2d", "max_unpool3d"),
    *("nanmedian.dim", "cumulative_trapezoid", "_upsample_bilinear2d_aa"),
)
AIMS = tuple(dict.fromkeys([*(op for ops in KERNELS.values() for op in ops), *OTHERS]))


@dataclass(frozen=True, slots=True)
class Faulty(vendor.VendorBackend):
    """The device with a kernel that is wrong, but not under the reference."""

    wrong: tuple[str, str] = ("", "")

    def run(self, cases: Sequence[Case]) -> list[Observation]:
        with atomics.faulty(*self.wrong):
            return vendor.VendorBackend.run(self, cases)


def known() -> list[Known]:
    """Return the bugs that a device in Python has: not those of autocast in C++."""
    return [entry for entry in shipped() if entry.on("privateuse1")]


def device(wrong: tuple[str, str] = ("", "")) -> Faulty:
    table = policies_of(atomics.DEVICE, "cuda")
    adopt(table)
    return Faulty(device=atomics.DEVICE, table=table, wrong=wrong)


class Drawn:
    """The cases of a part, by number."""

    def __init__(self, part: str, seed: int, aims: Sequence[str] = ()) -> None:
        self.part, self.seed = part, seed
        self.ops = runnable(select(("*",)), device())
        self.aims: Sequence[Op] = [op for op in self.ops if op.name in aims]

    def __call__(self, number: int) -> Case:
        focus = [self.aims[number % len(self.aims)]] if self.aims else []
        source = random.Random(f"{self.seed}/{self.part}/{number}").randbytes
        return draw_case(source, atomics.DEVICE, ops=self.ops, focus=focus, varies=True)


def judged(judge: Judge, case: Case, number: int) -> Row:
    """Judge a case; return its line."""
    atomics.seed(number)
    start = time.process_time()
    found = judge.judge(case)
    row: Row = {
        "number": number,
        "id": case.id,
        "outcome": found.outcome,
        "known": found.known,
        "varied": found.varied,
        "unjudged": found.unjudged,
        "deterministic": case.plan.deterministic,
        "cpu": round(time.process_time() - start, 3),
    }
    if found.divergence is not None:
        d = found.divergence
        row |= {"kind": d.kind, "where": d.where, "expected": d.expected, "observed": d.observed}
    return row


def work(part: str, seed: int, numbers: range, path: Path) -> None:
    """Judge the cases of some numbers, and append their lines to a file."""
    torch.set_num_threads(1)
    drawn = Drawn(part, seed, AIMS if part == "aimed" else ())
    judge = judge_of(device(), known())
    with path.open("a") as file, quiet():
        for number in numbers:
            case = drawn(number)
            file.write(json.dumps({"number": number, "id": case.id, "begins": True}) + "\n")
            file.flush()
            file.write(json.dumps(judged(judge, case, number)) + "\n")
            file.flush()


def hunt(part: str, cases: int, seed: int, processes: int, records: Path) -> list[Row]:
    """Judge the cases of a part in several processes; return a line for each."""
    paths = [records / f"{part}-{seed}-{i}of{processes}.jsonl" for i in range(processes)]
    running: dict[int, subprocess.Popen[bytes]] = {}
    while True:
        for i, path in enumerate(paths):
            if i in running and running[i].poll() is None:
                continue
            number = min((_next(path, i, processes), cases + i))
            if number < cases:
                words = f"{part}:{number}:{cases}:{processes}:{seed}:{path}"
                running[i] = subprocess.Popen([sys.executable, __file__, "--work", words])
            else:
                running.pop(i, None)
        if not running:
            return sorted(_lines(paths).values(), key=lambda row: int(row["number"]))
        time.sleep(1)


def _lines(paths: Sequence[Path]) -> dict[int, Row]:
    """Return the last line of each case; one that only begins ended its process."""
    found: dict[int, Row] = {}
    for path in paths:
        for text in path.read_text().splitlines() if path.exists() else ():
            row = json.loads(text)
            dead = {"outcome": "died", "varied": 0, "unjudged": 0, "known": "", "cpu": 0.0}
            found[row["number"]] = {**dead, **row} if "begins" in row else row
    return found


def _next(path: Path, first: int, step: int) -> int:
    return max([first - step, *_lines([path])]) + step


def summary(rows: Sequence[Row]) -> Row:
    """Return the counts of some cases."""
    causes: Counter[str] = Counter()
    for row in rows:
        causes.update(row["known"].split("+") if row["known"] else ())
    bad = [row for row in rows if row["outcome"] in ("diverged", "died")]
    return {
        "cases": len(rows),
        "outcomes": dict(Counter(row["outcome"] for row in rows).most_common()),
        "with deterministic algorithms": sum(bool(row.get("deterministic")) for row in rows),
        "varied, as documented": sum(row["varied"] > 0 for row in rows),
        "values that varied": sum(row["varied"] for row in rows),
        "of these not judged": sum(row["unjudged"] for row in rows),
        "known": dict(causes.most_common()),
        "what a device in Python cannot do": [row for row in bad if PYTHON in str(row)],
        "unexplained": [row for row in bad if PYTHON not in str(row)],
        "CPU seconds": round(sum(row["cpu"] for row in rows), 1),
    }


def faults(seed: int) -> Iterator[Row]:
    """Yield for each kernel and each way in which it may be wrong when it was found."""
    torch.set_num_threads(1)
    for kernel, ops in KERNELS.items():
        drawn = Drawn(f"faults/{kernel}", seed, ops)
        for way in atomics.FAULTS:
            judge = judge_of(device((kernel, way)), known())
            start, row = time.process_time(), {"kernel": kernel, "fault": way, "cases": MOST}
            with quiet():
                for number in range(MOST):
                    found = judged(judge, drawn(number), number)
                    if found["outcome"] == "diverged" and found["kind"] != "nondeterminism":
                        row |= {"cases": number + 1, "kind": found["kind"]}
                        row |= {"deterministic": found["deterministic"]}
                        break
            yield {**row, "cpu": round(time.process_time() - start, 1)}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("parts", nargs="*", help="drawn, aimed, faults; all by default")
    parser.add_argument("--cases", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--records", type=Path, default=ROOT / ".amp-fuzz" / "nondeterminism")
    parser.add_argument("--output", type=Path, nargs="?", const=OUTPUT)
    parser.add_argument("--work", default="")
    given = parser.parse_args()
    if given.work:
        part, first, last, step, seed, path = given.work.split(":", 5)
        work(part, int(seed), range(int(first), int(last), int(step)), Path(path))
        return
    given.records.mkdir(parents=True, exist_ok=True)
    result: Row = {
        **read(OUTPUT),
        "versions": versions("torch", "amp-fuzz"),
        "commit": commit(),
        "machine": machine(),
        "seed": given.seed,
    }
    for part in given.parts or ("drawn", "aimed", "faults"):
        if part == "faults":
            rows = list(faults(given.seed))
            found = [row for row in rows if "kind" in row]
            result[part] = {"found": f"{len(found)} of {len(rows)}", "each": rows}
        else:
            rows = hunt(part, given.cases, given.seed, given.processes, given.records)
            result[part] = summary(rows)
    show(given.output, result)


if __name__ == "__main__":
    main()
