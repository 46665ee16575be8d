"""Live progress of a run: a table in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from amp_fuzz.cli.common import console, duration

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Board", "Row", "shown"]

PLAIN_EVERY = 10.0


@dataclass(slots=True)
class Row:
    """How far one backend is. Times are of the monotonic clock, in seconds."""

    name: str
    total: int = 0
    done: int = 0
    known: int = 0
    new: int = 0
    first: float | None = None
    last: float = 0.0

    def add(self, cases: int, *, known: int, new: int, now: float) -> None:
        """Count cases that were judged."""
        self.first = now if self.first is None else self.first
        self.last = now
        self.done += cases
        self.known += known
        self.new += new

    def rate(self, started: float) -> float:
        """Return the cases a second since the start."""
        return self.done / (self.last - started) if self.last > started else 0.0

    def left(self, started: float, now: float) -> float | None:
        """Return the seconds to the end at the rate so far; None where that cannot be said."""
        rate = self.rate(started)
        if rate <= 0:
            return None
        return max(0.0, (self.total - self.done) / rate - (now - self.last))


@dataclass(slots=True)
class Board:
    """How far a run is, by backend. `limit`: seconds after which it is stopped; 0 is never."""

    limit: float = 0.0
    rows: dict[str, Row] = field(default_factory=dict)
    clock: Callable[[], float] = time.monotonic
    started: float = 0.0

    def __post_init__(self) -> None:
        self.started = self.clock()

    def row(self, backend: str) -> Row:
        """Return the row of a backend."""
        return self.rows.setdefault(backend, Row(backend))

    def line(self) -> str:
        """Return one line for logs."""
        now = self.clock()
        rows = self.rows.values()
        parts = [f"{row.name} {row.done}/{row.total}" for row in rows]
        rate = sum(row.done for row in rows) / max(now - self.started, 1e-9)
        parts.append(f"{rate:.0f} cases/s")
        left = self._left(now)
        parts += [] if left is None else [f"{duration(left)} left"]
        parts += [f"known {sum(r.known for r in rows)}", f"new {sum(r.new for r in rows)}"]
        return f"[{duration(now - self.started)}] {', '.join(parts)}"

    def _left(self, now: float) -> float | None:
        """Return the seconds to the end of the run: the backends take turns at the workers."""
        done = sum(row.done for row in self.rows.values())
        total = sum(row.total for row in self.rows.values())
        if not done:
            return None
        spent = now - self.started
        left = spent * max(0, total - done) / done
        return min(left, max(0.0, self.limit - spent)) if self.limit else left

    def table(self) -> Table:
        """Return the table for a terminal."""
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        now = self.clock()
        grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        grid.add_column("backend", no_wrap=True)
        grid.add_column(duration(now - self.started), width=20)
        for name in ("cases", "cases/s", "left", "known", "new"):
            grid.add_column(name, justify="right", no_wrap=True)
        for row in self.rows.values():
            left = row.left(self.started, now)
            if self.limit and left is not None:
                left = min(left, max(0.0, self.limit - (now - self.started)))
            done = row.done >= row.total > 0
            grid.add_row(
                row.name,
                ProgressBar(total=max(row.total, 1), completed=row.done),
                f"{row.done}/{row.total}",
                f"{row.rate(self.started):.1f}" if row.done else "-",
                "done" if done else "starting" if left is None else duration(left),
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
