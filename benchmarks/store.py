"""How long a large run takes to compact, to load, to report and to compare, and how large it is.

    python benchmarks/store.py [--rows=10000000] [--folder=FOLDER]

Writes two runs of so many generated rows each (cases and kernels together) as JSON lines, with the
proportions of a real run: 1.4 kernels and 9 ops a case, six backends, 4 % known divergences, 0.8 %
notes. Then measures what a user types, each in a new process: ``amp-fuzz store compact``,
``report`` and ``compare``, and ``amp_fuzz.reports.load``. Seconds are wall
time, peak memory is the maximum resident size. Writes ``benchmarks/store.json``. The folder, by
default a temporary one that is removed, needs 0.5 GB for a million rows.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from amp_fuzz.cases.build import call, case, x
from amp_fuzz.cases.case import Case
from amp_fuzz.records.fingerprint import plan_words
from amp_fuzz.records.schema import (
    BackendRecord,
    CaseRecord,
    DivergenceRecord,
    EndRecord,
    KernelRecord,
    Note,
    NoteRecord,
    Outcome,
    Record,
    RunRecord,
)
from amp_fuzz.records.store import Store
from benchmarks.common import ROOT, Row, arguments, commit, machine, show, versions

JSON = Path(__file__).with_suffix(".json")
BACKENDS = ("eager-cpu", "fake-cuda", "fake-xpu", "fake-mps", "compile[inductor]", "script")
OPS = tuple(f"op{i}" for i in range(380))
POLICIES = ("lower_precision_fp", "fp32", "promote", "fp32_append_dtype")
DTYPES = ("bfloat16", "float16", "float32", "float64")
KINDS = ("dtype", "value", "raise", "grad-value", "bitwise")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--output", type=Path, default=JSON)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        show(args.output, measured(Path(folder), args.rows))


def measured(folder: Path, rows: int) -> Row:
    store = Store(folder / "store")
    result: Row = {
        "rows of a run": {},
        "commit": commit(),
        "versions": versions("amp-fuzz", "pandas", "pyarrow", "msgspec"),
        "machine": machine(f"{os.cpu_count()} cores, nice {os.nice(0)}"),
    }
    for seed, name in enumerate(("a", "b")):
        result["rows of a run"] = generate(store, name, seed, rows)
    one = store.run_path("a")
    lines = size(one, "records-*.jsonl")
    at = f"--store={store.root}"
    command = (sys.executable, "-m", "amp_fuzz")
    result["compact"] = run(folder, *command, "store", "compact", "a", at)
    run(folder, *command, "store", "compact", "b", at)
    tables = size(one, "tables-*/*/*.parquet")
    result["bytes"] = {
        "JSON lines": lines,
        "Parquet": tables,
        "times smaller": round(lines / tables, 1),
        **{t: size(one, f"tables-*/{t}/*.parquet") for t in ("cases", "kernels", "findings")},
    }
    result["report"] = run(folder, *command, "report", "a", at)
    pages = (folder / "amp-fuzz-report").glob("*.html")
    result["report"]["bytes"] = {page.name: page.stat().st_size for page in sorted(pages)}
    result["compare"] = run(folder, *command, "compare", "a", "b", at)
    for table in ("cases", "kernels"):
        code = f"from amp_fuzz.reports import load; print(len(load({str(one)!r}, {table!r})))"
        result[f"load {table}"] = run(folder, sys.executable, "-c", code)
    return result


def size(folder: Path, files: str) -> int:
    return sum(path.stat().st_size for path in folder.glob(files))


def run(folder: Path, *command: str) -> Row:
    """Run a command; return its wall seconds and its peak memory."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    start = time.monotonic()
    log = folder / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=out)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: exit {process.returncode}\n{log.read_text()}")
    took = round(time.monotonic() - start, 1)
    found = {"seconds": took, "peak MiB": usage.ru_maxrss // 1024}
    print(*command[2:4], found, flush=True, file=sys.stderr)
    return found


# -- a run ----------------------------------------------------------------------------------------


def generate(store: Store, name: str, seed: int, rows: int) -> Row:
    """Write a run of about so many rows, and return their numbers."""
    heads = tuple(BackendRecord(b, "cpu", "torch", OPS[:120], ()) for b in BACKENDS)
    store.begin(
        RunRecord(name, seed, "nightly", heads, {"torch": "2.13.0"}, "2026-01-01", threshold=4.0)
    )
    count = {"cases": 0, "kernels": 0}
    for backend in BACKENDS:
        writer = store.writer(name, backend)
        kernels = cases = 0
        for record in drawn(backend, random.Random(f"{seed}/{backend}")):
            writer.write(record)
            if isinstance(record, CaseRecord):
                cases, kernels = cases + 1, kernels + len(record.kernels)
                if cases + kernels >= rows / len(BACKENDS):
                    break
        writer.write(EndRecord(backend, "all", cases, cases / 30))
        writer.close()
        count = {"cases": count["cases"] + cases, "kernels": count["kernels"] + kernels}
    writer = store.writer(name, "run")
    writer.write(EndRecord("", "", count["cases"], count["cases"] / 100))
    writer.close()
    return count


def drawn(backend: str, draw: random.Random) -> Iterator[Record]:
    """Yield cases without end, with the first divergence of each sort and the first notes."""
    told: set[tuple[str, ...]] = set()
    small = case([x("x0", 2, 2)], call("mm", "x0", "x0"))
    pool = [_kernels(draw) for _ in range(5_000)]
    words = plan_words()
    plans = ["+".join(draw.sample(words, draw.randint(1, 5))) for _ in range(2_000)]
    while True:
        kernels, luck = draw.choice(pool), draw.random()
        outcome: Outcome = "agreed" if luck < 0.76 else "raised" if luck < 0.96 else "known"
        outcome = "diverged" if luck > 0.9999 else outcome
        record = CaseRecord(
            id=f"{draw.getrandbits(64):016x}",
            backend=backend,
            family=f"family{draw.randrange(20)}",
            outcome=outcome,
            ops=tuple(draw.choices(OPS, k=draw.randint(3, 15))),
            kernels=kernels,
            seconds=_seconds(draw),
            notes=_noted(backend, draw) if draw.random() < 0.008 else (),
            plan=draw.choice(plans),
            **_excess(backend, draw),
        )
        if outcome in ("known", "diverged"):
            yield from _diverging(record, small, draw, told)
            continue
        yield record
        if record.notes and record.notes[0].group not in told:
            told.add(record.notes[0].group)
            yield NoteRecord(record.notes[0], small, record.family)


def _excess(backend: str, draw: random.Random) -> dict[str, Any]:
    """Return the largest excess of one case in three of backends with kernels of their own."""
    if backend not in ("compile[inductor]", "script") or draw.random() < 2 / 3:
        return {}
    return {"excess": round(draw.lognormvariate(-0.7, 0.6), 5), "excess_op": draw.choice(OPS)}


def _kernels(draw: random.Random) -> tuple[KernelRecord, ...]:
    count = draw.choices((0, 1, 2, 3, 4, 6), (0.2, 0.42, 0.22, 0.1, 0.04, 0.02))[0]
    names = draw.sample(OPS[:120], count)
    dtypes = [",".join(draw.choices(DTYPES, k=draw.randint(1, 3))) for _ in names]
    policies = draw.choices(POLICIES, k=count)
    return tuple(
        KernelRecord(n, p, d, draw.randint(1, 6))
        for n, p, d in zip(names, policies, dtypes, strict=True)
    )


def _seconds(draw: random.Random) -> dict[str, float]:
    parts = ("reference", "backend", "oracle", "relations")[: 3 + (draw.random() < 0.5)]
    return {part: round(draw.expovariate(200), 6) for part in parts}


def _noted(backend: str, draw: random.Random) -> tuple[Note, ...]:
    op, shape = draw.choice(OPS[:30]), [draw.randint(1, 6) for _ in range(3)]
    where = f"v{draw.randrange(9)} = torch.{op}(x0)"
    message = f"RuntimeError: no kernel for {shape}"
    return (Note("autocast-raises", backend, op, where, message, "Call it on float32."),)


def _diverging(
    record: CaseRecord, small: Case, draw: random.Random, told: set[tuple[str, ...]]
) -> Iterator[Record]:
    from msgspec.structs import replace

    known = f"bug{draw.randrange(40)}" if record.outcome == "known" else ""
    group = f"{draw.randrange(12):010x}" if not known else ""
    of = {"kind": draw.choice(KINDS), "op": draw.choice(OPS[:60]), "known": known}
    at = draw.randrange(len(record.kernels)) if record.kernels else -1
    yield replace(record, **of, at=at, groups=(group,) if group else ())
    sort = (of["kind"], known, group)
    if sort not in told:
        told.add(sort)
        case = Case(small.program, small.plan, draw.getrandbits(32))
        yield DivergenceRecord(
            record.backend, of["kind"], "v0", of["op"], "fp32", "float32", "1.0", "2.0",
            known, case, small, fingerprint=group,
        )  # fmt: skip


if __name__ == "__main__":
    main()
