"""``amp-fuzz audit``: the conformance matrix, every op in every mix of floating dtypes."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from typing import TYPE_CHECKING, Any

import click

from amp_fuzz.interfaces.cli.common import Exit, Stopped, options, resolve_options, say, waiting
from amp_fuzz.interfaces.cli.progress import Board, shown
from amp_fuzz.interfaces.signals import Interrupted, Interrupts
from amp_fuzz.records.remote import store_at

if TYPE_CHECKING:
    from amp_fuzz.runs.audit import Cell

__all__ = ["audit"]


@click.command(short_help="Check every op in every mix of floating dtypes.")
@options(
    "backends",
    "ops",
    "workers",
    "known",
    "require",
    "store",
    "report",
    "plugins",
    "device",
    "policies",
)
def audit(**given: Any) -> int:
    """Call every op with every mix of floating dtypes on every backend, and compare.

    The calls are not random: they are the same on every machine. Writes the matrix, and the
    differences between devices, as Markdown and CSV. Exits with 1 if a cell differs from the
    reference and no known finding explains it, and with 5 if nothing was judged.
    """
    chosen = resolve_options(given).options
    store = store_at(chosen.store)
    store.create()

    from amp_fuzz.backends.registry import choose_backends
    from amp_fuzz.catalogue import select
    from amp_fuzz.runs.setup import known_of

    ops, known = select(chosen.ops), known_of(chosen)
    with waiting("importing torch"):
        from amp_fuzz.runs import audit as core

        backends = choose_backends(chosen.backends, chosen.require)
    with waiting("counting"):
        board = Board(unit="ops")
        for backend in backends:
            board.row(backend.name).total = core.count([backend], ops)
    if not sum(row.total for row in board.rows.values()):
        raise Stopped(
            "nothing ran: none of the ops has a kernel on these backends, or no backend "
            f"autocasts to {' or '.join(core.AUTOCAST_DTYPES)}",
            Exit.NOTHING,
        )

    notes = [line for b in backends for line in core.missing(b.name, core.left_out(b, ops))]
    cells: list[Cell] = []
    with Interrupts() as interrupts:
        with closing(core.audit(backends, ops, known=known, workers=chosen.workers)) as parts:
            try:
                with interrupts.stoppable(), shown(board) as tick:
                    for part in parts:
                        cells += part
                        _note(board, part)
                        tick()
            except Interrupted:
                say("stopping: these are the results so far")
                notes = [*notes, *_unfinished(board)]
        for cell in cells:
            if cell.finding is not None and cell.status == "differs":
                store.save(cell.finding)
        if cells:
            core.write(cells, chosen.report, notes)
            say(core.summary(cells, chosen.report, notes))
    return interrupts.code or _code(cells)


def _code(cells: list[Cell]) -> int:
    """Return the exit code of a whole audit: it is no success if nothing was judged."""
    from amp_fuzz.reports.conformance import not_judged

    if any(cell.status == "differs" for cell in cells):
        return Exit.DIVERGED
    silent = {(name, op) for name, ops in not_judged(cells).items() for op in ops}
    judged = any((cell.backend, cell.op) not in silent for cell in cells)
    return Exit.OK if judged else Exit.NOTHING


def _unfinished(board: Board) -> list[str]:
    """Return a line for each backend that an interrupt has cut short."""
    return [
        f"not finished on {row.name}: {row.done:,} of {row.total:,} ops"
        for row in board.rows.values()
        if row.done < row.total
    ]


def _note(board: Board, cells: list[Cell]) -> None:
    """Count the cells of one op on one backend."""
    if cells:
        counts = Counter(cell.status for cell in cells)
        board.add(
            cells[0].backend, 1, own=counts["own"], known=counts["known"], new=counts["differs"]
        )
