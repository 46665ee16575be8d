"""Progress and interrupts, without a run."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from rich.console import Console

from amp_fuzz.interfaces.cli.common import command_line, duration
from amp_fuzz.interfaces.cli.known import _left
from amp_fuzz.interfaces.cli.progress import Board
from amp_fuzz.interfaces.signals import Interrupted, Interrupts
from amp_fuzz.reports.printable import plural


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def board(clock: Clock, limit: float = 0.0) -> Board:
    made = Board(limit=limit, clock=clock)
    made.row("eager-cpu").total = 100
    made.row("fake-cuda").total = 100
    return made


def test_a_line_for_logs(clock: Clock) -> None:
    run = board(clock)
    assert run.line() == "[0.0 s] eager-cpu 0/100, fake-cuda 0/100, own 0, known 0, new 0"
    clock.now += 5  # the workers start
    run.add("eager-cpu", 10, known=1)
    clock.now += 5
    run.add("eager-cpu", 20, new=2)
    run.add("fake-cuda", 30)
    assert run.line() == (
        "[10 s] eager-cpu 30/100, fake-cuda 30/100, 10.0 cases/s, 18 s left, own 0, known 1, new 2"
    )


def test_what_an_earlier_attempt_recorded_is_not_of_the_rate(clock: Clock) -> None:
    run = board(clock)
    run.row("eager-cpu").done = run.row("fake-cuda").done = 50
    run.add("eager-cpu", 1)
    clock.now += 10
    run.add("eager-cpu", 10)
    assert "eager-cpu 61/100, fake-cuda 50/100, 1.0 cases/s," in run.line()


def test_a_rate_is_not_shown_before_it_means_something(clock: Clock) -> None:
    run = board(clock)
    run.add("eager-cpu", 10)
    clock.now += 1
    run.add("eager-cpu", 10)
    assert "cases/s" not in run.line()
    assert "left" not in run.line()


def test_a_limit_of_time_bounds_what_is_left(clock: Clock) -> None:
    run = board(clock, limit=15)
    for _ in range(2):
        run.add("eager-cpu", 1)
        run.add("fake-cuda", 1)
        clock.now += 5
    assert ", 5.0 s left," in run.line()
    clock.now += 10
    assert ", 0.0 s left," in run.line()


def test_known_check_says_how_many_bugs_are_left_and_for_how_long(clock: Clock) -> None:
    board = Board(clock=clock)
    board.row("bugs").total = 210
    said = []
    for _ in range(210):
        clock.now += 2
        board.add("bugs", 1)
        said.append(_left(board))
    assert said[0] == "  (209 left)"  # of their rate nothing is known
    assert said[9] == "  (200 left, about 6 min 40 s)"
    assert said[104] == "  (105 left, about 3 min 30 s)"
    assert said[208] == "  (1 left, about 2.0 s)"
    assert said[209] == ""


def test_the_slowest_backend_decides_what_is_left(clock: Clock) -> None:
    run = board(clock)
    run.add("eager-cpu", 0)
    clock.now += 10
    run.add("eager-cpu", 90)
    assert "left" not in run.line()  # of the other nothing is known
    run.add("fake-cuda", 2)
    assert ", 9.2 cases/s, 8 min 10 s left," in run.line()


def test_a_rate_of_less_than_one_is_no_zero(clock: Clock) -> None:
    run = board(clock)
    run.add("eager-cpu", 1)
    clock.now += 50
    assert "cases/s" not in run.line()
    run.add("eager-cpu", 2)
    assert ", 0.04 cases/s," in run.line()


def test_the_table(clock: Clock) -> None:
    run = board(clock)
    run.add("eager-cpu", 1)
    clock.now += 10
    run.add("eager-cpu", 50, known=3)
    run.add("fake-cuda", 100, new=1)
    console = Console(width=90, force_terminal=False)
    with console.capture() as capture:
        console.print(run.table())
    lines = [line.replace("━", "").replace("╸", "").split() for line in capture.get().splitlines()]
    assert lines == [
        ["backend", "10", "s", "cases", "cases/s", "left", "own", "known", "new"],
        ["eager-cpu", "51/100", "5.0", "9.8", "s", "0", "3", "0"],
        ["fake-cuda", "100/100", "10.0", "done", "0", "0", "1"],
    ]
    clock.now += 10  # what is done keeps its rate
    with console.capture() as capture:
        console.print(run.table())
    assert " 10.0 " in capture.get().splitlines()[2]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.0 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (245, "4 min 05 s"),
        (3599.4, "59 min 59 s"),
        (7383, "2 h 03 min"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_words() -> None:
    assert [plural(n, "case") for n in (0, 1, 3220)] == ["0 cases", "1 case", "3,220 cases"]
    assert command_line("run", "--ops=conv*") == "amp-fuzz run '--ops=conv*'"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_raises_where_it_may_and_no_other(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with Interrupts() as interrupts:
        with interrupts.stoppable():
            pass
        assert interrupts.code is None
        with pytest.raises(Interrupted), interrupts.stoppable():
            os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)
        with interrupts.stoppable():
            pass
        assert interrupts.code == 128 + number
    assert signal.getsignal(number) is before


def test_a_signal_that_comes_too_early_or_is_swallowed_stops_all_the_same() -> None:
    with Interrupts() as interrupts:
        os.kill(os.getpid(), signal.SIGINT)  # not yet: there is nothing to stop
        assert interrupts.code is None
        with pytest.raises(Interrupted), interrupts.stoppable():
            raise AssertionError("this is not reached")
        assert interrupts.code == 130
    with Interrupts() as interrupts:
        with pytest.raises(Interrupted), interrupts.stoppable(), suppress(BaseException):
            os.kill(os.getpid(), signal.SIGINT)  # as an import of a library may do
        assert interrupts.code == 130


def test_a_signal_that_a_finaliser_swallows_is_raised_at_the_next_check() -> None:
    with Interrupts() as interrupts:
        with interrupts.stoppable():
            interrupts.check()  # none came
        with pytest.raises(Interrupted), interrupts.stoppable(), _swallowing(signal.SIGTERM):
            interrupts.check()


@contextmanager
def _swallowing(number: signal.Signals) -> Iterator[None]:
    with suppress(BaseException):
        os.kill(os.getpid(), number)
    yield
