"""Live progress of a run: a table in a terminal, otherwise a line from time to time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from amp_fuzz.interfaces.cli.common import console, duration, speed

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Board", "Row", "shown"]

PLAIN_EVERY = 60.0
SETTLED = 3.0  # seconds of cases before a rate is worth showing


@dataclass(slots=True)
class Row:
    """The progress of one backend. own: cases that differ without autocast too.

    last: when its last case came.
    """

    name: str
    total: int = 0
    done: int = 0
    own: int = 0
    known: int = 0
    new: int = 0
    last: float = 0.0

    @property
    def left(self) -> int:
        """The number of cases left."""
        return max(0, self.total - self.done)


@dataclass(slots=True)
class Board:
    """The progress of a run, by backend. Times are of `clock`, in seconds.

    limit: seconds after which the run stops; 0 means never. unit: what is counted. Rates start at
    the first case, because workers start before it.
    """

    limit: float = 0.0
    unit: str = "cases"
    rows: dict[str, Row] = field(default_factory=dict)
    clock: Callable[[], float] = time.monotonic
    started: float = 0.0
    first: float | None = None
    before: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.started = self.clock()

    def row(self, backend: str) -> Row:
        """Return the row of a backend."""
        return self.rows.setdefault(backend, Row(backend))

    def add(self, backend: str, cases: int, *, own: int = 0, known: int = 0, new: int = 0) -> None:
        """Count cases of a backend, and the divergences in them."""
        row = self.row(backend)
        row.done += cases
        row.own += own
        row.known += known
        row.new += new
        row.last = self.clock()
        if self.first is None:
            self.first = self.clock()
            self.before = {row.name: row.done for row in self.rows.values()}

    def rate(self, rows: Iterable[Row]) -> float | None:
        """Return the cases a second of these backends together, or None if it is too early."""
        rows = tuple(rows)
        if self.first is None:
            return None
        # A backend that is done keeps its rate.
        now = self.clock() if any(row.left for row in rows) else max(row.last for row in rows)
        spent = now - self.first
        if spent < SETTLED:
            return None
        return sum(row.done - self.before.get(row.name, 0) for row in rows) / spent

    def left(self, rows: Iterable[Row]) -> float | None:
        """Return the seconds to the end at the rate so far, or None if unknown.

        The slowest backend decides.
        """
        rates = [(row, self.rate([row])) for row in rows if row.left]
        spent = self.clock() - self.started
        if not all(rate for _, rate in rates):
            return None
        left = max((row.left / rate for row, rate in rates if rate), default=0.0)
        return max(min(left, self.limit - spent), 0.0) if self.limit else left

    def line(self) -> str:
        """Return one line for logs."""
        rows = tuple(self.rows.values())
        rate, left = self.rate(rows), self.left(rows)
        parts = [f"{row.name} {row.done}/{row.total}" for row in rows]
        parts += [f"{speed(rate)} {self.unit}/s"] if rate else []
        parts += [] if left is None else [f"{duration(left)} left"]
        for name in ("own", "known", "new"):
            parts.append(f"{name} {sum(getattr(row, name) for row in rows)}")
        return f"[{duration(self.clock() - self.started)}] {', '.join(parts)}"

    def table(self) -> Table:
        """Return the table for a terminal."""
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        grid.add_column("backend", no_wrap=True)
        elapsed = duration(self.clock() - self.started)
        grid.add_column(elapsed if self.first else f"{elapsed}, starting", width=20)
        for name in (self.unit, f"{self.unit}/s", "left", "own", "known", "new"):
            grid.add_column(name, justify="right", no_wrap=True)
        for row in self.rows.values():
            rate, left = self.rate([row]), self.left([row])
            grid.add_row(
                row.name,
                ProgressBar(total=max(row.total, 1), completed=row.done),
                f"{row.done}/{row.total}",
                speed(rate) if rate else "-",
                "done" if row.done and not row.left else "-" if left is None else duration(left),
                str(row.own),
                str(row.known),
                Text(str(row.new), style="bold red" if row.new else ""),
            )
        return grid


@contextmanager
def shown(board: Board) -> Iterator[Callable[[], None]]:
    """Show a board while the block runs; call what it yields after each change."""
    out = console()
    if not out.is_terminal:
        last = [board.started - PLAIN_EVERY]

        def tick() -> None:
            if board.clock() - last[0] >= PLAIN_EVERY:
                last[0] = board.clock()
                out.print(board.line(), soft_wrap=True)

        yield tick
        return

    from rich.live import Live

    with Live(get_renderable=board.table, console=out, refresh_per_second=4, transient=True):
        yield lambda: None
