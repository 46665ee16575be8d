"""Kill everything that a sweep is made of, and count its cases.

    python benchmarks/sweep.py [--shards=10] [--cases=500] [--output=FILE]

A Ray cluster of a head and two nodes of one CPU, all on this machine, runs a sweep on eager-cpu.
Of 300 cases, 17 meet a fault of their own (`tests/deadly.py`): they kill their worker, loop without
end, or take too much memory. While the sweep runs, the process of a shard is killed, a worker of
Ray's, a node (another one joins), and the command itself, which is then given again. Each case that
the seeds draw must be on record exactly once, and each deadly one must be named with what it did.
Writes ``benchmarks/sweep.json``, and exits with 1 if anything is lost.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# Before Ray is imported: the nodes listen on the loopback interface only, and nothing is reported.
os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}

from ray.cluster_utils import Cluster

from amp_fuzz.records.schema import DivergenceRecord, EndRecord, IncidentRecord
from amp_fuzz.records.store import Store
from amp_fuzz.runs.sweep.following import Follower
from benchmarks.common import ROOT, Row, arguments, machine, versions, write
from tests import deadly
from tests.deadly import fault_of, judged

JSON = Path(__file__).with_suffix(".json")
SIGNALS = ("SIGKILL", "SIGSEGV", "SIGABRT")
FAULTS = " ".join(["300", *SIGNALS * 4, *["once"] * 3, "loop", "memory"])
OPS = ("abs", "mm", "add", "exp")
SWEEP = """
seeds = [{seeds}]
[options]
cases = {cases}
ops = ["{ops}"]
aimed = 0
seconds = 3000
minimize = 0
relations = "none"
timeout = 3
memory = 1.5
plugins = ["deadly"]
[[matrix]]
backends = ["eager-cpu"]
"""
CLI = "import sys; from amp_fuzz.interfaces.cli import main; sys.exit(main())"
MEMORY = 80 * 2**20


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--shards", type=int, default=10)
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--output", type=Path, default=JSON)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measured(Path(folder), args.shards, args.cases, 60 * args.minutes)
    print(result, flush=True)
    write(args.output, result)
    sys.exit(bool(result["wrong"]))


def measured(folder: Path, shards: int, cases: int, seconds: float) -> Row:
    """Run the sweep in a folder, with everything that happens to it; return the result."""
    shutil.copy(deadly.__file__, folder)
    (folder / "faults.txt").write_text(FAULTS)
    seeds = ", ".join(map(str, range(1, shards + 1)))
    text = SWEEP.format(seeds=seeds, cases=cases, ops='", "'.join(OPS))
    (folder / "sweep.toml").write_text(text)
    shared: dict[str, Any] = {"object_store_memory": MEMORY, "include_dashboard": False}
    cluster = Cluster(True, head_node_args={"num_cpus": 0, **shared})
    start = time.monotonic()
    try:
        nodes = [cluster.add_node(num_cpus=1, **shared) for _ in range(2)]

        def remove() -> None:
            cluster.remove_node(nodes.pop(), allow_graceful=False)
            cluster.add_node(num_cpus=1, **shared)

        driver = Driver(folder, cluster.address, shards * cases, start + seconds)
        told = driver.through(
            [(0.1, kill_run), (0.25, kill_worker), (0.4, lambda _: remove()), (0.6, Driver.kill)]
        )
    finally:
        cluster.shutdown()
    result = found(folder / ".amp-fuzz", shards, cases, driver.code)
    return {
        "cases": shards * cases,
        "shards": shards,
        "faults": FAULTS,
        **result,
        "killed while it ran": told,
        "exit code": driver.code,
        "seconds": round(time.monotonic() - start),
        "load of the machine at the end": round(os.getloadavg()[0], 1),
        "versions": versions("ray", "torch", "amp-fuzz"),
        "machine": machine(f"{os.cpu_count()} cores"),
    }


class Driver:
    """The command, and what happens to it after a share of the cases."""

    def __init__(self, folder: Path, address: str, cases: int, until: float) -> None:
        self.folder, self.address, self.cases, self.until = folder, address, cases, until
        self.followers: dict[str, Follower] = {}
        self.done = 0
        self.code = -1
        self.log = folder / "driver.log"
        self.process = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        words = ["sweep", "sweep.toml", f"--address={self.address}"]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-c", CLI, *words],
                cwd=self.folder,
                env={**os.environ, "PYTHONPATH": path},
                stdout=log,
                stderr=log,
            )

    def through(self, what: list[tuple[float, Callable[[Driver], None]]]) -> list[str]:
        """Wait for the end; return what happened at how many cases."""
        told = []
        for share, strike in what:
            while self.count() < share * self.cases and self.process.poll() is None:
                self.pause()
            if self.process.poll() is None:
                name = getattr(strike, "__name__", "").replace("<lambda>", "remove_node")
                print(f"{name} at {self.done} cases", flush=True)
                strike(self)
                told.append(f"{name} at {self.done} cases")
        while self.process.poll() is None:
            self.pause()
        self.code = self.process.returncode
        print(self.log.read_text()[-3000:], flush=True)
        return told

    def pause(self) -> None:
        if time.monotonic() > self.until:
            self.process.kill()
            raise SystemExit(f"not done in time:\n{self.log.read_text()[-3000:]}")
        time.sleep(0.2)

    def count(self) -> int:
        """Return how many cases are on record."""
        store = Store(self.folder / ".amp-fuzz")
        for run in store.runs():
            follower = self.followers.setdefault(run, Follower(store, run))
            self.done += sum(
                not isinstance(r, IncidentRecord)
                and (not isinstance(r, DivergenceRecord) or r.kind in ("crash", "timeout"))
                for r in follower.new()
            )
        return self.done

    def runs(self) -> Iterator[int]:
        """Yield the processes of shards."""
        for path in Path("/proc").glob("[0-9]*"):
            try:
                text = (path / "cmdline").read_bytes()
                state = (path / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            forks = Path(f"/proc/{state[1]}/cmdline")
            ours = b"--shard=" in text and os.fsencode(self.folder) in text
            if ours and b"--shard=" not in (forks.read_bytes() if forks.exists() else b""):
                yield int(path.name)

    def kill(self) -> None:
        """Kill the command, and give it again."""
        self.process.kill()
        self.process.wait()
        self.process = self.start()


def kill_run(driver: Driver) -> None:
    """Kill the process of a shard."""
    os.kill(next(driver.runs()), signal.SIGKILL)


def kill_worker(driver: Driver) -> None:
    """Kill the worker of Ray's that waits for a shard."""
    state = Path(f"/proc/{next(driver.runs())}/stat").read_text().rpartition(")")[2].split()
    os.kill(int(state[1]), signal.SIGKILL)


def found(root: Path, shards: int, cases: int, code: int) -> Row:
    """Compare the store with what the seeds draw, and with what the faults must have done."""
    store, wrong, faults = Store(root), [], Counter[str]()
    incidents, resumed = 0, 0
    if len(store.runs()) != shards:
        wrong.append(f"{len(store.runs())} runs")
    for run in store.runs():
        ids, died = judged(root, run)
        drawn = Counter(drawn_ids(store.run(run).seed, cases))
        lost, more = drawn - ids, ids - drawn
        if lost or more:
            wrong.append(f"{run}: lost {sorted(lost)[:5]}, more than once {sorted(more)[:5]}")
        for case in drawn:
            fault = fault_of(case, FAULTS)
            faults[fault] += bool(fault)
            if (case in died) != (fault not in ("", "once")):
                wrong.append(f"{run}: {case} meets {fault!r}, on record: {died.get(case)!r}")
            elif case in died and WORDS.get(fault, f"the worker died of {fault}") not in died[case]:
                wrong.append(f"{run}: {case} meets {fault!r}, on record: {died[case]!r}")
        told = list(store.records(run))
        incidents += sum(isinstance(record, IncidentRecord) for record in told)
        resumed += sum(isinstance(r, EndRecord) and r.reason == "resumed" for r in told)
    if code != 1:
        wrong.append(f"exit code {code}")
    return {
        "cases with a fault": faults.total(),
        "of these": dict(faults - Counter()),
        "incidents": incidents,
        "shards that started again": resumed,
        "wrong": wrong,
    }


WORDS = {"loop": "no answer after", "memory": "it held more than --memory=1.5 GiB"}


def drawn_ids(seed: int, cases: int, ops: tuple[str, ...] = OPS) -> Iterator[str]:
    """Yield the ids of the cases that a seed draws."""
    from amp_fuzz.backends import backends
    from amp_fuzz.catalogue import select
    from amp_fuzz.runs.engine import Settings, draw, plan_tasks

    names = tuple(op.name for op in select(ops))
    settings = Settings(("eager-cpu",), cases=cases, ops=names, seed=seed)
    for task in plan_tasks(settings, [backends()["eager-cpu"]]):
        yield from (case.id for case in draw(task, settings))


if __name__ == "__main__":
    main()
