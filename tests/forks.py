"""Processes for tests that are forks of one that has imported torch and all of ``amp_fuzz``.

Importing is most of what a short command costs, in its own process and in each that it starts. A
fork server (`multiprocessing.forkserver`) does it once a test session. What users run is spawned:
tests of starting, interrupting and of the first run of a store take `subprocess`.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import forkserver, popen_forkserver, process, reduction
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

__all__ = ["Done", "Forked", "fork_devices", "fork_workers", "forked"]

# Modules of what is installed alone: the server is started in any folder. `torch._dynamo` is what
# torch imports at the first checkpoint, optimizer step or custom op.
PRELOADED = [
    *("torch", "torch._dynamo", "pandas", "jinja2", "rich.table", "hypothesis"),
    *(
        "amp_fuzz.runs.audit",
        "amp_fuzz.interfaces.cli",
        "amp_fuzz.findings.explanation",
        "amp_fuzz.findings.recheck",
        "amp_fuzz.interfaces.precision.page",
    ),
    *("amp_fuzz.interfaces.plugin.session", "amp_fuzz.reports.html", "amp_fuzz.reports.markdown"),
    *("amp_fuzz.runs.setup", "amp_fuzz.findings.supervision.supervisor", "amp_fuzz.runs.workers"),
]


@dataclass(frozen=True, slots=True)
class Done:
    """What came of a command."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line on stderr; the test fails if there is another, or a traceback."""
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        return lines[0]


class Forked(ForkServerProcess):
    """A process that a fork starts: its environment, its outputs and its end are as if spawned."""

    def __getstate__(self) -> dict[str, Any]:
        outputs = tuple(map(reduction.DupFd, (1, 2)))
        return {**self.__dict__, "_environment": dict(os.environ), "_outputs": outputs}

    def run(self) -> None:
        _become(self._environment, [file.detach() for file in self._outputs])
        try:
            self.main()
        finally:
            atexit._run_exitfuncs()

    def main(self) -> None:
        """Do what the process is for."""
        super().run()


class _Context(ForkServerContext):
    Process = Forked


def _become(environment: dict[str, str], outputs: list[int]) -> None:
    for number, file in enumerate(outputs, start=1):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)


def _begin(
    entry: Callable[[list[str]], int],
    arguments: list[str],
    folder: str,
    environment: dict[str, str],
    files: list[str],
    limit: int,
) -> None:
    """Turn a fork of the server into a process that has just been started in a folder."""
    os.setsid()
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    _become(environment, [os.open(file, flags, 0o600) for file in files])
    os.chdir(folder)
    process.ORIGINAL_DIR = folder
    found = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:0] = ["", *found]
    sys.argv[:] = ["-c", *arguments]
    if limit:  # the server's files would not have it
        import resource

        sys.dont_write_bytecode = True  # Python would cut the bytecode of what it imports, for all
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    else:
        _fork_workers()
    try:
        code = entry(arguments)
        sys.stdout.flush()
    finally:
        atexit._run_exitfuncs()
    sys.exit(code)


def _fork_workers() -> None:
    """Have this process take its workers from the server that it came from."""
    # The server is no child of this process, which could ask it whether it runs.
    forkserver._forkserver.ensure_running = lambda: None
    fork_workers(setattr)
    fork_devices(setattr)


def fork_workers(replace: Callable[[Any, str, Any], object]) -> None:
    """Have the workers of an audit be forks of the server; those of a run fork this process.

    replace: `setattr`, or what undoes it at the end of a test.
    """
    from amp_fuzz.runs import audit

    context = _Context()
    context.set_forkserver_preload(PRELOADED)
    replace(audit, "_SPAWN", context)


class _Device(Forked):
    """The process of a device (`amp_fuzz.backends.process`): it imports JAX itself, if at all."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor: Any = descriptor

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_descriptor": reduction.DupFd(self._descriptor)}

    def main(self) -> None:
        from amp_fuzz.backends.process import serve

        serve(self._descriptor.detach(), os.getppid())


def fork_devices(replace: Callable[[Any, str, Any], object]) -> None:
    """Have the processes of devices be forks of the server.

    A fork of this process cannot start a server for all: without one it starts a new process.

    replace: as for `fork_workers`.
    """
    from amp_fuzz.backends import process as devices

    started, owner, server = devices._started, os.getpid(), forkserver._forkserver

    def start(descriptor: int) -> Any:
        if os.getpid() != owner:
            if server._forkserver_pid is None and server._forkserver_address is None:
                return started(descriptor)
            server.ensure_running = lambda: None
        server.set_forkserver_preload(PRELOADED)
        # Not `Process.start`: daemonic processes have devices, too.
        return popen_forkserver.Popen(_Device(descriptor))

    replace(devices, "_started", start)


def forked(
    entry: Callable[[list[str]], int],
    arguments: tuple[str, ...],
    *,
    folder: Path,
    environment: dict[str, str],
    files: Path,
    limit: int = 0,
    seconds: float = 600,
) -> Done:
    """Run ``entry(arguments)`` in a fork, and return its exit code and what it wrote.

    files: a folder for its outputs. limit: on the size of a file that it writes, in bytes. It is
    killed, with its session, after so many seconds.
    """
    context = ForkServerContext()
    context.set_forkserver_preload(PRELOADED)
    outputs = [str(files / name) for name in ("out", "err")]
    told = (entry, list(arguments), str(folder), environment, outputs, limit)
    started = context.Process(target=_begin, args=told)
    started.start()
    started.join(seconds)
    if started.exitcode is None:
        assert started.pid is not None
        os.killpg(started.pid, signal.SIGKILL)
        started.join()
    assert started.exitcode is not None
    return Done(started.exitcode, *(Path(file).read_text() for file in outputs))
