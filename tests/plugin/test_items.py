"""The parts of an item: what it leaves as it was, what it writes down, how it shows a finding."""

import gc
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch._dynamo  # noqa: F401  (workers import it; after pytester unloads it, it fails)

from amp_fuzz.backends import choose
from amp_fuzz.cases.case import Case
from amp_fuzz.interfaces.plugin import items
from amp_fuzz.interfaces.plugin.items import FuzzItem, Job, jobs, show_finding, store_option
from amp_fuzz.records.schema import unanswered
from amp_fuzz.records.store import Store, StoreError, Writer
from amp_fuzz.runs.engine import Event, Settings, Task, draw
from tests.helpers import needs_fork

pytest_plugins = ["pytester"]

SETTINGS = Settings(("eager-cpu",), cases=10, aimed=20, ops=("mm", "relu"), seed=3)


@pytest.fixture(scope="module")
def case() -> Case:
    return next(iter(draw(Task("eager-cpu", "matmul", ("mm",), 1, 1), SETTINGS)))


def test_every_family_has_a_job_after_those_that_aim_at_the_kernels_of_any_backend() -> None:
    found = jobs(SETTINGS, choose(["eager-cpu", "fake-xpu"]), {})
    names = [(job.backend, job.name) for job in found]
    assert names == [
        (backend, name)
        for items in (("coverage",), ("activation", "matmul"))
        for backend in ("eager-cpu", "fake-xpu")
        for name in items
    ]
    assert sum(job.tasks[0].cases for job in found) == 20
    assert [job.tasks[0].cases for job in found if job.name == "coverage"] == [2, 2]


def test_no_item_aims_where_nothing_is_to_be_aimed() -> None:
    found = jobs(replace(SETTINGS, aimed=0), choose(["eager-cpu"]), {})
    assert [(job.name, job.tasks[0].cases) for job in found] == [("activation", 5), ("matmul", 5)]


def test_no_coverage_item_where_no_kernel_can_be_reached() -> None:
    settings = Settings(("eager-cpu",), aimed=20, ops=("relu",))
    assert [job.name for job in jobs(settings, choose(["eager-cpu"]), {})] == ["activation"]


def test_a_backend_that_takes_all_its_time_leaves_others_their_share() -> None:
    """Each item begins when the one before it has used all its time."""
    now = [0.0]
    settings = replace(
        SETTINGS, cases=1000, seconds=90.0, deadline=90.0, clock=lambda: now[0], aimed=0
    )
    run = SimpleNamespace(settings=settings, processes=1)
    session = SimpleNamespace(items=[])
    for job in jobs(settings, choose(["eager-cpu", "fake-xpu", "fake-cuda"]), {}):
        item = FuzzItem.__new__(FuzzItem)
        item.run, item.job, item.session = cast("Any", run), job, cast("Any", session)
        session.items.append(item)
    spent = Counter[str]()
    for item in session.items:
        (task,) = item._tasks()
        spent[task.backend] += task.until - now[0]
        now[0] = task.until
    assert spent == pytest.approx({"eager-cpu": 30.0, "fake-xpu": 30.0, "fake-cuda": 30.0})


class Swallows:
    def __del__(self) -> None:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.thorough
def test_an_interrupt_that_a_callback_swallowed_is_still_noticed() -> None:
    """Exceptions go no further than a callback of the garbage collector, or a finaliser."""
    before = signal.getsignal(signal.SIGINT)
    with items._interrupts() as interrupted:
        assert not interrupted()
        Swallows()
        gc.collect()
        assert interrupted()
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.thorough
def test_an_interrupt_that_was_swallowed_after_the_last_case_is_still_noticed() -> None:
    ends = list[Any]()

    def work(tasks: Sequence[Task]) -> Iterator[Event]:
        Swallows()
        gc.collect()
        yield from ()

    run = SimpleNamespace(settings=SETTINGS, begin=int, work=work, write=ends.append)
    item = FuzzItem.__new__(FuzzItem)
    item.run, item.job, item.user_properties = cast("Any", run), Job("eager-cpu", "all", ()), []
    with pytest.raises(KeyboardInterrupt):
        item.runtest()
    assert [end.reason for end in ends] == ["interrupted"]


def test_an_item_without_cases_fails(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing drawn is nothing tested: never a silent pass."""
    import pandas  # noqa: F401  (for the report; pytester would unload it after the first use)

    monkeypatch.setattr(
        "amp_fuzz.interfaces.plugin.session.jobs", lambda *args: [Job("eager-cpu", "matmul", ())]
    )
    result = pytester.runpytest_inprocess("--amp-fuzz", "--amp-fuzz-backends=eager-cpu")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["no case ran: none was drawn for amp-fuzz::eager-cpu::*"])


def test_a_full_disk_is_one_line(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pandas  # noqa: F401  (as above)

    needs_fork()

    close = Writer.close

    def write(self: Writer, record: object) -> None:
        raise StoreError(f"{self.path.name}: cannot write (No space left on device)")

    closed: list[str] = []
    monkeypatch.setattr(Writer, "write", write)
    monkeypatch.setattr(Writer, "close", lambda self: (closed.append(self.path.name), close(self)))
    result = pytester.runpytest_inprocess(
        "--amp-fuzz", "--amp-fuzz-backends=eager-cpu", "--amp-fuzz-ops=relu", "--amp-fuzz-cases=3"
    )
    result.assert_outcomes(failed=1)
    line = "amp-fuzz: records-main.jsonl: cannot write (No space left on device)"
    result.stdout.fnmatch_lines([line])
    assert "records-run.jsonl" in closed  # else a warning comes later, in some other test
    assert "Traceback" not in result.stdout.str()


def test_a_finding_in_full(case: Case) -> None:
    record = unanswered("eager-cpu", "crash", case, "the process died", "matmul")
    record = msgspec.structs.replace(
        record, kind="dtype", where="v0", op="mm", policy="lower_precision_fp", dtypes="float32"
    )
    assert show_finding(record, Store("my runs"), store_option("my runs")) == [
        "eager-cpu: dtype at mm (lower_precision_fp, float32)",
        "  kind      dtype at v0",
        "  expected  an answer",
        "  observed  the process died",
        *(f"  {line}" for line in str(case).splitlines()),
        f"amp-fuzz replay {case.id} '--store=my runs'",
        f"amp-fuzz repro {case.id} '--store=my runs' > repro.py",
    ]


def test_a_long_finding_is_cut(case: Case) -> None:
    inputs = tuple(msgspec.structs.replace(case.program.inputs[0], name=f"x{i}") for i in range(90))
    long = msgspec.structs.replace(
        case, program=msgspec.structs.replace(case.program, inputs=inputs)
    )
    record = unanswered("eager-cpu", "crash", long, "word " * 100, "matmul")
    lines = show_finding(record, Store())
    assert len(lines) == 4 + 40 + 1 + 2
    more = len(str(long).splitlines()) - 40
    assert lines[-3] == f"  ... and {more} more lines: amp-fuzz replay shows them"
    assert lines[3].endswith("...")
    assert len(lines[3]) <= 172
