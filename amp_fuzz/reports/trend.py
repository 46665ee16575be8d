"""What changed from run to run: findings, kernel coverage and speed.

The numbers of a run are kept in its folder as ``summary.json`` when its report is written, since
millions of records would otherwise be read again for each later report. Findings are judged again
by later runs, so what is new, fixed and open is read from the records: see `records.lives`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple

import msgspec

from amp_fuzz.records.lives import Step
from amp_fuzz.records.outputs import write_whole
from amp_fuzz.records.store import Store, StoreError

__all__ = ["Numbers", "Point", "Trend", "forget", "keep", "trend"]

MOST = 30  # runs in the picture: the last ones
_FORMAT = 1


class Numbers(msgspec.Struct, frozen=True):
    """A backend in a run. rate: cases a second of one worker. reached, reachable: kernels."""

    cases: int
    rate: float
    reached: int
    reachable: int

    @property
    def coverage(self) -> str:
        """The kernels reached, of those that are reachable: ``126/127``."""
        return f"{self.reached}/{self.reachable}"


class _Summary(msgspec.Struct, frozen=True):
    backends: dict[str, Numbers]
    format: int = _FORMAT


class Point(NamedTuple):
    """A run of the trend. The findings are causes; open are those that still show after it."""

    run: str
    started: str
    torch: str
    machine: str
    new: int
    fixed: int
    back: int
    open: int
    backends: Mapping[str, Numbers]


class Trend(NamedTuple):
    """The last runs, oldest first. left_out: how many have no summary. earlier: not shown."""

    points: tuple[Point, ...] = ()
    left_out: int = 0
    earlier: int = 0

    @property
    def backends(self) -> tuple[str, ...]:
        """The backends of all points, in the order of the last run that has them."""
        return tuple(dict.fromkeys(b for p in reversed(self.points) for b in p.backends))


def keep(store: Store, run: str, backends: Mapping[str, Numbers]) -> None:
    """Keep the numbers of a run in its folder, if it can be written."""
    with suppress(StoreError):
        path = store.run_path(run) / "summary.json"
        write_whole(path, msgspec.json.encode(_Summary(dict(backends))))
        store.deliver(path)


def forget(store: Store, run: str) -> None:
    """Remove the numbers of a run that goes on: its next report keeps new ones."""
    with suppress(OSError):
        (store.run_path(run) / "summary.json").unlink()


def trend(store: Store, steps: Iterable[Step], run: str, backends: Mapping[str, Numbers]) -> Trend:
    """Return runs with what they changed as a trend. backends: the numbers of this run."""
    points, left_out = [], 0
    for step in steps:
        head = store.run(step.seen.run)
        numbers = backends if head.id == run else _kept(store, head.id)
        if numbers is None:
            left_out += 1
            continue
        points.append(
            Point(
                run=head.id,
                started=head.started,
                torch=step.seen.torch,
                machine=head.machine.get("cpu", ""),
                new=step.new,
                fixed=step.fixed,
                back=step.back,
                open=step.open,
                backends=numbers,
            )
        )
    return Trend(tuple(points[-MOST:]), left_out, max(len(points) - MOST, 0))


def _kept(store: Store, run: str) -> Mapping[str, Numbers] | None:
    with suppress(OSError, msgspec.MsgspecError):
        text = (store.run_path(run) / "summary.json").read_bytes()
        summary = msgspec.json.decode(text, type=_Summary)
        if summary.format == _FORMAT:
            return summary.backends
    return None
