"""What runs in a worker process: it takes tasks, and notes the case that is about to run."""

from __future__ import annotations

import errno
import faulthandler
import os
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import connection
from pathlib import Path
from typing import Any, Literal

from amp_fuzz.backends import accelerator, backends
from amp_fuzz.backends.accelerator import DeviceFailure
from amp_fuzz.cases.case import Case
from amp_fuzz.findings.entered import told
from amp_fuzz.findings.groups import Groups
from amp_fuzz.findings.supervision.processes import (
    expendable,
    few_primitives,
)
from amp_fuzz.plugins import inherited
from amp_fuzz.records.schema import (
    CaseRecord,
    EndRecord,
    NoteRecord,
)
from amp_fuzz.records.store import Store, StoreError, Writer
from amp_fuzz.runs.coverage import Covered
from amp_fuzz.runs.engine import (
    Event,
    Failed,
    Finding,
    Finished,
    Progress,
    Settings,
    Task,
    explore,
    late,
)

__all__ = [
    "BEFORE",
    "JUDGED",
    "NOTED",
    "NUMBER",
    "RUNNING",
    "Note",
    "composed",
    "done",
    "worker_main",
]

# Shared by a worker and its supervisor: the number of the case, whether it runs, cases noted, the
# number of the last case that was judged, and the size of the file of records before its record.
NUMBER, RUNNING, NOTED, JUDGED, BEFORE = range(5)


class Note:
    """Writes the case that is about to run to a place where the supervisor finds it.

    shared: memory that the supervisor reads: the number of the case, whether it runs, and how many
    cases were noted, including candidates of the minimiser.
    """

    def __init__(self, path: Path, shared: Any) -> None:
        self.path, self.shared = path, shared
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT)
        except OSError as error:
            raise StoreError(f"{path}: cannot write ({error.strerror})") from error

    def began(self, number: int) -> None:
        """Note the number of the next case."""
        self.shared[NUMBER] = number

    def judged(self, records: Path) -> None:
        """Note that the record of the case comes next in this file."""
        self.shared[BEFORE] = records.stat().st_size
        self.shared[JUDGED] = self.shared[NUMBER]  # last: a kill may come between the two

    def seen(self, case: Case) -> None:
        """Note a case that is about to run. Raises `StoreError`."""
        text = case.json()
        try:
            written = os.pwrite(self._file, text, 0)
            os.ftruncate(self._file, len(text))
        except OSError as error:
            raise StoreError(f"{self.path}: cannot write ({error.strerror})") from error
        if written != len(text):
            raise StoreError(f"{self.path}: cannot write ({os.strerror(errno.ENOSPC)})")
        self.shared[RUNNING] = 1
        self.shared[NOTED] += 1

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def rested(self) -> None:
        """Note that the case is recorded and none is running."""
        self.shared[RUNNING] = 0
        self.shared[NUMBER] += 1


@contextmanager
def composed() -> Iterator[None]:
    """Set the global state that cases expect, and restore the old state afterwards.

    Cases run with one thread, since results may depend on the number of threads, and without the
    user's warning filters, default dtype, grad mode and random state.
    """
    import torch

    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    state = torch.get_rng_state()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    try:
        with warnings.catch_warnings(), torch.inference_mode(False), torch.enable_grad():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
        torch.set_rng_state(state)


def worker_main(
    pipe: connection.Connection,
    settings: Settings,
    root: str,
    run_id: str,
    number: int,
    shared: Any,
    entered: Any,
) -> None:
    """Take tasks from the supervisor until it closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor handles interrupts
    few_primitives()
    expendable()
    store = Store(root)
    folder = store.run_path(run_id)
    try:
        _redirect(folder / f"worker-{number}.log")
        inherited()
        with composed():
            note = Note(folder / f"current-{number}.json", shared)
            writer = store.writer(run_id, str(number))
            pipe.send(None)  # ready
            while True:
                task, groups = pipe.recv()
                if task.repeats is not None and task.repeats.reports:
                    pipe.send(_told(task, settings, note, entered))
                    continue
                covered = Covered(store, task.backend)
                accelerator.bounded(backends()[task.backend].device, settings.memory)
                for event in done(task, settings, writer, note, groups, covered):
                    pipe.send(event)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the supervisor is done with us
    except StoreError as error:
        pipe.send(Failed(str(error), usage=True))
    except DeviceFailure as failure:
        sys.stderr.write(f"{failure}\n{failure.frames}\n")
        pipe.send(failure)
        os._exit(1)  # an ordinary end would wait for the device
    except Exception:
        import traceback

        pipe.send(Failed(traceback.format_exc()))


def _redirect(path: Path) -> None:
    """Redirect the output of libraries (MKL about a NaN, C++ warnings) from the terminal to a file.

    A fork's `sys.stdout` may capture the output of a user's test. A fatal signal writes a traceback
    to the file.
    """
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(sys.stderr)
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR1, sys.stderr)


def _told(task: Task, settings: Settings, note: Note, entered: Any) -> Finished:
    """Run a case that killed two processes, and report each kernel that it enters."""
    with told(entered):
        for _ in explore(task, replace(settings, minimize=0), began=note.began, seen=note.seen):
            pass
    return Finished(task, EndRecord(task.backend, task.family, 0, 0.0))


def done(
    task: Task,
    settings: Settings,
    writer: Writer,
    note: Note,
    groups: Groups,
    covered: Covered,
) -> Iterator[Event]:
    """Do a task: yield its events, and write its records."""
    start = time.monotonic()
    cases = 0
    noted: list[NoteRecord] = []
    events = explore(
        task, settings, began=note.began, seen=note.seen, groups=groups, covered=covered.note
    )
    for event in events:
        if isinstance(event, CaseRecord):
            note.judged(writer.path)
            writer.write(event)
            note.rested()
            cases += 1
            reached = frozenset(k.overload for k in event.kernels)
            anew = event.groups if event.outcome in ("backend", "diverged") else ()
            yield Progress(
                *(task.backend, task.family, event.outcome, anew, reached),
                notes=event.notes,
                noted=tuple(noted),
            )
            noted.clear()
        elif isinstance(event, NoteRecord):
            writer.write(event)
            noted.append(event)
        elif isinstance(event, Finding):
            writer.write(event.record)
            yield event
        else:
            yield event
    took, planned = round(time.monotonic() - start, 3), task.due
    early = cases < planned and late(task, settings) >= 0
    reason: Literal["done", "stopped"] = "stopped" if early else "done"
    end = EndRecord(task.backend, task.family, cases, took, reason, planned)
    writer.write(end)
    covered.write()
    yield Finished(task, end, groups)
