"""Seed ten faults at once, run the engine, and count what it makes of them.

    python benchmarks/groups.py [--cases=N] [--seed=N] [--store=FOLDER]

The faults are those of tests/faults/many.py: policies, contexts, state, numbers. Each case that the
engine draws for eager is judged in a torch that has all ten; transforms and custom ops are left
out, since the Python kernels that faults are made of are no part of them. Ctrl-C ends a run early,
and what was judged by then is counted; with a store of its own the next call goes on from there. A
group belongs to the faults without which its case agrees: of those its case is judged with one
fault at a time. Exactly one group a fault is wanted. Writes ``benchmarks/groups.json``. Seconds are
CPU seconds.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from amp_fuzz.backends import backends
from amp_fuzz.backends.harness import quiet
from amp_fuzz.cases.case import Case
from amp_fuzz.records.fingerprint import fingerprint, title
from amp_fuzz.records.schema import CaseRecord, DivergenceRecord, RunRecord
from amp_fuzz.records.store import Store
from amp_fuzz.runs.engine import (
    Crashed,
    Failed,
    Finding,
    Finished,
    Settings,
    Task,
    draw,
    plan_tasks,
)
from amp_fuzz.runs.setup import versions
from amp_fuzz.runs.workers import Supervisor
from amp_fuzz.upstream import shipped
from amp_fuzz.upstream.explain import judge_of
from benchmarks.common import ROOT, Row, arguments, commit, cpu_seconds, write
from tests.faults.corrupted import Corrupted
from tests.faults.many import TEN, counts, install, seeded

JSON = ROOT / "benchmarks" / "groups.json"
_UNANSWERED = ("crash", "timeout")


def main() -> int:
    """Run, print the groups, and return 1 if they are not one a fault."""
    parser = arguments(__doc__)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--store", type=Path, help="keep what was judged there, and go on from it")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory(prefix="amp-fuzz-") as folder:
        plugins = Path(folder) / "plugins"
        install(plugins)
        sys.path.insert(0, str(plugins))
        backends.cache_clear()
        store = Store(options.store or Path(folder) / "store")
        result = measured(store, options.cases, options.seed, options.workers)
    write(JSON, result)
    for group in result["groups"]:
        print(f"{group['cases']:6} {group['title']}: {', '.join(group['faults']) or '?'}")
    print(f"{len(result['groups'])} groups of {len(TEN)} faults; {result['seconds']} s")
    for name in ("merged", "split", "missed", "unanswered"):
        print(f"{name}: {result[name] or 'none'}")
    return int(any(result[name] for name in ("merged", "split", "missed")))


def cases(seed: int) -> Iterator[Case]:
    """Yield the cases of ordinary runs on eager, but for those that faults have no part in."""
    eager = backends()["eager-cpu"]
    for part in range(10_000):
        settings = Settings(("eager-cpu",), cases=400, seed=seed * 10_000 + part)
        for task in plan_tasks(settings, [eager]):
            yield from filter(counts, draw(task, settings))


def measured(store: Store, number: int, seed: int, workers: int) -> Row:
    """Run the engine on so many cases, and say what came of each fault."""
    settings = Settings(
        ("faulty-cpu",),
        cases=number,
        seed=seed,
        known=shipped(),
        workers=workers,
        relations="none",
        timeout=1800,  # of the clock on the wall: of a machine that does much else, too
    )
    part = f"groups-{len(store.runs()):03}"
    before = _judged(store)
    store.begin(RunRecord(part, seed, "", (), {}, ""))
    drawn = []
    for case in islice(cases(seed), number):
        before[case.id] -= 1
        drawn += [case] if before[case.id] < 0 else []
    parts = [tuple(drawn[i : i + 500]) for i in range(0, len(drawn), 500)]
    tasks = [Task("faulty-cpu", "all", (), len(given), seed, given) for given in parts]
    supervisor = Supervisor(settings, store, part)
    causes, sessions = store.root / "groups.pickle", store.root / "sessions.json"
    if causes.exists():
        supervisor.groups.update(pickle.loads(causes.read_bytes()))
    for record in _final(store):  # of a part that was stopped, some came later
        if record.kind not in _UNANSWERED and record.fingerprint not in supervisor.groups.known:
            supervisor.groups.take(record)
    crashes = 0
    try:
        for event in supervisor.work(tasks):
            if isinstance(event, Failed):
                raise SystemExit(event.detail)
            if isinstance(event, Finished):  # that is when a worker tells of the causes it met
                causes.write_bytes(pickle.dumps(supervisor.groups))
            crashes += isinstance(event, Crashed)
            if isinstance(event, Finding) and event.new:
                print(f"{title(event.record)} | {fingerprint(event.record)}", flush=True)
    except KeyboardInterrupt:
        print("stopped: what was judged is counted", flush=True)
    finally:
        supervisor.close()
    spent: list[Row] = json.loads(sessions.read_text()) if sessions.exists() else []
    spent.append({"commit": commit(), "crashes": crashes, "seconds": round(cpu_seconds())})
    sessions.write_text(json.dumps(spent))
    about = {"seed": seed, "asked": number, "versions": versions(), "sessions": spent}
    about["crashes"] = sum(s["crashes"] for s in spent)
    about["seconds"] = sum(s["seconds"] for s in spent)
    return about | counted(store, supervisor)


def _final(store: Store) -> Iterator[DivergenceRecord]:
    """Yield the records of causes, but for what a stop left half minimised."""
    for run in store.runs():
        records = list(store.records(run))
        judged = {r.id for r in records if isinstance(r, CaseRecord)}
        for r in records:
            if isinstance(r, DivergenceRecord) and not r.known and r.case.id in judged:
                yield r


def _judged(store: Store) -> Counter[str]:
    """Return how often a case was judged, or gave no answer, by its id."""
    found: Counter[str] = Counter()
    for record in (r for run in store.runs() for r in store.records(run)):
        if isinstance(record, CaseRecord):
            found[record.id] += 1
        elif isinstance(record, DivergenceRecord) and record.kind in _UNANSWERED:
            found[record.case.id] += 1
    return found


def counted(store: Store, supervisor: Supervisor) -> Row:
    """Return the groups with their cases and faults."""
    records = [record for run in store.runs() for record in store.records(run)]
    judged = [r for r in records if isinstance(r, CaseRecord)]
    lost = [r for r in records if isinstance(r, DivergenceRecord) and r.kind in _UNANSWERED]
    found: dict[str, DivergenceRecord] = {}
    for record in _final(store):
        if record.kind not in _UNANSWERED:  # no fault is one
            found.setdefault(record.fingerprint, record)
    groups: list[Row] = [
        {
            "title": title(record),
            "fingerprint": str(fingerprint(record)),
            "cases": sum(record.fingerprint in r.groups for r in judged),
            "faults": faults_of(record),
            "program": str(record.minimised or record.case).splitlines()[1:],
        }
        for record in found.values()
    ]
    groups.sort(key=lambda g: (-g["cases"], g["title"]))
    names = [name for g in groups for name in g["faults"]]
    return {
        "cases": len(judged),
        "diverged": sum(r.outcome == "diverged" for r in judged),
        "minimised": sum(supervisor.groups.minimised.values()),
        "looks": len(supervisor.groups.looks),
        "merged": [g["title"] for g in groups if len(g["faults"]) != 1],
        "unanswered": {r.case.id: r.observed for r in lost},
        "split": sorted({name for name in names if names.count(name) > 1}),
        "missed": [name for name in TEN if name not in names],
        "groups": groups,
    }


def faults_of(record: DivergenceRecord) -> list[str]:
    """Return the faults that show a group's case when each is the only one."""
    case = record.minimised or record.case
    found = []
    for name in TEN:
        judge = judge_of(Corrupted(patches=partial(seeded, name)), shipped(), "none")
        with quiet():
            if judge.judge(case).outcome == "diverged":
                found.append(name)
    return found


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    raise SystemExit(main())
