"""A worker that dies, hangs or takes too much costs one case, and that is told right."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from multiprocessing.sharedctypes import RawValue
from pathlib import Path
from typing import Any

import pytest
import torch

from amp_fuzz.backends import backends
from amp_fuzz.backends.eager import EagerBackend
from amp_fuzz.backends.harness import Observation
from amp_fuzz.cases.case import Case, uses_autocast
from amp_fuzz.findings.examination import examine
from amp_fuzz.records.schema import (
    CaseRecord,
    DivergenceRecord,
    IncidentRecord,
    RunRecord,
    incident_line,
)
from amp_fuzz.records.store import Store
from amp_fuzz.runs import engine, worker, workers
from amp_fuzz.runs.corpus import FINDINGS
from amp_fuzz.runs.engine import (
    Crashed,
    Event,
    Failed,
    Finding,
    Happened,
    Progress,
    Settings,
    Task,
    TimeUp,
    draw,
    plan_tasks,
)
from amp_fuzz.runs.workers import Supervisor, _after, run
from tests import helpers
from tests.helpers import call, eager, leading, x

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs forks")

SETTINGS = Settings(("fragile-cpu",), cases=40, ops=("mm", "relu"), seed=3, minimize=5)


@dataclass(frozen=True)
class Fragile(EagerBackend):
    """Does something to some cases, before it runs them as eager does."""

    name = "fragile-cpu"
    what: Callable[[Case], None] = lambda case: None

    def run(self, cases: list[Case]) -> list[Observation]:  # type: ignore[override]
        for case in cases:
            self.what(case)
        return super().run(cases)


class Widened(Fragile):
    """Gives every bfloat16 result under autocast as float64."""

    def run(self, cases: list[Case]) -> list[Observation]:  # type: ignore[override]
        seen = super().run(cases)
        for case, observation in zip(cases, seen, strict=True):
            for label, value in observation.values.items() if uses_autocast(case) else ():
                if value is not None and value.dtype is torch.bfloat16:
                    observation.values[label] = value.double()
        return seen


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store(tmp_path / "store")
    made.begin(RunRecord("r1", 3, "dev", (), {}, ""))
    return made


@pytest.fixture
def fragile(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Case], None]], None]:
    """Return a function that installs the backend with what it does."""

    def install(what: Callable[[Case], None]) -> None:
        monkeypatch.setitem(backends(), "fragile-cpu", Fragile("cpu", what))

    return install


def drawn(settings: Settings = SETTINGS) -> list[Case]:
    """Return the cases that a run draws, in the order of its tasks."""
    tasks = plan_tasks(settings, [backends()["fragile-cpu"]])
    return [case for task in tasks for case in draw(task, settings)]


def worked(
    store: Store, settings: Settings = SETTINGS, backend: str = "fragile-cpu"
) -> list[Event]:
    """Run the tasks of a run, without those that aim at kernels."""
    supervisor = Supervisor(settings, store, "r1")
    try:
        return list(supervisor.work(plan_tasks(settings, [backends()[backend]])))
    finally:
        supervisor.close()


def kill(number: int) -> None:
    os.kill(os.getpid(), number)


def ids(store: Store) -> Counter[str]:
    return Counter(r.id for r in store.records("r1") if isinstance(r, CaseRecord))


Installer = Callable[[Callable[[Case], None]], None]


@pytest.mark.parametrize("number", leading([signal.SIGSEGV, signal.SIGABRT, signal.SIGKILL]))
def test_a_case_that_kills_two_workers_is_a_finding_and_all_others_are_kept_once(
    fragile: Installer, store: Store, number: signal.Signals
) -> None:
    fragile(lambda case: None)
    cases = drawn()
    deadly = {case.id for case in cases[3::20]}
    fragile(lambda case: kill(number) if case.id in deadly else None)
    events = worked(store)
    crashed = [e.record for e in events if isinstance(e, Crashed)]
    assert {r.case.id for r in crashed} == deadly
    assert {r.kind for r in crashed} == {"crash"}
    assert {r.observed for r in crashed} == {f"the worker died of {number.name}"}
    if number != signal.SIGKILL:
        assert all("Fatal Python error" in r.output for r in crashed)
    assert ids(store) == Counter(case.id for case in cases if case.id not in deadly)
    assert not [e for e in events if isinstance(e, (Failed, Happened))]
    for record in crashed:
        assert store.finding(record.id) == record
    assert not list(store.run_path("r1").glob("current-*"))


@pytest.mark.thorough
@pytest.mark.parametrize(("number", "running"), [(11, 1), (11, 0), (19, 1)])
def test_a_case_on_record_does_not_run_again_when_its_worker_dies_just_then(
    fragile: Installer,
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    running: int,
) -> None:
    fragile(lambda case: None)
    rested, mark = worker.Note.rested, tmp_path / "killed"

    def killed(self: worker.Note) -> None:
        if self.shared[worker.NUMBER] == number and not mark.exists():
            mark.touch()
            self.shared[worker.RUNNING] = running
            kill(signal.SIGKILL)
        rested(self)

    monkeypatch.setattr(worker.Note, "rested", killed)
    events = worked(store)
    assert mark.exists()
    assert ids(store) == Counter(case.id for case in drawn())
    assert not [e for e in events if isinstance(e, (Crashed, Failed, Happened))]


def test_a_death_that_does_not_come_again_is_an_incident_and_no_finding(
    fragile: Installer, store: Store, tmp_path: Path
) -> None:
    fragile(lambda case: None)
    cases = drawn()
    unlucky = cases[11].id

    def what(case: Case) -> None:
        mark = tmp_path / "killed"
        if case.id == unlucky and not mark.exists():
            mark.touch()
            kill(signal.SIGKILL)

    fragile(what)
    events = worked(store)
    (happened,) = [e.record for e in events if isinstance(e, Happened)]
    assert (happened.kind, happened.case.id, happened.of) == ("crash", unlucky, "")
    assert happened.detail == "the worker died of SIGKILL"
    assert not [e for e in events if isinstance(e, (Crashed, Failed))]
    assert ids(store) == Counter(case.id for case in cases)
    assert [r for r in store.records("r1") if isinstance(r, IncidentRecord)] == [happened]


@pytest.mark.thorough
def test_a_case_that_computes_too_long_is_a_timeout_by_cpu_time(
    fragile: Installer, store: Store
) -> None:
    fragile(lambda case: None)
    endless = drawn()[5].id

    def what(case: Case) -> None:
        while case.id == endless:
            pass

    fragile(what)
    events = worked(store, replace(SETTINGS, timeout=1.0))
    (crashed,) = [e.record for e in events if isinstance(e, Crashed)]
    assert (crashed.kind, crashed.case.id) == ("timeout", endless)
    assert crashed.observed.endswith(" s of CPU time")
    assert len(ids(store)) == 39


@pytest.mark.thorough
def test_a_case_that_sleeps_may_do_so_five_times_as_long(fragile: Installer, store: Store) -> None:
    fragile(lambda case: None)
    cases = drawn()
    slow, dead = cases[5].id, cases[9].id

    def what(case: Case) -> None:
        if case.id == slow:
            time.sleep(2)
        if case.id == dead:
            subprocess.run(["sleep", "600"])

    fragile(what)
    before = time.monotonic()
    events = worked(store, replace(SETTINGS, timeout=1.0))
    assert time.monotonic() - before > 2 * 5
    (crashed,) = [e.record for e in events if isinstance(e, Crashed)]
    assert (crashed.kind, crashed.case.id) == ("timeout", dead)
    assert slow in ids(store)


@pytest.mark.thorough
def test_a_case_that_takes_too_much_memory_is_ended(fragile: Installer, store: Store) -> None:
    fragile(lambda case: None)
    greedy = drawn()[5].id

    def what(case: Case) -> None:
        if case.id == greedy:
            held = [bytearray(os.urandom(1) * 2**26) for _ in range(12)]
            time.sleep(60)
            del held

    fragile(what)
    events = worked(store, replace(SETTINGS, memory=0.5))
    (crashed,) = [e.record for e in events if isinstance(e, Crashed)]
    assert (crashed.kind, crashed.case.id) == ("crash", greedy)
    assert crashed.observed == "it held more than --memory=0.5 GiB"
    assert len(ids(store)) == 39


@pytest.mark.thorough
def test_a_smaller_case_that_kills_is_an_incident_and_left_out(
    fragile: Installer, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cases that nobody drew die; those that were drawn only diverge."""
    fragile(lambda case: None)
    settings = replace(SETTINGS, cases=12)
    cases = drawn(settings)
    known = {case.id for case in cases}

    class Wrong(Widened):
        def run(self, cases: list[Case]) -> list[Observation]:  # type: ignore[override]
            for case in cases:
                if case.id not in known and int(case.id[:2], 16) % 4 == 0:
                    kill(signal.SIGSEGV)
            return super().run(cases)

    monkeypatch.setitem(backends(), "fragile-cpu", Wrong("cpu"))
    events = worked(store, settings)
    happened = [e.record for e in events if isinstance(e, Happened)]
    assert happened
    assert {r.kind for r in happened} == {"crash"}
    assert {r.of for r in happened} <= known
    assert len({r.case.id for r in happened}) == len(happened), "one was run again"
    assert [e for e in events if isinstance(e, Finding) and e.new]
    # A case of which too many processes died has its divergence on record, as it was found.
    found = {r.case.id for r in store.records("r1") if isinstance(r, DivergenceRecord)}
    assert {*ids(store), *found} == known
    assert set(ids(store).values()) == {1}


@pytest.mark.thorough
@pytest.mark.parametrize("isolate", [True, False])
def test_the_case_of_a_finding_that_stops_a_run_is_counted(
    monkeypatch: pytest.MonkeyPatch, store: Store, isolate: bool
) -> None:
    """The finding comes before its case, whose process may be ended between the two."""
    monkeypatch.setitem(backends(), "fragile-cpu", Widened("cpu"))
    events = worked(store, replace(SETTINGS, fail_fast=True, isolate=isolate, minimize=1))
    told = [e for e in events if isinstance(e, Finding) and e.new]
    counted = [e for e in events if isinstance(e, Progress) and e.outcome == "diverged"]
    assert len(counted) == 1
    assert {*counted[0].groups} == {event.record.fingerprint for event in told}


@pytest.mark.thorough
def test_changes_made_to_torch_hold_in_the_workers(store: Store) -> None:
    """A kernel that is registered here is what the workers find wrong."""
    library = torch.library.Library("aten", "IMPL")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

    def uncast(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return torch.mm(a, b)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has a kernel there
        library.impl("mm", uncast, "AutocastCPU")
    settings = Settings(("eager-cpu",), cases=10, ops=("mm",), seed=3, minimize=0)
    try:
        events = list(run(settings, store, "r1"))
    finally:
        library._destroy()
    assert [e for e in events if isinstance(e, Finding) and e.new and e.record.op == "mm"]


def test_a_worker_that_always_dies_of_drawing_is_an_error(
    monkeypatch: pytest.MonkeyPatch, store: Store
) -> None:
    monkeypatch.setattr(engine, "draw_case", lambda *args, **kwargs: kill(signal.SIGKILL))
    events = worked(store, replace(SETTINGS, backends=("eager-cpu",)), "eager-cpu")
    (failed,) = [event for event in events if isinstance(event, Failed)]
    said = failed.detail.splitlines()[0]
    assert said == "the worker died of SIGKILL between two cases, 3 times in a row"


@pytest.mark.thorough
def test_memory_of_the_parent_does_not_count_for_a_case(fragile: Installer, store: Store) -> None:
    fragile(lambda case: time.sleep(0.6))  # long enough for the supervisor to look
    held = bytearray(b"x") * 2**30
    events = worked(store, replace(SETTINGS, cases=2, memory=0.9))
    assert len(held) == 2**30
    assert len([event for event in events if isinstance(event, Progress)]) == 2
    assert not [event for event in events if isinstance(event, (Crashed, Failed, Happened))]


def test_no_worker_is_a_fork_once_a_fork_is_not_safe_any_more(
    monkeypatch: pytest.MonkeyPatch, store: Store
) -> None:
    forks = []

    def started(*args: object, fork: bool, environment: object) -> None:
        forks.append(fork)
        raise StopIteration

    monkeypatch.setattr(workers, "start", started)
    supervisor = Supervisor(replace(SETTINGS, backends=("eager-cpu",)), store, "r1")
    for why in ("", "autograd has started threads"):
        monkeypatch.setattr(workers, "unforkable", lambda why=why: why)
        with pytest.raises(StopIteration):
            supervisor._start()
    supervisor.close()
    assert forks == [True, False]


def test_a_worker_that_never_starts_is_an_error(
    fragile: Installer, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    fragile(lambda case: None)
    monkeypatch.setattr(worker, "composed", lambda: kill(signal.SIGKILL))
    events = worked(store)
    (failed,) = [e for e in events if isinstance(e, Failed)]
    assert "the worker died of SIGKILL before it ran a case, 3 times in a row" in failed.detail


@pytest.mark.slow
def test_a_run_of_many_deaths_comes_to_its_end(fragile: Installer, store: Store) -> None:
    settings = replace(SETTINGS, cases=200)
    fragile(lambda case: None)
    cases = drawn(settings)
    deadly = {case.id for case in cases[::20]}
    fragile(lambda case: kill(signal.SIGSEGV) if case.id in deadly else None)
    events = worked(store, settings)
    assert {e.record.case.id for e in events if isinstance(e, Crashed)} == deadly
    assert ids(store) == Counter(case.id for case in cases if case.id not in deadly)
    assert sum(isinstance(e, Progress) for e in events) == len(cases) - len(deadly)


def test_without_isolation_cases_run_in_this_process(fragile: Installer, store: Store) -> None:
    ran: list[int] = []
    fragile(lambda case: ran.append(os.getpid()))
    worked(store, replace(SETTINGS, isolate=False))
    assert set(ran) == {os.getpid()}
    assert len(ids(store)) == 40
    assert not list(store.run_path("r1").glob("current-*"))


def test_a_worker_leaves_torch_as_it_was() -> None:
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("error")
            with worker.composed():
                assert torch.get_num_threads() == 1
                assert torch.get_default_dtype() is torch.float32
                assert torch.is_grad_enabled()
                torch.manual_seed(5)
                warnings.warn("an op's own", stacklevel=1)
            assert not torch.is_grad_enabled()
        assert torch.get_default_dtype() is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


def test_a_task_that_aims_goes_on_after_a_death_with_the_kernels_that_are_left() -> None:
    aims = (("mm", 1), ("bmm", 0), ("linear", 0))
    task = Task("eager-cpu", "coverage", (), 12, 5, aims=aims, part=4)
    died = helpers.case([x("x0", 3, 3)], call("mm", "x0", "x0"))
    left = _after(task, 2, died, {"linear"})
    assert (left.first, left.count, left.aims, left.part) == (3, 9, (("bmm", 0),), 4)
    assert left.seed != task.seed  # what was drawn before does not come again


def test_a_case_that_was_aimed_and_kills_runs_once_more_and_is_a_finding(
    fragile: Installer, store: Store
) -> None:
    fragile(lambda case: None)
    settings = replace(SETTINGS, cases=40, aimed=20)
    tasks = [t for t in plan_tasks(settings, [eager()]) if t.aims]
    (first, *_) = draw(replace(tasks[0], backend="fragile-cpu"), settings)
    fragile(lambda case: kill(signal.SIGKILL) if case.id == first.id else None)
    supervisor = Supervisor(settings, store, "r1")
    try:
        events = list(supervisor.work([replace(tasks[0], backend="fragile-cpu")]))
    finally:
        supervisor.close()
    assert [e.record.case.id for e in events if isinstance(e, Crashed)] == [first.id]
    assert ids(store).total() == tasks[0].cases - 1
    assert max(ids(store).values()) == 1


@pytest.mark.thorough
def test_a_worker_that_is_no_fork_says_why(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "unforkable", lambda: "JAX is imported")
    settings = Settings(("eager-cpu",), cases=2, ops=("mm",), seed=3, minimize=0)
    supervisor = Supervisor(settings, store, "r1")
    try:
        list(supervisor.work(plan_tasks(settings, [backends()["eager-cpu"]])))
    finally:
        supervisor.close()
    assert supervisor.apart == "JAX is imported"
    assert len(ids(store)) == 2


# -- in which op ----------------------------------------------------------------------------------

# On torch 2.7, no mode looks into an einsum under inference_mode (`findings.entered.inside`).
CALLING = ("einsum",) if hasattr(torch.library, "get_kernel") else ()
KILLING = Settings(("eager-cpu",), cases=30, ops=("bmm", "exp", *CALLING), seed=3, minimize=0)


@pytest.fixture
def deadly_kernels() -> Iterator[Callable[[dict[str, int]], None]]:
    """Return a function that has kernels on the CPU raise signals; they are mended at the end."""
    library = torch.library.Library("aten", "IMPL")

    def install(kernels: dict[str, int]) -> None:
        for name, number in kernels.items():

            def dies(*args: object, number: int = number) -> None:
                signal.raise_signal(number)

            library.impl(name, dies, "CPU")

    yield install
    library._destroy()


Deadly = Callable[[dict[str, int]], None]


def died_in(store: Store) -> dict[str, list[str]]:
    """Return by op the fingerprints of the cases that a run died of."""
    found: dict[str, list[str]] = {}
    for record in store.records("r1"):
        if isinstance(record, DivergenceRecord) and record.kind in ("crash", "timeout"):
            found.setdefault(record.op, []).append(record.fingerprint)
    return found


@pytest.mark.thorough
def test_cases_that_die_in_one_kernel_are_one_cause(deadly_kernels: Deadly, store: Store) -> None:
    deadly_kernels({"bmm": signal.SIGKILL})
    events = worked(store, KILLING, "eager-cpu")
    died = died_in(store)
    assert set(died) == {"bmm"}
    assert len(died["bmm"]) >= 5
    assert len(set(died["bmm"])) == 1
    crashed = [e for e in events if isinstance(e, Crashed)]
    assert len(crashed) == len(died["bmm"])
    assert [e.first for e in crashed] == [True] + [False] * (len(crashed) - 1)
    # The store keeps the first and smaller ones, the smallest of all among them.
    sizes = {e.record.id: len(e.record.case.json()) for e in crashed}
    assert min(sizes, key=lambda name: sizes[name]) in store.findings()
    assert len(store.findings()) < len(crashed)
    assert ids(store).total() + len(crashed) == KILLING.cases


@pytest.mark.thorough
def test_cases_that_take_too_much_memory_in_one_kernel_are_one_cause(store: Store) -> None:
    library = torch.library.Library("aten", "IMPL")

    def takes(*args: object) -> None:
        held = [bytearray(os.urandom(1) * 2**26) for _ in range(12)]
        time.sleep(60)
        del held

    library.impl("exp", takes, "CPU")
    try:
        worked(store, replace(KILLING, cases=2, ops=("exp",), memory=0.5), "eager-cpu")
    finally:
        library._destroy()
    died = died_in(store)
    assert set(died) == {"exp"}
    assert len(set(died["exp"])) == 1 < len(died["exp"])


@pytest.mark.thorough
def test_cases_that_die_in_two_kernels_are_two_causes(deadly_kernels: Deadly, store: Store) -> None:
    deadly_kernels({"bmm": signal.SIGSEGV, "exp": signal.SIGSEGV})
    worked(store, KILLING, "eager-cpu")
    died = died_in(store)
    assert set(died) == {"bmm", "exp"}
    assert {len(set(causes)) for causes in died.values()} == {1}
    assert died["bmm"][0] != died["exp"][0]


@pytest.mark.thorough
def test_a_death_in_no_kernel_names_no_op(fragile: Installer, store: Store) -> None:
    fragile(lambda case: None)
    deadly = drawn()[3].id
    fragile(lambda case: kill(signal.SIGABRT) if case.id == deadly else None)
    worked(store)
    assert set(died_in(store)) == {""}


def test_a_case_that_hangs_names_its_statement(store: Store) -> None:
    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("exp", lambda x: [None for _ in iter(int, 1)], "CPU")
        hangs = helpers.case([x("x0", 2)], call("abs", "x0"), call("exp", "v0", to="v1"))
        supervisor = Supervisor(replace(KILLING, timeout=1.0), store, "r1")
        list(supervisor.work([Task("eager-cpu", "all", (), 1, 0, (hangs,))]))
        supervisor.close()
    finally:
        library._destroy()
    (record,) = [r for r in store.records("r1") if isinstance(r, DivergenceRecord)]
    assert (record.kind, record.op) == ("timeout", "exp")


class Slow(Fragile):
    """Takes its time."""

    name = "slow-cpu"


@pytest.fixture
def slow(fragile: Installer, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Return settings of a run on two backends, one of which is slow."""
    fragile(lambda case: None)
    monkeypatch.setitem(backends(), "slow-cpu", Slow("cpu", lambda case: time.sleep(0.1)))
    return replace(SETTINGS, backends=("slow-cpu", "fragile-cpu"), relations="none")


def test_a_later_task_is_of_the_backend_that_had_the_least_time(
    slow: Settings, store: Store
) -> None:
    tasks = plan_tasks(slow, [backends()[name] for name in slow.backends])
    supervisor = Supervisor(slow, store, "r1")
    supervisor.queue = list(reversed(engine.in_rounds(tasks)))
    supervisor.spent.update({"slow-cpu": 9.0, "fragile-cpu": 1.0})
    later = [supervisor._next() for _ in range(3)]
    assert [(task.backend, task.family, task.first) for task in later] == [
        ("fragile-cpu", task.family, first)
        for first in (0, 8)
        for task in tasks
        if task.backend == "fragile-cpu"
    ][:3]
    supervisor.spent["fragile-cpu"] = 10.0
    assert supervisor._next().backend == "slow-cpu"
    running = supervisor._start()  # what it has had so far counts, too
    running.task, running.given = later[0], time.monotonic()
    supervisor.workers.append(running)
    supervisor.spent["fragile-cpu"] = 8.0
    assert supervisor._next().backend == "fragile-cpu"
    running.given -= 5.0
    assert supervisor._next().backend == "slow-cpu"
    running.task = None
    supervisor.close()


@pytest.mark.thorough
@pytest.mark.parametrize("isolate", [True, False])
def test_the_time_of_each_backend_is_kept(
    slow: Settings, store: Store, monkeypatch: pytest.MonkeyPatch, isolate: bool
) -> None:
    sleepy = Slow("cpu", lambda case: time.sleep(0.5))
    monkeypatch.setitem(backends(), "slow-cpu", sleepy)
    settings = replace(slow, cases=6, isolate=isolate)
    supervisor, before = Supervisor(settings, store, "r1"), time.monotonic()
    for _ in supervisor.work(plan_tasks(settings, [backends()[name] for name in slow.backends])):
        pass
    took = time.monotonic() - before
    supervisor.close()
    assert supervisor.spent["slow-cpu"] >= 6 * 0.5
    assert 0 < supervisor.spent["fragile-cpu"] <= took - supervisor.spent["slow-cpu"]


# -- the deadline ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Clock:
    """A clock that all processes of a run share, and that a case may set."""

    now: Any = field(default_factory=lambda: RawValue("d", 1000.0))

    def __call__(self) -> float:
        return float(self.now.value)


def late(clock: Clock, settings: Settings = SETTINGS) -> Settings:
    """Return the settings of a run that ends at 1100."""
    return replace(settings, seconds=100.0, clock=clock)


@pytest.mark.thorough
@pytest.mark.parametrize("aimed", [0, 20])
def test_a_case_that_runs_at_the_deadline_is_ended(
    fragile: Installer, store: Store, aimed: int
) -> None:
    clock = Clock()

    def what(case: Case) -> None:
        clock.now.value += 400
        time.sleep(10_000)

    fragile(what)
    events = list(run(late(clock, replace(SETTINGS, aimed=aimed)), store, "r1"))
    assert events[-1] == TimeUp()
    assert not any(isinstance(event, Progress) for event in events)


@pytest.mark.thorough
def test_the_first_case_of_a_backend_may_end_after_the_deadline(
    fragile: Installer, store: Store
) -> None:
    clock, count = Clock(), RawValue("i", 0)

    def what(case: Case) -> None:
        count.value += 1
        clock.now.value = 1150.0
        time.sleep(1)  # the supervisor looks at it several times

    fragile(what)
    events = list(run(late(clock, replace(SETTINGS, relations="none")), store, "r1"))
    assert sum(isinstance(event, Progress) for event in events) == 1
    assert events[-1] == TimeUp()


def test_only_the_first_case_of_a_backend_may_end_after_the_deadline(
    fragile: Installer, store: Store
) -> None:
    clock, seen = Clock(), RawValue("i", 0)

    def what(case: Case) -> None:
        seen.value += 1
        if seen.value > 1:
            clock.now.value = 1150.0
            time.sleep(10_000)

    fragile(what)
    events = list(run(late(clock, replace(SETTINGS, relations="none")), store, "r1"))
    assert sum(isinstance(event, Progress) for event in events) == 1
    assert events[-1] == TimeUp()


@pytest.mark.thorough
def test_what_is_imported_before_the_first_case_takes_no_time_of_the_run(
    fragile: Installer, monkeypatch: pytest.MonkeyPatch, store: Store
) -> None:
    clock = Clock()

    def imported(name: str) -> None:
        clock.now.value += 500

    fragile(lambda case: None)
    monkeypatch.setattr(workers.importlib, "import_module", imported)
    events = list(run(late(clock), store, "r1"))
    assert any(isinstance(event, Progress) for event in events)
    assert TimeUp() not in events


def test_a_death_before_the_deadline_is_no_case_after_it(fragile: Installer, store: Store) -> None:
    clock = Clock()

    def what(case: Case) -> None:
        clock.now.value = 1099.0
        kill(signal.SIGKILL)

    fragile(what)
    events = list(run(late(clock), store, "r1"))
    (event,) = [event for event in events if isinstance(event, Happened)]
    assert event.record.unconfirmed
    assert incident_line(event.record).endswith(
        "the time was up before it could run again, so it was not judged"
    )
    assert not any(isinstance(event, Crashed) for event in events)


def test_a_finding_that_is_minimised_at_the_deadline_is_kept_as_it_is(
    monkeypatch: pytest.MonkeyPatch, store: Store
) -> None:
    clock, found = Clock(), RawValue("i", 0)

    def what(case: Case) -> None:
        if found.value:  # the case diverged, and is examined
            clock.now.value = 2000.0
            time.sleep(10_000)

    def noting(*args: Any, **about: Any) -> Iterator[Any]:
        steps = examine(*args, **about)
        yield next(steps)
        found.value = 1
        yield from steps

    monkeypatch.setattr(engine, "examine", noting)
    monkeypatch.setitem(backends(), "fragile-cpu", Widened("cpu", what))
    events = list(run(late(clock, replace(SETTINGS, cases=400)), store, "r1"))
    (finding,) = [event for event in events if isinstance(event, Finding)]
    assert finding.new
    assert finding.record.minimised is None
    assert events[-1] == TimeUp()
    assert store.findings() == [finding.record.id]


def test_earlier_findings_take_at_most_half_of_the_time(fragile: Installer, store: Store) -> None:
    clock = Clock()

    def what(case: Case) -> None:
        clock.now.value += 9  # seconds of a case

    fragile(what)
    kept = tuple(("fragile-cpu", FINDINGS, case) for case in drawn())
    settings = late(clock, replace(SETTINGS, kept=kept, relations="none"))
    events = list(run(settings, store, "r1"))
    families = Counter(event.family for event in events if isinstance(event, Progress))
    assert 0 < families[FINDINGS] <= 6
    assert families.total() - families[FINDINGS] >= 4
    assert clock() <= 1100 + 9


@pytest.mark.thorough
@pytest.mark.parametrize("isolate", [True, False])
def test_each_backend_aims_at_its_kernels_in_turn_before_anything_else_is_drawn(
    fragile: Installer, monkeypatch: pytest.MonkeyPatch, store: Store, isolate: bool
) -> None:
    fragile(lambda case: None)
    monkeypatch.setitem(backends(), "slow-cpu", Slow("cpu"))
    names = ("slow-cpu", "fragile-cpu")
    settings = Settings(
        names, cases=24, aimed=84, seed=3, seconds=900.0, isolate=isolate, relations="none"
    )
    events = [e for e in run(settings, store, "r1") if isinstance(e, Progress)]
    aimed = [e.backend for e in events[:40]]
    assert [e.family for e in events[:40]] == ["coverage"] * 40
    assert aimed == [name for size in (8, 8, 4) for name in names for _ in range(size)]
    assert "coverage" not in [e.family for e in events[40:]]
