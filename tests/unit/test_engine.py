"""The engine: what it runs depends on the seed alone, and no case takes the run down with it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import msgspec
import pytest

from amp_fuzz.backends import Backend, backends
from amp_fuzz.backends.dispatcher import kernels
from amp_fuzz.backends.harness import quiet
from amp_fuzz.cases.case import Case, bare
from amp_fuzz.cases.program import statements
from amp_fuzz.catalogue import CATALOGUE, Op
from amp_fuzz.findings.examination import Met
from amp_fuzz.findings.groups import Groups
from amp_fuzz.findings.minimize.target import Target, asker, shrink
from amp_fuzz.records.schema import CaseRecord, RunRecord
from amp_fuzz.records.store import Store
from amp_fuzz.runs import engine
from amp_fuzz.runs.engine import (
    Event,
    Finding,
    Paused,
    Planned,
    Progress,
    Settings,
    Task,
    TimeUp,
    draw,
    explore,
    in_rounds,
    plan_tasks,
    seed_of,
)
from amp_fuzz.runs.workers import run
from amp_fuzz.strategies.drawing import draw_case, usable
from amp_fuzz.upstream.explain import judge_of
from tests.helpers import WrongKernel, call, case, eager, x

OPS = ("mm", "relu", "add", "softmax", "exp")
SETTINGS = Settings(backends=("eager-cpu",), cases=20, ops=OPS, seed=3, max_statements=4)
TASK = Task("eager-cpu", "matmul", ("mm",), 20, 11)


def cases_of(events: list[Event | CaseRecord]) -> list[CaseRecord]:
    return [e for e in events if isinstance(e, CaseRecord)]


def untimed(record: CaseRecord) -> tuple[object, ...]:
    return (record.id, record.outcome, record.ops, record.kernels, record.kind, record.op)


# -- tasks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("aimed", [0, 20, 100])
@pytest.mark.parametrize("cases", [1, 7, 100, 2001])
def test_tasks_add_up_to_the_cases_of_each_backend(cases: int, aimed: int) -> None:
    chosen = [backends()[n] for n in ("eager-cpu", "fake-cuda", "fake-mps")]
    tasks = plan_tasks(replace(SETTINGS, ops=(), cases=cases, aimed=aimed), chosen)
    for backend in chosen:
        aiming = [t.cases for t in tasks if t.aims and t.backend == backend.name]
        assert sum(aiming) <= cases * aimed // 100
    total: Counter[str] = Counter()
    for task in tasks:
        total[task.backend] += task.cases
    assert total == {b.name: cases for b in chosen}
    assert all(task.cases > 0 for task in tasks)


def test_each_family_gets_its_share() -> None:
    tasks = plan_tasks(replace(SETTINGS, ops=(), cases=5000), [eager()])
    drawn = usable(CATALOGUE.values(), "cpu")
    pool = [op for op in drawn if eager().supports(op.name, "function")]
    sizes = Counter(op.family for op in pool)
    assert {t.family for t in tasks} == set(sizes)
    for task in tasks:
        assert abs(task.cases - 5000 * sizes[task.family] / len(pool)) <= 1
        assert all(CATALOGUE[name].family == task.family for name in task.focus)


def test_backends_take_turns() -> None:
    chosen = [backends()[n] for n in ("eager-cpu", "fake-cuda")]
    tasks = plan_tasks(replace(SETTINGS, ops=(), cases=500), chosen)
    assert {t.backend for t in tasks[:2]} == {"eager-cpu", "fake-cuda"}


def test_rounds_draw_the_same_cases_each_family_a_few_at_a_time() -> None:
    settings = replace(SETTINGS, ops=("mm", "bmm", "relu", "exp"), cases=60, aimed=20)
    whole = plan_tasks(settings, [eager()])
    parts = in_rounds(whole)

    def numbers(tasks: list[Task]) -> list[tuple[str, int]]:
        return sorted((t.family, n) for t in tasks for n in range(t.first, t.cases))

    assert numbers(parts) == numbers(whole)
    assert [t.family for t in parts[: len(whole)]] == [t.family for t in whole]
    assert [bool(t.aims) for t in parts] == [True] + [False] * (len(parts) - 1)
    (task,) = [t for t in whole if t.family == "matmul"]
    split = [t for t in parts if t.family == "matmul"]
    assert len(split) > 1
    drawn = [case.id for t in split for case in engine.draw(t, settings)]
    assert drawn == [case.id for case in engine.draw(task, settings)]


def test_a_task_that_aims_draws_the_same_cases_whether_or_not_it_gives_way() -> None:
    settings = replace(SETTINGS, ops=("mm", "bmm", "relu"))
    task = Task("eager-cpu", "coverage", (), 12, 5, aims=(("mm", 0), ("bmm", 0)))
    whole = [r.id for r in cases_of(list(explore(task, settings)))]
    drawn: list[str] = []
    left: Task | None = replace(task, part=1)
    while left is not None:
        events = list(explore(left, settings))
        assert len(cases_of(events)) == left.due
        drawn += [r.id for r in cases_of(events)]
        left = next((e.task for e in events if isinstance(e, Paused)), None)
    assert drawn == whole


def test_tasks_have_seeds_of_their_own() -> None:
    tasks = plan_tasks(replace(SETTINGS, ops=()), [eager()])
    assert len({t.seed for t in tasks}) == len(tasks)
    other = plan_tasks(replace(SETTINGS, ops=(), seed=4), [eager()])
    assert not {t.seed for t in tasks} & {t.seed for t in other}


def test_seeds_are_the_same_on_every_machine() -> None:
    assert seed_of(3, "eager-cpu", "matmul") == 1679921035


def test_ops_that_cannot_run_on_a_device_get_no_task() -> None:
    elsewhere = next(n for n, op in CATALOGUE.items() if op.devices and "cpu" not in op.devices)
    assert plan_tasks(replace(SETTINGS, ops=(elsewhere,)), [eager()]) == []


# -- one process ---------------------------------------------------------------------------------


def test_exploring_depends_on_the_seed_alone() -> None:
    first, second = (list(map(untimed, cases_of(list(explore(TASK, SETTINGS))))) for _ in "ab")
    assert first == second
    assert len(first) == 20
    other = cases_of(list(explore(replace(TASK, seed=12), SETTINGS)))
    assert {r.id for r in other} != {r[0] for r in first}


@pytest.mark.thorough
def test_freed_memory_is_given_back_as_a_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    monkeypatch.setattr(engine, "trim", lambda: given.append(len(given)))
    monkeypatch.setattr(engine, "_TRIMMED", 8)
    assert len(cases_of(list(explore(TASK, SETTINGS)))) == 20
    assert len(given) == 2


def test_every_case_has_a_call_of_the_focus() -> None:
    for record in cases_of(list(explore(TASK, SETTINGS))):
        assert "mm" in record.ops
        assert set(record.ops) <= set(OPS)
        assert len(record.ops) <= 4


def test_a_case_is_announced_before_it_runs() -> None:
    seen: list[str] = []
    records = 0
    for event in explore(TASK, SETTINGS, seen=lambda case: seen.append(case.id)):
        if isinstance(event, CaseRecord):
            records += 1
            assert event.id in seen
    assert records == 20


@pytest.fixture
def wrong_mm(monkeypatch: pytest.MonkeyPatch) -> Backend:
    """Make mm on eager-cpu wrong, in this process."""
    wrong = WrongKernel(eager(), "mm")
    monkeypatch.setattr(engine, "backends", lambda: {"eager-cpu": wrong})
    return wrong


@pytest.mark.thorough
@pytest.mark.usefixtures("wrong_mm")
def test_a_finding_comes_once_minimised_and_explained() -> None:
    events = list(explore(TASK, SETTINGS))
    findings = [e for e in events if isinstance(e, Finding) and e.record.kind == "bitwise"]
    assert len(findings) == 1
    (finding,) = findings
    assert finding.new
    assert finding.record.op == "mm"
    assert finding.record.minimised is not None
    assert [s.op for s in statements(finding.record.minimised.program.body)] == ["mm"]
    assert "mm(" in finding.record.explicit
    diverged = [r for r in cases_of(events) if r.outcome == "diverged"]
    assert len(diverged) > 3
    assert finding.record.case.id in {r.id for r in diverged}


@pytest.mark.thorough
@pytest.mark.parametrize("always", [True, False])
def test_a_finding_says_whether_autocast_has_a_part_in_it(
    always: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = WrongKernel(eager(), "mm", always)
    monkeypatch.setattr(engine, "backends", lambda: {"eager-cpu": wrong})
    seen: list[Case] = []
    findings = [
        e for e in explore(TASK, SETTINGS, seen=seen.append)
        if isinstance(e, Finding) and e.record.kind == "bitwise"
    ]  # fmt: skip
    assert {e.record.bare for e in findings} == {always}
    small = findings[0].record.minimised
    assert small is not None
    assert bare(small) in seen  # a worker that dies of it has said of what


@pytest.mark.thorough
@pytest.mark.usefixtures("wrong_mm")
def test_a_signature_that_was_seen_is_counted_and_not_reported_again() -> None:
    groups = Groups()
    first = list(explore(TASK, SETTINGS, groups=groups))
    again = list(explore(TASK, SETTINGS, groups=groups))
    assert any(isinstance(e, Finding) for e in first)
    assert not any(isinstance(e, Finding) for e in again)
    assert [untimed(r) for r in cases_of(first)] == [untimed(r) for r in cases_of(again)]


@pytest.mark.usefixtures("wrong_mm")
def test_fail_fast_stops_at_the_first_divergence() -> None:
    records = cases_of(list(explore(TASK, replace(SETTINGS, fail_fast=True, minimize=0))))
    assert [r.outcome for r in records].count("diverged") == 1
    assert records[-1].outcome == "diverged"


# -- worker processes ----------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store(tmp_path / "store")
    made.begin(RunRecord("r1", 3, "dev", (), {}, ""))
    return made


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_closing_the_iterator_ends_the_workers_and_keeps_the_records(store: Store) -> None:
    import multiprocessing

    events = run(replace(SETTINGS, cases=5000), store, "r1")
    next(e for e in events if isinstance(e, Progress))
    pids = [p.pid for p in multiprocessing.active_children()]
    assert pids
    events.close()
    records = [r for r in store.records("r1") if isinstance(r, CaseRecord)]
    assert len(records) >= 1
    assert len(records) < 5000
    assert not [pid for pid in pids if pid and alive(pid)]
    assert not list(store.run_path("r1").glob("current-*"))


def test_draws_are_of_the_task(wrong_mm: Backend) -> None:
    assert wrong_mm.name == "eager-cpu"
    found = list(islice(engine.draw(replace(TASK, cases=3), SETTINGS), 10))
    assert len(found) == 3


def test_values_that_a_program_does_not_return_can_go_too() -> None:
    """To cut what made a value its type is asked for, returned or not."""
    example = case([x("x0", 4, 4)], call("mm", "x0", "x0"), call("relu", "v0", to="v1"))
    program = msgspec.structs.replace(example.program, outputs=("v1",))
    judge = judge_of(WrongKernel(eager(), "relu"))
    with quiet():
        verdict = judge.judge(msgspec.structs.replace(example, program=program))
        target = Target.of(verdict)
        ask, reference = asker(judge, target), judge.backend.reference()
        *_, last = shrink(verdict.case, target, ask, reference, seconds=20)
    assert [s.op for s in statements(last.case.program.body)] == ["relu"]


# -- cases that aim at kernels --------------------------------------------------------------------


def aiming(settings: Settings) -> Task:
    (task,) = [t for t in plan_tasks(settings, [eager()]) if t.aims]
    return task


@pytest.mark.thorough
def test_every_kernel_that_an_op_can_reach_is_aimed_at_and_reached() -> None:
    settings = replace(SETTINGS, ops=(), cases=1000, aimed=20, relations="none")
    task = aiming(settings)
    assert task.aims == tuple((kernel, 0) for kernel in kernels("cpu").reachable)
    assert task.cases == 200
    found = {k.overload for r in cases_of(list(explore(task, settings))) for k in r.kernels}
    assert set(kernels("cpu").reachable) - found == set()


def test_a_kernel_is_aimed_at_until_a_case_reaches_it_and_no_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    aimed: list[tuple[str, ...]] = []

    def noting(*args: object, focus: tuple[Op, ...], **about: object) -> Case:
        aimed.append(tuple(op.name for op in focus))
        return draw_case(*args, focus=focus, **about)  # type: ignore[arg-type]

    monkeypatch.setattr(engine, "draw_case", noting)
    task = Task("eager-cpu", "coverage", (), 12, 5, aims=(("mm", 0), ("bmm", 0)))
    records = cases_of(list(explore(task, replace(SETTINGS, ops=("mm", "bmm", "relu")))))
    assert len(records) == 12
    assert aimed[0] == ("mm",)
    open_ = {"mm": ("mm",), "bmm": ("bmm",)}
    for record, focus in zip(records, aimed, strict=True):
        assert focus in open_.values() if open_ else focus == ()
        for kernel in record.kernels:
            open_.pop(kernel.overload, None)
    assert not open_


def test_a_kernel_that_nothing_reaches_takes_no_more_than_its_tries() -> None:
    aims = engine.Aims([("a", 0), ("b", 0)])
    aims.reached.add("b")
    assert list(aims) == [("a", number) for number in range(engine._MOST)]


def test_a_resumed_task_that_aims_draws_what_it_would_have_drawn() -> None:
    settings = replace(SETTINGS, ops=("mm", "bmm", "relu"))
    task = Task("eager-cpu", "coverage", (), 12, 5, aims=(("mm", 0), ("bmm", 0)))
    whole = cases_of(list(explore(task, settings)))
    done = {r.id: frozenset(k.overload for k in r.kernels) for r in whole[:5]}
    resumed = replace(settings, done={("eager-cpu", "coverage"): done})
    rest = cases_of(list(explore(task, resumed)))
    assert [r.id for r in rest] == [r.id for r in whole if r.id not in done]


# -- a limit of time ------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.usefixtures("wrong_mm")
def test_minimising_ends_with_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []

    def examine(*args: object, seconds: float, **about: object) -> Iterator[object]:
        given.append(seconds)
        return iter(())

    monkeypatch.setattr(engine, "examine", examine)
    settings = replace(SETTINGS, minimize=20.0)
    list(explore(TASK, settings))
    assert given[0] == 20
    list(explore(TASK, replace(settings, clock=lambda: 40.0, deadline=100.0)))
    assert given[-1] == 15
    assert engine._patience(replace(settings, clock=lambda: 101.0, deadline=100.0)) == 0


@pytest.mark.parametrize(("now", "cases"), [(94.0, 20), (95.0, 1), (200.0, 1)])
def test_no_case_begins_in_the_last_seconds(now: float, cases: int) -> None:
    settings = replace(SETTINGS, seconds=60.0, clock=lambda: now, deadline=100.0)
    assert len(cases_of(list(explore(TASK, settings)))) == cases
    until = replace(TASK, until=95.0)
    assert len(cases_of(list(explore(until, replace(settings, deadline=900.0))))) == cases


@pytest.mark.usefixtures("forked_workers")
def test_a_run_without_time_says_that_it_was_cut(store: Store) -> None:
    settings = replace(SETTINGS, cases=3000, seconds=1e-9)
    events = list(run(settings, store, "r1"))
    assert events[-1] == TimeUp()
    assert sum(e.cases for e in events if isinstance(e, Planned)) == 3000
    assert not any(isinstance(r, CaseRecord) for r in store.records("r1"))


@pytest.mark.usefixtures("forked_workers")
def test_a_run_that_did_all_was_not_cut(store: Store) -> None:
    settings = replace(SETTINGS, aimed=20, seconds=600.0)
    events = list(run(settings, store, "r1"))
    assert TimeUp() not in events
    assert sum(isinstance(r, CaseRecord) for r in store.records("r1")) == 20


def test_a_case_counts_for_a_cause_that_the_baseline_does_not_accept() -> None:
    record = CaseRecord("1", "eager-cpu", "all", "diverged", ("mm",), (), {})
    both = [Met("old", entry="e1"), Met("new"), Met("old", entry="e1")]
    assert engine._met(record, both).groups == ("new", "old")
    accepted = engine._met(record, both[::2])
    assert (accepted.outcome, accepted.groups, accepted.known) == ("known", ("old",), "e1")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "least", "most"),
    [("eager-cpu", 5, 30), ("compile[aot_eager]", 50, 90), ("export", 0, 0), ("script", 0, 0)],
)
def test_a_compiler_gets_more_programs_that_are_called_again(
    name: str, least: int, most: int
) -> None:
    task = Task(name, "all", (), 200, 1)
    found = [bool(case.plan.later) for case in draw(task, Settings((name,)))]
    assert least <= sum(found) <= most
