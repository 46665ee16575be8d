"""Faults inside cases: a plugin, copied into the folder in which a run or sweep starts.

``faults.txt`` there has a number N and names of faults. Of N cases, one meets each fault, by the
id of the case. It happens in the backend, each time that the case or a variant of it runs.

- ``SIGKILL``, ``SIGSEGV``, ``SIGABRT``: the signal.
- ``once``: SIGKILL, the first time only.
- ``loop``: a loop without end.
- ``memory``: 2 GiB.

With ``full.txt``, which holds a number of bytes, the disk is full once a file of records has them.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any


def fault_of(case: str, faults: str) -> str:
    """Return the fault that a case meets, or ""."""
    every, *names = faults.split()
    kind = int(case[:8], 16) % int(every)
    return names[kind] if kind < len(names) else ""


def meet(case: str) -> None:
    """Let a case meet its fault."""
    match fault_of(case, Path("faults.txt").read_text()):
        case "once":
            if not (mark := Path(f"{case}.once")).exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        case "loop":
            while True:
                pass
        case "memory":
            held = [bytearray(b"1" * 2**28) for _ in range(8)]
            signal.pause()
            del held
        case "":
            pass
        case name:
            os.kill(os.getpid(), signal.Signals[name])


def install() -> None:
    """Change this process, and its forks."""
    from amp_fuzz.backends.eager import EagerBackend
    from amp_fuzz.runs.worker import Note

    run, seen = EagerBackend.run, Note.seen
    current = [""]

    def noted(self: Note, case: Any) -> None:
        seen(self, case)
        current[0] = case.id

    def deadly(self: EagerBackend, cases: Any) -> Any:
        meet(current[0])
        return run(self, cases)

    Note.seen = noted  # type: ignore[method-assign]
    EagerBackend.run = deadly  # type: ignore[method-assign]
    if (full := Path("full.txt")).exists():
        _fill(int(full.read_text()))


def _fill(limit: int) -> None:
    """Let the disk be full once a file of records has so many bytes, in the middle of a line."""
    from amp_fuzz.records.store import Writer

    write = Writer.write

    def written(self: Writer, record: Any) -> None:
        if self.path.stat().st_size > limit:
            self._file.write(b'{"type":"case","i')
            self._file = Path("/dev/full").open("wb", buffering=0)  # noqa: SIM115
        write(self, record)

    Writer.write = written  # type: ignore[method-assign]


def judged(store: Path | str, run: str) -> tuple[Counter[str], dict[str, str]]:
    """Return how often each case is on record, and of what those died that killed two workers.

    store: a folder or a URL.
    """
    from amp_fuzz.records.remote import store_at
    from amp_fuzz.records.schema import CaseRecord, DivergenceRecord

    told = list(store_at(store).records(run))
    dead = [r for r in told if isinstance(r, DivergenceRecord) and r.kind in ("crash", "timeout")]
    ids = Counter(r.id for r in told if isinstance(r, CaseRecord))
    return ids + Counter(r.case.id for r in dead), {r.case.id: r.observed for r in dead}


if Path("faults.txt").exists():
    install()
